//! Links that lose, repeat and corrupt packets. The relay does it.

use anyhow::{Result, ensure};
use millstream_verbs::{CompletionStatus, SendOperation, SendRequest};

use super::Case;
use super::transfer::{self, Kind, Message};
use crate::peer::Role;
use crate::peer::link::{Link, Settings, list};

pub(crate) fn cases() -> Vec<Case> {
    // Packets that are lost at the end of a message cost a timeout: 134 ms. The kernel takes seven
    // retries for any number.
    let settings = Settings { timeout: 15, retry_count: 7, ..Settings::USUAL };
    let mixture = |seed| transfer::mixture(seed, 300, 30_000);
    let long = |kind| transfer::layout([Message::new(kind, 2 << 20)]);
    let both = transfer::mixture(23, 200, 20_000);
    let arena = 2 * transfer::extent(&both);
    let corrupted = mixture(25);
    let dying = Settings { retry_count: 2, ..settings };
    vec![
        Case::transfer("all kinds, 1 % lost", settings, mixture(21))
            .with("loss 10 seed 1", &["lost"]),
        Case::transfer("all kinds, 1 % twice", settings, mixture(22))
            .with("duplicate 10 seed 2", &["twice"]),
        Case::new(
            "all kinds, both ways, 1 % lost, 1 % twice",
            Settings { arena, ..settings },
            move |link| transfer::both_ways(link, &both),
        )
        .with("loss 10 duplicate 10 seed 3", &["lost", "twice"]),
        Case::transfer("SEND, 2 MiB, 1 % lost, 1 % twice", settings, long(Kind::Send))
            .with("loss 10 duplicate 10 seed 4", &["lost", "twice"]),
        Case::transfer("WRITE, 2 MiB, 1 % lost, 1 % twice", settings, long(Kind::Write))
            .with("loss 10 duplicate 10 seed 5", &["lost", "twice"]),
        Case {
            roles: &[Role::Requester],
            ..Case::transfer(
                "all kinds, WRITE as a message for each packet, 1 % lost, 1 % twice",
                Settings { split_writes: true, ..settings },
                mixture(26),
            )
        }
        .with("loss 10 duplicate 10 seed 9", &["lost", "twice"]),
        Case::transfer("READ, 2 MiB, 1 % lost, 1 % twice", settings, long(Kind::Read))
            .with("loss 10 duplicate 10 seed 6", &["lost", "twice"]),
        Case::transfer(
            "all kinds, 2 % of payloads corrupted towards the kernel",
            settings,
            mixture(24),
        )
        .with("corrupt 20 to-guest seed 7", &["corrupted"]),
        Case {
            whole_icrc: true,
            ..Case::new(
                "all kinds, 2 % of payloads corrupted from the kernel",
                Settings { arena: transfer::extent(&corrupted), ..settings },
                move |link| noticed(link, &corrupted),
            )
        }
        .with("corrupt 20 from-guest seed 8", &["corrupted"]),
        Case::new("every ICRC wrong", dying, nothing_arrives).with("wrong-icrc", &["corrupted"]),
    ]
}

/// What is corrupted is counted by who sees the whole ICRC, and sent again.
fn noticed(link: &mut Link<'_>, messages: &[Message]) -> Result<()> {
    let before = link.device.counters().dropped_icrc;
    transfer::one_way(link, messages)?;
    let dropped = link.device.counters().dropped_icrc - before;
    ensure!(link.relay.is_none() || dropped > 0, "no packet was dropped for its ICRC");
    Ok(())
}

/// The counter-proof to every other case: what has no right ICRC does nothing.
fn nothing_arrives(link: &mut Link<'_>) -> Result<()> {
    let (our_seed, _) = link.seeds();
    if link.role == Role::Requester {
        let operation = SendOperation::Write {
            remote_address: link.remote.target,
            remote_key: link.remote.key,
            immediate: None,
        };
        let pieces = list(&[link.arena.piece(link.arena.source(0), 1000)])?;
        link.post_send(SendRequest::new(0, operation, pieces))?;
        let completion = link.completion()?;
        ensure!(completion.status == CompletionStatus::RetryExceeded, "{completion:?}");
    }
    link.control.meet("done")?;
    let blank = link.arena.blank();
    link.arena.verify(our_seed, &blank)
}
