//! Unreliable datagrams: on a link that loses nothing, all of them arrive.

use anyhow::{Result, ensure};
use millstream_verbs::{
    CompletionOperation, CompletionStatus, GLOBAL_ROUTE_HEADER_LENGTH, SendOperation, SendRequest,
    Transport,
};

use super::Case;
use crate::peer::Role;
use crate::peer::arena::letters;
use crate::peer::link::{Link, Settings, list};

/// The largest that every path carries.
const LENGTHS: [usize; 8] = [0, 1, 3, 100, 255, 1000, 1023, 1024];
/// What each receive has room for.
const ROOM: usize = GLOBAL_ROUTE_HEADER_LENGTH + 1024 + 16;

pub(crate) fn cases() -> Vec<Case> {
    let transport = Transport::UnreliableDatagram;
    let settings = Settings { transport, arena: LENGTHS.len() * ROOM, ..Settings::USUAL };
    vec![Case::new("datagrams (UD), 0 B to 1024 B", settings, datagrams)]
}

/// Every second one has immediate data.
fn immediate(index: usize) -> Option<u32> {
    (index % 2 == 1).then_some(0xface_0000 + index as u32)
}

fn datagrams(link: &mut Link<'_>) -> Result<()> {
    let (our_seed, their_seed) = link.seeds();
    let mut target = link.arena.blank();
    if link.role == Role::Responder {
        for index in 0..LENGTHS.len() {
            let piece = link.arena.piece(link.arena.target(index * ROOM), ROOM);
            link.post_receive(index as u64, list(&[piece])?)?;
        }
    }
    link.control.meet("ready")?;
    for (index, length) in LENGTHS.into_iter().enumerate() {
        let (id, start) = (index as u64, index * ROOM);
        if link.role == Role::Requester {
            let pieces = list(&[link.arena.piece(link.arena.source(start), length)])?;
            let operation = SendOperation::Send { immediate: immediate(index) };
            link.post_send(SendRequest::new(id, operation, pieces))?;
        }
        let completion = link.completion()?;
        ensure!(
            completion.id == id && completion.status == CompletionStatus::Success,
            "{completion:?} of request {id}"
        );
        if link.role == Role::Requester {
            continue;
        }
        ensure!(
            completion.operation == CompletionOperation::Receive
                && completion.length as usize == GLOBAL_ROUTE_HEADER_LENGTH + length
                && completion.immediate == immediate(index)
                && completion.source == Some(link.remote.number),
            "{completion:?}, where {length} bytes from {} should be",
            link.remote.number
        );
        // What is in the place of the route header is not ours to say: the sender's IP header
        // among it.
        let header = target.iter_mut().enumerate().skip(start).take(GLOBAL_ROUTE_HEADER_LENGTH);
        for (offset, byte) in header {
            *byte = link.arena.peek(offset);
        }
        let payload = start + GLOBAL_ROUTE_HEADER_LENGTH;
        let bytes: Vec<u8> = letters(their_seed, start, length).collect();
        target[payload..payload + length].copy_from_slice(&bytes);
    }
    link.control.meet("done")?;
    link.no_completion()?;
    link.arena.verify(our_seed, &target)
}
