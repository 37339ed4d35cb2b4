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
        Case::new("fenced WRITE of what a READ brings", settings, |link| {
            there_and_back(link, ROUNDS)
        }),
        // A READ that is repeated is late, and the WRITE behind it is to wait all the same. Only
        // ours: see docs/interop.md on what Linux 6.1's soft-RoCE does with a fenced request that is
        // lost while a READ behind it is under way.
        Case {
            roles: &[Role::Requester],
            ..Case::new("fenced WRITEs of what READs bring, 2 % lost", slow, |link| {
                there_and_back(link, ROUNDS)
            })
        }
        .with("loss 20 seed 9", &["lost"]),
        // One READ and its WRITE at a time, which it can do.
        Case::new("fenced WRITE of what a READ brings, 2 % lost", slow, |link| {
            there_and_back(link, 1)
        })
        .with("loss 20 seed 9", &["lost"]),
    ]
}

/// Both are posted at once: without the fence, the WRITE would take bytes that are not there yet. Of
/// such pairs, `at_once` are under way.
fn there_and_back(link: &mut Link<'_>, at_once: usize) -> Result<()> {
    let (our_seed, their_seed) = link.seeds();
    let seed = match link.role {
        Role::Requester => their_seed,
        Role::Responder => our_seed,
    };
    let target: Vec<u8> = letters(seed, 0, ROUNDS * LENGTH).collect();
    if link.role == Role::Requester {
        for first in (0..ROUNDS).step_by(at_once) {
            let rounds = first..ROUNDS.min(first + at_once);
            for round in rounds.clone() {
                post(link, round)?;
            }
            for id in 2 * rounds.start..2 * rounds.end {
                let completion = link.completion()?;
                ensure!(
                    completion.id == id as u64 && completion.status == CompletionStatus::Success,
                    "{completion:?} of request {id}"
                );
            }
        }
    }
    link.control.meet("done")?;
    link.no_completion()?;
    link.arena.verify(our_seed, &target)
}

fn post(link: &Link<'_>, round: usize) -> Result<()> {
    let remote_key = link.remote.key;
    let offset = (round * LENGTH) as u64;
    let pieces = list(&[link.arena.piece(link.arena.target(round * LENGTH), LENGTH)])?;
    let read = SendOperation::Read { remote_address: link.remote.source + offset, remote_key };
    let remote_address = link.remote.target + offset;
    let write = SendOperation::Write { remote_address, remote_key, immediate: None };
    link.post_send(SendRequest::new(2 * round as u64, read, &pieces))?;
    let write = SendRequest::new(2 * round as u64 + 1, write, &pieces);
    link.post_send(SendRequest { fence: true, ..write })
}
