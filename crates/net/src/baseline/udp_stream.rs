//! A stream of datagrams with segmentation offload.

use std::hint::black_box;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use socket2::SockAddr;

use super::Usage;
use crate::udp::{MAX_MESSAGE_LENGTH, MAX_SEGMENTS, ReceiveBatch, SocketConfig, UdpSocket};
use crate::{DriverCounters, OpenError};

/// How many bytes may be under way.
const WINDOW: u64 = 2 << 20;

/// How many bytes the receiver takes in before it says so.
const CREDIT: u64 = 128 << 10;

/// When the window stays closed for this long, its bytes are lost.
const PATIENCE: Duration = Duration::from_millis(50);

/// What [`udp_stream`] measured.
#[derive(Clone, Copy, Debug)]
pub struct StreamReport {
    /// Bytes that arrived and were copied to their place.
    pub bytes: u64,
    /// In this time.
    pub elapsed: Duration,
    /// Processor time of this process for it.
    pub cpu: Duration,
    /// Bytes that were sent and did not arrive.
    pub lost: u64,
    /// Bytes of each datagram.
    pub segment: usize,
    /// The kernel segmented and coalesced.
    pub segmentation_offload: bool,
}

impl StreamReport {
    /// Gigabytes (10^9) per second.
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64() / 1e9
    }
}

/// Streams datagrams of `segment` bytes from one thread to another over 127.0.0.1 for `duration`,
/// with segmentation offload where the kernel has it.
///
/// The bytes move as those of an RDMA WRITE do: out of a source of `working_set` bytes, which the
/// sender walks through, into a destination of as many, to which the receiver copies every payload.
/// But there are no headers, no ICRC and no acknowledgements, only credits: at most 2 MiB are under
/// way (less where the receive buffer is small), so that nothing is lost.
pub fn udp_stream(
    duration: Duration,
    segment: usize,
    working_set: usize,
) -> io::Result<StreamReport> {
    stream(duration, segment, working_set, true)
}

fn stream(
    duration: Duration,
    segment: usize,
    working_set: usize,
    segmentation_offload: bool,
) -> io::Result<StreamReport> {
    if segment == 0 || segment > MAX_MESSAGE_LENGTH {
        let message = format!("a datagram holds 1 to {MAX_MESSAGE_LENGTH} bytes, not {segment}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    if working_set < MAX_MESSAGE_LENGTH {
        let message = format!("a working set has {MAX_MESSAGE_LENGTH} bytes at least");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let open = || {
        UdpSocket::open(&SocketConfig {
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 0,
            segmentation_offload,
            buffer_length: SocketConfig::DEFAULT_BUFFER_LENGTH,
        })
        .map_err(|error| match error {
            OpenError::System { source, .. } => source,
            error => io::Error::other(error),
        })
    };
    let (sender, receiver) = (open()?, open()?);
    let stop = AtomicBool::new(false);
    // Filled with something, so that the pages are there before the clock starts.
    let (source, mut destination) = (vec![1; working_set], vec![2; working_set]);
    thread::scope(|scope| {
        let receiving = scope.spawn(|| receive_all(&receiver, &mut destination, &stop));
        let usage = Usage::start();
        let sent = send_for(duration, &sender, &receiver, &source, segment);
        stop.store(true, Ordering::Release);
        let received = receiving.join().map_err(|_panic| io::Error::other("receiver panicked"))?;
        let (bytes, end) = received?;
        Ok(StreamReport {
            bytes,
            elapsed: end.saturating_duration_since(usage.started_at()),
            cpu: usage.cpu(),
            lost: sent?.saturating_sub(bytes),
            segment,
            segmentation_offload: sender.info().segmentation && receiver.info().coalescing,
        })
    })
}

/// Sends for a while; returns how many bytes.
fn send_for(
    duration: Duration,
    socket: &UdpSocket,
    receiver: &UdpSocket,
    source: &[u8],
    segment: usize,
) -> io::Result<u64> {
    let to = address_of(receiver);
    let segments = if socket.info().segmentation {
        (MAX_MESSAGE_LENGTH / segment).clamp(1, MAX_SEGMENTS)
    } else {
        1
    };
    let length = segment * segments;
    // Half of the buffer is overhead, by the kernel's account.
    let window = WINDOW.min(receiver.info().receive_buffer as u64 / 2).max(length as u64);
    let mut messages = source.chunks_exact(length).cycle();
    let mut credits = ReceiveBatch::new(1);
    let mut counters = DriverCounters::default();
    let (mut sent, mut arrived) = (0, 0);
    let end = Instant::now() + duration;
    while Instant::now() < end {
        while sent + length as u64 - arrived > window {
            if socket.receive(&mut credits, &mut counters)? == 0
                && !socket.wait_readable(PATIENCE)?
            {
                arrived = sent;
            }
            for (_, datagram) in credits.datagrams() {
                if let Ok(total) = datagram.try_into().map(u64::from_ne_bytes) {
                    arrived = arrived.max(total);
                }
            }
        }
        let Some(message) = messages.next() else { break };
        socket.send_segments(&to, message, segment)?;
        sent += length as u64;
    }
    Ok(sent)
}

/// Copies all that arrives to its place; returns how many bytes, and when the last came.
fn receive_all(
    socket: &UdpSocket,
    memory: &mut [u8],
    stop: &AtomicBool,
) -> io::Result<(u64, Instant)> {
    let mut at = 0;
    let mut batch = ReceiveBatch::new(4);
    let mut counters = DriverCounters::default();
    let (mut bytes, mut credited) = (0, 0);
    let mut last = Instant::now();
    loop {
        // Whatever was sent before the sender stopped is there by now.
        let stopped = stop.load(Ordering::Acquire);
        if socket.receive(&mut batch, &mut counters)? == 0 {
            if stopped {
                return Ok((bytes, last));
            }
            socket.wait_readable(Duration::from_millis(5))?;
            continue;
        }
        for (meta, datagram) in batch.datagrams() {
            if at + datagram.len() > memory.len() {
                at = 0;
            }
            memory[at..at + datagram.len()].copy_from_slice(datagram);
            at += datagram.len();
            bytes += datagram.len() as u64;
            if bytes - credited >= CREDIT {
                credited = bytes;
                let to = SocketAddr::new(meta.source, meta.source_port).into();
                socket.send_segments(&to, &bytes.to_ne_bytes(), 8)?;
            }
        }
        last = Instant::now();
        black_box(&mut *memory);
    }
}

fn address_of(socket: &UdpSocket) -> SockAddr {
    let info = socket.info();
    SocketAddr::new(info.address, info.port).into()
}

impl UdpSocket {
    /// Sends bytes that lie together as datagrams of `segment` bytes.
    fn send_segments(&self, to: &SockAddr, bytes: &[u8], segment: usize) -> io::Result<()> {
        loop {
            match self.send_message(to, &[IoSlice::new(bytes)], bytes.len().min(segment)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_writable(PATIENCE)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_arrives_whole() {
        for segmentation_offload in [true, false] {
            let duration = Duration::from_millis(20);
            let report = stream(duration, 4096, 1 << 20, segmentation_offload).unwrap();
            assert!(report.bytes > 0);
            assert_eq!(report.bytes % 4096, 0);
            assert_eq!(report.lost, 0);
            assert!(report.elapsed > Duration::ZERO && report.gb_per_s() > 0.0);
            assert!(segmentation_offload || !report.segmentation_offload);
        }
    }

    #[test]
    fn segments_that_no_datagram_holds_are_refused() {
        for segment in [0, MAX_MESSAGE_LENGTH + 1] {
            let error = udp_stream(Duration::ZERO, segment, 1 << 20).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{segment}");
        }
    }
}
