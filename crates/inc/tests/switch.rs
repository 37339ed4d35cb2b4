//! What a switch accepts to make, and that it gives everything back.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;

use millstream_inc::{
    Abort, ChildSpec, CommunicatorSpec, CreateError, MAX_SEGMENT_BYTES, MAX_WINDOW, ParentSpec,
    PreparedCommunicator, Ranks, SpecError, SwitchConfig, SwitchEvent, SwitchNode,
};
use millstream_roce::{
    CompletionStatus, DatagramMeta, IcrcCheck, Identification, Instant, Node, Transmit,
};
use millstream_wire::{Bth, Mtu, Opcode, Psn, Qpn};

const NOW: Instant = Instant::ZERO;

fn switch(max_communicators: usize, max_memory: u64) -> SwitchNode {
    let config = SwitchConfig::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3);
    SwitchNode::new(SwitchConfig { max_communicators, max_memory, ..config })
}

fn spec(id: u64, children: u32) -> CommunicatorSpec {
    let child = |rank| ChildSpec {
        ranks: Ranks::one(rank),
        address: IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2)),
        qpn: Qpn::new(0x100 + rank),
        psn: Psn::new(rank),
        is_switch: false,
        receive_share: None,
    };
    CommunicatorSpec {
        id,
        path_mtu: Mtu::B1024,
        segment_bytes: 4096,
        window: 8,
        world: children,
        children: (0..children).rev().map(child).collect(),
        has_parent: false,
        options: millstream_inc::CommunicatorOptions::default(),
    }
}

#[test]
fn edges_are_told_apart_and_come_in_the_order_of_ranks() {
    let mut switch = switch(2, 1 << 30);
    let mut edges = switch.create_communicator(NOW, &spec(1, 64)).unwrap().edges;
    assert!(edges.iter().map(|edge| edge.rank).eq(0..64));
    edges.extend(switch.create_communicator(NOW, &spec(2, 64)).unwrap().edges);
    edges.sort_unstable_by_key(|edge| edge.qpn);
    edges.dedup_by_key(|edge| edge.qpn);
    assert_eq!(edges.len(), 128);
    edges.sort_unstable_by_key(|edge| edge.psn.value());
    edges.dedup_by_key(|edge| edge.psn);
    assert!(edges.len() > 120, "first sequence numbers are random");
}

#[test]
fn what_there_are_no_queue_pairs_for_is_refused_before_anything_is_made() {
    let mut switch = switch(64, u64::MAX);
    let full = |id| CommunicatorSpec { has_parent: true, ..spec(id, 64) };
    for id in 0..63 {
        assert!(switch.create_communicator(NOW, &full(id)).is_ok(), "{id}");
    }
    // One is left of 4,096.
    let refused = Err(CreateError::QueuePairs { needed: 65, available: 1 });
    assert_eq!(switch.check_communicator(&full(63)), refused);
    let refused = CreateError::QueuePairs { needed: 2, available: 1 };
    assert_eq!(switch.create_communicator(NOW, &spec(63, 2)), Err(refused));
    assert!(switch.create_communicator(NOW, &spec(63, 1)).is_ok());
    assert!(switch.destroy_communicator(NOW, 0));
    assert!(switch.create_communicator(NOW, &full(0)).is_ok());
}

#[test]
fn every_port_is_counted_by_itself() {
    let mut switch = switch(2, 1 << 30);
    let leaf = CommunicatorSpec { has_parent: true, ..spec(4, 2) };
    let created = [spec(9, 1), leaf].map(|spec| switch.create_communicator(NOW, &spec).unwrap());
    let counts = switch.counts();
    assert!(counts.iter().map(|it| it.communicator).eq([4, 9]));
    let ports = |index: usize| counts[index].ports.iter().map(|it| (it.rank, it.qpn));
    let uplink = created[1].uplink.unwrap().qpn;
    let qpn = |edge: usize| created[1].edges[edge].qpn;
    assert!(ports(0).eq([(Some(0), qpn(0)), (Some(1), qpn(1)), (None, uplink)]));
    assert!(ports(1).eq([(Some(0), created[0].edges[0].qpn)]));
    assert!(switch.destroy_communicator(NOW, 4));
    assert_eq!(switch.counts().len(), 1);
}

#[test]
fn bad_specifications_are_refused_with_the_reason() {
    let good = spec(1, 2);
    let mut duplicate = good.clone();
    duplicate.children[0].ranks = Ranks::one(0);
    let path_mtu = good.path_mtu;
    let segment = |segment_bytes| {
        let error = SpecError::SegmentBytes { segment_bytes, path_mtu };
        (CommunicatorSpec { segment_bytes, ..good.clone() }, error)
    };
    let window = |window| (CommunicatorSpec { window, ..good.clone() }, SpecError::Window(window));
    for (bad, error) in [
        (spec(1, 0), SpecError::FanIn(0)),
        (spec(1, 65), SpecError::FanIn(65)),
        (duplicate, SpecError::DuplicateRank(0)),
        window(0),
        window(MAX_WINDOW + 1),
        window(u32::MAX),
        segment(0),
        segment(1000),
        segment(MAX_SEGMENT_BYTES + 1024),
        segment(u32::MAX),
    ] {
        let mut switch = switch(1, u64::MAX);
        assert_eq!(switch.create_communicator(NOW, &bad), Err(CreateError::Spec(error)));
        assert_eq!(switch.communicators(), 0);
        assert!(switch.create_communicator(NOW, &good).is_ok());
    }
}

#[test]
fn what_there_is_no_room_for_is_refused_and_leaves_nothing() {
    let needed = spec(1, 4).memory_bytes();
    let mut switch = switch(3, 2 * needed + 8192);
    assert!(switch.create_communicator(NOW, &spec(1, 4)).is_ok());
    assert_eq!(switch.create_communicator(NOW, &spec(1, 4)), Err(CreateError::Exists(1)));
    for _ in 0..100 {
        // A child that cannot be reached from here: the queue pairs before it are taken back.
        let mut bad = spec(2, 4);
        bad.children[0].address = IpAddr::V6(Ipv6Addr::LOCALHOST);
        let error = switch.create_communicator(NOW, &bad);
        assert!(matches!(error, Err(CreateError::Connect { rank: 3, .. })), "{error:?}");
        assert!(switch.statistics(2).is_none());
    }
    assert!(switch.create_communicator(NOW, &spec(2, 4)).is_ok());
    let error = switch.create_communicator(NOW, &spec(3, 1));
    assert!(matches!(error, Err(CreateError::Memory { available: 8192, .. })), "{error:?}");
    assert!(switch.destroy_communicator(NOW, 1));
    assert!(switch.create_communicator(NOW, &spec(3, 1)).is_ok());
    let small = CommunicatorSpec { window: 1, segment_bytes: 1024, ..spec(4, 1) };
    assert!(switch.create_communicator(NOW, &small).is_ok());
    let error = switch.create_communicator(NOW, &CommunicatorSpec { id: 5, ..small });
    assert_eq!(error, Err(CreateError::TooMany { limit: 3 }));
}

#[test]
fn what_was_prepared_is_made_within_the_limits_that_there_are_then() {
    let mut switch = switch(1, u64::MAX);
    let prepare = |id| PreparedCommunicator::new(spec(id, 4)).unwrap();
    let [first, second] = [1, 2].map(prepare);
    assert_eq!(switch.check_communicator(&spec(2, 4)), Ok(()));
    assert_eq!(switch.create_prepared(NOW, first).map(|created| created.edges.len()), Ok(4));
    let full = CreateError::TooMany { limit: 1 };
    assert_eq!(switch.check_communicator(&spec(2, 4)), Err(full.clone()));
    assert_eq!(switch.create_prepared(NOW, second), Err(full));
    assert_eq!((switch.communicators(), switch.memory_used()), (1, spec(1, 4).memory_bytes()));
    assert!(switch.destroy_communicator(NOW, 1));
    assert_eq!((switch.communicators(), switch.memory_used()), (0, 0));
    let error = PreparedCommunicator::new(spec(1, 0)).unwrap_err();
    assert_eq!(error, SpecError::FanIn(0));
}

#[test]
fn a_communicator_that_comes_and_goes_leaves_nothing() {
    let mut switch = switch(1, spec(1, 64).memory_bytes());
    for id in 0..200 {
        assert_eq!(
            switch.create_communicator(NOW, &spec(id, 64)).map(|created| created.edges.len()),
            Ok(64)
        );
        assert!(switch.destroy_communicator(NOW, id));
    }
    assert!(!switch.poll_transmit(NOW, &mut Transmit::new()));
    assert_eq!(switch.poll_timeout(), None);
    assert_eq!(switch.poll_event(), None);
    assert_eq!(switch.communicators(), 0);
}

#[test]
fn ports_share_the_receive_buffer_that_the_switch_was_told_of() {
    let shares = |switch: &mut SwitchNode, id: u64, has_parent: bool| {
        let spec = CommunicatorSpec { has_parent, ..spec(id, 4) };
        let created = switch.create_communicator(NOW, &spec).unwrap();
        let below = created.edges.iter().map(|edge| edge.receive_share);
        below.chain(created.uplink.map(|uplink| uplink.receive_share)).collect::<Vec<_>>()
    };
    let mut unlimited = switch(1, u64::MAX);
    assert_eq!(shares(&mut unlimited, 1, false), [None; 4]);
    let mut limited = switch(2, u64::MAX);
    limited.set_receive_budget(800_000);
    // Half of it, and half of what is left, as long as it is granted.
    for _ in 0..2 {
        assert_eq!(shares(&mut limited, 1, true), [Some(80_000); 5]);
        assert_eq!(shares(&mut limited, 2, false), [Some(50_000); 4]);
        assert!(limited.destroy_communicator(NOW, 1) && limited.destroy_communicator(NOW, 2));
    }
}

#[test]
fn communicators_that_are_aborted_have_each_their_own_time_to_end() {
    let config = SwitchConfig::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3);
    let abort_timeout = Duration::from_millis(50);
    let mut switch = SwitchNode::new(SwitchConfig { abort_timeout, ..config });
    let mut ended = Vec::new();
    // Time passes until then. The children say nothing.
    let mut pass = |switch: &mut SwitchNode, until: u64| {
        let until = NOW + Duration::from_millis(until);
        loop {
            while let Some(event) = switch.poll_event() {
                let SwitchEvent::Aborted { communicator, .. } = event else { panic!("{event:?}") };
                ended.push(communicator);
            }
            match switch.poll_timeout() {
                Some(at) if at <= until => switch.handle_timeout(at),
                _ => return ended.clone(),
            }
        }
    };
    for (id, at) in [(1, 0), (2, 20), (3, 30)] {
        switch.create_communicator(NOW, &spec(id, 2)).unwrap();
        assert!(pass(&mut switch, at).is_empty());
        let at = NOW + Duration::from_millis(at);
        assert!(switch.abort_communicator(at, id, Abort::Requested { code: 1 }));
    }
    for (at, ended) in [(49, &[][..]), (50, &[1]), (69, &[1]), (70, &[1, 2]), (80, &[1, 2, 3])] {
        assert_eq!(pass(&mut switch, at), ended, "{at} ms");
        // What has ended is destroyed, and the others still end.
        for id in ended {
            switch.destroy_communicator(NOW, *id);
        }
    }
}

/// Nobody else knows it: to the ranks below it is a lost switch, and which one that is the controller hears from here only.
#[test]
fn a_switch_above_that_breaks_the_protocol_is_told_of() {
    // The result of a segment that was never sent up, by its number, and by its bytes.
    let number = (Opcode::RcSendOnlyWithImmediate, vec![0_u8, 0, 0, 7]);
    // An address, a key, a length of 8, and so many bytes.
    let bytes: Vec<u8> = [0; 15].into_iter().chain([8]).chain([1; 8]).collect();
    for (opcode, rest) in [number, (Opcode::RcWriteOnly, bytes)] {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let config = SwitchConfig { icrc: IcrcCheck::Off, ..SwitchConfig::new(address, 3) };
        let mut switch = SwitchNode::new(config);
        let leaf = CommunicatorSpec { has_parent: true, ..spec(4, 2) };
        let uplink = switch.create_communicator(NOW, &leaf).unwrap().uplink.unwrap();
        let parent = ParentSpec {
            address: IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3)),
            qpn: Qpn::new(0x200),
            psn: Psn::new(9),
            receive_share: None,
        };
        assert_eq!(switch.connect_parent(NOW, 4, &parent), Ok(true));
        let meta = DatagramMeta {
            source: parent.address,
            source_port: 50_000,
            destination: address,
            identification: Identification::Known(0),
            congestion_experienced: false,
        };
        let header = Bth::new(opcode as u8, uplink.qpn, parent.psn);
        let datagram = [&header.to_bytes()[..], &rest[..], &[0; 4]].concat();
        switch.handle_datagram(NOW, &meta, &datagram);
        switch.handle_timeout(NOW);
        let aborted = switch.statistics(4).unwrap().abort;
        assert_eq!(aborted, Some(Abort::ParentLost), "{opcode:?}");
        let (communicator, status) = (4, CompletionStatus::BadResponse);
        let told = SwitchEvent::ParentLost { communicator, status };
        assert_eq!(switch.poll_event(), Some(told), "{opcode:?}");
        assert_eq!(switch.poll_event(), None, "{opcode:?}");
    }
}

/// SplitMix64, of which these are the published values for the seed 1234567.
#[test]
fn first_sequence_numbers_are_of_the_known_generator() {
    let seed = 1_234_567 ^ 0x6a09_e667_f3bc_c908;
    let mut switch = SwitchNode::new(SwitchConfig::new(IpAddr::V4(Ipv4Addr::LOCALHOST), seed));
    let edges = switch.create_communicator(NOW, &spec(1, 5)).unwrap().edges;
    let values = [
        6_457_827_717_110_365_317,
        3_203_168_211_198_807_973,
        9_817_491_932_198_370_423,
        4_593_380_528_125_082_431,
        16_408_922_859_458_223_821,
    ];
    assert!(edges.iter().map(|edge| edge.psn).eq(values.map(Psn::from_extended)));
}

#[test]
fn the_same_calls_make_the_same_edges_whatever_was_destroyed_before() {
    let [one, other] = [1, 2].map(|_| {
        let mut switch = switch(2, 1 << 30);
        switch.create_communicator(NOW, &spec(1, 64)).unwrap();
        assert!(switch.destroy_communicator(NOW, 1));
        switch.create_communicator(NOW, &spec(2, 64)).unwrap().edges
    });
    assert_eq!(one, other);
}
