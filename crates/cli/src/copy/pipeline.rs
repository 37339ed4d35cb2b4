//! Chunks on their way between a segment and a registered buffer: while one is read or written
//! here, the others are under way.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use millstream_transfer::{
    Batch, Buffer, Opcode, SubmitError, SubmitOptions, TransferEngine, TransferRequest,
    TransferState,
};

use super::session::Trouble;
use super::watch::Watch;
use crate::engine::Opened;
use crate::failure::usage;
use crate::paths::{self, Path};

/// Bytes of a chunk, and how many are under way.
pub(super) const CHUNK: usize = 2 << 20;
const CHUNKS: usize = 4;

/// Where in the buffer the byte of a probe arrives: after the chunks.
const PROBE: usize = CHUNK * CHUNKS;
/// How often an idle peer is probed.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// The engine keeps the same time, and knows better why nothing moves: it may speak first.
const ENGINE_SLACK: Duration = Duration::from_millis(500);

pub(super) struct Pipeline {
    /// What is waited for, as messages say it.
    what: String,
    opcode: Opcode,
    /// Chunks that are written count only once they survive a loss of power.
    durable: bool,
    /// Where the range starts in the segment's buffer, and its end, as far as that is known.
    offset: u64,
    /// `None` between a failure and the next connection.
    opened: Option<Opened>,
    buffer: Buffer,
    /// Chunks under way, each at its number modulo how many there are.
    slots: [Option<Slot>; CHUNKS],
    /// Numbers of the oldest chunk that is not finished, and of the next one.
    oldest: usize,
    next: usize,
    /// Bytes of all chunks that were begun, and of those that were finished.
    begun: u64,
    finished: u64,
    probe: Option<Batch>,
    probed_at: Instant,
    /// What took the last chunk.
    transport: Option<&'static str>,
}

/// How the bytes went.
pub(super) struct Taken {
    pub(super) transport: Option<&'static str>,
    pub(super) policy: &'static str,
    pub(super) paths: Vec<Path>,
}

struct Slot {
    /// Where it starts in the range.
    at: u64,
    length: usize,
    /// `None` when it could not be submitted.
    batch: Option<Batch>,
}

/// A chunk that has arrived, still in the buffer.
pub(super) struct Arrived {
    position: usize,
    pub(super) length: usize,
}

impl Pipeline {
    pub(super) fn new(opened: Opened, opcode: Opcode, offset: u64) -> anyhow::Result<Self> {
        let buffer = opened.engine.allocate_buffer(PROBE + 1, "*", false)?;
        Ok(Self {
            what: format!("segment {}", opened.segment.name()),
            opcode,
            durable: false,
            offset,
            opened: Some(opened),
            buffer,
            slots: Default::default(),
            oldest: 0,
            next: 0,
            begun: 0,
            finished: 0,
            probe: None,
            probed_at: Instant::now(),
            transport: None,
        })
    }

    /// The same; what it writes is to be durable, if so.
    pub(super) fn with_durable(self, durable: bool) -> Self {
        Self { durable, ..self }
    }

    pub(super) fn is_full(&self) -> bool {
        self.next - self.oldest == CHUNKS
    }

    /// What took the last chunk that has arrived, and what others say.
    pub(super) fn path(&self) -> anyhow::Result<Taken> {
        let paths = self.opened.as_ref().map(paths::of).transpose()?.unwrap_or_default();
        let policy = self.opened.as_ref().map(|opened| opened.engine.policy()).unwrap_or_default();
        Ok(Taken { transport: self.transport, policy: policy.name(), paths })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.next == self.oldest
    }

    /// Bytes of the chunks that were begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun
    }

    /// Bytes of the chunks that were finished.
    pub(super) fn finished(&self) -> u64 {
        self.finished
    }

    /// Begins to write these bytes, at most a chunk. There must be room for it.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Trouble> {
        self.buffer.write(self.next % CHUNKS * CHUNK, bytes).map_err(anyhow::Error::from)?;
        self.begin(bytes.len())
    }

    /// Begins to read the next bytes, at most a chunk. There must be room for it.
    pub(super) fn read(&mut self, length: usize) -> Result<(), Trouble> {
        self.begin(length)
    }

    /// Waits for the oldest chunk.
    pub(super) fn finish(&mut self, watch: &mut Watch) -> Result<Arrived, Trouble> {
        let position = self.oldest % CHUNKS;
        let (length, transport) = match &self.slots[position] {
            Some(Slot { length, batch: Some(batch), .. }) => (*length, self.wait(batch, watch)?),
            _ => return Err(Trouble::Remote(anyhow!("a chunk was not submitted"))),
        };
        self.slots[position] = None;
        self.transport = transport;
        self.oldest += 1;
        self.finished += length as u64;
        Ok(Arrived { position, length })
    }

    /// Whether there is a chunk under way of which [`Self::finish`] knows the end without waiting.
    pub(super) fn is_finished(&self) -> bool {
        let oldest = self.slots[self.oldest % CHUNKS].as_ref().filter(|_| !self.is_empty());
        match (oldest, &self.opened) {
            (Some(Slot { batch: Some(batch), .. }), Some(opened)) => {
                opened.engine.wait(batch, Duration::ZERO)
            }
            // It could not be submitted.
            (Some(_), _) => true,
            (None, _) => false,
        }
    }

    /// Looks whether the peer is still there while nothing is under way that would tell: every now
    /// and then a byte is read. Does not wait: a later call tells of a failure.
    pub(super) fn probe(&mut self) -> Result<(), Trouble> {
        let Some(Opened { engine, segment, .. }) = &self.opened else { return Ok(()) };
        if let Some(probe) = &self.probe {
            if !engine.wait(probe, Duration::ZERO) {
                return Ok(());
            }
            outcome(engine, probe)?;
            self.probe = None;
        }
        // At the end of the buffer is no byte to read.
        let is_byte = segment.address_of(0, self.offset, 1).is_ok();
        if self.is_empty() && is_byte && self.probed_at.elapsed() >= PROBE_INTERVAL {
            self.probed_at = Instant::now();
            self.probe = Some(self.request(Opcode::Read, PROBE, 0, 1)?);
        }
        Ok(())
    }

    /// Copies a chunk out of the buffer. Until the next call of `read` it is there.
    pub(super) fn take(&self, arrived: &Arrived, bytes: &mut Vec<u8>) -> anyhow::Result<()> {
        bytes.resize(arrived.length, 0);
        Ok(self.buffer.read(arrived.position * CHUNK, bytes)?)
    }

    /// Ends what is under way. The chunks stay, to be begun again.
    pub(super) fn disconnect(&mut self) {
        self.slots.iter_mut().flatten().for_each(|slot| slot.batch = None);
        self.probe = None;
        self.opened = None;
    }

    /// Begins the chunks that were under way again, with another engine.
    pub(super) fn reconnect(&mut self, opened: Opened) -> Result<(), Trouble> {
        // Memory is registered with one engine.
        let buffer =
            opened.engine.allocate_buffer(PROBE + 1, "*", false).map_err(anyhow::Error::from)?;
        let mut bytes = Vec::new();
        for chunk in self.oldest..self.next {
            let position = chunk % CHUNKS;
            let length = self.slots[position].as_ref().map_or(0, |slot| slot.length);
            self.take(&Arrived { position, length }, &mut bytes)?;
            buffer.write(position * CHUNK, &bytes).map_err(anyhow::Error::from)?;
        }
        self.buffer = buffer;
        self.opened = Some(opened);
        (self.oldest..self.next).try_for_each(|chunk| self.submit(chunk % CHUNKS))
    }

    /// Forgets all chunks: the copy starts again. What is under way must have ended.
    pub(super) fn rewind(&mut self) {
        (self.slots, self.oldest, self.next) = (Default::default(), 0, 0);
        (self.begun, self.finished) = (0, 0);
    }

    /// The same, and goes the other way from there.
    pub(super) fn turn(&mut self, opcode: Opcode) {
        self.rewind();
        self.opcode = opcode;
    }

    fn begin(&mut self, length: usize) -> Result<(), Trouble> {
        let position = self.next % CHUNKS;
        self.slots[position] = Some(Slot { at: self.begun, length, batch: None });
        self.next += 1;
        self.begun += length as u64;
        self.submit(position)
    }

    fn submit(&mut self, position: usize) -> Result<(), Trouble> {
        let Some(&Slot { at, length, .. }) = self.slots[position].as_ref() else { return Ok(()) };
        let batch = self.request(self.opcode, position * CHUNK, at, length as u64)?;
        if let Some(slot) = &mut self.slots[position] {
            slot.batch = Some(batch);
        }
        Ok(())
    }

    /// Submits a transfer between the buffer, from `here` on, and the range, from `at` on.
    fn request(&self, opcode: Opcode, here: usize, at: u64, length: u64) -> Result<Batch, Trouble> {
        let Some(opened) = &self.opened else {
            return Err(Trouble::Remote(anyhow!("not connected")));
        };
        let target_offset = opened
            .segment
            .address_of(0, self.offset + at, length)
            .map_err(|error| usage(format!("{}: {error}", self.what)))?;
        let request = TransferRequest {
            opcode,
            source: self.buffer.address() + here as u64,
            target: opened.segment.id(),
            target_offset,
            length,
        };
        let batch = opened.engine.allocate_batch(1).map_err(anyhow::Error::from)?;
        let options = SubmitOptions { durable: self.durable, ..opened.wishes.options() };
        let submitted = opened.engine.submit_with(&batch, &[request], &options);
        submitted.map_err(|error| match stays(&error) {
            true => Trouble::Local(error.into()),
            false => Trouble::Remote(error.into()),
        })?;
        Ok(batch)
    }

    fn wait(&self, batch: &Batch, watch: &mut Watch) -> Result<Option<&'static str>, Trouble> {
        let Some(Opened { engine, .. }) = &self.opened else {
            return Err(Trouble::Remote(anyhow!("not connected")));
        };
        let mut wait = watch.wait_for(&self.what).with_slack(ENGINE_SLACK);
        while !engine.wait(batch, wait.pause()) {
            let moved = self.moved()?;
            wait.look(moved).map_err(Trouble::Remote)?;
            wait.watch().pace(moved, engine.retransmissions());
        }
        outcome(engine, batch)
    }

    /// Bytes that have moved, those of unfinished chunks included.
    fn moved(&self) -> anyhow::Result<u64> {
        let mut moved = self.finished;
        if let Some(opened) = &self.opened {
            for batch in self.slots.iter().flatten().filter_map(|slot| slot.batch.as_ref()) {
                moved += opened.engine.status(batch, 0)?.transferred_bytes;
            }
        }
        Ok(moved)
    }
}

/// Whether the same request is refused again, whatever becomes of the peer and the way to it: what it asks for is not to be
/// had there, or not here.
const fn stays(error: &SubmitError) -> bool {
    matches!(
        error,
        SubmitError::NotDurable { .. }
            | SubmitError::UnknownPolicy { .. }
            | SubmitError::UnknownIntent { .. }
            | SubmitError::OverLimit { .. }
    )
}

/// How a batch has ended: the transport that did it.
fn outcome(engine: &TransferEngine, batch: &Batch) -> Result<Option<&'static str>, Trouble> {
    let status = engine.status(batch, 0).map_err(anyhow::Error::from)?;
    match status.error {
        Some(error) => Err(Trouble::Remote(error.into())),
        None if status.state == TransferState::Completed => Ok(status.transport),
        None => Err(Trouble::Remote(anyhow!("the transfer ended as {:?}", status.state))),
    }
}
