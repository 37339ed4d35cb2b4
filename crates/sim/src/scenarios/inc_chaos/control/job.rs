//! Jobs: who starts ranks, what may go wrong for them, and what they may say then.

use core::time::Duration;
use std::collections::BTreeSet;

use millstream_roce::Instant;

use super::super::build::Network;
use super::super::call::{Arena, Sizes};
use super::super::tree::{Tree, TreeNode};
use super::director::{Director, Event};
use super::rank::{Blamed, Stage};

/// Within so long after all that went wrong is over each rank of a communicator that lost one has heard of it.
const BOUND: Duration = Duration::from_secs(20);

/// So long after all that went wrong is over it may still disturb what is begun: nodes that nobody claims.
pub(super) const AFTER_EFFECTS: Duration = Duration::from_secs(15);

/// How a rank's process is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Running,
    /// It has told its caller of an error.
    Failed,
    /// It has ended.
    Over,
    /// All its calls have succeeded.
    Done,
}

/// A job that was started.
#[derive(Debug)]
struct Attempt {
    states: Vec<State>,
    /// The memory of each rank for its calls, until it has it.
    arenas: Vec<Vec<Arena>>,
    /// Ranks that died, were cut off or stood still, have failed or left.
    guilty: BTreeSet<u32>,
    /// A switch died, was cut off or stood still.
    any: bool,
    /// Something went wrong while it was made, or just before.
    excused: bool,
    failed: bool,
}

/// A job.
#[derive(Debug, Default)]
pub(super) struct Job {
    attempt: Option<Attempt>,
    /// How often it was started.
    number: u32,
    done: bool,
}

impl Director {
    /// Starts a job.
    pub(super) fn launch(&mut self, network: &mut Network<'_>, job: usize) {
        let now = network.now();
        let plan = &self.world.jobs[job];
        let world = plan.hosts.len();
        // Exact numbers: which tree it is does not show.
        let root = TreeNode { switch: 0, parent: None, ranks: (0..world as u32).collect() };
        let tree = Tree { nodes: vec![root] };
        let mut arenas: Vec<Vec<Arena>> = (0..world).map(|_| Vec::new()).collect();
        let hosts: Vec<Vec<u32>> = (0..world as u32).map(|rank| vec![rank]).collect();
        for (shape, _) in &plan.calls {
            // It matters to hosts with several ranks only where a vector goes with the descriptor.
            let sizes =
                Sizes { path_mtu: 1024, segment_bytes: 4096, window: 1, world: world as u32 };
            let of_call = shape.arenas(&mut self.rng, &tree, &sizes, &hosts);
            arenas.iter_mut().zip(of_call).for_each(|(all, arena)| all.push(arena));
        }
        let state = &mut self.jobs[job];
        state.number += 1;
        let number = state.number;
        if let (1, Some((rank, calls))) = (number, plan.leaver) {
            arenas[rank as usize].truncate(calls);
        }
        let excused = now < self.calm_from + AFTER_EFFECTS;
        let away = |&(_, &machine): &(u32, &usize)| self.streams.cut_until(machine, now).is_some();
        let guilty = (0..).zip(&plan.hosts).filter(away).map(|(rank, _)| rank).collect();
        state.attempt = Some(Attempt {
            states: vec![State::Running; world],
            arenas,
            guilty,
            any: now < self.hurt_until,
            excused: excused && !self.world.troubles.is_empty(),
            failed: false,
        });
        self.launches += 1;
        self.tally.one("jobs started");
        for rank in 0..world as u32 {
            let delay = Duration::from_micros(self.rng.below(100_000));
            self.plan(network, delay, Event::StartRank { job, rank, number });
        }
    }

    pub(super) fn is_current(&self, job: usize, number: u32) -> bool {
        self.jobs[job].number == number && self.jobs[job].attempt.is_some()
    }

    pub(super) fn take_arenas(&mut self, job: usize, rank: u32) -> Vec<Arena> {
        let attempt = self.jobs[job].attempt.as_mut();
        attempt.map(|it| core::mem::take(&mut it.arenas[rank as usize])).unwrap_or_default()
    }

    /// Whether all jobs have succeeded.
    pub(super) fn all_done(&self) -> bool {
        self.jobs.iter().all(|job| job.done)
    }

    /// Something happens to the process on a host for which others may blame it.
    pub(super) fn blame(&mut self, machine: usize) {
        let (job, rank) = (self.ranks[machine].job, self.ranks[machine].rank);
        if self.ranks[machine].stage != Stage::Off
            && let Some(attempt) = &mut self.jobs[job].attempt
        {
            attempt.guilty.insert(rank);
        }
    }

    /// Something happens for which anybody may be blamed.
    pub(super) fn blame_anybody(&mut self) {
        self.jobs.iter_mut().filter_map(|job| job.attempt.as_mut()).for_each(|it| it.any = true);
    }

    pub(super) fn has_left_early(&mut self, machine: usize) {
        self.tally.one("ranks that left early");
        self.blame(machine);
    }

    pub(super) fn failed_to_join(
        &mut self,
        network: &mut Network<'_>,
        job: usize,
        rank: u32,
        why: &str,
    ) {
        self.tally.one("ranks: not joined");
        network.note(|| format!("job {job}, rank {rank} has not joined: {why}"));
        let Some(attempt) = &mut self.jobs[job].attempt else { return };
        if !attempt.excused && attempt.guilty.is_empty() && !attempt.any {
            network.violate(format!("job {job}, rank {rank} did not join: {why}"));
        }
        attempt.guilty.insert(rank);
        self.over(network, job, rank, State::Over);
    }

    /// A rank has told its caller of an error.
    pub(super) fn failed(
        &mut self,
        network: &mut Network<'_>,
        job: usize,
        rank: u32,
        blamed: &Blamed,
    ) {
        let Some(attempt) = &mut self.jobs[job].attempt else { return };
        let trouble = attempt.any || !attempt.guilty.is_empty();
        let (name, right) = match blamed {
            Blamed::Rank(guilty) => {
                ("ranks: blame a rank", attempt.any || attempt.guilty.contains(guilty))
            }
            // The controller knows better where it can speak.
            Blamed::Switch if !attempt.any => {
                let silent = network.now() < self.silent_until;
                ("ranks: blame a switch for a rank", trouble && silent)
            }
            Blamed::Switch => ("ranks: blame a switch", true),
            // It has ended the node for a rank, and must have said so.
            Blamed::Forgetful => ("ranks: blame a switch that lost its node", attempt.any),
            Blamed::Unclaimed => ("ranks: nobody has claimed the node", trouble),
            Blamed::Refused => ("ranks: refused", attempt.any || attempt.guilty.contains(&rank)),
            Blamed::Other(_) => ("ranks: blame something else", false),
        };
        self.tally.one(name);
        if !right {
            let guilty = &attempt.guilty;
            network.violate(format!("job {job}, rank {rank} blames {blamed:?}, not {guilty:?}"));
        }
        attempt.states[rank as usize] = State::Failed;
        // Others lose it when it ends.
        attempt.guilty.insert(rank);
        if !core::mem::replace(&mut attempt.failed, true) && self.world.jobs[job].kills {
            let delay = Duration::from_millis(self.rng.below(1000));
            let number = self.jobs[job].number;
            self.plan(network, delay, Event::KillJob { job, number });
        }
    }

    /// A rank's process that had failed has ended.
    pub(super) fn gone(&mut self, network: &mut Network<'_>, job: usize, rank: u32) {
        self.over(network, job, rank, State::Over);
    }

    /// A rank's process has ended as it should.
    pub(super) fn done(&mut self, network: &mut Network<'_>, job: usize, rank: u32) {
        self.tally.one("ranks: all calls ended well");
        self.over(network, job, rank, State::Done);
    }

    fn over(&mut self, network: &mut Network<'_>, job: usize, rank: u32, state: State) {
        let Some(attempt) = &mut self.jobs[job].attempt else { return };
        attempt.states[rank as usize] = state;
        let over = |state: &State| matches!(state, State::Over | State::Done);
        if !attempt.states.iter().all(over) {
            return;
        }
        let all = attempt.states.iter().all(|&state| state == State::Done);
        let early = self.jobs[job].number == 1 && self.world.jobs[job].leaver.is_some();
        if all && !early {
            (self.jobs[job].done, self.jobs[job].attempt) = (true, None);
            self.tally.one("jobs done");
            return;
        }
        self.jobs[job].attempt = None;
        // Its connections may be open still where it is started again at once.
        let delay = match self.rng.below(3) {
            0 if network.now() < self.calm_from => 1,
            1 => 200,
            _ => 200 + self.rng.below(3000),
        };
        self.plan(network, Duration::from_millis(delay), Event::Launch { job });
    }

    /// The process of a rank is killed.
    pub(super) fn rank_dies(&mut self, network: &mut Network<'_>, machine: usize) {
        if self.ranks[machine].stage == Stage::Off {
            return;
        }
        let (job, rank) = (self.ranks[machine].job, self.ranks[machine].rank);
        self.blame(machine);
        self.kill_rank(network, machine);
        self.tally.one("ranks that died");
        let at = network.now().max(self.calm_from) + BOUND;
        let number = self.jobs[job].number;
        self.plan_at(network, at, Event::Judge { job, number });
        self.over(network, job, rank, State::Over);
    }

    pub(super) fn job_dies(&mut self, network: &mut Network<'_>, job: usize) {
        // Those that have not started do not.
        let Some(attempt) = &self.jobs[job].attempt else { return };
        let number = self.jobs[job].number;
        let running: Vec<u32> = (0..attempt.states.len() as u32)
            .filter(|&rank| !matches!(attempt.states[rank as usize], State::Over | State::Done))
            .collect();
        for rank in running {
            let machine = self.world.jobs[job].hosts[rank as usize];
            if !self.is_current(job, number) {
                return;
            }
            if self.ranks[machine].stage == Stage::Off {
                self.over(network, job, rank, State::Over);
            } else {
                self.rank_dies(network, machine);
            }
        }
    }

    /// All had time to hear of a rank that died.
    pub(super) fn judge_job(&self, network: &mut Network<'_>, job: usize, number: u32) {
        let attempt = self.jobs[job].attempt.as_ref().filter(|_| self.jobs[job].number == number);
        let Some(attempt) = attempt else { return };
        for (rank, &machine) in self.world.jobs[job].hosts.iter().enumerate() {
            let stage = self.ranks[machine].stage;
            let waits = matches!(stage, Stage::Working | Stage::Joining { .. });
            if attempt.states[rank] == State::Running && waits {
                network
                    .violate(format!("job {job}, rank {rank} has not heard of its end: {stage:?}"));
            }
        }
    }

    /// The time from which nothing goes wrong any more.
    pub(super) fn settled(&self) -> Instant {
        self.calm_from + AFTER_EFFECTS
    }
}

impl Director {
    /// Whether a rank of a job that was started is to be started.
    pub(super) fn is_waited_for(&self, job: usize, rank: u32) -> bool {
        let attempt = self.jobs[job].attempt.as_ref();
        attempt.is_some_and(|it| it.states[rank as usize] == State::Running)
    }
}
