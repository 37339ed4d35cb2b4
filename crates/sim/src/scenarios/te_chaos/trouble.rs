//! What goes wrong beside single packets and messages.

use core::time::Duration;

use millstream_transfer_core::{RailId, RailState};

use super::director::{Director, Event, Network, core_time};
use super::process::{Peer, incarnation, life_of};
use super::world::{PROCESSES, duration, pick};
use crate::{LinkId, NodeId};

/// A rate lasts for so long at least.
const CHANGE: Duration = Duration::from_millis(1);

/// Something that lasts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trouble {
    /// A NIC is away.
    Nic(NodeId),
    /// Nothing goes from one NIC to another.
    Path(NodeId, NodeId),
    /// A process is down.
    Process(usize),
    /// A process does not answer at its control port.
    Control(usize),
    /// A process stands still.
    Stopped(usize),
    /// A NIC waits for slow memory.
    Slow(NodeId),
    /// A NIC's link is slow, or sometimes is.
    Crawl(NodeId),
    /// What completes on a NIC is told late, and in one go.
    Late(NodeId),
}

impl Director {
    pub(super) fn trouble(&mut self, network: &mut Network<'_>) {
        let own = self.rng.below(PROCESSES as u64) as usize;
        let nic = self.draw_nic(own);
        if self.world.kills.happens(&mut self.rng) {
            return self.restart(network, own);
        }
        if self.world.tent && self.rng.below(2) == 0 {
            return match self.rng.below(3) {
                0 => self.tell_late(network, nic),
                kind => self.crawl(network, nic, kind == 1),
            };
        }
        match self.rng.below(20) {
            0..7 => self.flap(network, own, nic),
            7..11 => {
                let other = self.draw_nic((own + 1) % PROCESSES);
                if self.outages.borrow_mut().pairs.insert((nic, other)) {
                    self.tally.one("paths cut");
                    self.last_for(network, Trouble::Path(nic, other), Duration::from_secs(10));
                }
            }
            11 | 12 => self.stop(network, own),
            13 => {
                if self.outages.borrow_mut().controls.insert(own) {
                    self.tally.one("control ports silent");
                    self.last_for(network, Trouble::Control(own), Duration::from_secs(8));
                }
            }
            14 => self.evict(network, own),
            15 => self.mute(network, own),
            16 | 17 => self.slow(network, nic),
            _ => self.close_rails(network, own),
        }
    }

    fn draw_nic(&mut self, process: usize) -> NodeId {
        let nics = &self.processes[process].nics;
        nics[self.rng.below(nics.len() as u64) as usize]
    }

    fn last_for(&mut self, network: &mut Network<'_>, trouble: Trouble, limit: Duration) {
        network.note(|| format!("trouble {trouble:?}"));
        self.troubles += 1;
        let delay = duration(&mut self.rng, limit);
        self.plan(network, delay, Event::Over(trouble));
    }

    /// A NIC goes away for a while; its process hears of it, or not.
    fn flap(&mut self, network: &mut Network<'_>, own: usize, nic: NodeId) {
        if !self.outages.borrow_mut().nics.insert(nic) {
            return;
        }
        self.tally.one("NIC flaps");
        self.last_for(network, Trouble::Nic(nic), Duration::from_secs(10));
        if self.rng.below(2) == 0 {
            let now = core_time(network.now());
            let position = self.processes[own].nics.iter().position(|&other| other == nic);
            let peers: Vec<usize> = self.processes[own].peers.keys().copied().collect();
            for peer in peers {
                let Some(found) = self.processes[own].peers.get_mut(&peer) else { continue };
                let of_nic = |rail: &millstream_transfer_core::Rail| {
                    Some(usize::from(rail.spec().local_nic)) == position
                        && rail.state() == RailState::Up
                };
                let rails = found.flow.rails().iter().enumerate();
                let broken: Vec<(u16, u64)> = rails
                    .filter(|(_, rail)| of_nic(rail))
                    .map(|(index, rail)| (index as u16, rail.epoch()))
                    .collect();
                for (rail, epoch) in broken {
                    found.flow.rail_down(now, RailId(rail), epoch);
                }
                self.pump(network, own, peer);
            }
        }
    }

    /// A process stands still for a while, and then takes all that has arrived. Only as a target: what
    /// it does by itself goes on.
    fn stop(&mut self, network: &mut Network<'_>, own: usize) {
        if !self.outages.borrow_mut().controls.insert(own) {
            return;
        }
        self.tally.one("processes stopped");
        network.note(|| format!("stop {own}"));
        let duration = Duration::from_millis(self.rng.between(1, 10_000));
        let until = network.after(duration);
        let nics = self.processes[own].nics.iter().map(|&nic| (nic, until));
        self.outages.borrow_mut().stopped.extend(nics);
        self.troubles += 1;
        self.plan(network, duration, Event::Over(Trouble::Stopped(own)));
    }

    /// What arrives at a NIC has to wait, as for memory that is not there yet. The process's other NICs
    /// and its control port answer.
    fn slow(&mut self, network: &mut Network<'_>, nic: NodeId) {
        let duration = Duration::from_millis(self.rng.between(50, 3000));
        let until = network.after(duration);
        if self.outages.borrow_mut().stopped.contains_key(&nic) {
            return;
        }
        self.outages.borrow_mut().stopped.insert(nic, until);
        self.tally.one("NICs that wait for memory");
        network.note(|| format!("slow {nic:?}"));
        self.troubles += 1;
        self.plan(network, duration, Event::Over(Trouble::Slow(nic)));
    }

    /// What a NIC sends is slow for a while; or slow now and fast then, so that it is never as fast as it was
    /// measured to be.
    fn crawl(&mut self, network: &mut Network<'_>, nic: NodeId, always: bool) {
        if !self.outages.borrow_mut().crawling.insert(nic) {
            return;
        }
        self.tally.one(if always { "NICs that are slow" } else { "NICs of changing rates" });
        self.last_for(network, Trouble::Crawl(nic), Duration::from_secs(10));
        self.set_rate(network, nic, true);
        if !always {
            self.plan(network, Duration::ZERO, Event::Rate(nic));
        }
    }

    pub(super) fn change_rate(&mut self, network: &mut Network<'_>, nic: NodeId) {
        if self.outages.borrow().crawling.contains(&nic) {
            let slow = self.rng.below(2) == 0;
            self.set_rate(network, nic, slow);
            let delay = duration(&mut self.rng, Duration::from_millis(300)).max(CHANGE);
            self.plan(network, delay, Event::Rate(nic));
        }
    }

    fn set_rate(&mut self, network: &mut Network<'_>, nic: NodeId, slow: bool) {
        let mut link = self.world.link;
        let part = if slow { *pick(&mut self.rng, &[2, 10, 10, 100, 1000]) } else { 1 };
        link.rate = link.rate.map(|rate| rate / part);
        network.set_link(LinkId(nic.0), link);
    }

    /// A thread that tells what has completed is held up.
    fn tell_late(&mut self, network: &mut Network<'_>, nic: NodeId) {
        if self.outages.borrow_mut().silent.insert(nic) {
            self.tally.one("NICs whose completions are late");
            self.last_for(network, Trouble::Late(nic), Duration::from_millis(500));
        }
    }

    /// A process is killed, and started again after a while.
    fn restart(&mut self, network: &mut Network<'_>, own: usize) {
        if !self.processes[own].up {
            return;
        }
        self.tally.one("processes killed");
        let life = self.processes[own].life;
        for nic in self.processes[own].nics.clone() {
            network.set_up(nic, false);
        }
        self.ledger.borrow_mut().crash((own, life));
        self.transfers.retain(|_, transfer| transfer.initiator != own);
        let gone = incarnation(own, life);
        self.processes[own].forget();
        self.last_for(network, Trouble::Process(own), Duration::from_secs(3));
        for other in (0..PROCESSES).filter(|&other| other != own) {
            let delay = Duration::from_secs(1) + duration(&mut self.rng, Duration::from_secs(29));
            self.plan(network, delay, Event::Gone { own: other, incarnation: gone });
            // Its host says that nobody is there, to who asks in time.
            if self.rng.below(2) == 0 {
                let delay = duration(&mut self.rng, Duration::from_secs(1));
                self.plan(network, delay, Event::PeerGone { own: other, incarnation: gone });
            }
        }
    }

    pub(super) fn end_trouble(&mut self, network: &mut Network<'_>, trouble: Trouble) {
        self.troubles -= 1;
        match trouble {
            Trouble::Nic(nic) => {
                self.outages.borrow_mut().nics.remove(&nic);
            }
            Trouble::Path(from, to) => {
                self.outages.borrow_mut().pairs.remove(&(from, to));
            }
            Trouble::Control(own) => {
                self.outages.borrow_mut().controls.remove(&own);
            }
            Trouble::Stopped(own) => {
                self.outages.borrow_mut().controls.remove(&own);
                let nics = &self.processes[own].nics;
                self.outages.borrow_mut().stopped.retain(|nic, _| !nics.contains(nic));
            }
            Trouble::Slow(nic) => {
                self.outages.borrow_mut().stopped.remove(&nic);
            }
            Trouble::Crawl(nic) => {
                self.outages.borrow_mut().crawling.remove(&nic);
                network.set_link(LinkId(nic.0), self.world.link);
            }
            Trouble::Late(nic) => {
                self.outages.borrow_mut().silent.remove(&nic);
            }
            Trouble::Process(own) => {
                self.processes[own].up = true;
                for nic in self.processes[own].nics.clone() {
                    network.set_up(nic, true);
                }
            }
        }
    }

    /// A process closes a connection that it has accepted, to make room.
    fn evict(&mut self, network: &mut Network<'_>, own: usize) {
        let count = self.processes[own].accepted.len() as u64;
        let index = self.rng.below(count) as usize;
        let found = self.processes[own].accepted.keys().nth(index).copied();
        if let Some((initiator, epoch)) = found {
            self.tally.one("connections evicted");
            self.processes[own].target.close(initiator, epoch);
            self.pump_target(network, own);
        }
    }

    /// A process closes connections that it has asked for, to make room.
    fn close_rails(&mut self, network: &mut Network<'_>, own: usize) {
        let now = core_time(network.now());
        let peers: Vec<usize> = self.processes[own].peers.keys().copied().collect();
        for peer in peers {
            let Some(found) = self.processes[own].peers.get_mut(&peer) else { continue };
            for index in 0..found.flow.rails().len() {
                let rail = &found.flow.rails()[index];
                let open = matches!(rail.state(), RailState::Up | RailState::Connecting);
                if open && self.rng.below(2) == 0 {
                    self.tally.one("connections closed by their initiator");
                    found.flow.close_rail(now, RailId(index as u16), rail.epoch());
                    let state = found.flow.rails()[index].state();
                    if !matches!(state, RailState::Fencing | RailState::Down) {
                        network.violate(format!(
                            "rail {index} of {own} to {peer} was closed: {state:?}"
                        ));
                    }
                }
            }
            self.pump(network, own, peer);
        }
    }

    /// A transport stops telling what completes on some connections of a process: on most of those that
    /// have something under way.
    fn mute(&mut self, network: &Network<'_>, own: usize) {
        let now = core_time(network.now());
        for peer in self.processes[own].peers.values_mut() {
            let Peer { flow, links, .. } = peer;
            for (rail, link) in links {
                let busy = flow.rails()[usize::from(rail.0)].oldest_age(now).is_some();
                link.mute |= self.rng.below(4) < if busy { 3 } else { 1 };
            }
        }
    }

    /// A process hears that a peer has ended.
    pub(super) fn peer_gone(&mut self, network: &mut Network<'_>, own: usize, gone: u64) {
        let (peer, _) = life_of(gone);
        let process = &mut self.processes[own];
        let found = process.peers.get_mut(&peer).filter(|_| process.up);
        if let Some(found) = found.filter(|found| found.flow.incarnation() == gone) {
            self.tally.one("peers that are gone");
            found.flow.peer_gone(core_time(network.now()));
            self.pump(network, own, peer);
        }
    }

    /// A process has asked an initiator in vain whether it is there.
    pub(super) fn notice_gone(&mut self, network: &mut Network<'_>, own: usize, gone: u64) {
        debug_assert!(self.processes[life_of(gone).0].life > life_of(gone).1);
        let accepted = self.processes[own].accepted.keys();
        let of_gone: Vec<_> =
            accepted.filter(|(initiator, _)| initiator.incarnation == gone).copied().collect();
        for (initiator, epoch) in of_gone {
            self.tally.one("connections of the dead closed");
            self.processes[own].target.close(initiator, epoch);
        }
        self.pump_target(network, own);
    }
}
