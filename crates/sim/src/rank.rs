//! The machines of an allreduce: hosts, each one rank, and the switch that adds.

use core::time::Duration;
use std::sync::Arc;

use millstream_inc::{
    ABORT_BYTES, CollectiveCall, CollectiveError, Command, DESCRIPTOR_BYTES, HostWorker,
    SwitchEvent, SwitchNode,
};
use millstream_roce::{
    Completion, CompletionQueueId, Counters, DatagramMeta, Destination, Endpoint, Instant, Memory,
    Node, OwnedMemory, Piece, PostError, ProtectionDomainId, Transmit,
};
use millstream_wire::Qpn;

use crate::Machine;

/// The protection domain of everything that a host has.
pub(crate) const DOMAIN: ProtectionDomainId = ProtectionDomainId(1);

/// Does what a worker wants, with its queue pair and its control region. `false` when memory that it names is not
/// there.
pub(crate) fn carry_out(
    now: Instant,
    endpoint: &mut Endpoint<OwnedMemory>,
    (qpn, control_key): (Qpn, u32),
    command: Command,
) -> Result<bool, PostError> {
    let memory = endpoint.memory_mut();
    let copied = match command {
        Command::Store(bytes) => copy(memory, control_key, 0, &bytes),
        Command::Load(from) => memory
            .bytes(&from)
            .ok()
            .map(<[u8]>::to_vec)
            .and_then(|bytes| copy(memory, control_key, DESCRIPTOR_BYTES, &bytes)),
        Command::Deliver { offset, to: Piece { key, address, length } } => memory
            .region(control_key)
            .and_then(|region| region.get(offset..offset + length as usize))
            .map(<[u8]>::to_vec)
            .and_then(|bytes| {
                let destination = Destination::Local { domain: DOMAIN, key, address };
                memory.write(&destination, &bytes).ok()
            }),
        Command::Receive(request) => Some(endpoint.post_receive(qpn, &request)?),
        Command::Send(request) => Some(endpoint.post_send(now, qpn, &request)?),
    };
    Ok(copied.is_some())
}

fn copy(memory: &mut OwnedMemory, key: u32, offset: usize, bytes: &[u8]) -> Option<()> {
    let region = memory.region_mut(key)?.get_mut(offset..offset + bytes.len())?;
    region.copy_from_slice(bytes);
    Some(())
}

/// A message in a control region, from an offset on.
pub(crate) fn message(control: &[u8], offset: usize) -> [u8; ABORT_BYTES] {
    let bytes = control.get(offset..).and_then(<[u8]>::first_chunk);
    bytes.copied().unwrap_or([0; ABORT_BYTES])
}

/// One collective, as a rank calls it.
#[derive(Clone, Debug)]
pub struct Call {
    /// What is called.
    pub request: CollectiveCall,
    /// How long after the one before has ended.
    pub pause: Duration,
    /// What the region of the destination holds afterwards: the result, and bytes that must stay
    /// as they are.
    pub expected: Arc<[u8]>,
}

/// A host: an endpoint with one queue pair to the switch, and a worker.
#[derive(Debug)]
pub struct Rank {
    endpoint: Endpoint<OwnedMemory>,
    completions: CompletionQueueId,
    qpn: Qpn,
    control_key: u32,
    worker: HostWorker,
    calls: Vec<Call>,
    /// Calls that have ended.
    ended: usize,
    /// When the next call starts; `None` while one is under way.
    start_at: Option<Instant>,
    /// When the call under way is given up.
    deadline: Option<Instant>,
    call_limit: Duration,
    outcome: Option<(Instant, Result<(), CollectiveError>)>,
    wrong: Vec<String>,
    polled: Vec<Completion>,
}

/// What a [`Rank`] is made from.
#[derive(Debug)]
pub struct RankParts {
    /// Its device, with all regions.
    pub endpoint: Endpoint<OwnedMemory>,
    /// The completion queue of its queue pair.
    pub completions: CompletionQueueId,
    /// Its queue pair, connected.
    pub qpn: Qpn,
    /// The worker's control region.
    pub control_key: u32,
    /// The worker.
    pub worker: HostWorker,
    /// What it is going to call.
    pub calls: Vec<Call>,
    /// How long a call may take.
    pub call_limit: Duration,
}

impl Rank {
    /// A rank that starts its first call as soon as it runs.
    pub fn new(parts: RankParts) -> Self {
        let RankParts { endpoint, completions, qpn, control_key, worker, calls, call_limit } =
            parts;
        Self {
            endpoint,
            completions,
            qpn,
            control_key,
            worker,
            ended: 0,
            start_at: calls.first().map(|call| Instant::ZERO + call.pause),
            calls,
            deadline: None,
            call_limit,
            outcome: None,
            wrong: Vec::new(),
            polled: Vec::new(),
        }
    }

    /// How its last call ended, and when: the first error, or the success of all.
    pub const fn outcome(&self) -> Option<(Instant, Result<(), CollectiveError>)> {
        self.outcome
    }

    /// Calls that ended well.
    pub const fn ended(&self) -> usize {
        self.ended
    }

    /// Takes what is wrong with its results.
    pub fn take_wrong(&mut self) -> Vec<String> {
        core::mem::take(&mut self.wrong)
    }

    fn start(&mut self, now: Instant) -> bool {
        if self.start_at.is_none_or(|at| at > now) {
            return false;
        }
        self.start_at = None;
        self.deadline = Some(now + self.call_limit);
        let request = &self.calls[self.ended].request;
        if let Err(error) = self.worker.start(request) {
            self.wrong.push(format!("call {} was not started: {error}", self.ended));
            self.deadline = None;
        }
        true
    }

    fn end(&mut self, now: Instant, result: Result<(), CollectiveError>) {
        self.deadline = None;
        if let Err(error) = result {
            self.outcome = Some((now, Err(error)));
            return;
        }
        let call = &self.calls[self.ended];
        let key = call.request.destination_key;
        if self.endpoint.memory().region(key) != Some(&call.expected) {
            self.wrong.push(format!("the result of call {} is wrong", self.ended));
        }
        self.ended += 1;
        match self.calls.get(self.ended) {
            Some(next) => self.start_at = Some(now + next.pause),
            None => self.outcome = Some((now, Ok(()))),
        }
    }
}

impl Machine for Rank {
    fn run(&mut self, now: Instant) {
        loop {
            let mut busy = self.start(now);
            if self.deadline.is_some_and(|at| at <= now) {
                self.worker.fail(self.worker.timed_out());
            }
            while let Some(command) = self.worker.poll_command() {
                busy = true;
                let parts = (self.qpn, self.control_key);
                match carry_out(now, &mut self.endpoint, parts, command) {
                    Ok(true) => {}
                    Ok(false) => self.wrong.push(format!("there is no memory for {command:?}")),
                    Err(error) => {
                        self.wrong.push(format!("the worker asks for more than fits: {error}"));
                    }
                }
            }
            let mut polled = core::mem::take(&mut self.polled);
            self.endpoint.poll_completions(self.completions, &mut polled, usize::MAX);
            let control = self.endpoint.memory().region(self.control_key).unwrap_or_default();
            for completion in polled.drain(..) {
                busy = true;
                self.worker.handle_completion(&completion, |at| message(control, at));
            }
            self.polled = polled;
            if let Some(outcome) = self.worker.poll_outcome() {
                self.end(now, outcome.map(drop));
                busy = true;
            }
            if !busy {
                break;
            }
        }
    }

    fn poll_wake(&mut self) -> Option<Instant> {
        self.start_at.or(self.deadline)
    }

    /// What it was part of is gone.
    fn restart(&mut self, _now: Instant) {
        let config = self.endpoint.config().clone();
        self.endpoint = Endpoint::new(config, OwnedMemory::new(0));
        self.start_at = None;
        self.deadline = None;
    }
}

/// A machine of an allreduce.
#[derive(Debug)]
pub enum Participant {
    /// The switch, and what it has reported.
    Switch(Box<SwitchNode>, Vec<SwitchEvent>),
    /// A host.
    Rank(Box<Rank>),
}

impl Participant {
    /// What its device has counted.
    pub fn counters(&self) -> &Counters {
        match self {
            Self::Switch(node, _) => node.counters(),
            Self::Rank(rank) => rank.endpoint.counters(),
        }
    }

    /// The host that it is, if it is one.
    pub const fn rank(&self) -> Option<&Rank> {
        match self {
            Self::Switch(..) => None,
            Self::Rank(rank) => Some(rank),
        }
    }

    fn node(&self) -> &dyn Node {
        match self {
            Self::Switch(node, _) => &**node,
            Self::Rank(rank) => &rank.endpoint,
        }
    }

    fn node_mut(&mut self) -> &mut dyn Node {
        match self {
            Self::Switch(node, _) => &mut **node,
            Self::Rank(rank) => &mut rank.endpoint,
        }
    }
}

impl Node for Rank {
    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        self.endpoint.handle_datagram(now, meta, datagram);
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.endpoint.handle_timeout(now);
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        self.endpoint.poll_timeout()
    }

    fn poll_transmit(&mut self, now: Instant, transmit: &mut Transmit) -> bool {
        self.endpoint.poll_transmit(now, transmit)
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        self.endpoint.bytes(piece)
    }
}

impl Node for Participant {
    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        self.node_mut().handle_datagram(now, meta, datagram);
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.node_mut().handle_timeout(now);
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        self.node_mut().poll_timeout()
    }

    fn poll_transmit(&mut self, now: Instant, transmit: &mut Transmit) -> bool {
        self.node_mut().poll_transmit(now, transmit)
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        self.node().bytes(piece)
    }
}

impl Machine for Participant {
    fn run(&mut self, now: Instant) {
        match self {
            Self::Switch(node, events) => {
                events.extend(core::iter::from_fn(|| node.poll_event()));
            }
            Self::Rank(rank) => rank.run(now),
        }
    }

    fn poll_wake(&mut self) -> Option<Instant> {
        match self {
            Self::Switch(..) => None,
            Self::Rank(rank) => rank.poll_wake(),
        }
    }

    fn restart(&mut self, now: Instant) {
        match self {
            Self::Switch(node, _) => {
                let mut config = node.config().clone();
                config.seed = config.seed.wrapping_add(1);
                **node = SwitchNode::new(config);
            }
            Self::Rank(rank) => rank.restart(now),
        }
    }
}
