//! What moves, ends or is left undefined once a rail is fenced.

use super::*;

#[test]
fn a_write_moves_to_another_rail_only_behind_the_fence() {
    let mut bench = Bench::new();
    bench.submit(write(1, 2 * SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    assert_eq!(bench.aborts, [(RailId(0), 1)]);
    assert_eq!(bench.fences, [(RailId(0), 1)]);
    assert_eq!(bench.rail(0).state(), RailState::Fencing);
    bench.confirm_all();
    assert!(bench.take_posts().is_empty(), "the local end is not quiet yet");
    bench.abort_all();
    let again = bench.take_posts();
    assert_eq!(again.len(), 1);
    assert_eq!((again[0].rail, again[0].first), (RailId(1), posts[0].first));
    assert_ne!(again[0].slice, posts[0].slice);
    // What is still said of the first time is of nobody.
    bench.complete(posts[0], SliceResult::Done);
    bench.complete(posts[1], SliceResult::Done);
    assert_eq!(bench.take_ended(), []);
    bench.complete(again[0], SliceResult::Done);
    assert_eq!(bench.take_ended(), [(1, End::Completed, false, 2 * SLICE)]);
}

#[test]
fn the_fence_waits_for_both_sides_in_any_order() {
    let mut bench = Bench::new();
    bench.submit(write(1, SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    // Of another connection, these say nothing.
    for epoch in [0, 2] {
        bench.flow.rail_aborted(bench.now, RailId(0), epoch);
        bench.flow.fence_confirmed(bench.now, RailId(0), epoch);
        bench.flow.fence_refused(bench.now, RailId(0), epoch);
    }
    bench.flow.rail_up(bench.now, RailId(9), 1);
    bench.abort_all();
    assert_eq!(bench.rail(0).state(), RailState::Fencing);
    assert!(bench.take_posts().is_empty());
    bench.confirm_all();
    assert_eq!(bench.take_posts().len(), 1);
}

#[test]
fn a_read_waits_for_the_local_end_only() {
    let mut bench = Bench::new();
    bench.submit(read(1, SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    assert_eq!(bench.fences, []);
    assert!(bench.take_posts().is_empty());
    bench.abort_all();
    assert_eq!(bench.take_posts()[0].rail, RailId(1));
    // Beside a WRITE, the READ does not wait for its fence.
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(read(1, SLICE));
    let task = bench.submit(write(2, SLICE));
    bench.connect_all();
    bench.flow.cancel(bench.now, task);
    bench.poll();
    let task = bench.submit(read(3, 1));
    bench.abort_all();
    assert_eq!((bench.flow.slices(), bench.rail(0).slices_in_flight()), (2, 1));
    bench.flow.cancel(bench.now, task);
    bench.poll();
    assert_eq!(bench.take_ended(), [(3, End::Canceled, false, 0)]);
    bench.confirm_all();
    assert_eq!(bench.take_ended(), [(2, End::Canceled, false, 0)]);
}

#[test]
fn what_completes_while_its_rail_is_fenced_is_done() {
    let mut bench = Bench::new();
    let first = bench.submit(write(1, SLICE));
    bench.submit(write(2, 3 * SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.flow.cancel(bench.now, first);
    bench.poll();
    // The first of the other task on the same rail, and the canceled one itself.
    bench.complete(posts[2], SliceResult::Done);
    bench.complete(posts[0], SliceResult::Done);
    assert_eq!(bench.take_ended(), [(1, End::Completed, false, SLICE)]);
    bench.abort_all();
    bench.confirm_all();
    assert_eq!(bench.take_posts(), posts[4..], "nothing is posted again");
    assert!(bench.flow.rails()[0].may_connect(bench.now), "it was not its fault");
}

#[test]
fn cancel_ends_access_at_once_and_others_go_on_behind_the_fence() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    let task = bench.submit(write(1, 100 * SLICE));
    bench.submit(write(2, SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Done);
    bench.flow.cancel(bench.now, task);
    bench.flow.cancel(bench.now, task);
    bench.poll();
    assert_eq!((bench.aborts.len(), bench.fences.len()), (1, 1), "now, and once");
    assert_eq!(bench.take_ended(), [], "it may still arrive");
    bench.abort_all();
    assert_eq!(bench.take_ended(), []);
    bench.confirm_all();
    assert_eq!(bench.take_ended(), [(1, End::Canceled, false, SLICE)]);
    assert_eq!(bench.connects, [(RailId(0), 2)]);
    bench.connect_all();
    let again: Vec<u64> = bench.take_posts().iter().skip(1).map(|post| post.user).collect();
    assert_eq!(again, [2]);
    assert_eq!(bench.flow.tasks(), 1);
}

#[test]
fn without_a_confirmation_the_target_is_undefined_after_a_while() {
    let mut bench = Bench::new();
    let task = bench.submit(write(1, SLICE));
    bench.submit(write(2, SLICE));
    bench.submit(write(3, SLICE));
    bench.submit(read(4, SLICE));
    bench.connect_all();
    bench.posts.clear();
    bench.flow.cancel(bench.now, task);
    bench.poll();
    bench.abort_all();
    bench.pass(at(1999));
    assert_eq!(bench.fences.len(), 8, "it is asked for every 250 ms");
    assert_eq!(bench.take_ended(), []);
    bench.pass(at(2000));
    assert_eq!(bench.take_ended(), [(1, End::Canceled, true, 0)]);
    // What is not to end is as patient as when there is no rail.
    bench.pass(at(3999));
    let asked = bench.fences.iter().filter(|fence| fence.0 == RailId(0)).count();
    assert_eq!((bench.take_ended(), asked), (vec![], 16));
    bench.pass(at(4000));
    assert_eq!(bench.take_ended(), [(3, End::Failed(Failure::NotFenced), true, 0)]);
    // What comes now is too late. A new connection, which closes the old one, may be made.
    bench.confirm_all();
    assert!(bench.rail(0).may_connect(bench.now));
}

#[test]
fn tasks_that_end_while_a_fence_is_over_make_no_more_questions() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    let tasks: Vec<TaskId> = (1..=4).map(|user| bench.submit(write(user, SLICE))).collect();
    bench.connect_all();
    bench.flow.cancel(bench.now, tasks[0]);
    bench.poll();
    bench.abort_all();
    bench.pass(at(2000));
    assert_eq!(bench.take_ended(), [(1, End::Canceled, true, 0)]);
    assert_eq!(bench.fences.len(), 9);
    for (millis, user) in [(2050, 2), (2100, 3)] {
        bench.pass(at(millis));
        bench.flow.cancel(bench.now, tasks[user as usize - 1]);
        bench.pass(at(millis + 1));
        assert_eq!(bench.take_ended(), [(user, End::Canceled, true, 0)]);
        assert_eq!(bench.fences.len(), 9, "it was asked for a moment ago");
    }
    bench.pass(at(2249));
    assert_eq!(bench.fences.len(), 9);
    bench.pass(at(2250));
    assert_eq!((bench.take_ended(), bench.fences.len()), (vec![], 10));
}

#[test]
fn a_peer_that_does_not_fence_is_not_waited_for() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    let task = bench.submit(write(1, SLICE));
    bench.connect_all();
    bench.flow.cancel(bench.now, task);
    bench.poll();
    bench.flow.fence_refused(bench.now, RailId(0), 1);
    bench.poll();
    assert_eq!(bench.take_ended(), [], "local access has not ended");
    bench.abort_all();
    assert_eq!(bench.take_ended(), [(1, End::Canceled, true, 0)]);
    assert!(bench.flow.is_idle());
}
