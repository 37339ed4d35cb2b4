//! Handshakes that are refused or make no sense, of either side.

use millstream_metadata::{Client, Frame, FrameType, Gid, HandShakeDesc, Notify, Probe};
use millstream_transfer::FailureReason;

use super::fixture::against;
use crate::common::{address, engine};

#[test]
fn handshakes_that_go_wrong() {
    let error = against(|_, _| None);
    assert!(matches!(error.reason, FailureReason::Unreachable(_)), "{error}");
    let error = against(|_, _| Some(HandShakeDesc::refusal("no")));
    let text = error.to_string();
    assert!(text.contains("(nic fake_0): 4096 bytes at 0x1000 by nic "), "{text}");
    assert!(text.ends_with(" here: it refused to connect: no"), "{text}");
    assert!(error.local_nic.is_some() && error.range == Some((4096, 4096)), "{error:?}");
    let error = against(|_, _| Some(HandShakeDesc::default()));
    assert!(error.to_string().contains("0 queue pairs where 1 were expected"), "{error}");
    let error = against(|request, _| {
        Some(HandShakeDesc { qp_num: vec![7], path_mtu: Some(3), ..request.clone() })
    });
    assert!(error.to_string().contains("3 bytes are no path MTU"), "{error}");
}

#[test]
fn handshakes_that_make_no_sense_are_refused() {
    let target = engine(1);
    let peer = target.name().parse().unwrap();
    let call = |frame_type, body: Vec<u8>| {
        Client::default().call(&peer, &Frame::new(frame_type, body)).unwrap().body
    };
    let good = HandShakeDesc {
        local_nic_path: "somebody:1@nic".to_owned(),
        local_gid: Some(Gid::from_address(address())),
        peer_nic_path: format!("{}@{}", target.name(), target.devices()[0]),
        qp_num: vec![17],
        ..HandShakeDesc::default()
    };
    let reply = |request: &HandShakeDesc| {
        HandShakeDesc::from_json(&call(FrameType::Connection, request.to_json())).unwrap()
    };
    let accepted = reply(&good);
    assert_eq!((accepted.reply_msg.as_str(), accepted.qp_num.len()), ("", 1));
    assert_eq!(accepted.local_nic_path, good.peer_nic_path);
    assert_eq!(accepted.start_psn.len(), 1);

    for (bad, why) in [
        (HandShakeDesc { peer_nic_path: "x".to_owned(), ..good.clone() }, "not a NIC path"),
        (
            HandShakeDesc { peer_nic_path: format!("{}@x", target.name()), ..good.clone() },
            "has no NIC \"x\"",
        ),
        (
            HandShakeDesc {
                peer_nic_path: format!("other:1@{}", target.devices()[0]),
                ..good.clone()
            },
            "not other:1",
        ),
        (HandShakeDesc { local_gid: None, ..good.clone() }, "does not say the GID"),
        (HandShakeDesc { qp_num: vec![], ..good.clone() }, "0 queue pairs"),
        (HandShakeDesc { qp_num: vec![1; 17], ..good.clone() }, "17 queue pairs"),
        (HandShakeDesc { qp_num: vec![1 << 24], ..good.clone() }, "no queue pair number"),
        (HandShakeDesc { local_nic_path: "x".repeat(600), ..good.clone() }, "more than 512 bytes"),
        (
            HandShakeDesc {
                local_gid: Some(Gid::from_address("::1".parse().unwrap())),
                ..good.clone()
            },
            "",
        ),
    ] {
        let refusal = reply(&bad).reply_msg;
        assert!(!refusal.is_empty() && refusal.contains(why), "{refusal:?}: {why}");
    }
    let reply = call(FrameType::Connection, b"nonsense".to_vec());
    let refusal = HandShakeDesc::from_json(&reply).unwrap().reply_msg;
    assert!(refusal.starts_with("malformed handshake"), "{refusal}");

    // What came before there were types, and the small messages.
    let reply = call(FrameType::OldProtocol, good.to_json());
    assert_eq!(HandShakeDesc::from_json(&reply).unwrap().qp_num.len(), 1);
    let probe: Probe = serde_json::from_slice(&call(FrameType::Probe, b"{}".to_vec())).unwrap();
    assert_eq!(probe.status, "success");
    let notify: Notify = serde_json::from_slice(&call(FrameType::Notify, b"{}".to_vec())).unwrap();
    assert_eq!(notify.notify_msg, "success");
}
