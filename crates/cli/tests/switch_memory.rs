//! What a switch's process has of memory when communicators are over.

mod common;

use std::fs;
use std::net::SocketAddr;

use common::{address, eventually, serve};
use millstream_collective::{Communicator, JoinConfig, Path};
use millstream_verbs::{Device, SoftConfig};

/// Communicators at a time: 4 MiB of slots each.
const AT_A_TIME: usize = 24;
const ROUNDS: usize = 3;

/// What may stay of all of them: much less than the slots of one round, which are 96 MiB.
const GROWTH_KIB: u64 = 32 << 10;

fn resident_kib(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn a_switch_gives_back_the_slots_of_communicators_that_are_over() {
    let ([_controller, switch], listen) = serve();
    let device = Device::open_soft(&SoftConfig::new(address().parse().unwrap())).unwrap();
    let controller: SocketAddr = listen.parse().unwrap();
    let join = |name: String| {
        let config = JoinConfig::new(controller, name, 1, 0, &device);
        Communicator::join(&JoinConfig { path: Path::Switch, fallback: false, ..config }).unwrap()
    };
    drop(join("first".to_owned()));
    let before = resident_kib(switch.id());
    // One of each round stays: what lies below it the allocator would keep.
    let mut kept = Vec::new();
    for round in 0..ROUNDS {
        let all = (0..AT_A_TIME).map(|at| join(format!("{round} {at}")));
        let mut all: Vec<Communicator> = all.collect();
        kept.extend(all.pop());
    }
    eventually("the switch gives its memory back", || {
        resident_kib(switch.id()) <= before + GROWTH_KIB
    });
}
