//! The network itself, with a node that sends what the test says.

use core::net::IpAddr;
use core::time::Duration;
use std::collections::VecDeque;

use millstream_roce::{DatagramMeta, Identification, Instant, Node, Piece, Transmit};
use millstream_sim::{
    Datagram, Happening, HostOptions, IdentificationSource, LinkOptions, Machine, NodeId, Outcome,
    PacketInfo, Simulation, Verdict,
};
use millstream_wire::{Bth, Opcode, Psn, Qpn};

const MICROSECOND: Duration = Duration::from_micros(1);
const FOR_EVER: Instant = Instant::from_nanos(u64::MAX);

/// Sends numbered CNPs, notes what arrives, and may misbehave.
#[derive(Default)]
struct Toy {
    outbox: VecDeque<(IpAddr, u32)>,
    arrived: Vec<(Instant, u32, DatagramMeta)>,
    timeout: Option<Instant>,
    /// Sends back whatever arrives.
    echoes: bool,
    /// Never stops sending.
    floods: Option<IpAddr>,
    restarts: u32,
}

/// A packet that any node may send at any time: a congestion notification.
fn headers(number: u32) -> [u8; 28] {
    let mut bytes = [0; 28];
    let opcode = Opcode::CongestionNotification as u8;
    let bth = Bth::new(opcode, Qpn::new(number), Psn::new(0));
    bytes[..12].copy_from_slice(&bth.to_bytes());
    bytes
}

impl Node for Toy {
    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        let number = Bth::parse(datagram).unwrap().destination_qpn.value();
        self.arrived.push((now, number, *meta));
        if self.echoes {
            self.outbox.push_back((meta.source, number));
        }
    }

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_timeout(&mut self) -> Option<Instant> {
        self.timeout
    }

    fn poll_transmit(&mut self, _now: Instant, transmit: &mut Transmit) -> bool {
        let next = self.outbox.pop_front().or(self.floods.map(|to| (to, 0)));
        let Some((to, number)) = next else { return false };
        transmit.set(to, &headers(number), &[], 0);
        true
    }

    fn bytes(&self, _piece: &Piece) -> Option<&[u8]> {
        None
    }
}

impl Machine for Toy {
    fn restart(&mut self, _now: Instant) {
        self.restarts += 1;
    }
}

fn address(host: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, host])
}

/// Two toys and a link of 1 byte per nanosecond and 1 us.
fn pair<'a>(host: HostOptions) -> (Simulation<'a, Toy>, [NodeId; 2]) {
    let mut simulation = Simulation::new(1);
    let hosts = [1, 2].map(|n| simulation.add_machine(address(n), Toy::default(), host));
    simulation.connect(hosts[0], hosts[1], LinkOptions::new(8_000_000_000, MICROSECOND));
    (simulation, hosts)
}

fn send(simulation: &mut Simulation<'_, Toy>, from: NodeId, to: u8, numbers: &[u32]) {
    simulation.with_machine(from, |toy, _| {
        toy.outbox.extend(numbers.iter().map(|&number| (address(to), number)));
    });
}

fn arrivals(simulation: &Simulation<'_, Toy>, node: NodeId) -> Vec<(u64, u32)> {
    simulation.machine(node).arrived.iter().map(|(at, number, _)| (at.nanos(), *number)).collect()
}

/// Bytes of a toy's packet on the wire: 28 + ICRC, IP, UDP, and what Ethernet adds.
const WIRE: u64 = 28 + 4 + 28 + 38;

#[test]
fn packets_take_the_time_of_the_link() {
    let (mut simulation, [a, b]) = pair(HostOptions::default());
    send(&mut simulation, a, 2, &[1, 2]);
    assert_eq!(simulation.run_until(FOR_EVER, |_| false), Outcome::Quiet);
    assert_eq!(arrivals(&simulation, b), [(1000 + WIRE, 1), (1000 + 2 * WIRE, 2)]);
}

#[test]
fn rules_drop_delay_and_double() {
    let (mut simulation, [a, b]) = pair(HostOptions::default());
    simulation.add_rule(|info: &PacketInfo<'_>| {
        match info.packet.unwrap().bth.destination_qpn.value() {
            1 => Verdict::Drop,
            2 => Verdict::Delay(10 * MICROSECOND),
            3 => Verdict::Duplicate,
            _ => Verdict::Pass,
        }
    });
    // The first rule that does not pass decides.
    simulation.add_rule(|_: &PacketInfo<'_>| Verdict::Delay(20 * MICROSECOND));
    send(&mut simulation, a, 2, &[1, 2, 3, 4]);
    simulation.run_until(FOR_EVER, |_| false);
    assert_eq!(
        arrivals(&simulation, b),
        [(1000 + 2 * WIRE, 3), (1000 + 2 * WIRE, 3), (11_000 + WIRE, 2), (21_000 + 3 * WIRE, 4)]
    );
    assert_eq!(simulation.count(Happening::Dropped), 1);
    assert_eq!(simulation.count(Happening::Duplicated), 1);
    assert_eq!(simulation.count(Happening::HeldBack), 2);
}

#[test]
fn a_partition_is_between_its_times_and_links() {
    let (mut simulation, [a, b]) = pair(HostOptions::default());
    let (at, until) = (Instant::from_nanos(5000), Instant::from_nanos(9000));
    let cut = simulation.add_link(LinkOptions::new(8_000_000_000, MICROSECOND));
    simulation.route(a, b, cut);
    simulation.partition(&[cut], at, until);
    // Under way when the link is cut: arrives.
    simulation.run_until(Instant::from_nanos(4900), |_| false);
    send(&mut simulation, a, 2, &[1]);
    simulation.run_until(Instant::from_nanos(6000), |_| false);
    send(&mut simulation, a, 2, &[2]);
    send(&mut simulation, b, 1, &[3]);
    simulation.run_until(Instant::from_nanos(9000), |_| false);
    send(&mut simulation, a, 2, &[4]);
    simulation.run_until(FOR_EVER, |_| false);
    assert_eq!(arrivals(&simulation, b), [(5900 + WIRE, 1), (10_000 + WIRE, 4)]);
    assert_eq!(arrivals(&simulation, a), [(7000 + WIRE, 3)]);
    assert_eq!(simulation.count(Happening::Partitioned), 1);
}

#[test]
fn a_crashed_machine_neither_hears_nor_sends_nor_wakes() {
    let (mut simulation, [a, b]) = pair(HostOptions::default());
    simulation.crash(b, Instant::from_nanos(500));
    simulation.restart(b, Instant::from_nanos(5000));
    simulation.with_machine(b, |toy, _| toy.timeout = Some(Instant::from_nanos(2000)));
    send(&mut simulation, a, 2, &[1]);
    simulation.run_until(Instant::from_nanos(4000), |_| false);
    assert!(!simulation.is_up(b));
    send(&mut simulation, b, 1, &[9]);
    assert_eq!(simulation.count(Happening::ReceiverDown), 1);
    assert_eq!(simulation.count(Happening::Sent), 1);
    simulation.with_machine(b, |toy, _| {
        toy.timeout = None;
        toy.outbox.clear();
    });
    // The last thing to happen is the restart, at 5000.
    simulation.run_until(Instant::from_nanos(6000), |_| false);
    send(&mut simulation, a, 2, &[2]);
    simulation.run_until(FOR_EVER, |_| false);
    assert_eq!(arrivals(&simulation, b), [(6000 + WIRE, 2)]);
    assert_eq!(simulation.machine(b).restarts, 1);
}

#[test]
fn what_a_host_knows_of_the_identification() {
    let source = IdentificationSource::Counter;
    for (sees_ip_header, expected) in
        [(true, [0, 1].map(Identification::Known)), (false, [0, 0].map(Identification::Guessed))]
    {
        let host = HostOptions { sees_ip_header, identification: source, ..HostOptions::default() };
        let (mut simulation, [a, b]) = pair(host);
        send(&mut simulation, a, 2, &[1, 2]);
        simulation.run_until(FOR_EVER, |_| false);
        let seen: Vec<_> =
            simulation.machine(b).arrived.iter().map(|(_, _, meta)| meta.identification).collect();
        assert_eq!(seen, expected);
    }
}

#[test]
fn a_filling_queue_marks_what_comes_after() {
    let (mut simulation, [a, b]) = pair(HostOptions::default());
    let marking = LinkOptions {
        mark_bytes: Some(2 * WIRE - 1),
        ..LinkOptions::new(8_000_000_000, MICROSECOND)
    };
    let link = simulation.add_link(marking);
    simulation.route(a, b, link);
    send(&mut simulation, a, 2, &[1, 2, 3]);
    simulation.run_until(FOR_EVER, |_| false);
    let marks: Vec<bool> = simulation
        .machine(b)
        .arrived
        .iter()
        .map(|(_, _, meta)| meta.congestion_experienced)
        .collect();
    assert_eq!(marks, [false, false, true]);
}

#[test]
fn arrivals_gather_when_asked() {
    let host = HostOptions { coalescing: 5 * MICROSECOND, ..HostOptions::default() };
    let (mut simulation, [a, b]) = pair(host);
    send(&mut simulation, a, 2, &[1, 2, 3]);
    simulation.run_until(FOR_EVER, |_| false);
    let together = 1000 + WIRE + 5000;
    assert_eq!(arrivals(&simulation, b), [(together, 1), (together, 2), (together, 3)]);
}

#[test]
fn what_has_no_way_is_counted() {
    let (mut simulation, [a, _]) = pair(HostOptions::default());
    send(&mut simulation, a, 3, &[1]);
    send(&mut simulation, a, 1, &[2]);
    assert_eq!(simulation.run_until(FOR_EVER, |_| false), Outcome::Quiet);
    assert_eq!(simulation.count(Happening::Unreachable), 2);
}

#[test]
fn an_injected_datagram_is_not_held_against_the_machine() {
    let (mut simulation, [a, b]) = pair(HostOptions::default());
    simulation.inject(
        a,
        Datagram {
            number: 0,
            source: address(77),
            source_port: 1,
            destination: address(2),
            identification: 9,
            congestion_experienced: false,
            payload: vec![0xff; 40],
        },
    );
    simulation.run_until(FOR_EVER, |_| false);
    assert_eq!(simulation.violations(), []);
    let (_, _, meta) = simulation.machine(b).arrived[0];
    assert_eq!((meta.source, meta.identification), (address(77), Identification::Known(9)));
}

fn violation(simulation: &mut Simulation<'_, Toy>) -> String {
    assert_eq!(simulation.run_until(FOR_EVER, |_| false), Outcome::Violated);
    simulation.violations()[0].what.clone()
}

#[test]
fn machines_that_answer_each_other_for_ever_are_caught() {
    let mut simulation = Simulation::new(1);
    let options = LinkOptions { rate: None, ..LinkOptions::new(1, Duration::ZERO) };
    let hosts = [1, 2].map(|n| {
        let toy = Toy { echoes: true, ..Toy::default() };
        simulation.add_machine(address(n), toy, HostOptions::default())
    });
    simulation.connect(hosts[0], hosts[1], options);
    // The toys remember everything: no more than this is wanted of their memory.
    send(&mut simulation, hosts[0], 2, &[1]);
    assert!(violation(&mut simulation).contains("time stands still"));
}

#[test]
fn a_timer_that_stays_due_is_caught() {
    let (mut simulation, [a, _]) = pair(HostOptions::default());
    simulation.with_machine(a, |toy, now| toy.timeout = Some(now));
    assert!(violation(&mut simulation).contains("time stands still"));
}

#[test]
fn a_machine_that_never_stops_sending_is_caught() {
    let (mut simulation, [a, _]) = pair(HostOptions::default());
    simulation.machine_mut(a).floods = Some(address(3));
    assert!(violation(&mut simulation).contains("sends for ever"));
}

#[test]
#[should_panic(expected = "two machines have the address")]
fn an_address_belongs_to_one_machine() {
    let mut simulation = Simulation::new(1);
    for _ in 0..2 {
        simulation.add_machine(address(1), Toy::default(), HostOptions::default());
    }
}
