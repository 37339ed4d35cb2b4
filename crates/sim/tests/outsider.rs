//! A packet from outside changes only counters.

use core::net::IpAddr;

use millstream_roce::Instant;
use millstream_sim::scenarios::transfer::{Transfer, TransferOptions};
use millstream_sim::{Datagram, Happening, LinkOptions, Probability, Rng};
use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::{Bth, Opcode, Psn, Qpn, ROCE_PORT};

const INTRUDER: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 66));

/// What someone who knows the addresses could send: from noise to packets that are right in all
/// but one respect.
fn intrusion(rng: &mut Rng, victim: IpAddr, peer: IpAddr, qpn: Qpn) -> Datagram {
    let opcode = Opcode::ALL[rng.below(Opcode::ALL.len() as u64) as usize];
    let mut bth = Bth::new(opcode as u8, qpn, Psn::new(rng.bits() as u32));
    let mut payload = vec![0; 12 + rng.below(1100) as usize];
    rng.fill(&mut payload);
    let mut source = peer;
    let mut seal = true;
    match rng.below(6) {
        // Noise.
        0 => {
            return datagram(source, victim, payload, false);
        }
        // The right packet from the wrong address.
        1 => source = INTRUDER,
        // The right address, without the ICRC.
        2 => seal = false,
        // Other queue pairs.
        3 => bth.destination_qpn = Qpn::new(qpn.value() ^ (1 << rng.below(24))),
        // Other partitions.
        4 => bth.partition_key = 0x7ffe,
        // Other versions.
        _ => bth.version = 1,
    }
    bth.pad_count = 0;
    payload[..12].copy_from_slice(&bth.to_bytes());
    payload.truncate(payload.len() & !3);
    payload.resize(payload.len() + 32, 0);
    datagram(source, victim, payload, seal)
}

fn datagram(source: IpAddr, destination: IpAddr, mut payload: Vec<u8>, seal: bool) -> Datagram {
    if seal {
        let addresses = Addresses::unfragmented(source, destination, 0).unwrap();
        let addressing =
            Addressing { addresses, source_port: ROCE_PORT, destination_port: ROCE_PORT };
        let icrc = icrc::of_datagram(&addressing, &payload);
        let at = payload.len() - 4;
        payload[at..].copy_from_slice(&icrc.to_le_bytes());
    }
    Datagram {
        number: 0,
        source,
        source_port: ROCE_PORT,
        destination,
        identification: 0,
        congestion_experienced: false,
        payload,
    }
}

/// What each host sent, and when it was done. The intruder's own link keeps its packets from
/// delaying others.
fn run(intrusions: usize) -> (Vec<u64>, Instant) {
    let mut options = TransferOptions { connections: 3, ..TransferOptions::default() };
    options.link.loss = Probability::per_mille(10);
    let mut transfer = Transfer::new(&options);
    let machines: Vec<IpAddr> =
        transfer.simulation.machines().map(|peer| peer.endpoint().config().address).collect();
    let outside = transfer.simulation.add_link(LinkOptions { rate: None, ..options.link });
    let [a, b] = transfer.hosts;
    let inside = transfer.links;
    let mut rng = Rng::new(3);
    let start = Instant::from_nanos(1000);
    for round in 0..intrusions {
        let at = Instant::from_nanos(start.nanos() + round as u64 * 500);
        transfer.simulation.run_until(at, |_| false);
        for (from, to, link) in [(b, a, inside[1]), (a, b, inside[0])] {
            let qpns = transfer.queue_pairs[rng.below(3) as usize];
            let packet = intrusion(&mut rng, machines[to.0], machines[from.0], qpns[to.0]);
            transfer.simulation.route(from, to, outside);
            transfer.simulation.inject(from, packet);
            transfer.simulation.route(from, to, link);
        }
    }
    transfer.run();
    transfer.expect_no_failure();
    let report = transfer.report("test", 1);
    assert!(report.passed(), "{report}");
    let sent = report.devices.iter().map(|(_, counters)| counters.packets_sent).collect();
    if intrusions > 0 {
        assert!(transfer.simulation.count(Happening::Sent) > 2 * intrusions as u64);
        let dropped = |i: usize| {
            let c = &report.devices[i].1;
            [
                c.dropped_malformed,
                c.dropped_icrc,
                c.dropped_opcode,
                c.dropped_qpn,
                c.dropped_source,
                c.dropped_partition_key,
            ]
        };
        for host in 0..2 {
            assert!(dropped(host).iter().all(|&count| count > 0), "{:?}", dropped(host));
        }
    }
    (sent, transfer.finished_at().unwrap())
}

#[test]
fn packets_from_outside_change_nothing() {
    assert_eq!(run(1000), run(0));
}
