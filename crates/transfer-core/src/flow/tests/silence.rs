//! Rails that are silent while others complete: patience, and how long a fence is waited for.

use super::*;

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
    }
    assert!(waited.is_sorted(), "{waited:?}");
    assert!(waited[0] <= 250 && waited[1] <= 1300 && waited[5] >= 3000, "{waited:?}");
    assert!(waited[5] <= 3010, "never more than what silence is without the others: {waited:?}");
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
