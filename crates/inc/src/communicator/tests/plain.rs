//! A node whose hosts send no descriptors.

use super::*;

/// A root with ranks 0 and 1.
fn plain() -> Communicator {
    let spec = CommunicatorSpec {
        id: 1,
        path_mtu: Mtu::B256,
        segment_bytes: SEGMENT_BYTES,
        window: 2,
        world: 2,
        children: vec![host(0), host(1)],
        has_parent: false,
        options: crate::CommunicatorOptions { plain: true, reproducible: false },
    };
    Communicator::new(&spec, Slots::of(&spec), 1, (0..).map(ProtectionDomainId))
}

/// A message of a child arrives.
fn send(node: &mut Communicator, child: usize) {
    let [piece] = node.receive_request(child, 0).pieces;
    let _ = node.store(child, piece.address, &[1; 8]).unwrap();
    let _ = node.end_segment(child).unwrap();
}

#[test]
fn a_sum_goes_to_all_when_all_have_sent_wakes_them_and_is_under_way_until_they_have_it() {
    let mut node = plain();
    send(&mut node, 0);
    assert_eq!(sends(&mut node, 0), []);
    send(&mut node, 1);
    assert!(!node.is_settled());
    for port in 0..2 {
        let sums = sends(&mut node, port);
        let [SendRequest { id, solicited, pieces: [piece], .. }] = sums[..] else {
            panic!("{sums:?}");
        };
        assert_eq!((Tag::from_id(id), solicited), ((Tag::Result, port), true));
        assert_eq!(node.bytes(&piece), Some(&[2; 8][..]));
        assert!(!node.is_settled(), "it is under way");
        deliver(&mut node, &sums);
    }
    assert!(node.is_settled());
}
