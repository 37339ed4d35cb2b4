//! Control connections as they are made, used and lost.

use core::time::Duration;

use millstream_inc::protocol::{Commanded, ToController};
use millstream_roce::Instant;

use super::super::build::Network;
use super::agent::Link;
use super::director::{Director, Event};
use super::rank::Stage;
use super::stream::Arrival;

impl Director {
    /// Begins to connect a machine's process to the controller.
    pub(super) fn connect(&mut self, network: &mut Network<'_>, machine: usize) {
        *self.link(machine) = Link::Connecting;
        let joining = machine < self.world.hosts
            && matches!(self.ranks[machine].stage, Stage::Joining { .. });
        let patience = match machine < self.world.hosts {
            true if joining => self.world.jobs[self.ranks[machine].job].patience,
            true => Duration::from_secs(1),
            false => Duration::from_secs(3),
        };
        let (life, _) = self.life(machine);
        let until = network.after(patience);
        let delay = Duration::from_nanos(self.rng.below(self.world.latency.as_nanos() as u64));
        self.plan(network, delay, Event::Connect { machine, life, until });
    }

    /// Closes this end of a machine's connection, after all that was sent.
    pub(super) fn close_link(&mut self, network: &mut Network<'_>, machine: usize) {
        if let Some(stream) = self.stream_of(machine) {
            *self.link(machine) = Link::Off;
            self.send_up(network, stream, None);
        }
    }

    pub(super) fn send_up(
        &mut self,
        network: &mut Network<'_>,
        stream: u64,
        message: Option<ToController>,
    ) {
        self.send(network, stream, true, Arrival::Up(message));
    }

    pub(super) fn send_down(
        &mut self,
        network: &mut Network<'_>,
        stream: u64,
        message: Option<Commanded>,
    ) {
        self.send(network, stream, false, Arrival::Down(message));
    }

    fn send(&mut self, network: &mut Network<'_>, stream: u64, up: bool, what: Arrival) {
        let Self { streams, rng, world, .. } = self;
        if let Some(at) = streams.send(stream, up, network.now(), world.latency, rng) {
            self.plan_at(network, at, Event::Arrives { stream, what });
        }
    }

    /// Both ends hear that a connection is broken; what is on its way is lost.
    pub(super) fn break_stream(&mut self, network: &mut Network<'_>, id: u64) {
        let Some(stream) = self.streams.all.get(&id).filter(|it| !it.broken).cloned() else {
            return;
        };
        self.streams.end(id);
        self.tally.one("connections broken");
        if self.process.life == stream.controller {
            self.hand_to_controller(network, id, Arrival::Up(None));
        }
        // At once, though another packet might be needed for that.
        self.arrive_down(network, stream.machine, stream.life, id, None);
    }

    pub(super) fn arrive(&mut self, network: &mut Network<'_>, id: u64, what: Arrival) {
        let Some(stream) = self.streams.all.get(&id).filter(|it| !it.broken).cloned() else {
            return;
        };
        match what {
            Arrival::Down(message) => {
                self.arrive_down(network, stream.machine, stream.life, id, message);
            }
            up => {
                if matches!(up, Arrival::Up(None)) {
                    // Nothing comes after it, and what goes down reaches nobody.
                    self.streams.end(id);
                }
                if self.process.life == stream.controller {
                    self.hand_to_controller(network, id, up);
                }
            }
        }
    }

    fn arrive_down(
        &mut self,
        network: &mut Network<'_>,
        machine: usize,
        life: u64,
        id: u64,
        message: Option<Commanded>,
    ) {
        if self.life(machine) != (life, true) || self.stream_of(machine) != Some(id) {
            return;
        }
        let host = machine < self.world.hosts;
        match message {
            Some(command) if host => self.command_rank(network, machine, id, command),
            Some(command) => self.command_switch(network, machine, id, command),
            None if host => self.rank_alone(network, machine),
            None => self.switch_alone(network, machine),
        }
    }

    pub(super) fn try_to_connect(
        &mut self,
        network: &mut Network<'_>,
        machine: usize,
        life: u64,
        until: Instant,
    ) {
        let now = network.now();
        if self.life(machine) != (life, true) || *self.link(machine) != Link::Connecting {
            return;
        }
        if let Some(heals) = self.streams.cut_until(machine, now).filter(|_| now < until) {
            let again = heals + Duration::from_micros(self.rng.below(1_000_000));
            return self.plan_at(
                network,
                again.min(until),
                Event::Connect { machine, life, until },
            );
        }
        let host = machine < self.world.hosts;
        if now >= until || self.process.controller.is_none() {
            return match host {
                true => self.rank_alone(network, machine),
                false => self.switch_alone(network, machine),
            };
        }
        let stream = self.streams.open(machine, life, self.process.life, now);
        *self.link(machine) = Link::Open(stream);
        self.hand_to_controller(network, stream, Arrival::Accepted);
        match host {
            true => self.greet(network, machine, stream),
            false => self.introduce(network, machine, stream),
        }
    }
}
