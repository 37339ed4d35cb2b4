//! Datagrams to and fro.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use super::Usage;
use crate::udp::MAX_MESSAGE_LENGTH;

/// For an answer. Loopback loses none unless the machine is out of memory.
const PATIENCE: Duration = Duration::from_secs(5);

/// What [`udp_ping_pong`] measured.
#[derive(Clone, Debug)]
pub struct PingPongReport {
    /// How long each datagram took there and back, shortest first. Never empty.
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

/// Sends a datagram of `length` bytes to another thread over 127.0.0.1, which sends it back, again
/// and again for `duration`. Both threads sleep until a datagram comes, or, with `busy_poll`, look
/// for it without a pause.
pub fn udp_ping_pong(
    duration: Duration,
    length: usize,
    busy_poll: bool,
) -> io::Result<PingPongReport> {
    if length == 0 || length > MAX_MESSAGE_LENGTH {
        let message = format!("a datagram holds 1 to {MAX_MESSAGE_LENGTH} bytes, not {length}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let open = || {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_nonblocking(busy_poll)?;
        io::Result::Ok(socket)
    };
    let (near, far) = (open()?, open()?);
    near.connect(far.local_addr()?)?;
    far.connect(near.local_addr()?)?;
    thread::scope(|scope| {
        let echoing = scope.spawn(|| echo(&far));
        let usage = Usage::start();
        let measured = measure(&near, usage.started_at() + duration, length);
        let cpu = usage.cpu();
        // A datagram of no bytes is the end.
        near.send(&[])?;
        let echoed = echoing.join().map_err(|_panic| io::Error::other("echo panicked"))?;
        let mut round_trips = measured?;
        echoed?;
        round_trips.sort_unstable();
        Ok(PingPongReport { round_trips, cpu })
    })
}

fn measure(socket: &UdpSocket, end: Instant, length: usize) -> io::Result<Vec<Duration>> {
    let ping = vec![1_u8; length];
    let mut pong = vec![0_u8; length + 1];
    let mut round_trips = Vec::with_capacity(1 << 20);
    loop {
        let start = Instant::now();
        socket.send(&ping)?;
        receive(socket, &mut pong)?;
        let now = Instant::now();
        round_trips.push(now - start);
        if now >= end {
            return Ok(round_trips);
        }
    }
}

fn echo(socket: &UdpSocket) -> io::Result<()> {
    let mut bytes = vec![0_u8; MAX_MESSAGE_LENGTH];
    loop {
        let count = receive(socket, &mut bytes)?;
        if count == 0 {
            return Ok(());
        }
        socket.send(&bytes[..count])?;
    }
}

/// Waits as the socket is set to: asleep up to its timeout, or awake for as long.
fn receive(socket: &UdpSocket, bytes: &mut [u8]) -> io::Result<usize> {
    let mut since = None;
    loop {
        match socket.recv(bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if since.get_or_insert_with(Instant::now).elapsed() >= PATIENCE {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                std::hint::spin_loop();
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_are_measured_asleep_and_awake() {
        for busy_poll in [false, true] {
            let report = udp_ping_pong(Duration::from_millis(5), 4096, busy_poll).unwrap();
            assert!(report.quantile(0.0) > Duration::ZERO);
            assert!(report.quantile(0.5) <= report.quantile(0.99));
            assert_eq!(report.quantile(1.0), *report.round_trips.last().unwrap());
        }
    }

    #[test]
    fn lengths_that_no_datagram_has_are_refused() {
        for length in [0, MAX_MESSAGE_LENGTH + 1] {
            let error = udp_ping_pong(Duration::ZERO, length, false).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{length}");
        }
    }
}
