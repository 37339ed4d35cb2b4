//! The host's side of a communicator: one rank, or several that have one connection.
//!
//! A [`HostWorker`] says what to post and takes what completes; it knows no device. The same code
//! drives an endpoint in a simulation and a queue pair of a real device:
//!
//! 1. carry out everything that [`HostWorker::poll_command`] returns, in that order;
//! 2. give it every completion of the queue pair ([`HostWorker::handle_completion`]), and go to 1;
//! 3. after [`HostWorker::start`], and until [`HostWorker::poll_outcome`] returns something.
//!
//! The commands of 1 must be carried out once before the switch's end of the connection may send:
//! they post the receives.
//!
//! A rank that has sent all it may and waits hears nothing when the switch dies: silence is what
//! it expects. [`HostWorker::probe`], called now and then, makes that a broken connection.
//!
//! A collective ends when all results have come *and* all that was sent is acknowledged: only then
//! do the buffers belong to the caller again.
//!
//! A host with several ranks ([`HostWorker::of_ranks`]) has contributed for them what it sends, and gets what any of them
//! is to get. Its source and destination are laid out as the whole vector of the call is, of which it uses what is of its
//! ranks.
//!
//! A vector that fits a packet is copied behind the descriptor ([`Command::Load`]), and its result from the
//! message that brings it ([`Command::Deliver`]). No remote reads or writes the caller's memory then.

use millstream_roce::{
    Completion, CompletionOperation, CompletionStatus, Piece, ReceiveRequest, SendOperation,
    SendRequest,
};
use millstream_wire::Mtu;
use thiserror::Error;

use crate::abort::{ABORT_BYTES, Abort};
use crate::answer::Answer;
use crate::descriptor::{DESCRIPTOR_BYTES, Descriptor};
use crate::error::{CollectiveError, StartError};
use crate::kernels::Kernel;
use crate::layout::{Cut, Layout};
use crate::ranks::Ranks;
use crate::spec::{MAX_SEGMENT_BYTES, MAX_WINDOW};
use crate::{Collective, CollectiveCall, Mode};

/// Bytes of the control region: the descriptor that is being sent, with a small vector behind it, then two
/// messages of the switch.
pub const CONTROL_BYTES: usize = (1 + MESSAGES) * PACKET;

/// The longest packet.
const PACKET: usize = Mtu::B4096.bytes();

/// Messages that may have come and not been looked at: an answer with a result, and an abort behind it.
const MESSAGES: usize = 2;

/// Ids of work requests: WRITEs have the number of their segment.
const DESCRIPTOR_ID: u64 = 1 << 62;
const PROBE_ID: u64 = DESCRIPTOR_ID + 1;
const CREDIT_ID: u64 = DESCRIPTOR_ID + 2;
const OVERDUE_ID: u64 = DESCRIPTOR_ID + 3;
/// Of a receive, with the number of its message buffer in the lowest bits.
const RECEIVE_ID: u64 = 1 << 63;

/// What a worker is made with. All ranks of a communicator have the same segments and window.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HostConfig {
    /// Bytes of a segment.
    pub segment_bytes: u32,
    /// Segments that may be ahead of the last result.
    pub window: u32,
    /// Key of a region of [`CONTROL_BYTES`] bytes with the right to be written locally.
    pub control_key: u32,
    /// Its address.
    pub control_address: u64,
    /// Which one this is; of several, the lowest.
    pub rank: u32,
    /// How many there are.
    pub world: u32,
    /// Payload bytes per packet, on all edges of the tree.
    pub path_mtu: Mtu,
}

/// Why a worker cannot be made.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum HostConfigError {
    /// The window is out of range.
    #[error("a window of {0} segments is out of range: 1 to {MAX_WINDOW}")]
    Window(u32),
    /// The segment size is out of range.
    #[error("a segment of {0} bytes is no good: a multiple of 8 from 8 to {MAX_SEGMENT_BYTES}")]
    SegmentBytes(u32),
}

/// Something to do now, in this order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Command {
    /// Copy these bytes to the start of the control region.
    Store([u8; DESCRIPTOR_BYTES]),
    /// Copy these bytes of the source behind them.
    Load(Piece),
    /// Copy the result, or a part of it, from the control region to the destination, before the next collective is started.
    /// Parts of it come one right after the other, and count as one when it fails.
    Deliver {
        /// Where in the control region it is.
        offset: usize,
        /// Where it goes in the destination. Its key is that of the call.
        to: Piece,
    },
    /// Post this receive.
    Receive(ReceiveRequest),
    /// Post this send.
    Send(SendRequest),
}

/// A collective that has ended with a result.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Completed {
    /// Its number.
    pub sequence: u64,
    /// Bytes of the whole vector that the ranks reduced or got together.
    pub bytes: u64,
}

/// A collective under way.
#[derive(Clone, Copy, Debug)]
struct Running {
    /// Its number among those of all trees.
    number: u64,
    call: CollectiveCall,
    layout: Layout,
    /// The number of the receive that its agreement goes into.
    first_receive: u64,
    stored: bool,
    loaded: bool,
    announced: bool,
    agreed: bool,
    /// Where in the control region the result is that came with the answer, until it is delivered.
    result_at: Option<usize>,
}

/// What is left to deliver of a result that came with the answer.
#[derive(Clone, Copy, Debug)]
struct Delivery {
    call: CollectiveCall,
    layout: Layout,
    /// Where it is in the control region.
    at: usize,
    /// Which of the ranges of this host's ranks is next.
    range: usize,
}

/// One rank of a communicator, or those of a host.
#[derive(Debug)]
pub struct HostWorker {
    config: HostConfig,
    /// The ranks of a host that has several.
    ranks: Option<Ranks>,
    cut: Cut,
    /// Collectives started here.
    sequence: u64,
    /// The number of the next one, unless it is said, among those of all trees.
    number: u64,
    /// Segments sent, or not to be sent, over all collectives.
    sent: u64,
    /// Answers to them that have come, without gaps.
    results: u64,
    running: Option<Running>,
    /// Receive requests posted, over all collectives.
    posted: u64,
    /// How many of them are consumed.
    consumed: u64,
    /// Send requests posted and not complete.
    sends: u32,
    /// A probe is to be sent.
    probe: bool,
    /// The switch is to be told that this rank waits no longer.
    overdue: bool,
    delivery: Option<Delivery>,
    outcome: Option<Result<Completed, CollectiveError>>,
    failed: Option<CollectiveError>,
    /// What was under way when it failed.
    halted: Option<Halted>,
}

/// A collective that was under way when its worker failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Halted {
    /// Its number.
    pub number: u64,
    /// Segments whose answer had come, without gaps: this rank has the results among them, and every rank has contributed
    /// to them. Of a vector that travels with the descriptor, 1 when its result was delivered, else 0.
    pub results: u64,
    /// Segments there are.
    pub segments: u64,
    /// The segment whose answer was to come next, of all collectives.
    pub next_segment: u64,
}

impl HostConfig {
    /// As [`HostWorker::required_send_requests`].
    pub const fn required_send_requests(&self) -> u32 {
        2 * self.window + 1
    }

    /// As [`HostWorker::required_receive_requests`].
    pub const fn required_receive_requests(&self) -> u32 {
        self.window + 2
    }
}

/// Where in the control region a message buffer is.
const fn message_offset(buffer: u64) -> usize {
    (1 + buffer as usize % MESSAGES) * PACKET
}

impl HostWorker {
    /// A rank that has not called anything yet.
    pub const fn new(config: HostConfig) -> Result<Self, HostConfigError> {
        let HostConfig { segment_bytes, window, world, path_mtu, .. } = config;
        if window == 0 || window > MAX_WINDOW {
            return Err(HostConfigError::Window(window));
        }
        // A multiple of every element size, so that none is split between segments.
        if segment_bytes == 0
            || segment_bytes > MAX_SEGMENT_BYTES
            || !segment_bytes.is_multiple_of(8)
        {
            return Err(HostConfigError::SegmentBytes(segment_bytes));
        }
        Ok(Self {
            config,
            ranks: None,
            cut: Cut::new(world, segment_bytes, path_mtu),
            sequence: 0,
            number: 0,
            sent: 0,
            results: 0,
            running: None,
            posted: 0,
            consumed: 0,
            sends: 0,
            probe: false,
            overdue: false,
            delivery: None,
            outcome: None,
            failed: None,
            halted: None,
        })
    }

    /// For all of these ranks, of which the configuration has the lowest. Of one, or none, it is [`HostWorker::new`].
    pub fn of_ranks(config: HostConfig, ranks: Ranks) -> Result<Self, HostConfigError> {
        debug_assert!(ranks.is_empty() || ranks.first() == Some(config.rank), "{ranks:?}");
        let ranks = Some(ranks).filter(|ranks| ranks.len() > 1);
        Ok(Self { ranks, ..Self::new(config)? })
    }

    /// Where in the source the bytes of a segment are, if they are sent from here.
    fn source_offset(&self, layout: &Layout, segment: u64) -> Option<u64> {
        match &self.ranks {
            None => layout.source_offset(segment, self.config.rank),
            Some(ranks) => layout.source_offset_of(segment, ranks),
        }
    }

    /// Where in the destination the result of a segment goes, if it comes here.
    fn target_offset(&self, layout: &Layout, segment: u64) -> Option<u64> {
        match &self.ranks {
            None => layout.target_offset(segment, self.config.rank),
            Some(ranks) => layout.target_offset_of(segment, ranks),
        }
    }

    /// Bytes that travel with the descriptor.
    fn small_source(&self, layout: &Layout) -> usize {
        let range = match &self.ranks {
            None => layout.small_source(self.config.rank),
            Some(ranks) => layout.small_source_of(ranks),
        };
        range.len()
    }

    /// Bytes that come with the answer to it.
    fn small_target(&self, layout: &Layout) -> usize {
        let range = match &self.ranks {
            None => layout.small_target(self.config.rank),
            Some(ranks) => layout.small_target_of(ranks),
        };
        range.len()
    }

    /// Delivers what came with the answer. A host with several ranks that gets parts gets those of its own: where its
    /// source is the same memory, others may need the rest of that when switches are lost.
    fn deliver(&mut self, delivery: Delivery) -> Command {
        let Delivery { call, layout, at, range } = delivery;
        let ranges = self.ranks.as_ref().map_or(&[][..], Ranks::ranges);
        let own = match ranges.get(range) {
            Some(ranks) if call.collective == Collective::ReduceScatter => {
                let next = range + 1;
                self.delivery =
                    (next < ranges.len()).then_some(Delivery { range: next, ..delivery });
                layout.small_part(ranks.clone())
            }
            _ => 0..self.small_target(&layout),
        };
        let address = call.destination_address + own.start as u64;
        let to = Piece { key: call.destination_key, address, length: own.len() as u32 };
        Command::Deliver { offset: at + own.start, to }
    }

    /// What it was made with.
    pub const fn config(&self) -> HostConfig {
        self.config
    }

    /// The segment, of all collectives, that a send request with this id carries, if it is one.
    pub const fn segment_of(id: u64) -> Option<u64> {
        if id < DESCRIPTOR_ID { Some(id) } else { None }
    }

    /// How many send requests the queue pair must hold: a descriptor, a window of segments, and as
    /// many whose result has come before the acknowledgement of what was sent.
    pub const fn required_send_requests(&self) -> u32 {
        self.config.required_send_requests()
    }

    /// How many receive requests the queue pair must hold: the results of a window, an agreement
    /// and an abort.
    pub const fn required_receive_requests(&self) -> u32 {
        self.config.required_receive_requests()
    }

    /// Whether the vector of a call travels with the descriptor: then no other device touches source and
    /// destination, which need not be registered.
    pub const fn is_small(&self, call: &CollectiveCall) -> bool {
        let parts = match call.collective {
            Collective::ReduceScatter | Collective::AllGather => self.config.world as u64,
            Collective::Barrier => 0,
            _ => 1,
        };
        let elements = call.count.saturating_mul(parts);
        let bytes = elements.saturating_mul(call.data_type.size() as u64);
        call.stripe.trees() == 1 && bytes <= self.cut.small_bytes
    }

    /// Whether a collective can be started once those before it are over.
    pub fn check(&self, call: &CollectiveCall) -> Result<(), StartError> {
        let CollectiveCall { collective, count, data_type, operation, root, .. } = *call;
        let world = self.config.world;
        if let Some(error) = self.failed {
            return Err(StartError::Failed(error));
        }
        let reduces = match collective {
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => true,
            Collective::Broadcast | Collective::AllGather | Collective::Barrier => false,
        };
        if reduces && Kernel::of(data_type, operation).is_none() {
            return Err(StartError::Unsupported { collective, operation, data_type });
        }
        if root >= world {
            return Err(StartError::Root { root, world });
        }
        let ends = |bytes: u64| {
            call.source_address.checked_add(bytes)?;
            call.destination_address.checked_add(bytes)
        };
        let bytes = self.descriptor(call, self.number).total_bytes(world);
        let fits = bytes.is_some_and(|bytes| ends(bytes).is_some());
        fits.then_some(()).ok_or(StartError::TooLong { count, data_type })
    }

    /// Starts a collective; returns its number.
    pub fn start(&mut self, call: &CollectiveCall) -> Result<u64, StartError> {
        self.start_as(self.number, call)
    }

    /// As [`HostWorker::start`], for a call that has this number among those of all trees of the communicator. Numbers
    /// grow.
    pub fn start_as(&mut self, number: u64, call: &CollectiveCall) -> Result<u64, StartError> {
        let HostConfig { rank, world, .. } = self.config;
        if self.failed.is_none() && (self.running.is_some() || self.outcome.is_some()) {
            return Err(StartError::Busy(self.number - 1));
        }
        self.check(call)?;
        let descriptor = self.descriptor(call, number);
        let layout = Layout::new(&descriptor, &self.cut, self.sent);
        debug_assert!(rank < world, "rank {rank} of {world}");
        debug_assert!(number >= self.number, "{number} after {}", self.number);
        self.sequence += 1;
        self.number = number + 1;
        self.running = Some(Running {
            number,
            call: *call,
            layout,
            first_receive: self.consumed,
            stored: false,
            loaded: false,
            announced: false,
            agreed: false,
            result_at: None,
        });
        Ok(number)
    }

    fn descriptor(&self, call: &CollectiveCall, number: u64) -> Descriptor {
        Descriptor {
            sequence: number,
            collective: call.collective,
            operation: call.operation,
            data_type: call.data_type,
            root: call.root,
            count: call.count,
            stripe: call.stripe,
            mode: call.mode,
            destination_address: call.destination_address,
            destination_key: call.destination_key,
        }
    }

    /// Asks the switch for a sign of life, if a collective waits and nothing that was sent is
    /// unanswered: an RDMA WRITE of no bytes, which a switch acknowledges and ignores. If it is
    /// gone, the collective ends with [`CollectiveError::Transport`] when the retries of the queue
    /// pair are used up.
    pub fn probe(&mut self) {
        self.probe = self.running.is_some();
    }

    /// Says that the deadline of the collective under way has passed. The switch ends the communicator, and
    /// says who is to blame ([`Abort::Overdue`]): on this connection, unless the next receive is for a result in
    /// SEND mode, when it is closed. Who waits a little for that must not wait for ever.
    pub fn give_up(&mut self) {
        self.overdue = self.running.is_some();
    }

    /// The next thing to do, or nothing until a completion or a start.
    pub fn poll_command(&mut self) -> Option<Command> {
        if let Some(delivery) = self.delivery.take() {
            return Some(self.deliver(delivery));
        }
        if self.failed.is_some() {
            return None;
        }
        // Receives come before the sends that they are for.
        if let Some(request) = self.next_receive() {
            self.posted += 1;
            return Some(Command::Receive(request));
        }
        let running = self.running?;
        if !running.stored {
            let descriptor = self.descriptor(&running.call, running.number);
            self.running = Some(Running { stored: true, ..running });
            return Some(Command::Store(descriptor.to_bytes()));
        }
        let vector = self.small_source(&running.layout);
        if !running.loaded && vector > 0 {
            self.running = Some(Running { loaded: true, ..running });
            let Running { call, .. } = running;
            let (key, address) = (call.source_key, call.source_address);
            return Some(Command::Load(Piece { key, address, length: vector as u32 }));
        }
        if let Some(offset) = running.result_at {
            self.running = Some(Running { result_at: None, ..running });
            self.finish();
            let Running { call, layout, .. } = running;
            return Some(self.deliver(Delivery { call, layout, at: offset, range: 0 }));
        }
        if self.sends >= self.required_send_requests() {
            return None;
        }
        if !running.announced {
            self.running = Some(Running { announced: true, ..running });
            let piece = self.control_piece(0, DESCRIPTOR_BYTES + vector);
            let operation = SendOperation::Send { immediate: None };
            return Some(self.send(DESCRIPTOR_ID, operation, piece));
        }
        if core::mem::take(&mut self.overdue) {
            let note = Answer::overdue(self.sequence - 1).to_immediate();
            let operation = SendOperation::Send { immediate: Some(note) };
            return Some(self.send(OVERDUE_ID, operation, Piece::default()));
        }
        let Running { call, layout, .. } = running;
        let limit = layout.end().min(self.results + u64::from(self.config.window));
        if self.sent < limit
            && let Some(offset) = self.source_offset(&layout, self.sent)
        {
            let segment = self.sent;
            self.sent += 1;
            let length = layout.place(segment).length;
            let address = call.source_address + offset;
            let piece = Piece { key: call.source_key, address, length };
            let operation = match call.mode {
                Mode::Write => SendOperation::Write {
                    remote_address: call.destination_address.wrapping_add(offset),
                    remote_key: call.destination_key,
                    immediate: None,
                },
                Mode::Send => SendOperation::Send { immediate: None },
            };
            return Some(self.send(segment, operation, piece));
        }
        if let Some(end) = self.next_credit(&layout, limit) {
            self.sent = end;
            let immediate = Some(Answer::credit(end).to_immediate());
            return Some(self.send(CREDIT_ID, SendOperation::Send { immediate }, Piece::default()));
        }
        // What is not acknowledged yet asks the same question.
        let probe = core::mem::take(&mut self.probe) && self.sends == 0;
        let operation = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };
        probe.then(|| self.send(PROBE_ID, operation, Piece::default()))
    }

    /// The receive request to post next, if it is time. They are consumed in the order of the switch's
    /// messages: of each collective the agreement, then an answer for each segment. What follows these is
    /// the next agreement, or an abort.
    fn next_receive(&self) -> Option<ReceiveRequest> {
        let segments = self.running.map_or(0, |it| it.layout.end() - it.layout.first() + 1);
        let first = self.running.map_or(self.consumed, |running| running.first_receive);
        let limit = self.consumed + u64::from(self.required_receive_requests());
        if self.posted >= limit || self.posted > first + segments {
            return None;
        }
        // When the second one after a message with a payload is posted, that one has been looked at: a small
        // vector has no other answer, and the next collective starts only when its result is delivered.
        let buffer = self.posted % MESSAGES as u64;
        let mut piece = self.control_piece(message_offset(buffer), self.config.path_mtu.bytes());
        if let Some(Running { call, layout, .. }) = self.running
            && call.mode == Mode::Send
            && let Some(number) = (self.posted - first).checked_sub(1)
            && layout.first() + number < layout.end()
            && let segment = layout.first() + number
            && let Some(offset) = self.target_offset(&layout, segment)
        {
            let length = layout.place(segment).length;
            let address = call.destination_address + offset;
            piece = Piece { key: call.destination_key, address, length };
        }
        Some(ReceiveRequest { id: RECEIVE_ID | buffer, pieces: [piece] })
    }

    /// Up to which segment it is to be said now that there is nothing of this rank. Not for each one alone,
    /// unless the next is not of that kind.
    fn next_credit(&self, layout: &Layout, limit: u64) -> Option<u64> {
        let next = match &self.ranks {
            None => layout.next_source(self.sent, self.config.rank),
            Some(ranks) => layout.next_source_of(self.sent, ranks),
        };
        let end = next.min(limit);
        if end <= self.sent {
            return None;
        }
        let over = end == next;
        let enough = end - self.sent >= u64::from(self.config.window / 2);
        (over || enough).then_some(end)
    }

    fn send(&mut self, id: u64, operation: SendOperation, piece: Piece) -> Command {
        self.sends += 1;
        Command::Send(SendRequest::new(id, operation, [piece]))
    }

    const fn control_piece(&self, offset: usize, length: usize) -> Piece {
        Piece {
            key: self.config.control_key,
            address: self.config.control_address + offset as u64,
            length: length as u32,
        }
    }

    /// Takes a completion of the queue pair. `message` reads bytes of the control region, from an offset on.
    pub fn handle_completion(
        &mut self,
        completion: &Completion,
        message: impl FnOnce(usize) -> [u8; ABORT_BYTES],
    ) {
        if completion.status != CompletionStatus::Success {
            self.fail(CollectiveError::Transport(completion.status));
            return;
        }
        if completion.id & RECEIVE_ID == 0 {
            self.sends = self.sends.saturating_sub(1);
        } else {
            self.consumed += 1;
            if let Err(error) = self.answered(completion, message) {
                self.fail(error);
            }
        }
        self.finish();
    }

    /// Takes a message of the switch.
    fn answered(
        &mut self,
        completion: &Completion,
        message: impl FnOnce(usize) -> [u8; ABORT_BYTES],
    ) -> Result<(), CollectiveError> {
        const NONSENSE: CollectiveError =
            CollectiveError::Protocol("it sent a message that is none of the protocol's");
        let answer = completion.immediate.and_then(Answer::from_immediate).ok_or(NONSENSE)?;
        let write = completion.operation == CompletionOperation::ReceiveWrite;
        let message_at = message_offset(completion.id & !RECEIVE_ID);
        match (answer, write) {
            (Answer::Aborted, false) => {
                let whole = completion.length as usize == ABORT_BYTES;
                let abort = whole.then(|| Abort::parse(&message(message_at)));
                Err(abort.flatten().ok_or(NONSENSE)?.into())
            }
            (Answer::Agreed(_), false) => {
                const OUT_OF_TURN: CollectiveError =
                    CollectiveError::Protocol("it agreed out of turn");
                let expected = Answer::agreed(self.sequence.wrapping_sub(1));
                let running = self.running.filter(|running| !running.agreed);
                let running = running.filter(|_| answer == expected).ok_or(OUT_OF_TURN)?;
                let length = self.small_target(&running.layout);
                if completion.length as usize != length {
                    return Err(CollectiveError::Protocol("it agreed with the wrong length"));
                }
                let result_at = (length > 0).then_some(message_at);
                self.running = Some(Running { agreed: true, result_at, ..running });
                Ok(())
            }
            (Answer::Result(_), _) => {
                const OUT_OF_TURN: CollectiveError =
                    CollectiveError::Protocol("it sent a result out of turn");
                let running = self.running.filter(|running| running.agreed).ok_or(OUT_OF_TURN)?;
                let mode = if write { Mode::Write } else { Mode::Send };
                if self.results >= self.sent
                    || answer != Answer::result(self.results)
                    || mode != running.call.mode
                {
                    return Err(OUT_OF_TURN);
                }
                let layout = &running.layout;
                let right = match self.target_offset(layout, self.results) {
                    None => completion.length == 0,
                    // The last part of the segment: the switch passes it on as it becomes complete.
                    Some(_) if write => {
                        (1..=layout.place(self.results).length).contains(&completion.length)
                    }
                    Some(_) => completion.length == layout.place(self.results).length,
                };
                if !right {
                    return Err(CollectiveError::Protocol("it sent a result of the wrong length"));
                }
                self.results += 1;
                Ok(())
            }
            _ => Err(NONSENSE),
        }
    }

    fn finish(&mut self) {
        let over = |running: &mut Running| {
            let delivered = running.agreed && running.result_at.is_none();
            delivered && self.results == running.layout.end() && self.sends == 0
        };
        if let Some(running) = self.running.take_if(over) {
            let completed = Completed { sequence: running.number, bytes: running.layout.bytes() };
            self.outcome = Some(Ok(completed));
            self.overdue = false;
        }
    }

    /// How the collective that was started has ended; `None` while it has not. Returned once.
    pub fn poll_outcome(&mut self) -> Option<Result<Completed, CollectiveError>> {
        self.outcome.take()
    }

    /// Ends the communicator from this side: the control connection brought bad news, or a
    /// deadline has passed ([`HostWorker::timed_out`]). The first reason stays, unless it says
    /// nothing of its own.
    pub fn fail(&mut self, error: CollectiveError) {
        let vague = CollectiveError::Transport(CompletionStatus::Flushed);
        if self.failed.is_some_and(|earlier| earlier != vague) {
            return;
        }
        let first = self.failed.is_none();
        self.failed = Some(error);
        if let Some(Running { number, layout, agreed, result_at, .. }) = self.running {
            let segments = layout.end() - layout.first();
            let results = match segments {
                0 => u64::from(agreed && result_at.is_none()),
                _ => self.results - layout.first(),
            };
            let next_segment = self.results;
            self.halted = Some(Halted { number, results, segments, next_segment });
        }
        if self.running.take().is_some() || (!first && self.outcome == Some(Err(vague))) {
            self.outcome = Some(Err(error));
        }
    }

    /// The error of a collective that takes too long, for [`HostWorker::fail`].
    pub fn timed_out(&self) -> CollectiveError {
        let (first, end) =
            self.running.map_or((self.sent, self.sent), |it| (it.layout.first(), it.layout.end()));
        CollectiveError::TimedOut {
            sequence: self.number.saturating_sub(1),
            results: self.results - first,
            segments: end - first,
        }
    }

    /// Why the communicator is of no more use, if it is not.
    pub fn failure(&self) -> Option<CollectiveError> {
        self.failed
    }

    /// What was under way when it failed, if something was. What comes in later changes that no more.
    pub const fn halted(&self) -> Option<Halted> {
        self.halted
    }

    /// The collective under way: its number, segments whose result has come, and segments.
    pub fn progress(&self) -> Option<(u64, u64, u64)> {
        let running = self.running?;
        let layout = &running.layout;
        Some((running.number, self.results - layout.first(), layout.end() - layout.first()))
    }
}

#[cfg(test)]
mod tests;
