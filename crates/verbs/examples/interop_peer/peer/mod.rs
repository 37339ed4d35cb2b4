//! The two sides of a conformance run, and what they say to each other.
//!
//! One side leads: it goes through the cases, tells the other which comes next and in which role,
//! and reports. Each case is run twice, with each side as the requester once.

pub(crate) mod arena;
mod cases;
mod control;
mod link;
mod relay;

use std::fmt;
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use millstream_verbs::{Device, Driver};

use self::cases::Case;
use self::control::Control;
use self::link::Link;
use self::relay::Relay;

/// Which side of a case one is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Role {
    Requester,
    Responder,
}

impl Role {
    fn other(self) -> Self {
        match self {
            Self::Requester => Self::Responder,
            Self::Responder => Self::Requester,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Requester => "requester",
            Self::Responder => "responder",
        })
    }
}

/// Why a case cannot be run here.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Skip(pub(crate) String);

/// How a case ended, with this side's role in it.
pub(crate) struct Report {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) outcome: Outcome,
    pub(crate) time: Duration,
}

pub(crate) enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
}

/// A case in one of its directions, as [`lead`] runs it.
pub(crate) struct Entry {
    pub(crate) name: String,
    /// The leader's.
    pub(crate) role: Role,
    needs_relay: bool,
    needs_whole_icrc: bool,
}

impl Entry {
    /// Whether the leader can run it on a device with this driver, with or without a relay on the
    /// link.
    pub(crate) fn runs_with(&self, driver: Driver, relay: bool) -> bool {
        (driver == Driver::Packet || !self.needs_whole_icrc) && (relay || !self.needs_relay)
    }
}

/// What [`lead`] can run, in its order.
pub(crate) fn entries() -> Vec<Entry> {
    let entry = |case: &Case, role| {
        let needs_relay = case.faults.is_some();
        let needs_whole_icrc = case.whole_icrc;
        Entry { name: case.name.clone(), role, needs_relay, needs_whole_icrc }
    };
    let cases = cases::all();
    cases.iter().flat_map(|case| case.roles.iter().map(|&role| entry(case, role))).collect()
}

/// Runs the cases for which `wanted` says so, and reports each. `relay` is the socket of a relay on
/// the link.
pub(crate) fn lead(
    device: &Device,
    stream: TcpStream,
    relay: Option<&Path>,
    wanted: impl Fn(&str, Role) -> bool,
    mut report: impl FnMut(Report),
) -> Result<()> {
    let mut relay = relay.map(Relay::connect).transpose()?;
    let mut control = Control::new(stream)?;
    for case in cases::all() {
        for &role in case.roles.iter().filter(|&&role| wanted(&case.name, role)) {
            if case.faults.is_some() && relay.is_none() {
                let outcome = Outcome::Skipped("there is no relay on the link".to_owned());
                report(Report { name: case.name.clone(), role, outcome, time: Duration::ZERO });
                continue;
            }
            control.say("case", &format!("{} {}", role.other(), case.name))?;
            if let Some(relay) = &mut relay {
                relay.command(if case.is_recorded() { "record" } else { "pause" })?;
                if let Some(faults) = case.faults {
                    relay.command(faults.command)?;
                }
            }
            let start = Instant::now();
            let dropped = device.counters().dropped_icrc;
            let ours = conduct(&case, role, device, &mut control, relay.as_mut());
            let theirs = control.end(&describe(&ours)).with_context(|| {
                format!("{role} of {:?}, which ended here as {:?}", case.name, describe(&ours))
            })?;
            let dropped = device.counters().dropped_icrc - dropped;
            let ours = ours.and_then(|()| match case.faults {
                None if dropped > 0 => bail!("{dropped} packets of the peer had a wrong ICRC"),
                _ => Ok(()),
            });
            let ours = match (relay.as_mut(), case.faults) {
                (Some(relay), Some(faults)) => {
                    let counters = relay.command("counters")?;
                    relay.command("pass")?;
                    ours.and_then(|()| happened(&counters, faults.seen))
                }
                _ => ours,
            };
            let outcome = match (&ours, theirs.as_str()) {
                (Ok(()), control::OK) => Outcome::Passed,
                (Err(error), _) if error.is::<Skip>() => Outcome::Skipped(error.to_string()),
                (_, theirs) if theirs.starts_with("skipped: ") => {
                    Outcome::Skipped(theirs.trim_start_matches("skipped: ").to_owned())
                }
                (Ok(()), theirs) => Outcome::Failed(format!("{}: {theirs}", role.other())),
                (Err(error), theirs) => {
                    Outcome::Failed(format!("{role}: {error:#}; {}: {theirs}", role.other()))
                }
            };
            report(Report { name: case.name.clone(), role, outcome, time: start.elapsed() });
        }
    }
    control.say("case", "")
}

/// Runs what the leader says, until it says that this was all.
pub(crate) fn follow(device: &Device, stream: TcpStream) -> Result<()> {
    let mut control = Control::new(stream)?;
    let cases = cases::all();
    loop {
        let next = control.hear("case")?;
        if next.is_empty() {
            return Ok(());
        }
        let (role, name) = next.split_once(' ').context("a case without a role")?;
        let role = match role {
            "requester" => Role::Requester,
            "responder" => Role::Responder,
            other => bail!("there is no role {other:?}"),
        };
        let ours = match cases.iter().find(|case| case.name == name) {
            Some(case) => conduct(case, role, device, &mut control, None),
            None => Err(anyhow!("there is no case {name:?}")),
        };
        control.end(&describe(&ours))?;
    }
}

/// Runs this side of a case.
fn conduct(
    case: &Case,
    role: Role,
    device: &Device,
    control: &mut Control,
    relay: Option<&mut Relay>,
) -> Result<()> {
    let mut link = Link::connect(device, control, relay, role, case.settings)?;
    (case.run)(&mut link)
}

/// Whether the relay's counters of these names are above 0.
fn happened(counters: &str, names: &[&str]) -> Result<()> {
    let words: Vec<&str> = counters.split(' ').collect();
    for name in names {
        let count = words.iter().position(|word| word == name).and_then(|at| words.get(at + 1));
        if count.is_none_or(|count| *count == "0") {
            bail!("no packet met what this case is about: {counters}");
        }
    }
    Ok(())
}

fn describe(outcome: &Result<()>) -> String {
    match outcome {
        Ok(()) => control::OK.to_owned(),
        Err(error) if error.is::<Skip>() => format!("skipped: {error}"),
        Err(error) => format!("failed: {error:#}"),
    }
}
