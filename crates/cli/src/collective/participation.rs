//! One host of a group: how it joins.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use millstream_collective::{
    Awaited, Communicator, JoinConfig, JoinError, MAX_TREES, Refusal, Waiting,
};
use millstream_verbs::Device;

use super::work::{Fallback, KeepOverwritten, Path, Reduction};
use crate::control_proofs::Proofs;
use crate::device::{Choice, Chosen};
use crate::failure::usage;
use crate::note::note;
use crate::{address, controller, units};

/// The most hosts in a group.
pub(crate) const MAX_HOSTS: u32 = 65_536;

/// How long a rank waits in silence before it says for what.
const SILENCE: Duration = Duration::from_secs(2);
/// How often it says so again while nothing changes.
const REMINDER: Duration = Duration::from_secs(10);
/// Between attempts to reach a controller that is not there yet.
const RETRY: Duration = Duration::from_millis(100);

/// Arguments of all commands that are one host of a group.
#[derive(Args, Debug)]
pub(crate) struct Participation {
    /// The controller's HOST:PORT, several with commas between if they share their state
    #[arg(long, value_name = "ADDR,...", default_value = controller::DEFAULT)]
    pub(super) controller: String,
    /// The group to take part in
    #[arg(long, value_name = "G", default_value = "default")]
    pub(super) group: String,
    /// Hosts in the group
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_HOSTS)))]
    pub(super) world: u32,
    /// This host's place among them, from 0
    #[arg(long, value_name = "R")]
    pub(super) rank: u32,
    /// Bytes of the vector, several with commas between, one after the other
    #[arg(long, value_name = "S,...", required = true, value_delimiter = ',', value_parser = units::size)]
    pub(super) size: Vec<u64>,
    #[command(flatten)]
    pub(super) reduction: Reduction,
    /// By which way the ranks reach each other
    #[arg(long, value_enum, default_value_t = Path::Auto)]
    pub(super) path: Path,
    /// Divides a machine: only ranks with the same label can share memory
    #[arg(long, value_name = "L")]
    pub(super) host_label: Option<String>,
    /// Sums, products and averages of floats do not depend on which host comes first
    #[arg(long)]
    pub(super) reproducible: bool,
    /// What becomes of a group for which there is no switch; one rank that says `off` decides
    #[arg(long, value_enum, default_value_t = Fallback::On)]
    pub(super) fallback: Fallback,
    /// What becomes of a call in place when a switch dies; each rank for itself
    #[arg(long, value_enum, default_value_t = KeepOverwritten::On)]
    pub(super) keep_overwritten: KeepOverwritten,
    /// How often, for each size
    #[arg(long, value_name = "I", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) iters: u32,
    /// How often before that, without a figure
    #[arg(long, value_name = "I", default_value_t = 0)]
    pub(super) warmup_iters: u32,
    /// Check every element of every result
    #[arg(long)]
    pub(super) verify: bool,
    /// Wait up to so long for a controller that is not there yet
    #[arg(long, value_name = "D", default_value = "0s", value_parser = units::duration)]
    pub(super) wait: Duration,
    /// Fail when other ranks or a switch are missing for so long, or a collective takes longer
    /// [default: 30s for ranks and a switch, 60s for a collective]
    #[arg(long, value_name = "D", value_parser = units::duration)]
    pub(super) timeout: Option<Duration>,
    #[command(flatten)]
    pub(super) proofs: Proofs,
    #[command(flatten)]
    pub(super) device: Choice,
    /// Print one JSON object for each size
    #[arg(long)]
    pub(super) json: bool,
}

/// Joins the group, and says what it waits for when that takes long.
pub(super) fn join(arguments: &Participation) -> anyhow::Result<Communicator> {
    let &Participation { world, rank, wait, timeout, .. } = arguments;
    let lookup_time = timeout.unwrap_or(address::LOOKUP_TIME);
    let controllers = address::resolve_controllers(&arguments.controller, lookup_time)?;
    let peer = controllers.first().ip();
    let chosen = arguments.device.resolve_all()?;
    if chosen.len() > MAX_TREES {
        let count = chosen.len();
        return Err(usage(format!(
            "--bind is given {count} times: a rank has up to {MAX_TREES} trees"
        )));
    }
    let open = |chosen: &Chosen| chosen.open(peer, Instant::now());
    let mut devices = chosen.iter().map(open).collect::<anyhow::Result<Vec<Device>>>()?;
    let more_devices = devices.split_off(1);
    let device = devices.remove(0);
    let mut config = JoinConfig::new(controllers.clone(), &arguments.group, world, rank, &device);
    config.more_devices = more_devices;
    config.path = arguments.path.into();
    config.host_label = arguments.host_label.clone().unwrap_or_default();
    config.reproducible = arguments.reproducible;
    config.fallback = arguments.fallback == Fallback::On;
    config.keep_overwritten = arguments.keep_overwritten == KeepOverwritten::On;
    config.token = arguments.proofs.token()?;
    config.tls = arguments.proofs.tls(&arguments.controller)?;
    config.timeout = timeout.unwrap_or(config.timeout);
    config.call_timeout = timeout.unwrap_or(config.call_timeout);
    let (start, mut announcer) = (Instant::now(), Announcer::new());
    loop {
        let joined = Communicator::join_reporting(&config, |waiting| {
            announcer.say(&awaited(arguments, waiting), waiting.left);
        });
        match joined {
            Err(JoinError::Unreachable { .. }) if start.elapsed() < wait => {
                let what = format!("the controller at {controllers}, which cannot be reached");
                announcer.say(&what, wait.saturating_sub(start.elapsed()));
                thread::sleep(RETRY.min(wait));
            }
            joined => {
                return joined.with_context(|| {
                    format!("rank {rank} of {world} cannot join group {}", arguments.group)
                });
            }
        }
    }
}

/// What a rank waits for, in words.
fn awaited(arguments: &Participation, waiting: &Waiting) -> String {
    let Participation { controller, group, world, .. } = arguments;
    match &waiting.awaited {
        None => match &waiting.refused {
            Some(reason @ Refusal::RankTaken { .. }) => {
                format!("the end of another process of this rank: {reason}")
            }
            Some(reason) => format!("room at the controller at {controller}: {reason}"),
            None => format!("an answer of the controller at {controller}"),
        },
        Some(ranks @ Awaited::Ranks { .. }) => format!("{ranks} of {world} in group {group}"),
        Some(other) => format!("{other} for group {group}"),
    }
}

/// Says on stderr what a rank waits for: not at once, when it changes, and now and then again.
struct Announcer {
    start: Instant,
    said: Option<(String, Instant)>,
}

impl Announcer {
    fn new() -> Self {
        Self { start: Instant::now(), said: None }
    }

    fn say(&mut self, what: &str, left: Duration) {
        let news = match &self.said {
            None => self.start.elapsed() >= SILENCE,
            Some((before, when)) => before != what || when.elapsed() >= REMINDER,
        };
        if news {
            note(&format!("waiting for {what}; giving up in {:.0} s", left.as_secs_f64()));
            self.said = Some((what.to_owned(), Instant::now()));
        }
    }
}
