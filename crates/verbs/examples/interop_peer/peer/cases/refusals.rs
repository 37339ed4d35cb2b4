//! What the responder must refuse: the requester hears of it, and no byte is touched.

use anyhow::{Result, ensure};
use millstream_verbs::{Access, CompletionStatus, QueuePairState, SendOperation, SendRequest};

use super::Case;
use crate::peer::Role;
use crate::peer::link::{ALL_ACCESS, Link, Settings, list};

const LENGTH: usize = 3000;

/// What is wrong with a request.
#[derive(Clone, Copy)]
enum Flaw {
    /// No region has that key.
    Key,
    /// The last byte lies behind the region.
    Beyond,
    /// The first byte lies before the region.
    Before,
    /// The end of the range is beyond 2^64.
    Overflow,
    /// Nothing but what the settings say.
    Right,
}

pub(crate) fn cases() -> Vec<Case> {
    let usual = Settings::USUAL;
    let without = |right| ALL_ACCESS.difference(right);
    let region = |right| Settings { region_access: without(right), ..usual };
    let pair = |right| Settings { pair_access: without(right), ..usual };
    let mut cases = Vec::new();
    for write in [true, false] {
        let (word, right) = match write {
            true => ("WRITE", Access::REMOTE_WRITE),
            false => ("READ", Access::REMOTE_READ),
        };
        for (what, settings, flaw) in [
            ("to an unknown key", usual, Flaw::Key),
            ("beyond the region", usual, Flaw::Beyond),
            ("before the region", usual, Flaw::Before),
            ("beyond the address space", usual, Flaw::Overflow),
            ("that the region does not grant", region(right), Flaw::Right),
            ("that the queue pair does not grant", pair(right), Flaw::Right),
        ] {
            cases.push(Case::new(format!("{word} {what}"), settings, move |link| {
                refused(link, write, flaw)
            }));
        }
    }
    cases.push(Case::new("SEND longer than the receive", usual, too_long));
    cases
}

fn refused(link: &mut Link<'_>, write: bool, flaw: Flaw) -> Result<()> {
    let (our_seed, _) = link.seeds();
    if link.role == Role::Requester {
        let (local, start) = match write {
            true => (link.arena.source(0), link.remote.target),
            false => (link.arena.target(0), link.remote.source),
        };
        // The region has guards of its own on both sides of the two areas.
        let size = link.arena.region().length() as u64;
        let region_start =
            link.remote.source - (link.arena.source(0) - link.arena.region().address());
        let (remote_address, remote_key) = match flaw {
            Flaw::Key => (start, link.remote.key ^ 0x5a),
            Flaw::Beyond => (region_start + size - LENGTH as u64 + 1, link.remote.key),
            Flaw::Before => (region_start - 1, link.remote.key),
            Flaw::Overflow => (u64::MAX - 100, link.remote.key),
            Flaw::Right => (start, link.remote.key),
        };
        let operation = match write {
            true => SendOperation::Write { remote_address, remote_key, immediate: None },
            false => SendOperation::Read { remote_address, remote_key },
        };
        let pieces = list(&[link.arena.piece(local, LENGTH)])?;
        // The second one is fine, and flushed.
        let key = link.remote.key;
        let fine = match write {
            true => {
                SendOperation::Write { remote_address: start, remote_key: key, immediate: None }
            }
            false => SendOperation::Read { remote_address: start, remote_key: key },
        };
        link.post_send(SendRequest::new(0, operation, &pieces))?;
        link.post_send(SendRequest::new(1, fine, &pieces))?;
        let [first, second] = [link.completion()?, link.completion()?];
        // Without the right of the queue pair, the request may count as one that is not supported
        // (IBTA 9.7.4.1.5) or as an access error.
        let by_pair = link.settings.pair_access != ALL_ACCESS
            && first.status == CompletionStatus::RemoteInvalidRequest;
        ensure!(
            first.id == 0 && (first.status == CompletionStatus::RemoteAccess || by_pair),
            "{first:?}"
        );
        ensure!(second.id == 1 && second.status == CompletionStatus::Flushed, "{second:?}");
        ensure!(link.pair()?.state() == QueuePairState::Error, "{}", link.pair()?.state());
    }
    link.control.meet("done")?;
    if link.role == Role::Responder {
        link.await_that("the responder's queue pair fails", |link| {
            link.pair().is_ok_and(|pair| pair.state() == QueuePairState::Error)
        })?;
    }
    let blank = link.arena.blank();
    link.arena.verify(our_seed, &blank)
}

fn too_long(link: &mut Link<'_>) -> Result<()> {
    let (our_seed, _) = link.seeds();
    if link.role == Role::Responder {
        let pieces = list(&[link.arena.piece(link.arena.target(0), LENGTH - 1)])?;
        link.post_receive(5, pieces)?;
    }
    link.control.meet("ready")?;
    let completion = match link.role {
        Role::Requester => {
            let pieces = list(&[link.arena.piece(link.arena.source(0), LENGTH)])?;
            link.post_send(SendRequest::new(0, SendOperation::Send { immediate: None }, pieces))?;
            link.completion()?
        }
        Role::Responder => link.completion()?,
    };
    // IBTA 9.9.3 has the responder answer "invalid request" and complete with a length error. The
    // kernel's soft-RoCE takes the receive request for a broken one (2 is IBV_WC_LOC_QP_OP_ERR).
    let expected = match link.role {
        Role::Requester => {
            [CompletionStatus::RemoteInvalidRequest, CompletionStatus::RemoteOperational]
        }
        Role::Responder => [CompletionStatus::LocalLength, CompletionStatus::Other(2)],
    };
    ensure!(expected.contains(&completion.status), "{completion:?}");
    link.control.meet("done")?;
    // What fits may have been written; nothing behind it.
    ensure!(link.arena.is_blank(LENGTH - 1), "a byte behind the receive request was written");
    let mut target = link.arena.blank();
    for (offset, byte) in target.iter_mut().enumerate().take(LENGTH - 1) {
        *byte = link.arena.peek(offset);
    }
    link.arena.verify(our_seed, &target)
}
