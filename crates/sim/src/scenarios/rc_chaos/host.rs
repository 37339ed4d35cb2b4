//! A host of a chaos run: a device, and an application that does as the director says and tells
//! what it sees.

use core::ops::Range;
use core::time::Duration;

use millstream_roce::{
    AsyncEvent, Completion, CompletionQueueId, Counters, CreateError, DatagramMeta, Endpoint,
    EndpointConfig, Identification, Instant, Node, Piece, QueuePairConfig, SharedReceiveQueueId,
    Transmit,
};
use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::{Bth, ICRC_LENGTH, Qpn, ROCE_PORT};

use super::datagrams::Header;
use super::director::DOMAIN;
use super::memory::{Effect, WatchedMemory, What};
use crate::Machine;

/// How a host's application treats its completion queues.
#[derive(Clone, Copy, Debug)]
pub(super) struct Polling {
    /// How long completions wait before it looks.
    pub(super) interval: Duration,
    /// How many it takes at a look.
    pub(super) batch: usize,
    /// Completions that a queue holds.
    pub(super) capacity: usize,
    /// Receives complete into a queue of their own.
    pub(super) separate: bool,
    /// Requests that a shared receive queue holds, where there is one.
    pub(super) shared_receives: Option<usize>,
}

/// A look at a completion queue.
#[derive(Clone, Debug)]
pub(super) struct Look {
    /// What it found, of all that was seen.
    pub(super) found: Range<usize>,
    /// How many it left there.
    pub(super) left: usize,
    /// Whether the queue said that something solicited waits.
    pub(super) solicited: bool,
}

/// What the application has seen since the last look.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) completions: Vec<Completion>,
    pub(super) looks: Vec<Look>,
    pub(super) events: Vec<AsyncEvent>,
    /// What must not be.
    pub(super) faults: Vec<String>,
}

/// A host.
#[derive(Debug)]
pub(super) struct Host {
    endpoint: Endpoint<WatchedMemory>,
    config: EndpointConfig,
    polling: Polling,
    /// Where sends and receives complete.
    queues: [CompletionQueueId; 2],
    shared_receives: Option<SharedReceiveQueueId>,
    /// With fewer requests in it there must be an event.
    limit: usize,
    pub(super) seen: Seen,
    next_poll: Option<Instant>,
    /// It does not look at its queues before this.
    pub(super) paused_until: Instant,
    /// Whether packets come in that are not as they were sent.
    checks_integrity: bool,
    /// The queue pairs that there are.
    live: Vec<Qpn>,
    /// Those for datagrams, with their queue keys.
    datagram_pairs: Vec<(Qpn, u32)>,
    /// Queue pairs that something was done to since the queues were empty; `None` stands for all.
    touched: Vec<Option<Qpn>>,
    /// After a crash its device gives the numbers and keys of its former life again, as one that
    /// counts does; else it draws others.
    repeats_numbers: bool,
    /// Counters of the lives before a crash.
    past: Vec<Counters>,
}

impl Host {
    /// Regions on a device at most.
    const REGIONS: usize = 256;

    pub(super) fn new(config: EndpointConfig, polling: Polling, checks_integrity: bool) -> Self {
        let (endpoint, queues, shared_receives) = start(&config, &polling);
        Self {
            endpoint,
            shared_receives,
            limit: 0,
            repeats_numbers: config.seed.is_multiple_of(2),
            config,
            polling,
            queues,
            seen: Seen::default(),
            next_poll: None,
            paused_until: Instant::ZERO,
            checks_integrity,
            live: Vec::new(),
            datagram_pairs: Vec::new(),
            touched: Vec::new(),
            past: Vec::new(),
        }
    }

    /// Where sends and receives complete.
    pub(super) const fn queues(&self) -> [CompletionQueueId; 2] {
        self.queues
    }

    /// The shared receive queue.
    pub(super) const fn shared_receives(&self) -> Option<SharedReceiveQueueId> {
        self.shared_receives
    }

    /// Requests in the shared receive queue.
    pub(super) fn level(&self) -> usize {
        self.shared_receives.map_or(0, |queue| self.endpoint.shared_receives_waiting(queue))
    }

    /// Asks to hear of it when the shared receive queue has fewer requests.
    pub(super) fn set_limit(&mut self, limit: usize) -> Result<(), CreateError> {
        self.limit = limit;
        let queue = self.shared_receives;
        queue.map_or(Ok(()), |queue| self.endpoint.set_shared_receive_limit(queue, limit))
    }

    /// Whether it has asked, and has not heard.
    pub(super) const fn has_limit(&self) -> bool {
        self.limit > 0
    }

    pub(super) const fn endpoint(&self) -> &Endpoint<WatchedMemory> {
        &self.endpoint
    }

    /// The device, to do something to this queue pair, or to none.
    pub(super) fn endpoint_mut(&mut self, qpn: Option<Qpn>) -> &mut Endpoint<WatchedMemory> {
        if qpn.is_some() {
            self.touch(qpn);
        }
        &mut self.endpoint
    }

    /// Makes a queue pair.
    pub(super) fn create(&mut self, config: &QueuePairConfig) -> Result<Qpn, CreateError> {
        let qpn = self.endpoint.create_queue_pair(config)?;
        self.live.push(qpn);
        Ok(qpn)
    }

    /// A queue pair for datagrams has this queue key.
    pub(super) fn set_queue_key(&mut self, qpn: Qpn, key: u32) {
        self.datagram_pairs.retain(|&(other, _)| other != qpn);
        self.datagram_pairs.push((qpn, key));
    }

    /// Removes a queue pair; `false` when there is none of this number.
    pub(super) fn destroy(&mut self, qpn: Qpn) -> bool {
        self.live.retain(|&other| other != qpn);
        self.datagram_pairs.retain(|&(other, _)| other != qpn);
        self.endpoint.destroy_queue_pair(qpn)
    }

    /// What the device counted, in all of its lives.
    pub(super) fn counters(&self) -> impl Iterator<Item = &Counters> {
        self.past.iter().chain([self.endpoint.counters()])
    }

    /// Whether there is something to look at.
    pub(super) fn has_news(&self) -> bool {
        let Seen { completions, events, faults, looks } = &self.seen;
        !completions.is_empty()
            || !events.is_empty()
            || !faults.is_empty()
            || !looks.is_empty()
            || !self.endpoint.memory().effects.is_empty()
    }

    /// Polls everything, however busy it is.
    pub(super) fn drain(&mut self) {
        self.poll(usize::MAX);
        self.next_poll = None;
    }

    /// From now on it looks at once.
    pub(super) fn attend(&mut self) {
        self.polling.interval = Duration::ZERO;
        self.paused_until = Instant::ZERO;
        self.drain();
    }

    /// The completion queues that are made next hold so many.
    pub(super) const fn set_capacity(&mut self, capacity: usize) {
        self.polling.capacity = capacity;
    }

    /// Makes new completion queues in place of ones that lost completions. No queue pair may use
    /// the old ones.
    pub(super) fn renew_queues(&mut self) -> Result<(), String> {
        self.drain();
        self.remove_queues()?;
        self.queues = make_queues(&mut self.endpoint, &self.polling);
        Ok(())
    }

    /// A packet for this queue pair came when the shared receive queue held `before` requests, and
    /// this many effects were seen: what it took comes before what it wrote.
    fn follow_level(&mut self, before: usize, effects: usize, qpn: Option<Qpn>) {
        let after = self.level();
        let seen = self.seen.events.len();
        self.hear();
        let heard = self.seen.events[seen..].iter();
        let heard =
            heard.filter(|event| matches!(event, AsyncEvent::SharedReceiveLimit(_))).count();
        let low = after < before && after < self.limit;
        if low {
            self.limit = 0;
        }
        if heard != usize::from(low) || after > before || after + 1 < before {
            self.seen.faults.push(format!(
                "a packet made {after} of {before} shared receive requests, and {heard} events"
            ));
        }
        if after < before {
            let taken = Effect::of(What::Take, qpn);
            self.endpoint.memory_mut().effects.insert(effects, taken);
        }
    }

    fn tell(&mut self, what: What, qpn: Option<Qpn>) {
        self.endpoint.memory_mut().effects.push(Effect::of(what, qpn));
    }

    fn hear(&mut self) {
        while let Some(event) = self.endpoint.poll_event() {
            self.seen.events.push(event);
        }
    }

    /// Hears events, and whatever happens, it keeps no more than it may.
    fn look(&mut self) {
        self.hear();
        let (usage, limits) = (self.endpoint.usage(), self.endpoint.limits());
        if !usage.is_within(&limits) {
            self.seen.faults.push(format!("keeps {usage:?}, where {limits:?} is the limit"));
        }
    }

    /// Destroys all that there is. `shared`: some queue pair uses the shared receive queue.
    pub(super) fn remove_all(&mut self, shared: bool) -> Result<(), String> {
        if let Some(queue) = self.shared_receives.filter(|_| shared) {
            let early = self.endpoint.destroy_shared_receive_queue(queue);
            if early != Err(CreateError::SharedReceiveQueueInUse(queue)) {
                return Err(format!("the shared receive queue of queue pairs removed: {early:?}"));
            }
        }
        for qpn in core::mem::take(&mut self.live) {
            self.endpoint.destroy_queue_pair(qpn);
        }
        let shared = self.shared_receives.take();
        let removed =
            shared.map_or(Ok(()), |queue| self.endpoint.destroy_shared_receive_queue(queue));
        removed.map_err(|error| error.to_string())?;
        self.remove_queues()
    }

    fn remove_queues(&mut self) -> Result<(), String> {
        let mut old = self.queues.to_vec();
        old.dedup();
        let remove = |queue| self.endpoint.destroy_completion_queue(queue);
        old.into_iter().try_for_each(remove).map_err(|error| error.to_string())
    }

    fn touch(&mut self, qpn: Option<Qpn>) {
        if !self.touched.contains(&qpn) {
            self.touched.push(qpn);
        }
    }

    fn waiting(&self) -> usize {
        let [first, second] = self.queues.map(|queue| self.endpoint.completions_waiting(queue));
        if self.queues[0] == self.queues[1] { first } else { first + second }
    }

    fn poll(&mut self, limit: usize) {
        let before = self.seen.completions.len();
        let mut left = limit;
        for queue in self.queues {
            let solicited = self.endpoint.solicited_waiting(queue);
            let first = self.seen.completions.len();
            left -= self.endpoint.poll_completions(queue, &mut self.seen.completions, left);
            let found = first..self.seen.completions.len();
            let waiting = self.endpoint.completions_waiting(queue);
            if solicited || !found.is_empty() {
                self.seen.looks.push(Look { found, left: waiting, solicited });
            }
        }
        for completion in &self.seen.completions[before..] {
            let qpn = Some(completion.qpn);
            if !self.touched.contains(&None) && !self.touched.contains(&qpn) {
                let what = format!("a completion of a queue pair left alone: {completion:?}");
                self.seen.faults.push(what);
            }
        }
        if self.waiting() == 0 {
            self.touched.clear();
        }
    }

    /// Lets the device do something with one packet, and looks at what came of it.
    fn follow_packet<T>(&mut self, qpn: Option<Qpn>, act: impl FnOnce(&mut Self) -> T) -> T {
        let waiting = self.waiting();
        self.endpoint.memory_mut().serving = qpn;
        let (level, first) = (self.level(), self.endpoint.memory().effects.len());
        let result = act(self);
        self.endpoint.memory_mut().serving = None;
        if self.waiting() > waiting {
            self.touch(qpn);
        }
        self.follow_level(level, first, qpn);
        self.look();
        result
    }

    /// A packet that is not as it was sent, or for a queue pair of the past, may be counted, and
    /// nothing else.
    fn refuses(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        let before = *self.endpoint.counters();
        self.endpoint.handle_datagram(now, meta, datagram);
        let after = *self.endpoint.counters();
        let dropped = |counters: &Counters| {
            counters.dropped_malformed
                + counters.dropped_icrc
                + counters.dropped_opcode
                + counters.dropped_qpn
                + counters.dropped_source
                + counters.dropped_partition_key
                + counters.dropped_queue_key
                + counters.dropped_state
        };
        let expected = Counters {
            packets_received: before.packets_received + 1,
            dropped_malformed: after.dropped_malformed,
            dropped_icrc: after.dropped_icrc,
            dropped_opcode: after.dropped_opcode,
            dropped_qpn: after.dropped_qpn,
            dropped_source: after.dropped_source,
            dropped_partition_key: after.dropped_partition_key,
            dropped_queue_key: after.dropped_queue_key,
            dropped_state: after.dropped_state,
            ..before
        };
        if after != expected || dropped(&after) != dropped(&before) + 1 {
            let what = format!(
                "a packet of {} bytes, corrupted or for nobody here, was not just dropped and counted: {before:?} \
                 became {after:?}",
                datagram.len()
            );
            self.seen.faults.push(what);
        }
    }
}

/// A device without queue pairs, and its completion queues.
fn start(
    config: &EndpointConfig,
    polling: &Polling,
) -> (Endpoint<WatchedMemory>, [CompletionQueueId; 2], Option<SharedReceiveQueueId>) {
    let mut endpoint = Endpoint::new(config.clone(), WatchedMemory::new(Host::REGIONS));
    // Some hosts have room for a few packets, so that READs wait for each other.
    if config.seed.is_multiple_of(4) {
        endpoint.set_receive_budget(3000);
    }
    let queues = make_queues(&mut endpoint, polling);
    let shared = polling.shared_receives.map(|capacity| {
        let queue = endpoint.create_shared_receive_queue(DOMAIN, capacity);
        queue.expect("an endpoint has room for a shared receive queue")
    });
    (endpoint, queues, shared)
}

fn make_queues(
    endpoint: &mut Endpoint<WatchedMemory>,
    polling: &Polling,
) -> [CompletionQueueId; 2] {
    let mut queue = || {
        let queue = endpoint.create_completion_queue(polling.capacity);
        queue.expect("an endpoint has room for two completion queues")
    };
    let first = queue();
    [first, if polling.separate { queue() } else { first }]
}

/// Whether a datagram is as it was sent.
fn is_intact(meta: &DatagramMeta, datagram: &[u8]) -> bool {
    let (Identification::Known(identification) | Identification::Guessed(identification)) =
        meta.identification;
    let Some((_, icrc)) = datagram.split_last_chunk::<ICRC_LENGTH>() else { return false };
    if datagram.len() < Bth::LENGTH + ICRC_LENGTH {
        return false;
    }
    let addresses = Addresses::unfragmented(meta.source, meta.destination, identification);
    addresses.is_some_and(|addresses| {
        let source_port = meta.source_port;
        let addressing = Addressing { addresses, source_port, destination_port: ROCE_PORT };
        icrc::of_datagram(&addressing, datagram) == u32::from_le_bytes(*icrc)
    })
}

/// The queue pair that a datagram is addressed to.
fn destination(datagram: &[u8]) -> Option<Qpn> {
    let bytes = datagram.get(5..8)?;
    Some(Qpn::new(u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]])))
}

impl Node for Host {
    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        let qpn = destination(datagram);
        let header = Header::of(meta.source, datagram, datagram.len());
        let port = self.datagram_pairs.iter().find(|(port, _)| Some(*port) == qpn).copied();
        let is_ours = match (header, port) {
            (Some(header), Some((_, queue_key))) => header.queue_key == queue_key,
            (None, None) => qpn.is_some_and(|qpn| self.live.contains(&qpn)),
            _ => false,
        };
        if !is_ours || self.checks_integrity && !is_intact(meta, datagram) {
            self.follow_packet(qpn, |host| host.refuses(now, meta, datagram));
            return;
        }
        if let (Some(header), Some(_)) = (header, port) {
            self.tell(What::Reached(header), qpn);
        }
        self.follow_packet(qpn, |host| host.endpoint.handle_datagram_alone(now, meta, datagram));
        while let Some(early) = qpn
            && self.follow_packet(qpn, |host| host.endpoint.handle_next_early(now, early))
        {}
    }

    fn handle_timeout(&mut self, now: Instant) {
        let waiting = self.waiting();
        self.endpoint.handle_timeout(now);
        if self.waiting() > waiting {
            self.touch(None);
        }
        self.look();
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        self.endpoint.poll_timeout()
    }

    fn poll_transmit(&mut self, now: Instant, transmit: &mut Transmit) -> bool {
        let waiting = self.waiting();
        let sends = self.endpoint.poll_transmit(now, transmit);
        let (to, length) = (transmit.destination, transmit.datagram_length());
        if sends && let Some(header) = Header::of(to, transmit.headers(), length) {
            self.tell(What::Sends(header), Some(header.source));
        }
        if self.waiting() > waiting {
            self.touch(None);
        }
        self.look();
        sends
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        self.endpoint.bytes(piece)
    }
}

impl Machine for Host {
    fn run(&mut self, now: Instant) {
        self.hear();
        if self.next_poll.is_none() && self.waiting() > 0 {
            self.next_poll = Some((now + self.polling.interval).max(self.paused_until));
        }
        if self.next_poll.is_some_and(|at| at <= now) {
            let at_once = self.polling.interval.is_zero();
            self.poll(if at_once { usize::MAX } else { self.polling.batch });
            let more = self.waiting() > 0;
            self.next_poll = more.then(|| now + self.polling.interval);
        }
    }

    fn poll_wake(&mut self) -> Option<Instant> {
        // What failed while it was sent has completed after the application's last look.
        let unseen = self.next_poll.is_none() && self.waiting() > 0;
        self.next_poll.or(unseen.then_some(Instant::ZERO))
    }

    /// The process is gone, and all that it knew.
    fn restart(&mut self, _now: Instant) {
        self.past.push(*self.endpoint.counters());
        if !self.repeats_numbers {
            self.config.seed = self.config.seed.wrapping_add(1);
        }
        (self.endpoint, self.queues, self.shared_receives) = start(&self.config, &self.polling);
        self.limit = 0;
        self.seen = Seen::default();
        self.next_poll = None;
        self.paused_until = Instant::ZERO;
        self.touched.clear();
        self.live.clear();
        self.datagram_pairs.clear();
    }
}
