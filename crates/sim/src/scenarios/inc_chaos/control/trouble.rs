//! What goes wrong, and whom others may blame for it.

use core::time::Duration;

use super::super::build::Network;
use super::director::{Director, Event};
use super::stream::PATIENCE;
use super::world::Trouble;
use crate::NodeId;

/// What is shorter than this must be survived.
const SHORT: Duration = Duration::from_millis(300);

impl Director {
    pub(super) fn trouble(&mut self, network: &mut Network<'_>, trouble: Trouble) {
        network.note(|| format!("{trouble:?}"));
        let silent = match trouble {
            Trouble::ControllerDies { down: length }
            | Trouble::ControllerStands { length }
            | Trouble::ControlCut { length, .. }
            // What it was told meanwhile is lost where the controller dies before it goes on.
            | Trouble::Stands { length, .. } => Some(length),
            Trouble::Break { .. } => Some(Duration::ZERO),
            _ => None,
        };
        if let Some(length) = silent {
            // Attempts to come back are a second apart.
            let until = network.after(length + Duration::from_secs(5));
            self.silent_until = self.silent_until.max(until);
        }
        match trouble {
            Trouble::ControllerDies { down } => {
                if self.process.controller.is_some() {
                    self.tally.one("controllers that died");
                    self.kill_controller(network);
                    self.plan(network, down, Event::StartController);
                }
            }
            Trouble::ControllerStands { length } => {
                self.tally.one("controllers that stood still");
                self.stop_controller(network, length);
            }
            Trouble::Break { machine } => {
                if let Some(stream) = self.stream_of(machine) {
                    self.break_stream(network, stream);
                }
            }
            Trouble::ControlCut { machine, length } => {
                self.tally.one("control connections cut");
                if length > SHORT && machine < self.world.hosts {
                    self.blame(machine);
                }
                let until = network.after(length);
                self.streams.cut(machine, until);
                if length > PATIENCE
                    && let Some(stream) = self.stream_of(machine)
                {
                    self.plan(network, PATIENCE, Event::Break { stream });
                }
            }
            Trouble::RankDies { machine } => self.rank_dies(network, machine),
            Trouble::JobDies { job } => {
                self.tally.one("jobs that were killed");
                self.job_dies(network, job);
            }
            Trouble::SwitchDies { machine, down } => {
                if self.switch(machine).up {
                    self.tally.one("switches that died");
                    self.blame_anybody();
                    self.kill_switch(network, machine);
                    self.plan(network, down, Event::StartSwitch { machine });
                }
            }
            Trouble::Stands { machine, length } => {
                if !self.life(machine).1 {
                    return;
                }
                self.tally.one("processes that stood still");
                let until = network.after(length);
                let end = self.stands.entry(machine).or_insert(until);
                *end = (*end).max(until);
                let until = *end;
                network.with_machine(NodeId(machine), |it, _| it.stand_still(until));
                self.hurt(network, machine, length);
            }
            Trouble::DataCut { machine, length } => {
                self.tally.one("links cut");
                self.cuts[machine] += 1;
                self.links[machine].iter().for_each(|&link| network.set_cut(link, true));
                self.plan(network, length, Event::Heal { machine });
                self.hurt(network, machine, length);
                if length > SHORT {
                    // Who is cut off says that the others are.
                    self.blame_anybody();
                }
            }
        }
    }

    fn hurt(&mut self, network: &Network<'_>, machine: usize, length: Duration) {
        if length <= SHORT {
            return;
        }
        self.hurt_until = self.hurt_until.max(network.after(length));
        if machine < self.world.hosts {
            self.blame(machine);
        } else {
            self.blame_anybody();
        }
    }
}
