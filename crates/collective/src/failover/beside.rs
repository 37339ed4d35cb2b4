//! A rank of a host another rank of which is on the wire: when that looks for other trees, this one joins with it.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use millstream_inc::protocol::GroupIdentity;
use millstream_net::ends_between_forks;

use super::meeting::{Meeting, Rejoining};
use super::recovery::name;
use super::state::is_loss;
use super::{FailoverReport, longest_search};
use crate::CollectiveError;
use crate::control::{Sender, given_up};
use crate::coordinator::Rendezvous;
use crate::join::{JoinConfig, Joined};
use crate::joining::Cancellation;
use crate::local::{LocalEngine, Recovery};
use crate::memory::Domains;
use crate::watcher::{Watched, Watcher};

/// How often who waits for a report looks whether there will be one.
const LOOK: Duration = Duration::from_millis(50);

/// The rank.
pub(super) struct Beside {
    config: JoinConfig,
    domains: Domains,
    local: Arc<LocalEngine>,
    state: Mutex<State>,
    /// There is a further report.
    changed: Condvar,
}

struct State {
    sender: Arc<Sender>,
    /// None once it is closed.
    watcher: Option<Watcher>,
    identity: (GroupIdentity, u64),
    rendezvous: Option<Rendezvous>,
    /// It has joined so often anew.
    generation: u32,
    reports: Vec<FailoverReport>,
    /// Ends the search for others.
    cancellation: Cancellation,
    is_closed: bool,
}

impl Beside {
    pub(super) fn start(
        config: &JoinConfig,
        joined: Joined,
        local: &Arc<LocalEngine>,
    ) -> io::Result<Arc<Self>> {
        let Joined { domains, sender, watcher, identity, rendezvous, .. } = joined;
        let state = State {
            sender,
            watcher: Some(watcher),
            identity,
            rendezvous,
            generation: 0,
            reports: Vec::new(),
            cancellation: Cancellation::default(),
            is_closed: false,
        };
        let (config, local, state) = (config.clone(), Arc::clone(local), Mutex::new(state));
        let changed = Condvar::new();
        let beside = Arc::new(Self { config, domains, local, state, changed });
        let watch = Arc::clone(&beside);
        thread::Builder::new()
            .name("failover".to_owned())
            .spawn(ends_between_forks(move || watch.run()))?;
        Ok(beside)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves nothing half done that matters more than going on.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins whenever its host looks for other trees, until the communicator is over or closed.
    fn run(&self) {
        let mut generation = 0;
        while self.await_recovery(Recovery { generation, is_under_way: false }) {
            generation += 1;
            let since = Instant::now();
            let lost = || CollectiveError::Protocol("nobody says why trees are lost".to_owned());
            let error = self.local.loss().unwrap_or_else(lost);
            let fallback = match self.rejoin(generation, &error) {
                Ok(fallback) => fallback,
                Err(error) => return self.local.cut_off(error),
            };
            if !self.await_recovery(Recovery { generation, is_under_way: true }) {
                return;
            }
            let (reason, took) = (error.to_string(), since.elapsed());
            // It is connected to none.
            let switches = Vec::new();
            self.lock().reports.push(FailoverReport { reason, switches, fallback, took });
            self.changed.notify_all();
        }
    }

    /// Waits until the search for trees is at something else than this; `false` when nobody waits for that any more.
    fn await_recovery(&self, at: Recovery) -> bool {
        loop {
            if self.is_over().is_some() {
                return false;
            }
            match self.local.recovery() {
                Some(found) if found != at => return true,
                // The ranks of this host do not share memory yet, or nothing has changed.
                _ => self.local.sleep_while(at),
            }
            // Where nobody calls, nobody else looks.
            if at.is_under_way
                && let Some(error) = self.local.lost_wire()
            {
                self.local.cut_off(error);
            }
        }
    }

    fn is_over(&self) -> Option<CollectiveError> {
        if self.lock().is_closed {
            return Some(CollectiveError::Closed);
        }
        self.local.failure()
    }

    /// Joins for the trees of this generation. Gives why the ranks take the place of switches, if they do.
    fn rejoin(
        &self,
        generation: u32,
        error: &CollectiveError,
    ) -> Result<Option<String>, CollectiveError> {
        let mut state = self.lock();
        let meeting = Meeting {
            name: name(&self.config.group, state.identity, generation),
            rendezvous: state.rendezvous.take(),
            cancellation: state.cancellation.clone(),
            // Who is on the wire says them.
            avoid: Vec::new(),
            learned: state.sender.learned().clone(),
        };
        drop(state);
        let rejoining = Rejoining {
            config: &self.config,
            domains: &self.domains,
            local: Some(&self.local),
            error,
            // Of rank 0, which is on the wire.
            shape: (0, 0),
            is_over: &|| self.is_over(),
        };
        let (joined, _) = rejoining.join(meeting)?;
        let Joined { sender, watcher, identity, rendezvous, fallback, .. } = joined;
        let mut state = self.lock();
        if state.is_closed {
            drop(state);
            drop(watcher);
            return Err(CollectiveError::Closed);
        }
        (state.sender, state.identity, state.rendezvous) = (sender, identity, rendezvous);
        state.generation = generation;
        let old = state.watcher.replace(watcher);
        drop(state);
        // Its thread may be waiting for the controller.
        drop(old);
        self.local.reopen();
        Ok(fallback)
    }

    /// Waits until its host does not look for other trees.
    pub(super) fn settle(&self) {
        let end = Instant::now() + longest_search(self.config.call_timeout);
        while let Some(at) = self.local.recovery()
            && (at.is_under_way || self.lock().generation != at.generation)
            && self.is_over().is_none()
            && Instant::now() < end
        {
            self.local.sleep_while(at);
        }
    }

    /// The connection to the controller that there is now.
    pub(super) fn sender(&self) -> Arc<Sender> {
        Arc::clone(&self.lock().sender)
    }

    /// How it has gone on. Of what is over its own thread may be about to say that.
    pub(super) fn reports(&self) -> Vec<FailoverReport> {
        let told = |state: &State| match self.local.recovery() {
            Some(at) if !at.is_under_way => state.reports.len() >= at.generation as usize,
            _ => true,
        };
        let mut state = self.lock();
        while !told(&state) && !state.is_closed && self.local.failure().is_none() {
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.reports.clone()
    }

    /// Ends its connection, and its thread soon.
    pub(super) fn close(&self) {
        let error = self.local.failure().unwrap_or(CollectiveError::Closed);
        let cause = self.local.cause(&error);
        let mut state = self.lock();
        state.is_closed = true;
        let watcher = state.watcher.take();
        state.cancellation.cancel(given_up(&error, cause));
        drop(state);
        self.local.wake_recovery();
        drop(watcher);
    }
}

/// What a rank has that another one is on the wire for: that one says what becomes of a lost switch.
pub(crate) struct BesideWire(pub(crate) Arc<LocalEngine>);

impl Watched for BesideWire {
    /// Who is on the wire asks.
    fn probe(&self) {}

    fn failure(&self) -> Option<CollectiveError> {
        self.0.failure()
    }

    fn fail(&self, error: CollectiveError) {
        // Before that the one on the wire has no way to say it.
        if is_loss(&error) && self.0.recovery().is_some() {
            tracing::debug!(%error, "the rank of this host that is connected to switches goes on");
        } else {
            self.0.fail(error);
        }
    }

    fn peer_left(&self, rank: u32, collectives: u64) {
        self.0.peer_left(rank, collectives);
    }

    fn has_departed(&self) -> bool {
        self.0.has_departed()
    }

    fn close(&self) {
        self.0.close();
    }
}
