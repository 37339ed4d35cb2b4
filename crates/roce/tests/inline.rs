//! Inline bytes over their way: what they look like, and what is sent again.

mod common;

use std::cell::RefCell;
use std::rc::Rc;

use common::operations::{REMOTE, SEND, write};
use common::{Lcg, Options, Pair, pattern, piece};
use millstream_roce::{
    CompletionStatus, MAX_INLINE, Piece, PostError, QueuePairAttributes, QueuePairState,
    SendOperation, SendRequest,
};

const LOCAL: u64 = 0x1000_0000;

fn options() -> Options {
    Options { max_inline: MAX_INLINE, ..Options::default() }
}

fn post(pair: &mut Pair, request: &SendRequest<[Piece; 0]>, data: &[u8]) -> Result<(), PostError> {
    let host = &mut pair.hosts[0];
    host.endpoint.post_send_inline(pair.now, host.qpn, request, data)
}

fn request(id: u64, operation: SendOperation) -> SendRequest<[Piece; 0]> {
    SendRequest::new(id, operation, [])
}

/// The peer cannot tell the difference.
#[test]
fn the_same_datagram_as_from_registered_memory() {
    for length in [0, 1, 4, 63, 256] {
        let datagrams = [false, true].map(|inline| {
            let mut pair = Pair::with(options());
            let data = pattern(length, 3);
            let source = pair.register(0, LOCAL, pattern(256, 3));
            let seen = Rc::new(RefCell::new(Vec::new()));
            let log = seen.clone();
            pair.wire = Box::new(move |_, datagram| {
                log.borrow_mut().push(datagram.to_vec());
                vec![]
            });
            if inline {
                post(&mut pair, &request(1, write(5)), &data).unwrap();
            } else {
                pair.post(0, 1, write(5), &[piece(source, LOCAL, length)]);
            }
            pair.step();
            seen.take().swap_remove(0)
        });
        assert_eq!(datagrams[0], datagrams[1], "{length}");
    }
}

/// More requests than places, over a bad wire: what is sent again is what was given.
#[test]
fn what_is_sent_again_is_what_was_copied() {
    for seed in 0..40 {
        let options = Options { work_requests: 5, timeout: 14, ..options() };
        let mut pair = Pair::with(options);
        let mut lcg = Lcg(seed);
        pair.wire = Box::new(move |_, datagram| {
            let copies = [0, 1, 1, 1, 1, 1, 1, 2][lcg.below(8) as usize];
            vec![datagram.to_vec(); copies]
        });
        let target = pair.register(1, REMOTE, vec![0; 256 * 100]);
        let mut expected = vec![0; 256 * 100];
        let mut posted = 0;
        let mut done = 0;
        while done < 100 {
            while posted < 100 {
                let at = posted * 256;
                let data = pattern(posted % 257, posted as u8);
                let operation = SendOperation::Write {
                    remote_address: REMOTE + at as u64,
                    remote_key: target,
                    immediate: None,
                };
                match post(&mut pair, &request(posted as u64, operation), &data) {
                    Err(PostError::QueueFull { limit: 5 }) => break,
                    result => result.unwrap(),
                }
                expected[at..at + data.len()].copy_from_slice(&data);
                posted += 1;
            }
            assert!(pair.step(), "seed {seed}: nothing happens any more");
            let completions = pair.completions(0);
            assert!(completions.iter().all(|c| c.status == CompletionStatus::Success));
            done += completions.len();
        }
        assert!(pair.region(1, target) == expected, "seed {seed}");
    }
}

#[test]
fn requests_of_a_failed_queue_pair_are_flushed_with_their_length() {
    let mut pair = Pair::with(options());
    post(&mut pair, &request(1, SEND), &[1; 30]).unwrap();
    let host = &mut pair.hosts[0];
    let error = QueuePairAttributes {
        state: Some(QueuePairState::Error),
        ..QueuePairAttributes::default()
    };
    host.endpoint.modify_queue_pair(pair.now, host.qpn, &error).unwrap();
    post(&mut pair, &request(2, SEND), &[1; 40]).unwrap();
    pair.poll(0);
    let ends: Vec<_> = pair.completions(0).iter().map(|c| (c.id, c.status, c.length)).collect();
    let flushed = CompletionStatus::Flushed;
    assert_eq!(ends, [(1, flushed, 30), (2, flushed, 40)]);
}
