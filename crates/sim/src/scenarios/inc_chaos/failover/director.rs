//! Who brings the ranks of a communicator together again, in place of the controller, and what must hold of them.

use core::time::Duration;
use std::cell::RefCell;
use std::rc::Rc;

use millstream_inc::Abort;
use millstream_roce::{Access, Endpoint, Instant, OwnedMemory};

use super::super::build::{Network, number};
use super::super::call::Arena;
use super::super::director::{Director, Event};
use super::super::machine::{Kind, Participant};
use super::super::world::Trouble;
use super::draw::{Group, Loss};
use super::rank::{Call, Phase, Rank};
use super::repair::scratch_bytes;
use crate::NodeId;
use crate::rank::DOMAIN;

/// The numbers of trees begin here, above those of all other communicators.
const FIRST: usize = 1 << 16;

/// The code of an abort by who watches over it.
const CODE: u32 = 8;

/// How far its ranks are, as who watches over it knows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    Serving,
    /// Some rank has said that a switch is lost, and others are to hear of it.
    Telling,
    /// All that were told come together.
    Gathering,
    /// New trees are made.
    Connecting,
    Repairing,
    Over,
}

/// What is next.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Step {
    Tell,
    Connect,
    /// A node of trees that are lost is to end.
    Abort {
        machine: usize,
        id: u64,
    },
}

/// A communicator that goes on.
pub(in super::super) struct Watch {
    pub(super) group: Group,
    /// The nodes of each set of trees: machine and number.
    nodes: Vec<Vec<(usize, u64)>>,
    /// Which set of trees there is.
    pub(super) line: usize,
    stage: Stage,
    /// How much of what happens to it has happened.
    happened: usize,
    /// A machine of it has died.
    seen: bool,
}

/// Of a tree of a set.
pub(super) const fn tree_number(line: usize, tree: usize) -> usize {
    FIRST + line * 8 + tree
}

/// Whether a node is one of a communicator that goes on.
pub(in super::super) const fn is_node(id: u64) -> bool {
    (id >> 32) as usize >= FIRST
}

impl Watch {
    /// Switches come after so many hosts.
    pub(in super::super) fn new(group: Group, hosts: usize) -> Self {
        let nodes_of = |line: usize| {
            let trees = group.lines[line].trees.iter().enumerate();
            let all = trees.flat_map(|(tree, shape)| {
                let nodes = shape.nodes.iter().enumerate();
                nodes.map(move |(node, it)| (it.switch + hosts, tree, node))
            });
            all.map(|(machine, tree, node)| (machine, number(tree_number(line, tree), node)))
                .collect()
        };
        let nodes = (0..group.lines.len()).map(nodes_of).collect();
        Self { group, nodes, line: 0, stage: Stage::Serving, happened: 0, seen: false }
    }

    /// Those that are there for others of their host, too, or for themselves.
    fn ranks(&self) -> impl Iterator<Item = (u32, NodeId)> {
        self.group.connections().map(|(ranks, host)| (ranks[0], NodeId(host)))
    }

    /// Something has happened.
    pub(in super::super) fn trouble(&mut self, trouble: Trouble) {
        let planned = self.group.losses.get(self.line).map(|loss| loss.trouble);
        if planned == Some(trouble) && self.happened == self.line {
            self.happened += 1;
            // Whoever watches sees a death at once, and acts some time after: ranks may be first.
            self.seen |= matches!(trouble, Trouble::Death { .. });
        }
    }
}

impl Director {
    /// Makes the ranks, their vectors and the first trees.
    pub(in super::super) fn start_failover(&mut self, network: &mut Network<'_>) {
        let Some(watch) = &self.failover else { return };
        let group = watch.group.clone();
        if group.has_several() {
            self.tally.one("fail-over: communicators of hosts with several ranks");
        }
        let (members, ranks) = (&group.members, group.hosts.len() as u32);
        let mut calls: Vec<Vec<Call>> = members.iter().map(|_| Vec::new()).collect();
        for shape in &group.calls {
            let in_place = self.rng.below(2) == 0;
            let arena = |ranks_of: &Vec<u32>| shape.arena(&mut self.rng, ranks_of, ranks, in_place);
            let arenas: Vec<Arena> = members.iter().map(arena).collect();
            let trees = group.lines.iter().flat_map(|line| &line.trees);
            // All others are exact.
            let count = if shape.rounds() { usize::MAX } else { 1 };
            let mut results: Vec<Vec<u8>> = Vec::new();
            for tree in trees.take(count) {
                let whole = shape.whole(&arenas, members, tree, ranks);
                if !results.contains(&whole) {
                    results.push(whole);
                }
            }
            let (results, agreed) = (Rc::new(results), Rc::new(RefCell::new(None)));
            let of_hosts = group.connections().zip(arenas).zip(&mut calls);
            for (((ranks_of, host), mut arena), calls) in of_hosts {
                let Some(endpoint) = endpoint(network.machine_mut(NodeId(host))) else { continue };
                let at = register(endpoint, arena.bytes.clone());
                arena.registered(shape, ranks_of, ranks, at);
                calls.push(Call {
                    shape: *shape,
                    key: at.0,
                    arena,
                    results: Rc::clone(&results),
                    agreed: Rc::clone(&agreed),
                    sequence: u64::MAX,
                    done: false,
                });
            }
        }
        let engines = self.make_trees(network, &group, 0);
        for (((ranks, host), calls), (engine, lost)) in group.connections().zip(calls).zip(engines)
        {
            let (ranks, host) = (ranks.to_vec(), NodeId(host));
            let rng = crate::Rng::new(self.rng.bits());
            let chunk = group.chunk;
            network.with_machine(host, |it, now| {
                let Kind::Host { endpoint, ranks: all, .. } = &mut it.kind else { return };
                let scratch =
                    [(); 2].map(|()| register(endpoint, vec![0; scratch_bytes(chunk, lost.world)]));
                all.push(Rank::new(ranks, lost, engine, calls, scratch, chunk, now, rng));
            });
        }
        self.plan_loss(network, group.losses.first());
    }

    fn plan_loss(&mut self, network: &mut Network<'_>, loss: Option<&Loss>) {
        let Some(&Loss { at, trouble, before }) = loss else { return };
        for (at, trouble) in before.into_iter().chain([(at, trouble)]) {
            self.plan(network, at, Event::Trouble(trouble));
        }
    }

    /// Looks at the ranks, and plans what follows.
    pub(in super::super) fn look_after_failover(&mut self, network: &mut Network<'_>) {
        let Some(watch) = &self.failover else { return };
        let mut phases = Vec::new();
        for (rank, host) in watch.ranks().filter(|&(_, host)| network.is_up(host)) {
            let Some(it) = rank_of(network.machine(host), rank) else { continue };
            phases.push(it.phase());
        }
        let any = |wanted: &[Phase]| phases.iter().any(|phase| wanted.contains(phase));
        let serves = phases.iter().all(|&phase| phase == Phase::Serving);
        let joins = phases.iter().all(|&phase| phase == Phase::Joining);
        let is_excused = watch.happened > watch.line;
        let stage = match watch.stage {
            Stage::Serving if watch.seen || !serves => {
                if !is_excused {
                    network.violate("a communicator that goes on failed for no reason".into());
                }
                self.plan(network, self.world.watch, Event::Failover(Step::Tell));
                Stage::Telling
            }
            Stage::Gathering if joins => {
                // The controller may wait for another switch.
                let delay = match self.rng.below(2) {
                    0 => Duration::from_micros(1 << self.rng.below(21)),
                    _ => Duration::from_millis(self.rng.below(3000)),
                };
                self.plan(network, delay, Event::Failover(Step::Connect));
                Stage::Connecting
            }
            Stage::Repairing if serves => Stage::Serving,
            Stage::Repairing
                if any(&[Phase::Over, Phase::Joining])
                    || phases.iter().any(|it| matches!(it, Phase::Failing(_))) =>
            {
                if !is_excused && watch.group.keeps_overwritten {
                    network.violate("ranks did not go on, for no reason".into());
                }
                self.tally.one("fail-over: not finished");
                return self.end_failover(network);
            }
            stage => stage,
        };
        if let Some(watch) = &mut self.failover {
            watch.stage = stage;
        }
        self.check_failover_slots(network);
    }

    fn check_failover_slots(&self, network: &mut Network<'_>) {
        let Some(watch) = &self.failover else { return };
        let mut wrong = Vec::new();
        let limit = 2 * watch.group.lines[watch.line].sizes.window;
        for &(machine, id) in &watch.nodes[watch.line] {
            let Some(switch) = network.machine(NodeId(machine)).switch() else { continue };
            let used = switch.statistics(id).map_or(0, |it| it.slots_in_use);
            if used > limit {
                wrong.push(format!("node {id:#x} uses {used} of {limit} slots"));
            }
        }
        wrong.into_iter().for_each(|what| network.violate(what));
    }

    /// Does what was planned.
    pub(in super::super) fn step_failover(&mut self, network: &mut Network<'_>, step: Step) {
        let Some(watch) = &mut self.failover else { return };
        match step {
            Step::Tell if watch.group.loses_host => self.end_failover(network),
            Step::Tell => {
                (watch.stage, watch.seen) = (Stage::Gathering, false);
                let line = watch.line;
                let ranks: Vec<(u32, NodeId)> = watch.ranks().collect();
                for (rank, host) in ranks {
                    with_rank(network, host, rank, |rank, now, _| rank.lose(now));
                }
                self.abort_nodes(network, line);
            }
            Step::Connect => self.connect_failover(network),
            Step::Abort { machine, id } => {
                if !network.is_up(NodeId(machine)) {
                    return;
                }
                // Who stands still hears of it later.
                if network.machine(NodeId(machine)).stands() {
                    let delay = Duration::from_micros(1 << self.rng.below(17));
                    return self.plan(network, delay, Event::Failover(step));
                }
                network.with_machine(NodeId(machine), |it, now| {
                    let abort = Abort::Requested { code: CODE };
                    it.switch_mut().map(|it| it.abort_communicator(now, id, abort))
                });
            }
        }
    }

    /// All ranks get new trees.
    fn connect_failover(&mut self, network: &mut Network<'_>) {
        let Some(watch) = &mut self.failover else { return };
        let line = watch.line + 1;
        let group = watch.group.clone();
        let Some(trees) = group.lines.get(line) else {
            return network.violate("there are no other trees".into());
        };
        (watch.line, watch.stage) = (line, Stage::Repairing);
        let ranks: Vec<(u32, NodeId)> = watch.ranks().collect();
        self.tally.one("fail-overs");
        self.tally.one(if trees.is_hosted {
            "fail-overs over hosts"
        } else {
            "fail-overs over switches"
        });
        let engines = self.make_trees(network, &group, line);
        for ((rank, host), (engine, lost)) in ranks.into_iter().zip(engines) {
            let delay = Duration::from_nanos(self.rng.below(20_000_000));
            with_rank(network, host, rank, |it, now, endpoint| {
                it.connected(engine, lost, now + delay, endpoint);
            });
        }
        self.plan_loss(network, group.losses.get(line));
    }

    /// The communicator is over, on all ranks.
    fn end_failover(&mut self, network: &mut Network<'_>) {
        let Some(watch) = &mut self.failover else { return };
        watch.stage = Stage::Over;
        let (line, ranks) = (watch.line, watch.ranks().collect::<Vec<_>>());
        for (rank, host) in ranks {
            with_rank(network, host, rank, Rank::end);
        }
        self.abort_nodes(network, line);
    }

    fn abort_nodes(&mut self, network: &mut Network<'_>, line: usize) {
        let Some(watch) = &self.failover else { return };
        for (machine, id) in watch.nodes[line].clone() {
            let delay = Duration::from_micros(1 << self.rng.below(21));
            self.plan(network, delay, Event::Failover(Step::Abort { machine, id }));
        }
    }

    /// All is at rest: what must hold then.
    pub(in super::super) fn close_failover(&mut self, network: &Network<'_>) -> Vec<String> {
        let Some(watch) = &self.failover else { return Vec::new() };
        let (mut wrong, is_over) = (Vec::new(), watch.stage == Stage::Over);
        let mut begun = Vec::new();
        for (rank, host) in watch.ranks().filter(|&(_, host)| network.is_up(host)) {
            let Kind::Host { endpoint, ranks: all, .. } = &network.machine(host).kind else {
                continue;
            };
            let Some(it) = all.iter().find(|it| it.number == rank) else { continue };
            let of_rank = |what| format!("communicator that goes on, rank {rank}: {what}");
            wrong.extend(it.check_memory(endpoint).into_iter().map(of_rank));
            let ends = if is_over { it.phase() == Phase::Over } else { it.is_done() };
            if !ends {
                wrong.push(of_rank(format!("at rest it is {:?}", it.phase())));
            }
            begun = it.engine.trees.iter().map(|tree| tree.begun).collect();
            self.tally.one(if it.is_done() {
                "fail-over: ranks that did all"
            } else {
                "fail-over: ranks that failed"
            });
        }
        for line in 0..=watch.line {
            for &(machine, id) in &watch.nodes[line] {
                let node = NodeId(machine);
                let Some(switch) = network.machine(node).switch().filter(|_| network.is_up(node))
                else {
                    continue;
                };
                let tree = (id >> 32) as usize - tree_number(line, 0);
                let rests = line == watch.line && !is_over;
                // When all calls are over, a loss may be noticed by switches alone.
                let ends = !rests || watch.happened > watch.line;
                match switch.statistics(id) {
                    None if ends && self.removed.contains(&id) => {}
                    Some(it)
                        if rests
                            && it.slots_in_use == 0
                            && it.abort.is_none()
                            && Some(&it.collectives) == begun.get(tree) => {}
                    found => wrong.push(format!(
                        "at rest node {id:#x} of trees {line} of {} has {found:?}",
                        watch.line
                    )),
                }
            }
        }
        wrong
    }
}

pub(super) fn endpoint(participant: &mut Participant) -> Option<&mut Endpoint<OwnedMemory>> {
    if let Kind::Host { endpoint, .. } = &mut participant.kind { Some(endpoint) } else { None }
}

fn rank_of(participant: &Participant, rank: u32) -> Option<&Rank> {
    let Kind::Host { ranks: all, .. } = &participant.kind else { return None };
    all.iter().find(|it| it.number == rank)
}

/// Has a rank act, if its machine is up.
fn with_rank(
    network: &mut Network<'_>,
    host: NodeId,
    rank: u32,
    act: impl FnOnce(&mut Rank, Instant, &mut Endpoint<OwnedMemory>),
) {
    if !network.is_up(host) {
        return;
    }
    network.with_machine(host, |it, now| {
        let Kind::Host { endpoint, ranks: all, .. } = &mut it.kind else { return };
        if let Some(rank) = all.iter_mut().find(|it| it.number == rank) {
            act(rank, now, endpoint);
        }
    });
}

/// A region that a switch may write to: its key and address.
pub(super) fn register(endpoint: &mut Endpoint<OwnedMemory>, bytes: Vec<u8>) -> (u32, u64) {
    let (address, access) = (1 << 40, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let key = endpoint.memory_mut().register(DOMAIN, address, access, bytes);
    (key.expect("room was made for all regions"), address)
}
