//! What flows and targets may not do, whatever becomes of the bytes: what is told of the past changes
//! nothing, fences are asked for until there is an answer, and a target holds to the order in which
//! connections begin and end.

use core::time::Duration;

use millstream_roce::Instant;
use millstream_transfer_core::{
    AnyPolicy, End, Ended, Failure, Flow, Post, RailId, RailState, SliceId, SliceResult,
    TargetOutput,
};

use super::director::{Director, Event, Network, core_time};
use super::process::{Process, Transfer};

/// More happens at no instant, unless it goes on for ever.
const MOST_AT_ONCE: u32 = 200_000;
/// A fence is looked at so long after it was asked for first.
pub(super) const FENCE_CHECK: Duration = Duration::from_millis(1100);
/// What is posted for a transfer is not so many times its bytes, and once more: attempts are limited, rails that are silent while others complete
/// have more patience each time, and troubles that are not the rail's fault are few.
const MOST_POSTED: u64 = 16;
/// By then it was asked for so often, at least and at most.
const LEAST_ASKED: u32 = 4;
const MOST_ASKED: u32 = 6;

/// A completion that is told again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Echo {
    pub(super) own: usize,
    pub(super) peer: usize,
    pub(super) life: u32,
    pub(super) rail: RailId,
    /// The connection that it is of.
    pub(super) epoch: u64,
    pub(super) slice: SliceId,
    pub(super) result: SliceResult,
}

/// Counts what happens at an instant.
#[derive(Debug, Default)]
pub(super) struct Pace {
    instant: Instant,
    steps: u32,
}

impl Pace {
    /// One step more; returns whether it goes on for ever.
    pub(super) fn is_endless(&mut self, now: Instant) -> bool {
        if self.instant != now {
            (self.instant, self.steps) = (now, 0);
        }
        self.steps += 1;
        self.steps > MOST_AT_ONCE
    }
}

/// How a flow stands, as far as what is told of the past may not change it.
#[derive(Debug, PartialEq)]
struct Standing {
    rails: Vec<(RailState, u64, u64)>,
    last_epoch: u64,
    tasks: usize,
    slices: usize,
}

impl Standing {
    fn of(flow: &Flow<AnyPolicy>) -> Self {
        let rails = flow.rails().iter();
        Self {
            rails: rails.map(|rail| (rail.state(), rail.epoch(), rail.bytes_in_flight())).collect(),
            last_epoch: flow.epoch(),
            tasks: flow.tasks(),
            slices: flow.slices(),
        }
    }
}

/// Tells a flow something that is of the past; returns what is wrong.
pub(super) fn tell_again(
    flow: &mut Flow<AnyPolicy>,
    tell: impl FnOnce(&mut Flow<AnyPolicy>),
) -> Option<String> {
    let before = Standing::of(flow);
    tell(flow);
    let after = Standing::of(flow);
    (before != after).then(|| format!("what is over changed {before:?} to {after:?}"))
}

impl Director {
    /// Counts what is posted for a transfer; what is wrong with it.
    pub(super) fn count_posted(&mut self, now: Instant, post: &Post) -> Option<String> {
        let transfer = self.transfers.get_mut(&post.user)?;
        transfer.posted += u64::from(post.length);
        let often = transfer.posted / transfer.length;
        if often > MOST_POSTED {
            return Some(format!("{post:?} is posted again and again: {transfer:?}"));
        }
        let transfer = *transfer;
        self.count_passed(now, post, &transfer)
    }

    /// A completion that was told already is told again, unless its slice may still be held.
    pub(super) fn tell_completion_again(&mut self, network: &mut Network<'_>, echo: Echo) {
        let now = core_time(network.now());
        let Echo { own, peer, life, rail, epoch, slice, result } = echo;
        let Some(found) = self.peer(own, life, peer) else { return };
        let present = &found.flow.rails()[usize::from(rail.0)];
        let held = present.epoch() == epoch && present.state() == RailState::Fencing;
        if held && result != SliceResult::Done {
            return;
        }
        let wrong = tell_again(&mut found.flow, |flow| {
            flow.completed(now, slice, result);
        });
        wrong.into_iter().for_each(|what| network.violate(format!("{echo:?}: {what}")));
        self.pump(network, own, peer);
    }

    /// A fence was asked for: if it stays without an answer, it must be asked for again.
    pub(super) fn fence_asked(
        &mut self,
        network: &mut Network<'_>,
        (own, peer, life): (usize, usize, u32),
        connection: (RailId, u64),
    ) {
        let Some(found) = self.peer(own, life, peer) else { return };
        let asked = found.asked.entry(connection).or_default();
        *asked += 1;
        if *asked == 1 {
            let (rail, epoch) = connection;
            self.plan(network, FENCE_CHECK, Event::FenceCheck { own, peer, life, rail, epoch });
        }
    }

    pub(super) fn check_fence(
        &mut self,
        network: &mut Network<'_>,
        (own, peer, life): (usize, usize, u32),
        connection: (RailId, u64),
    ) {
        let Some(found) = self.peer(own, life, peer) else { return };
        // An answer has taken it away.
        let Some(asked) = found.asked.remove(&connection) else { return };
        let (rail, epoch) = connection;
        let present = &found.flow.rails()[usize::from(rail.0)];
        let waits = present.epoch() == epoch && present.state() == RailState::Fencing;
        if (waits && asked < LEAST_ASKED) || asked > MOST_ASKED {
            let what =
                format!("a fence of {own} to {peer} is not answered: asked for {asked} times");
            network.violate(what);
        }
    }
}

/// What is wrong with the end of a transfer.
pub(super) fn check_end(
    transfer: &Transfer,
    ended: &Ended,
    patience: Duration,
    now: Instant,
) -> Option<String> {
    let waited = now.saturating_duration_since(transfer.submitted);
    let early = ended.end == End::Failed(Failure::NoRail) && waited < patience;
    early.then(|| format!("{ended:?} after {waited:?}"))
}

/// What is wrong with what a target wants done.
pub(super) fn check_target(process: &mut Process, output: &TargetOutput) -> Option<String> {
    match *output {
        TargetOutput::Accept { initiator, epoch } => {
            let open = |&(other, _): &(_, _)| other == initiator;
            if process.accepted.keys().any(open) {
                return Some(format!("{output:?} while the one before is open"));
            }
            let past = process.past.entry(initiator).or_default();
            let again = epoch <= *past;
            *past = epoch.max(*past);
            again.then(|| format!("{output:?} again, or after its fence"))
        }
        TargetOutput::Confirm { initiator, epoch } => {
            let past = process.past.entry(initiator).or_default();
            *past = epoch.max(*past);
            let open = |&(other, found): &(_, u64)| other == initiator && found <= epoch;
            process.accepted.keys().any(open).then(|| format!("{output:?} while it is open"))
        }
        TargetOutput::Refuse { .. } | TargetOutput::Full { .. } | TargetOutput::Close { .. } => {
            None
        }
    }
}
