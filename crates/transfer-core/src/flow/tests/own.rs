//! Rails whose slices this process copies by itself.

use super::*;

fn bench() -> Bench {
    let (own, far) = (spec(0, Access::Own), spec(1, Access::Connection));
    Bench::with(Config::default(), &[own, RailSpec { transport: 1, ..far }])
}

#[test]
fn one_that_fails_again_and_again_gives_way_to_another() {
    let mut bench = bench();
    bench.submit(write(1, 4 * SLICE));
    bench.connect_all();
    let mut fails = 0;
    // As where the system forbids to reach into the other process: every copy fails.
    while bench.now < at(3000) && bench.ended.is_empty() {
        for post in bench.take_posts() {
            let result =
                if post.rail == RailId(0) { SliceResult::Broken } else { SliceResult::Done };
            fails += usize::from(result == SliceResult::Broken);
            bench.complete(post, result);
        }
        bench.abort_all();
        bench.connect_all();
        if bench.posts.is_empty() {
            let next = bench.flow.poll_timeout().unwrap_or(at(3000));
            bench.pass(next);
        }
    }
    assert_eq!(bench.take_ended(), [(1, End::Completed, false, 4 * SLICE)]);
    assert!(fails <= 6, "{fails}");
    assert!(bench.fences.is_empty(), "nobody else has access");
}

#[test]
fn three_failures_in_a_row_break_it_and_fewer_do_not() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Own)]);
    bench.submit(write(1, 100 * SLICE));
    bench.connect_all();
    for _ in 0..5 {
        for result in [SliceResult::Broken, SliceResult::Broken, SliceResult::Done] {
            let post = bench.posts.remove(0);
            bench.complete(post, result);
            assert!(bench.aborts.is_empty());
        }
    }
    // Those that ended with another one, or that may not be, are not the rail's.
    for _ in 0..5 {
        let post = bench.posts.remove(0);
        bench.complete(post, SliceResult::Flushed);
    }
    for left in [2, 1, 0] {
        assert_eq!(bench.aborts.len(), 0, "{left}");
        let post = bench.posts.remove(0);
        bench.complete(post, SliceResult::Broken);
    }
    assert_eq!(
        (&bench.aborts[..], bench.rail(0).state()),
        (&[(RailId(0), 1)][..], RailState::Fencing)
    );
    // What ends while it is stopped changes nothing more.
    let held = bench.take_posts();
    bench.complete(held[0], SliceResult::Broken);
    bench.complete(held[1], SliceResult::Done);
    assert_eq!((bench.aborts.len(), bench.take_posts().len()), (1, 0));
    bench.abort_all();
    assert_eq!(bench.rail(0).state(), RailState::Down);
    // Then one slice tests it, and one failure is enough.
    bench.pass(at(10));
    bench.connect_all();
    assert_eq!(bench.posts.len(), 1);
    let post = bench.posts.remove(0);
    bench.complete(post, SliceResult::Broken);
    assert_eq!(bench.aborts, [(RailId(0), 2)]);
    bench.abort_all();
    bench.pass(at(30));
    bench.connect_all();
    let post = bench.posts.remove(0);
    bench.complete(post, SliceResult::Done);
    let post = bench.posts.remove(0);
    bench.complete(post, SliceResult::Broken);
    assert!(bench.aborts.is_empty(), "it works again");
}

#[test]
fn a_refusal_is_of_its_task_only() {
    let mut bench = bench();
    bench.submit(write(1, SLICE));
    bench.connect_all();
    for user in 2..10 {
        let post = bench.take_posts()[0];
        bench.complete(post, SliceResult::Refused);
        assert_eq!(bench.take_ended(), [(user - 1, End::Failed(Failure::Refused), false, 0)]);
        bench.submit(write(user, SLICE));
    }
    assert!(bench.aborts.is_empty());
    assert_eq!(bench.take_posts()[0].rail, RailId(0));
}
