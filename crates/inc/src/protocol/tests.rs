//! What messages say in JSON, and what they leave out.

use core::net::IpAddr;

use millstream_wire::{Mtu, Psn, Qpn};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::ranks::Ranks;
use crate::{CommunicatorOptions, MAX_WORLD};

const ADDRESS: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 1));

fn plan() -> Plan {
    Plan {
        communicator: 9,
        group: [1, 2],
        switch: "s".to_owned(),
        address: ADDRESS,
        qpn: Qpn::new(17),
        psn: Psn::new(5),
        path_mtu: Mtu::B1024,
        more: Vec::new(),
        ranks: Ranks::default(),
        failover: Failover::Off,
        incarnation: 0,
        meeting: None,
        processes: Vec::new(),
        receive_share: None,
    }
}

fn hello() -> Hello {
    Hello {
        group: "g".to_owned(),
        world: 2,
        rank: 0,
        address: ADDRESS,
        timeout_ms: 5,
        more_addresses: Vec::new(),
        same_machine: None,
        options: CommunicatorOptions::default(),
        fallback: FallbackOffer::Off,
        meeting: None,
        avoid: Vec::new(),
    }
}

fn create(tree: u8, options: CommunicatorOptions) -> FromController {
    FromController::CreateCommunicator {
        communicator: 9,
        group: [1, 2],
        path_mtu: Mtu::B1024,
        segment_bytes: 4096,
        window: 8,
        world: 2,
        has_parent: false,
        children: Vec::new(),
        tree,
        options,
    }
}

fn lost(tree: u8, further_up: bool) -> ToController {
    ToController::SwitchLost { detail: "x".to_owned(), tree, switch: None, further_up }
}

/// Whether a message has these fields, and no others of those that may be left out.
#[track_caller]
fn check<T>(message: &T, may: &[&str], has: &[(&str, Value)])
where
    T: Serialize + DeserializeOwned + core::fmt::Debug + PartialEq,
{
    let value = serde_json::to_value(message).unwrap();
    for field in may {
        let wanted = has.iter().find(|(name, _)| name == field).map(|(_, value)| value);
        assert_eq!(value.get(field), wanted, "{field} of {value}");
    }
    assert_eq!(
        &serde_json::from_value::<T>(value).unwrap(),
        message,
        "it is read as it was written"
    );
}

/// Peers of before know nothing of it.
#[test]
fn what_is_as_usual_is_not_said_and_what_is_not_is_read_as_it_was_said() {
    let may = ["tree", "options"];
    check(&create(0, CommunicatorOptions::default()), &may, &[]);
    let plain = CommunicatorOptions { plain: true, reproducible: false };
    let (tree, options) = (("tree", json!(1)), ("options", json!({"plain": true})));
    check(&create(1, plain), &may, &[tree.clone(), options]);
    check(&lost(0, false), &["tree", "switch", "further_up"], &[]);
    check(&lost(1, true), &["tree", "further_up"], &[tree, ("further_up", json!(true))]);

    let failed = |path_mtu| {
        let reason = "x".to_owned();
        ToController::CommunicatorFailed { communicator: 9, reason, path_mtu }
    };
    check(&failed(None), &["path_mtu"], &[]);
    check(&failed(Some(Mtu::B512)), &["path_mtu"], &[("path_mtu", json!(512))]);

    let may = ["fallback", "options", "more_addresses", "same_machine", "meeting", "avoid"];
    check(&hello(), &may, &[]);
    let both = CommunicatorOptions { plain: true, reproducible: true };
    let asks = Hello { fallback: FallbackOffer::Able, options: both, ..hello() };
    let options = ("options", json!({"plain": true, "reproducible": true}));
    check(&asks, &may, &[("fallback", json!({"kind": "able"})), options]);

    let may = ["failover", "ranks", "more", "meeting", "processes", "receive_share"];
    check(&plan(), &may, &[]);
    let goes_on = Plan { failover: Failover::On, ranks: (0..3_u32).collect(), ..plan() };
    check(&goes_on, &may, &[("failover", json!("on")), ("ranks", json!([[0, 2]]))]);
    let cannot = Plan { failover: Failover::Reproducible, ranks: Ranks::one(4), ..plan() };
    check(&cannot, &may, &[("failover", json!("reproducible")), ("ranks", json!([4]))]);
    let limited = Plan { receive_share: Some(70_000), ..plan() };
    check(&limited, &may, &[("receive_share", json!(70_000))]);
}

/// Somebody else may have written the message: no number of it may be one that there is not.
#[test]
fn numbers_that_nobody_can_have_are_refused() {
    fn reads(field: &str, value: Value) -> bool {
        let mut message = serde_json::to_value(plan()).unwrap();
        message[field] = value;
        serde_json::from_value::<Plan>(message).is_ok()
    }
    for (field, good, bad) in [
        ("qpn", vec![2, (1 << 24) - 1], vec![0, 1, 1 << 24, 1 << 32]),
        ("psn", vec![0, (1 << 24) - 1], vec![1 << 24, 1 << 32]),
        ("path_mtu", vec![256, 512, 1024, 2048, 4096], vec![0, 255, 1025, 8192]),
    ] {
        assert!(good.into_iter().all(|number: u64| reads(field, json!(number))), "{field}");
        assert!(!bad.into_iter().any(|number: u64| reads(field, json!(number))), "{field}");
    }
    let last = MAX_WORLD - 1;
    for good in [json!([0, [1, 2], 3]), json!([[0, last]]), json!([last]), json!([[7, 7]])] {
        assert!(reads("ranks", good.clone()), "{good}");
    }
    for bad in
        [json!([1, 1]), json!([[0, 2], 2]), json!([[3, 2]]), json!([MAX_WORLD]), json!([3, 1])]
    {
        assert!(!reads("ranks", bad.clone()), "{bad}");
    }
}

#[test]
fn who_is_refused_for_load_comes_again_and_others_do_not() {
    let limit = Refusal::Limit { what: "groups".to_owned(), limit: 4 };
    let quota = |wanted| Refusal::Quota {
        holder: "token".to_owned(),
        what: "groups".to_owned(),
        limit: 4,
        used: 3,
        wanted,
    };
    let other = Refusal::NotLeader { leader: None, detail: "nobody leads".to_owned() };
    let never = Refusal::Name { what: "group".to_owned() };
    for (refusal, for_load, for_now) in [
        (limit, true, true),
        (quota(2), true, true),
        (quota(4), true, true),
        // More than it may ever have.
        (quota(5), false, false),
        (other, false, true),
        (never, false, false),
    ] {
        let says = (refusal.is_for_load(), refusal.is_for_now());
        assert_eq!(says, (for_load, for_now), "{refusal}");
    }
}

#[test]
fn a_lost_switch_is_named_where_its_name_is_known() {
    let lost = |name: &str| AbortReason::SwitchLost {
        name: name.to_owned(),
        address: ADDRESS,
        detail: "it is silent".to_owned(),
        incarnation: None,
    };
    assert_eq!(lost("s1").to_string(), "switch \"s1\" at 10.0.0.1 is lost: it is silent");
    assert_eq!(lost("").to_string(), "switch at 10.0.0.1 is lost: it is silent");
}

#[test]
fn a_long_explanation_is_cut_in_every_reason() {
    let detail = "é".repeat(MAX_TEXT_BYTES);
    let (rank, name, incarnation) = (1, String::new(), None);
    for reason in [
        AbortReason::PeerLost { rank, detail: detail.clone() },
        AbortReason::Mismatch { rank, detail: detail.clone() },
        AbortReason::Violation { rank, detail: detail.clone() },
        AbortReason::Overdue { rank, detail: detail.clone() },
        AbortReason::SwitchLost { name, address: ADDRESS, detail: detail.clone(), incarnation },
    ] {
        let text = reason.shortened().to_string();
        assert_eq!(text.matches('é').count(), MAX_TEXT_BYTES / 2, "{text}");
    }
}

#[test]
fn a_host_that_waits_reads_how_many_ranks_are_not_connected() {
    let connections =
        |ranks: &[u32]| Awaited::Connections { ranks: ranks.iter().copied().collect() };
    assert_eq!(connections(&[1, 2]).to_string(), "ranks 1-2 to connect");
    let refusal = connections(&[1, 2]).refusal("g".to_owned(), 4);
    let text = "group \"g\" was complete, but these ranks did not connect: 1-2";
    assert_eq!(refusal.to_string(), text);
}
