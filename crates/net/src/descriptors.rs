//! Descriptors that threads sleep on: events, timers, and the call that waits for them.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

/// A descriptor that a sleeping thread watches.
pub(crate) type Watched<'a> = BorrowedFd<'a>;

/// The most descriptors that [`poll`] watches beside its event.
pub(crate) const MAX_WATCHED: usize = 16;

/// Readable from a write until it is drained: an eventfd.
#[derive(Debug)]
pub(crate) struct EventDescriptor(OwnedFd);

impl EventDescriptor {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        opened(event).map(Self)
    }

    pub(crate) fn write(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: eight bytes, as an eventfd wants. It cannot fail: the count is far from its
        // maximum, since the sleeper resets it.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Readable when it was written.
    pub(crate) fn watched(&self) -> Watched<'_> {
        self.0.as_fd()
    }

    pub(crate) fn drain(&self) {
        let mut count = [0; 8];
        // SAFETY: eight bytes, as an eventfd gives.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

/// Readable once its time has come, until it is set anew: a timerfd.
#[derive(Debug)]
pub(crate) struct TimerDescriptor(OwnedFd);

impl TimerDescriptor {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
        // SAFETY: no pointers.
        opened(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) }).map(Self)
    }

    /// Readable in this time from now, and not before.
    pub(crate) fn set(&self, left: Duration) {
        // SAFETY: plain old data, of which zeros are a valid value: no interval.
        let mut time: libc::itimerspec = unsafe { mem::zeroed() };
        time.it_value.tv_sec = left.as_secs().try_into().unwrap_or(libc::time_t::MAX);
        // Zero would unset it.
        time.it_value.tv_nsec = libc::c_long::from(left.subsec_nanos()).max(1);
        // SAFETY: the time is alive during the call, and no old one is asked for. It fails only for
        // arguments that are not these.
        unsafe { libc::timerfd_settime(self.0.as_raw_fd(), 0, &raw const time, ptr::null_mut()) };
    }

    pub(crate) fn watched(&self) -> Watched<'_> {
        self.0.as_fd()
    }
}

/// Waits until `event`, which is drained then, or one of `watched` is readable, or `timeout` has
/// passed, or a signal came; whether it was `event`.
///
/// # Panics
/// When `watched` are more than [`MAX_WATCHED`].
pub(crate) fn poll<'a>(
    event: &EventDescriptor,
    watched: impl IntoIterator<Item = Watched<'a>>,
    timeout: Option<Duration>,
) -> io::Result<bool> {
    let poll = |fd: RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut polls = [poll(event.0.as_raw_fd()); 1 + MAX_WATCHED];
    let mut count = 1;
    for fd in watched {
        polls[count] = poll(fd.as_raw_fd());
        count += 1;
    }
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    // SAFETY: `count` pollfds and perhaps a timespec, all alive during the call; no signal mask.
    let ready = unsafe {
        libc::ppoll(
            polls.as_mut_ptr(),
            count as libc::nfds_t,
            timeout.as_ref().map_or(ptr::null(), ptr::from_ref),
            ptr::null(),
        )
    };
    if ready < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::Interrupted { Ok(false) } else { Err(error) };
    }
    let woken = polls[0].revents != 0;
    if woken {
        event.drain();
    }
    Ok(woken)
}

fn opened(descriptor: RawFd) -> io::Result<OwnedFd> {
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
