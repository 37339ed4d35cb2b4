//! Queue pairs that peers have connected to ours. They only answer: what this engine sends goes
//! over connections that it opened itself.
//!
//! Who may connect, and when nothing of a connection can arrive any more, [`Target`] decides; here is
//! what it wants done (`store.rs`). An initiator that numbers its rails and connections is known by its
//! incarnation and the number of the rail. One that does not is known by its NIC, and each of its
//! requests takes the place of the one before.
//!
//! [`Target`]: millstream_transfer_core::Target

mod closing;
mod liveness;
mod store;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_metadata::HandShakeDesc;
use millstream_transfer_core::Initiator;
use millstream_verbs::{CreateError, ReceiveShare};

pub(super) use self::closing::{Notices, tell};
use self::store::{Denied, Ending, Open, Sender, Store};
use super::connection::{Connection, MAX_QUEUE_PAIRS, Peer, Unconnected};
use super::device::LocalDevice;
use super::ports::sender_of;
use crate::FailureReason;

/// Longer than any host name, port and device name are together.
const MAX_NIC_PATH_LENGTH: usize = 512;

/// What is added to the acknowledgement timeout for questions: nobody waits for the answer, and a
/// machine that stands still for a moment loses no connection.
const QUESTION_TIMEOUT_MORE: u8 = 1;

/// How long a request waits for others that close what is in its way. Its sender asks again.
const PATIENCE: Duration = Duration::from_secs(1);

/// So many connections are passed at a time because they were used since they were last looked at.
const LOOKS: usize = 64;

pub(super) struct AcceptedConfig {
    /// Of this engine.
    pub(super) incarnation: u64,
    /// At most so many queue pairs of each device are for peers.
    pub(super) max_queue_pairs: usize,
    /// So many of each device this engine may need for its own connections.
    pub(super) own_queue_pairs: usize,
    pub(super) acknowledge_timeout: u8,
    /// How often peers are asked whether they are there.
    pub(super) interval: Duration,
}

pub(super) struct Accepted {
    config: AcceptedConfig,
    /// By which those are told whose connections make room for others.
    notices: Option<Notices>,
    store: Mutex<Store>,
    /// Peers have come, were asked, or no more will come.
    changed: Condvar,
    /// A connection was closed, or it was decided what becomes of a request.
    settled: Condvar,
    /// Questions that have ended, by the connection's number, and whether there was an answer. It has a
    /// lock of its own, which whoever makes the device's progress can take at any time.
    ended: Mutex<Vec<(u64, bool)>>,
    /// The last number that was given to a connection whose initiator gives none.
    last_epoch: AtomicU64,
    /// Names initiators that do not name themselves.
    names: RandomState,
}

/// Why a request is refused.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) reason: String,
    /// Connections with higher numbers are accepted.
    pub(super) epoch_floor: Option<u64>,
}

impl From<String> for Refusal {
    fn from(reason: String) -> Self {
        Self { reason, epoch_floor: None }
    }
}

impl From<&str> for Refusal {
    fn from(reason: &str) -> Self {
        reason.to_owned().into()
    }
}

impl Refusal {
    pub(super) fn into_reply(self) -> HandShakeDesc {
        HandShakeDesc { epoch_floor: self.epoch_floor, ..HandShakeDesc::refusal(self.reason) }
    }

    fn floor(floor: u64) -> Self {
        let reason = format!(
            "a connection of this rail with the number {floor} was asked for or fenced: the next \
             has a higher one"
        );
        Self { reason, epoch_floor: Some(floor) }
    }

    fn full(limit: usize) -> Self {
        format!("all of the {limit} queue pairs that peers may have on this device are in use")
            .into()
    }

    fn closing() -> Self {
        "this engine closes".into()
    }
}

impl Accepted {
    /// How many connections there are.
    pub(super) fn connections(&self) -> usize {
        self.lock().connections()
    }

    pub(super) fn new(config: AcceptedConfig) -> Self {
        let acknowledge_timeout = (config.acknowledge_timeout + QUESTION_TIMEOUT_MORE).min(31);
        Self {
            config: AcceptedConfig { acknowledge_timeout, ..config },
            notices: None,
            store: Mutex::new(Store::new()),
            changed: Condvar::new(),
            settled: Condvar::new(),
            ended: Mutex::default(),
            last_epoch: AtomicU64::new(0),
            names: RandomState::new(),
        }
    }

    /// The same, which tells those whose connections make room for others.
    pub(super) fn telling(self, notices: Notices) -> Self {
        Self { notices: Some(notices), ..self }
    }

    /// Whether a request is for this start of this engine, as far as it says.
    pub(super) fn check_incarnation(&self, request: &HandShakeDesc) -> Result<(), Refusal> {
        match request.peer_incarnation {
            Some(meant) if meant != self.config.incarnation => {
                Err("this engine was restarted: it is not the one that is meant".into())
            }
            _ => Ok(()),
        }
    }

    /// Connects new queue pairs of `device` to those of a peer, once its earlier connection of the same
    /// rail is closed: late packets of that find nobody.
    ///
    /// Returns the reply, without what only the engine knows, or why the request is refused.
    pub(super) fn accept(
        &self,
        device: &LocalDevice,
        request: &HandShakeDesc,
    ) -> Result<HandShakeDesc, Refusal> {
        self.check_incarnation(request)?;
        let (Some(gid), Some(at)) = (request.local_gid, sender_of(request)) else {
            return Err("the handshake does not say the GID of its sender".into());
        };
        if request.local_nic_path.len() > MAX_NIC_PATH_LENGTH {
            return Err(format!("a NIC path of more than {MAX_NIC_PATH_LENGTH} bytes").into());
        }
        let numbered = numbered(request)?;
        let sender = Arc::new(Sender {
            nic_path: request.local_nic_path.clone(),
            gid,
            device: device.device.name().to_owned(),
            queue_pairs: request.qp_num.clone(),
            numbered: numbered.is_some(),
            told_at: numbered.and_then(|_| closing::address_of(request)),
        });
        if request.disconnect {
            let initiator = numbered.map_or_else(|| self.name(&sender), |(initiator, _)| initiator);
            self.disconnect(initiator, &sender);
            return Ok(HandShakeDesc::default());
        }
        let count = request.qp_num.len();
        if count == 0 || count > MAX_QUEUE_PAIRS {
            return Err(format!(
                "{count} queue pairs between two NICs: 1 to {MAX_QUEUE_PAIRS} are possible"
            )
            .into());
        }
        // Before a way to it is looked for: from a port of InfiniBand no route of IP leads to one of Ethernet.
        device.device.port_address().check_peer(&at).map_err(|error| error.to_string())?;
        let own_mtu = device.path_mtu(at.ip).map_err(|error| error.to_string())?;
        let peer = Peer::parse(request, at, count, own_mtu)?;
        let (initiator, epoch) = self.admit(numbered, &sender)?;
        let made = self.make(device, (initiator, epoch), &peer);
        let (connection, receive_share, reply) = made.inspect_err(|_| {
            self.closed(initiator, epoch);
        })?;
        let open = Open {
            receive_psn: connection.receive_psn(),
            connection: Arc::new(connection),
            _receive_share: receive_share,
            asked: false,
        };
        let entered = self.lock().made(initiator, epoch, open);
        if let Err(Ending { open, .. }) = entered {
            open.connection.halt();
            drop(open);
            self.closed(initiator, epoch);
            return Err(Refusal::floor(epoch));
        }
        self.changed.notify_all();
        Ok(HandShakeDesc { path_mtu: Some(own_mtu.bytes() as u32), ..reply })
    }

    /// Ends the connections of a rail up to an epoch. When this returns the reply, nothing of them can
    /// change memory any more.
    pub(super) fn fence(&self, request: &HandShakeDesc) -> Result<HandShakeDesc, Refusal> {
        self.check_incarnation(request)?;
        let Some((initiator, epoch)) = numbered(request)? else {
            return Err("a fence names the incarnation of its sender, a rail and an epoch".into());
        };
        let mut store = self.lock();
        if store.stopped {
            return Err(Refusal::closing());
        }
        let ticket = store.fence(initiator, epoch);
        store = self.carry_out(store);
        let deadline = Instant::now() + PATIENCE;
        while !store.is_confirmed(ticket) && !store.stopped {
            let Some(left) = left(deadline) else { break };
            let waited = self.settled.wait_timeout(store, left);
            (store, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        // Who stops has released the lock before queue pairs are reset.
        let confirmed = store.is_confirmed(ticket) && !store.stopped;
        store.forget_fence(ticket);
        match confirmed {
            true => Ok(HandShakeDesc { fenced: Some(epoch), ..HandShakeDesc::default() }),
            false => Err("the connections are still being closed: ask again".into()),
        }
    }

    /// The engine of this incarnation closes: its connections are not needed any more.
    pub(super) fn peer_closes(&self, incarnation: u64) {
        let mut store = self.lock();
        for (initiator, epoch) in store.of_incarnation(incarnation) {
            store.close(initiator, epoch);
        }
        drop(self.carry_out(store));
    }

    /// Closes everything, and takes no more questions. Returns where the other engines answer that were
    /// connected and would understand it if they were told: that nothing of theirs arrives any more. `None` where others are
    /// still resetting queue pairs after a second: then it is not so.
    pub(super) fn stop(&self) -> Option<BTreeSet<SocketAddr>> {
        let open = self.lock().stop();
        self.changed.notify_all();
        self.settled.notify_all();
        open.iter().for_each(|(.., open)| open.connection.halt());
        let deadline = Instant::now() + PATIENCE;
        let mut store = self.lock();
        while !store.all_are_reset() {
            let left = left(deadline)?;
            let waited = self.settled.wait_timeout(store, left);
            (store, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        drop(store);
        let others = open.iter().filter(|(it, ..)| it.incarnation != self.config.incarnation);
        Some(others.filter_map(|(_, sender, _)| sender.told_at).collect())
    }

    /// Waits until it is the turn of a request: until what is to be closed before is closed.
    fn admit(
        &self,
        numbered: Option<(Initiator, u64)>,
        sender: &Arc<Sender>,
    ) -> Result<(Initiator, u64), Refusal> {
        let mut store = self.lock();
        // With the store locked, so that numbers rise in the order in which requests are taken.
        let (initiator, epoch) = numbered.unwrap_or_else(|| {
            (self.name(sender), self.last_epoch.fetch_add(1, Ordering::Relaxed) + 1)
        });
        if store.stopped {
            return Err(Refusal::closing());
        }
        store.connect(initiator, epoch, sender).map_err(|denied| match denied {
            Denied::Floor(floor) => Refusal::floor(floor),
            Denied::Full => {
                let reason = "as many peers are connected as may be".to_owned();
                Refusal { reason, epoch_floor: Some(epoch) }
            }
        })?;
        store = self.carry_out(store);
        let deadline = Instant::now() + PATIENCE;
        while store.waits(initiator, epoch) {
            let Some(left) = left(deadline) else {
                store.gives_up(initiator, epoch);
                let reason = "the connection before is still being closed: ask again".to_owned();
                return Err(Refusal { reason, epoch_floor: Some(epoch) });
            };
            let waited = self.settled.wait_timeout(store, left);
            (store, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        match store.entry(initiator, epoch) {
            Some(_) => Ok((initiator, epoch)),
            None if store.stopped => Err(Refusal::closing()),
            // A newer one, or a fence, has overtaken it.
            None => Err(Refusal::floor(epoch)),
        }
    }

    /// Makes queue pairs, connected to those of the peer, and room for them if need be.
    fn make(
        &self,
        device: &LocalDevice,
        (initiator, epoch): (Initiator, u64),
        peer: &Peer,
    ) -> Result<(Connection, Option<ReceiveShare>, HandShakeDesc), Refusal> {
        let count = peer.queue_pairs.len();
        self.reserve(device, (initiator, epoch), count)?;
        let mut tries = MAX_QUEUE_PAIRS;
        let unconnected = loop {
            match Unconnected::new(device, count, 1) {
                // Others use the device too.
                Err(FailureReason::Create(error))
                    if is_full(&error) && tries > 0 && self.make_room(device) =>
                {
                    tries -= 1;
                }
                made => break made.map_err(|reason| reason.to_string())?,
            }
        };
        let unconnected = unconnected.expected_by(peer);
        let receive_share = device.device.grant_receive_share(count);
        let reply = HandShakeDesc {
            qp_num: unconnected.numbers(),
            receive_share: receive_share.as_ref().map(ReceiveShare::bytes),
            start_psn: unconnected.start_psn(),
            ..HandShakeDesc::default()
        };
        let connection = unconnected
            .connect(peer, self.config.acknowledge_timeout)
            .map_err(|reason| reason.to_string())?;
        Ok((connection, receive_share, reply))
    }

    /// Takes so many queue pairs of the device, as soon as there are so many.
    fn reserve(
        &self,
        device: &LocalDevice,
        (initiator, epoch): (Initiator, u64),
        count: usize,
    ) -> Result<(), Refusal> {
        let limit = self.limit(device);
        if count > limit {
            return Err(Refusal::full(limit));
        }
        let deadline = Instant::now() + PATIENCE;
        let mut store = self.lock();
        loop {
            if !store.is_being_made(initiator, epoch) {
                return Err(Refusal::floor(epoch));
            }
            if store.reserve(initiator, epoch, count, limit) {
                return Ok(());
            }
            drop(store);
            let evicted = self.make_room(device);
            store = self.lock();
            if evicted {
                continue;
            }
            // What there is is being made or closed by others.
            let Some(left) = left(deadline) else {
                return Err(Refusal { epoch_floor: Some(epoch), ..Refusal::full(limit) });
            };
            let waited = self.settled.wait_timeout(store, left);
            (store, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Closes one of the connections of a device; whether there was one.
    fn make_room(&self, device: &LocalDevice) -> bool {
        for looked in 0..=LOOKS {
            let Some((number, connection)) = self.lock().candidate(device.device.name()) else {
                return false;
            };
            // It may take a system call, so the lock is not held.
            let receive_psn = connection.receive_psn();
            let mut store = self.lock();
            if store.was_used(number, receive_psn) && looked < LOOKS {
                continue;
            }
            let evicted = store.evict(number);
            drop(self.carry_out(store));
            if let Some(evicted) = evicted {
                if let Some(notices) = &self.notices {
                    notices.evicted(&evicted);
                }
                return true;
            }
        }
        false
    }

    /// How many queue pairs of a device peers may have.
    fn limit(&self, device: &LocalDevice) -> usize {
        let has = device.device.attributes().max_queue_pairs;
        // Half of them even where this engine could need all.
        let left = has.saturating_sub(self.config.own_queue_pairs).max(has / 2);
        self.config.max_queue_pairs.min(left)
    }

    fn disconnect(&self, initiator: Initiator, sender: &Sender) {
        let mut store = self.lock();
        // Not if it has connected again meanwhile.
        let known =
            store.of(initiator).filter(|entry| entry.peer.queue_pairs == sender.queue_pairs);
        if let Some(epoch) = known.map(|entry| entry.epoch) {
            store.close(initiator, epoch);
        }
        drop(self.carry_out(store));
    }

    /// A connection that was to be made is not there, or not any more.
    fn closed(&self, initiator: Initiator, epoch: u64) {
        let mut store = self.lock();
        store.closed(initiator, epoch);
        drop(self.carry_out(store));
    }

    /// Does what the target wants, until it wants nothing more. Queue pairs are reset with the lock
    /// released.
    fn carry_out<'a>(&'a self, mut store: MutexGuard<'a, Store>) -> MutexGuard<'a, Store> {
        let mut endings = store.carry_out();
        while let Some(ending) = endings.pop() {
            drop(store);
            store = self.reset(ending);
            endings.extend(store.carry_out());
            self.settled.notify_all();
        }
        self.settled.notify_all();
        store
    }

    fn reset(&self, Ending { initiator, epoch, open }: Ending) -> MutexGuard<'_, Store> {
        // Nothing is written for it any more when this returns, and nothing is read.
        open.connection.halt();
        drop(open);
        let mut store = self.lock();
        store.was_reset();
        store.closed(initiator, epoch);
        store
    }

    /// The name of an initiator that gives none. Names such as `localhost:12345` are not unique, so
    /// its address is a part of it. Nobody can know the keys of the hash function, so nobody can take
    /// a name that is another one's.
    fn name(&self, sender: &Sender) -> Initiator {
        let Sender { nic_path, gid, device, .. } = sender;
        Initiator { incarnation: self.names.hash_one((nic_path, gid, device)), rail: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rail and the number of the connection that a request is about, if it says so.
fn numbered(request: &HandShakeDesc) -> Result<Option<(Initiator, u64)>, Refusal> {
    match (request.incarnation, request.rail, request.epoch) {
        (_, None, None) => Ok(None),
        (Some(incarnation), Some(rail), Some(epoch)) => {
            Ok(Some((Initiator { incarnation, rail }, epoch)))
        }
        _ => Err("who names a rail or an epoch names both, and its incarnation".into()),
    }
}

/// Whether the device cannot make a queue pair because it has made so many.
fn is_full(error: &CreateError) -> bool {
    match error {
        CreateError::TooMany { .. } => true,
        CreateError::System { code, .. } => {
            io::Error::from_raw_os_error(*code).kind() == io::ErrorKind::OutOfMemory
        }
        _ => false,
    }
}

/// The time until then; `None` when it has come.
fn left(deadline: Instant) -> Option<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    (!left.is_zero()).then_some(left)
}
