//! A rank's side of the control connection, as the library has it (`crates/collective/src/join.rs`, `watcher.rs` and
//! `engine.rs`).

use core::time::Duration;

use millstream_inc::protocol::{
    AbortReason, Commanded, FallbackOffer, FromController, Hello, LostSwitch, ObeyedTerm, Resume,
    TermError, ToController,
};
use millstream_inc::{Abort, CollectiveError};
use millstream_roce::{
    CompletionStatus, Endpoint, EndpointConfig, IcrcCheck, Instant, OwnedMemory,
};

use super::super::build::Network;
use super::super::machine::{Kind, Participant};
use super::super::world::address;
use super::agent::{Agent, Link};
use super::director::{Director, Event};
use super::ready::Prepared;
use crate::NodeId;

/// How much longer than its own patience a rank waits for the controller.
const GRACE: Duration = Duration::from_secs(3);

/// How long a failure that the switch reports waits for what the controller says about it.
const VERDICT_PATIENCE: Duration = Duration::from_millis(250);

/// How long a rank that leaves waits for the others.
const LINGER: Duration = Duration::from_secs(1);

/// How far it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Stage {
    /// There is no process.
    Off,
    Joining {
        until: Instant,
    },
    Working,
    /// It has failed for the switch, and the controller may know better.
    Judging {
        until: Instant,
    },
    /// All calls are over.
    Idle {
        until: Instant,
    },
    Leaving {
        until: Instant,
    },
    /// It ends.
    Exiting {
        until: Instant,
    },
}

/// Who is to blame.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Blamed {
    Rank(u32),
    Switch,
    /// A switch does not have the node any more.
    Forgetful,
    /// No rank has come back to the controller.
    Unclaimed,
    /// The controller knows this rank no more.
    Refused,
    Other(String),
}

/// The process.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) agent: Agent,
    pub(super) job: usize,
    pub(super) rank: u32,
    pub(super) stage: Stage,
    term: ObeyedTerm,
    pub(super) hello: Option<Hello>,
    pub(super) prepared: Option<Prepared>,
    pub(super) resume: Option<Resume>,
    last_word: Option<ToController>,
    left: Vec<(u32, u64)>,
    verdict: Option<Blamed>,
    /// The one that it is connected to.
    pub(super) switch: Option<LostSwitch>,
}

impl Rank {
    pub(super) const fn new() -> Self {
        Self {
            agent: Agent::new(),
            job: 0,
            rank: 0,
            stage: Stage::Off,
            term: ObeyedTerm::NONE,
            hello: None,
            prepared: None,
            resume: None,
            last_word: None,
            left: Vec::new(),
            verdict: None,
            switch: None,
        }
    }
}

fn blamed_by_controller(reason: &AbortReason) -> Blamed {
    match reason {
        AbortReason::PeerLost { rank, .. } => Blamed::Rank(*rank),
        AbortReason::SwitchLost { detail, .. } if detail.contains("has lost its part") => {
            Blamed::Forgetful
        }
        AbortReason::SwitchLost { .. } => Blamed::Switch,
        other => Blamed::Other(other.to_string()),
    }
}

fn blamed_by_switch(error: &CollectiveError) -> Blamed {
    match error {
        CollectiveError::Aborted(Abort::PeerLost { rank }) => Blamed::Rank(*rank),
        CollectiveError::Aborted(Abort::Requested { .. }) => Blamed::Unclaimed,
        CollectiveError::Aborted(Abort::ParentLost | Abort::SwitchBelowLost { .. })
        | CollectiveError::Transport(CompletionStatus::RetryExceeded | CompletionStatus::Flushed) => {
            Blamed::Switch
        }
        other => Blamed::Other(other.to_string()),
    }
}

impl Director {
    pub(super) fn start_rank(&mut self, network: &mut Network<'_>, job: usize, rank: u32) {
        let plan = &self.world.jobs[job];
        let machine = plan.hosts[rank as usize];
        let config = EndpointConfig {
            icrc: IcrcCheck::Exact,
            ..EndpointConfig::new(address(machine), self.rng.bits())
        };
        let memory = OwnedMemory::new(1 + plan.calls.len());
        let endpoint = Box::new(Endpoint::new(config, memory));
        let (members, plain, ranks) = (Vec::new(), Vec::new(), Vec::new());
        let kind = Kind::Host { endpoint, members, plain, ranks };
        *network.machine_mut(NodeId(machine)) = Participant::new(kind);
        network.set_up(NodeId(machine), true);
        let hello = Hello {
            group: format!("job{job}"),
            world: plan.hosts.len() as u32,
            rank,
            address: address(machine),
            timeout_ms: plan.patience.as_millis() as u64,
            more_addresses: Vec::new(),
            same_machine: None,
            options: millstream_inc::CommunicatorOptions::default(),
            fallback: FallbackOffer::Off,
            meeting: None,
            avoid: Vec::new(),
        };
        let stage = Stage::Joining { until: network.after(plan.patience + GRACE) };
        let life = self.rank(machine).agent.life + 1;
        let hello = Some(hello);
        *self.rank(machine) = Rank { job, rank, stage, hello, ..Rank::new() };
        self.rank(machine).agent.life = life;
        self.wake_rank(network, machine);
        self.connect(network, machine);
    }

    /// The process is gone, and its kernel closes the connection.
    pub(super) fn kill_rank(&mut self, network: &mut Network<'_>, machine: usize) {
        network.set_up(NodeId(machine), false);
        network.forget_connections(NodeId(machine));
        self.close_link(network, machine);
        let rank = self.rank(machine);
        (rank.stage, rank.agent.link) = (Stage::Off, Link::Off);
    }

    /// The connection is there.
    pub(super) fn greet(&mut self, network: &mut Network<'_>, machine: usize, stream: u64) {
        let rank = self.rank(machine);
        let (term, departed) = (rank.term.get(), !rank.left.is_empty());
        let first = match (&rank.resume, &rank.hello) {
            (Some(resume), _) => ToController::Resume(Resume { term, departed, ..resume.clone() }),
            (None, Some(hello)) => ToController::Join(hello.clone()),
            (None, None) => return,
        };
        let last = rank.last_word.clone();
        self.send_up(network, stream, Some(first));
        if let Some(last) = last {
            self.send_up(network, stream, Some(last));
        }
    }

    /// The connection is lost, or could not be made.
    pub(super) fn rank_alone(&mut self, network: &mut Network<'_>, machine: usize) {
        self.close_link(network, machine);
        let now = network.now();
        let rank = self.rank(machine);
        match rank.stage {
            Stage::Off => {}
            Stage::Joining { .. } => self.not_joined(network, machine, "no controller"),
            // Nobody is to hear of it.
            Stage::Exiting { .. } if rank.last_word.is_none() => {}
            _ => {
                let Self { ranks, rng, .. } = self;
                let until = ranks[machine].agent.come_back(now, rng);
                self.plan_at(network, until, Event::Client { machine });
            }
        }
    }

    fn not_joined(&mut self, network: &mut Network<'_>, machine: usize, why: &str) {
        let (job, number) = (self.rank(machine).job, self.rank(machine).rank);
        self.kill_rank(network, machine);
        self.failed_to_join(network, job, number, why);
    }

    pub(super) fn command_rank(
        &mut self,
        network: &mut Network<'_>,
        machine: usize,
        stream: u64,
        Commanded { term, message }: Commanded,
    ) {
        let rank = self.rank(machine);
        let joining = matches!(rank.stage, Stage::Joining { .. });
        match rank.term.obey(term) {
            Ok(()) => {}
            Err(TermError::Stale { .. }) => {
                self.tally.one("commands of a lower term");
                return self.rank_alone(network, machine);
            }
            Err(error) => return network.violate(format!("rank at {machine}: {error}")),
        }
        if !self.rank(machine).agent.obeys(term) {
            network.violate(format!("rank at {machine} obeys a command of term {term}"));
        }
        let rank = self.rank(machine);
        match message {
            FromController::Ping => {
                self.send_up(network, stream, Some(ToController::Pong));
                self.probe(network, machine);
            }
            FromController::Waiting { .. } if joining => {}
            FromController::GroupReady { segment_bytes, window, .. } if joining => {
                self.prepare(network, machine, stream, segment_bytes, window);
            }
            FromController::Plan(plan) if joining => self.work(network, machine, &plan),
            FromController::Refused { reason } if joining => {
                self.not_joined(network, machine, &reason.to_string());
            }
            FromController::Refused { reason } if reason.is_for_load() => {
                self.rank_alone(network, machine);
            }
            FromController::Resumed if !joining => {
                rank.agent.attempts = 0;
                self.tally.one("ranks that came back");
            }
            FromController::Left { rank: other, collectives } if !joining => {
                rank.left.push((other, collectives));
            }
            FromController::Closed => {
                self.close_link(network, machine);
                let rank = self.rank(machine);
                rank.last_word = None;
                match rank.stage {
                    Stage::Leaving { .. } => self.left(network, machine),
                    Stage::Judging { .. } => self.judge(network, machine),
                    _ => {}
                }
            }
            FromController::Abort { reason } => {
                self.tally.one(match reason {
                    AbortReason::PeerLost { .. } => "told by the controller of a lost rank",
                    AbortReason::SwitchLost { .. } => "told by the controller of a lost switch",
                    _ => "told by the controller of something else",
                });
                self.close_link(network, machine);
                self.rank(machine).last_word = None;
                self.end_rank(network, machine, blamed_by_controller(&reason));
            }
            FromController::Refused { reason } => {
                network.note(|| format!("rank at {machine} is refused: {reason}"));
                self.close_link(network, machine);
                self.rank(machine).last_word = None;
                self.end_rank(network, machine, Blamed::Refused);
            }
            other => network.violate(format!("rank at {machine} is told {other:?}")),
        }
    }

    fn probe(&self, network: &mut Network<'_>, machine: usize) {
        network.with_machine(NodeId(machine), |it, _| {
            if let Kind::Host { members, .. } = &mut it.kind {
                members.iter_mut().for_each(|member| member.worker.probe());
            }
        });
    }

    /// The communicator is over for this reason, which is final.
    fn end_rank(&mut self, network: &mut Network<'_>, machine: usize, blamed: Blamed) {
        match self.ranks[machine].stage {
            Stage::Working | Stage::Judging { .. } => {}
            Stage::Leaving { .. } => return self.left(network, machine),
            Stage::Joining { .. } => {
                return self.not_joined(network, machine, &format!("{blamed:?}"));
            }
            // Its calls are over, or it has failed already.
            Stage::Idle { .. } | Stage::Off | Stage::Exiting { .. } => return,
        }
        self.ranks[machine].verdict = Some(blamed);
        network.with_machine(NodeId(machine), |it, _| {
            if let Kind::Host { members, .. } = &mut it.kind {
                let vague = CollectiveError::Transport(CompletionStatus::Flushed);
                members.iter_mut().for_each(|member| member.worker.fail(vague));
            }
        });
        self.judge(network, machine);
    }

    /// Tells the caller why its collective has failed.
    fn judge(&mut self, network: &mut Network<'_>, machine: usize) {
        let participant = network.machine(NodeId(machine));
        let error = participant.members().first().and_then(|member| member.failed);
        let blamed = self.ranks[machine].verdict.clone();
        let Some(blamed) = blamed.or_else(|| error.as_ref().map(blamed_by_switch)) else { return };
        let from_switch = self.ranks[machine].verdict.is_none();
        let (job, number) = (self.ranks[machine].job, self.ranks[machine].rank);
        network.note(|| format!("job {job}, rank {number} blames {blamed:?}"));
        // As `report` of the library.
        let heard = matches!(
            error,
            Some(CollectiveError::Aborted(Abort::ParentLost | Abort::SwitchBelowLost { .. }))
        );
        if from_switch && blamed == Blamed::Switch && !heard {
            let detail = "it does not answer".to_owned();
            let switch = self.ranks[machine].switch;
            self.say_last(
                network,
                machine,
                ToController::SwitchLost { detail, tree: 0, switch, further_up: false },
            );
        }
        let linger = Duration::from_millis(self.rng.below(1500));
        let until = network.after(linger);
        self.ranks[machine].stage = Stage::Exiting { until };
        self.wake_rank(network, machine);
        self.failed(network, job, number, &blamed);
    }

    fn say_last(&mut self, network: &mut Network<'_>, machine: usize, word: ToController) {
        if self.ranks[machine].last_word.is_none() {
            if let Some(stream) = self.stream_of(machine) {
                self.send_up(network, stream, Some(word.clone()));
            }
            self.ranks[machine].last_word = Some(word);
        }
    }

    /// It has done all calls, and said so.
    fn left(&mut self, network: &mut Network<'_>, machine: usize) {
        let (job, number) = (self.ranks[machine].job, self.ranks[machine].rank);
        self.kill_rank(network, machine);
        self.done(network, job, number);
    }

    /// Its next deadline.
    fn wake_rank(&mut self, network: &mut Network<'_>, machine: usize) {
        let (Stage::Joining { until }
        | Stage::Judging { until }
        | Stage::Idle { until }
        | Stage::Leaving { until }
        | Stage::Exiting { until }) = self.ranks[machine].stage
        else {
            return;
        };
        self.plan_at(network, until, Event::Client { machine });
    }

    pub(super) fn rank_timeout(&mut self, network: &mut Network<'_>, machine: usize) {
        let now = network.now();
        match self.ranks[machine].stage {
            Stage::Joining { until } if until <= now => {
                self.not_joined(network, machine, "the controller says nothing");
            }
            Stage::Judging { until } if until <= now => self.judge(network, machine),
            Stage::Idle { until } if until <= now => {
                let participant = network.machine(NodeId(machine));
                let member = participant.members().first();
                let (collectives, failed) =
                    member.map_or((0, false), |it| (it.ended as u64, it.failed.is_some()));
                if failed {
                    return self.left(network, machine);
                }
                self.say_last(network, machine, ToController::Leave { collectives });
                self.ranks[machine].stage = Stage::Leaving { until: now + LINGER };
                self.wake_rank(network, machine);
                if collectives < self.world.jobs[self.ranks[machine].job].calls.len() as u64 {
                    self.has_left_early(machine);
                }
            }
            Stage::Leaving { until } if until <= now => self.left(network, machine),
            Stage::Exiting { until } if until <= now => {
                let (job, number) = (self.ranks[machine].job, self.ranks[machine].rank);
                self.kill_rank(network, machine);
                self.gone(network, job, number);
            }
            _ => {}
        }
    }

    /// Looks at what its worker has done.
    pub(super) fn look_at_rank(&mut self, network: &mut Network<'_>, machine: usize) {
        if self.ranks[machine].stage != Stage::Working {
            return;
        }
        let participant = network.machine(NodeId(machine));
        let Some(member) = participant.members().first() else { return };
        let (ended, calls, failed) = (member.ended, member.calls.len(), member.failed);
        let running = member.deadline.is_some();
        let called = |&&(_, called): &&(u32, u64)| called <= ended as u64;
        if failed.is_some() {
            self.ranks[machine].stage = Stage::Judging { until: network.after(VERDICT_PATIENCE) };
            self.wake_rank(network, machine);
        } else if ended == calls {
            let pause = Duration::from_millis(self.rng.below(3000));
            self.ranks[machine].stage = Stage::Idle { until: network.after(pause) };
            self.wake_rank(network, machine);
        } else if let Some(&(rank, _)) =
            self.ranks[machine].left.iter().find(called).filter(|_| running)
        {
            self.end_rank(network, machine, Blamed::Rank(rank));
            let stream = self.stream_of(machine);
            if stream.is_none() && self.ranks[machine].last_word.is_none() {
                self.ranks[machine].agent.link = Link::Off;
            }
        }
    }
}
