//! Connections to servers that answer one request with one reply, and keep the connection.
//!
//! Whoever calls takes a connection that nobody uses, or makes one: no caller waits for another one's
//! reply. A connection comes back after a whole reply only, so a late reply is nobody else's.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::KeyValueErrorKind;
use super::config::KeyValueConfig;
use super::last_words::is_closed;
use super::tls::{Session, Sessions, fault_of_io};
use crate::HostPort;
use crate::client::{CallErrorKind, deadline};
use crate::exchange::Attempts;
use crate::resolver::Resolver;
use crate::stream::Until;

/// Connections that are kept while nobody uses them.
const MAX_IDLE: usize = 4;
/// The longest text of a server that an error repeats.
const MAX_TEXT: usize = 200;

/// Why there is no reply.
#[derive(Debug)]
pub(super) enum ReplyError {
    Io(io::Error),
    /// The connection ended within the reply.
    Closed,
    Malformed(String),
    /// A value of more bytes than are taken.
    TooLong {
        length: usize,
        limit: usize,
    },
}

impl From<io::Error> for ReplyError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// One line of a reply, without its end, of `limit` bytes at most.
pub(super) fn read_line(from: &mut dyn BufRead, limit: usize) -> Result<Vec<u8>, ReplyError> {
    let mut line = Vec::new();
    // The end of the line is two bytes more.
    from.take(limit as u64 + 2).read_until(b'\n', &mut line)?;
    if line.pop_if(|byte| *byte == b'\n').is_none() {
        return Err(match line.len() > limit {
            true => ReplyError::Malformed(format!("a line of more than {limit} bytes")),
            false => ReplyError::Closed,
        });
    }
    match line.pop_if(|byte| *byte == b'\r') {
        Some(_) => Ok(line),
        None => Err(ReplyError::Malformed(format!("{} ends without CR", excerpt(&line)))),
    }
}

/// A value of `length` bytes and the end of its line.
pub(super) fn read_value(
    from: &mut dyn BufRead,
    length: usize,
    limit: usize,
) -> Result<Vec<u8>, ReplyError> {
    if length > limit {
        return Err(ReplyError::TooLong { length, limit });
    }
    // It grows with what comes: a length costs nothing.
    let mut value = Vec::new();
    (&mut *from).take(length as u64).read_to_end(&mut value)?;
    let mut end = [0; 2];
    match from.read_exact(&mut end) {
        Ok(()) if end == *b"\r\n" => Ok(value),
        Ok(()) => {
            Err(ReplyError::Malformed(format!("a value of {length} bytes goes on after them")))
        }
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(ReplyError::Closed),
        Err(error) => Err(error.into()),
    }
}

/// What a server said, as far as it fits an error: no control characters, no more than a line.
pub(super) fn excerpt(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(MAX_TEXT)]);
    let mut line = String::with_capacity(text.len());
    for character in text.trim_end().chars() {
        match character.is_control() {
            true => line.extend(character.escape_default()),
            false => line.push(character),
        }
    }
    line
}

/// A connection, and what of a reply has come and is not taken yet.
pub(super) struct Connection {
    input: BufReader<Timed>,
}

/// A stream that fails as timed out at a deadline.
struct Timed {
    stream: TcpStream,
    /// What all goes through, where the server speaks TLS.
    session: Option<Session>,
    deadline: Instant,
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut stream = Until::new(&self.stream, self.deadline);
        match &mut self.session {
            None => stream.read(buffer),
            Some(session) => session.over(&mut stream).read(buffer),
        }
    }
}

/// A stream below TLS that is written to also when the other end has closed it: why it did is to be read.
struct Heard<'a>(Until<'a>);

impl Read for Heard<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Heard<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            Err(error) if is_closed(&error) => Ok(bytes.len()),
            result => result,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Timed {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut stream = Until::new(&self.stream, self.deadline);
        match &mut self.session {
            None => stream.write_all(bytes),
            Some(session) => {
                let mut stream = Heard(stream);
                let mut over = session.over(&mut stream);
                over.write_all(bytes)?;
                over.flush()
            }
        }
    }
}

/// To the first address of the server that accepts.
fn connect(
    server: &HostPort,
    connect_timeout: Duration,
    deadline: Instant,
) -> Result<TcpStream, CallErrorKind> {
    let addresses =
        Resolver::system().resolve_until(&server.host, deadline).map_err(CallErrorKind::Resolve)?;
    let mut attempts = Attempts::new(addresses, server.port, connect_timeout);
    loop {
        let attempt = attempts
            .next(deadline.saturating_duration_since(Instant::now()))
            .inspect_err(|_| Resolver::system().forget(&server.host))?;
        match TcpStream::connect_timeout(&attempt.address, attempt.wait) {
            Ok(stream) => {
                // Not having it costs time, not correctness.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Err(error) => attempts.failed(attempt, error),
        }
    }
}

impl Connection {
    /// Sends a request and reads the reply to it.
    pub(super) fn exchange<R>(
        &mut self,
        request: &[u8],
        read: impl FnOnce(&mut dyn BufRead) -> Result<R, ReplyError>,
    ) -> Result<R, ReplyError> {
        let Err(error) = self.input.get_mut().write_all(request) else {
            return read(&mut self.input);
        };
        // What is sent after a part of a request would be taken for the rest.
        let _ = self.input.get_ref().stream.shutdown(Shutdown::Write);
        // A server that closes may have said why before.
        read(&mut self.input).map_err(|_| error.into())
    }

    /// Whether it can take a request: neither side closed it, and nothing came that nobody asked for.
    fn is_at_rest(&self) -> bool {
        let Timed { stream, session, .. } = self.input.get_ref();
        let peek = || {
            stream.set_nonblocking(true)?;
            let peeked = stream.peek(&mut [0]);
            stream.set_nonblocking(false)?;
            peeked
        };
        self.input.buffer().is_empty()
            && session.as_ref().is_none_or(Session::is_at_rest)
            && matches!(peek(), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// What a server should be, for errors.
#[derive(Clone, Copy)]
pub(super) struct Dialect {
    /// Its name, with an article.
    pub(super) what: &'static str,
    /// What URIs begin with.
    pub(super) plain: &'static str,
    /// The same where it speaks TLS, if such servers can.
    pub(super) secure: Option<&'static str>,
}

/// The connections to a server.
pub(super) struct Pool {
    server: HostPort,
    dialect: Dialect,
    sessions: Option<Sessions>,
    config: KeyValueConfig,
    idle: Mutex<Vec<Connection>>,
}

impl Pool {
    /// With `sessions`, all goes over TLS.
    pub(super) const fn new(
        server: HostPort,
        dialect: Dialect,
        sessions: Option<Sessions>,
        config: KeyValueConfig,
    ) -> Self {
        Self { server, dialect, sessions, config, idle: Mutex::new(Vec::new()) }
    }

    /// A new connection, over TLS where that is spoken.
    fn open(&self, deadline: Instant) -> Result<Connection, KeyValueErrorKind> {
        let stream = connect(&self.server, self.config.connect_timeout, deadline)
            .map_err(|error| KeyValueErrorKind::Unreachable(error.to_string()))?;
        let mut session = None;
        if let Some(sessions) = &self.sessions {
            let mut new = sessions.with(&self.server.host).map_err(KeyValueErrorKind::Untrusted)?;
            new.handshake(&mut Until::new(&stream, deadline))
                .map_err(|error| self.no_session(&error))?;
            session = Some(new);
        }
        Ok(Connection { input: BufReader::new(Timed { stream, session, deadline }) })
    }

    /// Why TLS did not come about.
    fn no_session(&self, error: &io::Error) -> KeyValueErrorKind {
        let Dialect { what, plain, .. } = self.dialect;
        if let Some(fault) = fault_of_io(error, plain) {
            return KeyValueErrorKind::Untrusted(fault);
        }
        KeyValueErrorKind::Unreachable(match is_timeout(error) {
            true => format!(
                "it accepted the connection and said nothing of TLS within {:?}: has it stopped, or is it {what} \
                 without TLS ({plain})?",
                self.config.call_timeout
            ),
            false => format!(
                "the connection failed before TLS came about ({error}): is it {what} without TLS ({plain})?"
            ),
        })
    }

    /// Sends a request and reads the reply to it. A new connection is made ready by `greet`.
    pub(super) fn exchange<R>(
        &self,
        greet: impl FnOnce(&mut Connection) -> Result<(), Failure>,
        request: &[u8],
        read: impl FnOnce(&mut dyn BufRead) -> Result<R, ReplyError>,
    ) -> Result<R, KeyValueErrorKind> {
        let deadline = deadline(self.config.call_timeout);
        let call = || {
            let mut connection = match self.take() {
                Some(connection) => connection,
                None => {
                    let mut connection = self.open(deadline)?;
                    greet(&mut connection)?;
                    connection
                }
            };
            connection.input.get_mut().deadline = deadline;
            let reply = connection.exchange(request, read)?;
            self.keep(connection);
            Ok(reply)
        };
        call().map_err(|failure| self.kind(failure))
    }

    fn take(&self) -> Option<Connection> {
        loop {
            let connection = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            if connection.is_at_rest() {
                return Some(connection);
            }
        }
    }

    fn keep(&self, connection: Connection) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(connection);
        }
    }

    fn kind(&self, failure: Failure) -> KeyValueErrorKind {
        let Dialect { what, plain, secure } = self.dialect;
        let error = match failure {
            Failure::Kind(kind) => return kind,
            Failure::Reply(error) => error,
        };
        // Where both sides speak TLS, it is not for want of it.
        let secure = match (secure, &self.sessions) {
            (Some(secure), None) => format!(", or does it speak TLS ({secure})"),
            _ => String::new(),
        };
        match error {
            ReplyError::Io(error) if is_timeout(&error) => KeyValueErrorKind::Unreachable(format!(
                "it accepted the connection but gave no whole reply within {:?}: has it stopped, or \
                 is it something else than {what}{secure}?",
                self.config.call_timeout
            )),
            ReplyError::Io(error) => match fault_of_io(&error, plain) {
                Some(fault) => KeyValueErrorKind::Untrusted(fault),
                None => KeyValueErrorKind::Unreachable(format!(
                    "the connection failed ({error}): has it ended{secure}?"
                )),
            },
            ReplyError::Closed => KeyValueErrorKind::Unreachable(format!(
                "it closed the connection without a whole reply: has it ended, or is it something \
                 else than {what}{secure}?"
            )),
            ReplyError::Malformed(reason) => {
                KeyValueErrorKind::Meaning(format!("{reason}: is it {what}{secure}?"))
            }
            ReplyError::TooLong { length, limit } => KeyValueErrorKind::TooLong { length, limit },
        }
    }
}

/// A call that failed on the way, or by what the server said.
#[derive(Debug)]
pub(super) enum Failure {
    Reply(ReplyError),
    Kind(KeyValueErrorKind),
}

impl From<ReplyError> for Failure {
    fn from(error: ReplyError) -> Self {
        Self::Reply(error)
    }
}

impl From<KeyValueErrorKind> for Failure {
    fn from(kind: KeyValueErrorKind) -> Self {
        Self::Kind(kind)
    }
}

fn is_timeout(error: &io::Error) -> bool {
    // Linux says "would block" of a read that took longer than its socket may.
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_end_with_crlf_and_have_a_limit() {
        let line = |bytes: &[u8]| read_line(&mut &*bytes, 4);
        assert_eq!(line(b"\r\n").unwrap(), b"");
        assert_eq!(line(b"abcd\r\nrest").unwrap(), b"abcd");
        assert_eq!(line(b"a\rb\r\n").unwrap(), b"a\rb");
        for closed in [&b""[..], b"abcd", b"ab\r"] {
            assert!(matches!(line(closed), Err(ReplyError::Closed)), "{closed:?}");
        }
        for malformed in [&b"abcde\r\n"[..], b"abcdefgh", b"ab\n", b"\n"] {
            assert!(matches!(line(malformed), Err(ReplyError::Malformed(_))), "{malformed:?}");
        }
    }

    #[test]
    fn values_have_their_length_and_an_end() {
        let value = |bytes: &[u8], length| read_value(&mut &*bytes, length, 4);
        assert_eq!(value(b"\r\n", 0).unwrap(), b"");
        assert_eq!(value(b"a\r\nb\r\nrest", 4).unwrap(), b"a\r\nb");
        assert!(matches!(value(b"abcde", 5), Err(ReplyError::TooLong { length: 5, limit: 4 })));
        assert!(matches!(value(b"abcde\r\n", 4), Err(ReplyError::Malformed(_))));
        for closed in [&b""[..], b"ab", b"abcd", b"abcd\r"] {
            assert!(matches!(value(closed, 4), Err(ReplyError::Closed)), "{closed:?}");
        }
    }

    #[test]
    fn a_length_alone_takes_no_memory() {
        let error = read_value(&mut &b"abc"[..], usize::MAX, usize::MAX).unwrap_err();
        assert!(matches!(error, ReplyError::Closed));
    }

    #[test]
    fn what_a_server_said_stays_a_line() {
        assert_eq!(excerpt(b"a\r\n\x1b[2Jb\xff"), "a\\r\\n\\u{1b}[2Jb\u{fffd}");
        assert_eq!(excerpt(&[b'a'; 1000]).len(), MAX_TEXT);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>, length in 0_usize..64, limit in 0_usize..64) {
            let _ = read_line(&mut &*bytes, limit);
            let _ = read_value(&mut &*bytes, length, limit);
            let _ = excerpt(&bytes);
        }
    }
}
