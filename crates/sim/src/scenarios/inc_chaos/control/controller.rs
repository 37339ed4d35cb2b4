//! The controller's process: it acts on one thing after the other, deadlines first.

use std::collections::VecDeque;

use core::time::Duration;

use millstream_inc::controller::{ConnectionId, Controller, ControllerConfig, Output};
use millstream_inc::plan::FanIn;
use millstream_inc::protocol::Commanded;
use millstream_roce::Instant;

use super::super::build::Network;
use super::director::{Director, Event};
use super::stream::Arrival;

/// The process.
#[derive(Debug, Default)]
pub(super) struct Process {
    /// How many there were.
    pub(super) life: u64,
    pub(super) controller: Option<Box<Controller>>,
    stands_until: Option<Instant>,
    /// What has come and was not read.
    backlog: VecDeque<(u64, Arrival)>,
    /// When it is called next.
    alarm: Option<Instant>,
}

impl Director {
    pub(super) fn start_controller(&mut self, network: &mut Network<'_>) {
        let config = ControllerConfig {
            fan_in: FanIn::new(self.world.fan_in).unwrap_or(FanIn::MAX),
            segment_bytes: self.world.segment_bytes,
            window: self.world.window,
            ..ControllerConfig::new(self.rng.bits())
        };
        self.process.life += 1;
        self.process.controller = Some(Box::new(Controller::new(config)));
        self.run_controller(network);
    }

    pub(super) fn kill_controller(&mut self, network: &mut Network<'_>) {
        let Self { process, streams, .. } = self;
        process.controller = None;
        process.stands_until = None;
        process.backlog.clear();
        let life = process.life;
        let ours: Vec<u64> = streams
            .all
            .iter()
            .filter(|(_, stream)| stream.controller == life && !stream.broken)
            .map(|(&id, _)| id)
            .collect();
        for id in ours {
            self.break_stream(network, id);
        }
    }

    pub(super) fn stop_controller(&mut self, network: &mut Network<'_>, length: Duration) {
        let until = network.after(length);
        let stands = &mut self.process.stands_until;
        *stands = Some(stands.map_or(until, |earlier| earlier.max(until)));
        self.plan_at(network, until, Event::Controller);
    }

    /// Something has arrived for it.
    pub(super) fn hand_to_controller(&mut self, network: &mut Network<'_>, id: u64, what: Arrival) {
        self.process.backlog.push_back((id, what));
        self.run_controller(network);
    }

    /// Lets it do all that it can now.
    pub(super) fn run_controller(&mut self, network: &mut Network<'_>) {
        let now = network.now();
        if self.process.stands_until.is_some_and(|until| until > now) {
            return;
        }
        self.process.stands_until = None;
        loop {
            let Some(controller) = &mut self.process.controller else { return };
            let deadline = controller.poll_timeout();
            if deadline.is_some_and(|at| at <= now) {
                controller.handle_timeout(now);
            } else if let Some((id, what)) = self.process.backlog.pop_front() {
                let connection = ConnectionId(id);
                match what {
                    Arrival::Accepted => controller.handle_connected(now, connection),
                    Arrival::Up(Some(message)) => {
                        controller.handle_message(now, connection, message);
                    }
                    Arrival::Up(None) => controller.handle_closed(now, connection),
                    Arrival::Down(_) => {}
                }
            } else {
                if let Some(at) = deadline
                    && self.process.alarm != Some(at)
                {
                    self.process.alarm = Some(at);
                    self.plan_at(network, at, Event::Controller);
                }
                return;
            }
            self.carry_out(network);
            self.check_bounds(network);
        }
    }

    /// Carries out what it has decided.
    fn carry_out(&mut self, network: &mut Network<'_>) {
        while let Some(controller) = &mut self.process.controller
            && let Some(output) = controller.poll_output()
        {
            match output {
                Output::Send { connection, term, message } => {
                    network.note(|| format!("{term} to {}: {message:?}", connection.0));
                    self.send_down(network, connection.0, Some(Commanded { term, message }));
                }
                Output::Close { connection } => self.send_down(network, connection.0, None),
            }
        }
    }

    /// Its state is no larger than what there is.
    fn check_bounds(&self, network: &mut Network<'_>) {
        let Some(controller) = &self.process.controller else { return };
        let census = controller.census();
        let life = self.process.life;
        let streams = self.streams.all.values().filter(|stream| stream.controller == life).count();
        // A job that was killed and started again has an old group and a new one.
        let groups = self.launches;
        let nodes = groups * (self.world.hosts + self.world.switches);
        if census.connections > streams
            || census.switches > self.world.switches
            || census.groups > groups
            || census.communicators > nodes
            || census.held > nodes
            || census.away > self.world.hosts * groups
            || census.ending > nodes
        {
            network.violate(format!("the controller keeps {census:?} of {groups} groups"));
        }
    }
}
