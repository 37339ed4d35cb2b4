//! One connected queue pair with a buffer to send from and two to receive into.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use millstream_verbs::{
    Access, Completion, CompletionQueue, CompletionStatus, Device, MemoryRegion, Mtu, Piece,
    ProtectionDomain, Psn, Qpn, QueuePair, QueuePairAttributes, QueuePairCapabilities,
    QueuePairState, ReceiveRequest, ScatterGather, SendOperation, SendRequest,
};

/// One message is looked at while the next comes.
const RECEIVE_BUFFERS: usize = 2;
/// The id of send requests. Those of receive requests are the numbers of their buffers.
const SEND: u64 = u64::MAX;

/// A queue pair and its buffers.
pub(super) struct Link {
    // Dropped before the buffers: no request names them then.
    pair: QueuePair,
    completions: CompletionQueue,
    ready: Vec<Completion>,
    send: Buffer,
    receive: [Buffer; RECEIVE_BUFFERS],
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

/// The peer's side of a connection, and how the way there is.
pub(super) struct Remote {
    pub(super) address: IpAddr,
    pub(super) qpn: Qpn,
    /// The first packet sequence number that it sends.
    pub(super) psn: Psn,
    pub(super) path_mtu: Mtu,
}

impl Link {
    /// A queue pair that is not connected, with all receives posted.
    pub(super) fn new(device: &Device, size: usize) -> anyhow::Result<Self> {
        let name = device.name();
        let domain = device.allocate_protection_domain();
        let completions = device
            .create_completion_queue(RECEIVE_BUFFERS + 1)
            .with_context(|| format!("cannot make a completion queue on {name}"))?;
        let capabilities = QueuePairCapabilities::new(1, RECEIVE_BUFFERS);
        let pair = domain
            .create_queue_pair(&completions, &completions, capabilities)
            .with_context(|| format!("cannot make a queue pair on {name}"))?;
        pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::Initialized),
            access: Some(Access::empty()),
            ..Default::default()
        })?;
        let [send, first, second] = [(); 3].map(|()| Buffer::new(&domain, size));
        let mut link = Self {
            pair,
            completions,
            ready: Vec::with_capacity(RECEIVE_BUFFERS + 1),
            send: send?,
            receive: [first?, second?],
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

    /// Connects it. `psn` is the first packet sequence number that we send. Timers and retries are
    /// those of libibverbs' examples.
    pub(super) fn connect(&self, remote: &Remote, psn: Psn) -> anyhow::Result<()> {
        self.pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::ReadyToReceive),
            remote_address: Some(remote.address),
            path_mtu: Some(remote.path_mtu),
            destination_qpn: Some(remote.qpn),
            receive_psn: Some(remote.psn),
            responder_resources: Some(1),
            minimum_rnr_timer: Some(12),
            ..Default::default()
        })?;
        self.pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::ReadyToSend),
            send_psn: Some(psn),
            timeout: Some(14),
            retry_count: Some(7),
            rnr_retry: Some(7),
            initiator_depth: Some(1),
            ..Default::default()
        })?;
        Ok(())
    }

    /// Sends a message that `fill` writes. The one before it must be acknowledged.
    pub(super) fn send(&mut self, fill: impl FnOnce(&mut [u8])) -> anyhow::Result<()> {
        if self.send.lent {
            bail!("the message before is still being sent");
        }
        fill(&mut self.send.memory.bytes_mut()[..self.size]);
        let request = SendRequest::new(
            SEND,
            SendOperation::Send { immediate: None },
            self.send.pieces(self.size),
        );
        self.pair.post_send(&[request]).map_err(|(_, error)| error).context("cannot send")?;
        self.send.lent = true;
        Ok(())
    }

    /// Waits for the next event; `None` when there is none for `timeout`.
    pub(super) fn next(&mut self, timeout: Duration) -> anyhow::Result<Option<Event>> {
        if self.ready.is_empty() {
            if !self.completions.wait(timeout) {
                return Ok(None);
            }
            self.completions.poll(&mut self.ready, RECEIVE_BUFFERS + 1);
        }
        if self.ready.is_empty() {
            return Ok(None);
        }
        let completion = self.ready.remove(0);
        if completion.status != CompletionStatus::Success {
            let what = if completion.id == SEND { "a message was not sent" } else { "no message" };
            return Err(anyhow!(completion.status).context(what));
        }
        if completion.id == SEND {
            self.send.lent = false;
            return Ok(Some(Event::Sent));
        }
        let (buffer, length) = (completion.id as usize, completion.length as usize);
        let received = self.receive.get_mut(buffer).context("a completion of no request")?;
        received.lent = false;
        Ok(Some(Event::Received(ReceivedMessage { buffer, length })))
    }

    /// The bytes of a message.
    pub(super) fn message(&self, message: ReceivedMessage) -> &[u8] {
        let buffer = &self.receive[message.buffer];
        assert!(!buffer.lent, "the buffer of a message is read before it is posted again");
        &buffer.memory.bytes()[..message.length]
    }

    /// Lets the next message come into the buffer of one that was looked at.
    pub(super) fn post_receive(&mut self, message: ReceivedMessage) -> anyhow::Result<()> {
        let buffer = &mut self.receive[message.buffer];
        let id = message.buffer as u64;
        let request = ReceiveRequest { id, pieces: buffer.pieces(self.size) };
        self.pair.post_receive(&[request]).map_err(|(_, error)| error).context("cannot receive")?;
        buffer.lent = true;
        Ok(())
    }
}

/// Memory that the device reads and writes while a request names it, and nobody else then.
struct Buffer {
    // Dropped before the memory.
    region: MemoryRegion,
    memory: Memory,
    /// A request names it: `memory` is not to be touched.
    lent: bool,
}

impl Buffer {
    fn new(domain: &ProtectionDomain, size: usize) -> anyhow::Result<Self> {
        // A region has at least one byte, though a message may have none.
        let memory = Memory::new(size.max(1))?;
        // SAFETY: the memory outlives the region by the order of the fields. Remotes have no
        // access: it is read and written only by requests that `Link` posts, and `Link` touches it
        // only while none names it, which is what `lent` says.
        let region =
            unsafe { domain.register_memory(memory.0.cast(), memory.0.len(), Access::LOCAL_WRITE) };
        Ok(Self { region: region.context("cannot register memory")?, memory, lent: false })
    }

    fn pieces(&self, size: usize) -> ScatterGather {
        let piece =
            Piece { key: self.region.key(), address: self.region.address(), length: size as u32 };
        if size == 0 { ScatterGather::EMPTY } else { ScatterGather::one(piece) }
    }
}

/// Owned memory behind a raw pointer, so that no reference to it exists but those asked for.
struct Memory(*mut [u8]);

impl Memory {
    fn new(length: usize) -> anyhow::Result<Self> {
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(length)
            .with_context(|| format!("there is no memory for messages of {length} bytes"))?;
        bytes.resize(length, 0_u8);
        Ok(Self(Box::into_raw(bytes.into_boxed_slice())))
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: it came from a box, and is freed only by `drop`. The caller is `Link`, which
        // calls this only while no request names the memory.
        unsafe { &*self.0 }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed mutably.
        unsafe { &mut *self.0 }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it came from a box in `new`, and this is the only place that frees it.
        drop(unsafe { Box::from_raw(self.0) });
    }
}
