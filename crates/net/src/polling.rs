//! Threads that wait for streams and for other threads at the same time.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use crate::waiters::{Entry, Waiters, own_wake};
use crate::wake::Wake;

/// What a thread sleeps on: it is woken by others, or by streams.
#[derive(Clone, Debug)]
pub struct Sleeper(Arc<Wake>);

impl Sleeper {
    /// This thread's. `None` when the system has no more descriptors, and while the thread ends.
    pub fn own() -> Option<Self> {
        own_wake().map(Self)
    }

    /// Counts this thread among those that [`Waiters::wake`] wakes, until the result is dropped.
    pub fn enter<'a>(&'a self, waiters: &'a Waiters) -> Waiting<'a> {
        Waiting(waiters.enter(&self.0))
    }

    /// Whether somebody has asked this thread to look since the last call.
    pub fn take(&self) -> bool {
        self.0.take()
    }

    /// Asks the thread to look. What it is to find must have happened before.
    pub fn wake(&self) {
        self.0.request();
    }

    /// Sleeps until somebody asks, a stream is ready, or the time has passed; not at all when `stay` says
    /// so, which is asked once others know that this thread may sleep.
    pub fn sleep(
        &self,
        set: &mut PollSet,
        timeout: Duration,
        stay: impl FnOnce() -> bool,
    ) -> io::Result<()> {
        self.0.sleep_by(stay, |event| {
            let own =
                libc::pollfd { fd: event.watched().as_raw_fd(), events: libc::POLLIN, revents: 0 };
            set.streams[0] = own;
            set.poll(timeout)?;
            let woken = set.streams[0].revents != 0;
            if woken {
                event.drain();
            }
            Ok(woken)
        })?;
        Ok(())
    }
}

/// A thread that waits is entered as long as this lives.
pub struct Waiting<'a>(#[expect(dead_code, reason = "it leaves when it is dropped")] Entry<'a>);

impl fmt::Debug for Waiting<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiting").finish_non_exhaustive()
    }
}

/// Streams to be waited for. It keeps its memory.
pub struct PollSet {
    /// The first is for the thread's own event.
    streams: Vec<libc::pollfd>,
}

impl Default for PollSet {
    fn default() -> Self {
        Self { streams: vec![NOTHING] }
    }
}

impl fmt::Debug for PollSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PollSet").field("streams", &(self.streams.len() - 1)).finish()
    }
}

/// The kernel ignores it.
const NOTHING: libc::pollfd = libc::pollfd { fd: -1, events: 0, revents: 0 };

impl PollSet {
    /// Waits for none of them any more.
    pub fn clear(&mut self) {
        self.streams.clear();
        self.streams.push(NOTHING);
    }

    /// Waits for one more. If it is closed meanwhile, some other may be waited for in its place.
    pub fn add(&mut self, stream: BorrowedFd<'_>, readable: bool, writable: bool) {
        let mut events = 0;
        events |= if readable { libc::POLLIN } else { 0 };
        events |= if writable { libc::POLLOUT } else { 0 };
        self.streams.push(libc::pollfd { fd: stream.as_raw_fd(), events, revents: 0 });
    }

    /// Whether the stream that was added as this one, counted from 0, was ready when the last wait ended: to be
    /// read, and to be written. One that has failed is both.
    pub fn ready(&self, index: usize) -> (bool, bool) {
        let events = self.streams.get(index + 1).map_or(0, |stream| stream.revents);
        let failed = events & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0;
        (failed || events & libc::POLLIN != 0, failed || events & libc::POLLOUT != 0)
    }

    /// Looks which are ready, without a wait.
    pub fn look(&mut self) -> io::Result<()> {
        self.streams[0] = NOTHING;
        self.poll(Duration::ZERO)
    }

    fn poll(&mut self, timeout: Duration) -> io::Result<()> {
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let count = self.streams.len() as libc::nfds_t;
        // SAFETY: so many pollfds and a timespec, all alive during the call; no signal mask.
        let ready = unsafe {
            libc::ppoll(self.streams.as_mut_ptr(), count, &raw const timeout, ptr::null())
        };
        if ready >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // What it says of the streams is of before.
        self.streams.iter_mut().for_each(|stream| stream.revents = 0);
        if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::thread;
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn a_sleep_ends_by_a_stream_by_another_thread_and_by_its_time() {
        let (sleeper, start) = (Sleeper::own().unwrap(), Instant::now());
        let (near, mut far) = pair();
        let mut set = PollSet::default();
        set.add(near.as_fd(), true, false);
        sleeper.sleep(&mut set, Duration::from_millis(1), || false).unwrap();
        assert_eq!(set.ready(0), (false, false));
        far.write_all(b"x").unwrap();
        sleeper.sleep(&mut set, LONG, || false).unwrap();
        assert_eq!(set.ready(0), (true, false));
        set.clear();
        let waiters = Waiters::with_room(1);
        thread::scope(|scope| {
            let waiting = sleeper.enter(&waiters);
            scope.spawn(|| waiters.wake());
            sleeper.sleep(&mut set, LONG, || false).unwrap();
            assert!(sleeper.take());
            drop(waiting);
        });
        waiters.wake();
        assert!(!sleeper.take());
        sleeper.sleep(&mut set, LONG, || true).unwrap();
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn room_to_send_and_the_end_are_told() {
        let (near, far) = pair();
        let mut set = PollSet::default();
        set.add(near.as_fd(), true, true);
        set.look().unwrap();
        assert_eq!(set.ready(0), (false, true));
        drop(far);
        Sleeper::own().unwrap().sleep(&mut set, LONG, || false).unwrap();
        set.look().unwrap();
        assert!(set.ready(0).0);
        assert_eq!(set.ready(1), (false, false));
    }
}
