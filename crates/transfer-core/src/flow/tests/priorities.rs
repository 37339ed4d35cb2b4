//! Which task is served first where the policy has priorities, and that none starves.

use super::rates::{Copy, OTHERS, RATE};
use super::*;
use crate::{Tent, TentConfig};

use PriorityLevel::{Bulk, Latency, Normal};

fn tent() -> AnyPolicy {
    AnyPolicy::Tent(Tent::new(TentConfig::default(), Vec::new(), Vec::new()))
}

fn classic() -> AnyPolicy {
    AnyPolicy::Classic(Classic::new(Order::RoundRobin, Vec::new(), Vec::new()))
}

fn at_level(priority: PriorityLevel, user: u64, length: u64) -> Request<'static> {
    Request { priority, ..write(user, length) }
}

/// The users of the slices in the order in which they are posted on one rail, which completes one at a time.
/// `go_on` may submit more after each.
fn order(
    policy: AnyPolicy,
    requests: &[Request<'_>],
    mut go_on: impl FnMut(&mut Flow<AnyPolicy>, usize),
) -> Vec<u64> {
    let mut flow = Flow::new(Config::default(), policy, INCARNATION, 0);
    flow.add_rail(RailSpec { max_requests: 1, ..spec(0, Access::Connection) }).unwrap();
    for request in requests {
        flow.submit(request).unwrap();
    }
    let (mut users, mut now) = (Vec::new(), Instant::ZERO);
    loop {
        let mut posted = None;
        while let Some(output) = flow.poll_output(now) {
            match output {
                Output::Connect { rail, epoch } => flow.rail_up(now, rail, epoch),
                Output::Post(post) => posted = Some(post),
                _ => {}
            }
        }
        let Some(post) = posted else { return users };
        users.push(post.user);
        now = now + Duration::from_micros(100);
        flow.completed(now, post.slice, SliceResult::Done);
        go_on(&mut flow, users.len());
    }
}

#[test]
fn the_higher_level_is_first_and_classic_has_none() {
    let requests =
        [at_level(Bulk, 1, SLICE), at_level(Normal, 2, 2 * SLICE), at_level(Latency, 3, SLICE)];
    assert_eq!(order(tent(), &requests, |_, _| {}), [3, 2, 2, 1]);
    assert_eq!(order(classic(), &requests, |_, _| {}), [1, 2, 2, 3]);
}

#[test]
fn of_two_levels_that_are_due_the_higher_is_first() {
    let requests = [Bulk, Normal, Latency].map(|level| at_level(level, level as u64, 40 * SLICE));
    let users = order(tent(), &requests, |_, _| {});
    assert_eq!(users[..15], [Latency as u64; 15]);
    assert_eq!(users[15..18], [Normal, Bulk, Latency].map(|level| level as u64));
}

#[test]
fn within_a_level_the_earliest_deadline_is_first() {
    let due = |user, millis| Request { deadline: Some(at(millis)), ..write(user, SLICE) };
    let requests = [write(1, SLICE), due(2, 900), due(3, 500), due(4, 700), due(5, 500)];
    assert_eq!(order(tent(), &requests, |_, _| {}), [3, 5, 4, 2, 1]);
    assert_eq!(order(classic(), &requests, |_, _| {}), [1, 2, 3, 4, 5]);
    // A level counts for more than a deadline.
    let late = Request { priority: Latency, ..due(6, 5000) };
    assert_eq!(order(tent(), &[due(3, 500), late], |_, _| {}), [6, 3]);
}

#[test]
fn a_task_without_a_deadline_has_one_slice_in_eight() {
    let due = |user| Request { deadline: Some(at(500_000)), ..write(user, SLICE) };
    let requests: Vec<_> = [write(1, 5 * SLICE)].into_iter().chain((2..9).map(due)).collect();
    let mut user = 9;
    let users = order(tent(), &requests, |flow, posted| {
        if posted < 40 {
            flow.submit(&due(user)).unwrap();
            user += 1;
        }
    });
    let places: Vec<_> = (0..40).filter(|&place| users[place] == 1).collect();
    assert_eq!(places, [7, 15, 23, 31, 39]);
}

#[test]
fn a_deadline_goes_with_its_task() {
    // What was canceled, or timed out, is not served any more.
    let mut flow = Flow::new(Config::default(), tent(), INCARNATION, 0);
    flow.add_rail(spec(0, Access::Connection)).unwrap();
    let due = |user, millis| Request { deadline: Some(at(millis)), ..write(user, SLICE) };
    let canceled = flow.submit(&due(1, 50)).unwrap();
    flow.submit(&due(2, 40)).unwrap();
    flow.submit(&due(3, 500)).unwrap();
    assert!(flow.cancel(at(1), canceled));
    flow.handle_timeout(at(60));
    let mut users = Vec::new();
    while let Some(output) = flow.poll_output(at(60)) {
        match output {
            Output::Connect { rail, epoch } => flow.rail_up(at(60), rail, epoch),
            Output::Post(post) => users.push(post.user),
            _ => {}
        }
    }
    assert_eq!(users, [3]);
}

/// Latency-class tasks without end, of which more wait at any time than rails hold.
#[test]
fn bulk_does_not_starve_beside_more_than_rails_carry() {
    for (length, wait) in [(1000, 4000), (SLICE, 200)] {
        let mut copy = Copy::with(tent(), &[RATE, RATE]);
        copy.priority = Bulk;
        let mut user = OTHERS;
        for millis in 0..4000 {
            while user < OTHERS + copy.others.len() as u64 + wait {
                copy.flow.submit(&at_level(Latency, user, length)).unwrap();
                user += 1;
            }
            copy.pass(at(millis));
        }
        let bulk = copy.oldest * (2 << 20);
        let other = copy.others.len() as u64 * length;
        println!("tasks of {length} bytes: {other} bytes, and {bulk} of bulk");
        // A sixteenth of the bytes at least, but for a chunk that is not whole.
        assert!(other > bulk && bulk * 20 > other, "{bulk} beside {other}");
    }
}

/// Which queue of a level has its turn does not depend on what the other levels have.
#[test]
fn queues_of_a_level_take_turns_beside_a_higher_level() {
    let elsewhere = |it| Request { peer_location: 1, ..it };
    let mut requests = vec![at_level(Bulk, 1, 100 * SLICE)];
    requests.push(elsewhere(at_level(Bulk, 2, 100 * SLICE)));
    requests.push(at_level(Latency, 3, 1000 * SLICE));
    for places in [[0, 1, 2], [2, 0, 1], [0, 2, 1]] {
        let requests = places.map(|at| requests[at]);
        let users = order(tent(), &requests, |_, _| {});
        let count = |user| users[..640].iter().filter(|it| **it == user).count();
        assert_eq!([1, 2, 3].map(count), [20, 20, 600], "{places:?}");
    }
}

/// What has its turn needs no room for all of it: short slices would never leave that.
#[test]
fn short_slices_do_not_keep_long_ones_out() {
    let mut flow = Flow::new(Config::default(), tent(), INCARNATION, 0);
    flow.add_rail(RailSpec { max_requests: 4096, ..spec(0, Access::Connection) }).unwrap();
    let (mut user, mut posted) = (1, VecDeque::new());
    let mut now = Instant::ZERO;
    for completed in 0..5000 {
        while user < completed + 1000 {
            flow.submit(&at_level(Latency, user, 1000)).unwrap();
            user += 1;
        }
        if completed == 100 {
            flow.submit(&at_level(Bulk, u64::MAX, SLICE)).unwrap();
        }
        while let Some(output) = flow.poll_output(now) {
            match output {
                Output::Connect { rail, epoch } => flow.rail_up(now, rail, epoch),
                Output::Post(post) if post.user == u64::MAX => return,
                Output::Post(post) => posted.push_back(post),
                _ => {}
            }
        }
        now = now + Duration::from_micros(40);
        let post = posted.pop_front().unwrap();
        flow.completed(now, post.slice, SliceResult::Done);
    }
    panic!("{} slices went before it", posted.len());
}

/// What small tasks take that come each 7 ms beside a copy: the 99th percentile, in microseconds; and the
/// least rate of the copy and them.
fn beside_a_copy(policy: AnyPolicy, links: &[u64]) -> (u64, u64) {
    let mut copy = Copy::with(policy, links);
    copy.priority = Bulk;
    let mut begun = Vec::new();
    for turn in 0..500 {
        copy.pass(at(200 + 7 * turn));
        copy.flow.submit(&at_level(Latency, OTHERS + turn, SLICE)).unwrap();
        begun.push(copy.now);
    }
    copy.pass(at(6000));
    let took = |(user, ended): &(u64, Instant)| {
        let begun = begun[(user - OTHERS) as usize];
        (ended.nanos() - begun.nanos()) / 1000
    };
    let mut took: Vec<u64> = copy.others.iter().map(took).collect();
    assert_eq!((took.len(), copy.breaks.len()), (500, 0));
    took.sort_unstable();
    (took[494], copy.least(1000, 3000))
}

#[test]
fn small_tasks_do_not_wait_behind_a_copy() {
    for links in [&[RATE][..], &[4 * RATE, 4 * RATE], &[2 * RATE, RATE, RATE / 2, RATE / 2]] {
        let (tent, carried) = beside_a_copy(tent(), links);
        let (classic, _) = beside_a_copy(classic(), links);
        println!("{links:?}: tent {tent} us, classic {classic} us; carried {carried}");
        assert!(tent * 3 <= classic, "{links:?}: {tent} and {classic} us");
        let sum = links.iter().sum::<u64>() * 100 / RATE;
        assert!(carried * 100 >= sum * 90, "{links:?}: {carried} of {sum}");
    }
}

/// What a level may have in flight while it leaves room must not follow from what it then carries.
#[test]
fn a_copy_fills_a_long_link_beside_a_few_small_tasks() {
    for links in [&[8 * RATE][..], &[8 * RATE, 4 * RATE]] {
        let mut copy = Copy::with(tent(), links);
        // 2 MB are under way on the first, in 31 slices.
        (copy.priority, copy.answer) = (Bulk, Duration::from_millis(10));
        for turn in 0..30 {
            copy.pass(at(1000 + 900 * turn));
            copy.flow.submit(&at_level(Latency, OTHERS + turn, SLICE)).unwrap();
        }
        copy.pass(at(28_000));
        let came: Vec<u64> = copy.came[10..].chunks(10).map(|second| second.iter().sum()).collect();
        println!("{came:?}");
        let least = *came.iter().min().unwrap();
        let sum = links.iter().sum::<u64>();
        assert!(least * 100 >= sum * 85, "{least} of {sum}: {came:?}");
        assert_eq!((copy.others.len(), copy.breaks.len()), (30, 0));
    }
}

/// Bulk that moves freely at one pair takes no turns from bulk at another, which waits behind a higher level.
#[test]
fn each_pair_of_locations_has_its_own_turns() {
    let near = |nic| crate::Priority { preferred: vec![nic], available: Vec::new() };
    let both = || vec![near(0), near(1)];
    let policy = AnyPolicy::Tent(Tent::new(TentConfig::default(), both(), both()));
    let mut flow = Flow::new(Config::default(), policy, INCARNATION, 0);
    for nic in [0, 1] {
        flow.add_rail(RailSpec { max_requests: 1, ..spec(nic, Access::Connection) }).unwrap();
    }
    for (priority, user, place) in [(Bulk, 1, 0), (Latency, 2, 1), (Bulk, 3, 1)] {
        let request = at_level(priority, user, 1000 * SLICE);
        let request = Request { local_location: place, peer_location: place, ..request };
        flow.submit(&request).unwrap();
    }
    let (mut now, mut posted, mut counts) = (Instant::ZERO, Vec::new(), [0; 4]);
    for _ in 0..320 {
        while let Some(output) = flow.poll_output(now) {
            match output {
                Output::Connect { rail, epoch } => flow.rail_up(now, rail, epoch),
                Output::Test { rail, epoch } => flow.rail_tested(now, rail, epoch),
                Output::Post(post) => posted.push(post),
                _ => {}
            }
        }
        now = now + Duration::from_micros(100);
        for post in posted.drain(..) {
            counts[post.user as usize] += 1;
            flow.completed(now, post.slice, SliceResult::Done);
        }
    }
    assert!(counts[1] >= 310, "{counts:?}");
    assert!((9..=11).contains(&counts[3]) && counts[2] >= 300, "{counts:?}");
}
