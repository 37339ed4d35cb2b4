//! A stream of datagrams with segmentation offload.

use std::hint::black_box;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
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

/// What [`udp_streams`] measured, of all streams together.
#[derive(Clone, Copy, Debug)]
pub struct StreamReport {
    /// Bytes that arrived and were copied to their place.
    pub bytes: u64,
    /// In this time, which ends with the last stream.
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

/// Streams datagrams of `segment` bytes over 127.0.0.1 for `duration`, with segmentation offload where
/// the kernel has it: so many streams at once, each between two threads with a socket each.
///
/// The bytes move as those of an RDMA WRITE do: out of a source of `working_set` bytes, of which each
/// sender walks through its part, into a destination of as many, to which the receiver copies every
/// payload. But there are no headers, no ICRC and no acknowledgements, only credits: at most 2 MiB are
/// under way in a stream (less where the receive buffer is small), so that nothing is lost.
pub fn udp_streams(
    count: usize,
    duration: Duration,
    segment: usize,
    working_set: usize,
) -> io::Result<StreamReport> {
    streams(count, duration, segment, working_set, true)
}

fn streams(
    count: usize,
    duration: Duration,
    segment: usize,
    working_set: usize,
    segmentation_offload: bool,
) -> io::Result<StreamReport> {
    let invalid = |message| Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    if segment == 0 || segment > MAX_MESSAGE_LENGTH {
        return invalid(format!("a datagram holds 1 to {MAX_MESSAGE_LENGTH} bytes, not {segment}"));
    }
    let part = working_set.checked_div(count).unwrap_or(0);
    if part < MAX_MESSAGE_LENGTH {
        return invalid(format!(
            "each of {count} streams has {part} bytes of the working set: {MAX_MESSAGE_LENGTH} at \
             least"
        ));
    }
    let mut all = Vec::with_capacity(count);
    for _ in 0..count {
        all.push(Stream::open(part, segmentation_offload)?);
    }
    let usage = Usage::start();
    let ends = thread::scope(|scope| {
        let mut threads = Vec::with_capacity(count);
        for stream in &mut all {
            // The name is what a profiler shows, also for the other end, whose thread inherits it.
            let thread = thread::Builder::new().name("plain-udp".to_owned());
            threads.push(thread.spawn_scoped(scope, || stream.run(duration, segment))?);
        }
        let ended = |thread: ScopedJoinHandle<'_, io::Result<Ended>>| {
            thread.join().map_err(|_panic| io::Error::other("a sender panicked"))?
        };
        threads.into_iter().map(ended).collect::<io::Result<Vec<_>>>()
    })?;
    let last = ends.iter().map(|ended| ended.last).max().unwrap_or(usage.started_at());
    let [bytes, sent] =
        [|it: &Ended| it.bytes, |it: &Ended| it.sent].map(|of| ends.iter().map(of).sum::<u64>());
    Ok(StreamReport {
        bytes,
        elapsed: last.saturating_duration_since(usage.started_at()),
        cpu: usage.cpu(),
        lost: sent.saturating_sub(bytes),
        segment,
        segmentation_offload: all.iter().all(Stream::is_offloaded),
    })
}

/// Two sockets and the memory of both sides.
struct Stream {
    sender: UdpSocket,
    receiver: UdpSocket,
    source: Vec<u8>,
    destination: Vec<u8>,
}

/// What became of a stream.
struct Ended {
    sent: u64,
    /// Of these, what arrived.
    bytes: u64,
    /// When the last came.
    last: Instant,
}

impl Stream {
    fn open(working_set: usize, segmentation_offload: bool) -> io::Result<Self> {
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
        // Filled with something, so that the pages are there before the clock starts.
        Ok(Self {
            sender,
            receiver,
            source: vec![1; working_set],
            destination: vec![2; working_set],
        })
    }

    fn is_offloaded(&self) -> bool {
        self.sender.info().segmentation && self.receiver.info().coalescing
    }

    fn run(&mut self, duration: Duration, segment: usize) -> io::Result<Ended> {
        let Self { sender, receiver, source, destination } = self;
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let receiving = scope.spawn(|| receive_all(receiver, destination, &stop));
            let sent = send_for(duration, sender, receiver, source, segment);
            stop.store(true, Ordering::Release);
            let received =
                receiving.join().map_err(|_panic| io::Error::other("a receiver panicked"))?;
            let (bytes, last) = received?;
            Ok(Ended { sent: sent?, bytes, last })
        })
    }
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
    fn streams_arrive_whole() {
        for (count, segmentation_offload) in [(1, true), (1, false), (3, true)] {
            let duration = Duration::from_millis(20);
            let report = streams(count, duration, 4096, 1 << 20, segmentation_offload).unwrap();
            assert!(report.bytes > 0);
            assert_eq!(report.bytes % 4096, 0);
            assert_eq!(report.lost, 0);
            assert!(report.elapsed > Duration::ZERO && report.gb_per_s() > 0.0);
            assert!(segmentation_offload || !report.segmentation_offload);
        }
    }

    #[test]
    fn what_no_datagram_holds_and_what_has_no_memory_is_refused() {
        for segment in [0, MAX_MESSAGE_LENGTH + 1] {
            let error = udp_streams(1, Duration::ZERO, segment, 1 << 20).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{segment}");
        }
        for count in [0, 17] {
            let error = udp_streams(count, Duration::ZERO, 4096, 1 << 20).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{count}");
        }
    }
}
