//! SENDs that invalidate a key of the peer's (IBTA 9.4.1.1.3).
//!
//! The kernel's soft-RoCE invalidates memory windows and regions that the kernel itself registered,
//! none of which libibverbs has. So it is the requester where a region is invalidated, and refuses
//! where it is the responder.

use anyhow::{Result, ensure};
use millstream_verbs::{
    Access, Completion, CompletionStatus, QueuePairState, SendOperation, SendRequest,
};

use super::Case;
use crate::peer::Role;
use crate::peer::arena::letters;
use crate::peer::link::{ALL_ACCESS, Link, Settings, list};

/// More than a packet.
const LENGTH: usize = 3000;

pub(crate) fn cases() -> Vec<Case> {
    let settings = Settings { timeout: 15, retry_count: 5, ..Settings::USUAL };
    let granted =
        Settings { region_access: ALL_ACCESS.union(Access::REMOTE_INVALIDATE), ..settings };
    vec![
        Case {
            roles: &[Role::Responder],
            ..Case::new("SEND that invalidates", granted, invalidates)
        },
        Case {
            roles: &[Role::Requester],
            ..Case::new("SEND that may not invalidate", settings, refused)
        },
    ]
}

fn write(link: &Link<'_>, id: u64) -> Result<()> {
    let operation = SendOperation::Write {
        remote_address: link.remote.target + LENGTH as u64,
        remote_key: link.remote.key,
        immediate: None,
    };
    let pieces = list(&[link.arena.piece(link.arena.source(LENGTH), LENGTH)])?;
    link.post_send(SendRequest::new(id, operation, pieces))
}

fn send(link: &Link<'_>, id: u64) -> Result<()> {
    let operation = SendOperation::SendInvalidate { remote_key: link.remote.key };
    let pieces = list(&[link.arena.piece(link.arena.source(0), LENGTH)])?;
    link.post_send(SendRequest::new(id, operation, pieces))
}

fn receive(link: &Link<'_>) -> Result<()> {
    let pieces = list(&[link.arena.piece(link.arena.target(0), LENGTH)])?;
    link.post_receive(5, pieces)
}

fn is(completion: &Completion, id: u64, status: CompletionStatus) -> Result<()> {
    ensure!(
        completion.id == id && completion.status == status,
        "{completion:?} where {status:?} of request {id} should be"
    );
    Ok(())
}

/// What comes before arrives, as does the message; what comes after is refused.
fn invalidates(link: &mut Link<'_>) -> Result<()> {
    let (our_seed, their_seed) = link.seeds();
    let mut target = link.arena.blank();
    if link.role == Role::Responder {
        receive(link)?;
        target[..2 * LENGTH]
            .copy_from_slice(&letters(their_seed, 0, 2 * LENGTH).collect::<Vec<u8>>());
    }
    link.control.meet("ready")?;
    match link.role {
        Role::Requester => {
            write(link, 0)?;
            send(link, 1)?;
            is(&link.completion()?, 0, CompletionStatus::Success)?;
            is(&link.completion()?, 1, CompletionStatus::Success)?;
            link.control.meet("invalidated")?;
            write(link, 2)?;
            is(&link.completion()?, 2, CompletionStatus::RemoteAccess)?;
        }
        Role::Responder => {
            let completion = link.completion()?;
            is(&completion, 5, CompletionStatus::Success)?;
            let key = link.arena.region().remote_key();
            ensure!(
                completion.invalidated == Some(key) && completion.length as usize == LENGTH,
                "{completion:?}, where key {key:#x} should be invalidated"
            );
            link.control.meet("invalidated")?;
        }
    }
    link.control.meet("done")?;
    link.arena.verify(our_seed, &target)
}

/// The receive fails, and the connection with it.
fn refused(link: &mut Link<'_>) -> Result<()> {
    let (our_seed, their_seed) = link.seeds();
    let mut target = link.arena.blank();
    if link.role == Role::Responder {
        receive(link)?;
        // The message itself is there before its key is looked at.
        target[..LENGTH].copy_from_slice(&letters(their_seed, 0, LENGTH).collect::<Vec<u8>>());
    }
    link.control.meet("ready")?;
    match link.role {
        Role::Requester => {
            send(link, 0)?;
            let first = link.completion()?;
            link.control.meet("refused")?;
            // Linux's soft-RoCE acknowledges the message before it fails, and is silent then.
            let (next, expected) = match first.status {
                CompletionStatus::Success => {
                    write(link, 1)?;
                    (link.completion()?, CompletionStatus::RetryExceeded)
                }
                _ => (first, CompletionStatus::RemoteAccess),
            };
            ensure!(next.status == expected, "{next:?} where {expected:?} should be");
            ensure!(link.pair()?.state() == QueuePairState::Error, "{}", link.pair()?.state());
        }
        Role::Responder => {
            let completion = link.completion()?;
            let expected =
                [CompletionStatus::LocalProtection, CompletionStatus::RemoteInvalidRequest];
            ensure!(
                completion.id == 5 && expected.contains(&completion.status),
                "{completion:?} of a receive whose message may not invalidate"
            );
            link.control.meet("refused")?;
            link.await_that("the responder's queue pair fails", |link| {
                link.pair().is_ok_and(|pair| pair.state() == QueuePairState::Error)
            })?;
        }
    }
    link.control.meet("done")?;
    link.arena.verify(our_seed, &target)
}
