//! Atomic operations on a peer's memory.

use std::sync::atomic::{AtomicU64, Ordering};

use millstream_verbs::{
    Access, Atomicity, CompletionOperation, CompletionStatus, MemoryRegion, PostError,
    ProtectionDomain, SendOperation, SendRequest,
};

use crate::harness::{
    ALL_ACCESS, Connection, End, USUAL, connect, is_rxe, next, next_good, not_offered, open, piece,
    register, request, two, two_with,
};

/// 8-byte numbers that outlive their region, and that others may change at any time.
fn counters(values: &[u64]) -> Box<[AtomicU64]> {
    values.iter().map(|&value| AtomicU64::new(value)).collect()
}

fn register_counters(
    domain: &ProtectionDomain,
    counters: &[AtomicU64],
    access: Access,
) -> MemoryRegion {
    let address = counters.as_ptr().cast_mut().cast::<u8>();
    // SAFETY: every test drops the region before the counters, and looks at them only by atomic
    // operations.
    unsafe { domain.register_memory(address, size_of_val(counters), access).unwrap() }
}

fn values(counters: &[AtomicU64]) -> Vec<u64> {
    counters.iter().map(|counter| counter.load(Ordering::SeqCst)).collect()
}

fn fetch_add(region: &MemoryRegion, offset: u64, add: u64) -> SendOperation {
    let remote_address = region.address().wrapping_add(offset);
    SendOperation::FetchAdd { remote_address, remote_key: region.remote_key(), add }
}

fn compare_swap(region: &MemoryRegion, offset: u64, compare: u64, swap: u64) -> SendOperation {
    let remote_address = region.address().wrapping_add(offset);
    SendOperation::CompareSwap { remote_address, remote_key: region.remote_key(), compare, swap }
}

/// Devices without atomic operations say so, at once.
fn offered(end: &End) -> bool {
    if end.device.attributes().atomicity != Atomicity::None {
        return true;
    }
    not_offered(&end.device, "atomic operations");
    let (remote_address, remote_key) = (0, 0);
    let operation = SendOperation::FetchAdd { remote_address, remote_key, add: 1 };
    let mut bytes = vec![0; 8];
    let region = register(end, &mut bytes);
    let refused = end.pair.post_send(&[request(1, operation, piece(&region, 0, 8))]);
    assert_eq!(refused, Err((0, PostError::Unsupported { what: "atomic operations" })));
    false
}

#[test]
fn atomic_operations_change_the_peer_and_return_what_was_there() {
    let [a, b] = two();
    if !offered(&a) {
        return;
    }
    let target = counters(&[5, 100, u64::MAX]);
    let results = counters(&[0; 6]);
    let target_region = register_counters(&b.domain, &target, ALL_ACCESS);
    let result_region = register_counters(&a.domain, &results, Access::LOCAL_WRITE);
    let operations = [
        fetch_add(&target_region, 0, 3),
        compare_swap(&target_region, 0, 8, 0x1122_3344_5566_7788),
        compare_swap(&target_region, 0, 8, 9),
        fetch_add(&target_region, 16, 2),
        compare_swap(&target_region, 8, 100, 0),
        fetch_add(&target_region, 8, u64::MAX),
    ];
    let requests: Vec<_> = operations
        .iter()
        .zip(0..)
        .map(|(&operation, id)| request(id, operation, piece(&result_region, 8 * id as usize, 8)))
        .collect();
    a.pair.post_send(&requests).unwrap();
    let done: Vec<_> = next_good(&a.completions, operations.len())
        .iter()
        .map(|c| (c.id, c.operation, c.length))
        .collect();
    use CompletionOperation::{CompareSwap, FetchAdd};
    let kinds = [FetchAdd, CompareSwap, CompareSwap, FetchAdd, CompareSwap, FetchAdd];
    let expected: Vec<_> = kinds.iter().zip(0..).map(|(&kind, id)| (id, kind, 8)).collect();
    assert_eq!(done, expected);
    drop((target_region, result_region));
    assert_eq!(values(&target), [0x1122_3344_5566_7788, u64::MAX, 1]);
    let original = [5, 8, 0x1122_3344_5566_7788, u64::MAX, 100, 0];
    assert_eq!(values(&results), original);
    assert_eq!(b.completions.poll(&mut Vec::new(), 1), 0);
}

/// Two peers add to one counter at a time. Each value is seen by one of them, once.
#[test]
fn adders_at_the_same_time_lose_nothing() {
    const EACH: u64 = 200;
    let [a, b] = two();
    if !offered(&a) {
        return;
    }
    let completions = b.device.create_completion_queue(16).unwrap();
    let pair = b.domain.create_queue_pair(&completions, &completions, crate::harness::CAPABILITIES);
    let (pair, c) = (pair.unwrap(), open());
    connect((&c.pair, &c.device), (&pair, &b.device), USUAL);
    let target = counters(&[0]);
    let target_region = register_counters(&b.domain, &target, ALL_ACCESS);
    let results = counters(&[u64::MAX; 2 * EACH as usize]);
    let (of_a, of_c) = results.split_at(EACH as usize);
    let regions = [(&a, of_a), (&c, of_c)]
        .map(|(end, results)| register_counters(&end.domain, results, Access::LOCAL_WRITE));
    for start in (0..EACH).step_by(50) {
        for (end, region) in [&a, &c].into_iter().zip(&regions) {
            let requests: Vec<_> = (start..start + 50)
                .map(|id| {
                    let result = piece(region, 8 * id as usize, 8);
                    request(id, fetch_add(&target_region, 0, 1), result)
                })
                .collect();
            end.pair.post_send(&requests).unwrap();
        }
        next_good(&a.completions, 50);
        next_good(&c.completions, 50);
    }
    drop((target_region, regions));
    assert_eq!(values(&target), [2 * EACH]);
    let mut seen = values(&results);
    seen.sort_unstable();
    assert!(seen.iter().copied().eq(0..2 * EACH), "{seen:?}");
}

/// What [`Atomicity::Global`] promises: the program itself may add too, by its own means.
#[test]
fn the_program_may_add_at_the_same_time() {
    const EACH: u64 = 50;
    let [a, b] = two();
    if b.device.attributes().atomicity != Atomicity::Global {
        // The kernel's soft-RoCE promises less: it takes a lock that programs do not know.
        return;
    }
    let target = counters(&[0]);
    let results = counters(&[0; EACH as usize]);
    let target_region = register_counters(&b.domain, &target, ALL_ACCESS);
    let result_region = register_counters(&a.domain, &results, Access::LOCAL_WRITE);
    let requests: Vec<_> = (0..EACH)
        .map(|id| {
            let result = piece(&result_region, 8 * id as usize, 8);
            request(id, fetch_add(&target_region, 0, 1), result)
        })
        .collect();
    a.pair.post_send(&requests).unwrap();
    let mut own = 0;
    let mut done = Vec::new();
    while done.len() < EACH as usize {
        target[0].fetch_add(1 << 32, Ordering::Relaxed);
        own += 1;
        a.completions.poll(&mut done, 1);
    }
    assert!(done.iter().all(|c| c.status == CompletionStatus::Success), "{done:?}");
    drop((target_region, result_region));
    assert_eq!(values(&target), [own << 32 | EACH]);
}

#[test]
fn a_result_has_eight_bytes_and_an_address_is_aligned() {
    let [a, b] = two();
    if !offered(&a) {
        return;
    }
    let (target, results) = (counters(&[7]), counters(&[0; 2]));
    let target_region = register_counters(&b.domain, &target, ALL_ACCESS);
    let result_region = register_counters(&a.domain, &results, Access::LOCAL_WRITE);
    for length in [0, 4, 16] {
        let result = piece(&result_region, 0, length);
        let refused = a.pair.post_send(&[request(1, fetch_add(&target_region, 0, 1), result)]);
        assert_eq!(refused, Err((0, PostError::AtomicLength { length: length as u64 })));
    }
    for offset in [1, 4, 7] {
        let address = target_region.address() + offset;
        for operation in
            [fetch_add(&target_region, offset, 1), compare_swap(&target_region, offset, 7, 1)]
        {
            let refused = a.pair.post_send(&[request(1, operation, piece(&result_region, 0, 8))]);
            assert_eq!(refused, Err((0, PostError::AtomicAlignment { address })));
        }
    }
    drop((target_region, result_region));
    assert_eq!(values(&target), [7]);
}

#[test]
fn a_queue_pair_without_initiator_depth_does_no_atomics() {
    let [a, _b] = two_with(Connection { initiator_depth: 0, ..USUAL });
    if !offered(&a) {
        return;
    }
    let results = counters(&[0]);
    let region = register_counters(&a.domain, &results, Access::LOCAL_WRITE);
    let operation = fetch_add(&region, 0, 1);
    let refused = a.pair.post_send(&[request(1, operation, piece(&region, 0, 8))]);
    assert_eq!(refused, Err((0, PostError::NoReads(a.pair.number()))));
}

#[test]
fn atomic_operations_need_the_right_and_stay_inside() {
    let without = ALL_ACCESS - Access::REMOTE_ATOMIC;
    for (access, offset, expected) in [
        (without, 0, CompletionStatus::RemoteAccess),
        (ALL_ACCESS, 16, CompletionStatus::RemoteAccess),
        (ALL_ACCESS, u64::MAX - 7, CompletionStatus::RemoteAccess),
    ] {
        for swap in [false, true] {
            let [a, b] = two();
            if !offered(&a) {
                return;
            }
            let (target, results) = (counters(&[7, 8]), counters(&[0]));
            let target_region = register_counters(&b.domain, &target, access);
            let result_region = register_counters(&a.domain, &results, Access::LOCAL_WRITE);
            let operation = if swap {
                compare_swap(&target_region, offset, 7, 1)
            } else {
                fetch_add(&target_region, offset, 1)
            };
            let operation = SendRequest {
                signaled: false,
                ..request(1, operation, piece(&result_region, 0, 8))
            };
            let posted = a.pair.post_send(&[operation]);
            // The library of the kernel's soft-RoCE looks at the address before it sends.
            if is_rxe(&a.device) && !offset.is_multiple_of(8) {
                assert!(matches!(posted, Err((0, PostError::System { .. }))), "{posted:?}");
                continue;
            }
            posted.unwrap();
            let failed = next(&a.completions, 1)[0];
            assert_eq!(failed.status, expected, "{access:?} {offset}");
            drop((target_region, result_region));
            assert_eq!((values(&target), values(&results)), (vec![7, 8], vec![0]));
        }
    }
}
