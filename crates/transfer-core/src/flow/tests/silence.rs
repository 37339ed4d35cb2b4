//! Rails that are silent while others complete: tests of those that have nothing to do, patience, and
//! how long a fence is waited for.

use super::*;

/// Two rails of which one is measured and has nothing in flight, and one has a slice.
fn one_busy() -> (Bench, Post) {
    let mut bench = Bench::new();
    bench.answers_tests = false;
    bench.submit(write(1, 2 * SLICE));
    bench.connect_all();
    bench.pass(at(10));
    for post in bench.take_posts() {
        bench.complete(post, SliceResult::Done);
    }
    bench.take_ended();
    bench.submit(write(2, SLICE));
    let post = bench.take_posts()[0];
    assert_eq!(post.rail, RailId(0));
    (bench, post)
}

/// What waits in order for a slice gives the other rails nothing to do.
#[test]
fn rails_that_have_nothing_to_do_are_tested_to_judge_one_that_is_silent() {
    let (mut bench, _) = one_busy();
    bench.pass(at(109));
    assert_eq!(bench.tests, []);
    bench.pass(at(110));
    assert_eq!(bench.tests, [(RailId(1), 2)]);
    bench.pass(at(1000));
    assert_eq!(bench.tests.len(), 1, "it is under way");
    assert_eq!(bench.aborts, [], "perhaps the peer is silent");
    bench.flow.rail_tested(bench.now, RailId(1), 2);
    bench.pass(at(1100));
    assert_eq!((bench.tests.len(), bench.aborts.len()), (2, 0), "once more, as told late");
    bench.flow.rail_tested(bench.now, RailId(1), 2);
    bench.pass(at(1200));
    assert_eq!(bench.aborts, [(RailId(0), 1)]);
    // It was a rail that has something to do that was silent, and not the tested one.
    assert!(bench.rail(1).is_up());
}

#[test]
fn a_test_that_fails_breaks_its_rail() {
    let (mut bench, post) = one_busy();
    bench.pass(at(110));
    bench.flow.rail_down(bench.now, RailId(1), 2);
    bench.poll();
    assert_eq!((&bench.aborts[..], bench.fences.len()), (&[(RailId(1), 2)][..], 0));
    bench.complete(post, SliceResult::Done);
    assert_eq!(bench.take_ended(), [(2, End::Completed, false, SLICE)]);
}

#[test]
fn a_rail_that_has_failed_is_tested_before_it_gets_slices() {
    let mut bench = Bench::new();
    bench.answers_tests = false;
    bench.submit(write(1, 64 * SLICE));
    bench.connect_all();
    assert_eq!(bench.tests, [], "nothing speaks against it");
    bench.flow.rail_down(bench.now, RailId(0), 1);
    bench.poll();
    bench.abort_all();
    bench.confirm_all();
    bench.pass(at(10));
    let again = bench.connects.pop().unwrap();
    assert_eq!(again.0, RailId(0));
    bench.take_posts();
    bench.connects.push(again);
    bench.connect_all();
    let posted = bench.take_posts();
    assert_eq!((&bench.tests[..], posted.len()), (&[again][..], 0));
    assert_eq!(bench.rail(0).state(), RailState::Connecting);
    // Told twice it is one test; an answer of another connection is none.
    bench.flow.rail_up(bench.now, again.0, again.1);
    bench.flow.rail_tested(bench.now, again.0, 1);
    bench.poll();
    assert_eq!((bench.tests.len(), bench.take_posts().len()), (1, 0));
    bench.flow.rail_tested(bench.now, again.0, again.1);
    bench.poll();
    let posts = bench.take_posts();
    assert_eq!(posts.len(), 1, "and then one slice");
    bench.complete(posts[0], SliceResult::Done);
    assert!(bench.take_posts().len() > 1);
}

/// The request for a connection came twice: the second one is refused, as its number was used.
#[test]
fn a_refusal_of_what_is_connected_already_ends_no_test() {
    let mut bench = Bench::new();
    bench.answers_tests = false;
    bench.submit(write(1, 64 * SLICE));
    bench.connect_all();
    bench.flow.rail_down(bench.now, RailId(0), 1);
    bench.poll();
    bench.abort_all();
    bench.confirm_all();
    bench.pass(at(10));
    let (rail, epoch) = bench.connects.pop().unwrap();
    bench.take_posts();
    bench.connects.push((rail, epoch));
    bench.connect_all();
    assert_eq!(bench.tests, [(rail, epoch)]);
    bench.flow.rail_refused(bench.now, rail, epoch, epoch);
    bench.flow.rail_tested(bench.now, rail, epoch);
    bench.poll();
    assert!(bench.rail(rail.0).is_up());
    assert_eq!(bench.aborts.iter().filter(|abort| abort.1 == epoch).count(), 0);
}

#[test]
fn a_test_without_an_answer_is_a_failure() {
    for told in [false, true] {
        let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
        bench.answers_tests = false;
        bench.submit(read(1, SLICE));
        bench.connect_all();
        bench.flow.rail_down(bench.now, RailId(0), 1);
        bench.poll();
        bench.abort_all();
        bench.pass(at(10));
        bench.connect_all();
        assert_eq!(bench.tests, [(RailId(0), 2)]);
        if told {
            bench.flow.rail_down(bench.now, RailId(0), 2);
            bench.poll();
        } else {
            bench.pass(at(1010));
        }
        assert_eq!(bench.aborts, [(RailId(0), 2)], "it has queue pairs");
        assert_eq!((bench.fences.len(), bench.rail(0).state()), (0, RailState::Down));
        bench.flow.rail_tested(bench.now, RailId(0), 2);
        assert_eq!(bench.rail(0).state(), RailState::Down, "too late");
    }
}

/// Connects two rails, and has each complete a slice after 10 ms. Tests are not answered.
fn measure_both(bench: &mut Bench) {
    bench.answers_tests = false;
    bench.submit(write(1, 2 * SLICE));
    bench.connect_all();
    bench.pass(at(10));
    bench.take_posts().into_iter().for_each(|post| bench.complete(post, SliceResult::Done));
}

#[test]
fn a_test_takes_a_place_in_the_send_queue() {
    let rails = [0, 1].map(|nic| RailSpec { max_requests: 1, ..spec(nic, Access::Connection) });
    let mut bench = Bench::with(Config::default(), &rails);
    measure_both(&mut bench);
    bench.submit(write(2, SLICE));
    bench.pass(at(110));
    assert_eq!((bench.tests.len(), bench.take_posts().len()), (1, 1));
    bench.submit(write(3, SLICE));
    assert_eq!(bench.take_posts(), []);
    bench.flow.rail_tested(bench.now, RailId(1), 2);
    bench.submit(write(4, SLICE));
    assert_eq!(bench.take_posts().len(), 1);
}

#[test]
fn own_copies_are_not_tested() {
    let mut bench = Bench::with(Config::default(), &[0, 1].map(|nic| spec(nic, Access::Own)));
    measure_both(&mut bench);
    bench.submit(write(2, SLICE));
    bench.pass(at(2900));
    assert_eq!(bench.tests, []);
    bench.flow.rail_down(bench.now, RailId(0), 1);
    bench.poll();
    bench.abort_all();
    bench.pass(at(3000));
    bench.submit(write(3, SLICE));
    bench.connect_all();
    assert_eq!((&bench.tests[..], bench.rail(0).is_up()), (&[][..], true));
}

/// Lets a rail be judged as silent at once when it may be: what the other rail has completes always.
fn judged_after(bench: &mut Bench, rail: u16) -> Duration {
    let start = bench.now;
    while bench.rail(rail).is_up() {
        assert!(bench.now < start + Duration::from_secs(5));
        let next = bench.now + Duration::from_millis(10);
        bench.pass(next);
        for post in bench.take_posts().into_iter().filter(|post| post.rail.0 != rail) {
            bench.complete(post, SliceResult::Done);
        }
    }
    bench.now.saturating_duration_since(start)
}

#[test]
fn a_rail_that_is_silent_again_has_twice_the_patience_until_it_completes_something() {
    let mut bench = Bench::new();
    bench.submit(write(1, 1 << 40));
    bench.connect_all();
    bench.pass(at(10));
    bench.take_posts().into_iter().for_each(|post| bench.complete(post, SliceResult::Done));
    let mut waited = Vec::new();
    for _ in 0..6 {
        waited.push(judged_after(&mut bench, 1).as_millis() as u64);
        bench.abort_all();
        bench.confirm_all();
        while !bench.rail(1).is_up() {
            let next = bench.now + Duration::from_millis(10);
            bench.pass(next);
            bench.connect_all();
            let others: Vec<Post> = bench.take_posts();
            let (mine, others): (Vec<_>, Vec<_>) =
                others.into_iter().partition(|post| post.rail.0 == 1);
            bench.posts.extend(mine);
            others.into_iter().for_each(|post| bench.complete(post, SliceResult::Done));
        }
        assert!(bench.rail(1).probing, "one slice shows whether it works");
    }
    assert!(waited.is_sorted(), "{waited:?}");
    assert!(waited[0] <= 250 && waited[1] <= 1300 && waited[5] >= 3000, "{waited:?}");
    assert!(waited[5] <= 3010, "never more than what silence is without the others: {waited:?}");
}

/// The peer may be about to answer.
#[test]
fn the_fence_of_a_rail_that_was_judged_early_is_waited_for_from_when_silence_would_end_it() {
    let early = [(1500, 1500), (3000, 3000), (9000, 3000)];
    let early = early.map(|(connection, until)| (true, connection, 10 + until + 4000));
    for (early, connection, until) in early.into_iter().chain([(false, 3000, 200 + 4000)]) {
        let connection_silence = Duration::from_millis(connection);
        let config = Config { connection_silence, ..Config::default() };
        let rails = [0, 1].map(|nic| spec(nic, Access::Connection));
        let mut bench = Bench::with(config, &rails);
        bench.submit(write(1, 2 * SLICE));
        bench.connect_all();
        bench.pass(at(10));
        bench.take_posts().into_iter().for_each(|post| bench.complete(post, SliceResult::Done));
        bench.take_ended();
        bench.submit(write(2, SLICE));
        if !early {
            bench.pass(at(105));
            bench.now = at(200);
            bench.flow.rail_down(bench.now, RailId(0), 1);
            bench.poll();
        }
        bench.pass(at(300));
        assert_eq!(bench.aborts, [(RailId(0), 1)]);
        bench.abort_all();
        bench.pass(at(until - 1));
        assert_eq!(bench.take_ended(), [], "{early}");
        bench.pass(at(until));
        assert_eq!(bench.take_ended(), [(2, End::Failed(Failure::NotFenced), true, 0)], "{early}");
    }
}

#[test]
fn what_is_to_end_while_its_fence_is_waited_for_has_two_seconds_from_the_first_request() {
    // When it is to end, by canceling it or its deadline, and when it does.
    for (end, ended) in [(100, 2000), (1990, 2000), (2500, 2500), (3900, 3900)] {
        for deadline in [None, Some(at(end))] {
            let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
            let task = bench.submit(Request { deadline, ..write(1, SLICE) });
            bench.submit(write(2, SLICE));
            bench.connect_all();
            bench.flow.rail_down(bench.now, RailId(0), 1);
            bench.poll();
            bench.abort_all();
            bench.pass(at(end));
            if deadline.is_none() {
                bench.flow.cancel(bench.now, task);
                bench.poll();
            }
            bench.pass(at(ended + 2));
            let how = if deadline.is_some() { End::Timeout } else { End::Canceled };
            assert_eq!(bench.take_ended(), [(1, how, true, 0)], "{end} {deadline:?}");
            bench.pass(at(3999));
            assert_eq!(bench.take_ended(), []);
            bench.confirm_all();
            assert_eq!(bench.flow.tasks(), 1, "the other one goes on");
        }
    }
}

#[test]
fn patience_is_what_a_fence_is_waited_for_at_least_its_own_time() {
    for (patience, waited) in [(1, 2), (2, 2), (30, 30)] {
        let config = Config { patience: Duration::from_secs(patience), ..Config::default() };
        let mut bench = Bench::with(config, &[spec(0, Access::Connection)]);
        bench.submit(write(1, SLICE));
        bench.connect_all();
        bench.flow.rail_down(bench.now, RailId(0), 1);
        bench.poll();
        bench.abort_all();
        bench.pass(at(1000 * waited - 1));
        assert_eq!(bench.take_ended(), []);
        bench.pass(at(1000 * waited));
        assert_eq!(bench.take_ended(), [(1, End::Failed(Failure::NotFenced), true, 0)]);
    }
}
