//! What this machine can do without us, as a measure of what we do: a plain UDP stream, a TCP
//! stream and a TCP ping-pong over loopback, and copies of memory.

mod ping_pong;
mod process_copy;
mod tcp_stream;
mod udp_stream;

use std::hint::black_box;
use std::mem;
use std::time::{Duration, Instant};

pub use ping_pong::{PingPongReport, tcp_echo, tcp_ping_pong};
pub use process_copy::{BlockCopies, CopyDirection, ProcessCopies, block_copy, process_copy};
pub use tcp_stream::{TcpReport, tcp_stream};
pub use udp_stream::{StreamReport, udp_streams};

/// What [`memory_copy`] measured.
#[derive(Clone, Copy, Debug)]
pub struct CopyReport {
    /// Bytes copied.
    pub bytes: u64,
    /// In this time.
    pub elapsed: Duration,
    /// Processor time of this process for it.
    pub cpu: Duration,
}

impl CopyReport {
    /// Gigabytes (10^9) per second.
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64() / 1e9
    }
}

/// Copies so many bytes from one place to another, again and again for `duration`, on this thread.
/// Choose far more than the caches hold.
pub fn memory_copy(duration: Duration, working_set: usize) -> CopyReport {
    let source = vec![1_u8; working_set];
    let mut destination = vec![2_u8; working_set];
    let usage = Usage::start();
    let mut bytes = 0;
    loop {
        destination.copy_from_slice(black_box(&source));
        black_box(&mut destination);
        bytes += working_set as u64;
        let elapsed = usage.started_at().elapsed();
        if elapsed >= duration {
            return CopyReport { bytes, elapsed, cpu: usage.cpu() };
        }
    }
}

/// What this process uses from a moment on.
struct Usage {
    start: Instant,
    cpu: Duration,
}

impl Usage {
    fn start() -> Self {
        Self { start: Instant::now(), cpu: processor_time() }
    }

    const fn started_at(&self) -> Instant {
        self.start
    }

    fn cpu(&self) -> Duration {
        processor_time().saturating_sub(self.cpu)
    }
}

/// The time since this machine started, by a clock that all its processes share.
pub fn machine_time() -> Duration {
    // SAFETY: a zeroed `timespec` is a valid one, the pointer is to it, and the clock exists.
    let time = unsafe {
        let mut time = mem::zeroed::<libc::timespec>();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time);
        time
    };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Processor time of this process so far, in the kernel and outside it.
pub fn processor_time() -> Duration {
    // SAFETY: a zeroed `rusage` is a valid one, and the pointer is to it.
    let usage = unsafe {
        let mut usage = mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let duration = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec.unsigned_abs())
            + Duration::from_micros(time.tv_usec.unsigned_abs())
    };
    duration(usage.ru_utime) + duration(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_copied_at_least_once() {
        let report = memory_copy(Duration::ZERO, 1 << 20);
        assert_eq!(report.bytes, 1 << 20);
        assert!(report.gb_per_s() > 0.0);
    }
}
