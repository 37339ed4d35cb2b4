//! Collectives on memory that is named by its address, started and waited for by handles.

mod common;

use std::time::Duration;

use common::{Cluster, PATIENCE, each, leave, on_both};
use millstream_collective::{
    Call, CollectiveError, Communicator, DataType, Handle, Mode, RawCall, ReduceOperation,
    RegistrationError,
};
use millstream_lab::Stopwatch;

use ReduceOperation::Sum;

/// Starts a collective of 32-bit integers.
fn start(
    communicator: &Communicator,
    call: Call,
    count: usize,
    source: &[i32],
    destination: &mut [i32],
) -> Result<Handle, CollectiveError> {
    let (source, destination) = (source.as_ptr(), destination.as_mut_ptr());
    let call = raw(call, Mode::Write, count, source, destination);
    // SAFETY: the tests keep their vectors until they have the end, or the handle is gone.
    unsafe { communicator.start_raw(&call) }
}

fn raw(call: Call, mode: Mode, count: usize, source: *const i32, destination: *mut i32) -> RawCall {
    let (source, destination) = (source.cast(), destination.cast());
    RawCall { call, data_type: DataType::Int32, mode, count, source, destination }
}

fn element(rank: u32, index: usize) -> i32 {
    (index as i32).wrapping_mul(7).wrapping_add(rank as i32 * 1000)
}

fn vector(rank: u32, length: usize) -> Vec<i32> {
    (0..length).map(|index| element(rank, index)).collect()
}

fn sum(world: u32, length: usize) -> Vec<i32> {
    let total = |index| (0..world).fold(0_i32, |sum, rank| sum.wrapping_add(element(rank, index)));
    (0..length).map(total).collect()
}

/// Of what is copied, of one segment, and of several windows.
const LENGTHS: [usize; 5] = [0, 1, 500, 5000, 600_001];

#[test]
fn six_collectives_in_both_modes_apart_and_in_place() {
    on_both(six_of);
}

fn six_of(cluster: &Cluster) {
    let mut ranks = cluster.group("raw", 3);
    for mode in [Mode::Write, Mode::Send] {
        for count in LENGTHS {
            each(&mut ranks, |communicator| six(communicator, mode, count));
        }
    }
    leave(ranks);
}

fn six(communicator: &Communicator, mode: Mode, count: usize) {
    let (rank, world) = (communicator.rank(), communicator.world());
    let own = rank as usize * count;
    let run = |call, source: *const i32, destination: *mut i32| {
        // SAFETY: the vectors below have as many elements as each call needs, and nobody refers to them meanwhile.
        unsafe { communicator.call_raw(&raw(call, mode, count, source, destination)) }.unwrap();
    };
    let wanted = sum(world, count);
    let source = vector(rank, count);
    let mut result = vec![-1; count];
    run(Call::AllReduce(Sum), source.as_ptr(), result.as_mut_ptr());
    assert!(result == wanted, "allreduce of {count}, {mode:?}");
    let mut both = source.clone();
    let place = both.as_mut_ptr();
    run(Call::AllReduce(Sum), place, place);
    assert!(both == wanted, "allreduce of {count} in place, {mode:?}");

    let mut result = vec![-1; count];
    run(Call::Reduce { operation: Sum, root: 1 }, source.as_ptr(), result.as_mut_ptr());
    let untouched = vec![-1; count];
    assert!(result == if rank == 1 { &wanted[..] } else { &untouched }, "reduce of {count}");

    let mut both = source.clone();
    let place = both.as_mut_ptr();
    run(Call::Broadcast { root: 2 }, place, place);
    assert!(both == vector(2, count), "broadcast of {count}");

    run(Call::Barrier, std::ptr::null(), std::ptr::null_mut());

    let whole = vector(rank, count * 3);
    let wanted = sum(world, count * 3);
    let mut part = vec![-1; count];
    run(Call::ReduceScatter(Sum), whole.as_ptr(), part.as_mut_ptr());
    assert!(part == wanted[own..own + count], "reducescatter of {count}");
    let mut both = whole.clone();
    let place = both.as_mut_ptr();
    run(Call::ReduceScatter(Sum), place, place.wrapping_add(own));
    assert!(both[own..own + count] == wanted[own..own + count], "reducescatter in place");

    let mut all = vec![-1; count * 3];
    all[own..own + count].copy_from_slice(&source);
    let place = all.as_mut_ptr();
    run(Call::AllGather, place.wrapping_add(own), place);
    let wanted: Vec<i32> = (0..world).flat_map(|rank| vector(rank, count)).collect();
    assert!(all == wanted, "allgather of {count} in place");
    let mut all = vec![-1; count * 3];
    run(Call::AllGather, source.as_ptr(), all.as_mut_ptr());
    assert!(all == wanted, "allgather of {count}");
}

#[test]
fn vectors_and_registered_memory_begin_at_any_byte() {
    on_both(odd_in);
}

fn odd_in(cluster: &Cluster) {
    let mut ranks = cluster.group("odd", 3);
    for mode in [Mode::Write, Mode::Send] {
        for count in LENGTHS {
            for registered in [false, true] {
                each(&mut ranks, |communicator| {
                    at_odd_bytes(communicator, mode, count, registered);
                });
            }
        }
    }
    leave(ranks);
}

fn at_odd_bytes(communicator: &Communicator, mode: Mode, count: usize, registered: bool) {
    let rank = communicator.rank();
    let bytes = |elements: Vec<i32>| -> Vec<u8> {
        elements.into_iter().flat_map(i32::to_le_bytes).collect()
    };
    let (source, wanted) = (bytes(vector(rank, count)), bytes(sum(communicator.world(), count)));
    let mut memory = vec![0x55; 2 * source.len() + 32];
    // Another one for each rank, and for its destination.
    let from = memory.as_ptr().align_offset(8) + 1 + 2 * rank as usize;
    let to = from + source.len() + 2;
    memory[from..][..source.len()].copy_from_slice(&source);
    let mut expected = memory.clone();
    expected[to..][..wanted.len()].copy_from_slice(&wanted);
    let place = memory.as_mut_ptr();
    let (first, result) = (place.wrapping_add(from), place.wrapping_add(to));
    if registered {
        // SAFETY: the memory is there until it is deregistered below, and nobody refers to it meanwhile.
        unsafe { communicator.register_raw(first, to + wanted.len() - from) }.unwrap();
    }
    let call = raw(Call::AllReduce(Sum), mode, count, first.cast(), result.cast());
    // SAFETY: both vectors have as many elements, and nobody refers to them meanwhile.
    unsafe { communicator.call_raw(&call) }.unwrap();
    if registered {
        communicator.deregister_raw(first).unwrap();
    }
    assert!(memory == expected, "{count} of rank {rank}, {mode:?}, registered {registered}");
}

#[test]
fn several_are_under_way_and_end_in_their_order() {
    on_both(several_of);
}

fn several_of(cluster: &Cluster) {
    let mut ranks = cluster.group("several", 2);
    each(&mut ranks, |communicator| {
        let rank = communicator.rank();
        let lengths = [300_000, 3, 0, 70_000, 500];
        let sources: Vec<_> = lengths.iter().map(|&length| vector(rank, length)).collect();
        let mut results: Vec<_> = lengths.iter().map(|&length| vec![-1; length]).collect();
        let handles: Vec<Handle> = (sources.iter().zip(&mut results))
            .map(|(source, result)| {
                start(communicator, Call::AllReduce(Sum), source.len(), source, result).unwrap()
            })
            .collect();
        // When the last is over, so are all, and each says so as often as it is asked.
        assert_eq!(handles[4].wait(PATIENCE), Some(Ok(())));
        for handle in &handles {
            assert_eq!((handle.test(), handle.test()), (Some(Ok(())), Some(Ok(()))));
        }
        for (result, length) in results.iter().zip(lengths) {
            assert!(*result == sum(2, length), "{length}");
        }
    });
    leave(ranks);
}

#[test]
fn who_does_not_wait_long_enough_changes_nothing() {
    on_both(impatient);
}

fn impatient(cluster: &Cluster) {
    let ranks = cluster.group("patience", 2);
    let source = vector(0, 100_000);
    let mut results = [vec![0; 100_000], vec![0; 100_000]];
    let [first, second] = &mut results;
    let handle = start(&ranks[0], Call::AllReduce(Sum), 100_000, &source, first).unwrap();
    for _ in 0..3 {
        assert_eq!(handle.wait(Duration::from_millis(5)), None);
        assert_eq!(handle.test(), None);
    }
    assert_eq!(ranks[0].failure(), None);
    let source = vector(1, 100_000);
    let other = start(&ranks[1], Call::AllReduce(Sum), 100_000, &source, second).unwrap();
    assert_eq!(handle.wait(PATIENCE), Some(Ok(())));
    assert_eq!(other.finish(), Ok(()));
    assert!(results.iter().all(|result| *result == sum(2, 100_000)));
    leave(ranks);
}

#[test]
fn registered_memory_is_used_as_it_is_wherever_a_vector_lies_in_it() {
    on_both(registered_in);
}

fn registered_in(cluster: &Cluster) {
    let ranks = cluster.group("registered", 2);
    let mut memory = [vec![0_i32; 200_000], vec![0; 200_000]];
    let places = [memory[0].as_mut_ptr(), memory[1].as_mut_ptr()];
    let start = |rank: usize, from: usize, to: usize| {
        let place = |at: usize| places[rank].wrapping_add(at);
        let call = raw(Call::AllReduce(Sum), Mode::Write, 50_000, place(from), place(to));
        // SAFETY: the vectors live until the end of the test, and are not referred to while calls run.
        unsafe { ranks[rank].start_raw(&call) }.unwrap()
    };
    // SAFETY: as above.
    let register = |at: usize, bytes| unsafe {
        ranks[0].register_raw(places[0].wrapping_add(at).cast(), bytes)
    };
    register(0, 800_000).unwrap();
    let address = places[0].addr();
    let overlap = RegistrationError::Overlap { address, end: address + 800_000 };
    assert_eq!(register(199_999, 4), Err(overlap.clone()));
    assert_eq!(register(0, 1), Err(overlap));
    assert_eq!(register(200_000, 0), Err(RegistrationError::Empty));
    assert_eq!(register(200_000, usize::MAX), Err(RegistrationError::Empty));
    for round in 0..20 {
        let handle = start(0, round, 100_000 + round);
        // The call has no registration of its own, so it is this one that is in use.
        let base: *const u8 = places[0].cast();
        assert_eq!(ranks[0].deregister_raw(base), Err(RegistrationError::InUse(address)));
        let other = start(1, 0, 60_000);
        assert_eq!((handle.finish(), other.finish()), (Ok(()), Ok(())));
    }
    let base: *const u8 = places[0].cast();
    assert_eq!(
        ranks[0].deregister_raw(base.wrapping_add(1)),
        Err(RegistrationError::Unknown(address + 1))
    );
    assert_eq!(ranks[0].deregister_raw(base), Ok(()));
    assert_eq!(ranks[0].deregister_raw(base), Err(RegistrationError::Unknown(address)));
    // Without it, too.
    let (handle, other) = (start(0, 0, 100_000), start(1, 0, 60_000));
    assert_eq!((handle.finish(), other.finish()), (Ok(()), Ok(())));
    leave(ranks);
}

#[test]
fn who_cancels_ends_it_for_all_and_they_hear_why() {
    on_both(cancels_in);
}

fn cancels_in(cluster: &Cluster) {
    let ranks = cluster.group("cancel", 2);
    let source = vec![1; 100_000];
    let mut results = [vec![0; 100_000], vec![0; 100_000], vec![0; 100_000]];
    let [first, second, third] = &mut results;
    let handle = start(&ranks[0], Call::AllReduce(Sum), 100_000, &source, first).unwrap();
    let later = start(&ranks[0], Call::AllReduce(Sum), 100_000, &source, second).unwrap();
    let stopwatch = Stopwatch::start();
    later.cancel();
    let canceled = CollectiveError::Canceled { sequence: 1 };
    assert_eq!(handle.test(), Some(Err(canceled.clone())), "it comes before what was canceled");
    assert_eq!(later.test(), Some(Err(canceled.clone())));
    let other = start(&ranks[1], Call::AllReduce(Sum), 100_000, &source, third);
    let error = match other {
        Ok(other) => other.finish().unwrap_err(),
        Err(error) => error,
    };
    let CollectiveError::PeerLost { rank: 0, detail } = &error else { panic!("{error:?}") };
    assert!(detail.contains("collective 1 was canceled"), "{detail}");
    assert!(stopwatch.took().own() < Duration::from_secs(5));
    let again = start(&ranks[0], Call::Barrier, 0, &[], &mut []).unwrap_err();
    assert_eq!(again, canceled);
    // After the end, there is nothing to cancel.
    let mut ranks = cluster.group("cancel", 1);
    let handle = start(&ranks[0], Call::Barrier, 0, &[], &mut []).unwrap();
    assert_eq!(handle.wait(PATIENCE), Some(Ok(())));
    handle.cancel();
    drop(handle);
    assert_eq!(ranks[0].failure(), None);
    ranks[0].barrier().unwrap();
}

#[test]
fn a_handle_that_is_dropped_cancels_and_one_outlives_its_communicator() {
    on_both(dropped_in);
}

fn dropped_in(cluster: &Cluster) {
    let mut ranks = cluster.group("dropped", 2);
    let source = vec![1; 100_000];
    let mut result = vec![0; 100_000];
    drop(start(&ranks[0], Call::AllReduce(Sum), 100_000, &source, &mut result).unwrap());
    assert_eq!(ranks[0].failure(), Some(CollectiveError::Canceled { sequence: 0 }));
    leave(ranks.split_off(0));

    let mut ranks = cluster.group("dropped", 2);
    let handle = start(&ranks[0], Call::AllReduce(Sum), 100_000, &source, &mut result).unwrap();
    drop(ranks.remove(0));
    assert_eq!(handle.wait(PATIENCE), Some(Err(CollectiveError::Closed)));
}

#[test]
fn as_many_as_can_be_are_started_and_no_more() {
    on_both(many_in);
}

fn many_in(cluster: &Cluster) {
    let ranks = cluster.group("many", 2);
    let begin = |rank: usize| start(&ranks[rank], Call::Barrier, 0, &[], &mut []);
    let handles: Vec<Handle> = (0..64).map(|_| begin(0).unwrap()).collect();
    assert_eq!(begin(0).unwrap_err(), CollectiveError::TooMany { limit: 64 });
    let others: Vec<Handle> = (0..64).map(|_| begin(1).unwrap()).collect();
    for handle in handles.iter().chain(&others) {
        assert_eq!(handle.wait(PATIENCE), Some(Ok(())));
    }
    let (handle, other) = (begin(0).unwrap(), begin(1).unwrap());
    assert_eq!((handle.finish(), other.finish()), (Ok(()), Ok(())));
    leave(ranks);
}

#[test]
fn those_that_wait_fail_when_a_rank_has_left_before_them() {
    on_both(left_in);
}

fn left_in(cluster: &Cluster) {
    let mut ranks = cluster.group("left", 2);
    let begin = |rank: &Communicator| start(rank, Call::Barrier, 0, &[], &mut []).unwrap();
    let handles = [begin(&ranks[0]), begin(&ranks[0]), begin(&ranks[0])];
    let other = begin(&ranks[1]);
    assert_eq!(other.finish(), Ok(()));
    drop(other);
    drop(ranks.remove(1));
    let outcomes = handles.map(|handle| handle.wait(PATIENCE).unwrap());
    assert_eq!(outcomes[0], Ok(()));
    for outcome in &outcomes[1..] {
        let Err(CollectiveError::PeerLost { rank: 1, detail }) = outcome else {
            panic!("{outcome:?}")
        };
        assert!(detail.contains("left after 1 collectives"), "{detail}");
    }
}

#[test]
fn what_is_refused_changes_nothing() {
    on_both(refused_in);
}

fn refused_in(cluster: &Cluster) {
    let ranks = cluster.group("refused", 1);
    let mut memory = [1_i32, 2, 3, 4];
    let place = memory.as_mut_ptr();
    let refused = |call, count, source, destination| {
        let call = raw(call, Mode::Write, count, source, destination);
        // SAFETY: what is refused touches nothing.
        unsafe { ranks[0].call_raw(&call) }.unwrap_err()
    };
    let call = Call::AllReduce(Sum);
    let null = CollectiveError::Null { what: "source" };
    assert_eq!(refused(call, 1, std::ptr::null(), place), null);
    assert_eq!(refused(call, 3, place, place.wrapping_add(1)), CollectiveError::Overlap);
    let long = refused(call, usize::MAX, place, place);
    assert!(matches!(long, CollectiveError::TooLong { .. }), "{long:?}");
    let root = refused(Call::Broadcast { root: 1 }, 1, place, place);
    assert_eq!(root, CollectiveError::Root { root: 1, world: 1 });
    let bits = Call::AllReduce(ReduceOperation::BitOr);
    let float = RawCall { data_type: DataType::Float32, ..raw(bits, Mode::Write, 4, place, place) };
    // SAFETY: as above.
    let error = unsafe { ranks[0].call_raw(&float) }.unwrap_err();
    assert!(matches!(error, CollectiveError::Unsupported { .. }), "{error:?}");
    // SAFETY: the array is there until this returns.
    unsafe { ranks[0].call_raw(&raw(call, Mode::Write, 4, place, place)) }.unwrap();
    assert_eq!((memory, ranks[0].failure()), ([1, 2, 3, 4], None));
}
