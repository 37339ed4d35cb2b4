//! Reading and writing a TCP stream against a deadline.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::exchange::{Incoming, Outgoing, Step, StreamError};
use crate::peer_tls::Over;
use crate::{Frame, TlsSession};

/// A stream that blocks until a deadline, and fails as timed out then.
#[derive(Clone, Copy)]
pub(crate) struct Until<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> Until<'a> {
    pub(crate) const fn new(stream: &'a TcpStream, deadline: Instant) -> Self {
        Self { stream, deadline }
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

/// The same, over TLS where there is a session.
pub(crate) fn over<'a>(
    session: &'a mut Option<TlsSession>,
    stream: &'a TcpStream,
    deadline: Instant,
) -> Over<'a, Until<'a>> {
    Over { session: session.as_mut(), stream: Until::new(stream, deadline) }
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // A signal is no reason to fail: what goes through TLS would not try again by itself.
        loop {
            self.stream.set_read_timeout(Some(self.left()?))?;
            match self.stream.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            self.stream.set_write_timeout(Some(self.left()?))?;
            match self.stream.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads one frame.
pub(crate) fn read_frame(mut stream: impl Read, limit: usize) -> Result<Frame, StreamError> {
    let mut incoming = Incoming::new(limit);
    let mut buffer = [0; 4096];
    loop {
        match incoming.step(&mut stream, &mut buffer)? {
            Step::Done(frame) => return Ok(frame),
            Step::More => {}
            Step::Blocked => return Err(StreamError::Io(io::ErrorKind::TimedOut.into())),
        }
    }
}

/// Writes one frame.
pub(crate) fn write_frame(mut stream: impl Write, frame: &Frame) -> Result<(), StreamError> {
    let mut outgoing = Outgoing::new(frame);
    loop {
        match outgoing.step(&mut stream)? {
            Step::Done(()) => return Ok(()),
            Step::More => {}
            Step::Blocked => return Err(StreamError::Io(io::ErrorKind::TimedOut.into())),
        }
    }
}

/// Reads until the peer closes, so that what was written is not lost to a reset; a bounded number
/// of bytes, for a bounded time.
pub(crate) fn drain(stream: &TcpStream, deadline: Instant) {
    let mut buffer = [0; 4096];
    for _ in 0..64 {
        match Until::new(stream, deadline).read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
