//! Waking a thread that may be asleep, without a system call when it is not.

use std::io;
use std::time::Duration;

use crate::descriptors::{EventDescriptor, Watched, poll};
use crate::sync::atomic::{AtomicBool, Ordering};

/// One sleeper, any number of wakers.
///
/// A waker sets `pending`, then looks at `asleep`; the sleeper sets `asleep`, then looks at
/// `pending`. Both orders are sequentially consistent, so at least one of them sees the other: a
/// waker either finds the sleeper asleep and writes the event, or the sleeper finds the request and
/// stays awake.
#[derive(Debug)]
pub(crate) struct Wake {
    pending: AtomicBool,
    asleep: AtomicBool,
    event: EventDescriptor,
}

impl Wake {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            pending: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            event: EventDescriptor::new()?,
        })
    }

    /// Asks the sleeper to look. What it is to find must have happened before.
    pub(crate) fn request(&self) {
        self.pending.store(true, Ordering::SeqCst);
        // The load keeps the line shared while the sleeper is awake; the swap lets one waker write.
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            self.event.write();
        }
    }

    /// Whether somebody has asked since the last call.
    pub(crate) fn take(&self) -> bool {
        // Mostly nobody has, and a load costs less.
        self.pending.load(Ordering::SeqCst) && self.pending.swap(false, Ordering::SeqCst)
    }

    /// Sleeps until somebody asks, one of `watched` is readable, or `timeout` has passed;
    /// not at all when `stay` says so, which is asked once wakers know that this thread may sleep.
    /// The result says whether a waker had to wake us.
    ///
    /// # Panics
    /// When `watched` are more than [`crate::descriptors::MAX_WATCHED`].
    pub(crate) fn sleep<'a>(
        &self,
        watched: impl IntoIterator<Item = Watched<'a>>,
        timeout: Option<Duration>,
        stay: impl FnOnce() -> bool,
    ) -> io::Result<bool> {
        self.sleep_by(stay, |event| poll(event, watched, timeout))
    }

    /// The same, where `wait` does the waiting: until the event, which it drains then, or something else; and
    /// says whether it was the event.
    pub(crate) fn sleep_by(
        &self,
        stay: impl FnOnce() -> bool,
        wait: impl FnOnce(&EventDescriptor) -> io::Result<bool>,
    ) -> io::Result<bool> {
        self.asleep.store(true, Ordering::SeqCst);
        if self.pending.load(Ordering::SeqCst) || stay() {
            self.asleep.store(false, Ordering::SeqCst);
            return Ok(false);
        }
        let woken = wait(&self.event);
        self.asleep.store(false, Ordering::SeqCst);
        woken
    }
}

#[cfg(all(test, not(millstream_loom)))]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicU64;
    use std::thread;
    use std::time::Instant;

    use super::*;

    /// So long sleeps only who was not woken.
    const FOR_EVER: Duration = Duration::from_secs(20);

    fn silent() -> UdpSocket {
        UdpSocket::bind("127.0.0.1:0").unwrap()
    }

    #[test]
    fn what_was_asked_before_is_not_slept_through() {
        let (wake, socket) = (Wake::new().unwrap(), silent());
        let start = Instant::now();
        wake.request();
        wake.request();
        assert!(!wake.sleep([socket.as_fd()], Some(FOR_EVER), || false).unwrap());
        assert!(start.elapsed() < FOR_EVER);
        assert!(wake.take());
        assert!(!wake.take());
    }

    #[test]
    fn sleep_ends_at_its_time_or_does_not_begin() {
        let (wake, socket) = (Wake::new().unwrap(), silent());
        let (start, timeout) = (Instant::now(), Duration::from_micros(1500));
        assert!(!wake.sleep([socket.as_fd()], Some(timeout), || false).unwrap());
        assert!(start.elapsed() >= timeout);
        assert!(!wake.sleep([], Some(FOR_EVER), || true).unwrap());
        assert!(start.elapsed() < FOR_EVER);
    }

    #[test]
    fn what_can_be_received_ends_the_sleep() {
        let (wake, sockets) = (Wake::new().unwrap(), [silent(), silent()]);
        silent().send_to(b"x", sockets[1].local_addr().unwrap()).unwrap();
        let start = Instant::now();
        let watched = sockets.iter().map(AsFd::as_fd);
        assert!(!wake.sleep(watched, Some(FOR_EVER), || false).unwrap());
        assert!(start.elapsed() < FOR_EVER);
    }

    #[test]
    fn no_request_is_slept_through() {
        const REQUESTS: u64 = 50_000;
        let (wake, socket) = (Wake::new().unwrap(), silent());
        let (asked, seen) = (AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                for request in 1..=REQUESTS {
                    asked.store(request, Ordering::Relaxed);
                    wake.request();
                    // The next one comes at any moment of the sleeper's going to sleep.
                    let mut spins = 0;
                    while seen.load(Ordering::Acquire) < request {
                        spins += 1;
                        if spins % 1000 == 0 { thread::yield_now() } else { std::hint::spin_loop() }
                    }
                }
            });
            loop {
                wake.take();
                let request = asked.load(Ordering::Relaxed);
                seen.store(request, Ordering::Release);
                if request == REQUESTS {
                    break;
                }
                let start = Instant::now();
                wake.sleep([socket.as_fd()], Some(FOR_EVER), || false).unwrap();
                let slept = start.elapsed();
                if slept >= FOR_EVER {
                    // Let the other thread end.
                    seen.store(u64::MAX, Ordering::Release);
                    panic!("slept through request {}", request + 1);
                }
            }
        });
    }
}
