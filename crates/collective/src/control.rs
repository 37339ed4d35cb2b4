//! The connection to the controller.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use millstream_inc::protocol::{FrameDecoder, FrameError, FromController, ToController, encode};
use thiserror::Error;

/// Bytes read at a time. Messages to a host are short.
const READ_BYTES: usize = 4096;

/// How long a message may take to leave.
const WRITE_TIMEOUT: Duration = Duration::from_secs(3);

/// The shortest wait that the socket can be told.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// Why there is no message.
#[derive(Debug, Error)]
pub(crate) enum ReceiveError {
    /// Nothing came in time.
    #[error("no message came in time")]
    TimedOut,
    #[error("{0}")]
    Frame(FrameError),
    #[error("{0}")]
    Io(io::Error),
}

/// Where messages come from.
pub(crate) struct Receiver {
    stream: TcpStream,
    decoder: FrameDecoder,
}

/// Where messages go.
pub(crate) struct Sender {
    stream: TcpStream,
}

/// Connects to a controller. Calls `waiting` with what is left of the time whenever there was no
/// answer for `silence`.
pub(crate) fn connect(
    controller: SocketAddr,
    timeout: Duration,
    silence: Duration,
    mut waiting: impl FnMut(Duration),
) -> io::Result<(Sender, Receiver)> {
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
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let sender = Sender { stream: stream.try_clone()? };
    Ok((sender, Receiver { stream, decoder: FrameDecoder::new() }))
}

impl Sender {
    pub(crate) fn send(&self, message: &ToController) -> io::Result<()> {
        let frame = encode(message).map_err(io::Error::other)?;
        (&self.stream).write_all(&frame)
    }

    /// Closes the connection, also for the receiver, which then ends with an error.
    pub(crate) fn close(&self) {
        // Closed by the peer already, if this fails.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Receiver {
    /// The next message, if one comes before `deadline`.
    pub(crate) fn receive(&mut self, deadline: Instant) -> Result<FromController, ReceiveError> {
        loop {
            if let Some(message) = self.decoder.next_message().map_err(ReceiveError::Frame)? {
                return Ok(message);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ReceiveError::TimedOut);
            }
            let wait = Some(left.max(SHORTEST_WAIT));
            self.stream.set_read_timeout(wait).map_err(ReceiveError::Io)?;
            let mut bytes = [0; READ_BYTES];
            match self.stream.read(&mut bytes) {
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
