//! How long what has no rail is waited for: each task for itself.

use super::*;

fn bench() -> Bench {
    Bench::with(Config::default(), &[spec(0, Access::Connection)])
}

const NO_RAIL: End = End::Failed(Failure::NoRail);

/// Lets time pass while nothing can be connected.
fn pass(bench: &mut Bench, until: Instant) {
    loop {
        for (rail, epoch) in core::mem::take(&mut bench.connects) {
            bench.flow.rail_down(bench.now, rail, epoch);
        }
        bench.poll();
        match bench.flow.poll_timeout() {
            Some(next) if next <= until => bench.pass(next),
            _ if bench.connects.is_empty() => break,
            _ => {}
        }
    }
    bench.now = until;
}

#[test]
fn each_task_has_its_own() {
    let mut bench = bench();
    bench.submit(write(1, SLICE));
    pass(&mut bench, at(1500));
    bench.submit(write(2, SLICE));
    bench.submit(write(3, SLICE));
    pass(&mut bench, at(3900));
    bench.submit(write(4, SLICE));
    for (until, ended) in
        [(3999, &[][..]), (4000, &[1]), (5499, &[]), (5500, &[2, 3]), (7899, &[]), (7900, &[4])]
    {
        pass(&mut bench, at(until));
        let expected: Vec<_> = ended.iter().map(|&user| (user, NO_RAIL, false, 0)).collect();
        assert_eq!(bench.take_ended(), expected, "{until}");
    }
    pass(&mut bench, at(60_000));
    assert_eq!(bench.flow.poll_timeout(), None);
    assert!(bench.flow.is_idle());
}

#[test]
fn one_that_was_canceled_takes_nothing_of_it_along() {
    let mut bench = bench();
    let tasks = [1, 2, 3].map(|user| bench.submit(write(user, SLICE)));
    pass(&mut bench, at(1000));
    let newer = bench.submit(write(4, SLICE));
    bench.submit(write(5, SLICE));
    for task in [tasks[0], tasks[2], newer] {
        bench.flow.cancel(bench.now, task);
    }
    bench.poll();
    bench.take_ended();
    pass(&mut bench, at(4000));
    assert_eq!(bench.take_ended(), [(2, NO_RAIL, false, 0)]);
    pass(&mut bench, at(4999));
    assert_eq!(bench.take_ended(), []);
    pass(&mut bench, at(5000));
    assert_eq!(bench.take_ended(), [(5, NO_RAIL, false, 0)]);
}

#[test]
fn it_begins_anew_when_there_was_a_rail() {
    let mut bench = bench();
    bench.submit(write(1, 10 * SLICE));
    pass(&mut bench, at(3000));
    // Up for a moment: it is full, and fails.
    while bench.connects.is_empty() {
        let next = bench.flow.poll_timeout().unwrap();
        bench.pass(next);
    }
    bench.connect_all();
    let began = bench.now;
    assert_eq!(bench.take_posts().len(), 1);
    bench.now = began + Duration::from_millis(500);
    bench.flow.rail_down(bench.now, RailId(0), bench.rail(0).epoch());
    bench.poll();
    bench.abort_all();
    bench.confirm_all();
    let stranded = bench.now;
    pass(&mut bench, stranded + Duration::from_millis(3999));
    assert_eq!(bench.take_ended(), []);
    pass(&mut bench, stranded + Duration::from_millis(4000));
    assert_eq!(bench.take_ended(), [(1, NO_RAIL, false, 0)]);
}

#[test]
fn what_comes_back_from_a_rail_has_its_own() {
    let config = Config { fence_timeout: Duration::from_secs(3), ..Config::default() };
    let mut bench = Bench::with(config, &[spec(0, Access::Connection)]);
    let long = write(1, 4 * SLICE);
    bench.submit(long);
    bench.connect_all();
    bench.posts.clear();
    // From now on there is no rail for the second, and the first has slices on one that is fenced.
    bench.flow.rail_down(bench.now, RailId(0), 1);
    bench.submit(write(2, SLICE));
    bench.abort_all();
    bench.pass(at(2500));
    bench.confirm_all();
    pass(&mut bench, at(3999));
    assert_eq!(bench.take_ended(), []);
    pass(&mut bench, at(4000));
    assert_eq!(bench.take_ended(), [(2, NO_RAIL, false, 0)]);
    pass(&mut bench, at(6499));
    assert_eq!(bench.take_ended(), []);
    pass(&mut bench, at(6500));
    assert_eq!(bench.take_ended(), [(1, NO_RAIL, false, 0)]);
    assert!(bench.flow.is_idle());
}

#[test]
fn it_is_of_a_pair_of_locations() {
    // The second peer's location has no NIC at all.
    let nics = |nics: &[u16]| crate::Priority { preferred: nics.to_vec(), available: vec![] };
    let policy = Classic::new(Order::RoundRobin, vec![nics(&[0])], vec![nics(&[0]), nics(&[])]);
    let mut bench = bench();
    bench.flow = Flow::new(Config::default(), policy, INCARNATION, 0);
    bench.flow.add_rail(spec(0, Access::Connection));
    bench.submit(Request { peer_location: 1, ..write(1, SLICE) });
    bench.submit(write(2, 100 * SLICE));
    bench.connect_all();
    for step in 1..=50 {
        bench.pass(at(step * 100));
        for post in bench.take_posts() {
            bench.complete(post, SliceResult::Done);
        }
        if step * 100 == 3900 {
            assert_eq!(bench.take_ended().iter().filter(|ended| ended.0 == 1).count(), 0);
        }
    }
    assert!(bench.take_ended().contains(&(1, NO_RAIL, false, 0)));
}

#[test]
fn what_waits_in_vain_can_be_given_up_at_once() {
    let mut bench = bench();
    bench.submit(write(1, 6 * SLICE));
    bench.connect_all();
    bench.submit(Request { peer_location: 1, ..write(2, SLICE) });
    bench.flow.give_up();
    bench.poll();
    assert_eq!(bench.take_ended(), [], "there is a rail");
    // It breaks: of the first, slices come back to the queue, and something was never posted.
    bench.flow.rail_down(bench.now, RailId(0), 1);
    bench.poll();
    bench.abort_all();
    bench.confirm_all();
    bench.flow.give_up();
    bench.poll();
    let mut ended = bench.take_ended();
    ended.sort_by_key(|&(user, ..)| user);
    assert_eq!(ended, [(1, NO_RAIL, false, 0), (2, NO_RAIL, false, 0)]);
    assert!(bench.flow.is_idle());
    // Those that come later have all their patience.
    bench.submit(write(3, SLICE));
    pass(&mut bench, at(3999));
    assert_eq!(bench.take_ended(), []);
}

#[test]
fn what_waits_for_a_rail_may_be_given_to_somebody_else() {
    let mut bench = bench();
    bench.submit(write(1, SLICE));
    bench.submit(write(2, SLICE));
    pass(&mut bench, at(300));
    bench.submit(write(3, SLICE));
    pass(&mut bench, at(500));
    let waited = Duration::from_millis(250);
    let stranded = |bench: &Bench| bench.flow.stranded(bench.now, waited).collect::<Vec<_>>();
    assert_eq!(stranded(&bench), [1, 2]);
    bench.flow.give_up_stranded(bench.now, waited, |user| user != 1);
    bench.poll();
    assert_eq!(bench.take_ended(), [(2, NO_RAIL, false, 0)], "3 has not waited for so long");
    pass(&mut bench, at(550));
    assert_eq!(stranded(&bench), [1, 3]);
    // With a rail nobody waits for one.
    while bench.connects.is_empty() {
        let next = bench.flow.poll_timeout().unwrap();
        bench.pass(next);
    }
    bench.connect_all();
    assert_eq!(stranded(&bench), []);
    bench.flow.give_up_stranded(bench.now, waited, |_| true);
    bench.poll();
    assert_eq!(bench.take_ended(), []);
}

/// It is over only when nothing of it can arrive any more.
#[test]
fn what_is_given_to_somebody_else_waits_for_its_fence() {
    let mut bench = Bench::new();
    bench.submit(write(1, 8 * SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    // Both rails fail; one of them is fenced at once.
    for rail in [RailId(0), RailId(1)] {
        let epoch = bench.flow.rails()[usize::from(rail.0)].epoch();
        bench.flow.rail_down(bench.now, rail, epoch);
    }
    bench.poll();
    bench.abort_all();
    let fences = core::mem::take(&mut bench.fences);
    assert_eq!((posts.len(), fences.len()), (8, 2));
    bench.flow.fence_confirmed(bench.now, fences[0].0, fences[0].1);
    pass(&mut bench, at(600));
    bench.flow.give_up_stranded(bench.now, Duration::from_millis(250), |_| true);
    bench.poll();
    assert_eq!(bench.take_ended(), []);
    bench.flow.fence_confirmed(bench.now, fences[1].0, fences[1].1);
    bench.poll();
    assert_eq!(bench.take_ended(), [(1, NO_RAIL, false, 0)]);
}
