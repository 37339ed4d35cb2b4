//! In a steady state a flow allocates nothing: not for a task, a slice, a list of pieces or a
//! deadline, and not when connections break.

use std::alloc::System;

use millstream_transfer_core::{
    Access, AnyPolicy, Borders, Classic, Config, Flow, Instant, Opcode, Order, Output, Piece,
    PriorityLevel, RailId, RailSpec, Ranges, Request, SliceId, SliceResult, Tent, TentConfig,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn request(user: u64, ranges: Ranges<'_>) -> Request<'_> {
    Request {
        opcode: if user.is_multiple_of(2) { Opcode::Write } else { Opcode::Read },
        ranges,
        deadline: None,
        priority: PriorityLevel::ALL[0],
        incarnation: 1,
        local_location: 0,
        peer_location: 0,
        local_borders: Borders::NONE,
        peer_borders: Borders::NONE,
        user,
    }
}

struct Driver {
    flow: Flow<AnyPolicy>,
    posted: Vec<SliceId>,
    up: Vec<(RailId, u64)>,
    /// Virtual milliseconds.
    millis: u64,
    ended: usize,
}

impl Driver {
    fn now(&self) -> Instant {
        Instant::from_nanos(self.millis * 1_000_000)
    }

    fn round(&mut self, list: &[Piece]) {
        let one = Piece { local: 0, remote: 0, length: 200_000 };
        for user in 0..100 {
            let ranges = match user % 3 {
                0 => Ranges::Contiguous(one),
                1 => Ranges::List(list),
                _ => Ranges::Strided { first: one, count: 5, local_stride: 1, remote_stride: 0 },
            };
            let request = Request {
                deadline: Some(Instant::from_nanos(self.now().nanos() + (user << 30))),
                priority: PriorityLevel::ALL[user as usize % 3],
                local_location: (user % 2) as u16,
                ..request(user, ranges)
            };
            self.flow.submit(&request).unwrap();
        }
        self.ended = 0;
        for step in 0.. {
            if self.ended == 100 {
                return;
            }
            self.poll();
            if step == 3 {
                // A connection breaks with all that is on it.
                let (rail, epoch) = self.up[0];
                self.flow.rail_down(self.now(), rail, epoch);
                self.poll();
            }
            self.millis += 20;
            let now = self.now();
            self.flow.handle_timeout(now);
            for slice in self.posted.drain(..) {
                self.flow.completed(now, slice, SliceResult::Done);
            }
        }
    }

    fn poll(&mut self) {
        let now = self.now();
        while let Some(output) = self.flow.poll_output(now) {
            match output {
                Output::Post(post) => self.posted.push(post.slice),
                Output::Connect { rail, epoch } => {
                    self.flow.rail_up(now, rail, epoch);
                    self.up.push((rail, epoch));
                }
                Output::Test { rail, epoch } => self.flow.rail_tested(now, rail, epoch),
                Output::Abort { rail, epoch } => {
                    self.up.retain(|up| *up != (rail, epoch));
                    self.flow.rail_aborted(now, rail, epoch);
                }
                Output::Fence { rail, epoch } => self.flow.fence_confirmed(now, rail, epoch),
                Output::Ended(_) => self.ended += 1,
            }
        }
    }
}

#[test]
fn a_steady_state_allocates_nothing() {
    let classic = || AnyPolicy::Classic(Classic::new(Order::RoundRobin, vec![], vec![]));
    let tent = Tent::new(TentConfig::default(), vec![], vec![]);
    // One after the other: what is counted is of the whole process.
    allocates_nothing(classic());
    allocates_nothing(AnyPolicy::Tent(tent));
    nor_do_completions_that_come_at_once(classic());
}

fn driver(policy: AnyPolicy, rails: u16) -> Driver {
    let mut flow = Flow::new(Config::default(), policy, 1, 0);
    for nic in 0..rails {
        let (access, max_requests) = (Access::Connection, 256);
        let spec = RailSpec { local_nic: nic, peer_nic: nic, transport: 0, access, max_requests };
        flow.add_rail(spec);
    }
    Driver { flow, posted: Vec::new(), up: Vec::new(), millis: 0, ended: 0 }
}

fn allocates_nothing(policy: AnyPolicy) {
    let list: Vec<Piece> = (0..100)
        .map(|index| Piece { local: index << 20, remote: index << 21, length: 5000 })
        .collect();
    let mut driver = driver(policy, 3);
    for _ in 0..50 {
        driver.round(&list);
    }
    let region = Region::new(ALLOCATOR);
    for _ in 0..20 {
        driver.round(&list);
    }
    let change = region.change();
    assert_eq!((change.allocations, change.reallocations), (0, 0));
    assert!(driver.flow.is_idle());
}

/// On a busy machine a progress thread finds many completions, where it found one at a time before.
fn nor_do_completions_that_come_at_once(policy: AnyPolicy) {
    const TASKS: u64 = 256;
    let mut driver = driver(policy, 4);
    let mut round = |at_once: bool| {
        for user in 0..TASKS {
            let piece = Piece { local: user << 12, remote: user << 12, length: 4096 };
            driver.flow.submit(&request(user, Ranges::Contiguous(piece))).unwrap();
        }
        driver.ended = 0;
        driver.poll();
        let now = driver.now();
        assert_eq!(driver.posted.len(), TASKS as usize);
        for index in 0..driver.posted.len() {
            driver.flow.completed(now, driver.posted[index], SliceResult::Done);
            if !at_once {
                driver.poll();
            }
        }
        driver.posted.clear();
        driver.poll();
        assert_eq!(driver.ended, TASKS as usize);
    };
    (0..2).for_each(|_| round(false));
    let region = Region::new(ALLOCATOR);
    round(true);
    let change = region.change();
    assert_eq!((change.allocations, change.reallocations), (0, 0));
}
