//! A NIC of a process: an endpoint, whose completions are kept for the director.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use millstream_roce::{
    Completion, CompletionQueueId, DatagramMeta, Endpoint, EndpointConfig, Instant, Node, Piece,
    PostError, ProtectionDomainId, QueuePairCapabilities, QueuePairConfig, SendRequest, Transmit,
};
use millstream_wire::Qpn;

use super::ledger::{ProcessMemory, Shared};
use crate::connection::{Remote, connect};
use crate::{ConnectionOptions, Machine};

/// Send requests of a queue pair.
pub(super) const SEND_DEPTH: usize = 24;
const DOMAIN: ProtectionDomainId = ProtectionDomainId(1);

/// The numbers of NICs that have completions.
pub(super) type Busy = Rc<RefCell<Vec<usize>>>;

#[derive(Debug)]
pub(super) struct Nic {
    number: usize,
    process: usize,
    life: u32,
    config: EndpointConfig,
    endpoint: Endpoint<ProcessMemory>,
    completions: CompletionQueueId,
    pub(super) seen: Vec<Completion>,
    /// Its queue pairs.
    pub(super) live: BTreeSet<Qpn>,
    ledger: Shared,
    busy: Busy,
}

impl Nic {
    pub(super) fn new(
        number: usize,
        process: usize,
        config: EndpointConfig,
        ledger: &Shared,
        busy: &Busy,
    ) -> Self {
        let (endpoint, completions) = start(&config, (process, 0), ledger);
        Self {
            number,
            process,
            life: 0,
            config,
            endpoint,
            completions,
            seen: Vec::new(),
            live: BTreeSet::new(),
            ledger: Rc::clone(ledger),
            busy: Rc::clone(busy),
        }
    }

    pub(super) const fn endpoint(&self) -> &Endpoint<ProcessMemory> {
        &self.endpoint
    }

    /// Whose it is.
    pub(super) const fn process(&self) -> usize {
        self.process
    }

    /// A new queue pair.
    pub(super) fn create(&mut self) -> Option<Qpn> {
        let capabilities = QueuePairCapabilities::new(SEND_DEPTH, 1);
        let config = QueuePairConfig::new(DOMAIN, self.completions, capabilities);
        let qpn = self.endpoint.create_queue_pair(&config).ok()?;
        self.live.insert(qpn);
        Some(qpn)
    }

    pub(super) fn connect(&mut self, qpn: Qpn, remote: &Remote, options: &ConnectionOptions) {
        connect(&mut self.endpoint, qpn, remote, options);
    }

    pub(super) fn destroy(&mut self, qpn: Qpn) {
        self.endpoint.destroy_queue_pair(qpn);
        self.live.remove(&qpn);
    }

    pub(super) fn post(
        &mut self,
        now: Instant,
        qpn: Qpn,
        request: &SendRequest<Vec<Piece>>,
    ) -> Result<(), PostError> {
        self.endpoint.post_send(now, qpn, request)
    }
}

fn start(
    config: &EndpointConfig,
    process: (usize, u32),
    ledger: &Shared,
) -> (Endpoint<ProcessMemory>, CompletionQueueId) {
    let config = EndpointConfig { seed: config.seed ^ u64::from(process.1), ..config.clone() };
    let mut endpoint = Endpoint::new(config, ProcessMemory::new(process, ledger));
    let completions =
        endpoint.create_completion_queue(1 << 14).expect("an endpoint has room for one");
    (endpoint, completions)
}

impl Machine for Nic {
    fn run(&mut self, now: Instant) {
        self.ledger.borrow_mut().now = now;
        let before = self.seen.len();
        self.endpoint.poll_completions(self.completions, &mut self.seen, usize::MAX);
        if before == 0 && !self.seen.is_empty() {
            self.busy.borrow_mut().push(self.number);
        }
        while self.endpoint.poll_event().is_some() {}
    }

    fn restart(&mut self, _now: Instant) {
        self.life += 1;
        self.seen.clear();
        self.live.clear();
        let process = (self.process, self.life);
        (self.endpoint, self.completions) = start(&self.config, process, &self.ledger);
    }
}

impl Node for Nic {
    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        self.ledger.borrow_mut().now = now;
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
