//! A rank of a host that goes on over other trees: the memory that it shares, and its part in the search for trees.
//!
//! One rank of each host is on the wire, and goes on as one that is there for itself ([`Failover`]). The others only join with
//! it, so that the controller knows all ranks again ([`Beside`]).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::beside::Beside;
use super::{Failover, FailoverReport};
use crate::CollectiveError;
use crate::control::Sender;
use crate::engine::Engine;
use crate::hosted::HostedSwitch;
use crate::join::{JoinConfig, Joined};
use crate::local::LocalEngine;
use crate::path::Way;
use crate::watcher::Watched;

/// A rank that shares memory with others of its host.
pub(crate) struct Host {
    local: Arc<LocalEngine>,
    part: Part,
}

/// What it has to do with the wire.
enum Part {
    On(Arc<Failover>),
    Beside(Arc<Beside>),
}

impl Host {
    /// Of a rank that has joined, and does not share the memory yet.
    pub(crate) fn start(
        config: &JoinConfig,
        joined: Joined,
        local: &Arc<LocalEngine>,
    ) -> io::Result<Self> {
        let part = match joined.way {
            Way::Switch(_) => {
                let failover = Failover::start(config, joined, Some(local))?;
                local.connect(Way::Failover(Arc::clone(&failover)));
                Part::On(failover)
            }
            _ => Part::Beside(Beside::start(config, joined, local)?),
        };
        Ok(Self { local: Arc::clone(local), part })
    }

    pub(crate) const fn local(&self) -> &Arc<LocalEngine> {
        &self.local
    }

    pub(crate) fn wait(
        &self,
        sequence: u64,
        patience: Duration,
    ) -> Option<Result<(), CollectiveError>> {
        self.local.wait(sequence, patience)
    }

    pub(crate) fn fail(&self, error: CollectiveError) {
        self.local.fail(error);
    }

    pub(crate) fn cancel(&self, sequence: u64, error: CollectiveError) -> bool {
        self.local.cancel(sequence, error)
    }

    pub(crate) fn failure(&self) -> Option<CollectiveError> {
        self.local.failure()
    }

    /// As of [`Failover::progress`]: others may need this rank to go on.
    pub(crate) fn progress(&self) -> (u64, bool) {
        let (started, is_running) = self.local.progress();
        if is_running {
            return (started, is_running);
        }
        match &self.part {
            Part::On(failover) => {
                failover.progress();
            }
            Part::Beside(beside) => beside.settle(),
        }
        self.local.progress()
    }

    pub(crate) fn wait_closed(&self, patience: Duration) {
        match &self.part {
            Part::On(failover) => failover.wait_closed(patience),
            // Nobody needs it.
            Part::Beside(_) => {}
        }
    }

    pub(crate) fn wait_released(&self) {
        match &self.part {
            Part::On(failover) => failover.wait_released(),
            Part::Beside(_) => self.local.wait_released(),
        }
    }

    pub(crate) fn close(&self) {
        // What is on the wire ends with that.
        self.local.disconnect();
        if let Part::Beside(beside) = &self.part {
            beside.close();
        }
    }

    pub(crate) fn sender(&self) -> Arc<Sender> {
        match &self.part {
            Part::On(failover) => failover.sender(),
            Part::Beside(beside) => beside.sender(),
        }
    }

    pub(crate) fn hosted(&self) -> Option<Arc<HostedSwitch>> {
        match &self.part {
            Part::On(failover) => failover.hosted(),
            Part::Beside(_) => None,
        }
    }

    pub(crate) fn reports(&self) -> Vec<FailoverReport> {
        match &self.part {
            Part::On(failover) => failover.reports(),
            Part::Beside(beside) => beside.reports(),
        }
    }
}

/// Trees that a host goes on from when they are lost. What is wrong with them is looked at there, and not said to the host.
pub(crate) struct OnWire {
    pub(crate) local: Arc<LocalEngine>,
    pub(crate) engine: Arc<Engine>,
}

impl Watched for OnWire {
    fn probe(&self) {
        self.engine.probe();
    }

    fn failure(&self) -> Option<CollectiveError> {
        self.engine.failure()
    }

    fn fail(&self, error: CollectiveError) {
        self.engine.fail(error);
    }

    /// Collectives are counted as the host's ranks call them.
    fn peer_left(&self, rank: u32, collectives: u64) {
        self.local.peer_left(rank, collectives);
    }

    fn has_departed(&self) -> bool {
        self.local.has_departed()
    }

    fn close(&self) {
        self.engine.close();
    }
}
