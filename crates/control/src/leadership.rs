//! A controller with a state: whether it leads, with what term, and what of its communicators is stored.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millstream_inc::controller::{Controller, Record, StandBy};
use millstream_inc::election::{Election, Event, Reply};
use millstream_roce::Instant;

use crate::state::Keeper;

/// Until when the leader of this lease commands. What is sent is held against it at the last moment.
#[derive(Debug, Default)]
pub(crate) struct Lease(AtomicU64);

impl Lease {
    fn set(&self, until: Option<Instant>) {
        self.0.store(until.unwrap_or_default().nanos(), Ordering::Release);
    }

    /// Whether it lasts.
    pub(crate) fn lasts(&self) -> bool {
        millstream_net::now().nanos() < self.0.load(Ordering::Acquire)
    }
}

/// What the controller becomes.
pub(crate) enum Turn {
    /// It leads with this term, and knows these records.
    Lead(u64, Vec<Record>),
    /// It does not lead any more.
    StandBy,
}

/// The part of a controller in the election.
pub(crate) struct Leadership {
    election: Election,
    keeper: Keeper,
    /// Where others find this one.
    advertise: SocketAddr,
    lease: Arc<Lease>,
    /// What was last said to be wrong with the store.
    told: Option<String>,
}

impl fmt::Debug for Leadership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leadership").field("election", &self.election).finish_non_exhaustive()
    }
}

impl Leadership {
    pub(crate) fn new(keeper: Keeper, advertise: SocketAddr) -> Self {
        let election = Election::new();
        Self { election, keeper, advertise, lease: Arc::default(), told: None }
    }

    /// The store has answered.
    pub(crate) fn handle_reply(&mut self, now: Instant, reply: Reply) {
        self.election.handle_reply(now, reply);
    }

    /// When [`Leadership::step`] is to be called next.
    pub(crate) fn at(&self) -> Option<Instant> {
        self.election.poll_timeout()
    }

    /// Under what lease is sent what the controller says; none of one that does not lead, which says so.
    pub(crate) fn lease(&self, controller: &Controller) -> Option<Arc<Lease>> {
        controller.leads().then(|| Arc::clone(&self.lease))
    }

    /// Whether what the controller says may be sent: not without a lease that lasts.
    pub(crate) fn may_speak(&self, controller: &Controller) -> bool {
        !controller.leads() || self.lease.lasts()
    }

    /// What is due. It asks the store; whoever leads and stands down is told by the answer.
    pub(crate) fn step(&mut self, now: Instant, controller: &mut Controller) -> Option<Turn> {
        self.election.handle_timeout(now);
        if controller.leads() && self.election.leads_until().is_some() {
            // Not before what was to be written is: what changes often is written as it is then.
            for _ in 0..self.election.room() {
                let Some(change) = controller.poll_record() else { break };
                self.election.change(change);
            }
        }
        if let Some(request) = self.election.poll_request(now) {
            self.keeper.ask(request);
        }
        self.lease.set(self.election.leads_until());
        self.tell();
        controller.set_controllers(self.election.controllers());
        let mut turn = None;
        while let Some(event) = self.election.poll_event() {
            turn = Some(match event {
                Event::Lead { term, records } => self.lead(term, records),
                Event::StandDown { reason } => {
                    tracing::warn!(reason, "this controller does not lead any more");
                    // What is still to be sent was said under the old one.
                    self.lease.set(None);
                    self.lease = Arc::default();
                    Turn::StandBy
                }
            });
        }
        if turn.is_none() && !controller.leads() {
            controller.stand_by(self.standby());
        }
        turn
    }

    fn lead(&mut self, term: u64, records: Vec<(String, String)>) -> Turn {
        let mut known = Vec::new();
        for (key, text) in records {
            match Record::parse(&key, &text) {
                Ok(record) => known.push(record),
                Err(error) => {
                    tracing::warn!(%error, "a record of a communicator is taken away");
                    self.election.change((key, None));
                }
            }
        }
        tracing::info!(term, communicators = known.len(), "this controller leads");
        Turn::Lead(term, known)
    }

    /// Why it does not lead.
    pub(crate) fn standby(&self) -> StandBy {
        let leader = self.election.leader().filter(|&leader| leader != self.advertise);
        StandBy { leader, trouble: self.election.trouble().map(str::to_owned) }
    }

    /// Says what is wrong with the store when that changes.
    fn tell(&mut self) {
        let trouble = self.election.trouble();
        if trouble != self.told.as_deref() {
            match trouble {
                Some(trouble) => tracing::warn!(trouble, "the state cannot be used"),
                None => tracing::info!("the state can be used again"),
            }
            self.told = trouble.map(str::to_owned);
        }
    }

    /// Lets another one lead at once.
    pub(crate) fn resign(self) {
        if let Some(request) = self.election.resign() {
            self.keeper.end(request);
        }
    }
}
