//! What a rank that goes on over other trees knows: its trees, and its calls on them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_inc::Ranks;
use millstream_inc::failover::Lost;
use millstream_inc::protocol::{self, GroupIdentity, LostSwitch, MAX_AVOIDED};

use super::FailoverReport;
use super::retained::Retained;
use crate::CollectiveError;
use crate::control::Sender;
use crate::coordinator::{Coordinator, Rendezvous};
use crate::engine::Engine;
use crate::hosted::HostedSwitch;
use crate::join::{JoinConfig, Joined};
use crate::joining::Cancellation;
use crate::memory::Regions;
use crate::path::Way;
use crate::tree::Work;
use crate::watcher::Watcher;

/// What a call that is started anew has of its time at least: other ranks may be that much later.
const LEAST_LEFT: Duration = Duration::from_millis(500);

pub(super) struct State {
    pub(super) line: Line,
    pub(super) phase: Phase,
    /// Calls that are being started.
    pub(super) starting: usize,
    /// The recovery waits for them.
    pub(super) awaits_starts: bool,
    /// The number of the first of these.
    pub(super) front: u64,
    pub(super) calls: VecDeque<Entry>,
    /// Of each tree, what is kept of the last call whose end was told.
    pub(super) retained: Vec<Retained>,
    pub(super) reports: Vec<FailoverReport>,
    /// Those of lost trees, until the communicator is closed, so that the numbers of their queue pairs are not given again:
    /// what a switch that stood still sends later is for nobody. Beside these they have a few pages for messages, but no copies
    /// of calls, and nothing of a receive buffer.
    pub(super) retired: Vec<Arc<Engine>>,
    /// Ends the search for other trees.
    pub(super) cancellation: Cancellation,
    /// Switches that were lost, which are not to serve again: the last ones.
    pub(super) avoid: Vec<LostSwitch>,
    /// Why what is made up for is to end.
    pub(super) canceled: Option<CollectiveError>,
}

/// A set of trees.
pub(super) struct Line {
    pub(super) engine: Arc<Engine>,
    pub(super) sender: Arc<Sender>,
    /// None once the communicator is closed.
    pub(super) watcher: Option<Watcher>,
    pub(super) hosted: Option<Arc<HostedSwitch>>,
    /// Which processes the switches of its trees are.
    processes: Vec<LostSwitch>,
    /// Where the ranks meet without a controller.
    pub(super) rendezvous: Option<Rendezvous>,
    /// Rank 0's, if they have met there.
    pub(super) coordinator: Option<Coordinator>,
    pub(super) identity: (GroupIdentity, u64),
    pub(super) failover: protocol::Failover,
    pub(super) lost: Lost,
    /// How many there were before.
    pub(super) generation: u32,
    /// This call is the collective of that number.
    pub(super) first: (u64, u64),
}

pub(super) enum Phase {
    Serving,
    /// The trees are lost, and others not there. No vector of a call is touched.
    Joining,
    /// Calls are made up for, on this engine.
    Repairing(Arc<Engine>),
    /// It is of no more use.
    Over(CollectiveError),
}

#[expect(clippy::large_enum_variant, reason = "a box would be an allocation for each call")]
pub(super) enum Entry {
    /// It is being started.
    Coming,
    Call(Call),
    /// Its end was told.
    Told,
}

pub(super) struct Call {
    pub(super) work: Work,
    /// Of the engine that there is now.
    pub(super) sequence: u64,
    /// It was made up for.
    pub(super) done: bool,
    /// Of a vector that is not small on these trees, and was on those that it was called for.
    pub(super) regions: [Option<Regions>; 2],
}

impl Line {
    pub(super) fn new(
        joined: Joined,
        config: &JoinConfig,
        ranks: Ranks,
        generation: u32,
        first: (u64, u64),
    ) -> Option<Self> {
        let Joined { way, watcher, sender, hosted, failover, identity, .. } = joined;
        let Joined { processes, rendezvous, .. } = joined;
        let Way::Switch(engine) = way else { return None };
        let (shape, trees) = engine.shape();
        let lost = Lost {
            communicator: identity.1,
            rank: config.rank,
            ranks,
            world: config.world,
            trees,
            segment_bytes: shape.segment_bytes,
            window: shape.window,
            path_mtu: shape.path_mtu,
        };
        let (watcher, coordinator) = (Some(watcher), None);
        Some(Self {
            engine,
            sender,
            watcher,
            hosted,
            processes,
            rendezvous,
            coordinator,
            identity,
            failover,
            lost,
            generation,
            first,
        })
    }

    pub(super) const fn call_of(&self, sequence: u64) -> u64 {
        self.first.0 + sequence.saturating_sub(self.first.1)
    }
}

impl State {
    pub(super) fn is_recovering(&self) -> bool {
        matches!(self.phase, Phase::Joining | Phase::Repairing(_))
    }

    /// The switch that was lost is not to serve again.
    pub(super) fn avoid_lost(&mut self, error: &CollectiveError) {
        let Some(lost) = lost_switch(&self.line.processes, error) else { return };
        self.avoid.retain(|known| *known != lost);
        if self.avoid.len() >= MAX_AVOIDED {
            self.avoid.remove(0);
        }
        self.avoid.push(lost);
    }

    /// Calls that were under way, and were to be over by then, have from here on what was left of their time when the loss was
    /// noticed. What they wait for other trees does not count.
    pub(super) fn keep_time(&mut self, due: &[(u64, Instant)], noticed: Instant) {
        for entry in &mut self.calls {
            let Entry::Call(Call { done: false, sequence, work, .. }) = entry else { continue };
            let of_call = due.iter().filter(|(number, _)| *number == *sequence);
            // Where it was under way on several trees, the first of them would have ended it.
            if let Some(deadline) = of_call.map(|&(_, deadline)| deadline).min() {
                work.limit = left(work.limit, deadline, noticed);
            }
        }
    }

    /// What was registered for a call that has failed: its memory is its caller's again.
    pub(super) fn take_regions(&mut self, number: u64) -> [Option<Regions>; 2] {
        match self.entry(number) {
            Some(Entry::Call(call)) => std::mem::take(&mut call.regions),
            _ => [None, None],
        }
    }

    pub(super) fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        let index = usize::try_from(number.checked_sub(self.front)?).ok()?;
        self.calls.get_mut(index)
    }

    /// A call of this number was started.
    pub(super) fn started(&mut self, number: u64, call: Call) {
        let index = number.saturating_sub(self.front) as usize;
        while self.calls.len() <= index {
            self.calls.push_back(Entry::Coming);
        }
        self.calls[index] = Entry::Call(call);
    }

    /// No call that is not done has a result on the trees that there are.
    pub(super) fn forget_numbers(&mut self) {
        for entry in &mut self.calls {
            if let Entry::Call(call) = entry
                && !call.done
            {
                call.sequence = u64::MAX;
            }
        }
    }

    /// The caller is about to be told that a call has its result.
    pub(super) fn tell(&mut self, number: u64) {
        let Some(entry) = self.entry(number) else { return };
        let Entry::Call(call) = std::mem::replace(entry, Entry::Told) else { return };
        let Line { lost, failover, .. } = &self.line;
        if *failover == protocol::Failover::On && !call.done {
            let of_trees = self.retained.iter_mut().zip(0..);
            for (retained, tree) in of_trees {
                retained.keep(lost, &call.work, call.sequence, tree);
            }
        }
        while let Some(Entry::Told) = self.calls.front() {
            self.calls.pop_front();
            self.front += 1;
        }
    }
}

/// What is left of the time of a call, of which it had so much when it was started last.
fn left(limit: Duration, deadline: Instant, noticed: Instant) -> Duration {
    deadline.saturating_duration_since(noticed).max(LEAST_LEFT).min(limit)
}

/// Whether a communicator goes on after this.
pub(super) const fn is_loss(error: &CollectiveError) -> bool {
    matches!(error, CollectiveError::SwitchLost { .. })
}

/// The switch that is lost, by what is known of it; none where that is another one than this rank is connected to, and not
/// named.
fn lost_switch(processes: &[LostSwitch], error: &CollectiveError) -> Option<LostSwitch> {
    let &CollectiveError::SwitchLost { switch, incarnation, .. } = error else { return None };
    if error.is_loss_further_up() {
        return None;
    }
    let known = processes.iter().find(|known| known.address == switch).copied();
    Some(known.unwrap_or(LostSwitch { address: switch, incarnation }))
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use millstream_inc::{Abort, CollectiveError as E};
    use millstream_verbs::CompletionStatus;

    use super::*;
    use crate::LONGEST;

    #[test]
    fn what_a_rank_says_of_a_lost_switch_is_which_process_it_was_if_that_is_known() {
        let address = |last| IpAddr::V4(Ipv4Addr::new(10, 0, 0, last));
        let processes = [LostSwitch { address: address(1), incarnation: Some(7) }];
        let lost = |last, detail: &str| {
            let (switch, detail) = (address(last), detail.to_owned());
            let incarnation = Some(9);
            lost_switch(&processes, &CollectiveError::SwitchLost { switch, detail, incarnation })
        };
        assert_eq!(lost(1, "it does not answer"), Some(processes[0]));
        // The controller knows it.
        let other = LostSwitch { address: address(2), incarnation: Some(9) };
        assert_eq!(lost(2, "rank 0 cannot reach it"), Some(other));
        // It is the one above.
        assert_eq!(lost(1, &Abort::ParentLost.to_string()), None);
        assert_eq!(lost_switch(&processes, &CollectiveError::Closed), None);
    }

    #[test]
    fn a_call_that_is_started_anew_has_what_was_left_of_its_time_and_a_moment_at_least() {
        let noticed = Instant::now();
        let [short, long] = [LEAST_LEFT / 5, LEAST_LEFT * 100];
        // What it had, when it was to be over, and what is left.
        for (limit, deadline, expected) in [
            (long, noticed + LEAST_LEFT * 60, LEAST_LEFT * 60),
            (long, noticed + short, LEAST_LEFT),
            (long, noticed - short, LEAST_LEFT),
            // It never had as much as that.
            (short, noticed + short / 2, short),
            (Duration::MAX, noticed + LONGEST, LONGEST),
        ] {
            assert_eq!(left(limit, deadline, noticed), expected, "{limit:?}");
        }
    }

    #[test]
    fn ranks_go_on_when_their_switch_tells_of_another_one_and_do_not_take_it_for_lost() {
        let switch = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
        for (said, goes_on, avoided) in [
            (E::Transport(CompletionStatus::RetryExceeded), true, Some(switch)),
            (Abort::ParentLost.into(), true, None),
            (Abort::SwitchBelowLost { rank: 2 }.into(), true, None),
            (Abort::PeerLost { rank: 2 }.into(), false, None),
        ] {
            let error = CollectiveError::from_switch(said, switch).on_tree(Some("tree 1"));
            assert_eq!(is_loss(&error), goes_on, "{error}");
            assert_eq!(error.is_loss_further_up(), goes_on && avoided.is_none(), "{error}");
            let lost = lost_switch(&[], &error).map(|lost| lost.address);
            assert_eq!(lost, avoided, "{error}");
            let is_named = error.to_string().starts_with("the switch at 10.0.0.1 is lost: ");
            assert_eq!(is_named, avoided.is_some(), "{error}");
        }
    }
}
