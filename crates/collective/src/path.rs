//! By which way a rank's collectives go.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use millstream_inc::{CollectiveCall, UnknownName};

use crate::CollectiveError;
use crate::control::Sender;
use crate::engine::Engine;
use crate::failover::{Failover, FailoverReport, Host};
use crate::hosted::HostedSwitch;
use crate::local::LocalEngine;
use crate::tree::Work;

/// By which way collectives may go.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Path {
    /// Through shared memory among the ranks of one machine, container and user; over switches between such hosts, where
    /// there are several.
    #[default]
    Auto,
    /// Over switches, also on one machine. One rank that says so decides for all.
    Switch,
    /// Through shared memory alone. Where that cannot be, joining fails and says why.
    SharedMemory,
}

/// By which way the collectives of a communicator go.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Route {
    /// Over switches, each rank for itself.
    Switch,
    /// Through shared memory.
    SharedMemory,
    /// Through shared memory among the ranks of a host, of which the lowest goes over switches to the other hosts.
    Hosts,
}

impl Route {
    /// The name that reports use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Switch => Path::Switch.name(),
            Self::SharedMemory => Path::SharedMemory.name(),
            Self::Hosts => "hosts",
        }
    }
}

impl Path {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Switch, Self::SharedMemory];

    /// The name that settings use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Switch => "switch",
            Self::SharedMemory => "shared-memory",
        }
    }
}

impl FromStr for Path {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        const KNOWN: &[&str] = &[Path::Auto.name(), Path::Switch.name(), Path::SharedMemory.name()];
        let found = Self::ALL.into_iter().find(|path| path.name() == name);
        found.ok_or_else(|| UnknownName { what: "path", name: name.to_owned(), known: KNOWN })
    }
}

/// What does the collectives of a rank.
#[derive(Clone)]
pub(crate) enum Way {
    Switch(Arc<Engine>),
    /// Over switches, and others when one is lost.
    Failover(Arc<Failover>),
    SharedMemory(Arc<LocalEngine>),
    /// As above, among hosts that go on over other switches when one is lost.
    Host(Arc<Host>),
}

/// The same of all.
macro_rules! either {
    ($way:expr, $engine:ident => $call:expr) => {
        match $way {
            Way::Switch($engine) => $call,
            Way::Failover($engine) => $call,
            Way::SharedMemory($engine) => $call,
            Way::Host($engine) => $call,
        }
    };
}

impl Way {
    /// Whether the vector of a call is copied, and needs no registered memory.
    pub(crate) fn copies(&self, call: &CollectiveCall) -> bool {
        match self {
            Self::Switch(engine) => engine.is_small(call),
            Self::Failover(failover) => failover.copies(call),
            Self::SharedMemory(_) | Self::Host(_) => true,
        }
    }

    /// Starts a collective; returns its number. One that is `unattended` goes on though nobody waits for it.
    pub(crate) fn start(&self, work: &Work, unattended: bool) -> Result<u64, CollectiveError> {
        match self {
            Self::Switch(engine) => engine.start(work),
            Self::Failover(failover) => failover.begin(work),
            Self::SharedMemory(engine) => engine.start(work, unattended),
            Self::Host(host) => host.local().start(work, unattended),
        }
    }

    /// As above, on switches. `None` when others were looked for, for at most so long: the caller looks at what time there is,
    /// and tries again.
    pub(crate) fn start_within(
        &self,
        work: &Work,
        patience: Duration,
    ) -> Option<Result<u64, CollectiveError>> {
        match self {
            Self::Failover(failover) => failover.begin_within(work, patience),
            _ => Some(self.start(work, false)),
        }
    }

    /// Waits for a collective that was started, for at most so long. Once it is over, its memory is its owner's again.
    pub(crate) fn wait(
        &self,
        sequence: u64,
        patience: Duration,
    ) -> Option<Result<(), CollectiveError>> {
        either!(self, engine => engine.wait(sequence, patience))
    }

    pub(crate) fn fail(&self, error: CollectiveError) {
        either!(self, engine => engine.fail(error));
    }

    /// Ends the communicator with this reason, unless the collective is over.
    pub(crate) fn cancel(&self, sequence: u64, error: CollectiveError) -> bool {
        either!(self, engine => engine.cancel(sequence, error))
    }

    /// What the ranks of this host do in the memory that they share, if they do.
    pub(crate) fn local(&self) -> Option<&Arc<LocalEngine>> {
        match self {
            Self::Switch(_) | Self::Failover(_) => None,
            Self::SharedMemory(engine) => Some(engine),
            Self::Host(host) => Some(host.local()),
        }
    }

    pub(crate) fn route(&self) -> Route {
        match self.local() {
            None => Route::Switch,
            Some(engine) if engine.members().has_others() => Route::Hosts,
            Some(_) => Route::SharedMemory,
        }
    }

    /// Those that this rank shares memory with, itself included.
    pub(crate) fn sharing(&self) -> &[u32] {
        self.local().map_or(&[], |engine| engine.members().ranks())
    }

    /// Waits until everyone has left, so that the switch does not take this rank for dead meanwhile. In shared memory
    /// nobody needs a rank that has left, unless it is connected to switches.
    pub(crate) fn wait_closed(&self, patience: Duration) {
        either!(self, engine => engine.wait_closed(patience));
    }

    pub(crate) fn wait_released(&self) {
        either!(self, engine => engine.wait_released());
    }

    /// Which tree the communicator failed of.
    pub(crate) fn failed_tree(&self) -> usize {
        match self {
            Self::Switch(engine) => engine.failed_tree(),
            Self::Failover(failover) => failover.failed_tree(),
            Self::SharedMemory(engine) => engine.wire().map_or(0, Self::failed_tree),
            Self::Host(host) => host.local().wire().map_or(0, Self::failed_tree),
        }
    }

    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        either!(self, engine => engine.failure())
    }

    pub(crate) fn progress(&self) -> (u64, bool) {
        either!(self, engine => engine.progress())
    }

    pub(crate) fn disconnect(&self) {
        match self {
            Self::Switch(engine) => engine.disconnect(),
            Self::SharedMemory(engine) => engine.disconnect(),
            Self::Failover(failover) => failover.close(),
            Self::Host(host) => host.close(),
        }
    }

    /// The connection to the controller, if there may be another one than at first.
    pub(crate) fn sender(&self) -> Option<Arc<Sender>> {
        match self {
            Self::Failover(failover) => Some(failover.sender()),
            Self::Host(host) => Some(host.sender()),
            Self::Switch(_) | Self::SharedMemory(_) => None,
        }
    }

    /// The switch of this process, if there was none at first.
    pub(crate) fn hosted(&self) -> Option<Arc<HostedSwitch>> {
        match self {
            Self::Failover(failover) => failover.hosted(),
            Self::Host(host) => host.hosted(),
            Self::Switch(_) | Self::SharedMemory(_) => None,
        }
    }

    /// How it has gone on over other trees.
    pub(crate) fn failovers(&self) -> Vec<FailoverReport> {
        match self {
            Self::Failover(failover) => failover.reports(),
            Self::Host(host) => host.reports(),
            Self::Switch(_) | Self::SharedMemory(_) => Vec::new(),
        }
    }
}
