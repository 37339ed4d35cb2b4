//! The director: carries out what flows and targets want done, and keeps time for them.

use core::time::Duration;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use millstream_roce::{CompletionStatus, Instant, Piece, SendOperation, SendRequest};
use millstream_transfer_core::{
    Ended, Flow, Initiator, Opcode, Output, Post, RailId, SliceId, SliceResult,
};
use millstream_wire::Psn;

use super::checks::{Echo, Pace, check_end, tell_again};
use super::control::Message;
use super::ledger::{Shared, life_key, sink_key};
use super::nic::{Busy, Nic};
use super::process::{End, Link, Peer, Process, Transfer, incarnation, life_of};
use super::trouble::Trouble;
use super::world::{Outages, World, duration};
use crate::scenarios::rc_chaos::Tally;
use crate::{NodeId, Rng, Simulation};

/// The identifier of tests of rails. No slice has it.
const TEST: u64 = u64::MAX;

pub(super) type Network<'a> = Simulation<'a, Nic>;

/// Something that happens later. What is of a process says of which of its lives.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    Flow {
        own: usize,
        peer: usize,
        life: u32,
    },
    Message(Message),
    Aborted {
        own: usize,
        peer: usize,
        life: u32,
        rail: RailId,
        epoch: u64,
    },
    Closed {
        own: usize,
        life: u32,
        initiator: Initiator,
        epoch: u64,
    },
    Burst,
    Cancel {
        user: u64,
    },
    /// The target of a WRITE takes back the memory that it goes to.
    Unregister {
        user: u64,
    },
    Limit {
        user: u64,
    },
    Trouble,
    Over(Trouble),
    /// A link whose rate is always another one has another one.
    Rate(NodeId),
    /// A process notices that an initiator is no more.
    Gone {
        own: usize,
        incarnation: u64,
    },
    /// A process hears that a peer has ended.
    PeerGone {
        own: usize,
        incarnation: u64,
    },
    /// A completion is told again.
    Echo(Echo),
    /// That local access has ended is told again.
    AbortedAgain {
        own: usize,
        peer: usize,
        life: u32,
        rail: RailId,
        epoch: u64,
    },
    FenceCheck {
        own: usize,
        peer: usize,
        life: u32,
        rail: RailId,
        epoch: u64,
    },
    LastTransfer {
        own: usize,
        peer: usize,
        tries: u32,
    },
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Phase {
    Traffic,
    /// No trouble any more: what is under way ends.
    Calm,
    /// One transfer from each to each.
    Last,
    Done,
}

pub(super) struct Director {
    pub(super) world: World,
    pub(super) rng: Rng,
    /// Draws whose memory is taken back, in runs where some is.
    pub(super) unregister: Option<Rng>,
    pub(super) processes: Vec<Process>,
    /// By time, and by order where that is the same.
    events: BTreeMap<(Instant, u64), Event>,
    sequence: u64,
    pub(super) ledger: Shared,
    busy: Busy,
    pub(super) outages: Rc<RefCell<Outages>>,
    pub(super) transfers: BTreeMap<u64, Transfer>,
    pub(super) made: u64,
    pub(super) troubles: u64,
    /// Pairs whose last transfer is not done.
    pub(super) last: BTreeSet<(usize, usize)>,
    pub(super) phase: Phase,
    pub(super) bytes: u64,
    pub(super) tally: Tally,
    pace: Pace,
}

/// The simulation's time is the flows'.
pub(super) const fn core_time(now: Instant) -> millstream_transfer_core::Instant {
    millstream_transfer_core::Instant::from_nanos(now.nanos())
}

impl Director {
    pub(super) fn new(
        world: World,
        (rng, unregister): (Rng, Option<Rng>),
        processes: Vec<Process>,
        (ledger, busy, outages): (Shared, Busy, Rc<RefCell<Outages>>),
    ) -> Self {
        Self {
            world,
            rng,
            unregister,
            processes,
            events: BTreeMap::new(),
            sequence: 0,
            ledger,
            busy,
            outages,
            transfers: BTreeMap::new(),
            made: 0,
            troubles: 0,
            last: BTreeSet::new(),
            phase: Phase::Traffic,
            bytes: 0,
            tally: Tally::default(),
            pace: Pace::default(),
        }
    }

    pub(super) fn plan(&mut self, network: &mut Network<'_>, delay: Duration, event: Event) {
        let at = network.after(delay);
        self.sequence += 1;
        self.events.insert((at, self.sequence), event);
        network.alarm(at);
    }

    /// Does what is due, and follows what NICs have seen.
    pub(super) fn advance(&mut self, network: &mut Network<'_>) {
        loop {
            self.follow(network);
            if self.pace.is_endless(network.now()) {
                return network.violate("this goes on for ever without time passing".into());
            }
            let due = self.events.first_key_value().filter(|((at, _), _)| *at <= network.now());
            let Some((&key, &event)) = due else { break };
            self.events.remove(&key);
            self.happen(network, event);
        }
        let faults = core::mem::take(&mut self.ledger.borrow_mut().faults);
        faults.into_iter().for_each(|fault| network.violate(fault));
        self.go_on(network);
    }

    fn happen(&mut self, network: &mut Network<'_>, event: Event) {
        let now = core_time(network.now());
        match event {
            Event::Flow { own, peer, life } => {
                let Some(found) = self.peer(own, life, peer) else { return };
                found.wake = None;
                found.flow.handle_timeout(now);
                self.pump(network, own, peer);
            }
            Event::Message(message) => self.receive(network, message),
            Event::Aborted { own, peer, life, rail, epoch } => {
                self.harvest(network);
                let Some(found) = self.peer(own, life, peer) else { return };
                if let Some(link) = found.links.get(&rail).copied()
                    && link.epoch == epoch
                {
                    found.links.remove(&rail);
                    let Link { end: End { nic, qpn, .. }, .. } = link;
                    self.processes[own].by_qpn.remove(&(nic, qpn));
                    network.with_machine(nic, |nic, _| nic.destroy(qpn));
                }
                if let Some(found) = self.peer(own, life, peer) {
                    found.flow.rail_aborted(now, rail, epoch);
                }
                self.pump(network, own, peer);
                if self.rng.below(20) == 0 {
                    let delay = duration(&mut self.rng, Duration::from_secs(3));
                    let again = Event::AbortedAgain { own, peer, life, rail, epoch };
                    self.plan(network, delay, again);
                }
            }
            Event::Closed { own, life, initiator, epoch } => {
                if self.processes[own].life == life {
                    if let Some(end) = self.processes[own].accepted.remove(&(initiator, epoch)) {
                        network.with_machine(end.nic, |nic, _| nic.destroy(end.qpn));
                    }
                    self.processes[own].target.closed(initiator, epoch);
                    self.pump_target(network, own);
                }
            }
            Event::Burst => self.burst(network),
            Event::Cancel { user } => self.cancel(network, user),
            Event::Unregister { user } => {
                if self.ledger.borrow_mut().unregister(user) {
                    network.note(|| format!("the memory of {user} is unregistered"));
                    self.tally.one("memory taken back");
                }
            }
            Event::Limit { user } => {
                let late = self.transfers.get(&user).filter(|t| t.limit <= network.now());
                if let Some(transfer) = late {
                    let process = &self.processes[transfer.initiator];
                    let flow = process.peers.get(&transfer.target).map(|peer| &peer.flow);
                    let rails: Vec<_> =
                        flow.into_iter().flat_map(Flow::rails).map(|rail| rail.state()).collect();
                    network.violate(format!("not over in time: {user} {transfer:?} {rails:?}"));
                }
            }
            Event::Trouble if self.phase == Phase::Traffic => self.trouble(network),
            // It was planned just before the last transfers, and trouble is over.
            Event::Trouble => {}
            Event::Over(trouble) => self.end_trouble(network, trouble),
            Event::Rate(nic) => self.change_rate(network, nic),
            Event::Gone { own, incarnation } => self.notice_gone(network, own, incarnation),
            Event::PeerGone { own, incarnation } => self.peer_gone(network, own, incarnation),
            Event::Echo(echo) => self.tell_completion_again(network, echo),
            Event::AbortedAgain { own, peer, life, rail, epoch } => {
                let Some(found) = self.peer(own, life, peer) else { return };
                let tell = |flow: &mut Flow<_>| flow.rail_aborted(now, rail, epoch);
                if let Some(what) = tell_again(&mut found.flow, tell) {
                    network.violate(format!("{event:?}: {what}"));
                }
                self.pump(network, own, peer);
            }
            Event::FenceCheck { own, peer, life, rail, epoch } => {
                self.check_fence(network, (own, peer, life), (rail, epoch));
            }
            Event::LastTransfer { own, peer, tries } => {
                self.last_transfer(network, own, peer, tries);
            }
        }
    }

    pub(super) fn peer(&mut self, own: usize, life: u32, peer: usize) -> Option<&mut Peer> {
        let process = &mut self.processes[own];
        if process.up && process.life == life { process.peers.get_mut(&peer) } else { None }
    }

    /// Tells flows what has completed.
    fn follow(&mut self, network: &mut Network<'_>) {
        loop {
            let touched = self.harvest(network);
            if touched.is_empty() || self.pace.is_endless(network.now()) {
                return;
            }
            for (own, peer) in touched {
                self.pump(network, own, peer);
            }
        }
    }

    /// The same, without doing what comes of it; returns whose flows were told.
    fn harvest(&mut self, network: &mut Network<'_>) -> BTreeSet<(usize, usize)> {
        let mut touched = BTreeSet::new();
        let now = core_time(network.now());
        let busy = core::mem::take(&mut *self.busy.borrow_mut());
        for nic in busy {
            if self.outages.borrow().silent.contains(&NodeId(nic)) {
                self.busy.borrow_mut().push(nic);
                continue;
            }
            let own = network.machine(NodeId(nic)).process();
            let seen = core::mem::take(&mut network.machine_mut(NodeId(nic)).seen);
            for completion in seen {
                let process = &mut self.processes[own];
                let Some(&(peer, rail)) = process.by_qpn.get(&(NodeId(nic), completion.qpn)) else {
                    continue;
                };
                let Some(found) = process.peers.get_mut(&peer) else { continue };
                if found.links.get(&rail).is_some_and(|link| link.mute) {
                    self.tally.one("completions withheld");
                    continue;
                }
                let epoch = found.links.get(&rail).map_or(0, |link| link.epoch);
                if completion.id == TEST {
                    touched.insert((own, peer));
                    if completion.status != CompletionStatus::Success {
                        self.tally.one("tests of rails: failed");
                        found.flow.rail_down(now, rail, epoch);
                        continue;
                    }
                    self.tally.one("tests of rails: answered");
                    found.flow.rail_tested(now, rail, epoch);
                    let again = |flow: &mut _| Flow::rail_tested(flow, now, rail, epoch);
                    if let Some(what) = tell_again(&mut found.flow, again) {
                        network.violate(format!("a test of {rail:?}: {what}"));
                    }
                    continue;
                }
                let (result, name) = match completion.status {
                    CompletionStatus::Success => (SliceResult::Done, "slices: done"),
                    CompletionStatus::Flushed => (SliceResult::Flushed, "work requests: flushed"),
                    CompletionStatus::RemoteAccess => {
                        (SliceResult::Refused, "work requests: refused")
                    }
                    _ => (SliceResult::Broken, "work requests: broken"),
                };
                self.tally.one(name);
                if result == SliceResult::Refused && self.unregister.is_none() {
                    network.violate(format!("{completion:?}, and no memory was taken back"));
                }
                let slice = SliceId::from_bits(completion.id);
                if let Some(moved) = found.flow.completed(now, slice, result) {
                    let wrong = found.done(network.now(), rail, slice, moved.length);
                    wrong.into_iter().for_each(|what| network.violate(what));
                }
                touched.insert((own, peer));
                // Of those that did not succeed there are few.
                let share = if result == SliceResult::Done { 100 } else { 2 };
                if self.rng.below(share) == 0 {
                    let life = self.processes[own].life;
                    let delay = duration(&mut self.rng, Duration::from_secs(1));
                    let echo = Echo { own, peer, life, rail, epoch, slice, result };
                    self.plan(network, delay, Event::Echo(echo));
                }
            }
        }
        touched
    }

    /// Does what a flow wants.
    pub(super) fn pump(&mut self, network: &mut Network<'_>, own: usize, peer: usize) {
        let now = core_time(network.now());
        let life = self.processes[own].life;
        while let Some(found) = self.peer(own, life, peer) {
            let Some(output) = found.flow.poll_output(now) else { break };
            match output {
                Output::Post(post) => self.post(network, own, peer, &post),
                Output::Connect { rail, epoch } => self.connect(network, own, peer, rail, epoch),
                Output::Test { rail, epoch } => self.test(network, (own, peer), rail, epoch),
                Output::Abort { rail, epoch } => {
                    self.tally.one("connections aborted");
                    let delay = duration(&mut self.rng, Duration::from_millis(2));
                    let event = Event::Aborted { own, peer, life, rail, epoch };
                    self.plan(network, delay, event);
                }
                Output::Fence { rail, epoch } => {
                    self.tally.one("fences asked for");
                    let target = found_incarnation(&self.processes[own], peer);
                    let initiator = Initiator { incarnation: incarnation(own, life), rail: rail.0 };
                    if target == 0 {
                        return network.violate(format!("{output:?} of nobody"));
                    }
                    let message = Message::Fence { initiator, epoch, target };
                    self.send(network, message);
                    self.fence_asked(network, (own, peer, life), (rail, epoch));
                }
                Output::Ended(ended) => self.ended(network, &ended),
            }
        }
        let Some(found) = self.peer(own, life, peer) else { return };
        let Some(at) = found.flow.poll_timeout() else { return };
        let at = Instant::from_nanos(at.nanos()).max(network.now());
        if found.wake.is_none_or(|wake| at < wake) {
            found.wake = Some(at);
            let delay = at.saturating_duration_since(network.now());
            self.plan(network, delay, Event::Flow { own, peer, life });
        }
    }

    fn post(&mut self, network: &mut Network<'_>, own: usize, peer: usize, post: &Post) {
        let life = self.processes[own].life;
        let Some(found) = self.peer(own, life, peer) else { return };
        let (_, peer_life) = life_of(found.flow.incarnation());
        let Some(link) = found.links.get(&post.rail).copied().filter(|l| l.epoch == post.epoch)
        else {
            return network.violate(format!("{post:?} is not on a connection that is up"));
        };
        let pieces: Vec<_> = found.flow.pieces(post.slice).collect();
        let length: u64 = pieces.iter().map(|piece| piece.length).sum();
        if length != u64::from(post.length) || pieces.len() != post.pieces as usize {
            return network.violate(format!("{post:?} has other pieces: {pieces:?}"));
        }
        let key = life_key(post.opcode, life);
        let request = |index: usize, piece: &millstream_transfer_core::Piece| {
            let remote_address = piece.remote;
            let operation = match post.opcode {
                Opcode::Write => {
                    let remote_key = sink_key(peer_life);
                    SendOperation::Write { remote_address, remote_key, immediate: None }
                }
                Opcode::Read => {
                    let remote_key = super::ledger::source_key(peer_life);
                    SendOperation::Read { remote_address, remote_key }
                }
            };
            let local = Piece { key, address: piece.local, length: piece.length as u32 };
            // The last one completes for all.
            let signaled = index + 1 == pieces.len();
            let request = SendRequest::new(post.slice.to_bits(), operation, vec![local]);
            SendRequest { signaled, ..request }
        };
        self.tally.one("slices: posted");
        if let Some(what) = self.count_posted(network.now(), post) {
            network.violate(what);
        }
        let End { nic, qpn, .. } = link.end;
        for (index, piece) in pieces.iter().enumerate() {
            let request = request(index, piece);
            let posted = network.with_machine(nic, |nic, now| nic.post(now, qpn, &request));
            if let Err(error) = posted {
                return network.violate(format!("{post:?}: {error}"));
            }
        }
    }

    /// Posts a WRITE of no bytes.
    fn test(
        &mut self,
        network: &mut Network<'_>,
        (own, peer): (usize, usize),
        rail: RailId,
        epoch: u64,
    ) {
        self.tally.one("tests of rails");
        let life = self.processes[own].life;
        let Some(found) = self.peer(own, life, peer) else { return };
        let Some(link) = found.links.get(&rail).copied().filter(|link| link.epoch == epoch) else {
            return network.violate(format!("{rail:?} is tested, and has no connection {epoch}"));
        };
        let operation = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };
        let request = SendRequest::new(TEST, operation, Vec::new());
        let End { nic, qpn, .. } = link.end;
        let posted = network.with_machine(nic, |nic, now| nic.post(now, qpn, &request));
        if let Err(error) = posted {
            network.violate(format!("a test of {rail:?}: {error}"));
        }
    }

    fn connect(
        &mut self,
        network: &mut Network<'_>,
        own: usize,
        peer: usize,
        rail: RailId,
        epoch: u64,
    ) {
        self.tally.one("connections asked for");
        let life = self.processes[own].life;
        let psn = Psn::new(self.rng.bits() as u32);
        let Some(spec) =
            self.peer(own, life, peer).map(|p| *p.flow.rails()[usize::from(rail.0)].spec())
        else {
            return;
        };
        // A queue pair that was never connected may be left from before.
        self.drop_link(network, own, peer, rail);
        let nic = self.processes[own].nics[usize::from(spec.local_nic)];
        let Some(qpn) = network.with_machine(nic, |nic, _| nic.create()) else {
            return network.violate("a NIC has no queue pair left".into());
        };
        network.forget_queue_pair(nic, qpn);
        let end = End { nic, qpn, psn };
        self.processes[own].by_qpn.insert((nic, qpn), (peer, rail));
        if let Some(found) = self.peer(own, life, peer) {
            found.links.insert(rail, Link { epoch, end, connected: false, mute: false });
        }
        let initiator = Initiator { incarnation: incarnation(own, life), rail: rail.0 };
        let target = found_incarnation(&self.processes[own], peer);
        if target == 0 {
            return network.violate(format!("{own} connects {rail:?} to nobody"));
        }
        let message = Message::Connect { initiator, epoch, target, nic: spec.peer_nic, end };
        self.send(network, message);
    }

    /// Destroys the queue pair of a rail, if it has one.
    pub(super) fn drop_link(
        &mut self,
        network: &mut Network<'_>,
        own: usize,
        peer: usize,
        rail: RailId,
    ) {
        let life = self.processes[own].life;
        let link = self.peer(own, life, peer).and_then(|found| found.links.remove(&rail));
        if let Some(Link { end: End { nic, qpn, .. }, .. }) = link {
            self.processes[own].by_qpn.remove(&(nic, qpn));
            network.with_machine(nic, |nic, _| nic.destroy(qpn));
        }
    }

    fn ended(&mut self, network: &mut Network<'_>, ended: &Ended) {
        self.ledger.borrow_mut().end(ended);
        self.tally.one(super::name_of_end(ended));
        self.bytes += ended.transferred;
        let Some(transfer) = self.transfers.remove(&ended.user) else {
            return network.violate(format!("{ended:?} is of no transfer"));
        };
        network.note(|| format!("ended {ended:?}"));
        if let Some(what) = check_end(&transfer, ended, self.world.config.patience, network.now()) {
            network.violate(what);
        }
        if self.world.tent && ended.end == millstream_transfer_core::End::Completed {
            self.tally.one(super::name_of_level(transfer.priority));
        }
        if transfer.last {
            self.last_ended(network, &transfer, ended);
        }
    }

    /// Whether no event is planned.
    pub(super) fn is_idle(&self) -> bool {
        self.events.is_empty()
    }
}

/// The incarnation of a peer, as a process knows it.
fn found_incarnation(process: &Process, peer: usize) -> u64 {
    process.peers.get(&peer).map_or(0, |found| found.flow.incarnation())
}
