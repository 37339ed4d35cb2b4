use core::time::Duration;

use super::*;
use crate::{
    Access, Classic, End, Failure, Opcode, Order, Piece, Post, RailState, Ranges, Request,
    SliceResult, SubmitError, TaskId,
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
    aborts: Vec<(RailId, u64)>,
    fences: Vec<(RailId, u64)>,
    ended: Vec<(u64, End, bool, u64)>,
}

fn spec(nic: u16, access: Access) -> RailSpec {
    RailSpec { local_nic: nic, peer_nic: nic, transport: 0, access, max_slices: 64 }
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
        incarnation: INCARNATION,
        local_location: 0,
        peer_location: 0,
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
