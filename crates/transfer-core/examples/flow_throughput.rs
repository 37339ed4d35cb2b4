//! How long a slice takes in a flow: submitted, picked, posted, completed and reported, without any
//! transport, with either policy. `cargo run --release -p millstream-transfer-core --example flow_throughput`
//!
//! With a policy, a number of rails and one of batches it does these without looking at the time, so that
//! `valgrind --tool=callgrind` can count instructions: `throughput tent 4 1000`.
#![allow(clippy::disallowed_methods, reason = "an example is not the sans-IO crate: it measures")]

use std::hint::black_box;
use std::time::Instant as Clock;

use millstream_transfer_core::{
    Access, AnyPolicy, Borders, Classic, Config, Flow, Instant, Opcode, Order, Output, Piece,
    PriorityLevel, RailSpec, Ranges, Request, SliceId, SliceResult, Tent, TentConfig,
};

/// Requests of a batch.
const BATCH: u64 = 128;

fn policy(tent: bool) -> AnyPolicy {
    match tent {
        true => AnyPolicy::Tent(Tent::new(TentConfig::default(), vec![], vec![])),
        false => AnyPolicy::Classic(Classic::new(Order::RoundRobin, vec![], vec![])),
    }
}

fn flow(tent: bool, rails: u16) -> Flow<AnyPolicy> {
    let mut flow = Flow::new(Config::default(), policy(tent), 1, 0);
    for nic in 0..rails {
        let spec = RailSpec {
            local_nic: nic,
            peer_nic: nic,
            transport: 0,
            access: Access::Connection,
            max_requests: 4096,
        };
        flow.add_rail(spec);
    }
    flow
}

/// Nanoseconds of a slice of batches of requests of `length` bytes.
fn measure(tent: bool, rails: u16, length: u64, deadline: bool, rounds: u64) -> f64 {
    let mut flow = flow(tent, rails);
    let start = Clock::now();
    let (mut slices, mut ended) = (0_u64, 0);
    let mut posted: Vec<SliceId> = Vec::new();
    for round in 0..rounds {
        let now = Instant::from_nanos(start.elapsed().as_nanos() as u64);
        for index in 0..BATCH {
            let at = index * length;
            let request = Request {
                opcode: Opcode::Write,
                ranges: Ranges::Contiguous(Piece { local: at, remote: at, length }),
                deadline: deadline.then(|| Instant::from_nanos(now.nanos() + 30_000_000_000)),
                priority: PriorityLevel::Normal,
                incarnation: 1,
                local_location: 0,
                peer_location: 0,
                local_borders: Borders::NONE,
                peer_borders: Borders::NONE,
                user: round * BATCH + index,
            };
            flow.submit(&request).expect("there are few tasks at a time");
        }
        loop {
            let now = Instant::from_nanos(start.elapsed().as_nanos() as u64);
            while let Some(output) = flow.poll_output(now) {
                match output {
                    Output::Post(post) => posted.push(black_box(post).slice),
                    Output::Connect { rail, epoch } => flow.rail_up(now, rail, epoch),
                    Output::Test { rail, epoch } => flow.rail_tested(now, rail, epoch),
                    Output::Ended(_) => ended += 1,
                    Output::Abort { .. } | Output::Fence { .. } => {}
                }
            }
            black_box(flow.poll_timeout());
            if posted.is_empty() {
                break;
            }
            slices += posted.len() as u64;
            for slice in posted.drain(..) {
                flow.completed(now, slice, SliceResult::Done);
            }
        }
    }
    assert_eq!(ended, rounds * BATCH);
    start.elapsed().as_nanos() as f64 / slices as f64
}

/// Does so many batches of slices of 64 KiB, of which each takes a microsecond.
fn count(tent: bool, rails: u16, batches: u64) {
    let mut flow = flow(tent, rails);
    let mut posted: Vec<SliceId> = Vec::new();
    let mut nanos = 0;
    for user in 0..batches * BATCH {
        let (at, length) = (user << 16, 1 << 16);
        let request = Request {
            opcode: Opcode::Write,
            ranges: Ranges::Contiguous(Piece { local: at, remote: at, length }),
            deadline: None,
            priority: PriorityLevel::Normal,
            incarnation: 1,
            local_location: 0,
            peer_location: 0,
            local_borders: Borders::NONE,
            peer_borders: Borders::NONE,
            user,
        };
        flow.submit(&request).expect("there are few tasks at a time");
        if (user + 1) % BATCH > 0 {
            continue;
        }
        loop {
            let now = Instant::from_nanos(nanos);
            while let Some(output) = flow.poll_output(now) {
                match output {
                    Output::Post(post) => posted.push(black_box(post).slice),
                    Output::Connect { rail, epoch } => flow.rail_up(now, rail, epoch),
                    Output::Test { rail, epoch } => flow.rail_tested(now, rail, epoch),
                    Output::Ended(_) | Output::Abort { .. } | Output::Fence { .. } => {}
                }
            }
            if posted.is_empty() {
                break;
            }
            for slice in posted.drain(..) {
                nanos += 1000;
                flow.completed(Instant::from_nanos(nanos), slice, SliceResult::Done);
            }
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [policy, rails, batches] = &arguments[..] {
        let rails = rails.parse().expect("a number of rails");
        let batches = batches.parse().expect("a number of batches");
        return count(policy == "tent", rails, batches);
    }
    println!(
        "{:>6} {:>9} {:>9} {:>12} {:>12}",
        "rails", "bytes", "deadline", "classic, ns", "tent, ns"
    );
    for (rails, length, deadline) in [
        (1, 64, false),
        (1, 64, true),
        (4, 64, false),
        (4, 64, true),
        (4, 65_536, false),
        (4, 1 << 20, false),
    ] {
        let rounds = (20_000 * 65_536 / (length * 16).max(65_536)).max(1000);
        let mut runs = [Vec::new(), Vec::new()];
        measure(false, rails, length, deadline, rounds / 10);
        for _ in 0..5 {
            for (tent, runs) in [false, true].into_iter().zip(&mut runs) {
                runs.push(measure(tent, rails, length, deadline, rounds));
            }
        }
        runs.iter_mut().for_each(|runs| runs.sort_by(f64::total_cmp));
        let [classic, tent] = [runs[0][2], runs[1][2]];
        println!("{rails:>6} {length:>9} {deadline:>9} {classic:>12.1} {tent:>12.1}");
    }
}
