//! What a target says: replies to requests, and the data of READs, which goes where it belongs.

use std::io;
use std::mem;
use std::sync::Arc;

use millstream_metadata::{FrameDecoder, MESSAGE_LIMIT, token_refusal};

use super::flow::Part;
use super::initiator::Shared;
use super::protocol::{EFAULT, Event, Outcome, Reply, ReplyDecoder};
use super::wire::Wire;
use crate::Opcode;
use crate::gpu;
use crate::memory::LocalMemory;
use crate::task::EndedTasks;

/// Bytes that are received at once where a reply may begin.
const STAGE: usize = 64 << 10;

/// Why nothing was received.
pub(super) enum ReceiveError {
    /// There is nothing, or the connection broke.
    Io(io::Error),
    /// The target closes, and has not begun what it has not answered.
    Closing,
    /// No target says this.
    Nonsense(String),
}

/// What the thread that receives has.
pub(super) struct Receiving<'a> {
    shared: &'a Shared,
    decoder: ReplyDecoder,
    /// Where the data of a READ goes.
    data: Option<Destination>,
    tasks: EndedTasks,
}

struct Destination {
    id: u64,
    local: Arc<LocalMemory>,
    address: u64,
    /// The memory was unregistered meanwhile, or nobody wants the data any more.
    gone: bool,
}

impl<'a> Receiving<'a> {
    pub(super) fn new(shared: &'a Shared) -> Self {
        Self { shared, decoder: ReplyDecoder::new(), data: None, tasks: EndedTasks::default() }
    }

    /// Tells the batches of the tasks that have ended. To be called before a wait.
    pub(super) fn tell(&mut self) {
        drop(mem::take(&mut self.tasks));
    }

    /// Touches memory no more for what is not wanted any more.
    pub(super) fn look(&mut self) {
        if let Some(data) = &mut self.data {
            data.gone |= !self.shared.is_wanted(data.id);
        }
    }

    /// Why the target turns this side away, if that is what it has said in place of a hello: it asks for more than it was
    /// shown.
    pub(super) fn turned_away(&self) -> Option<String> {
        let mut decoder = FrameDecoder::new(MESSAGE_LIMIT);
        decoder.push(self.decoder.unread()).ok()?;
        token_refusal(&decoder.take()?).map(|error| error.to_string())
    }

    /// Where bytes are received that do not go straight to where they belong.
    pub(super) fn stage() -> Vec<u8> {
        vec![0; STAGE]
    }

    /// Receives what there is; 0 at the end of the stream.
    pub(super) fn receive(
        &mut self,
        wire: &Wire,
        stage: &mut Vec<u8>,
    ) -> Result<usize, ReceiveError> {
        let left = self.decoder.data_left();
        // Sockets do not take memory of a GPU.
        let is_staged = self.data.as_ref().is_some_and(|data| data.local.is_gpu());
        let direct = self.data.as_mut().filter(|data| left > 0 && !data.gone && !is_staged);
        let direct = direct.zip(wire.plain());
        if let Some((data, stream)) = direct {
            let Some(inside) = data.local.enter() else {
                data.gone = true;
                return self.receive(wire, stage);
            };
            let count = inside.receive(stream, data.address, left as u64);
            drop(inside);
            // Somebody has unmapped it.
            if count.as_ref().is_err_and(|error| error.raw_os_error() == Some(EFAULT)) {
                data.gone = true;
                return self.receive(wire, stage);
            }
            let count = count.map_err(ReceiveError::Io)?;
            data.address += count as u64;
            self.decoder.received(count);
            self.end_data();
            return Ok(count);
        }
        let room = if is_staged { gpu::STAGED } else { STAGE };
        stage.resize(room.max(stage.len()), 0);
        let count = wire.receive(&mut stage[..room]).map_err(ReceiveError::Io)?;
        let mut input = &stage[..count];
        let nonsense = |text: String| {
            ReceiveError::Nonsense(format!(
                "what the process that has it says makes no sense: {text}"
            ))
        };
        loop {
            match self.decoder.next(&mut input) {
                Ok(None) => return Ok(count),
                Ok(Some(Event::Header(Reply::Ended { id, outcome, length }))) => {
                    self.ended(id, outcome, length).map_err(|text| nonsense(text.to_owned()))?;
                }
                Ok(Some(Event::Data(bytes))) => {
                    if let Some(data) = &mut self.data {
                        let copied = !data.gone
                            && data.local.enter().is_some_and(|it| it.copy_in(data.address, bytes));
                        data.gone = !copied;
                        data.address += bytes.len() as u64;
                    }
                    self.end_data();
                }
                Ok(Some(Event::Header(Reply::Closing))) => return Err(ReceiveError::Closing),
                Ok(Some(Event::Header(Reply::Named { connection }))) => {
                    self.shared.named(connection);
                }
                Ok(Some(Event::Hello(_) | Event::Header(Reply::Alive) | Event::End(_))) => {}
                Err(error) => return Err(nonsense(error.to_string())),
            }
        }
    }

    /// A reply to a request.
    fn ended(&mut self, id: u64, outcome: Outcome, length: u32) -> Result<(), &'static str> {
        if outcome == Outcome::Done && length == 0 && self.shared.confirmed(id) {
            return Ok(());
        }
        let part = self.shared.answered(id).ok_or("it answers what was not asked")?;
        let expected = match (part.opcode, outcome) {
            (Opcode::Read, Outcome::Done) => part.length,
            _ => 0,
        };
        if length != expected {
            return Err("its data is not as long as was asked for");
        }
        if length > 0 {
            let Part { local, address, given_up, .. } = part;
            self.data = Some(Destination { id, local, address, gone: given_up });
            return Ok(());
        }
        self.shared.end(id, outcome, &mut self.tasks);
        Ok(())
    }

    /// Ends a READ whose data has come.
    fn end_data(&mut self) {
        if self.decoder.data_left() > 0 {
            return;
        }
        if let Some(Destination { id, gone, .. }) = self.data.take() {
            let outcome = if gone { Outcome::Abandoned } else { Outcome::Done };
            self.shared.end(id, outcome, &mut self.tasks);
        }
    }
}
