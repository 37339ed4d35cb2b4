//! What is to be done for others: admitting them, and clearing up behind those that were killed.

use std::io::{self, PipeWriter};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{Group, admission};
use crate::ends_between_forks;

/// How long a killed owner's slot may keep taking datagrams for nobody, up to its receive buffer. While
/// no other process is there, nothing has to be looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// So often it looks, without seeing another process, before it sleeps until somebody comes.
const LOOKS: u32 = 5;

/// After a failure, as for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// A thread that mostly sleeps. It ends when this is dropped.
pub(super) struct Steward {
    /// Closed to stop it.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Steward {
    pub(super) fn start(group: &Arc<Group>, own: usize) -> io::Result<Self> {
        let (stopped, stop) = io::pipe()?;
        let group = Arc::clone(group);
        let work = move || {
            // One that was just admitted claims its slot in a moment.
            let mut looks = LOOKS;
            loop {
                let timeout = (looks > 0).then_some(INTERVAL);
                match wait(&stopped, Some(&group.listener), timeout) {
                    Ok(Event::Stopped) => return,
                    Ok(Event::Caller) => looks = LOOKS,
                    Ok(Event::Timeout) => looks -= 1,
                    Err(error) => {
                        tracing::warn!(%error, "this process admits nobody more to its address");
                        return;
                    }
                }
                let done = admit_all(&group).and_then(|()| group.clear(Some(own)));
                match done {
                    Ok(true) => looks = LOOKS,
                    Ok(false) => {}
                    Err(error) => {
                        tracing::debug!(%error, "cannot serve others of the address now");
                        let stopped = wait::<io::PipeReader>(&stopped, None, Some(PAUSE));
                        if !matches!(stopped, Ok(Event::Timeout)) {
                            return;
                        }
                    }
                }
            }
        };
        let thread =
            thread::Builder::new().name("steward".to_owned()).spawn(ends_between_forks(work))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Steward {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it does, there is nothing to add.
            let _ = thread.join();
        }
    }
}

fn admit_all(group: &Group) -> io::Result<()> {
    while admission::admit(&group.listener, &group.sockets, &group.file)?.is_some() {}
    Ok(())
}

enum Event {
    Stopped,
    Caller,
    Timeout,
}

/// Waits until it shall stop, `listener` has somebody, or the timeout is over or a signal came.
fn wait<L: AsFd>(
    stopped: &impl AsFd,
    listener: Option<&L>,
    timeout: Option<Duration>,
) -> io::Result<Event> {
    // A negative one is not looked at.
    let listener = listener.map_or(-1, |listener| listener.as_fd().as_raw_fd());
    let poll = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut polls = [poll(stopped.as_fd().as_raw_fd()), poll(listener)];
    let timeout = timeout.map_or(-1, |timeout| timeout.as_millis() as libc::c_int);
    // SAFETY: two pollfds, alive during the call.
    let ready = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout) };
    if ready < 0 {
        let error = io::Error::last_os_error();
        let interrupted = error.kind() == io::ErrorKind::Interrupted;
        return if interrupted { Ok(Event::Caller) } else { Err(error) };
    }
    Ok(match (polls[0].revents, polls[1].revents) {
        (0, 0) => Event::Timeout,
        (0, _) => Event::Caller,
        _ => Event::Stopped,
    })
}
