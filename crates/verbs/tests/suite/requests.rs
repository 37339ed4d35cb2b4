//! What a send request can ask for besides its operation: inline bytes, an invalidation.

use millstream_verbs::{
    Access, CompletionStatus, PostError, Provider, QueuePair, QueuePairCapabilities,
    QueuePairOptions, ReceiveRequest, RegionError, SendOperation, SendRequest,
};

use crate::harness::{
    ALL_ACCESS, CAPABILITIES, End, USUAL, connect, next, next_good, open, piece, read_from,
    register, register_with, request, two, write_to,
};

/// A queue pair of `end`'s that takes so many inline bytes, and `b`'s, connected.
fn with_inline(a: &End, b: &End, max_inline: usize) -> QueuePair {
    let capabilities = QueuePairCapabilities { max_inline, ..CAPABILITIES };
    let pair = a.domain.create_queue_pair(&a.completions, &a.completions, capabilities).unwrap();
    connect((&pair, &a.device), (&b.pair, &b.device), USUAL);
    pair
}

#[test]
fn inline_bytes_need_no_region_and_can_change_at_once() {
    let [a, b] = [open(), open()];
    let pair = with_inline(&a, &b, 64);
    let mut remote = vec![0; 200];
    let region = register(&b, &mut remote);
    let receive = |offset| ReceiveRequest { id: 9, pieces: [piece(&region, offset, 100)] };
    b.pair.post_receive(&[receive(100)]).unwrap();
    let mut bytes = [3; 64];
    let write = SendRequest::new(1, write_to(&region, 0), []);
    pair.post_send_inline(&write, &bytes).unwrap();
    bytes.fill(4);
    let operation = SendOperation::Send { immediate: Some(77) };
    let send = SendRequest::new(2, operation, []);
    pair.post_send_inline(&send, &bytes[..5]).unwrap();
    bytes.fill(5);
    let lengths: Vec<_> = next_good(&a.completions, 2).iter().map(|c| (c.id, c.length)).collect();
    assert_eq!(lengths, [(1, 64), (2, 5)]);
    let received = next_good(&b.completions, 1);
    assert_eq!((received[0].length, received[0].immediate), (5, Some(77)));
    drop(region);
    assert_eq!(remote, [&[3; 64][..], &[0; 36], &[4; 5], &[0; 95]].concat());
}

#[test]
fn inline_bytes_that_do_not_fit_are_refused() {
    let [a, b] = [open(), open()];
    let pair = with_inline(&a, &b, 16);
    let mut bytes = vec![0; 100];
    let region = register(&b, &mut bytes);
    let write = SendRequest::new(1, write_to(&region, 0), []);
    assert_eq!(
        pair.post_send_inline(&write, &[1; 17]),
        Err(PostError::InlineTooLong { length: 17, limit: 16 })
    );
    let read = SendRequest { operation: read_from(&region), ..write };
    let not_inline = Err(PostError::NotInline(pair.number()));
    assert_eq!(pair.post_send_inline(&read, &[1]), not_inline);
    let with_pieces = SendRequest::new(1, write.operation, [piece(&region, 0, 1)]);
    assert_eq!(pair.post_send_inline(&with_pieces, &[1]), not_inline);
    // A queue pair that was made without takes none.
    let other = a.domain.create_queue_pair(&a.completions, &a.completions, CAPABILITIES).unwrap();
    assert_eq!(
        other.post_send_inline(&write, &[1]),
        Err(PostError::InlineTooLong { length: 1, limit: 0 })
    );
    pair.post_send_inline(&write, &[1; 16]).unwrap();
    next_good(&a.completions, 1);
}

/// Devices of the system let remotes invalidate memory windows, which are not offered.
#[test]
fn a_send_invalidates_a_region_where_regions_allow_it() {
    let [a, b] = two();
    let mut target = vec![0; 100];
    let access = ALL_ACCESS | Access::REMOTE_INVALIDATE;
    if a.device.provider() != Provider::Soft {
        // SAFETY: the vector outlives the region, of which there is none.
        let refused =
            unsafe { b.domain.register_memory(target.as_mut_ptr(), target.len(), access) };
        assert_eq!(refused.unwrap_err(), RegionError::InvalidationUnsupported);
        return;
    }
    let target_region = register_with(&b.domain, &mut target, access);
    let mut source = vec![8; 100];
    let source_region = register(&a, &mut source);
    let mut inbox = vec![0; 100];
    let inbox_region = register(&b, &mut inbox);
    let receive = ReceiveRequest { id: 3, pieces: [piece(&inbox_region, 0, 100)] };
    b.pair.post_receive(&[receive]).unwrap();
    let pieces = piece(&source_region, 0, 100);
    let remote_key = target_region.remote_key();
    a.pair
        .post_send(&[
            request(1, write_to(&target_region, 0), pieces),
            request(2, SendOperation::SendInvalidate { remote_key }, pieces),
        ])
        .unwrap();
    next_good(&a.completions, 2);
    let received = next_good(&b.completions, 1);
    assert_eq!(received[0].invalidated, Some(remote_key));
    a.pair.post_send(&[request(4, write_to(&target_region, 0), pieces)]).unwrap();
    assert_eq!(next(&a.completions, 1)[0].status, CompletionStatus::RemoteAccess);
    drop((target_region, inbox_region));
    assert_eq!((target, inbox), (vec![8; 100], vec![8; 100]));
}

#[test]
fn a_write_that_may_be_split_is_one_request() {
    let [a, b] = [open(), open()];
    let options = QueuePairOptions {
        split_writes: true,
        ..QueuePairOptions::new(&a.completions, CAPABILITIES)
    };
    let pair = a.domain.create_queue_pair_with(&options).unwrap();
    connect((&pair, &a.device), (&b.pair, &b.device), USUAL);
    let length = 100_001;
    let mut local: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
    let mut remote = vec![0; length + 1];
    let [from, to] = [register(&a, &mut local), register(&b, &mut remote)];
    let pieces = [piece(&from, 0, length)];
    // The last two reach beyond the region: by all but their first byte, and by one.
    let writes = [0, 1, length as u64, 2];
    for (id, offset) in writes.into_iter().enumerate() {
        let request = SendRequest::new(id as u64, write_to(&to, offset), pieces);
        pair.post_send(&[request]).unwrap();
    }
    let done: Vec<_> = next_good(&a.completions, 2).iter().map(|c| (c.id, c.length)).collect();
    assert_eq!(done, [(0, length as u32), (1, length as u32)]);
    let refused: Vec<_> = next(&a.completions, 2).iter().map(|c| (c.id, c.status)).collect();
    assert_eq!(refused, [(2, CompletionStatus::RemoteAccess), (3, CompletionStatus::Flushed)]);
    drop((pair, from, to));
    assert_eq!(remote[0], local[0]);
    assert!(remote[1..] == local[..]);
}
