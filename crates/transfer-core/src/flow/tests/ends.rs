//! When tasks end, and what is kept until then.

use super::*;

#[test]
fn a_task_of_which_something_is_not_posted_yet_has_not_ended() {
    let rail = RailSpec { max_requests: 1, ..spec(0, Access::Connection) };
    let mut bench = Bench::with(Config::default(), &[rail]);
    let task = bench.submit(write(1, 3 * SLICE));
    bench.connect_all();
    for done in 1..=3 {
        let post = bench.take_posts()[0];
        let moved = bench.flow.completed(bench.now, post.slice, SliceResult::Done);
        assert_eq!(moved, Some(crate::Moved { user: 1, length: SLICE as u32 }));
        let progress = bench.flow.progress(task);
        assert_eq!(
            progress.map(|progress| progress.transferred),
            (done < 3).then_some(done * SLICE)
        );
        bench.poll();
    }
    assert_eq!(bench.take_ended(), [(1, End::Completed, false, 3 * SLICE)]);
}

#[test]
fn what_has_arrived_is_told_once() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    let task = bench.submit(write(7, SLICE - 10));
    let behind = bench.submit(write(8, 4 * SLICE));
    // By their numbers too.
    assert_ne!(task.to_bits(), behind.to_bits());
    assert_eq!([task, behind].map(|it| TaskId::from_bits(it.to_bits())), [task, behind]);
    bench.connect_all();
    let posts = bench.take_posts();
    let now = bench.now;
    let mut tell = |post: &Post, result| {
        // By what a work request says.
        let slice = crate::SliceId::from_bits(post.slice.to_bits());
        bench.flow.completed(now, slice, result).map(|moved| (moved.user, moved.length))
    };
    assert_eq!(tell(&posts[0], SliceResult::Done), Some((7, SLICE as u32 - 10)));
    assert_eq!(tell(&posts[0], SliceResult::Done), None, "it is over");
    assert_eq!(tell(&posts[1], SliceResult::Broken), None);
    assert_eq!(tell(&posts[2], SliceResult::Flushed), None);
    // What arrived before its connection broke has arrived, also if it is told after.
    assert_eq!(tell(&posts[3], SliceResult::Done), Some((8, SLICE as u32)));
    bench.poll();
    assert_eq!((bench.flow.progress(task), bench.ended.len()), (None, 1));
    bench.abort_all();
    bench.confirm_all();
    let now = bench.now;
    let told = bench.flow.completed(now, posts[1].slice, SliceResult::Done);
    assert_eq!(told, None, "it has another name");
    let nobody = crate::SliceId::from_bits(u64::MAX);
    assert_eq!(bench.flow.completed(now, nobody, SliceResult::Done), None);
}

#[test]
fn a_canceled_task_leaves_those_behind_it_in_their_queue() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    let first = bench.submit(write(1, 4 * SLICE));
    bench.connect_all();
    bench.posts.clear();
    bench.submit(write(2, SLICE));
    assert_eq!(bench.posts, [], "the rail is full");
    bench.flow.cancel(bench.now, first);
    bench.poll();
    bench.abort_all();
    bench.confirm_all();
    bench.connect_all();
    assert_eq!(bench.take_posts()[0].user, 2);
}

#[test]
fn a_flow_is_idle_when_nothing_is_kept() {
    let list = [Piece { local: 1, remote: 1, length: 10 }; 40];
    let listed = Request { ranges: Ranges::List(&list), ..write(1, 1) };
    for request in [write(1, SLICE), read(1, SLICE), listed] {
        let mut bench = Bench::new();
        assert!(bench.flow.is_idle());
        let task = bench.submit(request);
        assert!(!bench.flow.is_idle(), "nothing is posted yet");
        bench.connect_all();
        assert!(!bench.flow.is_idle());
        bench.flow.cancel(bench.now, task);
        bench.poll();
        assert!(!bench.flow.is_idle(), "it is held");
        bench.abort_all();
        bench.confirm_all();
        assert!(bench.flow.is_idle());
    }
}

#[test]
fn epochs_rise_above_all_that_were_used() {
    let policy = Classic::new(Order::RoundRobin, Vec::new(), Vec::new());
    let mut bench = Bench::new();
    bench.flow = Flow::new(Config::default(), policy, INCARNATION, 100);
    for nic in [0, 1] {
        bench.flow.add_rail(spec(nic, Access::Connection)).unwrap();
    }
    assert_eq!(bench.flow.epoch(), 100);
    bench.submit(write(1, 1));
    assert_eq!(bench.connects, [(RailId(0), 101), (RailId(1), 102)]);
    assert_eq!((bench.flow.epoch(), bench.rail(0).epoch()), (102, 101));
    bench.flow.rail_refused(bench.now, RailId(0), 101, 500);
    assert_eq!(bench.flow.epoch(), 500);
}

#[test]
fn timers_that_are_told_late_count() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, SLICE));
    // Nobody looked at the clock for long.
    bench.now = at(100_000);
    bench.flow.handle_timeout(bench.now);
    bench.poll();
    assert_eq!(bench.aborts, [(RailId(0), 1)], "it was connecting for too long");
}

/// The requests of a slice may fail one after the other.
#[test]
fn errors_of_one_post_are_one_attempt() {
    let config = Config { max_attempts: 2, ..Config::default() };
    let mut bench = Bench::with(config, &[spec(0, Access::Connection)]);
    bench.submit(write(1, SLICE));
    bench.connect_all();
    for ended in [&[][..], &[(1, End::Failed(Failure::Attempts), false, 0)]] {
        let post = bench.take_posts()[0];
        (0..3).for_each(|_| bench.complete(post, SliceResult::Broken));
        bench.abort_all();
        bench.confirm_all();
        assert_eq!(bench.take_ended(), ended);
        bench.pass(bench.now + Duration::from_secs(1));
        bench.connect_all();
    }
}

#[test]
fn a_slice_on_which_rails_fall_silent_fails_after_so_many() {
    for (max_attempts, silences) in [(1, 1), (2, 2), (3, 3)] {
        let config = Config { max_attempts, ..Config::default() };
        let mut bench = Bench::with(config, &[0, 1, 2].map(|nic| spec(nic, Access::Connection)));
        bench.submit(write(1, SLICE));
        bench.connect_all();
        for silence in 1..=silences {
            assert_eq!(bench.ended, [], "{silence} of {silences}");
            let until = bench.now + Duration::from_secs(3);
            bench.pass(until);
            bench.abort_all();
            bench.confirm_all();
        }
        let attempts = End::Failed(Failure::Attempts);
        assert_eq!(bench.take_ended(), [(1, attempts, false, 0)], "{max_attempts}");
    }
}

#[test]
fn a_rest_of_so_much_goes_along() {
    let slice = SLICE as u32;
    for (fragment_ratio, length, lengths) in [
        (1, 2 * SLICE, &[2 * slice][..]),
        (1, 2 * SLICE + 1, &[slice, slice + 1]),
        (2, SLICE + SLICE / 2, &[slice + slice / 2]),
        (2, SLICE + SLICE / 2 + 1, &[slice, slice / 2 + 1]),
        (4, SLICE + SLICE / 4, &[slice + slice / 4]),
        (4, SLICE + SLICE / 4 + 1, &[slice, slice / 4 + 1]),
        (u32::MAX, SLICE + 1, &[slice, 1]),
    ] {
        let config = Config { fragment_ratio, ..Config::default() };
        let mut bench = Bench::with(config, &[spec(0, Access::Connection)]);
        bench.submit(write(1, length));
        bench.connect_all();
        let posted: Vec<u32> = bench.take_posts().iter().map(|post| post.length).collect();
        assert_eq!(posted, lengths, "{length} bytes, a {fragment_ratio}th");
    }
}

#[test]
#[should_panic(expected = "fragment_ratio")]
fn a_rest_is_no_share_of_nothing() {
    Bench::with(Config { fragment_ratio: 0, ..Config::default() }, &[]);
}

/// A task that is about to end for another reason may wait for what is in flight on a rail that is silent.
#[test]
fn cancel_ends_the_access_of_what_is_about_to_end() {
    let mut bench = Bench::new();
    let task = bench.submit(write(7, 2 * SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    assert_eq!([posts[0].rail, posts[1].rail], [RailId(0), RailId(1)]);
    bench.complete(posts[0], SliceResult::Refused);
    let aborted = |bench: &Bench| bench.aborts.iter().map(|abort| abort.0).collect::<Vec<_>>();
    assert_eq!(aborted(&bench), [RailId(0)], "the other one is waited for");
    assert!(!bench.flow.cancel(bench.now, task), "it is about to end");
    bench.poll();
    assert_eq!(aborted(&bench), [RailId(0), RailId(1)]);
    bench.abort_all();
    bench.pass(at(1999));
    assert_eq!(bench.take_ended(), []);
    bench.pass(at(2000));
    assert_eq!(bench.take_ended(), [(7, End::Failed(Failure::Refused), true, 0)]);
    assert!(!bench.flow.cancel(bench.now, task), "it is over");
}

#[test]
fn cancel_says_whether_it_ends_the_task_and_slices_whose_they_are() {
    let mut bench = Bench::new();
    let [first, second] = [7, 8].map(|user| bench.submit(write(user, SLICE)));
    bench.connect_all();
    let posts = bench.take_posts();
    assert_eq!(
        posts.iter().map(|post| bench.flow.user(post.slice)).collect::<Vec<_>>(),
        [Some(7), Some(8)]
    );
    bench.complete(posts[0], SliceResult::Done);
    assert_eq!(bench.flow.user(posts[0].slice), None);
    assert!(!bench.flow.cancel(bench.now, first), "it is over");
    assert!(bench.flow.cancel(bench.now, second));
    assert!(!bench.flow.cancel(bench.now, second), "it is about to end");
    assert_eq!(bench.flow.user(posts[1].slice), Some(8), "it is held");
}
