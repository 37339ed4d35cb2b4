//! What happens when, and what must hold at the end.

use core::time::Duration;
use std::collections::BTreeMap;

use millstream_roce::Instant;

use super::super::build::{Network, link_machines};
use super::super::machine::{Kind, Participant};
use super::super::world::address;
use super::agent::Link;
use super::controller::Process;
use super::job::Job;
use super::rank::{Rank, Stage};
use super::stream::{Arrival, Streams};
use super::switch::Switch;
use super::world::{Trouble, World};
use crate::scenarios::rc_chaos::Tally;
use crate::{HostOptions, LinkId, NodeId, Rng};

/// How long all have for the last job, from when nothing goes wrong any more.
const PATIENCE_WITH_JOBS: Duration = Duration::from_secs(240);

/// After so long without jobs nothing is left of them.
const REST: Duration = Duration::from_secs(25);

#[derive(Clone, Debug)]
pub(super) enum Event {
    Trouble(Trouble),
    Launch {
        job: usize,
    },
    StartRank {
        job: usize,
        rank: u32,
        number: u32,
    },
    KillJob {
        job: usize,
        number: u32,
    },
    Judge {
        job: usize,
        number: u32,
    },
    StartController,
    StartSwitch {
        machine: usize,
    },
    Heal {
        machine: usize,
    },
    /// The controller's deadline, or it goes on.
    Controller,
    /// A deadline of a host or a switch.
    Client {
        machine: usize,
    },
    /// An attempt to connect reaches the controller's machine, or is over.
    Connect {
        machine: usize,
        life: u64,
        until: Instant,
    },
    Arrives {
        stream: u64,
        what: Arrival,
    },
    /// Nobody has answered on a connection for too long.
    Break {
        stream: u64,
    },
    Rest,
    TooLong,
}

pub(super) struct Director {
    pub(super) world: World,
    pub(super) rng: Rng,
    pub(super) process: Process,
    pub(super) streams: Streams,
    pub(super) ranks: Vec<Rank>,
    pub(super) switches: Vec<Switch>,
    pub(super) jobs: Vec<Job>,
    /// How often jobs were started.
    pub(super) launches: usize,
    pub(super) calm_from: Instant,
    pub(super) tally: Tally,
    pub(super) links: Vec<Vec<LinkId>>,
    /// Cuts of each machine's links that are not over.
    pub(super) cuts: Vec<u32>,
    pub(super) stands: BTreeMap<usize, Instant>,
    /// Until when some machine is hurt for longer than must be survived.
    pub(super) hurt_until: Instant,
    /// Until when some machine and the controller cannot speak.
    pub(super) silent_until: Instant,
    /// By time, and by order where that is the same.
    events: BTreeMap<(Instant, u64), Event>,
    sequence: u64,
    resting: bool,
    over: bool,
}

impl Director {
    pub(super) fn new(world: World, rng: Rng, network: &mut Network<'_>) -> Self {
        network.allow_changed_sources();
        let machines = world.hosts + world.switches;
        for machine in 0..machines {
            let nobody = Participant::new(Kind::Outsider);
            let node = network.add_machine(address(machine), nobody, HostOptions::default());
            network.set_up(node, false);
        }
        let links = link_machines(network, world.hosts..machines, world.link);
        Self {
            calm_from: network.after(world.calm_from()),
            ranks: (0..world.hosts).map(|_| Rank::new()).collect(),
            switches: (0..world.switches).map(|_| Switch::new()).collect(),
            jobs: world.jobs.iter().map(|_| Job::default()).collect(),
            cuts: vec![0; machines],
            world,
            rng,
            process: Process::default(),
            streams: Streams::default(),
            launches: 0,
            tally: Tally::default(),
            links,
            stands: BTreeMap::new(),
            hurt_until: Instant::ZERO,
            silent_until: Instant::ZERO,
            events: BTreeMap::new(),
            sequence: 0,
            resting: false,
            over: false,
        }
    }

    pub(super) fn start(&mut self, network: &mut Network<'_>) {
        self.start_controller(network);
        for machine in self.world.hosts..self.world.hosts + self.world.switches {
            self.start_switch(network, machine);
        }
        for job in 0..self.jobs.len() {
            self.plan(network, self.world.jobs[job].starts, Event::Launch { job });
        }
        for (at, trouble) in self.world.troubles.clone() {
            self.plan(network, at, Event::Trouble(trouble));
        }
        self.plan_at(network, self.settled() + PATIENCE_WITH_JOBS, Event::TooLong);
    }

    pub(super) const fn is_over(&self) -> bool {
        self.over
    }

    pub(super) fn rank(&mut self, machine: usize) -> &mut Rank {
        &mut self.ranks[machine]
    }

    pub(super) fn switch(&mut self, machine: usize) -> &mut Switch {
        &mut self.switches[machine - self.world.hosts]
    }

    pub(super) fn plan(&mut self, network: &mut Network<'_>, delay: Duration, event: Event) {
        self.plan_at(network, network.after(delay), event);
    }

    pub(super) fn plan_at(&mut self, network: &mut Network<'_>, at: Instant, event: Event) {
        let at = at.max(network.now());
        self.events.insert((at, self.sequence), event);
        self.sequence += 1;
        network.alarm(at);
    }

    /// Looks at all machines, and lets happen what is due.
    pub(super) fn advance(&mut self, network: &mut Network<'_>) {
        self.look(network);
        while let Some(entry) = self.events.first_entry()
            && entry.key().0 <= network.now()
        {
            let event = entry.remove();
            self.happen(network, event);
            self.look(network);
        }
        if !self.resting && self.all_done() && network.now() >= self.settled() {
            self.resting = true;
            self.plan(network, REST, Event::Rest);
        }
    }

    fn look(&mut self, network: &mut Network<'_>) {
        for machine in 0..self.world.hosts + self.world.switches {
            let participant = network.machine_mut(NodeId(machine));
            let wrong = core::mem::take(&mut participant.wrong);
            let events = core::mem::take(&mut participant.events);
            wrong.into_iter().for_each(|what| network.violate(what));
            for event in events {
                self.happened(network, machine, event);
            }
            if machine < self.world.hosts {
                self.look_at_rank(network, machine);
            }
        }
    }

    /// The process of a machine, and whether it is there.
    pub(super) fn life(&self, machine: usize) -> (u64, bool) {
        match machine.checked_sub(self.world.hosts) {
            None => (self.ranks[machine].agent.life, self.ranks[machine].stage != Stage::Off),
            Some(switch) => (self.switches[switch].agent.life, self.switches[switch].up),
        }
    }

    pub(super) fn link(&mut self, machine: usize) -> &mut Link {
        match machine.checked_sub(self.world.hosts) {
            None => &mut self.ranks[machine].agent.link,
            Some(switch) => &mut self.switches[switch].agent.link,
        }
    }

    /// The stream of a machine's process, if it is connected.
    pub(super) fn stream_of(&self, machine: usize) -> Option<u64> {
        match machine.checked_sub(self.world.hosts) {
            None => self.ranks[machine].agent.stream(),
            Some(switch) => self.switches[switch].agent.stream(),
        }
    }

    /// The machine whose process acts on an event.
    fn actor(&self, event: &Event) -> Option<usize> {
        match *event {
            Event::Client { machine } => Some(machine),
            Event::Arrives { stream, what: Arrival::Down(_) } => {
                self.streams.all.get(&stream).map(|stream| stream.machine)
            }
            _ => None,
        }
    }

    fn happen(&mut self, network: &mut Network<'_>, event: Event) {
        let stands = self.actor(&event).and_then(|machine| self.stands.get(&machine).copied());
        if let Some(until) = stands.filter(|&until| until > network.now()) {
            return self.plan_at(network, until, event);
        }
        match event {
            Event::Trouble(trouble) => self.trouble(network, trouble),
            Event::Launch { job } => self.launch(network, job),
            Event::StartRank { job, rank, number } => {
                let waits = self.is_current(job, number) && self.is_waited_for(job, rank);
                if waits {
                    self.start_rank(network, job, rank);
                }
            }
            Event::KillJob { job, number } => {
                if self.is_current(job, number) {
                    self.job_dies(network, job);
                }
            }
            Event::Judge { job, number } => self.judge_job(network, job, number),
            Event::StartController => self.start_controller(network),
            Event::StartSwitch { machine } => {
                if !self.switch(machine).up {
                    self.start_switch(network, machine);
                }
            }
            Event::Heal { machine } => {
                self.cuts[machine] -= 1;
                if self.cuts[machine] == 0 {
                    self.links[machine].iter().for_each(|&link| network.set_cut(link, false));
                }
            }
            Event::Controller => self.run_controller(network),
            Event::Client { machine } => self.client_timeout(network, machine),
            Event::Connect { machine, life, until } => {
                self.try_to_connect(network, machine, life, until);
            }
            Event::Arrives { stream, what } => self.arrive(network, stream, what),
            Event::Break { stream } => self.break_stream(network, stream),
            Event::Rest => {
                self.check_rest(network);
                self.over = true;
            }
            Event::TooLong => {
                if !self.all_done() {
                    network.violate("a job has never succeeded".to_owned());
                }
            }
        }
    }

    fn client_timeout(&mut self, network: &mut Network<'_>, machine: usize) {
        let now = network.now();
        if !self.life(machine).1 {
            return;
        }
        if machine < self.world.hosts {
            self.rank_timeout(network, machine);
        }
        if let Link::Pause { until } = *self.link(machine)
            && until <= now
            && self.life(machine).1
        {
            self.connect(network, machine);
        }
    }

    /// Nothing is left of any job.
    fn check_rest(&self, network: &mut Network<'_>) {
        let mut wrong = Vec::new();
        let census = self.process.controller.as_ref().map(|it| it.census());
        match census {
            Some(it)
                if it.connections == self.world.switches
                    && it.switches == self.world.switches
                    && (it.groups, it.communicators, it.held, it.away, it.ending)
                        == (0, 0, 0, 0, 0) => {}
            it => wrong.push(format!("at rest the controller has {it:?}")),
        }
        for machine in self.world.hosts..self.world.hosts + self.world.switches {
            let switch = network.machine(NodeId(machine)).switch();
            let nodes = switch.map(|switch| switch.communicators());
            if nodes != Some(0) {
                wrong.push(format!("at rest switch {machine} has {nodes:?} nodes"));
            }
        }
        wrong.into_iter().for_each(|what| network.violate(what));
    }
}
