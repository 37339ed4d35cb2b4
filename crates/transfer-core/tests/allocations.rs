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
                opcode: if user % 2 == 0 { Opcode::Write } else { Opcode::Read },
                ranges,
                deadline: Some(Instant::from_nanos(self.now().nanos() + (user << 30))),
                priority: PriorityLevel::ALL[user as usize % 3],
                incarnation: 1,
                local_location: (user % 2) as u16,
                peer_location: 0,
                local_borders: Borders::NONE,
                peer_borders: Borders::NONE,
                user,
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
    let classic = Classic::new(Order::RoundRobin, vec![], vec![]);
    let tent = Tent::new(TentConfig::default(), vec![], vec![]);
    // One after the other: what is counted is of the whole process.
    allocates_nothing(AnyPolicy::Classic(classic));
    allocates_nothing(AnyPolicy::Tent(tent));
}

fn allocates_nothing(policy: AnyPolicy) {
    let mut flow = Flow::new(Config::default(), policy, 1, 0);
    for nic in 0..3 {
        let (access, max_requests) = (Access::Connection, 256);
        let spec = RailSpec { local_nic: nic, peer_nic: nic, transport: 0, access, max_requests };
        flow.add_rail(spec);
    }
    let list: Vec<Piece> = (0..100)
        .map(|index| Piece { local: index << 20, remote: index << 21, length: 5000 })
        .collect();
    let mut driver = Driver { flow, posted: Vec::new(), up: Vec::new(), millis: 0, ended: 0 };
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
