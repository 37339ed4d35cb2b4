//! Packets that nobody who is connected sent: at a switch they change only counters.

mod network;

use core::net::{IpAddr, Ipv4Addr};

use millstream_inc::SwitchNode;
use millstream_roce::{DatagramMeta, IcrcCheck, Identification, Node, Transmit};
use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::{Bth, Opcode, Psn, Qpn, ROCE_PORT};
use network::{COMMUNICATOR, Network, Random, Setup};

const STRANGER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 66));
const SOURCE_PORT: u16 = 50_000;
const PACKETS: usize = 10_000_000;

/// A packet that is right in all but who sends it, or as `damage` makes it.
fn packet(
    random: &mut Random,
    [source, destination]: [IpAddr; 2],
    qpn: Qpn,
    psn: Psn,
    damage: impl FnOnce(&mut Vec<u8>),
) -> (IpAddr, Vec<u8>) {
    let kinds = [
        Opcode::RcSendOnly,
        Opcode::RcSendOnlyWithImmediate,
        Opcode::RcWriteOnly,
        Opcode::RcWriteMiddle,
        Opcode::RcAcknowledge,
    ];
    let opcode = kinds[random.next() as usize % kinds.len()];
    let mut datagram = Bth::new(opcode as u8, qpn, psn).to_bytes().to_vec();
    let extended = match opcode {
        Opcode::RcWriteOnly => 16,
        Opcode::RcSendOnlyWithImmediate | Opcode::RcAcknowledge => 4,
        _ => 0,
    };
    let payload = if opcode == Opcode::RcAcknowledge { 0 } else { 4 * (random.next() % 64) };
    datagram.extend((0..extended + payload).map(|_| random.next() as u8));
    datagram.extend([0; 4]);
    let addresses = Addresses::unfragmented(source, destination, 0).unwrap();
    let ports = Addressing { addresses, source_port: SOURCE_PORT, destination_port: ROCE_PORT };
    let at = datagram.len() - 4;
    let check = icrc::of_datagram(&ports, &datagram).to_le_bytes();
    datagram[at..].copy_from_slice(&check);
    damage(&mut datagram);
    (source, datagram)
}

/// What does not come from the peer of a queue pair, by kinds of the same number.
fn forged(network: &Network, random: &mut Random) -> [Vec<(IpAddr, Vec<u8>)>; 5] {
    let switch = network.switch.config().address;
    let counts = network.switch.counts();
    let mut kinds: [Vec<_>; 5] = core::array::from_fn(|_| Vec::new());
    for (group, communicator) in counts.iter().enumerate() {
        for (rank, port) in communicator.ports.iter().enumerate() {
            let host =
                |group: usize, rank: usize| network.hosts[network.group(group)][rank].address;
            let (own, neighbour) = (host(group, rank), host(group, 1 - rank));
            let sources = [STRANGER, host(1 - group, rank), neighbour, own, own];
            for number in 0..500 {
                // Those that are expected are among them.
                let psn = Psn::from_extended(u64::from(network.setup.first_psn.value()) + number);
                for (kind, &source) in sources.iter().enumerate() {
                    let other = Qpn::new(port.qpn.value() ^ 0x10);
                    let qpn = if kind == 3 { other } else { port.qpn };
                    let damage = |datagram: &mut Vec<u8>| {
                        if kind == 4
                            && let Some(last) = datagram.last_mut()
                        {
                            *last ^= 1;
                        }
                    };
                    kinds[kind].push(packet(random, [source, switch], qpn, psn, damage));
                }
            }
        }
    }
    kinds
}

fn dropped(switch: &SwitchNode) -> [u64; 3] {
    let counters = switch.counters();
    [counters.dropped_source, counters.dropped_qpn, counters.dropped_icrc]
}

#[test]
fn packets_of_who_is_not_connected_change_only_counters() {
    let setup = Setup { groups: 2, hosts: 2, icrc: IcrcCheck::Exact, ..Setup::default() };
    let mut network = Network::new(setup);
    let groups = [network.group(0), network.group(1)];
    let calls = groups.clone().map(|hosts| network.start_all(hosts, 20_000, false));
    for _ in 0..300 {
        network.step();
    }
    let statistics =
        |switch: &SwitchNode| [0, 1].map(|group| switch.statistics(COMMUNICATOR + group));
    let before = statistics(&network.switch);
    assert!(before.iter().flatten().all(|it| it.segments > 0 && it.slots_in_use > 0));
    let mut random = Random::new(5);
    let kinds = forged(&network, &mut random);
    let (now, switch_address) = (network.now, network.switch.config().address);
    let switch = &mut network.switch;
    let earlier = dropped(switch);
    for number in 0..PACKETS {
        let kind = &kinds[number % kinds.len()];
        let (source, datagram) = &kind[number / kinds.len() % kind.len()];
        let meta = DatagramMeta {
            source: *source,
            source_port: SOURCE_PORT,
            destination: switch_address,
            identification: Identification::Known(0),
            congestion_experienced: false,
        };
        switch.handle_datagram(now, &meta, datagram);
    }
    let each = (PACKETS / kinds.len()) as u64;
    let [source, qpn, check] = earlier;
    assert_eq!(dropped(switch), [source + 3 * each, qpn + each, check + each]);
    // Nobody gets an answer.
    assert!(!switch.poll_transmit(now, &mut Transmit::new()));
    assert_eq!((switch.poll_event(), statistics(switch)), (None, before));
    for (hosts, (calls, wanted)) in groups.into_iter().zip(calls) {
        let outcomes = network.outcomes_of(hosts.clone());
        for ((host, call), outcome) in hosts.zip(&calls).zip(outcomes) {
            network.check(host, call, outcome, &wanted);
        }
    }
    network.check_rest();
}
