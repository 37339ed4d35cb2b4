mod closing;
mod counters;
mod ends;
mod fences;
mod own;
mod patience;
mod priorities;

mod rates;
mod silence;
mod tent;
mod turns;

use core::time::Duration;

use super::*;
use crate::{
    Access, AnyPolicy, Borders, Classic, End, Failure, Opcode, Order, Piece, Post, PriorityLevel,
    RailState, Ranges, Request, SliceResult, SubmitError, TaskId,
};

const INCARNATION: u64 = 77;

fn at(millis: u64) -> Instant {
    Instant::from_nanos(millis * 1_000_000)
}

/// A flow, and all that it has had done.
struct Bench {
    flow: Flow<Classic>,
    now: Instant,
    posts: Vec<Post>,
    connects: Vec<(RailId, u64)>,
    tests: Vec<(RailId, u64)>,
    /// Whether tests are answered at once.
    answers_tests: bool,
    aborts: Vec<(RailId, u64)>,
    fences: Vec<(RailId, u64)>,
    ended: Vec<(u64, End, bool, u64)>,
}

fn spec(nic: u16, access: Access) -> RailSpec {
    RailSpec { local_nic: nic, peer_nic: nic, transport: 0, access, max_requests: 64 }
}

impl Bench {
    fn with(config: Config, rails: &[RailSpec]) -> Self {
        let policy = Classic::new(Order::RoundRobin, Vec::new(), Vec::new());
        let mut flow = Flow::new(config, policy, INCARNATION, 0);
        for rail in rails {
            flow.add_rail(*rail).unwrap();
        }
        Self {
            flow,
            now: Instant::ZERO,
            posts: Vec::new(),
            connects: Vec::new(),
            tests: Vec::new(),
            answers_tests: true,
            aborts: Vec::new(),
            fences: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Two rails over connections.
    fn new() -> Self {
        Self::with(Config::default(), &[0, 1].map(|nic| spec(nic, Access::Connection)))
    }

    fn submit(&mut self, request: Request<'_>) -> TaskId {
        let task = self.flow.submit(&request).unwrap();
        self.poll();
        task
    }

    /// Does what the flow wants: each list keeps what was new.
    fn poll(&mut self) {
        while let Some(output) = self.flow.poll_output(self.now) {
            match output {
                Output::Post(post) => self.posts.push(post),
                Output::Connect { rail, epoch } => self.connects.push((rail, epoch)),
                Output::Test { rail, epoch } => {
                    self.tests.push((rail, epoch));
                    if self.answers_tests {
                        self.flow.rail_tested(self.now, rail, epoch);
                    }
                }
                Output::Abort { rail, epoch } => self.aborts.push((rail, epoch)),
                Output::Fence { rail, epoch } => self.fences.push((rail, epoch)),
                Output::Ended(ended) => {
                    assert_eq!(self.flow.progress(ended.task), None);
                    let undefined = ended.target_undefined;
                    self.ended.push((ended.user, ended.end, undefined, ended.transferred));
                }
            }
        }
    }

    fn connect_all(&mut self) {
        for (rail, epoch) in core::mem::take(&mut self.connects) {
            self.flow.rail_up(self.now, rail, epoch);
        }
        self.poll();
    }

    fn complete(&mut self, post: Post, result: SliceResult) {
        self.flow.completed(self.now, post.slice, result);
        self.poll();
    }

    fn abort_all(&mut self) {
        for (rail, epoch) in core::mem::take(&mut self.aborts) {
            self.flow.rail_aborted(self.now, rail, epoch);
        }
        self.poll();
    }

    fn confirm_all(&mut self) {
        for (rail, epoch) in core::mem::take(&mut self.fences) {
            self.flow.fence_confirmed(self.now, rail, epoch);
        }
        self.poll();
    }

    /// Lets time pass up to then, with all timers in between.
    fn pass(&mut self, until: Instant) {
        while let Some(next) = self.flow.poll_timeout().filter(|&next| next <= until) {
            assert!(next >= self.now || self.flow.poll_timeout().is_some());
            self.now = self.now.max(next);
            self.flow.handle_timeout(self.now);
            self.poll();
        }
        self.now = until;
    }

    fn take_posts(&mut self) -> Vec<Post> {
        core::mem::take(&mut self.posts)
    }

    fn take_ended(&mut self) -> Vec<(u64, End, bool, u64)> {
        core::mem::take(&mut self.ended)
    }

    fn rail(&self, rail: u16) -> &Rail {
        &self.flow.rails()[usize::from(rail)]
    }
}

fn request(opcode: Opcode, user: u64, length: u64) -> Request<'static> {
    Request {
        opcode,
        ranges: Ranges::Contiguous(Piece { local: user << 32, remote: user << 40, length }),
        deadline: None,
        priority: PriorityLevel::Normal,
        incarnation: INCARNATION,
        local_location: 0,
        peer_location: 0,
        local_borders: Borders::NONE,
        peer_borders: Borders::NONE,
        user,
    }
}

fn write(user: u64, length: u64) -> Request<'static> {
    request(Opcode::Write, user, length)
}

fn read(user: u64, length: u64) -> Request<'static> {
    request(Opcode::Read, user, length)
}

const SLICE: u64 = 64 << 10;

#[test]
fn slices_go_over_all_rails_and_the_last_ends_the_task() {
    let mut bench = Bench::new();
    let task = bench.submit(write(5, 4 * SLICE));
    assert!(bench.flow.progress(task).unwrap().waiting);
    assert_eq!(bench.connects, [(RailId(0), 1), (RailId(1), 2)]);
    bench.connect_all();
    let posts = bench.take_posts();
    let rails: Vec<u16> = posts.iter().map(|post| post.rail.0).collect();
    assert_eq!(rails, [0, 1, 0, 1]);
    for (index, post) in posts.iter().enumerate() {
        let offset = index as u64 * SLICE;
        let first = Piece {
            local: (5 << 32) + offset,
            remote: (5 << 40) + offset,
            length: 4 * SLICE - offset,
        };
        assert_eq!((post.user, post.length, post.pieces, post.first), (5, SLICE as u32, 1, first));
        let pieces: Vec<Piece> = bench.flow.pieces(post.slice).collect();
        assert_eq!(pieces, [Piece { length: SLICE, ..first }]);
    }
    assert_eq!(bench.rail(0).bytes_in_flight(), 2 * SLICE);
    assert_eq!(bench.rail(0).slices_in_flight(), 2);
    for (done, post) in posts.iter().enumerate() {
        let progress = bench.flow.progress(task).unwrap();
        assert_eq!((progress.waiting, progress.transferred), (false, done as u64 * SLICE));
        bench.complete(*post, SliceResult::Done);
        bench.complete(*post, SliceResult::Done);
    }
    assert_eq!(bench.take_ended(), [(5, End::Completed, false, 4 * SLICE)]);
    assert!(bench.flow.is_idle());
}

#[test]
fn what_is_in_flight_is_bounded_and_the_rest_waits() {
    let mut bench = Bench::new();
    bench.submit(write(1, 100 * SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    assert_eq!(posts.len(), 8, "256 KiB on each rail");
    bench.complete(posts[0], SliceResult::Done);
    let next = bench.take_posts();
    assert_eq!(next.len(), 1);
    assert_eq!(next[0].rail, posts[0].rail);
    assert_eq!(next[0].first.local, (1 << 32) + 8 * SLICE);
}

#[test]
fn what_is_refused_changes_nothing() {
    let config = Config { max_tasks: 2, max_locations: 1, max_pieces: 32, ..Config::default() };
    let mut bench = Bench::with(config, &[spec(0, Access::Connection)]);
    let mut submit = |request| bench.flow.submit(&request).unwrap_err();
    let stale = Request { incarnation: 1, ..write(1, 1) };
    assert_eq!(submit(stale), SubmitError::Stale { current: INCARNATION });
    assert_eq!(submit(write(1, 0)), SubmitError::ZeroLength);
    bench.flow.submit(&write(1, 1)).unwrap();
    let elsewhere = Request { local_location: 1, ..write(1, 1) };
    assert_eq!(bench.flow.submit(&elsewhere), Err(SubmitError::TooManyLocations { limit: 1 }));
    let list = [Piece { local: 1, remote: 1, length: 1 }; 33];
    let long = Request { ranges: Ranges::List(&list), ..write(1, 1) };
    assert_eq!(bench.flow.submit(&long), Err(SubmitError::TooManyPieces { limit: 32 }));
    bench.flow.submit(&write(2, 1)).unwrap();
    assert_eq!(bench.flow.submit(&write(3, 1)), Err(SubmitError::TooManyTasks { limit: 2 }));
    assert_eq!(bench.flow.tasks(), 2);
}

#[test]
fn what_was_not_posted_ends_at_once() {
    let mut bench = Bench::new();
    let tasks = [1, 2].map(|user| bench.submit(write(user, SLICE)));
    bench.flow.cancel(bench.now, tasks[0]);
    bench.poll();
    assert_eq!(bench.take_ended(), [(1, End::Canceled, false, 0)]);
    bench.flow.cancel(bench.now, tasks[0]);
    bench.poll();
    assert_eq!((bench.take_ended(), bench.flow.tasks()), (vec![], 1));
}

#[test]
fn a_deadline_is_kept_with_a_rail_and_without() {
    let mut bench = Bench::new();
    let deadline = Some(at(50));
    bench.submit(Request { deadline, ..write(1, SLICE) });
    bench.submit(Request { deadline: Some(at(10_000)), ..write(2, SLICE) });
    bench.pass(at(49));
    assert_eq!(bench.take_ended(), []);
    bench.pass(at(52));
    assert_eq!(bench.take_ended(), [(1, End::Timeout, false, 0)]);
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Done);
    bench.submit(Request { deadline: Some(at(100)), ..write(3, SLICE) });
    bench.pass(at(102));
    assert_eq!((bench.aborts.len(), bench.fences.len()), (1, 1));
    bench.abort_all();
    bench.confirm_all();
    assert_eq!(
        bench.take_ended(),
        [(2, End::Completed, false, SLICE), (3, End::Timeout, false, 0)]
    );
    // The deadline of a task that has ended does not come.
    bench.pass(at(20_000));
    assert_eq!((bench.take_ended(), bench.flow.poll_timeout()), (vec![], None));
}

#[test]
fn without_a_rail_tasks_fail_after_a_while() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, SLICE));
    for _ in 0..200 {
        let next = bench.flow.poll_timeout().unwrap();
        bench.pass(next);
        for (rail, epoch) in core::mem::take(&mut bench.connects) {
            bench.flow.rail_down(bench.now, rail, epoch);
            bench.poll();
        }
        if !bench.ended.is_empty() {
            break;
        }
    }
    assert_eq!(bench.take_ended(), [(1, End::Failed(Failure::NoRail), false, 0)]);
    assert_eq!(bench.now, at(4000));
    // Those after it have their own time.
    bench.submit(write(2, SLICE));
    bench.pass(at(7900));
    assert_eq!(bench.take_ended(), []);
}

#[test]
fn connecting_takes_a_limited_time_and_is_tried_again() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, SLICE));
    assert_eq!(bench.connects, [(RailId(0), 1)]);
    bench.pass(at(999));
    assert_eq!(bench.aborts, []);
    bench.pass(at(1009));
    assert_eq!((&bench.aborts[..], bench.connects.len()), (&[(RailId(0), 1)][..], 1));
    bench.pass(at(1010));
    assert_eq!(bench.connects[1], (RailId(0), 2));
    bench.flow.rail_up(bench.now, RailId(0), 1);
    assert_eq!(bench.rail(0).state(), RailState::Connecting, "the first was given up");
    bench.flow.rail_refused(bench.now, RailId(0), 2, 100);
    bench.pass(at(1100));
    assert_eq!(bench.connects[2], (RailId(0), 101), "above what the peer takes");
    bench.flow.rail_refused(bench.now, RailId(0), 101, u64::MAX);
    bench.pass(at(2100));
    assert_eq!(bench.connects[3], (RailId(0), u64::MAX / 2 + 1));
}

#[test]
fn a_slice_fails_only_so_often() {
    let config = Config { max_attempts: 3, ..Config::default() };
    let mut bench = Bench::with(config, &[0, 1, 2].map(|nic| spec(nic, Access::Connection)));
    bench.submit(write(1, SLICE));
    bench.submit(write(2, SLICE));
    bench.connect_all();
    for _ in 0..3 {
        assert_eq!(bench.take_ended(), []);
        let post = *bench.posts.iter().rfind(|post| post.user == 1).unwrap();
        bench.complete(post, SliceResult::Broken);
        bench.abort_all();
        bench.confirm_all();
    }
    assert_eq!(bench.take_ended(), [(1, End::Failed(Failure::Attempts), false, 0)]);
}

#[test]
fn those_that_are_flushed_with_another_lose_no_attempt() {
    let config = Config { max_attempts: 1, ..Config::default() };
    let mut bench = Bench::with(config, &[spec(0, Access::Connection)]);
    bench.submit(write(1, SLICE));
    bench.submit(write(2, SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    bench.complete(posts[1], SliceResult::Flushed);
    bench.abort_all();
    bench.confirm_all();
    assert_eq!(bench.take_ended(), [(1, End::Failed(Failure::Attempts), false, 0)]);
    bench.pass(at(10));
    bench.connect_all();
    assert_eq!(bench.take_posts()[0].user, 2);
}

#[test]
fn what_memory_does_not_allow_is_not_tried_again() {
    let mut bench = Bench::new();
    bench.submit(write(1, 3 * SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Refused);
    bench.abort_all();
    bench.confirm_all();
    assert_eq!(bench.take_ended(), [], "the other rail's is waited for");
    bench.complete(posts[1], SliceResult::Done);
    assert_eq!(bench.take_ended(), [(1, End::Failed(Failure::Refused), false, SLICE)]);
    assert!(bench.rail(0).may_connect(bench.now), "the rail did what it could");
}

#[test]
fn a_rail_on_which_nothing_completes_has_failed() {
    let mut bench = Bench::new();
    bench.submit(write(1, 3 * SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.pass(at(2000));
    bench.complete(posts[0], SliceResult::Done);
    bench.pass(at(2999));
    assert_eq!(bench.rail(1).oldest_age(bench.now), Some(Duration::from_millis(2999)));
    assert_eq!(bench.aborts, []);
    bench.pass(at(3000));
    assert_eq!(bench.aborts, [(RailId(1), 2)], "the other one has shown that it lives");
    bench.pass(at(4999));
    assert_eq!(bench.aborts.len(), 1);
    bench.pass(at(5000));
    assert_eq!(bench.aborts.len(), 2);
    // One that has nothing to do does not fail.
    let mut bench = Bench::new();
    bench.submit(write(1, 1));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Done);
    bench.pass(at(100_000));
    assert!(bench.rail(0).is_up() && bench.flow.poll_timeout().is_none());
}

/// Two rails that are measured: a slice takes 10 ms. On each are the 256 KiB that are allowed. No slice
/// may fail.
fn measured() -> (Bench, VecDeque<Post>) {
    let config = Config { max_attempts: 1, ..Config::default() };
    let mut bench = Bench::with(config, &[0, 1].map(|nic| spec(nic, Access::Connection)));
    bench.submit(write(1, 2 * SLICE));
    bench.connect_all();
    bench.pass(at(10));
    for post in bench.take_posts() {
        bench.complete(post, SliceResult::Done);
    }
    bench.take_ended();
    bench.submit(write(2, 64 * SLICE));
    let posts: VecDeque<Post> = bench.take_posts().into();
    assert_eq!(posts.iter().filter(|post| post.rail == RailId(1)).count(), 4);
    assert_eq!(posts.len(), 8);
    (bench, posts)
}

#[test]
fn a_rail_that_is_silent_while_another_completes_has_failed_soon() {
    let (mut bench, mut posts) = measured();
    let mut held = Vec::new();
    posts.retain(|post| {
        held.extend((post.rail == RailId(1)).then_some(post.first));
        post.rail == RailId(0)
    });
    for step in 2..=30 {
        bench.pass(at(10 * step));
        // What it has in flight takes it 40 ms. It is suspected after four times that, and judged when
        // the other one has completed something after half as long again.
        assert_eq!(bench.aborts.is_empty(), step < 25, "at {step}0 ms");
        let post = posts.pop_front().unwrap();
        bench.complete(post, SliceResult::Done);
        posts.extend(bench.take_posts());
    }
    assert_eq!(bench.aborts, [(RailId(1), 2)]);
    assert_eq!(bench.fences[0], (RailId(1), 2));
    // The other one takes over what was held, and first.
    bench.abort_all();
    bench.confirm_all();
    for _ in 0..4 {
        bench.complete(posts.pop_front().unwrap(), SliceResult::Done);
    }
    let again: Vec<Piece> = bench.take_posts().iter().map(|post| post.first).collect();
    assert_eq!(again, held);
    assert_eq!(bench.ended, [], "that the rail was silent was not the slice's fault");
}

#[test]
fn a_rail_that_comes_later_begins_with_one_slice() {
    let mut bench = Bench::new();
    bench.submit(write(1, 640 * SLICE));
    let late = bench.connects.pop().unwrap();
    bench.connect_all();
    let mut posts: VecDeque<Post> = bench.take_posts().into();
    for step in 1..=40 {
        bench.pass(at(10 * step));
        if step == 10 {
            bench.connects.push(late);
            bench.connect_all();
            let on_late = |post: &&Post| post.rail == late.0;
            assert_eq!(bench.posts.iter().filter(on_late).count(), 1);
        }
        posts.extend(bench.take_posts().into_iter().filter(|post| post.rail != late.0));
        let post = posts.pop_front().unwrap();
        bench.complete(post, SliceResult::Done);
        // The other one is given 160 ms; this one, of which nothing is known, 320 ms from 100 ms.
        assert_eq!(bench.aborts, []);
    }
    for step in 41..=60 {
        bench.pass(at(10 * step));
        posts.extend(bench.take_posts());
        bench.complete(posts.pop_front().unwrap(), SliceResult::Done);
    }
    assert_eq!(bench.aborts, [late]);
}

/// A completion may be there already, and be told after the timer.
#[test]
fn a_completion_that_is_told_late_keeps_its_rail() {
    let (mut bench, mut posts) = measured();
    let mut held = Vec::new();
    posts.retain(|post| {
        held.extend((post.rail == RailId(1)).then_some(*post));
        post.rail == RailId(0)
    });
    for step in 2..=30 {
        bench.pass(at(10 * step));
        assert_eq!(bench.aborts, [], "at {step}0 ms");
        if step == 17 {
            bench.complete(held[0], SliceResult::Done);
        }
        bench.complete(posts.pop_front().unwrap(), SliceResult::Done);
        posts.extend(bench.take_posts().into_iter().filter(|post| post.rail == RailId(0)));
    }
}

#[test]
fn rails_that_are_silent_together_are_given_time() {
    let (mut bench, posts) = measured();
    bench.pass(at(3009));
    assert_eq!(bench.aborts, []);
    // This process was stopped, say, and what has completed meanwhile comes in one go.
    for post in posts {
        bench.complete(post, SliceResult::Done);
    }
    bench.pass(at(3010));
    assert_eq!(bench.aborts, []);
    let (mut bench, _) = measured();
    bench.pass(at(3010));
    assert_eq!(bench.aborts.len(), 2);
}

#[test]
fn own_copies_end_by_themselves() {
    let config = Config { max_attempts: 2, ..Config::default() };
    let mut bench = Bench::with(config, &[spec(0, Access::Own)]);
    bench.submit(write(1, SLICE));
    let task = bench.submit(write(2, SLICE));
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    assert_eq!(bench.aborts, []);
    let again = bench.take_posts();
    assert_eq!(again.len(), 1);
    bench.complete(again[0], SliceResult::Broken);
    assert_eq!(bench.take_ended(), [(1, End::Failed(Failure::Attempts), false, 0)]);
    bench.flow.cancel(bench.now, task);
    bench.poll();
    assert_eq!((bench.take_ended(), bench.fences.len()), (vec![], 0));
    bench.abort_all();
    assert_eq!(bench.take_ended(), [(2, End::Canceled, false, 0)], "no peer is asked");
}

#[test]
fn a_peer_that_was_restarted_has_nothing_of_before() {
    let mut bench =
        Bench::with(Config::default(), &[0, 1, 2].map(|nic| spec(nic, Access::Connection)));
    bench.submit(write(1, SLICE));
    let [first, second, third] = bench.connects[..] else { panic!() };
    for (rail, epoch) in [first, second] {
        bench.flow.rail_up(bench.now, rail, epoch);
    }
    bench.poll();
    bench.submit(write(2, SLICE));
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Broken);
    bench.aborts.clear();
    bench.flow.peer_restarted(bench.now, INCARNATION);
    bench.poll();
    assert_eq!(bench.aborts, [], "nothing new");
    bench.flow.peer_restarted(bench.now, 78);
    bench.poll();
    assert_eq!(bench.aborts, [second, third]);
    assert_eq!(bench.take_ended(), [], "they still read the source");
    bench.aborts.insert(0, first);
    bench.abort_all();
    let restarted = End::Failed(Failure::PeerRestarted);
    assert_eq!(bench.take_ended(), [(1, restarted, false, 0), (2, restarted, false, 0)]);
    assert!(bench.flow.rails().iter().all(|rail| rail.may_connect(bench.now)));
    let stale = SubmitError::Stale { current: 78 };
    assert_eq!(bench.flow.submit(&write(3, 1)), Err(stale));
    let fresh = Request { incarnation: 78, ..write(3, 1) };
    bench.submit(fresh);
    assert_eq!(bench.connects.len(), 6);
    assert_eq!(bench.flow.incarnation(), 78);
}

#[test]
fn a_rail_that_fails_again_and_again_pauses_and_is_tested_by_one_slice() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, 8 * SLICE));
    for failure in 0..3 {
        bench.connect_all();
        let posts = bench.take_posts();
        assert_eq!(posts.len(), if failure == 0 { 4 } else { 1 }, "{failure}");
        bench.flow.rail_down(bench.now, RailId(0), bench.rail(0).epoch());
        bench.poll();
        bench.abort_all();
        bench.confirm_all();
        if failure < 2 {
            let next = bench.flow.poll_timeout().unwrap();
            bench.pass(next);
        }
    }
    let until = bench.now + Duration::from_secs(1);
    assert_eq!(bench.rail(0).state(), RailState::Paused(until));
    assert_eq!(bench.connects, []);
    bench.pass(until);
    bench.connect_all();
    let posts = bench.take_posts();
    assert_eq!(posts.len(), 1);
    bench.complete(posts[0], SliceResult::Done);
    assert_eq!(bench.take_posts().len(), 4, "it works");
}

#[test]
fn a_nic_that_works_again_is_not_waited_for() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, SLICE));
    while !matches!(bench.rail(0).state(), RailState::Paused(_)) {
        bench.flow.rail_down(bench.now, RailId(0), bench.rail(0).epoch());
        bench.poll();
        let next = bench.flow.poll_timeout().unwrap();
        if !matches!(bench.rail(0).state(), RailState::Paused(_)) {
            bench.pass(next);
        }
    }
    bench.connects.clear();
    let nic = bench.rail(0).spec().local_nic;
    bench.flow.nic_works(bench.now, nic + 1);
    bench.poll();
    assert_eq!(bench.connects, [], "it is another one");
    bench.flow.nic_works(bench.now, nic);
    bench.poll();
    bench.connect_all();
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Done);
    assert_eq!(bench.flow.tasks(), 0);
}

#[test]
fn queues_take_turns_and_do_not_wait_for_each_other() {
    let mut bench = Bench::with(Config::default(), &[spec(0, Access::Connection)]);
    bench.submit(write(1, 100 * SLICE));
    bench.submit(Request { peer_location: 1, ..write(2, 100 * SLICE) });
    bench.connect_all();
    let users = |posts: Vec<Post>| -> Vec<u64> { posts.iter().map(|post| post.user).collect() };
    let posts = bench.take_posts();
    bench.complete(posts[0], SliceResult::Done);
    bench.complete(posts[1], SliceResult::Done);
    assert_eq!(users(posts), [1, 2, 1, 2]);
    let mut users = users(bench.take_posts());
    users.sort_unstable();
    assert_eq!(users, [1, 2]);
}

#[test]
fn pieces_of_a_request_are_sliced_as_they_are_posted() {
    let config = Config { max_pieces: 40_000, ..Config::default() };
    let mut bench = Bench::with(config, &[spec(0, Access::Connection)]);
    let list: Vec<Piece> = (0..40_000)
        .map(|i| Piece { local: i * 8192, remote: (1 << 40) + i * 9000, length: 4096 })
        .collect();
    bench.submit(Request { ranges: Ranges::List(&list), ..write(1, 1) });
    bench.connect_all();
    let mut seen = Vec::new();
    while let Some(post) = bench.posts.pop() {
        assert!(bench.flow.slices() <= 64 / 16);
        seen.extend(bench.flow.pieces(post.slice));
        assert_eq!(post.pieces, 16);
        bench.now = bench.now + Duration::from_micros(1);
        bench.complete(post, SliceResult::Done);
    }
    seen.sort_by_key(|piece| piece.local);
    assert_eq!(seen, list);
    assert_eq!(bench.take_ended(), [(1, End::Completed, false, 40_000 * 4096)]);
    assert!(bench.flow.is_idle());
}

#[test]
fn each_piece_takes_a_place_in_the_send_queue_and_gives_it_back() {
    let config = Config { max_slice_pieces: 3, ..Config::default() };
    let rail = RailSpec { max_requests: 5, ..spec(0, Access::Connection) };
    let mut bench = Bench::with(config, &[rail]);
    let first = Piece { local: 0, remote: 1 << 40, length: 64 };
    let ranges = Ranges::Strided { first, count: 11, local_stride: 64, remote_stride: 128 };
    bench.submit(Request { ranges, ..write(1, 1) });
    bench.connect_all();
    let requests = |posts: &[Post]| posts.iter().map(|post| post.pieces).collect::<Vec<_>>();
    let posts = bench.take_posts();
    assert_eq!(requests(&posts), [3, 3], "one goes beyond");
    assert_eq!(bench.flow.requests(posts[0].slice), Some(3));
    bench.complete(posts[0], SliceResult::Done);
    assert_eq!(bench.flow.requests(posts[0].slice), None);
    assert_eq!(requests(&bench.take_posts()), [3]);
    bench.complete(posts[1], SliceResult::Done);
    assert_eq!(requests(&bench.take_posts()), [2]);
}

#[test]
fn a_flow_has_a_limited_number_of_rails() {
    let mut bench = Bench::with(Config::default(), &[]);
    for rail in 0..MAX_RAILS {
        assert_eq!(bench.flow.add_rail(spec(0, Access::Own)), Some(RailId(rail as u16)));
    }
    assert_eq!(bench.flow.add_rail(spec(0, Access::Own)), None);
}
