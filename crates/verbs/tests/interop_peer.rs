//! The conformance cases of `cargo xtask interop` with our own stack on both sides: what fails here
//! is no matter of the kernel's.

#[path = "../examples/interop_peer/peer/mod.rs"]
mod peer;

use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};

use millstream_verbs::{Device, Driver, SoftConfig};

use peer::{Outcome, Report};

/// An address of 127/8 that no other test process uses.
fn address(host: u8) -> IpAddr {
    let process = std::process::id();
    Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, host).into()
}

#[test]
fn our_stack_passes_every_case_with_itself() {
    let [ours, theirs] =
        [1, 2].map(|host| Device::open_soft(&SoftConfig::new(address(host))).unwrap());
    let listener = TcpListener::bind((address(1), 0)).unwrap();
    let leader = listener.local_addr().unwrap();
    let follower = std::thread::spawn(move || {
        peer::follow(&theirs, TcpStream::connect(leader).unwrap()).unwrap();
    });
    let (stream, _) = listener.accept().unwrap();
    // Faults are a relay's work, and there is none on the loopback interface.
    let faultless: Vec<_> =
        peer::entries().into_iter().filter(|entry| entry.runs_with(Driver::Udp, false)).collect();
    let wanted =
        |name: &str, role| faultless.iter().any(|entry| entry.name == name && entry.role == role);
    let mut reports = Vec::new();
    let report = |report: Report| {
        eprintln!("{:?} {} {}", report.time, report.role, report.name);
        reports.push(report);
    };
    peer::lead(&ours, stream, None, wanted, report).unwrap();
    follower.join().unwrap();
    assert_eq!(reports.len(), faultless.len());
    for report in reports {
        match report.outcome {
            Outcome::Passed => {}
            Outcome::Failed(reason) | Outcome::Skipped(reason) => {
                panic!("{} as {}: {reason}", report.name, report.role)
            }
        }
    }
}
