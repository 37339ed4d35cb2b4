//! Rank 0 in the place of the controller: when a switch is lost and no controller is there, the ranks meet here.
//!
//! Rank 0 listens from the beginning, at its device's address, and draws a secret. The controller gives all ranks both with
//! the plan, so that they need it no more. What decides is what a controller runs, for this group only and without switches;
//! here it is carried, by one thread. Strangers can connect, and prove nothing.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use millstream_inc::controller::{
    ConnectionId, Controller, ControllerConfig, IdentitySecret, Output, Quotas, TokenKind,
    TokenRules,
};
use millstream_inc::protocol::{
    Commanded, FrameDecoder, FromController, MeetingPoint, Secret, ToController, TokenProblem,
    encode,
};
use millstream_net::token::{
    MESSAGE_LIMIT, Purpose, Responder, Said, Token, TokenError, draw_nonce,
};
use millstream_net::{PollSet, Sleeper, ends_between_forks};
use millstream_verbs::{Device, Waiters};

use crate::LONGEST;

/// Connections beside those of the ranks: strangers, and those on their way out.
const STRANGERS: usize = 256;

/// Who has not proved anything has said so much at most: the messages of a proof, each in a frame.
const MOST_UNPROVED: usize = 4 * MESSAGE_LIMIT;

/// Bytes that a rank may leave unread: more than the longest message, and so many that its node is asked for.
const MOST_OUTGOING: usize = 4 << 20;

/// Bytes read at a time.
const READ_BYTES: usize = 16 << 10;

/// Connections that are taken at a time.
const ACCEPTED_AT_ONCE: usize = 64;

/// How long nothing is accepted after the system had no room for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long a peer may take to close its side after this one has closed its own.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Where the ranks of a communicator meet without a controller, as one of them knows it.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    pub(crate) point: MeetingPoint,
    /// Of rank 0.
    pub(crate) listener: Option<TcpListener>,
}

impl Rendezvous {
    /// Rank 0 listens at the address of its device.
    pub(crate) fn open(device: &Device) -> io::Result<Self> {
        let listener = TcpListener::bind(SocketAddr::new(device.address(), 0))?;
        let address = listener.local_addr()?;
        let secret = Secret(draw_nonce()?);
        Ok(Self { point: MeetingPoint { address, secret }, listener: Some(listener) })
    }

    /// What is proved there: that one knows the secret, and has the token that the controller asks for, if there is one.
    pub(crate) fn token(point: &MeetingPoint, token: Option<Token>) -> io::Result<Token> {
        let Secret(secret) = point.secret;
        match token {
            Some(token) => Ok(token.with(&secret)),
            None => Token::new(&secret).map_err(io::Error::other),
        }
    }
}

/// The only group that is made.
pub(crate) struct Expected {
    pub(crate) group: String,
    pub(crate) world: u32,
    /// Bytes of a segment, and segments of a window.
    pub(crate) shape: (u32, u32),
    /// Why there is no switch, for people.
    pub(crate) reason: String,
}

/// The thread. Dropped, it closes all connections and ends.
pub(crate) struct Coordinator {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Stop {
    stopped: AtomicBool,
    waiters: Waiters,
}

impl Coordinator {
    pub(crate) fn start(
        listener: TcpListener,
        token: Token,
        expected: Expected,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let Expected { group, world, shape: (segment_bytes, window), reason } = expected;
        let secret = IdentitySecret::new(draw_nonce()?);
        let ranks =
            TokenRules { name: "ranks".to_owned(), kind: TokenKind::Host, quotas: Quotas::NONE };
        let rules = ControllerConfig {
            max_ranks: world as usize,
            max_strangers: STRANGERS,
            max_groups: 1,
            hosts_only: Some(reason),
            segment_bytes,
            window,
            tokens: vec![ranks],
            // All ranks may be on one machine.
            source_quotas: Quotas::NONE,
            ..ControllerConfig::new(secret)
        };
        let carrier = Carrier {
            controller: Controller::new(rules),
            listener,
            token,
            group,
            world,
            peers: BTreeMap::new(),
            next: 0,
            paused_until: None,
        };
        let stop = Arc::new(Stop::default());
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new().name("coordinator".to_owned());
        let thread = thread.spawn(ends_between_forks(move || carrier.run(&stopped)))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.stop.stopped.store(true, Ordering::SeqCst);
        self.stop.waiters.wake();
        if let Some(thread) = self.thread.take() {
            // It would have reported a panic on stderr.
            let _ = thread.join();
        }
    }
}

struct Peer {
    stream: TcpStream,
    decoder: FrameDecoder,
    /// This side of a proof that is not over, and how many bytes came for it.
    proof: Option<(Responder, usize)>,
    outgoing: Vec<u8>,
    /// It was told the last that it hears, and has until then to close its side.
    closing: Option<Instant>,
}

/// What the controller's decisions travel with.
struct Carrier {
    controller: Controller,
    listener: TcpListener,
    token: Token,
    group: String,
    world: u32,
    peers: BTreeMap<ConnectionId, Peer>,
    next: u64,
    paused_until: Option<Instant>,
}

impl Carrier {
    fn run(mut self, stop: &Stop) {
        let Some(sleeper) = Sleeper::own() else {
            tracing::warn!("the system has no more descriptors, so the ranks cannot meet here");
            return;
        };
        let _waiting = sleeper.enter(&stop.waiters);
        let mut set = PollSet::default();
        let stopped = || stop.stopped.load(Ordering::SeqCst);
        while !stopped() {
            let now = millstream_net::now();
            let deadline = self.controller.poll_timeout();
            if deadline.is_some_and(|deadline| deadline <= now) {
                self.controller.handle_timeout(now);
                self.carry_out();
                continue;
            }
            let left = deadline.map_or(LONGEST, |deadline| deadline.saturating_duration_since(now));
            let left = self.end_connections().map_or(left, |until| left.min(until));
            let watched = self.watch(&mut set);
            if let Err(error) = sleeper.sleep(&mut set, left, stopped) {
                tracing::warn!(%error, "the ranks cannot meet here any more");
                return;
            }
            sleeper.take();
            if set.ready(0).0 && self.paused_until.is_none() {
                self.accept();
            }
            for (index, id) in (1..).zip(watched) {
                let (readable, writable) = set.ready(index);
                if writable {
                    self.flush(id);
                }
                if readable {
                    self.read(id);
                }
            }
            self.carry_out();
        }
    }

    /// What is waited for, and in which order: the listener first.
    fn watch(&self, set: &mut PollSet) -> Vec<ConnectionId> {
        set.clear();
        set.add(self.listener.as_fd(), self.paused_until.is_none(), false);
        for peer in self.peers.values() {
            set.add(peer.stream.as_fd(), true, !peer.outgoing.is_empty());
        }
        self.peers.keys().copied().collect()
    }

    /// Ends what has had its time, and says how long until there is more to do.
    fn end_connections(&mut self) -> Option<Duration> {
        let now = Instant::now();
        self.peers.retain(|_, peer| peer.closing.is_none_or(|until| until > now));
        self.paused_until = self.paused_until.filter(|&until| until > now);
        let closing = self.peers.values().filter_map(|peer| peer.closing);
        closing.chain(self.paused_until).min().map(|until| until.saturating_duration_since(now))
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            match self.listener.accept() {
                Ok((stream, address)) => self.accepted(stream, address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Out of file descriptors, most likely: some will be closed.
                Err(error) => {
                    tracing::debug!(%error, "cannot accept connections; trying again");
                    self.paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn accepted(&mut self, stream: TcpStream, address: SocketAddr) {
        let Ok(own) = stream.local_addr() else { return };
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        // Failing, messages are late.
        let _ = stream.set_nodelay(true);
        self.make_room();
        let id = ConnectionId(self.next);
        self.next += 1;
        let proof = Some((Responder::new(Purpose::Control, own, "rank 0"), 0));
        let (decoder, outgoing, closing) = (FrameDecoder::new(), Vec::new(), None);
        self.peers.insert(id, Peer { stream, decoder, proof, outgoing, closing });
        self.controller.handle_connected_from(millstream_net::now(), id, address.ip());
        self.carry_out();
    }

    /// Of those that are on their way out, the oldest goes for another one.
    fn make_room(&mut self) {
        if self.peers.len() >= self.world as usize + 2 * STRANGERS {
            let mut closing = self.peers.iter().filter(|(_, peer)| peer.closing.is_some());
            if let Some((&oldest, _)) = closing.next() {
                self.peers.remove(&oldest);
            }
        }
    }

    fn read(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let mut bytes = [0; READ_BYTES];
        let count = match peer.stream.read(&mut bytes) {
            Ok(0) => return self.closed(id),
            Ok(count) => count,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return,
                _ => return self.closed(id),
            },
        };
        if peer.closing.is_some() {
            return;
        }
        if let Some((_, taken)) = &mut peer.proof {
            *taken += count;
            if *taken > MOST_UNPROVED {
                return self.closed(id);
            }
        }
        peer.decoder.extend(&bytes[..count]);
        while let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.closing.is_none()) {
            match peer.decoder.next_message() {
                Ok(Some(message)) => self.take(id, message),
                Ok(None) => return,
                Err(error) => {
                    self.controller.handle_bad_frame(millstream_net::now(), id, &error);
                }
            }
            self.carry_out();
        }
    }

    fn take(&mut self, id: ConnectionId, message: ToController) {
        let is_proving = self.peers.get(&id).is_some_and(|peer| peer.proof.is_some());
        match message {
            ToController::Token { body } if is_proving => self.prove(id, &body),
            // Of another loss: it is late, or in error.
            ToController::Join(hello)
                if !is_proving && (hello.group != self.group || hello.world != self.world) =>
            {
                tracing::warn!(group = hello.group, "a rank of another group is not taken here");
                self.closed(id);
            }
            message => self.controller.handle_message(millstream_net::now(), id, message),
        }
    }

    /// Takes the next message of a proof.
    fn prove(&mut self, id: ConnectionId, body: &[u8]) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        let Some((proof, _)) = &mut peer.proof else { return };
        let now = millstream_net::now();
        let said = match draw_nonce() {
            Ok(nonce) => proof.take(body, nonce, [&self.token]),
            Err(error) => {
                tracing::warn!(%error, "no random numbers can be had, so no rank can prove what it is");
                Err(TokenError::NoProof)
            }
        };
        match said {
            Ok(Said::Challenge(body)) => self.say_of_proof(id, body),
            Ok(Said::Accepted(body, token)) => {
                peer.proof = None;
                if self.controller.handle_proved(now, id, token) {
                    self.say_of_proof(id, body);
                }
            }
            Err(error) => {
                peer.proof = None;
                let problem = match error {
                    TokenError::OtherToken => TokenProblem::Unknown,
                    TokenError::OtherAddress => TokenProblem::OtherAddress,
                    _ => TokenProblem::NoProof,
                };
                self.controller.handle_unproved(now, id, problem);
            }
        }
    }

    fn say_of_proof(&mut self, id: ConnectionId, body: Vec<u8>) {
        self.send(id, self.controller.term(), FromController::Token { body });
    }

    /// Carries out what the controller has decided.
    fn carry_out(&mut self) {
        while let Some(output) = self.controller.poll_output() {
            match output {
                Output::Send { connection, term, message } => self.send(connection, term, message),
                Output::Close { connection } => {
                    if let Some(peer) = self.peers.get_mut(&connection) {
                        peer.closing = Some(Instant::now() + CLOSE_TIMEOUT);
                        // What is left is sent when the peer takes more.
                        if peer.outgoing.is_empty() {
                            let _ = peer.stream.shutdown(Shutdown::Write);
                        }
                    }
                }
            }
        }
    }

    fn send(&mut self, id: ConnectionId, term: u64, message: FromController) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match encode(&Commanded { term, message }) {
            Ok(frame) if peer.outgoing.len() + frame.len() <= MOST_OUTGOING => {
                peer.outgoing.extend_from_slice(&frame);
                self.flush(id);
            }
            // It does not read, or what it should read cannot be said.
            _ => self.closed(id),
        }
    }

    fn flush(&mut self, id: ConnectionId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        while !peer.outgoing.is_empty() {
            match peer.stream.write(&peer.outgoing) {
                Ok(count) if count > 0 => drop(peer.outgoing.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                _ => return self.closed(id),
            }
        }
        if peer.closing.is_some() {
            let _ = peer.stream.shutdown(Shutdown::Write);
        }
    }

    /// The connection is over.
    fn closed(&mut self, id: ConnectionId) {
        if self.peers.remove(&id).is_some() {
            self.controller.handle_closed(millstream_net::now(), id);
        }
    }
}

#[cfg(test)]
mod tests;
