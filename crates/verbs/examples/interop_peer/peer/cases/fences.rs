//! Fenced requests: they wait for the READs and atomic operations before them (IBTA 10.8.3.3).

use anyhow::{Result, ensure};
use millstream_verbs::{CompletionStatus, SendOperation, SendRequest};

use super::Case;
use crate::peer::Role;
use crate::peer::arena::letters;
use crate::peer::link::{Link, Settings, list};

const LENGTH: usize = 100_000;
const ROUNDS: usize = 4;

pub(crate) fn cases() -> Vec<Case> {
    let settings = Settings { arena: ROUNDS * LENGTH, ..Settings::USUAL };
    let slow = Settings { timeout: 15, retry_count: 7, ..settings };
    vec![
        Case::new("fenced WRITE of what a READ brings", settings, there_and_back),
        // A READ that is repeated is late, and the WRITE behind it is to wait all the same. Only
        // ours: Linux 6.1's soft-RoCE stops for ever when a packet before a fence is lost.
        Case {
            roles: &[Role::Requester],
            ..Case::new("fenced WRITE of what a READ brings, 2 % lost", slow, there_and_back)
        }
        .with("loss 20 seed 9", &["lost"]),
    ]
}

/// Both are posted at once: without the fence, the WRITE would take bytes that are not there yet.
fn there_and_back(link: &mut Link<'_>) -> Result<()> {
    let (our_seed, their_seed) = link.seeds();
    let seed = match link.role {
        Role::Requester => their_seed,
        Role::Responder => our_seed,
    };
    let target: Vec<u8> = letters(seed, 0, ROUNDS * LENGTH).collect();
    if link.role == Role::Requester {
        let remote_key = link.remote.key;
        for round in 0..ROUNDS {
            let offset = (round * LENGTH) as u64;
            let pieces = list(&[link.arena.piece(link.arena.target(round * LENGTH), LENGTH)])?;
            let remote_address = link.remote.source + offset;
            let read = SendOperation::Read { remote_address, remote_key };
            let remote_address = link.remote.target + offset;
            let write = SendOperation::Write { remote_address, remote_key, immediate: None };
            link.post_send(SendRequest::new(2 * round as u64, read, pieces))?;
            let write = SendRequest::new(2 * round as u64 + 1, write, pieces);
            link.post_send(SendRequest { fence: true, ..write })?;
        }
        for id in 0..2 * ROUNDS as u64 {
            let completion = link.completion()?;
            ensure!(
                completion.id == id && completion.status == CompletionStatus::Success,
                "{completion:?} of request {id}"
            );
        }
    }
    link.control.meet("done")?;
    link.no_completion()?;
    link.arena.verify(our_seed, &target)
}
