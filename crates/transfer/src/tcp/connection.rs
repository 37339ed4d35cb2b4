//! What a lane is at: its connection, what it sends, and what is under way over it.

mod numbered;
mod old;
mod proving;

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_metadata::TlsError;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use self::numbered::Receiving;
use self::proving::Proving;
use super::flow::{Framing, Message};
use super::line::{Checked, Damaged, Layer, Line};
use super::message::{CHECKED, Header, Hello, MAX_DATA, PLAIN, Piece, Purpose};
use super::original::{Request, Version};
use super::peer::Peer;
use super::stage::Stage;
use crate::{FailureReason, Opcode};

/// How much is under way on a connection at a time.
const MAX_MESSAGES: usize = 16;
const MAX_UNDER_WAY: u64 = 4 * MAX_DATA;

/// What a peer with numbered messages has said so long ago tells that the connection is there: it is a part of the time that a
/// request takes on its way, in which the connection may break as well.
const JUST_NOW: Duration = Duration::from_micros(10);

/// Where bytes go that have no place.
const SCRATCH: usize = 64 << 10;

/// What came of working on a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Did {
    /// There is nothing more to send.
    Idle,
    /// It takes no more now.
    Full,
    /// It is not connected yet.
    Connecting,
    /// It broke, and there may be more to do over another one.
    Again,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Phase {
    #[default]
    Closed,
    Connecting,
    /// Both sides have TLS begin, and prove that they have the token.
    Proving,
    Open,
}

/// Why a connection is closed.
enum Broken {
    /// Nothing is wrong: it is not used again.
    Done,
    /// Something is to end that is under way.
    ToEnd,
    /// The stream has ended, or what came first makes no sense: another connection may do better.
    Ended(FailureReason),
    Failed(FailureReason),
}

#[derive(Default)]
pub(super) struct Connection {
    phase: Phase,
    stream: Option<Arc<TcpStream>>,
    /// It is another one, or none any more.
    changed: bool,
    /// Which of the peer's addresses is next, or is used, and what it was.
    address: usize,
    at: Option<SocketAddr>,
    proving: Option<Box<Proving>>,
    /// What is between messages and the socket.
    line: Line,
    /// Its number, where it has one.
    number: u128,
    /// Headers, and how much of them was sent. The data of the last message under way follows, and then `tail`.
    out: Vec<u8>,
    out_sent: usize,
    tail: Vec<u8>,
    tail_sent: usize,
    /// The last of these is being sent.
    sending: bool,
    /// In the order in which they are answered.
    under_way: VecDeque<Message>,
    under_way_bytes: u64,
    /// There was no room.
    blocked: bool,
    stage: Stage,
    scratch: Vec<u8>,
    receiving: Receiving,
    status: old::Status,
    low_water: old::LowWater,
    /// It was made just now, and has not been looked at since.
    fresh: bool,
    /// A message was begun.
    asked: bool,
    /// Something was received.
    answered: bool,
    /// A numbered message was answered.
    served: bool,
    /// It was turned away at its beginning: nothing that was sent over it is done.
    turned_away: bool,
    /// When something was last received, or sent of what it answers next.
    moved: Option<Instant>,
}

impl Connection {
    pub(super) const fn stream(&self) -> Option<&Arc<TcpStream>> {
        self.stream.as_ref()
    }

    /// Whether it has another stream than when this was last asked, or none any more.
    pub(super) fn has_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    pub(super) fn wants_room(&self) -> bool {
        match self.phase {
            Phase::Connecting => true,
            Phase::Proving => {
                let proves = self.proving.as_ref().is_some_and(|proving| proving.wants_room());
                // What TLS hears before it says what is to be proved it waits for.
                self.line.has_unsent() || (proves && !self.line.is_tls())
            }
            Phase::Closed | Phase::Open => self.blocked,
        }
    }

    /// Does what can be done without a wait.
    pub(super) fn work(&mut self, peer: &Arc<Peer>, readable: bool, writable: bool) -> Did {
        let done = self.try_work(peer, readable, writable);
        self.unless_broken(peer, done)
    }

    /// The same where somebody looks whether the answer has come to the only message under way: `None`, and nothing was
    /// done, if it has not, or there is something else to wait for.
    pub(super) fn look(&mut self, peer: &Arc<Peer>) -> Option<Did> {
        if !self.awaits_answer(peer) {
            return None;
        }
        let done = match self.receive_numbered(peer) {
            Ok(now) => self.proceed(peer, now?),
            Err(broken) => Err(broken),
        };
        Some(self.unless_broken(peer, done))
    }

    /// Whether there is nothing to wait for but the answer to one numbered message. Who looks for it has the connection
    /// for most of the time: where more is going on, others are to have it, too.
    pub(super) fn awaits_answer(&self, peer: &Peer) -> bool {
        self.phase == Phase::Open
            && peer.framing() == Framing::Numbered
            && !self.blocked
            && self.under_way.len() == 1
    }

    fn unless_broken(&mut self, peer: &Arc<Peer>, done: Result<Did, Broken>) -> Did {
        done.unwrap_or_else(|broken| {
            self.close(peer, broken);
            if peer.flow().has_more() { Did::Again } else { Did::Idle }
        })
    }

    fn try_work(
        &mut self,
        peer: &Arc<Peer>,
        readable: bool,
        writable: bool,
    ) -> Result<Did, Broken> {
        match self.phase {
            Phase::Closed => {
                if !peer.may_connect() {
                    return Ok(Did::Idle);
                }
                self.connect(peer)?;
                return Ok(Did::Connecting);
            }
            Phase::Connecting if !writable => return Ok(Did::Connecting),
            Phase::Connecting => {
                if !self.connected(peer)? {
                    return Ok(Did::Connecting);
                }
            }
            Phase::Proving | Phase::Open => {}
        }
        if self.phase == Phase::Proving && !self.prove(peer)? {
            return Ok(Did::Connecting);
        }
        // A peer that closed the connection while nothing was under way is found out before it gets a WRITE, of which
        // nobody could say then whether it was done.
        let rested = self.under_way.is_empty();
        let mut now = Instant::now();
        let was_heard = self.moved.is_some_and(|moved| now.duration_since(moved) < JUST_NOW)
            && peer.framing() == Framing::Numbered;
        if readable || (rested && !was_heard && peer.flow().has_more()) {
            match peer.framing() {
                Framing::Numbered => now = self.receive_numbered(peer)?.unwrap_or(now),
                Framing::Old(version) => {
                    self.receive_old(peer, version)?;
                    now = Instant::now();
                }
            }
        }
        self.fresh = false;
        if writable {
            self.blocked = false;
        }
        self.proceed(peer, now)
    }

    /// Whether its end tells nothing but that the peer has no more use for it: nothing is under way, and it was answered or
    /// never asked. One that ends as soon as it is made counts as a refusal.
    fn may_end(&self) -> bool {
        self.under_way.is_empty() && (self.answered || !(self.asked || self.fresh))
    }

    /// What follows once everything was received that there is.
    fn proceed(&mut self, peer: &Arc<Peer>, now: Instant) -> Result<Did, Broken> {
        if !self.under_way.is_empty() && peer.flow().is_to_end(&self.under_way, now) {
            return Err(Broken::ToEnd);
        }
        if self.blocked {
            return Ok(Did::Full);
        }
        self.send(peer, now)
    }

    /// Whether it broke since nothing has moved for too long, or to end what is under way.
    pub(super) fn check(&mut self, peer: &Arc<Peer>, now: Instant) -> bool {
        let waits = matches!(self.phase, Phase::Connecting | Phase::Proving);
        let busy = waits || !self.under_way.is_empty();
        let Some(moved) = self.moved.filter(|_| busy) else { return false };
        let patience = match (self.phase, peer.framing()) {
            (Phase::Connecting | Phase::Proving, _) => peer.config().connect_timeout,
            (_, Framing::Numbered) => peer.config().progress_timeout,
            (_, Framing::Old(_)) => peer.config().status_timeout,
        };
        let to_end = peer.flow().is_to_end(&self.under_way, now);
        if now.duration_since(moved) < patience && !to_end {
            if matches!(peer.framing(), Framing::Old(_)) {
                self.take_what_comes(now.duration_since(moved));
            }
            return false;
        }
        let text = match self.phase {
            Phase::Connecting => format!("it has not accepted a connection within {patience:?}"),
            Phase::Proving => {
                format!("it has not proved within {patience:?} who it is")
            }
            _ => format!("nothing has moved over its connection for {patience:?}"),
        };
        let broken = Broken::Failed(FailureReason::Connection(text.into()));
        self.close(peer, if to_end { Broken::ToEnd } else { broken });
        true
    }

    /// Closes it for good.
    pub(super) fn stop(&mut self, peer: &Arc<Peer>) {
        self.close(peer, Broken::Failed(FailureReason::ShutDown));
    }

    fn connect(&mut self, peer: &Arc<Peer>) -> Result<(), Broken> {
        let Some((address, _)) = peer.address(self.address) else { return Err(Broken::Done) };
        let stream =
            begin_connect(address).map_err(|error| cannot_connect(Some(address), &error))?;
        (self.stream, self.at) = (Some(Arc::new(stream)), Some(address));
        self.changed = true;
        self.phase = Phase::Connecting;
        self.moved = Some(Instant::now());
        (self.asked, self.answered, self.served) = (false, false, false);
        Ok(())
    }

    /// Whether the connection is made by now.
    fn connected(&mut self, peer: &Arc<Peer>) -> Result<bool, Broken> {
        let Some(stream) = &self.stream else { return Ok(false) };
        if let Some(error) = stream.take_error().unwrap_or_else(Some) {
            return Err(cannot_connect(self.at, &error));
        }
        if stream.peer_addr().is_err() {
            return Ok(false);
        }
        // Not having it costs time, not correctness.
        let _ = stream.set_nodelay(true);
        self.moved = Some(Instant::now());
        let Some(address) = self.at else { return Ok(false) };
        let proof = peer.proof(address).map_err(|error| broke(&error))?;
        let session = peer.session().map_err(|error| broke(&error.into()))?;
        self.line = Line::over(session.map(|session| Layer::Tls(Box::new(session))));
        if proof.is_some() || self.line.is_tls() {
            self.phase = Phase::Proving;
            self.proving = Some(Box::new(Proving::new(proof)));
        } else {
            self.open(peer);
        }
        Ok(true)
    }

    /// Whether both sides have proved by now that they have the token.
    fn prove(&mut self, peer: &Arc<Peer>) -> Result<bool, Broken> {
        let (Some(stream), Some(proving)) = (&self.stream, &mut self.proving) else {
            return Ok(false);
        };
        if !proving.go_on(stream, &mut self.line)? {
            return Ok(false);
        }
        self.proving = None;
        self.open(peer);
        Ok(true)
    }

    /// From here on it is for messages.
    fn open(&mut self, peer: &Arc<Peer>) {
        self.phase = Phase::Open;
        self.fresh = true;
        self.moved = Some(Instant::now());
        (self.receiving, self.status) = (Receiving::default(), old::Status::default());
        self.low_water = old::LowWater::default();
        self.out.clear();
        self.out_sent = 0;
        if peer.framing() == Framing::Numbered {
            self.number = peer.draw_number();
            let (connection, incarnation) = (self.number, peer.incarnation());
            let hello = |version| Hello { version, connection, incarnation }.emit();
            if peer.place.checked && !self.line.is_tls() {
                let records = Checked::new(&hello(CHECKED), &[]);
                self.line = Line::over(Some(Layer::Checked(records)));
            } else {
                self.out.extend_from_slice(&hello(PLAIN));
            }
        }
    }

    /// Sends what there is, as long as there is room.
    fn send(&mut self, peer: &Arc<Peer>, now: Instant) -> Result<Did, Broken> {
        if self.stream.is_none() {
            return Ok(Did::Idle);
        }
        let mut has_more = true;
        loop {
            if self.sending || self.line.has_unsent() {
                match self.send_some() {
                    Ok(()) => {
                        // What waits behind others, its kernel takes though it may stand still.
                        if self.under_way.len() <= 1 {
                            self.moved = Some(now);
                        }
                        self.after_sending(peer)?;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.blocked = true;
                        return Ok(Did::Full);
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(broke(&error)),
                }
                continue;
            }
            // Who has brought more since has found the lane taken, and left a note.
            if !has_more {
                return Ok(Did::Idle);
            }
            let has_room = match peer.framing() {
                Framing::Numbered => {
                    self.under_way.len() < MAX_MESSAGES && self.under_way_bytes < MAX_UNDER_WAY
                }
                Framing::Old(_) => self.under_way.is_empty(),
            };
            if !has_room {
                return Ok(if peer.flow().has_more() { Did::Full } else { Did::Idle });
            }
            let mut flow = peer.flow();
            let message = flow.next_message();
            has_more = flow.has_more();
            drop(flow);
            let Some(message) = message else { return Ok(Did::Idle) };
            self.begin(peer, message, now);
        }
    }

    /// Makes a message the one that is sent.
    fn begin(&mut self, peer: &Peer, message: Message, now: Instant) {
        if self.out_sent == self.out.len() {
            self.out.clear();
            self.out_sent = 0;
        }
        self.tail.clear();
        self.tail_sent = 0;
        match (peer.framing(), message.opcode) {
            (Framing::Numbered, opcode) => {
                let purpose = opcode.map_or(Purpose::Fence, Purpose::Move);
                let pieces = message.remote().len().max(1) as u32;
                let header = Header { purpose, id: message.id, pieces, length: message.length };
                self.out.extend_from_slice(&header.emit());
                for (address, length) in message.remote() {
                    self.out.extend_from_slice(&Piece { address, length }.emit());
                }
                if purpose == Purpose::Fence {
                    self.out.extend_from_slice(&Piece::of(message.fence).emit());
                }
            }
            (Framing::Old(version), opcode) => {
                let opcode = opcode.unwrap_or(Opcode::Read);
                let (address, length) = message.remote().next().unwrap_or_default();
                let request = Request { version, opcode, address, length };
                self.out.extend_from_slice(&request.emit());
                if version == Version::One
                    && opcode == Opcode::Write
                    && peer.config().confirm_writes
                {
                    // A connection is served in order: this is answered once that is done.
                    let behind = Request { opcode: Opcode::Read, length: 1, ..request };
                    self.tail.extend_from_slice(&behind.emit());
                }
                self.status = old::Status::of(version, opcode, !self.tail.is_empty());
            }
        }
        self.under_way_bytes += message.length;
        self.under_way.push_back(message);
        (self.asked, self.sending) = (true, true);
        // Silence counts from here on, unless it is silent already.
        if self.under_way.len() == 1 {
            self.moved = Some(now);
        }
        if matches!(peer.framing(), Framing::Old(_)) {
            self.await_data(true);
        }
    }

    /// Sends of headers, data and tail what there is room for.
    fn send_some(&mut self) -> io::Result<()> {
        let Some(stream) = &self.stream else { return Ok(()) };
        if !self.sending {
            return self.line.flush(stream);
        }
        let (out, tail) = (&self.out[self.out_sent..], &self.tail[self.tail_sent..]);
        match self.under_way.back_mut() {
            Some(message) if message.opcode == Some(Opcode::Write) => {
                let (before, data) = (out.len(), message.pieces.left());
                let sent = self.line.send_pieces(stream, &mut message.pieces, out, tail)?;
                self.out_sent += sent.min(before);
                self.tail_sent += (sent as u64).saturating_sub(before as u64 + data) as usize;
            }
            _ => self.out_sent += self.line.send(stream, out)?,
        }
        Ok(())
    }

    /// Something was sent; perhaps all of a message.
    fn after_sending(&mut self, peer: &Arc<Peer>) -> Result<(), Broken> {
        if !self.sending {
            return Ok(());
        }
        let data = self.under_way.back().map_or(0, |message| match message.opcode {
            Some(Opcode::Write) => message.pieces.left(),
            _ => 0,
        });
        let all = self.out_sent == self.out.len() && self.tail_sent == self.tail.len() && data == 0;
        if !all {
            return Ok(());
        }
        self.sending = false;
        // Until its data has come. Where others are before it, that is done once it is its turn.
        let only = self.under_way.len() == 1;
        if let Some(message) = self.under_way.back_mut().filter(|_| only)
            && message.opcode == Some(Opcode::Read)
        {
            message.pieces.prefetch_room();
        }
        if self.status == old::Status::None
            && peer.framing() == Framing::Old(Version::One)
            && let Some(message) = self.under_way.pop_front()
        {
            self.under_way_bytes = 0;
            // It says no more than this.
            peer.connected();
            peer.flow().done(message, false);
            return Err(Broken::Done);
        }
        Ok(())
    }

    /// How many of the messages under way may have reached the peer.
    fn begun(&self) -> usize {
        let untouched = self.sending && self.out_sent == 0;
        self.under_way.len() - usize::from(untouched)
    }

    fn close(&mut self, peer: &Arc<Peer>, broken: Broken) {
        let phase = std::mem::take(&mut self.phase);
        let begun = if std::mem::take(&mut self.turned_away) { 0 } else { self.begun() };
        self.proving = None;
        if let Some(stream) = self.stream.take() {
            self.changed = true;
            // What it should know of its end.
            let _ = self.line.flush(&stream);
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        (self.sending, self.blocked, self.under_way_bytes) = (false, false, 0);
        self.line = Line::default();
        self.moved = None;
        self.stage.clear();
        let ended =
            matches!(broken, Broken::Ended(_) | Broken::Failed(FailureReason::Checksum { .. }));
        let (reason, ours) = match broken {
            Broken::Done => return,
            Broken::ToEnd => {
                let text = "its connection was closed since another request was to end";
                (FailureReason::Connection(text.into()), true)
            }
            Broken::Ended(reason) | Broken::Failed(reason) => (reason, false),
        };
        let waiting = !self.under_way.is_empty();
        let number = self.number;
        peer.flow().lost(&mut self.under_way, begun, number, &reason, ours);
        if ours || matches!(reason, FailureReason::ShutDown) {
            return;
        }
        peer.ask_for_fences();
        match (phase, peer.framing()) {
            // A connection that ends unanswered is how version 1 rejects a request. One that was not asked rejects none.
            (Phase::Open, Framing::Old(Version::One)) if self.asked => {}
            (Phase::Open, _) if ended && !self.answered => {
                peer.unanswered(&reason);
                // Somebody else may be at this one.
                self.address = self.address.wrapping_add(1);
            }
            (Phase::Open, Framing::Numbered) if self.answered && !self.served => {
                peer.unanswered(&reason);
            }
            (Phase::Open, framing) if self.answered || framing != Framing::Numbered => {}
            _ => {
                self.address = peer.cannot_connect(self.address, &reason);
                return;
            }
        }
        if waiting {
            tracing::debug!(peer = peer.name(), %reason, "connection for data ended");
        }
    }
}

fn begin_connect(address: SocketAddr) -> io::Result<TcpStream> {
    /// The connection is being made.
    const EINPROGRESS: i32 = 115;
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&SockAddr::from(address)) {
        Err(error) if error.raw_os_error() == Some(EINPROGRESS) => Ok(socket.into()),
        Err(error) => Err(error),
        Ok(()) => Ok(socket.into()),
    }
}

fn cannot_connect(address: Option<SocketAddr>, error: &io::Error) -> Broken {
    let at = address.map_or_else(String::new, |address| format!(" at {address}"));
    let text = format!("cannot connect to its data port{at}: {error}: see whether it runs");
    Broken::Failed(FailureReason::Connection(text.into()))
}

fn broke(error: &io::Error) -> Broken {
    if let Some(damaged) = error.get_ref().and_then(|inner| inner.downcast_ref::<Damaged>()) {
        let here = *damaged == Damaged::Here;
        return Broken::Failed(FailureReason::Checksum { here, range: None });
    }
    if let Some(error) = TlsError::of(error) {
        return Broken::Failed(FailureReason::Connection(error.to_string().into()));
    }
    Broken::Ended(FailureReason::Connection(format!("its connection broke: {error}").into()))
}

fn closed() -> Broken {
    Broken::Ended(FailureReason::Connection("it has closed the connection".into()))
}

fn nonsense(text: &str) -> Broken {
    Broken::Failed(FailureReason::Connection(format!("what it says makes no sense: {text}").into()))
}
