//! Receivers that are late, and receivers that never come.

use anyhow::{Result, ensure};
use millstream_verbs::{
    CompletionOperation, CompletionStatus, QueuePairState, SendOperation, SendRequest,
};

use super::Case;
use crate::peer::Role;
use crate::peer::arena::letters;
use crate::peer::link::{Link, Settings, list};

const LENGTH: usize = 10_000;
const SEND: SendOperation = SendOperation::Send { immediate: None };

pub(crate) fn cases() -> Vec<Case> {
    let never = Settings { rnr_retry: 2, ..Settings::USUAL };
    vec![
        Case::new("receiver late for SEND", Settings::USUAL, |link| late(link, false)),
        Case::new("receiver late for WRITE with immediate", Settings::USUAL, |link| {
            late(link, true)
        }),
        Case::new("receiver that never comes", never, never_ready),
    ]
}

/// Receives are posted only once the requester was told to wait.
fn late(link: &mut Link<'_>, write: bool) -> Result<()> {
    let (our_seed, their_seed) = link.seeds();
    let mut target = link.arena.blank();
    match link.role {
        Role::Requester => {
            for id in 0..4 {
                let offset = id as usize * LENGTH;
                let pieces = list(&[link.arena.piece(link.arena.source(offset), LENGTH)])?;
                let operation = match write {
                    false => SEND,
                    true => SendOperation::Write {
                        remote_address: link.remote.target + offset as u64,
                        remote_key: link.remote.key,
                        immediate: Some(id as u32),
                    },
                };
                link.post_send(SendRequest::new(id, operation, pieces))?;
            }
            for id in 0..4 {
                let completion = link.completion()?;
                ensure!(
                    completion.id == id && completion.status == CompletionStatus::Success,
                    "{completion:?} of request {id}"
                );
            }
        }
        Role::Responder => {
            for id in 0..4 {
                let before = link.device.counters().rnr_naks_sent;
                link.await_that("an RNR NAK", |link| {
                    link.device.counters().rnr_naks_sent > before
                })?;
                let offset = id as usize * LENGTH;
                let piece = link.arena.piece(link.arena.target(offset), LENGTH);
                let pieces = if write { vec![] } else { vec![piece] };
                link.post_receive(id, pieces)?;
                let completion = link.completion()?;
                ensure!(
                    completion.id == id
                        && completion.status == CompletionStatus::Success
                        && completion.length as usize == LENGTH
                        && completion.immediate == write.then_some(id as u32),
                    "{completion:?} of receive {id}"
                );
                let bytes: Vec<u8> = letters(their_seed, offset, LENGTH).collect();
                target[offset..offset + LENGTH].copy_from_slice(&bytes);
            }
        }
    }
    link.control.meet("done")?;
    link.no_completion()?;
    link.arena.verify(our_seed, &target)
}

/// The requester is told after as many tries as it was configured for; the responder goes on.
fn never_ready(link: &mut Link<'_>) -> Result<()> {
    let (our_seed, _) = link.seeds();
    if link.role == Role::Requester {
        let pieces = list(&[link.arena.piece(link.arena.source(0), LENGTH)])?;
        for id in 0..2 {
            link.post_send(SendRequest::new(id, SEND, &pieces))?;
        }
        for (id, status) in
            [(0, CompletionStatus::ReceiverNotReadyExceeded), (1, CompletionStatus::Flushed)]
        {
            let completion = link.completion()?;
            ensure!(
                (completion.id, completion.status, completion.operation)
                    == (id, status, CompletionOperation::Send),
                "{completion:?}, where {status:?} of request {id} should be"
            );
        }
        ensure!(link.pair()?.state() == QueuePairState::Error, "{:?}", link.pair()?.state());
    }
    link.control.meet("done")?;
    if link.role == Role::Responder {
        let state = link.pair()?.state();
        ensure!(state == QueuePairState::ReadyToSend, "the responder is in {state}");
    }
    link.no_completion()?;
    let blank = link.arena.blank();
    link.arena.verify(our_seed, &blank)
}
