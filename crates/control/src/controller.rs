//! The controller as a daemon: one listener for switches and hosts.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_inc::controller::{
    ConnectionId, Controller, ControllerConfig as Rules, Output, PlacementChange,
};
pub use millstream_inc::plan::FanIn;
use millstream_inc::protocol::{
    Commanded, DEFAULT_PORT, FrameError, FromController, MAX_HELD, Refusal, ToController,
    TokenProblem, encode,
};
use millstream_net::token::{Purpose, Responder, Said, TokenError, draw_nonce};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{sleep, timeout};

use crate::api::{ControllerView, Watch};
use crate::leadership::{Leadership, Lease, Turn};
use crate::plans::Plans;
use crate::reader::{MessageReader, ReadError};
use crate::state::{Keeper, REPLIES, StateError, StateLocation, TlsFiles};
use crate::tls::{Guard, ServerTls};
use crate::tokens::Tokens;

/// Messages on their way to one peer. A healthy one has a handful, but a switch may be told at once of all nodes that it
/// has from before, and of as many that were made since. Room for them is made as it is needed.
const OUTGOING_MESSAGES: usize = 2 * MAX_HELD as usize;

/// Bytes of these. Those that say who is below a node are the longest.
const OUTGOING_BYTES: usize = 32 << 20;

/// Messages of all peers on their way to the controller.
const INCOMING_MESSAGES: usize = 1024;

/// How long a peer may take to accept one message.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long nothing is accepted after the system had no room for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long a peer may take to close its side after we have closed ours.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections that may be on their way out, beside those that the controller counts.
const CLOSING_MAX: usize = 256;

/// So much of what others have said is read after a deadline, though the next one is over.
const BETWEEN_DEADLINES: usize = 64;

/// After so long without a refusal, the next one is told of.
const OVERLOAD_PAUSE: Duration = Duration::from_secs(60);

/// Where several controllers share their state, ranks come back to a new leader up to so long after each other: some
/// have asked one that stands still.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(6);

/// What a controller is run with.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// Where to listen. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Limits, timeouts, and what communicators are made with.
    pub rules: Rules,
    /// A directory that gets a file for each communicator, which says where it is.
    pub plans: Option<PathBuf>,
    /// What others look at, if they may. Then the switches are asked what they have counted.
    pub view: Option<Arc<ControllerView>>,
    /// Whom it takes, and how much each may have. Without, everybody, with the quotas of the rules.
    pub tokens: Option<Tokens>,
    /// What it proves itself with, over TLS. Without, all is in the clear.
    pub tls: Option<ServerTls>,
    /// Where it keeps what the next controller should know; in memory only if there is none.
    pub state: Option<StateLocation>,
    /// Files for an etcd that speaks TLS.
    pub state_tls: TlsFiles,
    /// Where hosts, switches and other controllers find this one, if that is not where it listens.
    pub advertise: Option<SocketAddr>,
}

impl ControllerConfig {
    /// Where a controller listens unless told otherwise: port 52200 of every address.
    pub const DEFAULT_LISTEN: SocketAddr =
        SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), DEFAULT_PORT);

    /// The defaults, listening there.
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            rules: Rules::new(crate::secret()),
            plans: None,
            view: None,
            tokens: None,
            tls: None,
            state: None,
            state_tls: TlsFiles::default(),
            advertise: None,
        }
    }
}

/// Why a controller cannot run.
#[derive(Debug, Error)]
pub enum RunError {
    /// The runtime did not start.
    #[error("the runtime cannot start")]
    Runtime(#[source] io::Error),
    /// It cannot listen.
    #[error("cannot listen on {address}: {source}{}", crate::listen_advice(source))]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Its certificate, its key, or the authorities of its peers cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
    /// The directory of plans cannot be made or be cleared of earlier ones.
    #[error("the directory of plans, {}, cannot be used: {source}", directory.display())]
    Plans {
        /// Which.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The state cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Runs a controller until `shutdown` is over. `ready` gets the address that it listens on.
pub fn run(
    config: ControllerConfig,
    ready: impl FnOnce(SocketAddr),
    shutdown: impl Future<Output = ()>,
) -> Result<(), RunError> {
    crate::block_on(serve(config, ready, shutdown)).map_err(RunError::Runtime)?
}

async fn serve(
    config: ControllerConfig,
    ready: impl FnOnce(SocketAddr),
    shutdown: impl Future<Output = ()>,
) -> Result<(), RunError> {
    let mut shutdown = pin!(shutdown);
    if crate::is_over(shutdown.as_mut()).await {
        return Ok(());
    }
    let failed = |source| RunError::Listen { address: config.listen, source };
    let guard = Guard::new(config.tls.as_ref()).map_err(RunError::Tls)?;
    // Before the plans of an earlier run are removed: one that runs still has the address.
    let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
    let local = listener.local_addr().map_err(failed)?;
    let advertise = config.advertise.unwrap_or(local);
    // As long as this lives, waiting for replies does not end.
    let (replied, mut replies) = mpsc::channel(REPLIES);
    let keeper = config
        .state
        .as_ref()
        .map(|location| Keeper::open(location, &config.state_tls, advertise, replied.clone()));
    let leadership = keeper.transpose()?.map(|keeper| Leadership::new(keeper, advertise));
    // After the state, which another one may have.
    let plans = config.plans.as_deref().map(|directory| {
        let failed = |source| RunError::Plans { directory: directory.to_owned(), source };
        Plans::open(directory).map_err(failed)
    });
    let plans = plans.transpose()?;
    let mut rules = Rules {
        report_placements: plans.is_some(),
        keep_records: leadership.is_some(),
        ..config.rules
    };
    if let Some(tokens) = &config.tokens {
        tokens.apply(&mut rules);
    }
    if matches!(config.state, Some(StateLocation::Etcd(_))) {
        rules.claim_timeout = rules.claim_timeout.max(CLAIM_TIMEOUT);
    }
    ready(local);
    let (events, mut incoming) = mpsc::channel(INCOMING_MESSAGES);
    let places = Arc::new(Semaphore::new(rules.max_connections() + CLOSING_MAX));
    let mut controller = Controller::new(rules.clone());
    if let Some(leadership) = &leadership {
        controller.stand_by(leadership.standby());
    }
    let mut daemon = Daemon {
        controller,
        rules,
        leadership,
        placed: BTreeSet::new(),
        plans,
        tokens: config.tokens,
        guard,
        peers: HashMap::new(),
        events,
        next_connection: 0,
        overload: Overload::default(),
    };
    let mut watch = config.view.map(|view| Watch::new(view, millstream_net::now()));
    // No connection is accepted before this, after one could not be.
    let mut paused_until = None;
    let mut failing = false;
    loop {
        let now = millstream_net::now();
        // Before anything else: this process may have stood still, and another one lead.
        daemon.lead_or_stand_by(now);
        daemon.carry_out();
        // While nobody can be answered, nobody is late: nothing of theirs is read.
        let deadline = daemon.controller.poll_timeout().filter(|_| daemon.may_speak());
        // Here and not in a branch below, so that no flood of other events keeps it from its turn:
        // it is what ends idle connections.
        if deadline.is_some_and(|deadline| deadline <= now) {
            daemon.controller.handle_timeout(now);
            daemon.carry_out();
            // That may have taken so long that the next deadline is over: some of what others have said meanwhile comes first.
            for _ in 0..BETWEEN_DEADLINES {
                let Ok((connection, event)) = incoming.try_recv() else { break };
                daemon.handle(connection, event);
                daemon.carry_out();
            }
            while let Ok(reply) = replies.try_recv() {
                if let Some(leadership) = &mut daemon.leadership {
                    leadership.handle_reply(millstream_net::now(), reply);
                }
            }
            continue;
        }
        if let Some(watch) = watch.as_mut().filter(|watch| watch.at() <= now) {
            watch.look(now, &mut daemon.controller);
            daemon.carry_out();
            continue;
        }
        paused_until = paused_until.filter(|&until| until > now);
        let look_at = watch.as_ref().map(Watch::at);
        let lead_at = daemon.leadership.as_ref().and_then(Leadership::at);
        let wake = [deadline, paused_until, look_at, lead_at].into_iter().flatten().min();
        let may_speak = daemon.may_speak();
        let left = wake.map(|wake| wake.saturating_duration_since(now));
        tokio::select! {
            () = &mut shutdown => {
                if let Some(leadership) = daemon.leadership.take() {
                    leadership.resign();
                }
                return Ok(());
            }
            Some(reply) = replies.recv() => {
                if let Some(leadership) = &mut daemon.leadership {
                    leadership.handle_reply(millstream_net::now(), reply);
                }
            }
            accepted = accept(&listener, &places), if paused_until.is_none() => match accepted {
                Ok((place, stream, address)) => {
                    failing = false;
                    daemon.accept(place, stream, address);
                }
                Err(error) => {
                    // Out of file descriptors, most likely: some will be closed.
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "cannot accept connections; trying again");
                    }
                    paused_until = Some(now + ACCEPT_PAUSE);
                }
            },
            // What nobody can be answered waits where it is.
            Some((connection, event)) = incoming.recv(), if may_speak => {
                daemon.handle(connection, event);
            }
            () = sleep(left.unwrap_or_default()), if left.is_some() => {}
        }
        daemon.carry_out();
    }
}

/// Accepts a connection once there is a place for it.
async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> io::Result<(OwnedSemaphorePermit, TcpStream, SocketAddr)> {
    let place = Arc::clone(places).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, address) = listener.accept().await?;
    Ok((place, stream, address))
}

/// What a connection has to tell.
enum Event {
    Message(ToController),
    BadFrame(FrameError),
    Closed,
}

struct Peer {
    address: SocketAddr,
    /// It has said what it is.
    known: bool,
    /// The side of this process of a proof that is not over.
    proof: Option<Responder>,
    /// Dropped, it lets the connection end when all is sent.
    outgoing: mpsc::Sender<Outgoing>,
    /// For the bytes of what is on its way.
    room: Arc<Semaphore>,
}

/// A message on its way.
struct Outgoing {
    frame: Vec<u8>,
    /// It is not sent when this is over.
    lease: Option<Arc<Lease>>,
    /// For its bytes, until it is sent.
    room: OwnedSemaphorePermit,
}

struct Daemon {
    controller: Controller,
    /// What controllers are made with.
    rules: Rules,
    /// Whether it leads, where it has a state.
    leadership: Option<Leadership>,
    plans: Option<Plans>,
    tokens: Option<Tokens>,
    guard: Guard,
    /// Communicators that have a file of a plan.
    placed: BTreeSet<u64>,
    peers: HashMap<ConnectionId, Peer>,
    events: mpsc::Sender<(ConnectionId, Event)>,
    next_connection: u64,
    overload: Overload,
}

impl Daemon {
    fn accept(&mut self, place: OwnedSemaphorePermit, stream: TcpStream, address: SocketAddr) {
        let connection = ConnectionId(self.next_connection);
        self.next_connection += 1;
        // Small messages that someone waits for. Failing, they are late.
        let _ = crate::set_up(&stream);
        let (outgoing, frames) = mpsc::channel(OUTGOING_MESSAGES);
        let tokens = self.tokens.as_ref().filter(|tokens| !tokens.secrets().is_empty());
        let own = stream.local_addr().ok().filter(|_| tokens.is_some());
        let proof = own.map(|own| Responder::new(Purpose::Control, own, "controller"));
        let (known, room) = (false, Arc::new(Semaphore::new(OUTGOING_BYTES)));
        self.peers.insert(connection, Peer { address, known, proof, outgoing, room });
        let (events, guard) = (self.events.clone(), self.guard.clone());
        tokio::spawn(async move {
            admit(connection, address, guard, stream, frames, events).await;
            drop(place);
        });
        let now = millstream_net::now();
        self.controller.handle_connected_from(now, connection, address.ip());
    }

    fn handle(&mut self, connection: ConnectionId, event: Event) {
        match event {
            Event::Message(ToController::Token { body }) if self.is_proving(connection) => {
                self.prove(connection, &body);
            }
            Event::Message(message) => {
                self.log(connection, &message);
                self.controller.handle_message(millstream_net::now(), connection, message);
            }
            Event::BadFrame(error) => {
                self.controller.handle_bad_frame(millstream_net::now(), connection, &error);
            }
            Event::Closed => {
                self.controller.handle_closed(millstream_net::now(), connection);
                self.peers.remove(&connection);
            }
        }
    }

    fn is_proving(&self, connection: ConnectionId) -> bool {
        self.peers.get(&connection).is_some_and(|peer| peer.proof.is_some())
    }

    /// Takes the next message of a proof.
    fn prove(&mut self, connection: ConnectionId, body: &[u8]) {
        let Some(tokens) = &self.tokens else { return };
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        let Some(proof) = &mut peer.proof else { return };
        let now = millstream_net::now();
        let said = match draw_nonce() {
            Ok(nonce) => proof.take(body, nonce, tokens.secrets()),
            Err(error) => {
                tracing::warn!(%error, "no random numbers can be had, so nobody can prove a token");
                Err(TokenError::NoProof)
            }
        };
        match said {
            Ok(Said::Challenge(body)) => self.say_of_proof(connection, body),
            Ok(Said::Accepted(body, token)) => {
                peer.proof = None;
                // Who is turned away all the same hears that in place of this.
                if self.controller.handle_proved(now, connection, token) {
                    self.say_of_proof(connection, body);
                }
            }
            Err(error) => {
                peer.proof = None;
                let problem = match error {
                    TokenError::OtherToken => TokenProblem::Unknown,
                    TokenError::OtherAddress => TokenProblem::OtherAddress,
                    _ => TokenProblem::NoProof,
                };
                self.controller.handle_unproved(now, connection, problem);
            }
        }
    }

    /// The peer obeys nothing before the proof is over, and so no term.
    fn say_of_proof(&mut self, connection: ConnectionId, body: Vec<u8>) {
        self.send(connection, self.controller.term(), &FromController::Token { body });
    }

    fn log(&mut self, connection: ConnectionId, message: &ToController) {
        let mut peer = self.peers.get_mut(&connection);
        if peer.as_ref().is_some_and(|peer| peer.proof.is_some()) {
            // Whoever has no token cannot fill the log.
            return;
        }
        if let (
            Some(peer),
            ToController::Register { .. } | ToController::Join(_) | ToController::Resume(_),
        ) = (&mut peer, message)
        {
            peer.known = true;
        }
        let peer = peer.map(|peer| peer.address);
        match message {
            ToController::Pong | ToController::Counters { .. } | ToController::Token { .. } => {}
            ToController::Register { name, address, presence, .. } => {
                let held = presence.held;
                tracing::info!(?peer, name, %address, held, "a switch registers");
            }
            ToController::Resume(resume) => {
                tracing::info!(
                    ?peer,
                    group = resume.group,
                    rank = resume.rank,
                    "a host comes back"
                );
            }
            ToController::Join(hello) => {
                tracing::info!(?peer, group = hello.group, rank = hello.rank, "a host joins");
            }
            ToController::Report { communicator, report } => {
                tracing::warn!(communicator, ?report, "a switch reports");
            }
            ToController::Fail { reason, .. } => tracing::warn!(?peer, reason, "a host gives up"),
            message => tracing::debug!(?peer, ?message, "received"),
        }
    }

    /// Carries out what the controller has decided.
    fn carry_out(&mut self) {
        if !self.may_speak() {
            return;
        }
        while let Some(output) = self.controller.poll_output() {
            match output {
                Output::Send { connection, term, message } => {
                    self.send(connection, term, &message);
                }
                Output::Close { connection } => {
                    self.peers.remove(&connection);
                }
            }
        }
        self.write_plans();
    }

    /// Has the files of plans written and removed.
    fn write_plans(&mut self) {
        let Some(plans) = &self.plans else { return };
        while let Some(change) = self.controller.poll_placement() {
            match &change {
                PlacementChange::Ready(placement) => self.placed.insert(placement.communicator),
                PlacementChange::Over { communicator } => self.placed.remove(communicator),
            };
            plans.change(change);
        }
    }

    /// Whether what the controller says may be sent now.
    fn may_speak(&self) -> bool {
        let leadership = self.leadership.as_ref();
        leadership.is_none_or(|leadership| leadership.may_speak(&self.controller))
    }

    /// Does what is due in the election.
    fn lead_or_stand_by(&mut self, now: millstream_roce::Instant) {
        let Some(leadership) = &mut self.leadership else { return };
        let Some(turn) = leadership.step(now, &mut self.controller) else { return };
        // Whoever is connected comes again. Numbers that an earlier controller has given are not given again.
        self.peers.clear();
        let secret = crate::secret();
        self.controller = Controller::new(Rules { secret, ..self.rules.clone() });
        match turn {
            Turn::Lead(term, records) => self.controller.lead(now, term, records),
            Turn::StandBy => self.controller.stand_by(leadership.standby()),
        }
        if let Some(plans) = &self.plans {
            for communicator in std::mem::take(&mut self.placed) {
                plans.change(PlacementChange::Over { communicator });
            }
        }
    }

    fn send(&mut self, connection: ConnectionId, term: u64, message: &FromController) {
        let Some(peer) = self.peers.get(&connection) else { return };
        match message {
            FromController::Ping
            | FromController::ReadCounters
            | FromController::Token { .. }
            | FromController::Waiting { .. } => {}
            // Strangers, of whom there can be many.
            FromController::Refused {
                reason: reason @ (Refusal::Protocol { .. } | Refusal::Token { .. }),
            } if !peer.known => {
                tracing::debug!(peer = %peer.address, %reason, "refused");
            }
            // All of them, again and again while nobody leads.
            FromController::Refused { reason: reason @ Refusal::NotLeader { .. } } => {
                tracing::debug!(peer = %peer.address, %reason, "refused");
            }
            FromController::Refused {
                reason:
                    reason @ (Refusal::Limit { .. } | Refusal::Quota { .. } | Refusal::Token { .. }),
            } => {
                if self.overload.begins(Instant::now()) {
                    tracing::warn!(peer = %peer.address, %reason, "refused, and others too");
                } else {
                    tracing::debug!(peer = %peer.address, %reason, "refused");
                }
            }
            FromController::Refused { reason } => {
                tracing::warn!(peer = %peer.address, %reason, "refused");
            }
            FromController::Abort { reason } => {
                tracing::warn!(peer = %peer.address, %reason, "aborted");
            }
            message => tracing::debug!(peer = %peer.address, ?message, "sent"),
        }
        let command = Commanded { term, message: message.clone() };
        let leadership = self.leadership.as_ref();
        let lease = leadership.and_then(|leadership| leadership.lease(&self.controller));
        let send = |frame: Vec<u8>| {
            let room = Arc::clone(&peer.room).try_acquire_many_owned(frame.len() as u32);
            room.is_ok_and(|room| peer.outgoing.try_send(Outgoing { frame, lease, room }).is_ok())
        };
        let sent = encode(&command).is_ok_and(send);
        if !sent {
            // It does not read what it is sent: as good as dead.
            tracing::warn!(peer = %peer.address, "does not take its messages");
            self.peers.remove(&connection);
            self.controller.handle_closed(millstream_net::now(), connection);
        }
    }
}

/// When a peer was last refused because of a limit.
#[derive(Default)]
struct Overload(Option<Instant>);

impl Overload {
    /// A peer is refused. Whether an overload begins with it, which is over when nobody is refused
    /// for a while.
    fn begins(&mut self, now: Instant) -> bool {
        let last = self.0.replace(now);
        last.is_none_or(|last| now.duration_since(last) >= OVERLOAD_PAUSE)
    }
}

/// One connection, with the TLS handshake before its first message if there is TLS.
async fn admit(
    connection: ConnectionId,
    address: SocketAddr,
    guard: Guard,
    stream: TcpStream,
    mut frames: mpsc::Receiver<Outgoing>,
    events: mpsc::Sender<(ConnectionId, Event)>,
) {
    let mut early = Vec::new();
    let ended = async {
        while let Some(frame) = frames.recv().await {
            early.push(frame);
        }
    };
    // As long as the controller waits for who says nothing.
    let admitted = tokio::select! {
        admitted = guard.admit(stream) => admitted,
        () = ended => Err(io::Error::from(io::ErrorKind::TimedOut)),
    };
    match admitted {
        Ok(stream) => converse(connection, stream, early, frames, events).await,
        Err(error) => {
            tracing::debug!(%address, %error, "no TLS with a peer");
            let _ = events.send((connection, Event::Closed)).await;
        }
    }
}

/// What is said on a connection, from its first byte to its last. `early` is said first.
async fn converse(
    connection: ConnectionId,
    stream: impl AsyncRead + AsyncWrite,
    early: Vec<Outgoing>,
    mut frames: mpsc::Receiver<Outgoing>,
    events: mpsc::Sender<(ConnectionId, Event)>,
) {
    let (reader, mut writer) = tokio::io::split(stream);
    let mut reader = MessageReader::new(reader);
    let read = async {
        let last = loop {
            match reader.next().await {
                Ok(message) => {
                    let event = (connection, Event::Message(message));
                    if events.send(event).await.is_err() {
                        return;
                    }
                }
                Err(ReadError::Frame(error)) => break Event::BadFrame(error),
                Err(ReadError::Closed | ReadError::Io(_)) => break Event::Closed,
            }
        };
        let _ = events.send((connection, last)).await;
        reader.discard().await;
    };
    let write = async {
        let mut early = early.into_iter();
        while let Some(Outgoing { frame, lease, room }) = match early.next() {
            Some(outgoing) => Some(outgoing),
            None => frames.recv().await,
        } {
            // It may have waited, and this process have stood still.
            if lease.is_some_and(|lease| !lease.lasts()) {
                break;
            }
            let write = async {
                writer.write_all(&frame).await?;
                // Over TLS it may wait here, where the network does not take all of it at once.
                writer.flush().await
            };
            let written = timeout(WRITE_TIMEOUT, write).await;
            if !matches!(written, Ok(Ok(()))) {
                break;
            }
            drop(room);
        }
        let _ = writer.shutdown().await;
    };
    let (mut read, mut write) = (pin!(read), pin!(write));
    tokio::select! {
        // The controller ends it, or the peer does not read.
        () = &mut write => {
            let _ = timeout(CLOSE_TIMEOUT, read).await;
            let _ = events.send((connection, Event::Closed)).await;
        }
        // The peer ends it: the controller will let go of the other half.
        () = &mut read => write.await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_overload_is_told_of_once() {
        let mut overload = Overload::default();
        let mut now = Instant::now();
        for _ in 0..2 {
            assert!(overload.begins(now));
            for _ in 0..100 {
                now += OVERLOAD_PAUSE / 2;
                assert!(!overload.begins(now));
            }
            now += OVERLOAD_PAUSE;
        }
    }
}
