//! Messages as they are written, and that the longest of them fit.

use super::*;
use crate::protocol::{FrameDecoder, encode};
use crate::slots::MAX_CHILDREN;
use crate::spec::MAX_WORLD;

/// The message with the longest text that there can be: all ranks are below other children than
/// their neighbours, but for one.
#[test]
fn the_longest_message_fits_a_frame() {
    let pair = |rank: u32| rank..rank + 2;
    let child = |number: u32| SwitchChild {
        ranks: (2 * number..MAX_WORLD).step_by(2 * MAX_CHILDREN).map(pair).collect(),
        is_switch: false,
        address: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap(),
        qpn: Qpn::new(0xff_ffff),
        psn: Psn::new(0xff_ffff),
        receive_share: Some(u32::MAX),
    };
    let message = FromController::CreateCommunicator {
        communicator: u64::MAX,
        group: [u64::MAX; 2],
        path_mtu: Mtu::B4096,
        segment_bytes: u32::MAX,
        window: u32::MAX,
        world: MAX_WORLD,
        has_parent: false,
        children: (0..MAX_CHILDREN as u32).map(child).collect(),
        tree: u8::MAX,
        options: CommunicatorOptions { reproducible: true, plain: false },
    };
    let message = Commanded { term: u64::MAX, message };
    let mut decoder = FrameDecoder::new();
    decoder.extend(&encode(&message).unwrap());
    assert_eq!(decoder.next_message(), Ok(Some(message)));
}

#[test]
fn the_counters_of_the_widest_node_fit_a_frame() {
    let most = u64::MAX;
    let port = |rank| PortCounters {
        rank,
        packets_sent: most,
        packets_received: most,
        payload_bytes_sent: most,
        payload_bytes_received: most,
        retransmissions: most,
    };
    let ports = (0..MAX_CHILDREN).map(|_| Some(u32::MAX)).chain([None]).map(port).collect();
    let message =
        ToController::Counters { communicator: most, at_ns: most, collectives: most, ports };
    let mut decoder = FrameDecoder::new();
    decoder.extend(&encode(&message).unwrap());
    assert_eq!(decoder.next_message(), Ok(Some(message)));
}

#[test]
fn the_longest_part_of_an_inventory_fits_a_frame() {
    let address = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap();
    let below = vec![SwitchBelow { rank: MAX_WORLD - 1, address }; MAX_CHILDREN];
    let children = MAX_CHILDREN as u32;
    let node =
        HeldNode { group: [u64::MAX; 2], communicator: u64::MAX, children, below, tree: u8::MAX };
    let message = ToController::Held { nodes: vec![node; super::super::MAX_HELD_AT_ONCE] };
    let mut decoder = FrameDecoder::new();
    decoder.extend(&encode(&message).unwrap());
    assert_eq!(decoder.next_message(), Ok(Some(message)));
}

#[test]
fn commands_carry_their_term() {
    let command = Commanded { term: 7, message: FromController::Registered };
    let text = r#"{"version":11,"term":7,"type":"registered"}"#;
    assert_eq!(&encode(&command).unwrap()[4..], text.as_bytes());
    // One without is no command.
    let mut decoder = FrameDecoder::new();
    decoder.extend(&encode(&FromController::Registered).unwrap());
    assert!(decoder.next_message::<Commanded>().is_err());
}

#[test]
fn what_is_not_asked_for_is_left_out() {
    let failed = |path_mtu| ToController::CommunicatorFailed {
        communicator: 9,
        reason: "x".to_owned(),
        path_mtu,
    };
    for (message, text) in [
        (failed(None), r#""reason":"x"}"#),
        (failed(Some(Mtu::B1024)), r#""reason":"x","path_mtu":1024}"#),
    ] {
        let frame = encode(&message).unwrap();
        assert!(frame.ends_with(text.as_bytes()), "{}", String::from_utf8_lossy(&frame[4..]));
        let mut decoder = FrameDecoder::new();
        decoder.extend(&frame);
        assert_eq!(decoder.next_message(), Ok(Some(message)));
    }
    for (options, text) in [
        (CommunicatorOptions::default(), r"{}"),
        (CommunicatorOptions { reproducible: true, plain: false }, r#"{"reproducible":true}"#),
    ] {
        assert_eq!(serde_json::to_string(&options).unwrap(), text);
        assert_eq!(serde_json::from_str::<CommunicatorOptions>(text).unwrap(), options);
    }
}

#[test]
fn a_switch_that_says_nothing_of_queue_pairs_has_enough() {
    for (text, queue_pairs) in [
        (r#"{"communicators":1,"memory_bytes":2}"#, SwitchLimits::NONE.queue_pairs),
        (r#"{"communicators":1,"memory_bytes":2,"queue_pairs":3}"#, 3),
    ] {
        let limits: SwitchLimits = serde_json::from_str(text).unwrap();
        assert_eq!(limits, SwitchLimits { communicators: 1, memory_bytes: 2, queue_pairs });
    }
}

#[test]
fn the_messages_of_trees_are_laid_out_as_documented() {
    let (qpn, psn) = (Qpn::new(17), Psn::new(5));
    let created = ToController::CommunicatorCreated {
        communicator: 9,
        edges: vec![SwitchEdge { rank: 3, qpn, psn, receive_share: None }],
        uplink: Some(SwitchUplink { qpn, psn, receive_share: None }),
    };
    let text = r#"{"version":11,"type":"communicator_created","communicator":9,"edges":[{"rank":3,"qpn":17,"psn":5}],"uplink":{"qpn":17,"psn":5}}"#;
    assert_eq!(&encode(&created).unwrap()[4..], text.as_bytes());
    let address = IpAddr::from([127, 0, 0, 1]);
    let connect =
        FromController::ConnectParent { communicator: 9, address, qpn, psn, receive_share: None };
    let text = r#"{"version":11,"type":"connect_parent","communicator":9,"address":"127.0.0.1","qpn":17,"psn":5}"#;
    assert_eq!(&encode(&connect).unwrap()[4..], text.as_bytes());
}
