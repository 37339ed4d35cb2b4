//! Peers that are gone: the requester is told within the bound that it was configured with.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use millstream_verbs::{CompletionStatus, QueuePairState, SendOperation, SendRequest};

use super::Case;
use crate::peer::Role;
use crate::peer::link::{Link, Settings, list};

/// 134 ms, six times: before its end the peer answers in that time, though its machine stands still meanwhile.
const TIMEOUT: u8 = 15;
const RETRIES: u8 = 5;
/// What a machine that is emulated and busy may be late by.
const SLACK: Duration = Duration::from_secs(10);
/// Of one message, of which several are under way.
const LENGTH: usize = 256 << 10;

pub(crate) fn cases() -> Vec<Case> {
    let settings =
        Settings { timeout: TIMEOUT, retry_count: RETRIES, arena: LENGTH, ..Settings::USUAL };
    vec![
        Case::new("peer closed before a WRITE", settings, |link| dies(link, End::Before, true)),
        Case::new("peer closed before a READ", settings, |link| dies(link, End::Before, false)),
        Case::new("peer closed amid WRITEs", settings, |link| dies(link, End::Amid, true)),
        Case::new("peer closed amid READs", settings, |link| dies(link, End::Amid, false)),
        Case::new("link silent amid WRITEs", settings, |link| dies(link, End::Silence, true))
            .with("pass", &["lost"]),
        Case::new("link silent amid READs", settings, |link| dies(link, End::Silence, false))
            .with("pass", &["lost"]),
    ]
}

#[derive(Clone, Copy, PartialEq)]
enum End {
    Before,
    Amid,
    /// The relay drops everything.
    Silence,
}

fn dies(link: &mut Link<'_>, end: End, write: bool) -> Result<()> {
    if end == End::Before && link.role == Role::Responder {
        link.pair = None;
    }
    link.control.meet("ready")?;
    match link.role {
        Role::Requester => {
            if end == End::Before {
                post(link, 0, write)?;
                failed_in_time(link, Instant::now(), 0)?;
            } else {
                // Always four under way, so that the end comes amid one of them.
                for id in 0..4 {
                    post(link, id, write)?;
                }
                let mut next = 4;
                succeeded(link, 0)?;
                link.control.say("now", "")?;
                if end == End::Silence {
                    silence(link)?;
                }
                fail_after_successes(link, &mut next, write)?;
            }
            let state = link.pair()?.state();
            ensure!(state == QueuePairState::Error, "the requester is in {state}");
        }
        Role::Responder if end != End::Before => {
            link.control.hear("now")?;
            match end {
                End::Silence => silence(link)?,
                _ => link.pair = None,
            }
        }
        Role::Responder => {}
    }
    link.control.meet("done")
}

/// Has the relay drop everything, on the side that has one.
fn silence(link: &mut Link<'_>) -> Result<()> {
    match link.relay.as_mut() {
        Some(relay) => relay.command("drop").map(drop),
        None => Ok(()),
    }
}

fn post(link: &Link<'_>, id: u64, write: bool) -> Result<()> {
    let remote_key = link.remote.key;
    let (local, operation) = match write {
        true => {
            let remote_address = link.remote.target;
            let operation = SendOperation::Write { remote_address, remote_key, immediate: None };
            (link.arena.source(0), operation)
        }
        false => {
            let remote_address = link.remote.source;
            (link.arena.target(0), SendOperation::Read { remote_address, remote_key })
        }
    };
    let pieces = list(&[link.arena.piece(local, LENGTH)])?;
    link.post_send(SendRequest::new(id, operation, pieces))
}

fn succeeded(link: &mut Link<'_>, id: u64) -> Result<()> {
    let completion = link.completion()?;
    ensure!(
        completion.id == id && completion.status == CompletionStatus::Success,
        "{completion:?}"
    );
    Ok(())
}

/// Keeps posting until a request fails, which must be for want of answers, in time since the last
/// success; the ones behind it are flushed.
fn fail_after_successes(link: &mut Link<'_>, next: &mut u64, write: bool) -> Result<()> {
    let mut expected = 1;
    let mut since = Instant::now();
    post(link, *next, write)?;
    *next += 1;
    loop {
        let completion = link.completion()?;
        ensure!(completion.id == expected, "{completion:?} where request {expected} is next");
        match completion.status {
            CompletionStatus::Success => {
                since = Instant::now();
                post(link, *next, write)?;
                *next += 1;
                expected += 1;
            }
            CompletionStatus::RetryExceeded => break,
            _ => bail!("{completion:?}"),
        }
    }
    in_time(since)?;
    for id in expected + 1..*next {
        let completion = link.completion()?;
        ensure!(
            completion.id == id && completion.status == CompletionStatus::Flushed,
            "{completion:?} where request {id} is to be flushed"
        );
    }
    Ok(())
}

fn failed_in_time(link: &mut Link<'_>, since: Instant, id: u64) -> Result<()> {
    let completion = link.completion()?;
    ensure!(
        completion.id == id && completion.status == CompletionStatus::RetryExceeded,
        "{completion:?}"
    );
    in_time(since)
}

/// IBTA 9.7.6.1.3: a timeout is between T and 4 T, with T = 4.096 us * 2^timeout.
fn in_time(since: Instant) -> Result<()> {
    let timeout = Duration::from_nanos(4096 << TIMEOUT);
    let bound = timeout * 4 * (u32::from(RETRIES) + 1) + SLACK;
    let taken = since.elapsed();
    ensure!(taken <= bound, "the failure came after {taken:?}, where the bound is {bound:?}");
    Ok(())
}
