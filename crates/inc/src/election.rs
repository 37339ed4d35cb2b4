//! One of several controllers leads: an election over a store that has leases and transactions.
//!
//! Pure: answers of the store and time go in; requests to the store and events come out. There is one request at a time:
//! each that [`Election::poll_request`] gives is answered by one [`Election::handle_reply`].
//!
//! A candidate takes a lease and renews it. The leader's key is made in a transaction if it is absent, and goes with its
//! lease. All that a leader writes is written in transactions that compare the revision in which its key was made. The
//! lease counts from when the renewal was sent, by the candidate's own clock: the store counts from when it came, which is
//! later, so a leader stops before another one can begin. Where the store is so slow that the lease is to be renewed as soon
//! as it was, renewals and other requests take turns.

use core::net::SocketAddr;
use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use millstream_roce::Instant;

use crate::protocol::MAX_TERM;

#[cfg(test)]
mod tests;

/// Between attempts, and between questions whether there is a leader.
const RETRY: Duration = Duration::from_millis(500);

/// Between questions where all controllers are.
const LOOK: Duration = Duration::from_secs(2);

/// A lease is renewed after this part of its time.
const RENEW_PART: u32 = 5;

/// This part of a lease is not used: clocks do not run alike.
const MARGIN_PART: u32 = 10;

/// The most records that are read.
pub const MAX_RECORDS: usize = 4096;

/// The most changes in one request.
const MAX_CHANGES: usize = 16;

/// The most bytes of records in one request, unless one alone has more.
const MAX_CHANGE_BYTES: usize = 512 << 10;

/// The most changes that wait to be written.
const MAX_PENDING: usize = 4096;

/// A key below that of the records, and what it is to have; none to take it away.
pub type Change = (String, Option<String>);

/// What is asked of the store.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Request {
    /// A lease. While it lasts, the candidate's address is among those of the controllers.
    Grant,
    /// Let the lease live on.
    Renew {
        /// Which.
        lease: i64,
    },
    /// Make the leader's key, with this lease, if nobody has; read it, and the term.
    Campaign {
        /// Which lease.
        lease: i64,
    },
    /// Store a term, if the leader's key is of this revision and the term above the one that is stored.
    SetTerm {
        /// The revision in which the leader's key was made.
        revision: i64,
        /// The term.
        term: u64,
    },
    /// Read records.
    Load {
        /// After this key; none for the first ones.
        after: Option<String>,
    },
    /// Change records, if the leader's key is of this revision.
    Write {
        /// The revision in which the leader's key was made.
        revision: i64,
        /// The changes.
        changes: Vec<Change>,
    },
    /// End the lease, and what goes with it.
    Release {
        /// Which.
        lease: i64,
    },
    /// Read where all controllers are.
    List,
}

/// What the store answers.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Reply {
    /// To [`Request::Grant`].
    Granted {
        /// The lease.
        lease: i64,
        /// How long it lasts.
        time: Duration,
    },
    /// To [`Request::Renew`].
    Renewed {
        /// How long it lasts; none when it is over.
        time: Option<Duration>,
    },
    /// To [`Request::Campaign`].
    Campaigned {
        /// The revision in which the leader's key was made, if it has the lease of the request.
        revision: Option<i64>,
        /// The address in the leader's key.
        leader: Option<SocketAddr>,
        /// The term that is stored; 0 for none.
        term: u64,
    },
    /// To [`Request::SetTerm`].
    TermSet {
        /// Whether the leader's key is of the revision.
        leads: bool,
        /// The term that is stored now.
        term: u64,
    },
    /// To [`Request::Load`].
    Loaded {
        /// Records in the order of their keys.
        records: Vec<(String, String)>,
        /// Whether there are more.
        more: bool,
    },
    /// To [`Request::Write`].
    Written {
        /// Whether the leader's key is of the revision: otherwise nothing was changed.
        leads: bool,
    },
    /// To [`Request::Release`].
    Released,
    /// To [`Request::List`].
    Listed {
        /// Where all controllers are, this one included; none where the store does not keep that.
        controllers: Vec<SocketAddr>,
    },
    /// To any: it was not done, or it is not known whether it was.
    Failed {
        /// The store, and what is wrong with it.
        reason: String,
        /// The same may succeed later.
        again: bool,
    },
}

/// What has happened.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Event {
    /// This one leads.
    Lead {
        /// Above all terms that were stored.
        term: u64,
        /// What the leaders before have stored.
        records: Vec<(String, String)>,
    },
    /// It does no longer.
    StandDown {
        /// Why.
        reason: String,
    },
}

#[derive(Clone, Copy, Debug)]
struct Lease {
    id: i64,
    /// Until then it surely lasts.
    until: Instant,
    renew_at: Instant,
}

#[derive(Debug)]
enum Stage {
    /// Without a lease, or with the leader's key not its own.
    Candidate,
    /// It has the leader's key: its term is to be stored, and then what is stored to be read.
    Won {
        revision: i64,
        term: u64,
        stored: bool,
        records: Vec<(String, String)>,
    },
    Leading {
        revision: i64,
    },
}

/// A change that is to be written.
#[derive(Debug)]
struct Pending {
    /// Counts changes: a later one of the same key has a higher number.
    number: u64,
    value: Option<String>,
}

/// A candidate, and the leader if it is elected.
#[derive(Debug)]
pub struct Election {
    lease: Option<Lease>,
    stage: Stage,
    /// What was asked, and when.
    asked: Option<(Request, Instant)>,
    /// After a failure nothing is asked before.
    not_before: Instant,
    campaign_at: Instant,
    /// When to ask where all controllers are; none where the store does not keep that.
    list_at: Option<Instant>,
    /// The lease was renewed, and nothing else was asked since.
    renewed: bool,
    pending: BTreeMap<String, Pending>,
    changes: u64,
    /// The number of the last change in the request that is under way.
    writing: u64,
    leader: Option<SocketAddr>,
    controllers: Vec<SocketAddr>,
    trouble: Option<String>,
    events: VecDeque<Event>,
}

impl Default for Election {
    fn default() -> Self {
        Self::new()
    }
}

impl Election {
    /// One that has asked nothing yet.
    pub const fn new() -> Self {
        Self {
            lease: None,
            stage: Stage::Candidate,
            asked: None,
            not_before: Instant::ZERO,
            campaign_at: Instant::ZERO,
            list_at: None,
            renewed: false,
            pending: BTreeMap::new(),
            changes: 0,
            writing: 0,
            leader: None,
            controllers: Vec::new(),
            trouble: None,
            events: VecDeque::new(),
        }
    }

    /// Until when this one leads, if it does. It commands nobody from then on, whatever else it knows.
    pub fn leads_until(&self) -> Option<Instant> {
        match self.stage {
            Stage::Leading { .. } => self.lease.map(|lease| lease.until),
            _ => None,
        }
    }

    /// Has a record changed, if this one leads, as soon as the store can.
    pub fn change(&mut self, (key, value): Change) {
        if !matches!(self.stage, Stage::Leading { .. }) {
            return;
        }
        if self.pending.len() >= MAX_PENDING {
            // The store takes nothing. What it has too much the next leader takes away.
            self.trouble = Some("changes of communicators that were not stored are dropped".into());
            self.pending.clear();
        }
        self.changes += 1;
        self.pending.insert(key, Pending { number: self.changes, value });
    }

    /// How many changes would be written at once, by one request: none while others are to be written.
    pub fn room(&self) -> usize {
        let is_at_rest = matches!(self.stage, Stage::Leading { .. }) && self.pending.is_empty();
        if is_at_rest { MAX_CHANGES } else { 0 }
    }

    /// Who leads, as far as is known.
    pub const fn leader(&self) -> Option<SocketAddr> {
        self.leader
    }

    /// Where all controllers are, as far as is known.
    pub fn controllers(&self) -> &[SocketAddr] {
        &self.controllers
    }

    /// What was wrong with the store the last time that it was asked.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// What is to be asked when this one ends, so that another one leads at once.
    pub fn resign(&self) -> Option<Request> {
        self.lease.map(|lease| Request::Release { lease: lease.id })
    }

    /// The next request, when it is time for one.
    pub fn poll_request(&mut self, now: Instant) -> Option<Request> {
        self.handle_timeout(now);
        if self.asked.is_some() || self.next_request() > now {
            return None;
        }
        let others_wait = self.next_other().is_some_and(|at| at <= now);
        let lists = self.list_at.is_some_and(|at| at <= now);
        let request = match (self.lease, &mut self.stage) {
            (None, _) => Request::Grant,
            // Not again before the others' turn: a slow store would be asked nothing else.
            (Some(lease), _) if lease.renew_at <= now && !(self.renewed && others_wait) => {
                Request::Renew { lease: lease.id }
            }
            (Some(lease), Stage::Candidate) if self.campaign_at <= now => {
                Request::Campaign { lease: lease.id }
            }
            (_, Stage::Candidate) => Request::List,
            (_, &mut Stage::Won { revision, term, stored: false, .. }) => {
                Request::SetTerm { revision, term }
            }
            (_, Stage::Won { records, .. }) => {
                Request::Load { after: records.last().map(|(key, _)| key.clone()) }
            }
            (_, Stage::Leading { .. }) if lists => Request::List,
            (_, &mut Stage::Leading { revision }) => {
                Request::Write { revision, changes: self.batch() }
            }
        };
        self.renewed = false;
        self.asked = Some((request.clone(), now));
        Some(request)
    }

    /// Changes of one request.
    fn batch(&mut self) -> Vec<Change> {
        let mut changes: Vec<Change> = Vec::new();
        let mut bytes = 0;
        self.writing = self.changes;
        for (key, pending) in &self.pending {
            let more = pending.value.as_ref().map_or(0, String::len);
            if changes.len() >= MAX_CHANGES
                || (!changes.is_empty() && bytes + more > MAX_CHANGE_BYTES)
            {
                break;
            }
            bytes += more;
            changes.push((key.clone(), pending.value.clone()));
        }
        changes
    }

    /// When something is to be asked, if nothing is under way.
    fn next_request(&self) -> Instant {
        let at = match self.lease {
            None => Instant::ZERO,
            Some(lease) => self.next_other().map_or(lease.renew_at, |at| at.min(lease.renew_at)),
        };
        at.max(self.not_before)
    }

    /// When something else than the lease is to be asked for, with a lease.
    fn next_other(&self) -> Option<Instant> {
        let lists = self.list_at;
        match &self.stage {
            Stage::Candidate => Some(lists.map_or(self.campaign_at, |at| at.min(self.campaign_at))),
            Stage::Won { .. } => Some(Instant::ZERO),
            Stage::Leading { .. } if self.pending.is_empty() => lists,
            Stage::Leading { .. } => Some(Instant::ZERO),
        }
    }

    /// When [`Election::poll_request`] is to be called next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let lease = self.lease.map(|lease| lease.until);
        let request = self.asked.is_none().then(|| self.next_request());
        lease.into_iter().chain(request).min()
    }

    /// Acts on a lease that may be over.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.lease.is_some_and(|lease| lease.until <= now) {
            let why = self.trouble.as_deref().unwrap_or("this process stood still");
            let reason = format!("its lease was not renewed in time: {why}");
            self.lose(reason);
        }
    }

    /// It leads no longer, and has no lease that counts.
    fn lose(&mut self, reason: String) {
        if matches!(self.stage, Stage::Leading { .. }) {
            self.events.push_back(Event::StandDown { reason });
            self.leader = None;
        }
        self.stage = Stage::Candidate;
        self.lease = None;
        self.pending.clear();
    }

    /// The store has answered.
    pub fn handle_reply(&mut self, now: Instant, reply: Reply) {
        self.handle_timeout(now);
        let Some((request, sent)) = self.asked.take() else { return };
        // What was asked with a lease that is over changes nothing.
        match (request, reply) {
            (Request::List, Reply::Listed { controllers }) => {
                // Where the store keeps them, this one is among them.
                self.list_at = (!controllers.is_empty()).then(|| now + LOOK);
                self.controllers = controllers;
            }
            // Nobody needs it to lead.
            (Request::List, _) => {
                self.list_at = Some(now + LOOK);
                return;
            }
            (request, Reply::Failed { reason, again }) => {
                self.not_before = now + RETRY;
                if let Request::Write { changes, .. } = request
                    && !again
                {
                    self.written(&changes);
                }
                self.trouble = Some(reason);
                return;
            }
            (Request::Grant, Reply::Granted { lease, time }) if self.lease.is_none() => {
                self.lease = Some(Lease::new(lease, sent, time));
                (self.campaign_at, self.list_at) = (now, Some(now));
                self.handle_timeout(now);
            }
            (Request::Renew { lease }, Reply::Renewed { time })
                if self.lease.is_some_and(|it| it.id == lease) =>
            {
                match time {
                    Some(time) => {
                        self.lease = Some(Lease::new(lease, sent, time));
                        self.renewed = true;
                    }
                    None => self.lose("its lease was over before it was renewed".to_owned()),
                }
            }
            (Request::Campaign { lease }, Reply::Campaigned { revision, leader, term })
                if self.lease.is_some_and(|it| it.id == lease) =>
            {
                self.leader = leader;
                self.campaign_at = now + RETRY;
                if let Some(revision) = revision {
                    self.win(now, revision, term);
                    return;
                }
            }
            (Request::SetTerm { revision, term }, Reply::TermSet { leads, term: found }) => {
                self.term_set(revision, term, leads, found);
            }
            (Request::Load { after }, Reply::Loaded { records, more }) => {
                self.loaded(after.as_deref(), records, more);
            }
            (Request::Write { revision, changes }, Reply::Written { leads })
                if self.leads_with(revision) =>
            {
                match leads {
                    true => self.written(&changes),
                    false => self.lose("another one has its key".to_owned()),
                }
            }
            _ => {}
        }
        self.trouble = None;
    }

    fn win(&mut self, now: Instant, revision: i64, term: u64) {
        if term + 1 >= MAX_TERM {
            self.not_before = now + RETRY;
            self.trouble = Some(format!("the term that it has, {term}, is out of range"));
            return;
        }
        let (term, records) = (term + 1, Vec::new());
        self.stage = Stage::Won { revision, term, stored: false, records };
        self.trouble = None;
    }

    const fn leads_with(&self, revision: i64) -> bool {
        matches!(self.stage, Stage::Leading { revision: ours } if ours == revision)
    }

    fn term_set(&mut self, asked: i64, wanted: u64, leads: bool, found: u64) {
        let Stage::Won { revision, ref mut term, ref mut stored, .. } = self.stage else { return };
        if revision != asked {
            return;
        }
        if !leads {
            return self.lose("another one has its key".to_owned());
        }
        // A higher one is of a leader before: a request of it came late.
        match found > wanted {
            true => *term = found + 1,
            false => *stored = true,
        }
    }

    fn loaded(&mut self, asked: Option<&str>, more_records: Vec<(String, String)>, more: bool) {
        let Stage::Won { revision, term, stored: true, ref mut records } = self.stage else {
            return;
        };
        if records.last().map(|(key, _)| key.as_str()) != asked {
            return;
        }
        let ends = more_records.is_empty() || !more;
        records.extend(more_records);
        if ends || records.len() >= MAX_RECORDS {
            let records = core::mem::take(records);
            self.stage = Stage::Leading { revision };
            self.events.push_back(Event::Lead { term, records });
        }
    }

    /// The changes of a request were made, or cannot be.
    fn written(&mut self, changes: &[Change]) {
        for (key, _) in changes {
            // One that was made since is still to be written.
            if self.pending.get(key).is_some_and(|pending| pending.number <= self.writing) {
                self.pending.remove(key);
            }
        }
    }
}

impl Lease {
    fn new(id: i64, sent: Instant, time: Duration) -> Self {
        Self { id, until: sent + (time - time / MARGIN_PART), renew_at: sent + time / RENEW_PART }
    }
}
