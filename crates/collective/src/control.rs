//! The connection to the controller, which may break, and is made anew.

use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, io};

use millstream_inc::protocol::{
    AbortReason, Commanded, FrameDecoder, FrameError, FromController, LostSwitch, ObeyedTerm,
    Refusal, Resume, TermError, ToController, encode, shortened,
};
use millstream_net::tls::{self, CallerTls};
use millstream_net::token::{Initiator, Purpose, Token, TokenError};
use socket2::{SockRef, TcpKeepalive};
use thiserror::Error;

use crate::joining::Learned;
use crate::line::Line;
use crate::{CollectiveError, LONGEST};

/// Bytes read at a time. Messages to a host are short.
const READ_BYTES: usize = 4096;

/// How long a message may take to leave.
const WRITE_TIMEOUT: Duration = Duration::from_secs(3);

/// How long the kernel of the controller's machine may be silent: its process may stand still for longer.
const KEEP_ALIVE: [Duration; 3] =
    [Duration::from_secs(4), Duration::from_secs(1), Duration::from_secs(8)];

/// The shortest wait for a connection.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// Why there is no message.
#[derive(Debug, Error)]
pub(crate) enum ReceiveError {
    /// Nothing came in time.
    #[error("no message came in time")]
    TimedOut,
    #[error("{0}")]
    Frame(FrameError),
    /// Its term is not to be obeyed.
    #[error(transparent)]
    Term(#[from] TermError),
    #[error("{0}")]
    Io(io::Error),
}

/// Why there is no connection that could be used.
#[derive(Debug, Error)]
pub(crate) enum ConnectError {
    /// There is none.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It ended before both sides had proved that they have the token.
    #[error("{0}")]
    Receive(#[from] ReceiveError),
    /// It turns this rank away.
    #[error("it refuses this rank: {0}")]
    Refused(Refusal),
    /// TLS with it has failed.
    #[error("TLS with it failed: {0}")]
    Tls(String),
    /// It does not prove that it has the token.
    #[error("it does not prove that it has the token that is set here: {0}")]
    Token(#[from] TokenError),
}

/// What both sides prove on each connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct Proofs {
    pub(crate) tls: Option<CallerTls>,
    pub(crate) token: Option<Token>,
}

/// Where messages come from.
pub(crate) struct Receiver {
    line: Line,
    proofs: Proofs,
    decoder: FrameDecoder,
    /// The highest term that was obeyed.
    term: ObeyedTerm,
    /// When something was heard last, or the connection made.
    heard: Instant,
}

/// Where messages go.
pub(crate) struct Sender {
    state: Mutex<Outgoing>,
    /// The switches that this rank is connected to. Those of hosts have incarnation 0.
    switches: OnceLock<Vec<LostSwitch>>,
    /// What the controller has said of others.
    learned: Learned,
}

struct Outgoing {
    /// None while there is no connection.
    line: Option<Line>,
    /// What this rank says last: that it leaves, or why it cannot go on. Each connection begins with it.
    last_word: Option<ToController>,
    /// For ever, by this side.
    closed: bool,
}

/// Connects to a controller. Calls `waiting` with what is left of the time whenever there was no
/// answer for `silence`. What it says of other controllers goes to `learned`.
pub(crate) fn connect(
    controller: SocketAddr,
    proofs: &Proofs,
    timeout: Duration,
    silence: Duration,
    learned: &Learned,
    mut waiting: impl FnMut(Duration),
) -> Result<(Arc<Sender>, Receiver), ConnectError> {
    let start = Instant::now();
    let stream = loop {
        let left = timeout.saturating_sub(start.elapsed());
        match TcpStream::connect_timeout(&controller, left.min(silence).max(SHORTEST_WAIT)) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut && left > silence => {
                waiting(timeout.saturating_sub(start.elapsed()));
            }
            result => break result?,
        }
    };
    set_up(&stream)?;
    let receiver = Receiver::new(stream, proofs, ObeyedTerm::NONE, start + timeout.min(LONGEST))?;
    let line = Some(receiver.line.clone());
    let state = Outgoing { line, last_word: None, closed: false };
    let (state, switches) = (Mutex::new(state), OnceLock::new());
    Ok((Arc::new(Sender { state, switches, learned: learned.clone() }), receiver))
}

fn set_up(stream: &TcpStream) -> io::Result<()> {
    // Where nobody listens at a port that the system may give to this end, a connection may reach itself (simultaneous open,
    // RFC 9293 3.5).
    if matches!((stream.local_addr(), stream.peer_addr()), (Ok(own), Ok(peer)) if own == peer) {
        let itself = "nobody listens there, and the connection has reached itself";
        return Err(io::Error::new(io::ErrorKind::ConnectionRefused, itself));
    }
    let [idle, interval, dead] = KEEP_ALIVE;
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(4),
    )?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(dead))?;
    #[cfg(not(target_os = "linux"))]
    let _ = dead;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))
}

/// What a rank says last that cannot go on, and what is wrong with a rank of its host, if it is that.
pub(crate) fn given_up(error: &impl fmt::Display, cause: Option<AbortReason>) -> ToController {
    ToController::Fail { reason: shortened(error.to_string()), cause }
}

fn write(line: &Line, message: &ToController) -> io::Result<()> {
    line.write_all(&encode(message).map_err(io::Error::other)?)
}

impl Sender {
    fn lock(&self) -> MutexGuard<'_, Outgoing> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn send(&self, message: &ToController) -> io::Result<()> {
        let state = self.lock();
        let line = state.line.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        write(line, message)
    }

    /// Says the last that this rank has to say, now or as soon as there is a connection. Only the first counts.
    pub(crate) fn say_last(&self, message: ToController) {
        let mut state = self.lock();
        if state.last_word.is_none() {
            if let Some(line) = &state.line {
                // The connection may be dead. Until the controller answers, the next one begins with it.
                let _ = write(line, &message);
            }
            state.last_word = Some(message);
        }
    }

    /// This rank is connected to these switches, of which it may say that they are lost.
    pub(crate) fn set_switches(&self, switches: &[LostSwitch]) {
        // Once, when it has joined.
        let _ = self.switches.set(switches.to_vec());
    }

    /// What the controller has said of others, on this connection or before.
    pub(crate) const fn learned(&self) -> &Learned {
        &self.learned
    }

    /// Says last that a switch is lost, and which one it is, or that which has told it.
    pub(crate) fn say_switch_lost(&self, error: &CollectiveError, detail: String, tree: usize) {
        let &CollectiveError::SwitchLost { switch: address, incarnation, .. } = error else {
            return;
        };
        // Of one further up nothing is known here but which switch has told it, and that one is not lost.
        let further_up = error.is_loss_further_up();
        let mut known = self.switches.get().into_iter().flatten();
        let known = known.find(|known| known.address == address).copied();
        // A controller has named it that may not be there any more.
        let other = LostSwitch { address, incarnation };
        let switch = known.or((!further_up).then_some(other));
        let (detail, tree) = (shortened(detail), tree as u8);
        self.say_last(ToController::SwitchLost { detail, tree, switch, further_up });
    }

    /// Whether the controller has not answered the last word. Its answer is the end.
    pub(crate) fn owes(&self) -> bool {
        self.lock().last_word.is_some()
    }

    /// Connects again, and says who comes back. `None` when this side has closed the connection for ever.
    pub(crate) fn come_back(
        &self,
        receiver: &mut Receiver,
        controller: SocketAddr,
        patience: Duration,
        resume: &Resume,
    ) -> Result<Option<()>, ConnectError> {
        self.lock().line = None;
        let start = Instant::now();
        let stream = TcpStream::connect_timeout(&controller, patience)?;
        set_up(&stream)?;
        receiver.heard = Instant::now();
        let new = Receiver::new(stream, &receiver.proofs, receiver.term, start + patience)?;
        let line = new.line.clone();
        write(
            &line,
            &ToController::Resume(Resume { term: receiver.term.get(), ..resume.clone() }),
        )?;
        let mut state = self.lock();
        if state.closed {
            return Ok(None);
        }
        if let Some(last_word) = &state.last_word {
            write(&line, last_word)?;
        }
        state.line = Some(line);
        *receiver = new;
        Ok(Some(()))
    }

    /// Closes the connection, also for the receiver, which then ends with an error.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        if let Some(line) = &state.line {
            // Closed by the peer already, if this fails.
            let _ = line.shutdown();
        }
    }
}

impl Receiver {
    /// One for a new connection, on which both sides prove what is set. Nothing that is said before is obeyed.
    fn new(
        stream: TcpStream,
        proofs: &Proofs,
        term: ObeyedTerm,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let failed = |error: io::Error| match tls::reason(&error) {
            Some(reason) => ConnectError::Tls(reason),
            None if is_pause(&error) => ConnectError::Receive(ReceiveError::TimedOut),
            None if proofs.tls.is_some() => {
                ConnectError::Tls(format!("the connection failed before it was there: {error}"))
            }
            None => ConnectError::Io(error),
        };
        let line = Line::new(stream, proofs.tls.as_ref(), deadline).map_err(failed)?;
        let proofs = proofs.clone();
        let heard = Instant::now();
        let mut receiver = Self { line, proofs, decoder: FrameDecoder::new(), term, heard };
        receiver.prove(deadline).map_err(|error| match error {
            ConnectError::Receive(ReceiveError::Io(error)) if tls::reason(&error).is_some() => {
                failed(error)
            }
            error => error,
        })?;
        Ok(receiver)
    }

    /// Has both sides prove that they have the token, if one is set. Nothing that is said meanwhile is obeyed, not
    /// even a term.
    fn prove(&mut self, deadline: Instant) -> Result<(), ConnectError> {
        let Some(token) = self.proofs.token else { return Ok(()) };
        let called = self.line.peer_address()?;
        let mut initiator = Initiator::new(token, Purpose::Control, called, None)?;
        let mut body = initiator.opening();
        loop {
            write(&self.line, &ToController::Token { body })?;
            let said = loop {
                match self.next(deadline)?.message {
                    FromController::Token { body } => break body,
                    FromController::Ping => write(&self.line, &ToController::Pong)?,
                    FromController::Refused { reason } => {
                        return Err(ConnectError::Refused(reason));
                    }
                    _ => return Err(TokenError::NoProof.into()),
                }
            };
            match initiator.take(&said)? {
                Some(next) => body = next,
                None => return Ok(()),
            }
        }
    }

    /// The next message, if one comes before `deadline`.
    pub(crate) fn receive(&mut self, deadline: Instant) -> Result<FromController, ReceiveError> {
        let Commanded { term, message } = self.next(deadline)?;
        self.term.obey(term)?;
        self.heard = Instant::now();
        Ok(message)
    }

    /// For how long nothing was heard.
    pub(crate) fn silence(&self) -> Duration {
        self.heard.elapsed()
    }

    /// The next message, whoever says it.
    fn next(&mut self, deadline: Instant) -> Result<Commanded, ReceiveError> {
        loop {
            if let Some(next) = self.decoder.next_message().map_err(ReceiveError::Frame)? {
                return Ok(next);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ReceiveError::TimedOut);
            }
            let mut bytes = [0; READ_BYTES];
            match self.line.read(&mut bytes, deadline) {
                Ok(0) => {
                    let closed = "it closed the connection";
                    return Err(ReceiveError::Io(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        closed,
                    )));
                }
                Ok(count) => self.decoder.extend(&bytes[..count]),
                Err(error) => match error.kind() {
                    // The loop looks at the clock.
                    io::ErrorKind::WouldBlock
                    | io::ErrorKind::TimedOut
                    | io::ErrorKind::Interrupted => {}
                    _ => return Err(ReceiveError::Io(error)),
                },
            }
        }
    }
}

/// Whether nothing came for as long as it may.
fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{Read, Write};
    use std::net::{IpAddr, Ipv4Addr, TcpListener};

    use millstream_inc::Abort;
    use millstream_inc::protocol::MAX_TERM;
    use socket2::{Domain, Socket, Type};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn connected() -> (TcpListener, TcpStream, Arc<Sender>, Receiver) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (proofs, learned) = (Proofs::default(), Learned::default());
        let (sender, receiver) =
            connect(address, &proofs, PATIENCE, PATIENCE, &learned, |_| ()).unwrap();
        let stream = listener.accept().unwrap().0;
        (listener, stream, sender, receiver)
    }

    /// What a rank of a group of two says when it comes back.
    pub(crate) fn resume() -> Resume {
        Resume {
            term: 0,
            group: "g".to_owned(),
            identity: [1, 2],
            communicator: 3,
            world: 2,
            rank: 1,
            address: IpAddr::from(Ipv4Addr::LOCALHOST),
            departed: false,
            more_addresses: Vec::new(),
        }
    }

    #[test]
    fn a_last_word_on_a_dead_connection_is_said_on_the_next() {
        let (listener, stream, sender, mut receiver) = connected();
        drop(stream);
        // The kernel takes it, and nobody reads it.
        let last = ToController::SwitchLost {
            detail: "silent".to_owned(),
            tree: 0,
            switch: None,
            further_up: false,
        };
        sender.say_last(last.clone());
        assert!(sender.owes());
        let resume = resume();
        let address = listener.local_addr().unwrap();
        for _ in 0..2 {
            sender.come_back(&mut receiver, address, PATIENCE, &resume).unwrap().unwrap();
            let expected = [ToController::Resume(resume.clone()), last.clone()];
            let expected: Vec<u8> = expected.iter().flat_map(|it| encode(it).unwrap()).collect();
            let mut bytes = vec![0; expected.len()];
            listener.accept().unwrap().0.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes, expected);
        }
    }

    #[test]
    fn a_connection_that_reaches_itself_is_as_one_that_is_refused() {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        let own = socket.local_addr().unwrap();
        socket.connect(&own).unwrap();
        let error = set_up(&TcpStream::from(socket)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{error}");
        let (_listener, stream, _sender, _receiver) = connected();
        set_up(&stream).unwrap();
    }

    #[test]
    fn a_switch_that_is_lost_is_named_and_one_that_tells_of_another_is_said_to() {
        let at = |last| IpAddr::from([10, 0, 0, last]);
        let above = Abort::ParentLost.to_string();
        // Of hosts' processes, too, which have no other incarnation.
        let ours = LostSwitch { address: at(1), incarnation: Some(0) };
        let other = LostSwitch { address: at(2), incarnation: Some(9) };
        for (address, incarnation, detail, named) in [
            (at(1), None, "it does not answer", Some(ours)),
            (at(2), Some(9), "rank 3 cannot reach it", Some(other)),
            (at(1), None, &*above, Some(ours)),
            (at(2), None, &*above, None),
        ] {
            let (_listener, mut stream, sender, _receiver) = connected();
            sender.set_switches(&[ours]);
            let (switch, tree) = (address, 1);
            let error =
                CollectiveError::SwitchLost { switch, detail: detail.to_owned(), incarnation };
            sender.say_switch_lost(&error, detail.to_owned(), tree);
            let (detail, tree, further_up) = (detail.to_owned(), 1, detail == above);
            let expected = ToController::SwitchLost { detail, tree, switch: named, further_up };
            let expected = encode(&expected).unwrap();
            let mut bytes = vec![0; expected.len()];
            stream.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes, expected, "{error:?}");
        }
    }

    #[test]
    fn a_term_that_no_controller_can_exceed_is_not_obeyed() {
        let (_listener, mut stream, _sender, mut receiver) = connected();
        let ping = FromController::Ping;
        for term in [MAX_TERM, MAX_TERM + 1] {
            let command = Commanded { term, message: ping.clone() };
            stream.write_all(&encode(&command).unwrap()).unwrap();
        }
        let deadline = Instant::now() + PATIENCE;
        assert_eq!(receiver.receive(deadline).unwrap(), ping);
        let error = receiver.receive(deadline).unwrap_err();
        let too_high = TermError::TooHigh(MAX_TERM + 1);
        assert!(matches!(error, ReceiveError::Term(it) if it == too_high), "{error}");
    }
}
