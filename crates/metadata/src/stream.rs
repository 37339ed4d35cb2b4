//! Reading and writing a TCP stream against a deadline.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::{Frame, FrameDecoder, FrameError};

/// How an exchange over a stream ended early.
#[derive(Debug)]
pub(crate) enum StreamError {
    Deadline,
    Closed,
    Io(io::Error),
    Frame(FrameError),
}

/// Reads one frame. What follows it in the stream is dropped: an exchange is one request.
pub(crate) fn read_frame(
    mut stream: &TcpStream,
    limit: usize,
    deadline: Instant,
) -> Result<Frame, StreamError> {
    let mut decoder = FrameDecoder::new(limit);
    let mut buffer = [0; 4096];
    loop {
        stream.set_read_timeout(Some(left(deadline)?)).map_err(StreamError::Io)?;
        match stream.read(&mut buffer) {
            Ok(0) => return Err(StreamError::Closed),
            Ok(count) => {
                decoder.push(&buffer[..count]).map_err(StreamError::Frame)?;
                if let Some(frame) = decoder.take() {
                    return Ok(frame);
                }
            }
            Err(error) => check(error)?,
        }
    }
}

/// Writes one frame.
pub(crate) fn write_frame(
    mut stream: &TcpStream,
    frame: &Frame,
    deadline: Instant,
) -> Result<(), StreamError> {
    let bytes = frame.encode();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?)).map_err(StreamError::Io)?;
        match stream.write(rest) {
            Ok(0) => return Err(StreamError::Closed),
            Ok(count) => rest = &rest[count..],
            Err(error) => check(error)?,
        }
    }
    Ok(())
}

/// Reads until the peer closes, so that what was written is not lost to a reset; a bounded number
/// of bytes, for a bounded time.
pub(crate) fn drain(mut stream: &TcpStream, deadline: Instant) {
    let mut buffer = [0; 4096];
    for _ in 0..64 {
        let Ok(left) = left(deadline) else { return };
        if stream.set_read_timeout(Some(left)).is_err() {
            return;
        }
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                if check(error).is_err() {
                    return;
                }
            }
        }
    }
}

fn left(deadline: Instant) -> Result<Duration, StreamError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(StreamError::Deadline) } else { Ok(left) }
}

/// Whether to try again after an error.
fn check(error: io::Error) -> Result<(), StreamError> {
    match error.kind() {
        io::ErrorKind::Interrupted => Ok(()),
        // What a socket timeout is reported as differs between systems.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(StreamError::Deadline),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Err(StreamError::Closed),
        _ => Err(StreamError::Io(error)),
    }
}
