//! Bytes to and fro over TCP, between two processes: the least that a message and its answer take.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::Usage;

/// For an answer. Loopback loses none.
const PATIENCE: Duration = Duration::from_secs(5);
/// What is sent to and fro at most.
const MAX_LENGTH: usize = 1 << 20;
/// Round trips whose times have room from the start.
const ROUND_TRIPS: usize = 1 << 20;

/// What [`tcp_ping_pong`] measured.
#[derive(Clone, Debug)]
pub struct PingPongReport {
    /// How long the bytes took there and back, shortest first. Never empty.
    pub round_trips: Vec<Duration>,
    /// Processor time of this process for all of them.
    pub cpu: Duration,
}

impl PingPongReport {
    /// The time within which this part of the round trips was over: 0.5 is the median.
    pub fn quantile(&self, part: f64) -> Duration {
        let last = self.round_trips.len() - 1;
        self.round_trips[((last as f64 * part).round() as usize).min(last)]
    }
}

/// Sends `length` bytes to the process at `peer`, which runs [`tcp_echo`], and waits until they come
/// back, again and again for `duration`. It sleeps until they come, or, with `busy_poll`, looks for
/// them without a pause.
///
/// Pin both processes, each to a core of its own: else the scheduler may put both on one, which is
/// three times as fast as two, or may not.
pub fn tcp_ping_pong(
    peer: SocketAddr,
    duration: Duration,
    length: usize,
    busy_poll: bool,
) -> io::Result<PingPongReport> {
    let stream = prepare(TcpStream::connect(peer)?, length, busy_poll)?;
    let mut bytes = vec![1_u8; length];
    let mut round_trip = || {
        let start = Instant::now();
        send(&stream, &bytes)?;
        let came = receive(&stream, &mut bytes)?;
        let time = start.elapsed();
        if came { Ok(time) } else { Err(io::Error::from(io::ErrorKind::UnexpectedEof)) }
    };
    let warm = Instant::now() + duration / 10;
    while Instant::now() < warm {
        round_trip()?;
    }
    let mut round_trips = Vec::with_capacity(ROUND_TRIPS);
    let usage = Usage::start();
    let end = usage.started_at() + duration;
    loop {
        round_trips.push(round_trip()?);
        if Instant::now() >= end {
            let cpu = usage.cpu();
            round_trips.sort_unstable();
            return Ok(PingPongReport { round_trips, cpu });
        }
    }
}

/// The other end of [`tcp_ping_pong`]: waits for one connection, and sends back what comes over it,
/// `length` bytes at a time, until it is closed.
pub fn tcp_echo(listener: &TcpListener, length: usize, busy_poll: bool) -> io::Result<()> {
    let stream = prepare(listener.accept()?.0, length, busy_poll)?;
    let mut bytes = vec![0_u8; length];
    while receive(&stream, &mut bytes)? {
        send(&stream, &bytes)?;
    }
    Ok(())
}

fn prepare(stream: TcpStream, length: usize, busy_poll: bool) -> io::Result<TcpStream> {
    if length == 0 || length > MAX_LENGTH {
        let message = format!("a ping has 1 to {MAX_LENGTH} bytes, not {length}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    stream.set_nodelay(true)?;
    stream.set_nonblocking(busy_poll)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn send(mut stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let mut patience = Patience::default();
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) => patience.forgive(error)?,
        }
    }
    Ok(())
}

/// Fills `bytes`; `false` when the peer has closed before the first of them.
fn receive(mut stream: &TcpStream, bytes: &mut [u8]) -> io::Result<bool> {
    let mut patience = Patience::default();
    let mut at = 0;
    while at < bytes.len() {
        match stream.read(&mut bytes[at..]) {
            Ok(0) if at == 0 => return Ok(false),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => at += count,
            Err(error) => patience.forgive(error)?,
        }
    }
    Ok(true)
}

/// How long nothing could be done, of a socket that does not sleep.
#[derive(Default)]
struct Patience {
    since: Option<Instant>,
}

impl Patience {
    fn forgive(&mut self, error: io::Error) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock
                if self.since.get_or_insert_with(Instant::now).elapsed() < PATIENCE =>
            {
                std::hint::spin_loop();
                Ok(())
            }
            io::ErrorKind::WouldBlock => Err(io::ErrorKind::TimedOut.into()),
            _ => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn round_trips_are_measured_asleep_and_awake() {
        for busy_poll in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let peer = listener.local_addr().unwrap();
            let report = thread::scope(|scope| {
                let echo = scope.spawn(|| tcp_echo(&listener, 4096, busy_poll));
                let report = tcp_ping_pong(peer, Duration::from_millis(5), 4096, busy_poll);
                echo.join().unwrap().unwrap();
                report.unwrap()
            });
            assert!(report.quantile(0.0) > Duration::ZERO);
            assert!(report.quantile(0.5) <= report.quantile(0.99));
            assert_eq!(report.quantile(1.0), *report.round_trips.last().unwrap());
        }
    }

    #[test]
    fn lengths_that_make_no_sense_are_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap();
        for length in [0, MAX_LENGTH + 1] {
            let error = tcp_ping_pong(peer, Duration::ZERO, length, false).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{length}");
        }
    }
}
