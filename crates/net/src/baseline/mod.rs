//! What this machine can do without us, as a measure of what we do: a plain UDP stream, a TCP
//! stream and a UDP ping-pong over loopback, and a copy of memory.

mod ping_pong;
mod tcp_stream;
mod udp_stream;

use std::hint::black_box;
use std::mem;
use std::time::{Duration, Instant};

pub use ping_pong::{PingPongReport, udp_ping_pong};
pub use tcp_stream::{TcpReport, tcp_stream};
pub use udp_stream::{StreamReport, udp_stream};

/// Where received bytes go, and what is copied: much larger than the caches.
const MEMORY_LENGTH: usize = 64 << 20;

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

/// Copies 64 MiB from one place to another, again and again for `duration`, on this thread.
pub fn memory_copy(duration: Duration) -> CopyReport {
    let source = vec![1_u8; MEMORY_LENGTH];
    let mut destination = vec![2_u8; MEMORY_LENGTH];
    let usage = Usage::start();
    let mut bytes = 0;
    loop {
        destination.copy_from_slice(black_box(&source));
        black_box(&mut destination);
        bytes += MEMORY_LENGTH as u64;
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
        let report = memory_copy(Duration::ZERO);
        assert_eq!(report.bytes, MEMORY_LENGTH as u64);
        assert!(report.gb_per_s() > 0.0);
    }
}
