//! What rails say that they have done.

use super::*;
use crate::RailCounters;

#[test]
fn what_was_done_is_counted_where_it_was_done() {
    let mut bench = Bench::new();
    bench.submit(write(1, 2 * SLICE));
    bench.submit(read(2, 100));
    bench.connect_all();
    let posts = bench.take_posts();
    let posted = RailCounters { connections: 1, ..RailCounters::default() };
    let first =
        RailCounters { posted_slices: 2, posted_bytes: SLICE + 100, connections: 1, ..posted };
    assert_eq!(*bench.rail(0).counters(), first);
    // The READ, and one slice of the WRITE.
    bench.complete(posts[2], SliceResult::Done);
    bench.complete(posts[1], SliceResult::Done);
    let first = RailCounters { completed_slices: 1, read_bytes: 100, ..first };
    assert_eq!(*bench.rail(0).counters(), first);
    let second = RailCounters {
        posted_slices: 1,
        posted_bytes: SLICE,
        completed_slices: 1,
        written_bytes: SLICE,
        ..posted
    };
    assert_eq!(*bench.rail(1).counters(), second);
    assert_eq!(bench.rail(0).failed_slices(), 0, "it is in flight");
}

#[test]
fn a_slice_that_moves_is_a_failure_and_a_fence_of_the_rail_that_it_leaves() {
    let mut bench = Bench::new();
    bench.submit(write(1, 2 * SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    assert_eq!(bench.rail(0).counters().fences, 1);
    // It is asked for again, which counts once.
    bench.pass(at(600));
    bench.confirm_all();
    bench.abort_all();
    let again = bench.take_posts();
    bench.complete(again[0], SliceResult::Done);
    let left = *bench.rail(0).counters();
    assert_eq!((left.moved_slices, left.failures, left.fences, left.lost_fences), (1, 1, 1, 0));
    assert_eq!((bench.rail(0).failed_slices(), left.completed_slices), (1, 0));
    let other = *bench.rail(1).counters();
    assert_eq!((other.moved_slices, other.failures, other.posted_slices), (0, 0, 2));
    assert_eq!(bench.rail(1).failed_slices(), 0);
}

#[test]
fn a_fence_that_nobody_confirms_is_counted_as_lost_and_failures_as_pauses() {
    let config = Config { max_attempts: 100, ..Config::default() };
    let mut bench = Bench::with(config, &[spec(0, Access::Connection)]);
    bench.submit(write(1, SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    bench.abort_all();
    bench.pass(at(10_000));
    assert_eq!(bench.take_ended(), [(1, End::Failed(Failure::NotFenced), true, 0)]);
    let counters = *bench.rail(0).counters();
    assert_eq!((counters.fences, counters.lost_fences, counters.failures), (1, 1, 1));
    assert_eq!((bench.rail(0).failed_slices(), counters.pauses), (1, 0));
    for _ in 0..3 {
        bench.submit(read(2, 1));
        bench.pass(bench.now + Duration::from_secs(3));
        for (rail, epoch) in core::mem::take(&mut bench.connects) {
            bench.flow.rail_down(bench.now, rail, epoch);
        }
        bench.poll();
    }
    assert!(bench.rail(0).counters().pauses > 0);
}

#[test]
fn a_fence_that_some_wait_for_less_long_than_others_is_lost_once() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    let ends = bench.submit(write(1, 100));
    bench.submit(write(2, 100));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    bench.abort_all();
    bench.flow.cancel(bench.now, ends);
    bench.pass(bench.now + bench.flow.config.fence_timeout);
    assert_eq!(bench.take_ended(), [(1, End::Canceled, true, 0)]);
    assert_eq!(bench.rail(0).counters().lost_fences, 1);
    bench.pass(bench.now + bench.flow.config.patience);
    assert_eq!(bench.take_ended(), [(2, End::Failed(Failure::NotFenced), true, 0)]);
    assert_eq!((bench.rail(0).counters().fences, bench.rail(0).counters().lost_fences), (1, 1));
}
