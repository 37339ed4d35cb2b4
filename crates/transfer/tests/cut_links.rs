//! Links that are cut in the middle of a batch, and come back.
//!
//! For devices of the system, and where `MILLSTREAM_TEST_CUT_LINKS` is set: it takes network interfaces down.
//! Elsewhere there is nothing to test. Links of soft devices are cut in namespaces (`cargo xtask lab bench`).

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::time::Duration;

use common::{LONG, contents, devices, pattern, private, request, shared, wait_for_first_bytes};
use millstream_lab::{Stopwatch, Took};
use millstream_transfer::{Batch, Opcode, RdmaConfig, TransferEngine, TransferState};
use millstream_verbs::{Counters, Device};

const LENGTH: usize = 16 << 20;
const TASKS: usize = 4;

/// As verbs code it: 268 ms, after 4 of which a rail is silent.
const DEFAULT: u8 = 16;
/// 4.3 s: nothing is silent before 3 s have passed.
const PATIENT: u8 = 20;
const SILENT: Duration = Duration::from_secs(3);

/// When a rail whose link is there again is used again.
const RECOVERY: Duration = Duration::from_secs(35);

/// Whether links may be cut.
fn may_cut() -> bool {
    let may =
        devices::are_of_the_system() && std::env::var_os("MILLSTREAM_TEST_CUT_LINKS").is_some();
    if !may {
        println!("nothing to test: these are no devices of the system, or their links must stay");
    }
    may
}

/// An engine that can be asked whatever becomes of its NICs.
fn engine(addresses: &[IpAddr], acknowledge_timeout: u8) -> TransferEngine {
    let engine = TransferEngine::new(common::config(Ipv4Addr::LOCALHOST.into())).unwrap();
    let rdma = RdmaConfig { acknowledge_timeout, ..RdmaConfig::new(addresses) };
    engine.install_rdma(rdma).unwrap();
    engine
}

/// A device whose interface can be taken down. Dropped, it is up.
struct Nic {
    device: Device,
    interface: String,
}

impl Nic {
    fn new(address: IpAddr) -> Self {
        let device = devices::open(address);
        let folder = format!("/sys/class/infiniband/{}/ports/1/gid_attrs/ndevs/0", device.name());
        let interface = std::fs::read_to_string(folder).unwrap().trim().to_owned();
        Self { device, interface }
    }

    fn set(&self, state: &str) {
        let mut command = Command::new("ip");
        let status = command.args(["link", "set", &self.interface, state]).status().unwrap();
        assert!(status.success(), "{}", self.interface);
    }

    fn packets_sent(&self) -> u64 {
        let Counters { packets_sent, .. } = self.device.counters();
        packets_sent
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        self.set("up");
    }
}

fn submit(engine: &TransferEngine, opcode: Opcode, ends: &Ends) -> Batch {
    let segment = engine.open_segment(ends.target.name()).unwrap();
    let part = (LENGTH / TASKS) as u64;
    let parts: Vec<_> = (0..TASKS as u64)
        .map(|index| request(opcode, (&ends.local, index * part), &segment, index * part, part))
        .collect();
    let batch = engine.allocate_batch(TASKS).unwrap();
    engine.submit(&batch, &parts).unwrap();
    batch
}

struct Ends {
    target: TransferEngine,
    initiator: TransferEngine,
    remote: millstream_transfer::Buffer,
    local: millstream_transfer::Buffer,
}

impl Ends {
    /// Does all, and cuts the link once something of it has arrived. How long it took from then.
    fn run(&self, opcode: Opcode, seed: u64, cut: Option<&Nic>) -> Took {
        let Self { initiator, remote, local, .. } = self;
        let bytes = pattern(LENGTH, seed);
        let (from, to) = match opcode {
            Opcode::Write => (local, remote),
            Opcode::Read => (remote, local),
        };
        from.write(0, &bytes).unwrap();
        to.write(0, &vec![0; LENGTH]).unwrap();
        let batch = submit(initiator, opcode, self);
        wait_for_first_bytes(initiator, &batch);
        let stopwatch = Stopwatch::start();
        if let Some(nic) = cut {
            nic.set("down");
        }
        assert!(initiator.wait(&batch, LONG), "{:?}", initiator.statuses(&batch));
        let took = stopwatch.took();
        for status in initiator.statuses(&batch) {
            assert_eq!(status.state, TransferState::Completed, "{status:?}");
        }
        assert!(contents(to, 0, LENGTH) == bytes, "{opcode:?}");
        took
    }
}

/// Two NICs at each end, of which one loses its link. All batches are done before `limit`.
fn cut_one(of_initiator: bool, acknowledge_timeout: u8, limit: Duration) {
    let addresses = [(); 4].map(|()| common::address());
    let (theirs, ours) = addresses.split_at(2);
    let nic = Nic::new(if of_initiator { ours[1] } else { theirs[1] });
    let engine = |addresses| engine(addresses, acknowledge_timeout);
    let (target, initiator) = (engine(theirs), engine(ours));
    let (remote, local) = (shared(&target, LENGTH), private(&initiator, LENGTH));
    let ends = Ends { target, initiator, remote, local };
    for (round, opcode) in [Opcode::Write, Opcode::Read].into_iter().enumerate() {
        let seed = 10 * round as u64;
        let whole = ends.run(opcode, seed + 1, None);
        let with_cut = ends.run(opcode, seed + 2, Some(&nic));
        let without = ends.run(opcode, seed + 3, None);
        println!("{opcode:?}: {whole}, cut {with_cut}, and then {without}");
        assert!(with_cut.own() < limit, "{with_cut}");
        // Back again, it is used again.
        let (before, stopwatch) = (nic.packets_sent(), Stopwatch::start());
        nic.set("up");
        for seed in 100.. {
            ends.run(opcode, seed, None);
            // More than what neighbours and questions need.
            if nic.packets_sent() > before + 100 {
                break;
            }
            let took = stopwatch.took();
            assert!(took.own() < RECOVERY, "it is not used again: {took}");
        }
        println!("{opcode:?}: used again after {}", stopwatch.took());
    }
}

/// The port says so: nobody waits until it was silent for long enough.
#[test]
fn a_batch_goes_on_when_a_link_here_is_cut() {
    if may_cut() {
        cut_one(true, PATIENT, SILENT);
    }
}

#[test]
fn a_batch_goes_on_when_a_link_of_the_peer_is_cut() {
    if may_cut() {
        cut_one(false, DEFAULT, LONG);
    }
}
