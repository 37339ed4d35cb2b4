//! Engines that find each other at a metadata server: names, registrations, and a server that fails.

mod common;

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use common::{
    LONG, address, contents, is_emulated, pattern, private, request, shared, wait_for_first_bytes,
};
use millstream_lab::Stopwatch;
use millstream_metadata::{
    KeyValue, KeyValueError, KeyValueErrorKind, KeyValueStore, KeyValueStoreConfig, SegmentDesc,
    StoreError,
};
use millstream_transfer::{
    Config, FailureReason, FileOptions, InstallError, Notification, NvmeofConfig, Opcode,
    RdmaConfig, RegisterError, SegmentError, SegmentId, SubmitOptions, TcpConfig, TransferEngine,
    TransferRequest,
};

/// A metadata server in this process.
#[derive(Clone, Debug, Default)]
struct MapServer {
    shared: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<String, Vec<u8>>,
    is_down: bool,
    /// Puts wait as long as this is so.
    holds_puts: bool,
    waiting: usize,
    /// And these.
    holds_gets: bool,
    holds_removes: bool,
    /// Removes that wait.
    removing: usize,
    puts: usize,
}

impl MapServer {
    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.shared.1.notify_all();
    }

    fn wait(&self, so: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let waited = self.shared.1.wait_timeout_while(self.state(), LONG, |state| !so(state));
        let (state, timeout) = waited.unwrap();
        assert!(!timeout.timed_out(), "{state:?}");
        state
    }

    fn segment(&self, name: &str) -> SegmentDesc {
        let state = self.state();
        SegmentDesc::from_json(&state.entries[&format!("mooncake/ram/{name}")]).unwrap()
    }

    fn check(&self, state: &State, key: &str) -> Result<(), KeyValueError> {
        let kind = KeyValueErrorKind::Unreachable("it is down".to_owned());
        let error = KeyValueError { uri: self.uri().to_owned(), key: key.to_owned(), kind };
        if state.is_down { Err(error) } else { Ok(()) }
    }

    /// A store of it that does not try for long.
    fn store(&self) -> Arc<KeyValueStore<Self>> {
        let patience = Duration::from_millis(100);
        let refresh_interval = Duration::from_millis(50);
        let config = KeyValueStoreConfig { patience, refresh_interval, ..Default::default() };
        Arc::new(KeyValueStore::new(self.clone(), config))
    }

    fn engine(&self, name: &str) -> TransferEngine {
        let config = Config { segment_name: Some(name.to_owned()), ..Config::new(address()) };
        TransferEngine::with_store(config, self.store()).unwrap()
    }
}

impl KeyValue for MapServer {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, KeyValueError> {
        let state = self.wait(|state| !state.holds_gets);
        self.check(&state, key)?;
        Ok(state.entries.get(key).cloned())
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KeyValueError> {
        self.change(|state| state.waiting += 1);
        let mut state = self.wait(|state| !state.holds_puts);
        state.waiting -= 1;
        self.check(&state, key)?;
        state.puts += 1;
        state.entries.insert(key.to_owned(), value.to_vec());
        drop(state);
        self.shared.1.notify_all();
        Ok(())
    }

    fn refresh(&self, key: &str) -> Result<bool, KeyValueError> {
        Ok(self.get(key)?.is_some())
    }

    fn remove(&self, key: &str) -> Result<(), KeyValueError> {
        self.change(|state| state.removing += 1);
        let mut state = self.wait(|state| !state.holds_removes);
        state.removing -= 1;
        self.check(&state, key)?;
        state.entries.remove(key);
        Ok(())
    }

    fn limit(&self) -> usize {
        20_000
    }

    fn uri(&self) -> &str {
        "map://here"
    }
}

#[test]
fn engines_with_names_move_bytes_and_messages() {
    let server = MapServer::default();
    let (target, initiator) = pair(&server);
    assert_eq!((target.name(), initiator.name()), ("node-a", "node-b"));
    let theirs = shared(&target, 1 << 20);
    let ours = private(&initiator, 1 << 20);
    let bytes = pattern(1 << 20, 1);
    ours.write(0, &bytes).unwrap();
    let segment = initiator.open_segment("node-a").unwrap();
    let write = request(Opcode::Write, (&ours, 0), &segment, 0, 1 << 20);
    assert_eq!(initiator.submit_and_wait(&[write], LONG).unwrap(), 1 << 20);
    assert_eq!(contents(&theirs, 0, 1 << 20), bytes);
    // While the server is down, what is connected stays so.
    server.change(|state| state.is_down = true);
    assert_eq!(initiator.submit_and_wait(&[write], LONG).unwrap(), 1 << 20);
    initiator.probe("node-a").unwrap();
    let message = Notification { name: "n".to_owned(), text: "t".to_owned() };
    initiator.notify(segment.id(), &message).unwrap();
    assert_eq!(target.take_notifications(), [message]);
    server.change(|state| state.is_down = false);
    drop(initiator);
    drop(target);
    assert!(server.state().entries.is_empty(), "{:?}", server.state());
}

#[test]
fn a_target_that_closes_tells_initiators_whose_names_are_no_addresses() {
    const LENGTH: usize = 4 << 20;
    let names: [fn(&mut Config); 3] = [
        |config| config.segment_name = Some("node-b".to_owned()),
        |config| config.host = Some("localhost".to_owned()),
        // It answers where its calls come from.
        |config| {
            config.host = Some("localhost".to_owned());
            config.listen = (Ipv4Addr::UNSPECIFIED, 0).into();
        },
    ];
    for (index, name) in names.into_iter().enumerate() {
        let server = MapServer::default();
        let target = server.engine("node-a");
        target.install_rdma(RdmaConfig::new(&[target.listening_at().ip()])).unwrap();
        let _theirs = shared(&target, LENGTH);
        let device = address();
        let mut config = Config::new(device);
        name(&mut config);
        let initiator = TransferEngine::with_store(config, server.store()).unwrap();
        initiator.install_rdma(RdmaConfig::new(&[device])).unwrap();
        let ours = private(&initiator, LENGTH);
        let segment = initiator.open_segment("node-a").unwrap();
        let write = request(Opcode::Write, (&ours, 0), &segment, 0, LENGTH as u64);
        let batch = initiator.allocate_batch(64).unwrap();
        initiator.submit(&batch, &[write; 64]).unwrap();
        wait_for_first_bytes(&initiator, &batch);
        let stopwatch = Stopwatch::start();
        drop(target);
        assert!(initiator.wait(&batch, LONG));
        let took = stopwatch.took();
        let error = initiator.status(&batch, 63).unwrap().error.unwrap();
        println!("{}: {took}, {error}", initiator.name());
        assert!(matches!(error.reason, FailureReason::Closed), "{index}: {error}");
        let limit = Duration::from_millis(if is_emulated() { 1000 } else { 200 });
        assert!(took.own() < limit, "{index}: {took}");
    }
}

/// Two engines with a device each.
fn pair(server: &MapServer) -> (TransferEngine, TransferEngine) {
    let (target, initiator) = (server.engine("node-a"), server.engine("node-b"));
    for engine in [&target, &initiator] {
        engine.install_rdma(RdmaConfig::new(&[engine.listening_at().ip()])).unwrap();
    }
    (target, initiator)
}

/// It accepts what it is asked, and never answers.
#[test]
fn fences_and_messages_wait_for_no_metadata_server() {
    const LENGTH: usize = 4 << 20;
    let server = MapServer::default();
    let (target, initiator) = pair(&server);
    let _theirs = shared(&target, LENGTH);
    let ours = private(&initiator, LENGTH);
    let segment = initiator.open_segment("node-a").unwrap();
    let write = request(Opcode::Write, (&ours, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    server.change(|state| state.holds_gets = true);
    let batch = initiator.allocate_batch(64).unwrap();
    initiator.submit(&batch, &[write; 64]).unwrap();
    wait_for_first_bytes(&initiator, &batch);
    let canceled = (0..64).filter(|&index| initiator.cancel(&batch, index).unwrap()).count();
    assert!(canceled > 0);
    assert!(initiator.wait(&batch, LONG));
    for status in initiator.statuses(&batch) {
        assert!(!status.target_undefined, "the target has confirmed it: {status:?}");
    }
    let message = Notification { name: "n".to_owned(), text: "t".to_owned() };
    let options = SubmitOptions { notify: Some(message.clone()), ..SubmitOptions::default() };
    let batch = initiator.submit_new(&[write], &options).unwrap();
    assert!(initiator.wait(&batch, LONG));
    let mut came = Vec::new();
    let stopwatch = Stopwatch::start();
    while came.is_empty() && stopwatch.took().own() < LONG {
        came = target.take_notifications();
        thread::yield_now();
    }
    assert_eq!(came, [message]);
    server.change(|state| state.holds_gets = false);
}

/// The address of the target was never asked for: data goes over TCP.
#[test]
fn a_message_to_who_is_not_known_yet_holds_up_no_transfer() {
    let server = MapServer::default();
    let (target, initiator) = (server.engine("node-a"), server.engine("node-b"));
    for engine in [&target, &initiator] {
        engine.install_tcp(TcpConfig::default()).unwrap();
    }
    let _theirs = shared(&target, 100);
    let ours = private(&initiator, 100);
    let segment = initiator.open_segment("node-a").unwrap();
    server.change(|state| state.holds_gets = true);
    let write = request(Opcode::Write, (&ours, 0), &segment, 0, 100);
    let message = Notification { name: "n".to_owned(), text: "t".to_owned() };
    let options = SubmitOptions { notify: Some(message.clone()), ..SubmitOptions::default() };
    let batch = initiator.submit_new(&[write], &options).unwrap();
    assert!(initiator.wait(&batch, LONG));
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert!(target.take_notifications().is_empty());
    server.change(|state| state.holds_gets = false);
    // It arrives before the end.
    drop(initiator);
    assert_eq!(target.take_notifications(), [message]);
}

/// Its entries cannot be taken back: that the server is silent changes nothing of what its peers may do.
#[test]
fn what_peers_have_begun_is_over_before_a_target_is_not_there_any_more() {
    let server = MapServer::default();
    let (target, initiator) = pair(&server);
    let theirs = shared(&target, 100);
    let ours = private(&initiator, 100);
    let segment = initiator.open_segment("node-a").unwrap();
    let write = request(Opcode::Write, (&ours, 0), &segment, 0, 100);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    server.change(|state| state.holds_removes = true);
    let ending = thread::spawn(move || drop(target));
    drop(server.wait(|state| state.removing > 0));
    ours.write(0, &[9; 100]).unwrap();
    initiator.submit_and_wait(&[write], LONG).unwrap_err();
    assert_eq!(contents(&theirs, 0, 100), [0; 100]);
    server.change(|state| state.holds_removes = false);
    ending.join().unwrap();
}

#[test]
fn a_file_is_found_by_whoever_asks_the_server() {
    let server = MapServer::default();
    let (target, initiator) = (server.engine("node-a"), server.engine("node-b"));
    for engine in [&target, &initiator] {
        engine.install_nvmeof(NvmeofConfig::default()).unwrap();
    }
    let path = std::env::temp_dir().join(format!("millstream-stores-{}", std::process::id()));
    std::fs::write(&path, pattern(5000, 1)).unwrap();
    let options = FileOptions { name: Some("f".to_owned()), ..FileOptions::default() };
    let name = target.register_file(&path, options).unwrap();
    assert_eq!(name, format!("nvmeof/{}/f", target.listening_at()));
    let segment = initiator.open_segment(&name).unwrap();
    let ours = private(&initiator, 5000);
    let read = request(Opcode::Read, (&ours, 0), &segment, 0, 5000);
    let result = initiator.submit_and_wait(&[read], LONG);
    let left = FileOptions { name: Some("left".to_owned()), ..FileOptions::default() };
    let left = target.register_file(&path, left).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(result.unwrap(), 5000);
    assert_eq!(contents(&ours, 0, 5000), pattern(5000, 1));
    target.unregister_file(&name).unwrap();
    let has = |name: &str| server.state().entries.contains_key(&format!("mooncake/{name}"));
    assert!(!has(&name) && has(&left));
    // An engine that ends takes back those that are left.
    drop(target);
    assert!(!has(&left));
}

#[test]
fn a_name_is_free_again_when_its_engine_has_ended_and_not_before() {
    let server = MapServer::default();
    let first = server.engine("node-a");
    let config = Config { segment_name: Some("node-a".to_owned()), ..Config::new(address()) };
    let error = TransferEngine::with_store(config, server.store()).unwrap_err().to_string();
    let expected = format!(
        "segment name \"node-a\" is taken: map://here has it for the engine at {}",
        first.listening_at()
    );
    assert!(error.starts_with(&expected), "{error}");
    // As after a crash: nobody has taken it back.
    let entries = server.state().entries.clone();
    drop(first);
    server.change(|state| state.entries = entries);
    let second = server.engine("node-a");
    assert_eq!(server.segment("node-a").buffers.len(), 0);
    let found = second.open_segment("node-a").unwrap();
    assert_eq!(found.id(), millstream_transfer::SegmentId::LOCAL);
}

/// As a process has it that ends by a signal, while others of its threads go on.
#[test]
fn an_engine_that_is_withdrawn_stays_so() {
    let server = MapServer::default();
    let engine = server.engine("node-a");
    let buffer = shared(&engine, 4096);
    assert_eq!(server.state().entries.len(), 2);
    engine.withdrawal().withdraw();
    assert!(server.state().entries.is_empty(), "{:?}", server.state());
    // Whatever would put them there again, the thread that looks after entries too.
    drop(buffer);
    let _buffer = shared(&engine, 4096);
    engine.install_tcp(TcpConfig::default()).unwrap();
    thread::sleep(Duration::from_millis(200));
    assert!(server.state().entries.is_empty(), "{:?}", server.state());
}

/// As a process has it that a signal ends while a thread of it drops the engine.
#[test]
fn who_withdraws_an_engine_that_is_being_dropped_returns_once_its_entries_are_gone() {
    let server = MapServer::default();
    let engine = server.engine("node-a");
    let withdrawal = engine.withdrawal();
    server.change(|state| state.holds_removes = true);
    thread::scope(|scope| {
        let dropped = scope.spawn(move || drop(engine));
        drop(server.wait(|state| state.removing > 0));
        assert!(!withdrawal.is_over(), "it would return at once");
        let withdrawn = scope.spawn(|| {
            withdrawal.withdraw();
            assert!(server.state().entries.is_empty(), "{:?}", server.state());
        });
        server.change(|state| state.holds_removes = false);
        dropped.join().unwrap();
        withdrawn.join().unwrap();
    });
    assert!(withdrawal.is_over());
    withdrawal.withdraw();
}

#[test]
fn registrations_at_the_same_time_share_a_put() {
    const THREADS: usize = 16;
    let server = MapServer::default();
    let engine = server.engine("node-a");
    let before = server.state().puts;
    server.change(|state| state.holds_puts = true);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    let buffer = shared(&engine, 4096);
                    let has = |it: &millstream_metadata::BufferDesc| it.addr == buffer.address();
                    assert!(server.segment("node-a").buffers.iter().any(has), "not published yet");
                    buffer
                })
            })
            .collect();
        drop(server.wait(|state| state.waiting > 0));
        // All of them have registered, and wait for the server.
        let deadline = Instant::now() + LONG;
        while engine.open_segment("node-a").unwrap().buffers().len() < THREADS {
            assert!(Instant::now() < deadline);
            thread::yield_now();
        }
        server.change(|state| state.holds_puts = false);
        let buffers: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(server.segment("node-a").buffers.len(), THREADS);
        let puts = server.state().puts - before;
        assert!(puts <= 3, "{puts} puts");
        drop(buffers);
    });
}

/// Who unregisters memory that another thread unregisters, or drops a buffer of it, may give it back to the system next:
/// peers are shown it until then.
#[test]
fn memory_that_another_thread_unregisters_is_free_only_when_that_has() {
    let server = MapServer::default();
    let engine = server.engine("node-a");
    let buffer = shared(&engine, 4096);
    let address = buffer.address() as usize;
    let unregister = || engine.unregister_memory(std::ptr::without_provenance_mut(address));
    server.change(|state| state.holds_puts = true);
    thread::scope(|scope| {
        let first = scope.spawn(unregister);
        drop(server.wait(|state| state.waiting > 0));
        let (tell, told) = channel();
        let tell_too = tell.clone();
        let second = scope.spawn(move || {
            let unregistered = unregister();
            let _ = tell.send(());
            unregistered
        });
        scope.spawn(move || {
            drop(buffer);
            let _ = tell_too.send(());
        });
        let early = told.recv_timeout(Duration::from_millis(100));
        server.change(|state| state.holds_puts = false);
        assert_eq!(early, Err(RecvTimeoutError::Timeout), "it is still registered");
        first.join().unwrap().unwrap();
        assert_eq!(second.join().unwrap().unwrap_err().code(), -3);
    });
    assert!(server.segment("node-a").buffers.is_empty());
}

#[test]
fn a_registration_that_cannot_be_published_is_undone() {
    let server = MapServer::default();
    let engine = server.engine("node-a");
    let kept = shared(&engine, 4096);
    server.change(|state| state.is_down = true);
    let error = engine.allocate_buffer(4096, "*", true).unwrap_err();
    let RegisterError::Publish(ref cause) = error else { panic!("{error}") };
    assert!(cause.is_transient());
    assert!(error.to_string().contains("map://here"), "{error}");
    // Nobody else is disturbed.
    let own = engine.open_segment("node-a").unwrap();
    let local = private(&engine, 4096);
    let write = request(Opcode::Write, (&local, 0), &own, 0, 4096);
    assert_eq!(engine.submit_and_wait(&[write], LONG).unwrap(), 4096);
    assert_eq!(own.buffers().len(), 1);
    server.change(|state| state.is_down = false);
    let more = shared(&engine, 4096);
    assert_eq!(server.segment("node-a").buffers.len(), 2);
    // What was unregistered while it was down goes later.
    server.change(|state| state.is_down = true);
    drop(more);
    server.change(|state| state.is_down = false);
    let is_one = |text: &Vec<u8>| SegmentDesc::from_json(text).unwrap().buffers.len() == 1;
    drop(server.wait(|state| is_one(&state.entries["mooncake/ram/node-a"])));
    drop(kept);
}

#[test]
fn a_descriptor_that_is_too_long_for_the_server_is_refused_in_time() {
    let server = MapServer::default();
    let engine = server.engine("node-a");
    let mut buffers = Vec::new();
    let error = loop {
        match engine.allocate_buffer(4096, "*", true) {
            Ok(buffer) => buffers.push(buffer),
            Err(error) => break error,
        }
    };
    let RegisterError::Publish(StoreError::TooLong { name, length, limit: 20_000 }) = error else {
        panic!("{error}")
    };
    assert!(name == "node-a" && length > 20_000);
    buffers.pop();
    buffers.push(shared(&engine, 4096));
}

#[test]
fn names_that_are_not_there_and_names_that_are_none() {
    let server = MapServer::default();
    let engine = server.engine("node-a");
    let error = engine.open_segment("node-z").unwrap_err();
    assert!(matches!(error, SegmentError::Store { error: StoreError::NotFound { .. }, .. }));
    assert!(error.to_string().contains("there is no segment \"node-z\" in map://here"), "{error}");
    assert!(engine.open_segment("a b").is_err());
    let config = Config { segment_name: Some("a/b".to_owned()), ..Config::new(address()) };
    assert!(TransferEngine::with_store(config, server.store()).is_err());
    // Without a name of its own it is called by its address.
    let engine = TransferEngine::with_store(Config::new(address()), server.store()).unwrap();
    assert_eq!(engine.name(), engine.listening_at().to_string());
}

/// The server was down when a transport was installed: it is not, and can be once the server is there.
#[test]
fn a_transport_that_cannot_be_published_is_not_installed() {
    let server = MapServer::default();
    let engine = server.engine("a");
    let failed = |install: &dyn Fn() -> Result<(), InstallError>| {
        server.change(|state| state.is_down = true);
        let error = install().unwrap_err().to_string();
        assert!(error.contains("it is down"), "{error}");
        server.change(|state| state.is_down = false);
        install().unwrap();
    };
    failed(&|| engine.install_rdma(RdmaConfig::new(&[address()])));
    failed(&|| engine.install_shm());
    failed(&|| engine.install_tcp(TcpConfig::default()));
    // All of them work: one of another process is read over `tcp` alone.
    let (other, descriptor) = (server.engine("b"), server.segment("a"));
    assert_eq!(descriptor.devices.len(), 1);
    other.install_tcp(TcpConfig::default()).unwrap();
    let (remote, local) = (shared(&engine, 4096), private(&other, 4096));
    remote.write(0, &pattern(4096, 1)).unwrap();
    let segment = other.open_segment("a").unwrap();
    other.submit_and_wait(&[request(Opcode::Read, (&local, 0), &segment, 0, 4096)], LONG).unwrap();
    assert!(contents(&local, 0, 4096) == pattern(4096, 1));
    // And so does what was there before: threads copy what is so long.
    let own = shared(&engine, 2 << 20);
    let copy = TransferRequest {
        opcode: Opcode::Write,
        source: own.address(),
        target: SegmentId::LOCAL,
        target_offset: own.address() + (1 << 20),
        length: 1 << 20,
    };
    assert_eq!(engine.submit_and_wait(&[copy], LONG).unwrap(), 1 << 20);
}
