//! Who is posted next, and when a policy is asked.

use core::cell::Cell;

use super::*;
use crate::{Pick, Rails, SliceInfo};

/// Answers always the same, and counts how often it is asked.
#[derive(Debug)]
struct Fixed<'c>(Pick, &'c Cell<u32>);

impl Policy for Fixed<'_> {
    fn pick(&mut self, _now: Instant, _slice: &SliceInfo, _rails: &Rails<'_>) -> Pick {
        self.1.set(self.1.get() + 1);
        self.0
    }
}

fn outputs<P: Policy>(flow: &mut Flow<P>) -> Vec<Output> {
    core::iter::from_fn(|| flow.poll_output(Instant::ZERO)).collect()
}

#[test]
fn a_policy_that_asks_for_what_cannot_be_waits() {
    let posts = |outputs: Vec<Output>| -> Vec<Post> {
        let post = |output| if let Output::Post(post) = output { Some(post) } else { None };
        outputs.into_iter().filter_map(post).collect()
    };
    let asked = Cell::new(0);
    let flow = |pick| {
        let mut flow = Flow::new(Config::default(), Fixed(pick, &asked), INCARNATION, 0);
        flow.add_rail(spec(0, Access::Connection));
        flow.submit(&write(1, 100 * SLICE)).unwrap();
        flow
    };
    // Posts on a rail that is down, and on one that there is not.
    for rail in [0, 1] {
        let mut flow = flow(Pick::Post(RailId(rail)));
        assert_eq!(outputs(&mut flow), []);
    }
    assert_eq!(outputs(&mut flow(Pick::Connect(RailId(1)))), []);
    // Connects one that is up; and posts on it, full or not.
    let mut flow = flow(Pick::Connect(RailId(0)));
    assert_eq!(outputs(&mut flow), [Output::Connect { rail: RailId(0), epoch: 1 }]);
    flow.rail_up(Instant::ZERO, RailId(0), 1);
    assert_eq!(outputs(&mut flow), []);
    flow.policy.0 = Pick::Post(RailId(0));
    flow.changed();
    assert_eq!(posts(outputs(&mut flow)).len(), 4);
    // It is not asked again before there may be more room.
    let before = asked.get();
    assert_eq!(outputs(&mut flow), []);
    assert_eq!(asked.get(), before);
}

#[test]
fn what_had_no_room_does_not_hold_up_what_has() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, 3 * SLICE));
    bench.connect_all();
    assert_eq!(bench.take_posts().len(), 3);
    // 80 KiB in one slice are too much.
    let elsewhere = |user, length| Request { peer_location: 1, ..write(user, length) };
    let large = bench.submit(elsewhere(2, 80 << 10));
    bench.submit(elsewhere(3, 1000));
    assert_eq!(bench.take_posts(), [], "in order");
    bench.flow.cancel(bench.now, large);
    bench.poll();
    bench.take_ended();
    // What waits behind it is seen when something changes, and at the latest with the next one.
    bench.submit(elsewhere(4, 1000));
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, 3 * SLICE));
    bench.connect_all();
    bench.posts.clear();
    let large = bench.submit(elsewhere(2, 80 << 10));
    bench.flow.cancel(bench.now, large);
    bench.submit(elsewhere(3, 1000));
    assert_eq!(bench.take_posts().iter().map(|post| post.user).collect::<Vec<_>>(), [3]);
}

#[test]
fn a_slice_of_own_copies_that_ends_makes_room_for_others() {
    let rail = RailSpec { max_requests: 1, ..spec(0, Access::Own) };
    for result in [SliceResult::Done, SliceResult::Refused] {
        let mut bench = Bench::with(Config::default(), &[rail]);
        bench.submit(write(1, 1));
        bench.submit(Request { peer_location: 1, ..write(2, 1) });
        bench.connect_all();
        let post = bench.take_posts()[0];
        assert_eq!(post.user, 1);
        bench.complete(post, result);
        assert_eq!(bench.take_posts()[0].user, 2, "{result:?}");
    }
}

#[test]
fn a_policy_that_waits_until_a_time_is_asked_again_then() {
    let asked = Cell::new(0);
    let policy = Fixed(Pick::WaitUntil(at(5)), &asked);
    let mut flow = Flow::new(Config::default(), policy, INCARNATION, 0);
    flow.add_rail(spec(0, Access::Connection));
    flow.submit(&write(1, SLICE)).unwrap();
    assert_eq!(outputs(&mut flow), []);
    assert_eq!((asked.get(), flow.poll_timeout()), (1, Some(at(5))));
    for (now, expected) in [(4, 1), (5, 2)] {
        flow.handle_timeout(at(now));
        assert_eq!(flow.poll_output(at(now)), None);
        assert_eq!(asked.get(), expected);
    }
}

/// Posts on the first rail, and notes whether the slice leaves room for higher levels.
#[derive(Debug)]
struct Yields<'c>(&'c Cell<bool>);

impl Policy for Yields<'_> {
    fn pick(&mut self, _now: Instant, slice: &SliceInfo, _rails: &Rails<'_>) -> Pick {
        self.0.set(slice.yields);
        Pick::Post(RailId(0))
    }

    fn has_priorities(&self) -> bool {
        true
    }
}

#[test]
fn room_is_left_for_a_second_after_something_of_a_higher_level() {
    let yields = Cell::new(false);
    let mut flow = Flow::new(Config::default(), Yields(&yields), INCARNATION, 0);
    flow.add_rail(spec(0, Access::Connection));
    flow.rails[0].state = RailState::Up;
    for (priority, now, expected) in [
        (PriorityLevel::Bulk, 0, false),
        (PriorityLevel::Normal, 1000, false),
        (PriorityLevel::Latency, 1500, false),
        (PriorityLevel::Bulk, 2499, true),
        (PriorityLevel::Normal, 2499, true),
        (PriorityLevel::Normal, 2500, false),
        (PriorityLevel::Bulk, 2500, true),
        (PriorityLevel::Bulk, 3500, false),
    ] {
        flow.submit(&Request { priority, ..write(now, 1000) }).unwrap();
        assert!(matches!(flow.poll_output(at(now)), Some(Output::Post(_))));
        assert_eq!(yields.get(), expected, "{priority:?} at {now} ms");
    }
}

#[test]
fn the_oldest_byte_is_that_of_the_slice_that_was_posted_first() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, 1000));
    bench.connect_all();
    bench.now = at(10);
    bench.submit(write(2, 1000));
    let posts = bench.take_posts();
    let age = |bench: &Bench| bench.flow.rails()[0].oldest_age(at(30)).map(|age| age.as_millis());
    assert_eq!(age(&bench), Some(30));
    bench.complete(posts[0], SliceResult::Done);
    assert_eq!(age(&bench), Some(20));
    bench.complete(posts[1], SliceResult::Done);
    assert_eq!(age(&bench), None);
}

#[test]
fn of_what_waits_those_rails_are_full_that_are_up_and_have_no_room() {
    let asked = Cell::new(0);
    let mut flow = Flow::new(Config::default(), Fixed(Pick::Wait, &asked), INCARNATION, 0);
    for rail in 0..3 {
        flow.add_rail(RailSpec { max_requests: 1, ..spec(rail, Access::Connection) });
    }
    (flow.rails[0].state, flow.rails[0].requests) = (RailState::Up, 1);
    flow.rails[1].state = RailState::Up;
    flow.rails[2].requests = 1;
    flow.submit(&write(1, SLICE)).unwrap();
    assert_eq!(flow.poll_output(at(7)), None);
    let full: Vec<_> = flow.rails.iter().map(|rail| rail.full_at).collect();
    assert_eq!(full, [Some(at(7)), None, None]);
}

/// What is usual for a short time does not count.
#[test]
fn this_process_is_held_up_while_nothing_is_posted_or_completes() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, 4 * SLICE));
    bench.connect_all();
    for (now, millis) in [(5, 0), (15, 0), (40, 15), (51, 16)] {
        bench.now = at(now);
        let post = bench.posts.remove(0);
        bench.complete(post, SliceResult::Done);
        assert_eq!(bench.flow.held_up, Duration::from_millis(millis), "at {now} ms");
    }
    bench.now = at(71);
    bench.submit(write(2, SLICE));
    assert_eq!(bench.flow.held_up, Duration::from_millis(26));
}

#[test]
fn bytes_in_flight_are_of_the_level_of_their_task() {
    let yields = Cell::new(false);
    let mut flow = Flow::new(Config::default(), Yields(&yields), INCARNATION, 0);
    flow.add_rail(spec(0, Access::Connection));
    flow.rails[0].state = RailState::Up;
    let mut posts = Vec::new();
    for (priority, length) in [(PriorityLevel::Bulk, 700), (PriorityLevel::Latency, 50)] {
        flow.submit(&Request { priority, ..write(length, length) }).unwrap();
        flow.submit(&Request { priority, ..write(length, length) }).unwrap();
        let outputs = outputs(&mut flow);
        let [Output::Post(first), Output::Post(second)] = outputs[..] else { panic!() };
        posts.extend([first, second]);
    }
    for expected in [[100, 0, 1400], [100, 0, 700], [100, 0, 0], [50, 0, 0]] {
        let rail = &flow.rails[0];
        assert_eq!((rail.level_bytes, rail.bytes), (expected, expected.iter().sum::<u64>()));
        flow.completed(at(0), posts.remove(0).slice, SliceResult::Done);
    }
    assert_eq!(flow.rails[0].level_bytes, [0; 3]);
}

#[test]
fn there_are_as_many_pairs_of_locations_as_queues_have_numbers() {
    let config = Config { max_locations: usize::MAX, ..Config::default() };
    let mut bench = Bench::with(config, &[]);
    bench.submit(write(1, 1));
    // With three levels each, the last queue has number 65,534.
    for (pair, is_last) in [(21_843, false), (21_844, true)] {
        bench.flow.queues[0].pair = pair;
        let elsewhere = Request { peer_location: pair, ..write(2, 1) };
        assert_eq!(bench.flow.submit(&elsewhere).is_err(), is_last, "{pair}");
    }
}

/// Says how old the oldest byte of a rail may be; else as the classic policy.
#[derive(Debug)]
struct Ages(Classic);

impl Policy for Ages {
    fn pick(&mut self, now: Instant, slice: &SliceInfo, rails: &Rails<'_>) -> Pick {
        self.0.pick(now, slice, rails)
    }

    fn most_age(&self, _patience: Duration) -> Option<Duration> {
        Some(Duration::from_millis(300))
    }
}

/// Its oldest byte is looked at after 50 ms and then each 100 ms, and must be too old twice.
#[test]
fn a_rail_is_overdue_when_its_oldest_byte_is_as_old_as_it_may_be() {
    let classic = Classic::new(Order::RoundRobin, Vec::new(), Vec::new());
    let mut flow = Flow::new(Config::default(), Ages(classic), INCARNATION, 0);
    for nic in 0..2 {
        flow.add_rail(spec(nic, Access::Connection)).unwrap();
        flow.rails[usize::from(nic)].state = RailState::Up;
    }
    flow.submit(&write(1, 1000 * SLICE)).unwrap();
    let mut posted: [VecDeque<Post>; 2] = Default::default();
    for now in 0..450 {
        while let Some(output) = flow.poll_output(at(now)) {
            let Output::Post(post) = output else { panic!("{output:?} at {now} ms") };
            posted[usize::from(post.rail.0)].push_back(post);
        }
        // Each completes one each 5 ms; but the oldest one of the second rail hangs.
        if now % 5 == 0 && now > 0 {
            for (rail, posted) in posted.iter_mut().enumerate() {
                let post = posted.remove(rail).unwrap();
                flow.completed(at(now), post.slice, SliceResult::Done);
            }
        }
        flow.handle_timeout(at(now));
    }
    assert!(flow.rails.iter().all(Rail::is_up));
    flow.handle_timeout(at(450));
    assert_eq!((flow.rails[0].is_up(), flow.rails[1].is_up()), (true, false));
}
