//! Frames over a stream, a step at a time, and the addresses at which a peer is tried.
//!
//! A step reads or writes once. Whether the stream blocks, and until when, is its owner's matter:
//! [`crate::Client`] blocks until a deadline, [`crate::Caller`] waits for many at once.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::peer_tls::Over;
use crate::token::{Initiator, MESSAGE_LIMIT};
use crate::{
    CallErrorKind, Frame, FrameDecoder, FrameError, FrameType, Purpose, TlsError, TlsSession,
    Token, TokenError,
};

/// What a step has brought.
#[derive(Debug)]
pub(crate) enum Step<T> {
    /// The last one.
    Done(T),
    /// Another may follow at once.
    More,
    /// The stream would block, or has for as long as it may.
    Blocked,
}

/// How a stream ended early.
#[derive(Debug)]
pub(crate) enum StreamError {
    Closed,
    Io(io::Error),
    Frame(FrameError),
}

/// A frame that is being written.
#[derive(Debug)]
pub(crate) struct Outgoing {
    bytes: Vec<u8>,
    written: usize,
}

/// A frame that is being read.
#[derive(Debug)]
pub(crate) struct Incoming {
    decoder: FrameDecoder,
}

/// One request, and the reply to it.
#[derive(Debug)]
pub(crate) struct Exchange {
    /// What all of it goes over.
    tls: Option<Box<TlsSession>>,
    /// What is proved on both sides before that.
    proving: Option<Box<Proving>>,
    asked: FrameType,
    request: Outgoing,
    reply: Incoming,
}

/// A proof that both sides have a token.
#[derive(Debug)]
struct Proving {
    initiator: Initiator,
    outgoing: Outgoing,
    incoming: Incoming,
}

impl Outgoing {
    pub(crate) fn new(frame: &Frame) -> Self {
        Self { bytes: frame.encode(), written: 0 }
    }

    fn is_written(&self) -> bool {
        self.written == self.bytes.len()
    }

    /// Writes once.
    pub(crate) fn step(&mut self, mut stream: impl Write) -> Result<Step<()>, StreamError> {
        moved(stream.write(&self.bytes[self.written..]), |count| {
            self.written += count;
            Ok(self.is_written().then_some(()))
        })
    }
}

impl Incoming {
    /// Refuses a frame that is longer than `limit`.
    pub(crate) const fn new(limit: usize) -> Self {
        Self { decoder: FrameDecoder::new(limit) }
    }

    /// How many bytes are to be read so that nothing of what follows the frame is.
    fn wants(&self) -> Result<usize, StreamError> {
        self.decoder.wants().map_err(StreamError::Frame)
    }

    /// Reads once. What follows the frame in the stream is dropped: a connection is for one request.
    pub(crate) fn step(
        &mut self,
        mut stream: impl Read,
        buffer: &mut [u8],
    ) -> Result<Step<Frame>, StreamError> {
        moved(stream.read(buffer), |count| {
            self.decoder.push(&buffer[..count]).map_err(StreamError::Frame)?;
            Ok(self.decoder.take())
        })
    }
}

impl Exchange {
    /// Asks `request`, and refuses a reply that is longer than `limit`.
    pub(crate) fn new(request: &Frame, limit: usize) -> Self {
        Self {
            tls: None,
            proving: None,
            asked: request.frame_type,
            request: Outgoing::new(request),
            reply: Incoming::new(limit),
        }
    }

    /// Has all of it go over TLS.
    pub(crate) fn encrypt(&mut self, session: TlsSession) {
        self.tls = Some(Box::new(session));
    }

    /// Proves first, to who was connected to at `address`, that this side has the token, and has him prove it.
    pub(crate) fn prove(&mut self, token: Token, address: SocketAddr) -> Result<(), CallErrorKind> {
        let initiator = Initiator::new(token, Purpose::Handshake, address, None);
        let initiator = initiator.map_err(CallErrorKind::Io)?;
        let outgoing = Outgoing::new(&initiator.opening());
        let incoming = Incoming::new(MESSAGE_LIMIT);
        self.proving = Some(Box::new(Proving { initiator, outgoing, incoming }));
        Ok(())
    }

    /// Writes or reads once.
    pub(crate) fn step(
        &mut self,
        mut stream: impl Read + Write,
        buffer: &mut [u8],
    ) -> Result<Step<Frame>, CallErrorKind> {
        let Some(mut session) = self.tls.take() else { return self.step_inside(stream, buffer) };
        let step = match session.handshake(&mut stream) {
            Ok(true) => self.step_inside(Over { session: Some(&mut *session), stream }, buffer),
            Ok(false) => Ok(Step::Blocked),
            Err(error) => Err(StreamError::Io(error).into()),
        };
        self.tls = Some(session);
        step
    }

    fn step_inside(
        &mut self,
        mut stream: impl Read + Write,
        buffer: &mut [u8],
    ) -> Result<Step<Frame>, CallErrorKind> {
        if let Some(proving) = &mut self.proving {
            return Ok(match proving.step(&mut stream, buffer)? {
                Step::Done(()) => {
                    self.proving = None;
                    Step::More
                }
                Step::More => Step::More,
                Step::Blocked => Step::Blocked,
            });
        }
        if !self.request.is_written() {
            return Ok(match self.request.step(&mut stream)? {
                Step::Done(()) | Step::More => Step::More,
                Step::Blocked => Step::Blocked,
            });
        }
        let step = self.reply.step(&mut stream, buffer)?;
        match step {
            Step::Done(reply) if reply.frame_type == FrameType::Token => {
                Err(TokenError::of_verdict(&reply.body).into())
            }
            Step::Done(reply) if reply.frame_type != self.asked => {
                Err(CallErrorKind::WrongType { asked: self.asked, got: reply.frame_type })
            }
            step => Ok(step),
        }
    }
}

impl Proving {
    /// Writes or reads once.
    fn step(
        &mut self,
        mut stream: impl Read + Write,
        buffer: &mut [u8],
    ) -> Result<Step<()>, CallErrorKind> {
        if !self.outgoing.is_written() {
            return Ok(match self.outgoing.step(&mut stream)? {
                Step::Done(()) | Step::More => Step::More,
                Step::Blocked => Step::Blocked,
            });
        }
        let wanted = self.incoming.wants()?.min(buffer.len());
        let frame = match self.incoming.step(&mut stream, &mut buffer[..wanted]) {
            Ok(Step::Done(frame)) => frame,
            Ok(Step::More) => return Ok(Step::More),
            Ok(Step::Blocked) => return Ok(Step::Blocked),
            // Who speaks something else has none.
            Err(StreamError::Frame(_)) => return Err(TokenError::NoProof.into()),
            Err(error) => return Err(error.into()),
        };
        Ok(match self.initiator.take(&frame)? {
            Some(frame) => {
                self.outgoing = Outgoing::new(&frame);
                Step::More
            }
            None => Step::Done(()),
        })
    }
}

/// What a system call has brought; `done` takes the number of bytes.
fn moved<T>(
    result: io::Result<usize>,
    done: impl FnOnce(usize) -> Result<Option<T>, StreamError>,
) -> Result<Step<T>, StreamError> {
    match result {
        Ok(0) => Err(StreamError::Closed),
        Ok(count) => Ok(done(count)?.map_or(Step::More, Step::Done)),
        Err(error) => match error.kind() {
            io::ErrorKind::Interrupted => Ok(Step::More),
            // What a socket timeout is reported as differs between systems.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Ok(Step::Blocked),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Err(StreamError::Closed),
            _ => Err(StreamError::Io(error)),
        },
    }
}

impl From<StreamError> for CallErrorKind {
    fn from(error: StreamError) -> Self {
        match error {
            StreamError::Closed => Self::Closed,
            StreamError::Io(error) => match TlsError::of(&error) {
                Some(error) => Self::Tls(error.clone()),
                None => Self::Io(error),
            },
            StreamError::Frame(error) => Self::Frame(error),
        }
    }
}

/// The addresses of a peer, tried one after the other until one accepts.
#[derive(Debug)]
pub(crate) struct Attempts {
    addresses: Arc<[SocketAddr]>,
    port: u16,
    /// How many were tried.
    tried: usize,
    connect_timeout: Duration,
    /// What became of the one before.
    last: Option<CallErrorKind>,
}

/// An address that is tried.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) address: SocketAddr,
    /// For how long.
    pub(crate) wait: Duration,
}

impl Attempts {
    /// Each of these addresses, whatever ports they have, at `port`, for `connect_timeout` at most.
    pub(crate) const fn new(
        addresses: Arc<[SocketAddr]>,
        port: u16,
        connect_timeout: Duration,
    ) -> Self {
        Self { addresses, port, tried: 0, connect_timeout, last: None }
    }

    /// The next address to try while so much time is left, or why the peer is not reached.
    pub(crate) fn next(&mut self, left: Duration) -> Result<Attempt, CallErrorKind> {
        let wait = self.connect_timeout.min(left);
        let Some(mut address) = self.addresses.get(self.tried).copied() else {
            return Err(self.last.take().unwrap_or_else(|| {
                CallErrorKind::Resolve(io::Error::new(io::ErrorKind::NotFound, "no address"))
            }));
        };
        address.set_port(self.port);
        if wait.is_zero() {
            let untried = CallErrorKind::Unreachable { address, waited: wait };
            return Err(self.last.take().filter(|it| says(it) == Says::May).unwrap_or(untried));
        }
        self.tried += 1;
        tracing::debug!(%address, "calling");
        Ok(Attempt { address, wait })
    }

    /// Nobody has accepted a connection there.
    pub(crate) fn failed(&mut self, attempt: Attempt, error: io::Error) {
        let Attempt { address, wait } = attempt;
        tracing::debug!(%address, %error, "no answer");
        let failed = match error.kind() {
            io::ErrorKind::ConnectionRefused => CallErrorKind::Refused { address },
            io::ErrorKind::TimedOut => CallErrorKind::Unreachable { address, waited: wait },
            _ => CallErrorKind::Connect { address, error },
        };
        // That nobody is there is known only if all addresses say so to which there is a way: see `CallErrorKind::Refused`.
        if self.last.as_ref().is_none_or(|last| says(&failed) >= says(last)) {
            self.last = Some(failed);
        }
    }
}

/// What a failure says of whether somebody is there. The last one counts for more.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Says {
    /// Nothing: there is no way from here, as with an address of IPv6 on a host without it.
    Nothing,
    /// Nobody is.
    Nobody,
    /// Somebody may be.
    May,
}

fn says(failure: &CallErrorKind) -> Says {
    use io::ErrorKind::{AddrNotAvailable, NetworkUnreachable, Unsupported};
    match failure {
        CallErrorKind::Connect { error, .. }
            if matches!(error.kind(), AddrNotAvailable | NetworkUnreachable | Unsupported) =>
        {
            Says::Nothing
        }
        CallErrorKind::Refused { .. } => Says::Nobody,
        _ => Says::May,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes and gives as many bytes at a time as the script says; 0 is "would block".
    struct Script {
        counts: Vec<usize>,
        written: Vec<u8>,
        reply: Vec<u8>,
    }

    impl Script {
        fn count(&mut self) -> io::Result<usize> {
            match self.counts.pop() {
                Some(0) => Err(io::ErrorKind::WouldBlock.into()),
                Some(count) => Ok(count),
                None => Err(io::ErrorKind::ConnectionReset.into()),
            }
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = self.count()?.min(bytes.len());
            self.written.extend_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Read for Script {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.count()?.min(self.reply.len()).min(buffer.len());
            buffer[..count].copy_from_slice(&self.reply[..count]);
            self.reply.drain(..count);
            Ok(count)
        }
    }

    fn exchange(counts: &[usize], reply: Frame) -> (Vec<&'static str>, Result<Frame, String>) {
        let request = Frame::new(FrameType::Probe, "{}");
        let counts = counts.iter().rev().copied().collect();
        let mut script = Script { counts, written: Vec::new(), reply: reply.encode() };
        let mut exchange = Exchange::new(&request, 16);
        let mut steps = Vec::new();
        loop {
            steps.push(match exchange.step(&mut script, &mut [0; 7]) {
                Ok(Step::More) => "more",
                Ok(Step::Blocked) => "blocked",
                Ok(Step::Done(frame)) => {
                    assert_eq!(script.written, request.encode());
                    return (steps, Ok(frame));
                }
                Err(error) => return (steps, Err(error.to_string())),
            });
        }
    }

    #[test]
    fn a_request_goes_out_and_a_reply_comes_in_by_pieces() {
        let reply = Frame::new(FrameType::Probe, "[1]");
        let (steps, got) = exchange(&[0, 4, 0, 99, 0, 9, 9], reply.clone());
        assert_eq!(steps, ["blocked", "more", "blocked", "more", "blocked", "more"]);
        assert_eq!(got, Ok(reply));
    }

    #[test]
    fn a_reply_is_checked_and_a_stream_that_ends_is_no_reply() {
        let (_, got) = exchange(&[99, 99, 99], Frame::new(FrameType::Notify, "{}"));
        assert_eq!(got.unwrap_err(), "it answered a Probe request with a Notify reply");
        let (_, got) = exchange(&[99, 99, 99], Frame::new(FrameType::Probe, "x".repeat(16)));
        assert!(got.unwrap_err().contains("a frame of 17 bytes, more than the 16"));
        for counts in [&[4][..], &[99], &[99, 3]] {
            let (_, got) = exchange(counts, Frame::new(FrameType::Probe, "{}"));
            assert!(got.unwrap_err().starts_with("it closed the connection"), "{counts:?}");
        }
    }

    #[test]
    fn addresses_are_tried_in_order_while_there_is_time() {
        let addresses: Vec<SocketAddr> =
            ["127.0.0.1:0", "[::1]:0", "127.0.0.2:0"].map(|text| text.parse().unwrap()).into();
        let (short, long) = (Duration::from_secs(1), Duration::from_secs(5));
        let mut attempts = Attempts::new(addresses.into(), 7, short);
        let first = attempts.next(long).unwrap();
        assert_eq!((first.address.to_string().as_str(), first.wait), ("127.0.0.1:7", short));
        attempts.failed(first, io::ErrorKind::ConnectionRefused.into());
        let second = attempts.next(short / 2).unwrap();
        assert_eq!((second.address.to_string().as_str(), second.wait), ("[::1]:7", short / 2));
        attempts.failed(second, io::ErrorKind::TimedOut.into());
        let error = attempts.next(Duration::ZERO).unwrap_err();
        assert!(
            matches!(error, CallErrorKind::Unreachable { address, waited }
                if address == second.address && waited == second.wait),
            "{error}"
        );
    }

    /// A process is taken for dead then, and a fence of it for confirmed.
    #[test]
    fn a_peer_refuses_only_if_all_of_its_addresses_do() {
        use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable, TimedOut};
        let second = Duration::from_secs(1);
        for (kinds, refused) in [
            ([ConnectionRefused, ConnectionRefused], true),
            ([ConnectionRefused, TimedOut], false),
            ([TimedOut, ConnectionRefused], false),
            ([HostUnreachable, ConnectionRefused], false),
            // To that one there is no way from here.
            ([NetworkUnreachable, ConnectionRefused], true),
            ([ConnectionRefused, NetworkUnreachable], true),
        ] {
            let addresses = ["127.0.0.1:0", "[::1]:0"].map(|text| text.parse().unwrap());
            let mut attempts = Attempts::new(addresses.into(), 7, second);
            for kind in kinds {
                let attempt = attempts.next(second).unwrap();
                attempts.failed(attempt, kind.into());
            }
            let error = attempts.next(second).unwrap_err();
            assert_eq!(says(&error) == Says::Nobody, refused, "{kinds:?}: {error}");
            // There is no time for the second one.
            let mut attempts = Attempts::new(addresses.into(), 7, second);
            let attempt = attempts.next(second).unwrap();
            attempts.failed(attempt, kinds[0].into());
            let error = attempts.next(Duration::ZERO).unwrap_err();
            assert!(says(&error) == Says::May, "{kinds:?}: {error}");
        }
    }

    #[test]
    fn no_address_is_an_error_of_the_name() {
        let second = Duration::from_secs(1);
        let error = Attempts::new([].into(), 7, second).next(second).unwrap_err();
        assert!(matches!(error, CallErrorKind::Resolve(_)), "{error}");
    }
}
