//! Waking a thread that may be asleep, without a system call when it is not.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

/// Something was asked of the node by another thread.
pub(crate) const OTHER_THREAD: u8 = 1;
/// Something was asked of the node by the progress thread itself, in the caller's hook.
pub(crate) const OWN_THREAD: u8 = 2;

/// One sleeper, any number of wakers.
///
/// A waker sets `pending`, then looks at `asleep`; the sleeper sets `asleep`, then looks at
/// `pending`. Both orders are sequentially consistent, so at least one of them sees the other: a
/// waker either finds the sleeper asleep and writes the event, or the sleeper finds the request and
/// stays awake.
pub(crate) struct Wake {
    pending: AtomicU8,
    asleep: AtomicBool,
    event: OwnedFd,
}

impl Wake {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, and nobody else has it.
        let event = unsafe { OwnedFd::from_raw_fd(event) };
        Ok(Self { pending: AtomicU8::new(0), asleep: AtomicBool::new(false), event })
    }

    /// Asks for a round. What it is about must have happened before, in a critical section of the
    /// node's lock.
    pub(crate) fn request(&self, who: u8) {
        self.pending.fetch_or(who, Ordering::SeqCst);
        // The load keeps the line shared while the sleeper is awake; the swap lets one waker write.
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            let one = 1_u64.to_ne_bytes();
            // SAFETY: eight bytes, as an eventfd wants. It cannot fail: the count is far from its
            // maximum, since the sleeper resets it.
            unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// What was asked for since the last call. To be called with the node's lock held: then all
    /// that was asked for is visible in the node.
    pub(crate) fn take(&self) -> u8 {
        self.pending.swap(0, Ordering::SeqCst)
    }

    /// Whether something was asked for.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst) != 0
    }

    /// Sleeps until something is asked for, `socket` is readable, or `timeout` has passed. The
    /// result says whether another thread had to wake us.
    pub(crate) fn sleep(
        &self,
        socket: BorrowedFd<'_>,
        timeout: Option<Duration>,
    ) -> io::Result<bool> {
        self.asleep.store(true, Ordering::SeqCst);
        if self.is_pending() {
            self.asleep.store(false, Ordering::SeqCst);
            return Ok(false);
        }
        let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut polls = [poll(socket.as_raw_fd()), poll(self.event.as_raw_fd())];
        let timeout = timeout.map(|timeout| libc::timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        // SAFETY: two pollfds and perhaps a timespec, all alive during the call; no signal mask.
        let ready = unsafe {
            libc::ppoll(
                polls.as_mut_ptr(),
                polls.len() as libc::nfds_t,
                timeout.as_ref().map_or(ptr::null(), ptr::from_ref),
                ptr::null(),
            )
        };
        self.asleep.store(false, Ordering::SeqCst);
        if ready < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(false) } else { Err(error) };
        }
        let woken = polls[1].revents != 0;
        if woken {
            let mut count = [0; 8];
            // SAFETY: eight bytes, as an eventfd gives.
            unsafe { libc::read(self.event.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        }
        Ok(woken)
    }
}

#[cfg(test)]
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
        wake.request(OTHER_THREAD);
        wake.request(OWN_THREAD);
        assert!(!wake.sleep(socket.as_fd(), Some(FOR_EVER)).unwrap());
        assert!(start.elapsed() < FOR_EVER);
        assert_eq!(wake.take(), OTHER_THREAD | OWN_THREAD);
        assert!(!wake.is_pending());
        assert_eq!(wake.take(), 0);
    }

    #[test]
    fn sleep_ends_at_its_time() {
        let (wake, socket) = (Wake::new().unwrap(), silent());
        let (start, timeout) = (Instant::now(), Duration::from_micros(1500));
        assert!(!wake.sleep(socket.as_fd(), Some(timeout)).unwrap());
        assert!(start.elapsed() >= timeout);
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
                    wake.request(OTHER_THREAD);
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
                wake.sleep(socket.as_fd(), Some(FOR_EVER)).unwrap();
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
