//! Connections that are closed, and peers that end: nobody is to blame.

use super::*;

#[test]
fn a_rail_that_is_closed_is_fenced_and_not_blamed() {
    let config = Config { max_attempts: 1, ..Config::default() };
    let mut bench = Bench::with(config, &[spec(0, Access::Connection)]);
    bench.submit(write(1, 3 * SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.flow.close_rail(bench.now, RailId(0), 7);
    bench.flow.close_rail(bench.now, RailId(9), 1);
    bench.poll();
    assert_eq!((bench.aborts.len(), bench.rail(0).is_up()), (0, true), "it was another one");
    bench.flow.close_rail(bench.now, RailId(0), 1);
    bench.flow.close_rail(bench.now, RailId(0), 1);
    bench.poll();
    assert_eq!(
        (&bench.aborts[..], &bench.fences[..]),
        (&[(RailId(0), 1)][..], &[(RailId(0), 1)][..])
    );
    bench.complete(posts[0], SliceResult::Done);
    bench.complete(posts[1], SliceResult::Flushed);
    bench.abort_all();
    assert_eq!((bench.take_posts(), &bench.connects[..]), (vec![], &[][..]));
    bench.confirm_all();
    // What is left is wanted: it is connected again at once, and is not on probation.
    assert_eq!(bench.connects, [(RailId(0), 2)]);
    bench.connect_all();
    let again = bench.take_posts();
    assert_eq!(
        again.iter().map(|post| post.first).collect::<Vec<_>>(),
        [posts[1], posts[2]].map(|p| p.first)
    );
    again.iter().for_each(|post| bench.complete(*post, SliceResult::Done));
    assert_eq!(bench.take_ended(), [(1, End::Completed, false, 3 * SLICE)]);
}

#[test]
fn a_rail_that_is_closed_while_idle_or_connecting_asks_for_no_fence() {
    let mut bench = Bench::new();
    bench.submit(write(1, 1));
    // One is still being connected, and one has nothing in flight.
    bench.flow.rail_up(bench.now, RailId(0), 1);
    bench.poll();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Done);
    for (rail, epoch) in core::mem::take(&mut bench.connects) {
        bench.flow.close_rail(bench.now, rail, epoch);
    }
    bench.poll();
    assert_eq!(bench.aborts, [(RailId(0), 1), (RailId(1), 2)]);
    assert_eq!((&bench.fences[..], &bench.connects[..]), (&[][..], &[][..]));
    assert_eq!(bench.rail(1).state(), RailState::Down);
    assert!(bench.rail(1).may_connect(bench.now));
    bench.flow.rail_up(bench.now, RailId(1), 2);
    assert_eq!(bench.rail(1).state(), RailState::Down, "that one was given up");
    bench.abort_all();
    assert_eq!(bench.rail(0).state(), RailState::Down);
    bench.pass(at(60_000));
    assert_eq!((bench.connects.len(), bench.flow.poll_timeout()), (0, None), "nobody wants one");
    bench.submit(write(2, 1));
    assert_eq!(bench.connects, [(RailId(0), 3), (RailId(1), 4)]);
    // One that is down has nothing to close.
    let mut bench = Bench::new();
    bench.flow.close_rail(bench.now, RailId(0), 0);
    bench.poll();
    assert_eq!((&bench.aborts[..], bench.rail(0).state()), (&[][..], RailState::Down));
}

#[test]
fn of_a_peer_that_is_gone_nothing_is_left() {
    let mut bench =
        Bench::with(Config::default(), &[0, 1, 2, 3].map(|nic| spec(nic, Access::Connection)));
    bench.submit(write(1, 3 * SLICE));
    let connects = bench.connects.clone();
    for &(rail, epoch) in &connects[..2] {
        bench.flow.rail_up(bench.now, rail, epoch);
    }
    bench.poll();
    bench.submit(read(2, SLICE));
    let posts = bench.take_posts();
    assert_eq!(posts.len(), 4);
    // One is fenced already, one is up, one is being connected, and one has failed.
    bench.complete(posts[0], SliceResult::Broken);
    bench.flow.rail_down(bench.now, connects[3].0, connects[3].1);
    bench.poll();
    assert_eq!(bench.fences, [connects[0]]);
    bench.connects.clear();
    bench.flow.peer_gone(bench.now);
    bench.poll();
    assert_eq!(bench.fences, [connects[0]], "there is nobody to ask");
    assert_eq!(bench.aborts, connects[..3]);
    assert_eq!(bench.take_ended(), [], "local access has not ended");
    bench.pass(at(10_000));
    assert_eq!(bench.fences, [connects[0]]);
    assert_eq!(bench.take_ended(), []);
    bench.abort_all();
    let gone = End::Failed(Failure::PeerGone);
    assert_eq!(bench.take_ended(), [(1, gone, false, 0), (2, gone, false, 0)]);
    assert!(bench.flow.is_idle());
    assert!(bench.flow.rails().iter().all(|rail| rail.may_connect(bench.now)));
    // Until it is known who comes next nothing is meant for it.
    assert_eq!(bench.flow.incarnation(), 0);
    let stale = SubmitError::Stale { current: 0 };
    assert_eq!(bench.flow.submit(&write(3, 1)), Err(stale));
    bench.flow.peer_restarted(bench.now, 78);
    bench.poll();
    assert_eq!((bench.aborts.len(), bench.flow.incarnation()), (0, 78));
    bench.submit(Request { incarnation: 78, ..write(3, 1) });
    assert_eq!(bench.connects.len(), 4, "they are forgiven");
}

#[test]
fn what_a_peer_has_confirmed_before_its_end_is_free() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Durable)]);
    bench.submit(write(1, SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    bench.confirm_all();
    bench.flow.peer_gone(bench.now);
    bench.poll();
    bench.abort_all();
    assert_eq!(bench.take_ended(), [(1, End::Failed(Failure::PeerGone), false, 0)]);
}

#[test]
fn a_fence_that_waits_for_a_peer_ends_with_it() {
    let mut bench = Bench::new();
    bench.submit(write(1, SLICE));
    bench.connect_all();
    bench.flow.rail_down(bench.now, RailId(0), 1);
    bench.poll();
    bench.abort_all();
    assert_eq!(bench.take_ended(), []);
    bench.flow.peer_gone(bench.now);
    bench.poll();
    assert_eq!(bench.take_ended(), [(1, End::Failed(Failure::PeerGone), false, 0)]);
    assert!(bench.rail(0).may_connect(bench.now));
}

#[test]
fn what_outlasts_a_peer_is_undefined_when_that_ends() {
    for (access, undefined) in
        [(Access::Own, false), (Access::Connection, false), (Access::Durable, true)]
    {
        let mut bench = Bench::with(Config::default(), &[0, 1].map(|nic| spec(nic, access)));
        bench.submit(write(1, 2 * SLICE));
        bench.submit(read(2, SLICE));
        bench.connect_all();
        // A rail that is fenced already, and one that is up.
        bench.flow.rail_down(bench.now, RailId(0), 1);
        bench.flow.peer_restarted(bench.now, 78);
        bench.poll();
        assert_eq!(bench.take_ended(), []);
        bench.abort_all();
        let end = End::Failed(Failure::PeerRestarted);
        let mut ended = bench.take_ended();
        ended.sort_by_key(|&(user, ..)| user);
        assert_eq!(ended, [(1, end, undefined, 0), (2, end, false, 0)], "{access:?}");
        assert!(bench.flow.is_idle());
    }
}

#[test]
fn a_durable_rail_is_fenced_as_a_connection_is() {
    let mut bench = Bench::with(Config::default(), &[0, 1].map(|nic| spec(nic, Access::Durable)));
    bench.submit(write(1, SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    bench.abort_all();
    assert_eq!((bench.take_posts(), bench.fences.len()), (vec![], 1));
    bench.confirm_all();
    assert_eq!(bench.take_posts()[0].rail, RailId(1));
}

#[test]
fn an_answered_fence_is_not_asked_for_again() {
    for answer in [Flow::<Classic>::fence_confirmed, Flow::<Classic>::fence_refused] {
        let mut bench = Bench::new();
        bench.submit(write(1, SLICE));
        bench.connect_all();
        bench.flow.rail_down(bench.now, RailId(0), 1);
        bench.pass(at(300));
        assert_eq!(bench.fences.len(), 2);
        answer(&mut bench.flow, bench.now, RailId(0), 1);
        bench.pass(at(5000));
        assert_eq!((bench.fences.len(), bench.flow.poll_timeout()), (2, None));
        assert_eq!(bench.rail(0).state(), RailState::Fencing, "the local end is waited for");
    }
}

#[test]
fn a_side_that_closes_waits_for_nobody() {
    let mut bench = Bench::new();
    bench.submit(write(1, SLICE));
    bench.submit(read(2, SLICE));
    // One is up, and one is being connected.
    bench.flow.rail_up(bench.now, RailId(0), 1);
    bench.poll();
    assert_eq!(bench.take_posts().len(), 2);
    bench.flow.shut_down(bench.now);
    bench.poll();
    assert_eq!(bench.aborts, [(RailId(0), 1), (RailId(1), 2)]);
    assert_eq!((bench.fences.len(), bench.ended.len()), (0, 0), "memory is touched yet");
    bench.abort_all();
    let closed = End::Failed(Failure::ShutDown);
    assert_eq!(bench.take_ended(), [(1, closed, true, 0), (2, closed, false, 0)]);
    bench.pass(at(60_000));
    assert!(bench.fences.is_empty() && bench.flow.is_idle());
}

/// Who ends a task hurries nobody whose answer is still waited for.
#[test]
fn a_fence_under_way_is_not_asked_for_again_when_a_task_ends() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    let task = bench.submit(write(1, SLICE));
    bench.connect_all();
    bench.flow.rail_down(bench.now, RailId(0), 1);
    bench.poll();
    assert_eq!(bench.fences.len(), 1);
    bench.pass(at(1));
    bench.flow.cancel(bench.now, task);
    bench.poll();
    bench.pass(at(2));
    assert_eq!(bench.fences.len(), 1);
}
