//! What happens from outside while machines work, and what must hold at each step.

use core::time::Duration;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use millstream_inc::{Abort, CollectiveError, Mismatch};
use millstream_roce::{Instant, Piece, SendOperation, SendRequest};

use super::build::{Built, Network, number};
use super::ends::Ends;
use super::failover::{self, Step, Watch};
use super::member::{Member, RUDE, name_of_end};
use super::outsider::{Seen, forge};
use super::world::{Group, Post, Trouble, World, address};
use crate::scenarios::rc_chaos::Tally;
use crate::{LinkOptions, NodeId, Rng};

/// An abort by who watches over a communicator.
const ABORT: Abort = Abort::Requested { code: 7 };

#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    Trouble(Trouble),
    /// Of the communicator that goes on when a switch is lost.
    Failover(Step),
    /// A cut is over.
    Heal {
        machine: usize,
    },
    /// Whoever watches over a communicator ends it.
    End {
        group: usize,
    },
    /// All whom a node could reach know that it is over: it is removed.
    Remove {
        machine: usize,
        id: u64,
    },
}

pub(super) struct Director {
    pub(super) world: World,
    pub(super) rng: Rng,
    pub(super) built: Built,
    seen: Rc<RefCell<Seen>>,
    /// By time, and by order where that is the same.
    events: BTreeMap<(Instant, u64), Event>,
    sequence: u64,
    /// Communicators that have failed for one, and whose end is planned if they are watched.
    failed: Vec<bool>,
    /// What switches have said of communicators whose ranks differ.
    pub(super) told: Vec<Vec<(Instant, Mismatch)>>,
    /// Why a node of theirs has ended, as its switch has said first.
    pub(super) said: Vec<Option<Abort>>,
    pub(super) ends: Ends,
    /// Nodes that were removed.
    pub(super) removed: Vec<u64>,
    pub(super) failover: Option<Watch>,
    pub(super) tally: Tally,
}

impl Director {
    pub(super) fn new(mut world: World, built: Built, seen: Rc<RefCell<Seen>>, rng: Rng) -> Self {
        let failed = vec![false; world.groups.len()];
        let (told, said) = (vec![Vec::new(); failed.len()], vec![None; failed.len()]);
        let (events, removed, tally) = (BTreeMap::new(), Vec::new(), Tally::default());
        let hosts = world.hosts;
        let failover = world.failover.take().map(|group| Watch::new(group, hosts));
        Self {
            world,
            rng,
            built,
            seen,
            events,
            sequence: 0,
            failed,
            told,
            said,
            ends: Ends::default(),
            removed,
            failover,
            tally,
        }
    }

    pub(super) fn start(&mut self, network: &mut Network<'_>) {
        for (at, trouble) in self.world.troubles.clone() {
            self.plan(network, at, Event::Trouble(trouble));
        }
        self.start_failover(network);
    }

    pub(super) fn plan(&mut self, network: &mut Network<'_>, delay: Duration, event: Event) {
        let at = network.after(delay);
        self.events.insert((at, self.sequence), event);
        self.sequence += 1;
        network.alarm(at);
    }

    /// Looks at all machines, and lets happen what is due.
    pub(super) fn advance(&mut self, network: &mut Network<'_>) {
        while let Some(entry) = self.events.first_entry()
            && entry.key().0 <= network.now()
        {
            let event = entry.remove();
            self.happen(network, event);
        }
        for machine in 0..self.world.hosts + self.world.switches {
            self.look(network, machine);
        }
        if self.failover.is_some() {
            let first = self.world.own_switch(0);
            let all = network.machines().count();
            (first..all).for_each(|machine| self.look(network, machine));
            self.look_after_failover(network);
        }
    }

    fn look(&mut self, network: &mut Network<'_>, machine: usize) {
        let participant = network.machine_mut(NodeId(machine));
        let wrong = core::mem::take(&mut participant.wrong);
        let done = participant.take_tally();
        done.into_iter().for_each(|what| self.tally.one(what));
        let events = core::mem::take(&mut participant.events);
        let mut failed: Vec<(usize, Option<CollectiveError>)> = participant
            .failures()
            .filter(|&(group, _)| !self.failed[group])
            .map(|(group, error)| (group, Some(error)))
            .collect();
        wrong.into_iter().for_each(|what| network.violate(what));
        for event in events {
            use millstream_inc::SwitchEvent as On;
            let (On::ChildLost { communicator, .. }
            | On::ParentLost { communicator, .. }
            | On::Mismatch { communicator, .. }
            | On::Violation { communicator, .. }
            | On::Overdue { communicator, .. }
            | On::Aborted { communicator, .. }) = event;
            network.note(|| format!("switch {machine}: {event:?}"));
            if !failover::is_node(communicator) {
                let group = (communicator >> 32) as usize;
                failed.push((group, None));
                if let On::Mismatch { mismatch, .. } = event {
                    self.told[group].push((network.now(), mismatch));
                }
                if let On::Violation { rank, violation, .. } = event
                    && self.world.groups[group].breaks_nothing()
                {
                    let text =
                        format!("rank {rank} of communicator {group}, where all keep the protocol");
                    network.violate(format!("{violation:?} was said of {text}"));
                }
                if let On::Aborted { abort, .. } = event {
                    self.said[group].get_or_insert(abort);
                    self.end_of_node(network, machine, communicator);
                }
            }
            self.tally.one(match event {
                On::ChildLost { .. } => "switches: child lost",
                On::ParentLost { .. } => "switches: parent lost",
                On::Mismatch { .. } => "switches: mismatch",
                On::Violation { .. } => "switches: violation",
                On::Overdue { .. } => "switches: overdue",
                On::Aborted { .. } => "switches: all know of an abort",
            });
            if let On::Aborted { .. } = event {
                let delay = Duration::from_nanos(self.rng.below(1_000_000));
                self.plan(network, delay, Event::Remove { machine, id: communicator });
            }
        }
        for (group, error) in failed {
            self.fail(network, group, error);
        }
        self.check_nodes(network, machine);
    }

    /// A communicator has failed for one of its machines.
    fn fail(&mut self, network: &mut Network<'_>, group: usize, error: Option<CollectiveError>) {
        if core::mem::replace(&mut self.failed[group], true) {
            return;
        }
        if !self.world.groups[group].may_fail {
            network.violate(format!("communicator {group} failed for no reason: {error:?}"));
        }
        if self.world.groups[group].is_watched {
            let delay = self.world.watch;
            self.plan(network, delay, Event::End { group });
        }
    }

    /// The nodes on a switch: communicator and number in its tree.
    pub(super) fn nodes_on(&self, machine: usize) -> impl Iterator<Item = (usize, usize)> {
        let groups = self.world.groups.iter().enumerate();
        let all = groups.flat_map(|(group, it)| {
            it.tree.nodes.iter().enumerate().map(move |(node, shape)| (group, node, shape.switch))
        });
        let hosts = self.world.hosts;
        all.filter(move |(.., switch)| switch + hosts == machine)
            .map(|(group, node, _)| (group, node))
    }

    fn happen(&mut self, network: &mut Network<'_>, event: Event) {
        network.note(|| format!("{event:?}"));
        match event {
            Event::Trouble(trouble) => self.trouble(network, trouble),
            Event::Heal { machine } => self.set_cut(network, machine, false),
            Event::End { group } => self.end(network, group),
            Event::Failover(step) => self.step_failover(network, step),
            Event::Remove { machine, id } => {
                self.removed.push(id);
                network.with_machine(NodeId(machine), |it, now| {
                    it.switch_mut().map(|switch| switch.destroy_communicator(now, id))
                });
            }
        }
    }

    fn set_cut(&self, network: &mut Network<'_>, machine: usize, cut: bool) {
        self.built.links[machine].iter().for_each(|&link| network.set_cut(link, cut));
    }

    /// Aborts all nodes of a communicator that are up.
    fn end(&mut self, network: &mut Network<'_>, group: usize) {
        let switches: Vec<(usize, usize)> = {
            let nodes = self.world.groups[group].tree.nodes.iter().enumerate();
            nodes.map(|(node, it)| (node, it.switch + self.world.hosts)).collect()
        };
        for (node, machine) in switches {
            self.abort(network, NodeId(machine), number(group, node));
        }
        self.tell_plain(network, group, ABORT);
    }

    /// Aborts a node, if its switch is up.
    fn abort(&self, network: &mut Network<'_>, switch: NodeId, id: u64) {
        if network.is_up(switch) {
            network.with_machine(switch, |it, now| {
                it.switch_mut().map(|it| it.abort_communicator(now, id, ABORT))
            });
        }
    }

    fn trouble(&mut self, network: &mut Network<'_>, trouble: Trouble) {
        self.tally.one(match trouble {
            Trouble::Cut { .. } => "links cut",
            Trouble::Stand { .. } => "machines that stand still",
            Trouble::Death { .. } => "machines that died",
            Trouble::Slow { .. } => "slow links",
            Trouble::Forge => "intrusions",
            Trouble::Rude { .. } => "intended breaches",
            Trouble::Abort { .. } => "aborts on request",
        });
        if let Some(watch) = &mut self.failover {
            watch.trouble(trouble);
        }
        match trouble {
            Trouble::Cut { machine, length } => {
                self.set_cut(network, machine, true);
                self.plan(network, length, Event::Heal { machine });
            }
            Trouble::Stand { machine, length } => {
                self.ends.stands(machine, length);
                let until = network.after(length);
                network.with_machine(NodeId(machine), |it, _| it.stand_still(until));
            }
            Trouble::Death { machine } => {
                network.set_up(NodeId(machine), false);
                // Whoever watches sees that at once, and acts some time after.
                for group in 0..self.world.groups.len() {
                    if self.world.groups[group].uses(machine, self.world.hosts) {
                        self.fail(network, group, None);
                    }
                }
            }
            Trouble::Slow { machine } => {
                let options = LinkOptions { rate: Some(50_000_000), ..self.world.link };
                self.built.links[machine].iter().for_each(|&link| network.set_link(link, options));
            }
            Trouble::Abort { group, node } => {
                let machine = self.world.groups[group].tree.nodes[node].switch + self.world.hosts;
                self.abort(network, NodeId(machine), number(group, node));
            }
            Trouble::Forge => self.intrude(network),
            Trouble::Rude { group, rank, post } => {
                let host = NodeId(self.world.groups[group].hosts[rank as usize]);
                let segment_bytes = self.world.groups[group].sizes.segment_bytes;
                let done = network.with_machine(host, |it, now| {
                    it.post(now, group, rank, |member| rude(member, post, segment_bytes))
                });
                if done {
                    self.tally.one("breaches");
                }
            }
        }
    }

    fn intrude(&mut self, network: &mut Network<'_>) {
        let own = address(self.built.outsider.0);
        let forged = forge(&mut self.rng, &self.seen.borrow(), &self.built.known, own);
        if let Some((name, datagram)) = forged {
            self.tally.one(name);
            network.inject(self.built.outsider, datagram);
        }
    }

    /// All is at rest: what must hold then.
    pub(super) fn close(&mut self, network: &mut Network<'_>) {
        let mut wrong = Vec::new();
        for machine in 0..self.world.hosts {
            if !network.is_up(NodeId(machine)) {
                continue;
            }
            let participant = network.machine(NodeId(machine));
            wrong.extend(participant.check_memory());
            for member in participant.members() {
                let group = &self.world.groups[member.group];
                self.tally.one(name_of_end(member.failed));
                wrong.extend(check_member(member, group, self.world.is_heavy));
            }
        }
        for machine in self.world.hosts..self.world.hosts + self.world.switches {
            let node = NodeId(machine);
            let Some(switch) = network.machine(node).switch().filter(|_| network.is_up(node))
            else {
                continue;
            };
            for (group, node) in self.nodes_on(machine) {
                let id = number(group, node);
                let calls = self.world.groups[group].calls.len() as u64;
                let is_plain = self.world.groups[group].plain.is_some();
                match (switch.statistics(id), self.failed[group]) {
                    (None, _) if self.removed.contains(&id) => {}
                    (Some(it), false)
                        if it.slots_in_use == 0
                            && it.abort.is_none()
                            && (if is_plain { it.segments } else { it.collectives }) == calls => {}
                    (found, failed) => wrong.push(format!(
                        "at rest node {node} of communicator {group} (failed: {failed}) has {found:?}"
                    )),
                }
            }
        }
        wrong.extend(self.check_differences(network));
        wrong.extend(self.check_plain(network));
        wrong.extend(self.check_remains(network));
        wrong.extend(self.close_failover(network));
        for group in 0..self.world.groups.len() {
            self.tally.one(if self.failed[group] {
                "communicators that failed"
            } else {
                "communicators that did all"
            });
        }
        wrong.into_iter().for_each(|what| network.violate(what));
    }
}

/// How a rank may have ended.
fn check_member(member: &Member, group: &Group, is_heavy: bool) -> Option<String> {
    let Member { group: number, rank, ended, failed, .. } = member;
    let name = format!("communicator {number}, rank {rank}");
    let confused = group.is_confused(*rank);
    match failed {
        // Who does not call has nothing under way by which it would notice that its switch has given it up.
        None if is_heavy && member.leaves_out == Some(*ended) => None,
        None if *ended < member.calls.len() => Some(format!("{name} never ended call {ended}")),
        // It waits for what is not to come.
        Some(CollectiveError::TimedOut { .. } | CollectiveError::Aborted(Abort::Overdue(_)))
            if group.may_wait() =>
        {
            None
        }
        Some(
            error
            @ (CollectiveError::TimedOut { .. } | CollectiveError::Aborted(Abort::Overdue(_))),
        ) => Some(format!("{name} heard nothing of what was wrong: {error}")),
        Some(error @ CollectiveError::Protocol(_)) if !confused => Some(format!("{name}: {error}")),
        _ => None,
    }
}

/// What a rank posts past its worker.
fn rude(member: &Member, post: Post, segment_bytes: u32) -> Option<SendRequest> {
    let call = member.calls.get(member.ended)?;
    let piece = |length: u32| {
        let address = call.arena.request.source_address;
        let key = call.key;
        let within = call.arena.request.source_key == key;
        let room = within && call.arena.bytes.len() as u32 > length + 64;
        room.then_some(Piece { key, address, length })
    };
    let write = |immediate| SendOperation::Write { remote_address: 1, remote_key: 2, immediate };
    let send = |immediate| SendOperation::Send { immediate };
    let none = Piece::default();
    let (operation, piece) = match post {
        Post::LongSend => (send(None), piece(segment_bytes + 8)?),
        Post::EmptySend => (send(None), none),
        Post::Repeat => {
            let (key, address) = (member.control_key, member.control_address);
            (send(None), Piece { key, address, length: millstream_inc::DESCRIPTOR_BYTES as u32 })
        }
        Post::LongWrite => (write(None), piece(segment_bytes + 8)?),
        Post::Immediate => (write(Some(3)), none),
        // Far from what is next.
        Post::Credit => (send(Some(3 << 30 | 0x1fff_ffff)), none),
    };
    Some(SendRequest::new(RUDE, operation, [piece]))
}
