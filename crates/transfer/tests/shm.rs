//! The transport `shm` between two processes, and between two engines of one.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::node::{Process, say, sum};
use common::{LONG, address, contents, pattern, private, request, shared};
use millstream_lab::Stopwatch;
use millstream_transfer::{
    Batch, Config, FailureReason, Opcode, Policy, RdmaConfig, RegisterError, Segment,
    SubmitOptions, TcpConfig, TransferEngine, TransferRequest, TransferState,
};

/// Set in processes that this test starts.
const ROLE: &str = "MILLSTREAM_TEST_ROLE";
const LENGTH: usize = 4 << 20;

fn shm_engine() -> TransferEngine {
    let engine = TransferEngine::new(common::config(address())).unwrap();
    engine.install_shm().unwrap();
    engine
}

/// An engine that goes on over TCP.
fn tent_engine() -> TransferEngine {
    let config = Config { policy: Policy::Tent, ..Config::new(address()) };
    let engine = TransferEngine::new(config).unwrap();
    engine.install_shm().unwrap();
    engine.install_tcp(TcpConfig::default()).unwrap();
    engine
}

/// A process with an engine and a buffer.
fn node(role: &str) -> Process {
    Process::start("a_role", ROLE, role)
}

/// What processes started by other tests do. As a test of its own, nothing.
#[test]
fn a_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    if role == "hangs up" {
        return hang_up();
    }
    if let Some(role) = role.strip_prefix("refused ") {
        return refused(role);
    }
    let engine = shm_engine();
    if let Some(target) = role.strip_prefix("write ") {
        // As long as it may.
        let local = private(&engine, LENGTH);
        let segment = engine.open_segment(target).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
        for round in 0.. {
            if engine.submit_and_wait(&[write], LONG).is_err() {
                break;
            }
            if round == 0 {
                say("writing");
            }
        }
        std::process::exit(0);
    }
    let mut buffer = Some(shared(&engine, LENGTH));
    let more = if role == "many buffers" { 100 } else { 0 };
    let _more: Vec<_> = (0..more).map(|_| shared(&engine, 4096)).collect();
    say(engine.name());
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "sum" => {
                let bytes = contents(buffer.as_ref().unwrap(), 0, LENGTH);
                say(sum(&bytes));
            }
            "drop" => {
                buffer = None;
                say("dropped");
            }
            line => unreachable!("{line}"),
        }
    }
    std::process::exit(0);
}

fn open(engine: &TransferEngine, node: &Process) -> Segment {
    engine.open_segment(&node.name).unwrap()
}

/// Requests of all sizes: copied at once, queued, in one piece and in many.
#[test]
fn bytes_arrive_in_another_process_and_come_back() {
    let mut node = self::node("node");
    let engine = shm_engine();
    let segment = open(&engine, &node);
    assert_eq!(segment.protocol(), "shm");
    let local = private(&engine, LENGTH);
    let bytes = pattern(LENGTH, 3);
    for pieces in [1_usize, 3, 64, 1000] {
        local.write(0, &bytes).unwrap();
        let requests = |opcode| -> Vec<TransferRequest> {
            let cut = |index: usize| (LENGTH * index / pieces) as u64;
            (0..pieces)
                .map(|index| {
                    let (start, end) = (cut(index), cut(index + 1));
                    request(opcode, (&local, start), &segment, start, end - start)
                })
                .collect()
        };
        let moved = engine.submit_and_wait(&requests(Opcode::Write), LONG).unwrap();
        assert_eq!(moved, LENGTH as u64);
        assert_eq!(node.sum(), sum(&bytes), "{pieces}");
        local.write(0, &vec![0; LENGTH]).unwrap();
        engine.submit_and_wait(&requests(Opcode::Read), LONG).unwrap();
        assert!(contents(&local, 0, LENGTH) == bytes, "{pieces}");
    }
}

#[test]
fn bad_requests_have_the_codes_of_other_transports() {
    let node = self::node("node");
    let engine = shm_engine();
    let segment = open(&engine, &node);
    let local = private(&engine, 4096);
    let good = request(Opcode::Write, (&local, 0), &segment, 0, 4096);
    for (bad, code) in [
        (TransferRequest { length: 0, ..good }, -1),
        (TransferRequest { length: 4097, ..good }, -3),
        (TransferRequest { source: 4096, ..good }, -3),
        (TransferRequest { target_offset: good.target_offset + LENGTH as u64, ..good }, -1),
        (TransferRequest { target_offset: good.target_offset - 1, ..good }, -1),
    ] {
        assert_eq!(engine.submit_and_wait(&[bad], LONG).unwrap_err().code(), code, "{bad:?}");
    }
    engine.submit_and_wait(&[good], LONG).unwrap();
}

fn submit(engine: &TransferEngine, requests: &[TransferRequest]) -> Batch {
    let batch = engine.allocate_batch(requests.len()).unwrap();
    engine.submit(&batch, requests).unwrap();
    batch
}

#[test]
fn tasks_of_a_process_that_is_killed_fail_within_a_second() {
    let mut node = self::node("node");
    let engine = shm_engine();
    let segment = open(&engine, &node);
    let local = private(&engine, LENGTH);
    let all = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    // So much that it is not done at once, on any machine.
    let batch = submit(&engine, &vec![all; 2000]);
    node.kill();
    let killed = Stopwatch::start();
    assert!(engine.wait(&batch, LONG));
    let took = killed.took();
    assert!(took.own() < Duration::from_secs(1), "{took}");
    let last = engine.statuses(&batch).pop().unwrap();
    assert_eq!(last.state, TransferState::Failed);
    let error = last.error.unwrap();
    assert!(matches!(error.reason, FailureReason::ProcessEnded), "{error}");
    assert_eq!(&*error.nic, "shm");
    // Small ones are not told to have arrived either.
    let error = engine.submit_and_wait(&[TransferRequest { length: 1, ..all }], LONG).unwrap_err();
    assert_ne!(error.code(), 0, "{error}");
}

/// It has more buffers than are mapped when its segment is opened, and does not say where the others are.
#[test]
fn a_process_that_is_stopped_is_not_waited_for_by_each_request_nor_by_others() {
    let (stopped, other) = (node("many buffers"), node("node"));
    let engine = shm_engine();
    let local = private(&engine, LENGTH);
    let [far, near] = [&stopped, &other].map(|node| open(&engine, node));
    let last = far.buffers().pop().unwrap();
    let ask = TransferRequest {
        opcode: Opcode::Write,
        source: local.address(),
        target: far.id(),
        target_offset: last.address,
        length: 8,
    };
    stopped.signal("STOP");
    let stopwatch = Stopwatch::start();
    let asking: Vec<Batch> = (0..30).map(|_| submit(&engine, &[ask])).collect();
    let write = request(Opcode::Write, (&local, 0), &near, 0, LENGTH as u64);
    let others = submit(&engine, &[write]);
    let timed = engine.allocate_batch(1).unwrap();
    let deadline = Some(Instant::now() + Duration::from_millis(100));
    let options = SubmitOptions { deadline, ..SubmitOptions::default() };
    engine.submit_with(&timed, &[ask], &options).unwrap();
    // Who waits would help.
    while !(others.is_finished() && timed.is_finished()) {
        thread::yield_now();
    }
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_millis(500), "what can be copied or is late waits: {took}");
    assert_eq!(engine.statuses(&others)[0].state, TransferState::Completed);
    assert_eq!(engine.statuses(&timed)[0].state, TransferState::Timeout);
    for batch in asking {
        assert!(engine.wait(&batch, LONG));
        let status = engine.statuses(&batch).pop().unwrap();
        assert_eq!(status.state, TransferState::Failed);
        let error = status.error.unwrap();
        assert!(matches!(error.reason, FailureReason::Access(_)), "{error}");
    }
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_secs(15), "each one has asked: {took}");
}

#[test]
fn memory_that_was_unregistered_is_noticed_and_the_next_descriptor_believed() {
    let mut node = self::node("node");
    let engine = shm_engine();
    let segment = open(&engine, &node);
    let local = private(&engine, 64);
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 64);
    engine.submit_and_wait(&[write], LONG).unwrap();
    assert_eq!(node.ask("drop"), "dropped");
    let error = engine.submit_and_wait(&[write], LONG).unwrap_err();
    assert_eq!(error.code(), -201, "{error}");
    assert!(error.to_string().contains("unregistered"), "{error}");
    let error = engine.submit_and_wait(&[write], LONG).unwrap_err();
    assert_eq!(error.code(), -1, "the new descriptor has no such buffer: {error}");
}

/// Whoever unregisters memory has it for itself then, while peers write to it all the time.
#[test]
fn nothing_is_written_after_unregistration() {
    let (target, initiator) = (shm_engine(), shm_engine());
    let local = private(&initiator, 64 << 10);
    local.write(0, &vec![7; 64 << 10]).unwrap();
    let mut own = vec![0_u8; 256 << 10].into_boxed_slice();
    let (pointer, length) = (own.as_mut_ptr(), own.len());
    let keep = shared(&target, 1);
    for round in 0..100 {
        // Of the engine, and of the user.
        let buffer = (round % 2 == 0).then(|| shared(&target, length));
        let address = buffer.as_ref().map_or(pointer.expose_provenance() as u64, |b| b.address());
        if buffer.is_none() {
            register(&target, pointer, length);
        }
        let segment = initiator.open_segment(target.name()).unwrap();
        initiator.refresh_segment(segment.id()).unwrap();
        let write = TransferRequest {
            opcode: Opcode::Write,
            source: local.address(),
            target: segment.id(),
            target_offset: address,
            length: 64 << 10,
        };
        let begun = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let requests = vec![write; 16];
                while initiator.submit_and_wait(&requests, LONG).is_ok() {
                    begun.store(true, Ordering::Release);
                }
            });
            while !begun.load(Ordering::Acquire) {
                thread::yield_now();
            }
            target
                .unregister_memory(std::ptr::with_exposed_provenance_mut(address as usize))
                .unwrap();
            match &buffer {
                Some(buffer) => buffer.write(0, &vec![0; length]).unwrap(),
                None => clear(pointer, length),
            }
        });
        let left = buffer.as_ref().map_or_else(|| own.to_vec(), |b| contents(b, 0, length));
        assert!(left.iter().all(|&byte| byte == 0), "round {round}");
    }
    drop(keep);
}

#[expect(unsafe_code, reason = "memory that a caller brings")]
fn register(engine: &TransferEngine, pointer: *mut u8, length: usize) {
    // SAFETY: the test unregisters it before it uses it.
    unsafe { engine.register_memory(pointer, length, "*", true).unwrap() }
}

#[expect(unsafe_code, reason = "memory that a caller brings")]
fn clear(pointer: *mut u8, length: usize) {
    // SAFETY: it was unregistered.
    unsafe { pointer.write_bytes(0, length) }
}

#[test]
fn it_goes_before_rdma_and_rdma_where_it_does_not_lead() {
    let both = || {
        let engine = common::engine(1);
        engine.install_shm().unwrap();
        engine
    };
    let (initiator, with_both, rdma_only) = (both(), both(), common::engine(1));
    let names: Vec<_> = initiator.transports().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["local", "shm", "rdma"]);
    let local = private(&initiator, 4096);
    let nics = rdma_only.devices();
    for (target, nic) in [(&with_both, "shm"), (&rdma_only, nics[0].as_str())] {
        let buffer = shared(target, 4096);
        let segment = initiator.open_segment(target.name()).unwrap();
        assert_eq!(segment.protocol(), "rdma", "for peers that know of no shared memory");
        local.write(0, &[5; 4096]).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, 4096);
        initiator.submit_and_wait(&[write], LONG).unwrap();
        assert_eq!(contents(&buffer, 0, 4096), [5; 4096]);
        // The error says which way it went.
        drop(buffer);
        let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
        assert!(error.to_string().contains(&format!("nic {nic})")), "{error}");
    }
}

#[test]
fn what_is_not_shared_is_refused_with_the_reason() {
    let initiator = shm_engine();
    let target = common::engine(1);
    let _buffer = shared(&target, 4096);
    let local = private(&initiator, 4096);
    let segment = initiator.open_segment(target.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 4096);
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err();
    assert_eq!(error.code(), -6);
    assert!(error.to_string().contains("shm: it does not share its memory"), "{error}");
}

#[test]
fn it_is_installed_once_and_also_after_memory() {
    let engine = TransferEngine::new(common::config(address())).unwrap();
    let _buffer = private(&engine, 1);
    engine.install_shm().unwrap();
    assert!(engine.install_shm().unwrap_err().to_string().contains("shm is installed already"));
    engine.install_rdma(RdmaConfig::new(&[address()])).unwrap();
}

/// A peer that is stopped within a copy may go on at any time: until then the memory is not free.
#[test]
fn memory_that_a_stopped_process_accesses_is_not_unregistered() {
    let target = shm_engine();
    for _ in 0..50 {
        let buffer = shared(&target, LENGTH);
        let pointer = std::ptr::with_exposed_provenance_mut(buffer.address() as usize);
        let mut node = self::node(&format!("write {}", target.name()));
        node.signal("STOP");
        let Err(error) = target.unregister_memory(pointer) else {
            // Stopped between two copies.
            continue;
        };
        assert!(matches!(error, RegisterError::InUse { .. }), "{error}");
        assert!(error.to_string().contains(&format!("process {}", node.id())), "{error}");
        // Its addresses are taken, but no descriptor has them.
        assert_eq!(target.open_segment(target.name()).unwrap().buffers(), []);
        node.signal("CONT");
        target.unregister_memory(pointer).unwrap();
        assert_eq!(target.unregister_memory(pointer).unwrap_err().code(), -3);
        node.kill();
        return;
    }
    panic!("never stopped inside");
}

/// Engines that come and go leave nothing behind.
#[test]
fn engines_end_while_others_write() {
    let initiator = Arc::new(shm_engine());
    let local = private(&initiator, 1 << 20);
    for _ in 0..20 {
        let target = shm_engine();
        let buffer = shared(&target, 1 << 20);
        let segment = initiator.open_segment(target.name()).unwrap();
        let write = request(Opcode::Write, (&local, 0), &segment, 0, 1 << 20);
        let batch = submit(&initiator, &[write; 8]);
        drop(target);
        assert!(initiator.wait(&batch, LONG));
        drop(buffer);
        initiator.close_segment(segment.id()).unwrap();
    }
}

/// It was started again, with memory at the same place, and with `shm`.
#[test]
fn a_segment_that_no_transport_reached_is_tried_again() {
    let memory: &'static mut [u8] = Box::leak(vec![0; 4096].into_boxed_slice());
    let place = memory.as_mut_ptr();
    let before = TransferEngine::new(common::config(address())).unwrap();
    register(&before, place, 4096);
    let initiator = shm_engine();
    let local = private(&initiator, 4096);
    let segment = initiator.open_segment(before.name()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 10);
    let listen = before.listening_at();
    drop(before);
    let after = TransferEngine::new(Config { listen, ..common::config(listen.ip()) }).unwrap();
    after.install_shm().unwrap();
    register(&after, place, 4096);
    // What it was told of another process is not taken for this one's.
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err().to_string();
    assert!(error.contains("restarted"), "{error}");
    initiator.submit_and_wait(&[write], LONG).unwrap();
}

/// Has memory that others read and write by the kernel, and ends its connections with them when it is asked to.
fn hang_up() {
    let engine = tent_engine();
    let memory: &'static mut [u8] = Box::leak(vec![0; LENGTH].into_boxed_slice());
    let pointer = memory.as_mut_ptr();
    register(&engine, pointer, LENGTH);
    say(engine.name());
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "hang up" => {
                for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
                    let number = entry.unwrap().file_name().into_string().unwrap();
                    shut_down(number.parse().unwrap());
                }
                say("hung up");
            }
            "sum" => {
                engine.unregister_memory(pointer).unwrap();
                say(sum(memory));
            }
            line => unreachable!("{line}"),
        }
    }
    std::process::exit(0);
}

/// Ends a connection between processes that share memory, if it is one.
#[expect(unsafe_code, reason = "a connection of the engine's own")]
fn shut_down(descriptor: i32) {
    let option = |name| {
        let (mut value, mut length) = (0_i32, size_of::<i32>() as libc::socklen_t);
        let place = (&raw mut value).cast();
        // SAFETY: the option is a number, of which there is room for one.
        let found =
            unsafe { libc::getsockopt(descriptor, libc::SOL_SOCKET, name, place, &raw mut length) };
        (found == 0).then_some(value)
    };
    let domain = option(libc::SO_DOMAIN) == Some(libc::AF_UNIX);
    if domain && option(libc::SO_TYPE) == Some(libc::SOCK_SEQPACKET) {
        // SAFETY: nothing of it is freed by that.
        unsafe { libc::shutdown(descriptor, libc::SHUT_RDWR) };
    }
}

/// Its process lives, but does not share its memory any more: with TENT a batch goes on over TCP.
#[test]
fn a_batch_goes_on_over_tcp_when_its_target_shares_no_memory_any_more() {
    for opcode in [Opcode::Write, Opcode::Read] {
        let (mut node, initiator) = (self::node("hangs up"), tent_engine());
        let local = private(&initiator, LENGTH);
        let bytes = pattern(LENGTH, 9);
        local.write(0, &bytes).unwrap();
        let segment = open(&initiator, &node);
        let all = |opcode| request(opcode, (&local, 0), &segment, 0, LENGTH as u64);
        initiator.submit_and_wait(&[all(Opcode::Write)], LONG).unwrap();
        let moved = || {
            let metrics = initiator.metrics();
            metrics.transports.iter().find(|it| it.transport == "shm").unwrap().requests.moved
        };
        let before = initiator.paths(segment.id()).unwrap();
        assert!(before.iter().any(|it| it.transport == "shm" && it.chosen), "{before:?}");
        let batch = submit(&initiator, &[all(opcode); 64]);
        assert_eq!(node.ask("hang up"), "hung up");
        let more = submit(&initiator, &[all(opcode); 4]);
        for batch in [batch, more] {
            assert!(initiator.wait(&batch, LONG));
            for status in initiator.statuses(&batch) {
                assert_eq!(status.state, TransferState::Completed, "{opcode:?}: {status:?}");
                assert_eq!(status.transferred_bytes, LENGTH as u64, "{opcode:?}: {status:?}");
            }
        }
        println!("{opcode:?}: {} requests went on over tcp", moved());
        assert!(moved() > 0);
        assert!(contents(&local, 0, LENGTH) == bytes);
        assert_eq!(node.sum(), sum(&bytes));
    }
}

/// Copies to and from a target whose memory only the kernel can copy, which refuses that with an error number: from the
/// start, or once the segment is open. Says the reason why `shm` does not lead there, and checks what comes back.
fn refused(role: &str) {
    let [when, number, name] = role.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let number = number.parse().unwrap();
    if when == "first" {
        refuse_copies(number);
    }
    let engine = tent_engine();
    say(engine.name());
    let segment = engine.open_segment(name).unwrap();
    let local = private(&engine, LENGTH);
    let bytes = pattern(LENGTH, 4);
    let all = |opcode| request(opcode, (&local, 0), &segment, 0, LENGTH as u64);
    let path = |name: &str| {
        let paths = engine.paths(segment.id()).unwrap();
        paths.into_iter().find(|it| it.transport == name).unwrap()
    };
    if when == "later" {
        engine.submit_and_wait(&[all(Opcode::Write)], LONG).unwrap();
        assert!(path("shm").chosen, "{:?}", path("shm"));
        refuse_copies(number);
    }
    for opcode in [Opcode::Write, Opcode::Read] {
        local.write(0, if opcode == Opcode::Write { &bytes } else { &[0; LENGTH] }).unwrap();
        let batch = submit(&engine, &[all(opcode); 3]);
        assert!(engine.wait(&batch, LONG));
        for status in engine.statuses(&batch) {
            assert_eq!(status.state, TransferState::Completed, "{opcode:?}: {status:?}");
            assert_eq!(status.transport, Some("tcp"), "{opcode:?}: {status:?}");
        }
    }
    assert!(contents(&local, 0, LENGTH) == bytes);
    assert!(path("tcp").chosen && !path("shm").chosen);
    let reason = path("shm").reason.unwrap();
    // Who insists on it hears the reason.
    engine.require(Some("shm")).unwrap();
    let error = engine.submit_and_wait(&[all(Opcode::Read)], LONG).unwrap_err();
    say(format_args!("{reason}; {error}"));
    let _ = std::io::stdin().read_line(&mut String::new());
    std::process::exit(0);
}

/// From now on the kernel refuses all threads of this process to copy from and to other processes. root is not exempt.
#[expect(unsafe_code, reason = "a filter of this process's own system calls")]
fn refuse_copies(number: u32) {
    use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let is = |call: i64, jt, jf| step(BPF_JMP | BPF_JEQ | BPF_K, jt, jf, call as u32);
    let mut steps = [
        // The number of the call is the first field of seccomp_data.
        step(BPF_LD | BPF_W | BPF_ABS, 0, 0, 0),
        is(libc::SYS_process_vm_readv, 1, 0),
        is(libc::SYS_process_vm_writev, 0, 1),
        step(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | number),
        step(BPF_RET | BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: `program` and its steps outlive the calls, which only read them.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_TSYNC,
                &raw const program,
            ) == 0
    };
    assert!(done, "{}", std::io::Error::last_os_error());
}

/// As in containers, whose filters of system calls refuse process_vm_readv and process_vm_writev.
#[test]
fn where_the_kernel_refuses_to_copy_bytes_go_over_tcp_and_the_reason_is_told() {
    let later = "process_vm_readv: Operation not permitted";
    for (when, number, expected) in [
        ("first", libc::EPERM, "the kernel forbids process_vm_writev on it"),
        ("first", libc::ENOSYS, "process_vm_writev is forbidden here (seccomp?)"),
        ("later", libc::EPERM, later),
    ] {
        let target = tent_engine();
        let mut memory = vec![0_u8; LENGTH].into_boxed_slice();
        let pointer = memory.as_mut_ptr();
        register(&target, pointer, LENGTH);
        let role = format!("refused {when} {number} {}", target.name());
        let mut node = self::node(&role);
        let told = node.hear();
        println!("{when} {number}: {told}");
        assert!(told.contains(expected), "{told}");
        target.unregister_memory(pointer).unwrap();
        assert!(memory[..] == pattern(LENGTH, 4));
    }
}
