//! A TCP stream.

use std::hint::black_box;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::Usage;

/// Bytes of one read: what a receiver takes in at a time.
const READ_LENGTH: usize = 256 << 10;

/// What [`tcp_stream`] measured.
#[derive(Clone, Copy, Debug)]
pub struct TcpReport {
    /// Bytes that arrived at their place.
    pub bytes: u64,
    /// In this time.
    pub elapsed: Duration,
    /// Processor time of this process for it.
    pub cpu: Duration,
}

impl TcpReport {
    /// Gigabytes (10^9) per second.
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64() / 1e9
    }
}

/// Streams bytes over one TCP connection from one thread to another over 127.0.0.1 for `duration`,
/// `length` bytes a write, out of a source of `working_set` bytes, which the sender walks through,
/// and straight into a destination of as many.
pub fn tcp_stream(duration: Duration, length: usize, working_set: usize) -> io::Result<TcpReport> {
    if length == 0 || length > working_set {
        let message = format!("a write has 1 to {working_set} bytes, not {length}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let (mut receiver, _) = listener.accept()?;
    sender.set_nodelay(true)?;
    let (source, mut destination) = (vec![1_u8; working_set], vec![2_u8; working_set]);
    thread::scope(|scope| {
        let receiving = scope.spawn(|| receive_all(&mut receiver, &mut destination));
        let usage = Usage::start();
        let end = usage.started_at() + duration;
        let mut sent = Ok(());
        for bytes in source.chunks_exact(length).cycle() {
            sent = sender.write_all(bytes);
            if sent.is_err() || Instant::now() >= end {
                break;
            }
        }
        let closed = sender.shutdown(Shutdown::Write);
        let received = receiving.join().map_err(|_panic| io::Error::other("receiver panicked"))?;
        sent?;
        closed?;
        let bytes = received?;
        Ok(TcpReport { bytes, elapsed: usage.started_at().elapsed(), cpu: usage.cpu() })
    })
}

fn receive_all(stream: &mut TcpStream, memory: &mut [u8]) -> io::Result<u64> {
    let (mut at, mut bytes) = (0, 0);
    loop {
        let end = memory.len().min(at + READ_LENGTH);
        let count = stream.read(&mut memory[at..end])?;
        if count == 0 {
            return Ok(bytes);
        }
        bytes += count as u64;
        at = (at + count) % memory.len();
        black_box(&mut *memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_was_written_arrives() {
        let report = tcp_stream(Duration::from_millis(20), 64 << 10, 1 << 20).unwrap();
        assert!(report.bytes > 0 && report.bytes.is_multiple_of(64 << 10));
        assert!(report.gb_per_s() > 0.0);
    }

    #[test]
    fn writes_of_nothing_are_refused() {
        for length in [0, (1 << 20) + 1] {
            let error = tcp_stream(Duration::ZERO, length, 1 << 20).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{length}");
        }
    }
}
