//! A host with an endpoint and an application that carries out plans and checks every completion.

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use millstream_roce::{
    AsyncEvent, Completion, CompletionOperation, CompletionQueueId, CompletionStatus, Counters,
    DatagramMeta, Endpoint, EndpointConfig, Instant, Node, OwnedMemory, Piece, PostError,
    ReceiveRequest, SendRequest, Transmit,
};
use millstream_wire::Qpn;

use crate::Machine;
use crate::plan::{Kind, Operation, Plan};

/// A region as both sides name it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Buffer {
    /// Its key.
    pub key: u32,
    /// Its first address.
    pub address: u64,
}

/// Which way a plan goes over a connection: who posts the send requests.
#[derive(Clone, Debug, Default)]
pub struct Sending {
    /// What to do.
    pub plan: Plan,
    /// Our bytes for SEND and WRITE.
    pub source: Buffer,
    /// Where our READs go.
    pub target: Buffer,
    /// The peer's bytes for our READs.
    pub remote_source: Buffer,
    /// Where our WRITEs go.
    pub remote_target: Buffer,
}

/// The other side of a [`Sending`]: who posts the receive requests for it.
#[derive(Clone, Debug, Default)]
pub struct Receiving {
    /// What the peer is going to do.
    pub plan: Plan,
    /// Where its SENDs go.
    pub target: Buffer,
    /// How many receive requests are posted at a time.
    pub depth: usize,
    /// How long a receive request is posted after the one before it was consumed.
    pub lag: Duration,
}

/// What the application has seen since the last look.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum News {
    /// A send request of ours ended well, and with it all before it.
    Completed {
        /// The connection.
        channel: usize,
        /// Index in the plan.
        operation: usize,
    },
    /// A receive request took a message.
    Received {
        /// The connection.
        channel: usize,
        /// Index in the peer's plan.
        operation: usize,
    },
    /// A request ended badly.
    Failed {
        /// The connection.
        channel: usize,
        /// How.
        status: CompletionStatus,
    },
    /// A completion is not what it should be.
    Wrong(String),
}

/// A connection as one side sees it.
#[derive(Debug)]
struct Channel {
    qpn: Qpn,
    sending: Sending,
    /// Send requests posted.
    posted: usize,
    /// One past the last send request known to be complete.
    completed: usize,
    receiving: Receiving,
    /// Indices into the peer's plan of what takes a receive request.
    receives: Vec<usize>,
    receives_posted: usize,
    receives_completed: usize,
    /// When the next receive requests may be posted.
    vacancies: VecDeque<Instant>,
    /// A request failed: nothing more is posted.
    failed: Option<(Instant, CompletionStatus)>,
}

/// A host.
#[derive(Debug)]
pub struct Peer {
    endpoint: Endpoint<OwnedMemory>,
    completions: CompletionQueueId,
    polled: Vec<Completion>,
    channels: Vec<Channel>,
    by_qpn: BTreeMap<Qpn, usize>,
    news: Vec<News>,
}

impl Peer {
    /// Completions polled at a time.
    const BATCH: usize = 64;

    /// A host whose queue pairs complete into `completions`.
    pub fn new(endpoint: Endpoint<OwnedMemory>, completions: CompletionQueueId) -> Self {
        Self {
            endpoint,
            completions,
            polled: Vec::with_capacity(Self::BATCH),
            channels: Vec::new(),
            by_qpn: BTreeMap::new(),
            news: Vec::new(),
        }
    }

    /// Adds a connection that is ready to send; returns its number.
    pub fn add_channel(&mut self, qpn: Qpn, sending: Sending, receiving: Receiving) -> usize {
        let receives = receiving.plan.receives();
        let vacancies = core::iter::repeat_n(Instant::ZERO, receiving.depth).collect();
        self.channels.push(Channel {
            qpn,
            sending,
            posted: 0,
            completed: 0,
            receives,
            receiving,
            receives_posted: 0,
            receives_completed: 0,
            vacancies,
            failed: None,
        });
        self.by_qpn.insert(qpn, self.channels.len() - 1);
        self.channels.len() - 1
    }

    /// Its device.
    pub const fn endpoint(&self) -> &Endpoint<OwnedMemory> {
        &self.endpoint
    }

    /// Its device, to change.
    pub const fn endpoint_mut(&mut self) -> &mut Endpoint<OwnedMemory> {
        &mut self.endpoint
    }

    /// What its device has counted.
    pub fn counters(&self) -> &Counters {
        self.endpoint.counters()
    }

    /// The bytes of a buffer.
    pub fn buffer(&self, buffer: Buffer) -> &[u8] {
        self.endpoint.memory().region(buffer.key).unwrap_or_default()
    }

    /// Takes what the application has seen.
    pub fn take_news(&mut self) -> Vec<News> {
        core::mem::take(&mut self.news)
    }

    /// Whether there is any.
    pub const fn has_news(&self) -> bool {
        !self.news.is_empty()
    }

    /// Whether everything planned has ended, well or badly.
    pub fn is_finished(&self) -> bool {
        self.channels.iter().all(Channel::is_finished)
    }

    /// When a channel failed, and how its first request that did ended. Nothing after a restart.
    pub fn failure(&self, channel: usize) -> Option<(Instant, CompletionStatus)> {
        self.channels.get(channel)?.failed
    }

    /// What is still open, in words.
    pub fn unfinished(&self) -> impl Iterator<Item = String> {
        let open = self.channels.iter().filter(|channel| !channel.is_finished());
        open.map(|channel| {
            format!(
                "qp {}: {} of {} requests posted, {} complete; {} of {} receives complete",
                channel.qpn,
                channel.posted,
                channel.sending.plan.operations.len(),
                channel.completed,
                channel.receives_completed,
                channel.receives.len(),
            )
        })
    }

    fn completion(&mut self, now: Instant, completion: &Completion) {
        let Some(&index) = self.by_qpn.get(&completion.qpn) else {
            self.news.push(News::Wrong(format!("a completion of no queue pair: {completion:?}")));
            return;
        };
        let channel = &mut self.channels[index];
        let seen = match completion.operation {
            CompletionOperation::Receive | CompletionOperation::ReceiveWrite => {
                channel.received(now, index, completion)
            }
            _ => channel.completed(now, index, completion),
        };
        self.news.push(seen.unwrap_or_else(|what| {
            News::Wrong(format!("channel {index}: {what}: {completion:?}"))
        }));
    }
}

impl Channel {
    fn is_finished(&self) -> bool {
        self.failed.is_some()
            || (self.completed == self.sending.plan.operations.len()
                && self.receives_completed == self.receives.len())
    }

    fn fail(&mut self, now: Instant, index: usize, status: CompletionStatus) -> News {
        self.failed.get_or_insert((now, status));
        News::Failed { channel: index, status }
    }

    fn completed(
        &mut self,
        now: Instant,
        index: usize,
        completion: &Completion,
    ) -> Result<News, &'static str> {
        let operation = completion.id as usize;
        if operation < self.completed || operation >= self.posted {
            return Err("a completion twice, or out of order, or of nothing posted");
        }
        let before = &self.sending.plan.operations[self.completed..operation];
        self.completed = operation + 1;
        if completion.status != CompletionStatus::Success {
            // Requests before it that ask for no completion may have ended well.
            let skipped = before.iter().any(|skipped| skipped.signaled);
            let news = self.fail(now, index, completion.status);
            return if skipped { Err("a request before it has no completion") } else { Ok(news) };
        }
        if self.failed.is_some() {
            return Err("success after a failure");
        }
        if before.iter().any(|skipped| skipped.signaled) {
            return Err("a request before it has no completion");
        }
        let planned = &self.sending.plan.operations[operation];
        let right = match planned.kind {
            Kind::Send | Kind::SendImmediate => CompletionOperation::Send,
            Kind::Write | Kind::WriteImmediate => CompletionOperation::Write,
            Kind::Read => CompletionOperation::Read,
        };
        if !planned.signaled || completion.operation != right || completion.length != planned.length
        {
            return Err("a completion that was not asked for, or of something else");
        }
        Ok(News::Completed { channel: index, operation })
    }

    fn received(
        &mut self,
        now: Instant,
        index: usize,
        completion: &Completion,
    ) -> Result<News, &'static str> {
        if completion.status != CompletionStatus::Success {
            return Ok(self.fail(now, index, completion.status));
        }
        if self.receives_completed >= self.receives_posted {
            return Err("a receive that was not posted");
        }
        let operation = self.receives[self.receives_completed];
        self.receives_completed += 1;
        self.vacancies.push_back(now + self.receiving.lag);
        let planned = &self.receiving.plan.operations[operation];
        let right = match planned.kind {
            Kind::WriteImmediate => CompletionOperation::ReceiveWrite,
            _ => CompletionOperation::Receive,
        };
        if completion.id as usize != operation
            || completion.operation != right
            || completion.length != planned.length
            || completion.immediate != planned.kind.has_immediate().then_some(operation as u32)
        {
            return Err("a receive that differs from what was sent");
        }
        Ok(News::Received { channel: index, operation })
    }

    fn post_receives(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
    ) -> Result<(), PostError> {
        while self.receives_posted < self.receives.len()
            && self.vacancies.front().is_some_and(|&at| at <= now)
        {
            let index = self.receives[self.receives_posted];
            let operation = self.receiving.plan.operations[index];
            let pieces = match operation.kind {
                Kind::WriteImmediate => Vec::new(),
                _ => operation.gather(self.receiving.target.key, self.receiving.target.address),
            };
            endpoint.post_receive(self.qpn, &ReceiveRequest { id: index as u64, pieces })?;
            self.vacancies.pop_front();
            self.receives_posted += 1;
        }
        Ok(())
    }

    fn post_sends(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint<OwnedMemory>,
    ) -> Result<(), PostError> {
        while let Some(operation) = self.sending.plan.operations.get(self.posted) {
            let request = self.sending.request(operation, self.posted);
            match endpoint.post_send(now, self.qpn, &request) {
                Ok(()) => self.posted += 1,
                Err(PostError::QueueFull { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Sending {
    fn request(&self, operation: &Operation, index: usize) -> SendRequest<Vec<Piece>> {
        let (local, remote) = match operation.kind {
            Kind::Read => (self.target, self.remote_source),
            _ => (self.source, self.remote_target),
        };
        SendRequest {
            signaled: operation.signaled,
            ..SendRequest::new(
                index as u64,
                operation.request(remote.address, remote.key, index as u32),
                operation.gather(local.key, local.address),
            )
        }
    }
}

impl Machine for Peer {
    fn run(&mut self, now: Instant) {
        loop {
            let mut polled = core::mem::take(&mut self.polled);
            self.endpoint.poll_completions(self.completions, &mut polled, Self::BATCH);
            for completion in &polled {
                self.completion(now, completion);
            }
            let last = polled.len() < Self::BATCH;
            polled.clear();
            self.polled = polled;
            if last {
                break;
            }
        }
        for channel in self.channels.iter_mut().filter(|channel| channel.failed.is_none()) {
            let posted = channel
                .post_receives(now, &mut self.endpoint)
                .and_then(|()| channel.post_sends(now, &mut self.endpoint));
            if let Err(error) = posted {
                self.news.push(News::Wrong(format!("{error}")));
            }
        }
        while let Some(event) = self.endpoint.poll_event() {
            let established = matches!(event, AsyncEvent::CommunicationEstablished(_));
            let expected = event.failed_queue_pair().is_some() || established;
            if !expected {
                self.news.push(News::Wrong(format!("{event:?}")));
            }
        }
    }

    fn poll_wake(&mut self) -> Option<Instant> {
        let open = self.channels.iter().filter(|channel| channel.failed.is_none());
        let lagging = open.filter(|channel| channel.receives_posted < channel.receives.len());
        lagging.filter_map(|channel| channel.vacancies.front().copied()).min()
    }

    /// Comes back without a memory of any connection.
    fn restart(&mut self, _now: Instant) {
        let config: EndpointConfig = self.endpoint.config().clone();
        self.endpoint = Endpoint::new(config, OwnedMemory::new(0));
        self.channels.clear();
        self.by_qpn.clear();
    }
}

impl Node for Peer {
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
