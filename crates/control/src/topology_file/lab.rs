//! The key `lab` of a topology file: what `millstream lab` needs beside the network.

use millstream_inc::topology::{LinkRate, Lower, Topology};

use super::entries::parsed;
use super::events::Events;
use super::{FileProblem, TopologyFileError};

const LAB: &[&str] = &["controller", "rate", "mtu"];

const A_PLACE: &str =
    "`machine`, which is one of its own, or a host or switch of this file, as host0 or switch7";

/// How the network is built on one machine. A controller reads it and does nothing with it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LabSettings {
    /// Where the controller runs.
    pub controller: ControllerPlace,
    /// What links carry that have no rate of their own; without one, as much as the machine does.
    pub rate: Option<LinkRate>,
    /// The MTU of links, in bytes.
    pub mtu: Option<u32>,
}

/// Where the controller of a lab runs.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum ControllerPlace {
    /// On a machine of its own.
    #[default]
    Machine,
    /// On the host of this number.
    Host(u64),
    /// Beside the switch of this number.
    Switch(u64),
}

/// The settings, and the line of the controller's place.
#[derive(Debug, Default)]
pub(super) struct Lab {
    pub(super) settings: LabSettings,
    place_line: Option<usize>,
}

pub(super) fn read(events: &mut Events<'_>) -> Result<Lab, TopologyFileError> {
    events.map("`lab`")?;
    events.place = "lab".to_owned();
    let mut lab = Lab::default();
    let mut seen = 0;
    while let Some(key) = events.key(LAB, &mut seen)? {
        match key {
            "controller" => {
                lab.settings.controller = events.value(key, A_PLACE, place)?;
                lab.place_line = Some(events.line);
            }
            "rate" => {
                let expected = "a rate of 1kbit to 1000tbit per second, as 100mbit or 10gbit";
                lab.settings.rate = Some(events.value(key, expected, parsed)?);
            }
            _ => {
                // IPv6 asks for 1280 (RFC 8200, section 5).
                let fits = |text: &str, plain| {
                    let mtu: Option<u32> = parsed(text, plain);
                    mtu.filter(|mtu| plain && (1280..=65_535).contains(mtu))
                };
                lab.settings.mtu = Some(events.value(key, "1280 to 65535 bytes", fits)?);
            }
        }
    }
    events.place.clear();
    Ok(lab)
}

impl Lab {
    /// Where the controller is to be is in the network. The line where that is not so.
    pub(super) fn check(&self, topology: &Topology) -> Result<(), (Option<usize>, FileProblem)> {
        let is_there = match self.settings.controller {
            ControllerPlace::Machine => true,
            ControllerPlace::Switch(id) => topology.switches().iter().any(|it| it.id == id),
            ControllerPlace::Host(id) => {
                topology.links().iter().any(|link| link.lower == Lower::Host(id))
            }
        };
        let value = match self.settings.controller {
            _ if is_there => return Ok(()),
            ControllerPlace::Switch(id) => format!("switch{id}"),
            ControllerPlace::Host(id) => format!("host{id}"),
            ControllerPlace::Machine => return Ok(()),
        };
        let problem = FileProblem::Value { key: "controller", value, expected: A_PLACE };
        Err((self.place_line, problem))
    }
}

fn place(text: &str, _plain: bool) -> Option<ControllerPlace> {
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|_| digits)
    };
    match (text, text.strip_prefix("host"), text.strip_prefix("switch")) {
        ("machine", ..) => Some(ControllerPlace::Machine),
        (_, Some(id), _) => number(id).map(ControllerPlace::Host),
        (_, _, Some(id)) => number(id).map(ControllerPlace::Switch),
        _ => None,
    }
}
