//! A peer: what is to be done with its memory, and the connections to it.

use std::cell::Cell;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use millstream_metadata::{
    Addresses, Gate, HostPort, Initiator, PeerTls, Purpose, Resolution, Resolver, Ticket, TlsError,
    TlsSession, Token,
};
use millstream_transfer_core::TaskId;

use super::TcpConfig;
use super::ended::AllEnded;
use super::flow::{Flow, Framing, Origin};
use super::lane::{Lane, Left};
use super::progress::Progress;
use crate::batch::BatchShared;
use crate::engine::Inner;
use crate::metrics::{RailMetrics, RailStatus};
use crate::segment::OpenSegment;
use crate::terms::Terms;
use crate::transport::{EndTask, Run};
use crate::{FailureReason, TransferState};

/// How long a peer that cannot be connected to is left alone: at first, and at the most. Each time it is twice as long.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// When so many connections in a row ended without an answer, what waits for the next one fails.
const MAX_UNANSWERED: u32 = 3;

thread_local! {
    /// Room for tasks that have ended. It keeps its memory.
    static SPARE: Cell<AllEnded> = const { Cell::new(AllEnded { tasks: Vec::new(), origins: Vec::new() }) };
}

/// Where a peer is, and how it is talked to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Place {
    /// What it calls itself.
    pub(super) name: String,
    /// An address, or the name of one.
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) framing: Framing,
    /// Messages are in records with checksums.
    pub(super) checked: bool,
    /// Which start of its process, if it says so. At a relay: the number of the way to the segment.
    pub(super) incarnation: Option<u64>,
    /// It is a relay to the segment's process.
    pub(super) relays: bool,
}

impl Place {
    /// The name of the transport that it belongs to.
    const fn transport(&self) -> &'static str {
        if self.relays { super::relay::NAME } else { super::NAME }
    }
}

pub(super) struct Peer {
    own: Weak<Self>,
    name: String,
    segment: Arc<OpenSegment>,
    /// Who finds another transport for what cannot be done, where that is done.
    engine: Option<Weak<Inner>>,
    pub(super) place: Place,
    /// What is proved to it, and by it.
    token: Option<Token>,
    tls: Option<PeerTls>,
    config: Arc<TcpConfig>,
    flow: Mutex<Flow>,
    lanes: Box<[Lane]>,
    connecting: Mutex<Connecting>,
    resolver: Resolver,
    resolving: Mutex<Resolving>,
    progress: Arc<Progress>,
    /// What is submitted from now on fails.
    ending: AtomicBool,
    /// Why nothing more is done, once that is so.
    stopped: OnceLock<FailureReason>,
    /// Tasks that the progress counts.
    counted: AtomicUsize,
}

/// The addresses of its host.
#[derive(Default)]
struct Resolving {
    /// None until the first answer.
    addresses: Option<Addresses>,
    /// The answer is on its way, since then.
    asked: Option<(Ticket, Instant)>,
    /// There was none, and why.
    failure: Option<FailureReason>,
}

/// What came of connecting.
#[derive(Default)]
struct Connecting {
    /// How many times in a row it was in vain.
    failures: u32,
    not_before: Option<Instant>,
    /// What those fail with meanwhile who would need a connection. Without, they wait.
    last: Option<FailureReason>,
    /// The log says that it cannot be reached.
    told: bool,
}

impl Connecting {
    fn is_pausing(&self) -> bool {
        self.not_before.is_some_and(|until| Instant::now() < until)
    }

    fn failed(&mut self) {
        let (first, most) = BACK_OFF;
        let pause = first.saturating_mul(1 << self.failures.min(10)).min(most);
        self.failures += 1;
        self.not_before = Some(Instant::now() + pause);
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Peer").field(&self.name).finish()
    }
}

impl Peer {
    pub(super) fn new(
        (segment, engine): (&Arc<OpenSegment>, Option<&Weak<Inner>>),
        place: Place,
        gate: Option<&Gate>,
        config: &Arc<TcpConfig>,
        progress: &Arc<Progress>,
        resolver: &Resolver,
    ) -> Arc<Self> {
        let lanes = (0..config.lanes.max(1)).map(|_| Lane::default()).collect();
        let peer = Arc::new_cyclic(|own| Self {
            own: own.clone(),
            name: segment.name.clone(),
            segment: Arc::clone(segment),
            engine: engine.cloned(),
            flow: Mutex::new(Flow::new(place.framing)),
            place,
            token: gate.and_then(Gate::token),
            tls: gate.and_then(Gate::tls).cloned(),
            config: Arc::clone(config),
            lanes,
            connecting: Mutex::default(),
            resolver: resolver.clone(),
            resolving: Mutex::default(),
            progress: Arc::clone(progress),
            ending: AtomicBool::new(false),
            stopped: OnceLock::new(),
            counted: AtomicUsize::new(0),
        });
        progress.add(&peer);
        peer.resolve();
        peer
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn config(&self) -> &TcpConfig {
        &self.config
    }

    /// The proof for a connection to this address, where there is a token.
    pub(super) fn proof(&self, address: SocketAddr) -> io::Result<Option<Initiator>> {
        let initiator =
            |token| Initiator::new(token, Purpose::Memory, address, Some(&self.place.name));
        self.token.map(initiator).transpose()
    }

    /// TLS with it, where there is a certificate.
    pub(super) fn session(&self) -> Result<Option<TlsSession>, TlsError> {
        self.tls.as_ref().map(|tls| tls.calling(&self.place.host)).transpose()
    }

    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }

    pub(super) fn framing(&self) -> Framing {
        self.place.framing
    }

    /// Which start of its process is meant.
    pub(super) fn incarnation(&self) -> u64 {
        self.place.incarnation.unwrap_or_default()
    }

    /// One of its addresses, and whether it is the last. None until its host is resolved.
    pub(super) fn address(&self, index: usize) -> Option<(SocketAddr, bool)> {
        let resolving = self.resolving();
        let addresses = resolving.addresses.as_ref()?;
        let index = index % addresses.len();
        let mut address = addresses[index];
        address.set_port(self.place.port);
        Some((address, index + 1 == addresses.len()))
    }

    fn resolving(&self) -> MutexGuard<'_, Resolving> {
        self.resolving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why its host has no address, if that is so.
    pub(super) fn is_unresolved(&self) -> Option<FailureReason> {
        self.resolving().failure.clone()
    }

    /// Asks for the addresses of its host, and does not wait for the answer.
    fn resolve(&self) {
        let own = self.own.clone();
        let answer = move |addresses| {
            if let Some(own) = own.upgrade() {
                own.resolved(addresses);
                own.work();
            }
        };
        // Whoever answers takes the lock, so what is told at once is told without it.
        let mut resolving = self.resolving();
        let asked = self.resolver.resolve(&self.place.host, Box::new(answer));
        let known = match asked {
            Ok(Resolution::Asked(ticket)) => {
                resolving.asked = Some((ticket, Instant::now()));
                return;
            }
            Ok(Resolution::Known(addresses)) => Ok(addresses),
            Err(error) => Err(error),
        };
        drop(resolving);
        self.resolved(known);
    }

    fn resolved(&self, addresses: io::Result<Addresses>) {
        let mut resolving = self.resolving();
        let asked = resolving.asked.take();
        let failure = match addresses {
            Ok(addresses) if !addresses.is_empty() => {
                (resolving.addresses, resolving.failure) = (Some(addresses), None);
                None
            }
            // Those of before may do.
            _ if resolving.addresses.is_some() => None,
            found => {
                let why = found.err().map_or_else(String::new, |error| format!(": {error}"));
                let text = format!("its host {} has no address{why}", self.place.host);
                Some(FailureReason::Connection(text.into()))
            }
        };
        resolving.failure.clone_from(&failure);
        drop(resolving);
        // Its end takes the resolver's lock.
        drop(asked);
        if let Some(reason) = failure {
            self.flow().fail_all(&reason);
        }
    }

    pub(super) fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// What is to be done. Nobody waits, or calls anything else, while he has it.
    pub(super) fn flow(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connecting(&self) -> MutexGuard<'_, Connecting> {
        self.connecting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a connection, that nobody guesses.
    #[expect(clippy::unused_self, reason = "a test of a peer may want to know it")]
    pub(super) fn draw_number(&self) -> u128 {
        let half = || u128::from(RandomState::new().hash_one(Instant::now()));
        half() << 64 | half()
    }

    /// Begins to do the tasks of a run.
    pub(super) fn submit(self: &Arc<Self>, batch: &Arc<BatchShared>, run: &Run, terms: &Terms) {
        let origin = Origin {
            batch: Arc::clone(batch),
            local: Arc::clone(&run.local),
            segment: Arc::clone(&run.segment),
            terms: Terms { allowed: run.allowed, ..*terms },
        };
        let owner: Weak<dyn EndTask> = self.own.clone();
        let owner = batch.tasks.owner(&owner);
        let mut flow = self.flow();
        let origin = flow.begin(origin, run.tasks.len());
        let mut more = 0;
        for index in run.tasks.clone() {
            let task = batch.tasks.get(index);
            if task.claim_whole().is_none() {
                flow.leave_out(origin);
                continue;
            }
            let name = flow.push(origin, index);
            // One that was canceled meanwhile ends at once, and is told of like the others.
            if !task.belongs_to(owner, TaskId::from_bits(name)) {
                flow.end(name, TransferState::Canceled);
            }
            more += 1;
        }
        self.counted.fetch_add(more, Ordering::SeqCst);
        self.progress.more(more);
        if flow.awaits_time() {
            flow.tick(Instant::now());
        }
        drop(flow);
        if self.ending.load(Ordering::SeqCst) {
            self.flow().end_all(&FailureReason::ShutDown);
        }
        // Whoever stops it says so before it takes the flow.
        if let Some(reason) = self.stopped.get() {
            self.flow().fail_all(reason);
        }
        self.work();
        self.progress.submitted();
    }

    /// Has lanes send what there is to send: one after the other, as each has no more room.
    pub(super) fn work(self: &Arc<Self>) {
        let (mut connecting, mut has_ended) = (false, true);
        for lane in &self.lanes {
            // One at a time is connected: it may be enough.
            if connecting && !lane.is_connected() {
                continue;
            }
            match lane.work(self) {
                // One that may not connect yet has nothing to do, but the others may.
                Left::Full | Left::Idle => {}
                Left::Connecting => connecting = true,
                Left::Taken => break,
            }
            let flow = self.flow();
            has_ended = flow.has_ended();
            if !flow.has_more() {
                break;
            }
        }
        if has_ended {
            self.tell();
        }
    }

    /// What follows when a lane was worked on.
    fn go_on(self: &Arc<Self>) {
        let flow = self.flow();
        let (has_more, has_ended) = (flow.has_more(), flow.has_ended());
        drop(flow);
        if has_more {
            self.work();
        } else if has_ended {
            self.tell();
        }
    }

    /// Receives an answer over a lane if one has come; whether there was something to do.
    pub(super) fn look(self: &Arc<Self>, lane: usize) -> bool {
        let found = self.lanes[lane].look(self);
        if found {
            self.go_on();
        }
        found
    }

    /// A wait has found that a lane can go on.
    pub(super) fn ready(self: &Arc<Self>, lane: usize, readable: bool, writable: bool) {
        self.lanes[lane].is_ready(readable, writable);
        self.lanes[lane].work(self);
        self.go_on();
    }

    /// Ends what is to end by now.
    pub(super) fn tick(self: &Arc<Self>, now: Instant) {
        self.flow().tick(now);
        self.lanes.iter().for_each(|lane| lane.check(self, now));
        self.go_on();
    }

    /// Tells of the tasks that have ended.
    fn tell(&self) {
        // Who tells may submit something else, and tell of that.
        let mut ended = SPARE.try_with(Cell::take).unwrap_or_default();
        self.flow().take_ended(&mut ended);
        let count = ended.tasks.len();
        if count > 0 {
            self.counted.fetch_sub(count, Ordering::SeqCst);
            // First: whoever is told looks whether there is more to wait for.
            self.progress.fewer(count);
            let (engine, transport) = (self.engine.as_ref(), self.place.transport());
            ended.tell(engine, self.place.incarnation, transport);
        }
        let _ = SPARE.try_with(|spare| spare.set(ended));
    }

    /// Whether a lane is to be connected. What cannot be done soon fails.
    pub(super) fn may_connect(&self) -> bool {
        if !self.flow().has_more() || self.stopped.get().is_some() {
            return false;
        }
        let resolving = self.resolving();
        let is_resolved = resolving.addresses.is_some();
        let asked = resolving.asked.as_ref().filter(|_| !is_resolved);
        let late = asked.is_some_and(|(_, since)| since.elapsed() >= self.config.connect_timeout);
        let text = "the resolver has not said within tcp.connect_timeout what address its host has";
        let late = late.then(|| FailureReason::Connection(text.into()));
        let failure = resolving.failure.clone().or(late);
        drop(resolving);
        if let Some(reason) = failure {
            self.flow().fail_all(&reason);
            return false;
        }
        let connecting = self.connecting();
        let wait = connecting.is_pausing();
        let last = connecting.last.clone().filter(|_| wait);
        drop(connecting);
        if let Some(reason) = last
            && !self.is_connected()
        {
            self.give_up(&reason);
        }
        !wait && is_resolved
    }

    /// No connection can be made: what waits fails. What was under way waits for a fence, which another transport
    /// needs.
    fn give_up(&self, reason: &FailureReason) {
        self.ask_for_fences();
        self.flow().fail_waiting(reason);
    }

    /// Connections have broken. Where another transport may go on, the peer is asked at its control port, too, to confirm
    /// that nothing of them is done any more: perhaps its port for data cannot be reached.
    pub(super) fn ask_for_fences(&self) {
        let Some(engine) = self.engine.as_ref().and_then(Weak::upgrade) else { return };
        let Some(incarnation) = self.place.incarnation else { return };
        let connections = self.flow().fences_to_ask();
        for connection in connections {
            let own = self.own.clone();
            let done = move |confirmed| {
                if let Some(own) = own.upgrade() {
                    own.flow().fence_answered(connection, confirmed);
                    own.work();
                }
            };
            engine.fence_stream(&self.segment, incarnation, connection, done);
        }
    }

    /// What is to be seen of it.
    pub(super) fn observe(&self) -> RailMetrics {
        let connecting = self.connecting();
        let (pausing, last) = (connecting.is_pausing(), connecting.last.clone());
        drop(connecting);
        let mut flow = self.flow();
        let (counters, (messages, bytes)) = flow.counters();
        let counters = *counters;
        drop(flow);
        let state = match () {
            () if self.is_connected() => RailStatus::Up,
            () if pausing => RailStatus::Paused,
            () => RailStatus::Down,
        };
        let reason = last.or_else(|| self.is_unresolved()).map(|reason| reason.to_string());
        let observed = RailMetrics {
            transport: self.place.transport().to_owned(),
            peer: self.name.clone(),
            peer_nic: HostPort { host: self.place.host.clone(), port: self.place.port }.to_string(),
            state,
            reason,
            ..RailMetrics::default()
        };
        observed.counted(&counters, messages, bytes)
    }

    fn is_connected(&self) -> bool {
        self.lanes.iter().any(Lane::is_connected)
    }

    /// A connection was made, and its peer talks.
    pub(super) fn connected(&self) {
        let mut connecting = self.connecting();
        if connecting.told {
            tracing::info!(peer = self.name, "its data port can be reached again");
        }
        *connecting = Connecting::default();
        drop(connecting);
        self.flow().counters().0.connections += 1;
    }

    /// A connection could not be made to this of its addresses. Which is to be tried next.
    pub(super) fn cannot_connect(&self, address: usize, reason: &FailureReason) -> usize {
        if self.address(address).is_some_and(|(_, is_last)| !is_last) {
            return address + 1;
        }
        // It may have got others.
        self.resolver.forget(&self.place.host);
        if self.resolving().asked.is_none() {
            self.resolve();
        }
        let mut connecting = self.connecting();
        if !std::mem::replace(&mut connecting.told, true) {
            tracing::warn!(peer = self.name, %reason, "its data port cannot be reached");
        }
        connecting.failed();
        connecting.last = Some(reason.clone());
        drop(connecting);
        self.flow().counters().0.failures += 1;
        if !self.is_connected() {
            self.give_up(reason);
        }
        0
    }

    /// A connection was made, and ended before its peer said anything. One may break, so what was under way is tried
    /// again after a pause; where all do, the peer counts as one that cannot be reached.
    pub(super) fn unanswered(&self, reason: &FailureReason) {
        let mut connecting = self.connecting();
        if connecting.is_pausing() {
            // Several that end at once count as one.
            return;
        }
        connecting.failed();
        let gives_up = connecting.failures >= MAX_UNANSWERED;
        if gives_up && !std::mem::replace(&mut connecting.told, true) {
            tracing::warn!(peer = self.name, %reason, "its data port ends connections unanswered");
        }
        connecting.last = gives_up.then(|| reason.clone());
        drop(connecting);
        self.flow().counters().0.failures += 1;
        if gives_up && !self.is_connected() {
            self.give_up(reason);
        }
    }

    /// Whether nothing is to be done.
    pub(super) fn is_at_rest(&self) -> bool {
        self.flow().unfinished() == 0
    }

    /// Begins to end all work: each task fails once nothing of it can arrive any more, or nobody can say so.
    pub(super) fn end(self: &Arc<Self>) {
        self.ending.store(true, Ordering::SeqCst);
        self.flow().end_all(&FailureReason::ShutDown);
        self.tick(Instant::now());
    }

    /// Ends all work: what is under way fails.
    pub(super) fn stop(self: &Arc<Self>) {
        self.close(FailureReason::ShutDown);
    }

    /// The same of one that is at rest and that no segment leads to any more. Who has found it just before may still bring
    /// something.
    pub(super) fn let_go(self: &Arc<Self>) {
        self.close(FailureReason::NoPath("the segment was closed, or asked for again".to_owned()));
    }

    fn close(self: &Arc<Self>, reason: FailureReason) {
        let reason = self.stopped.get_or_init(|| reason);
        self.lanes.iter().for_each(|lane| lane.stop(self));
        self.flow().fail_all(reason);
        self.tell();
        self.progress.remove(self);
    }
}

impl EndTask for Peer {
    fn cancel(&self, task: TaskId) -> bool {
        let ends = self.flow().end(task.to_bits(), TransferState::Canceled);
        if let Some(own) = self.own.upgrade().filter(|_| ends) {
            own.lanes.iter().for_each(|lane| lane.check(&own, Instant::now()));
            own.work();
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::thread;

    use super::*;
    use crate::path::Allowed;
    use crate::tcp::testing;

    fn peer(host: &str, resolver: &Resolver) -> Arc<Peer> {
        let (framing, port) = (Framing::Numbered, 7);
        let (name, host, checked) = ("a".to_owned(), host.to_owned(), false);
        let (incarnation, relays) = (None, false);
        let place = Place { name, host, port, framing, checked, incarnation, relays };
        let config = Arc::new(TcpConfig::default());
        let segment = crate::tcp::testing::segment();
        Peer::new((&segment, None), place, None, &config, &Arc::default(), resolver)
    }

    /// A resolver that answers when it is let.
    fn slow(answers: Receiver<io::Result<Vec<SocketAddr>>>) -> Resolver {
        let answers = Mutex::new(answers);
        Resolver::new(move |_| answers.lock().unwrap().recv().unwrap())
    }

    fn wait_until(is_so: impl Fn() -> bool) {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < Duration::from_secs(20));
            thread::yield_now();
        }
    }

    #[test]
    fn nobody_waits_for_a_resolver() {
        let (answer, answers) = channel();
        let peer = peer("some.host", &slow(answers));
        assert_eq!(peer.address(0), None);
        let at = |address: &str| address.parse::<SocketAddr>().unwrap();
        answer.send(Ok(vec![at("192.0.2.1:0"), at("192.0.2.2:0")])).unwrap();
        wait_until(|| peer.address(0).is_some());
        assert_eq!(peer.address(0), Some((at("192.0.2.1:7"), false)));
        assert_eq!(peer.address(1), Some((at("192.0.2.2:7"), true)));
        // It has moved: the addresses of before do until the new one is known.
        let reason = FailureReason::Connection("nobody is there".into());
        assert_eq!(peer.cannot_connect(0, &reason), 1);
        assert_eq!(peer.cannot_connect(1, &reason), 0);
        assert_eq!(peer.address(0), Some((at("192.0.2.1:7"), false)));
        answer.send(Ok(vec![at("192.0.2.3:0")])).unwrap();
        wait_until(|| peer.address(0) == Some((at("192.0.2.3:7"), true)));
    }

    #[test]
    fn a_host_without_address_is_told_of() {
        let (answer, answers) = channel();
        let peer = peer("no.host", &slow(answers));
        assert!(peer.is_unresolved().is_none(), "it is not known yet");
        answer.send(Err(io::Error::other("no such name"))).unwrap();
        wait_until(|| peer.is_unresolved().is_some());
        let reason = peer.is_unresolved().unwrap().to_string();
        assert!(reason.contains("no.host has no address: no such name"), "{reason}");
    }

    #[test]
    fn who_brings_something_to_a_peer_that_was_let_go_is_not_told_that_the_engine_closes() {
        let (peer, room, segment) = (testing::peer(), testing::Room::new(4), testing::segment());
        let (batch, _) = testing::tasks(crate::Opcode::Write, room.address(), &[4]);
        let run = Run {
            transport: 0,
            transport_name: "tcp",
            copies: false,
            tasks: 0..1,
            claimed: 0,
            allowed: Allowed::default(),
            local: Arc::clone(&room.local),
            view: segment.view(),
            segment,
            buffer: 0,
        };
        peer.let_go();
        peer.submit(&batch.shared, &run, &Terms::default());
        let status = batch.status(0).unwrap();
        assert_eq!(status.state, TransferState::Failed);
        let reason = status.error.unwrap().reason;
        assert!(matches!(reason, FailureReason::NoPath(_)), "{reason}");
    }
}
