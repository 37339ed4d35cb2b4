//! How strictly the ICRC is checked when the IPv4 identification is known, guessed, or anybody's.

mod common;

use std::net::IpAddr;

use common::forge::Forge;
use common::{Options, Pair, connect, everything, meta};
use millstream_roce::{
    DatagramMeta, Endpoint, EndpointConfig, IcrcCheck, Identification, Instant, Node, OwnedMemory,
    QueuePairCapabilities, QueuePairConfig,
};
use millstream_wire::icrc::{Addresses, Addressing, of_datagram};
use millstream_wire::{Opcode, Qpn};

const FIRST: u32 = 100;

/// A copy of `datagram` with the ICRC that it has between these addresses.
fn signed(datagram: &[u8], source: IpAddr, destination: IpAddr, identification: u16) -> Vec<u8> {
    let addresses = Addresses::unfragmented(source, destination, identification).unwrap();
    let addressing = Addressing { addresses, source_port: 4791, destination_port: 4791 };
    let icrc = of_datagram(&addressing, datagram);
    let (body, _) = datagram.split_last_chunk::<4>().unwrap();
    [body, &icrc.to_le_bytes()].concat()
}

/// Whether a packet that was sent with one identification is taken, when this is known of it.
fn is_taken(check: IcrcCheck, sent: u16, known: Identification) -> bool {
    let mut pair = Pair::with(Options { psn: [FIRST, 200], icrc: check, ..Options::default() });
    let datagram = Forge::new(&pair, 1, Opcode::RcWriteOnly, FIRST).datagram(&pair);
    let [source, destination] = [0, 1].map(|host: usize| pair.hosts[host].address);
    let datagram = signed(&datagram, source, destination, sent);
    let meta = DatagramMeta { identification: known, ..meta(source, destination) };
    pair.hosts[1].endpoint.handle_datagram(pair.now, &meta, &datagram);
    let counters = pair.counters(1);
    // The next PSN shows whether the first was taken.
    Forge::new(&pair, 1, Opcode::RcWriteOnly, FIRST).acknowledge_request().inject(&mut pair);
    let duplicate = pair.counters(1).duplicates == 1;
    assert_eq!(duplicate, counters.dropped_icrc == 0);
    duplicate
}

#[test]
fn what_each_check_accepts() {
    use IcrcCheck as C;
    use Identification::{Guessed, Known};
    for (check, sent, known, taken) in [
        (C::Exact, 7, Known(7), true),
        (C::Exact, 7, Known(8), false),
        (C::Exact, 7, Guessed(7), true),
        (C::Exact, 7, Guessed(8), false),
        (C::SegmentIndex, 7, Known(8), false),
        (C::SegmentIndex, 0, Guessed(9), true),
        (C::SegmentIndex, 63, Guessed(0), true),
        (C::SegmentIndex, 64, Guessed(0), false),
        (C::SegmentIndex, 64, Guessed(64), true),
        (C::SegmentIndex, 0xffff, Guessed(0), false),
        (C::AnyIdentification, 7, Known(8), false),
        (C::AnyIdentification, 7, Guessed(8), true),
        (C::AnyIdentification, 0xffff, Guessed(0), true),
        (C::AnyIdentification, 0x8000, Guessed(0xffff), true),
        (C::Off, 7, Known(8), true),
    ] {
        assert_eq!(is_taken(check, sent, known), taken, "{check:?} {sent} {known:?}");
    }
}

/// IPv6 has no identification: nothing is forgiven, whatever the check.
#[test]
fn ip_version_6_is_always_checked_exactly() {
    let [local, remote]: [IpAddr; 2] =
        ["2001:db8::1", "2001:db8::2"].map(|address| address.parse().unwrap());
    for check in [IcrcCheck::Exact, IcrcCheck::SegmentIndex, IcrcCheck::AnyIdentification] {
        let config = EndpointConfig { icrc: check, ..EndpointConfig::new(local, 1) };
        let mut endpoint = Endpoint::new(config, OwnedMemory::new(1));
        let queue = endpoint.create_completion_queue(1).unwrap();
        let config = QueuePairConfig::new(common::DOMAIN, queue, QueuePairCapabilities::new(1, 1));
        let qpn = endpoint.create_queue_pair(&config).unwrap();
        let options = Options { psn: [200, FIRST], access: everything(), ..Options::default() };
        for attributes in connect(&options, 0, remote, Qpn::new(0x77)) {
            endpoint.modify_queue_pair(Instant::ZERO, qpn, &attributes).unwrap();
        }
        let pair = Pair::new();
        let mut forge = Forge::new(&pair, 1, Opcode::RcWriteOnly, FIRST);
        forge.bth.destination_qpn = qpn;
        let good = signed(&forge.datagram(&pair), remote, local, 0);
        let meta =
            DatagramMeta { identification: Identification::Guessed(0), ..meta(remote, local) };
        for bit in 0..32 {
            let mut damaged = good.clone();
            let at = damaged.len() - 4 + bit / 8;
            damaged[at] ^= 1 << (bit % 8);
            endpoint.handle_datagram(Instant::ZERO, &meta, &damaged);
        }
        assert_eq!(endpoint.counters().dropped_icrc, 32, "{check:?}");
        endpoint.handle_datagram(Instant::ZERO, &meta, &good);
        endpoint.handle_datagram(Instant::ZERO, &meta, &good);
        assert_eq!(endpoint.counters().duplicates, 1, "{check:?}");
    }
}
