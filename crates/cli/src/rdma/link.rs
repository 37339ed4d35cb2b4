//! One queue pair of a pingpong, with a buffer to send from and two to receive into.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use millstream_verbs::{
    Access, Completion, CompletionStatus, DatagramDestination, Device, GLOBAL_ROUTE_HEADER_LENGTH,
    Psn, Qpn, QueuePair, QueuePairCapabilities, QueuePairOptions, ReceiveRequest, SendOperation,
    SendRequest, Transport,
};

use super::completions::Completions;
use super::connection::{self, Remote};
use super::memory::Buffer;

/// One message is looked at while the next comes.
const RECEIVE_BUFFERS: usize = 2;
/// The id of send requests. Those of receive requests are the numbers of their buffers.
const SEND: u64 = u64::MAX;

/// A queue pair and its buffers.
pub(super) struct Link {
    // Dropped before the buffers: no request names them then.
    pair: QueuePair,
    completions: Completions,
    ready: VecDeque<Completion>,
    /// Where datagrams go, if it sends such.
    destination: Option<DatagramDestination>,
    /// Bytes before a message in a receive buffer: the header of its datagram.
    header: usize,
    send: Buffer,
    receive: [Buffer; RECEIVE_BUFFERS],
    /// The message that is written or looked at.
    message: Vec<u8>,
    size: usize,
}

/// What a [`Link`] waited for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Event {
    /// The peer has acknowledged the message.
    Sent,
    /// A message lies in this receive buffer.
    Received(ReceivedMessage),
}

/// A message that came.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct ReceivedMessage {
    buffer: usize,
    length: usize,
}

impl Link {
    /// A queue pair that is not connected, with all receives posted.
    pub(super) fn new(
        device: &Device,
        transport: Transport,
        size: usize,
        busy_poll: bool,
    ) -> anyhow::Result<Self> {
        let name = device.name();
        let domain = device.allocate_protection_domain();
        let completions = Completions::new(device, RECEIVE_BUFFERS + 1, busy_poll)?;
        let capabilities = QueuePairCapabilities::new(1, RECEIVE_BUFFERS);
        let options = QueuePairOptions {
            transport,
            ..QueuePairOptions::new(completions.queue(), capabilities)
        };
        let pair = domain
            .create_queue_pair_with(&options)
            .with_context(|| format!("cannot make a queue pair on {name}"))?;
        let header = match transport {
            Transport::ReliableConnection => {
                connection::initialize(&pair, Access::empty())?;
                0
            }
            Transport::UnreliableDatagram => {
                connection::initialize_datagrams(&pair)?;
                GLOBAL_ROUTE_HEADER_LENGTH
            }
        };
        let buffer = |length| Buffer::new(&domain, length, Access::LOCAL_WRITE);
        let [send, first, second] = [size, header + size, header + size].map(buffer);
        let mut link = Self {
            pair,
            completions,
            ready: VecDeque::with_capacity(RECEIVE_BUFFERS + 1),
            destination: None,
            header,
            send: send?,
            receive: [first?, second?],
            message: vec![0; size],
            size,
        };
        for buffer in 0..RECEIVE_BUFFERS {
            link.post_receive(ReceivedMessage { buffer, length: 0 })?;
        }
        Ok(link)
    }

    pub(super) fn number(&self) -> Qpn {
        self.pair.number()
    }

    /// Connects it, or lets it send its datagrams there. `psn` is the first packet sequence number
    /// that we send.
    pub(super) fn connect(&mut self, remote: &Remote, psn: Psn) -> anyhow::Result<()> {
        if self.header == 0 {
            return connection::connect(&self.pair, remote, psn);
        }
        self.destination = Some(DatagramDestination {
            address: remote.at.ip,
            qpn: remote.qpn,
            queue_key: connection::QUEUE_KEY,
        });
        connection::start_datagrams(&self.pair, psn)
    }

    /// Sends a message that `fill` writes. The one before it must be acknowledged.
    pub(super) fn send(&mut self, fill: impl FnOnce(&mut [u8])) -> anyhow::Result<()> {
        fill(&mut self.message);
        self.send.write(0, &self.message)?;
        let operation = SendOperation::Send { immediate: None };
        let pieces = self.send.pieces(0, self.size as u32);
        let datagram = self.destination;
        let request = SendRequest { datagram, ..SendRequest::new(SEND, operation, pieces) };
        self.pair.post_send(&[request]).map_err(|(_, error)| error).context("cannot send")
    }

    /// Waits for the next event; `None` when there is none for `timeout`.
    pub(super) fn next(&mut self, timeout: Duration) -> anyhow::Result<Option<Event>> {
        if self.ready.is_empty() {
            self.ready.extend(self.completions.next(timeout));
        }
        let Some(completion) = self.ready.pop_front() else { return Ok(None) };
        if completion.status != CompletionStatus::Success {
            let what = if completion.id == SEND { "a message was not sent" } else { "no message" };
            return Err(anyhow!(completion.status).context(what));
        }
        if completion.id == SEND {
            return Ok(Some(Event::Sent));
        }
        let buffer = completion.id as usize;
        let length = (completion.length as usize).saturating_sub(self.header);
        if buffer >= RECEIVE_BUFFERS {
            bail!("a completion of no request: {completion:?}");
        }
        Ok(Some(Event::Received(ReceivedMessage { buffer, length })))
    }

    /// The bytes of a message.
    pub(super) fn message(&mut self, message: ReceivedMessage) -> anyhow::Result<&[u8]> {
        let bytes = self.message.get_mut(..message.length);
        let bytes = bytes.context("a message is longer than its buffer")?;
        self.receive[message.buffer].read(self.header, bytes)?;
        Ok(bytes)
    }

    /// Lets the next message come into the buffer of one that was looked at.
    pub(super) fn post_receive(&mut self, message: ReceivedMessage) -> anyhow::Result<()> {
        let buffer = &self.receive[message.buffer];
        let pieces = buffer.pieces(0, (self.header + self.size) as u32);
        let request = ReceiveRequest { id: message.buffer as u64, pieces };
        self.pair.post_receive(&[request]).map_err(|(_, error)| error).context("cannot receive")
    }
}
