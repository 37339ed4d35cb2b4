//! A connection for files, of which one thread receives and another one sends.
//!
//! Without TLS the two do not meet. With it they take turns at its session, for calls that do not wait: who waits for
//! the socket leaves the session to the other. What is sent is copied first, since memory may change while it is
//! encrypted, and what has come is copied to where it belongs.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_metadata::TlsSession;
use millstream_net::stream::{Readiness, receive_slice, send_slice, wait_for_stream};

use super::protocol::EFAULT;
use crate::memory::Inside;
use crate::tcp::Line;

/// Bytes that are encrypted at a time.
const PORTION: usize = 64 << 10;

pub(super) struct Wire {
    stream: TcpStream,
    secured: Option<Mutex<Secured>>,
}

struct Secured {
    line: Line,
    portion: Vec<u8>,
}

impl Wire {
    pub(super) fn new(stream: TcpStream, session: Option<TlsSession>) -> Self {
        let secured =
            |session| Mutex::new(Secured { line: Line::over_tls(session), portion: Vec::new() });
        Self { stream, secured: session.map(secured) }
    }

    /// The socket, where bytes go over it as they are.
    pub(super) fn plain(&self) -> Option<BorrowedFd<'_>> {
        self.secured.is_none().then(|| self.stream.as_fd())
    }

    fn secured(&self) -> Option<MutexGuard<'_, Secured>> {
        let secured = self.secured.as_ref()?;
        Some(secured.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends it. Whoever waits for it is woken.
    pub(super) fn shut_down(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Waits until the socket is ready, or the time has passed; whether it is.
    pub(super) fn wait(&self, readiness: Readiness, time: Duration) -> io::Result<bool> {
        wait_for_stream(self.stream.as_fd(), readiness, time)
    }

    /// Takes as many of these bytes as there is room for, without a wait. With TLS they are perhaps not with the kernel
    /// yet: see [`flush`](Self::flush).
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        match self.secured() {
            None => send_slice(self.stream.as_fd(), bytes),
            Some(mut secured) => secured.line.send(&self.stream, bytes),
        }
    }

    /// The same, of `before`, bytes of memory at this address and of this length, and `after`. Memory that is not there is
    /// EFAULT.
    pub(super) fn send_memory(
        &self,
        inside: &Inside<'_>,
        before: &[u8],
        (address, length): (u64, u64),
        after: &[u8],
    ) -> io::Result<usize> {
        match self.secured() {
            None => inside.send(self.stream.as_fd(), before, (address, length), after),
            Some(mut secured) => {
                let copy = |to: &mut [u8]| inside.copy_out(address, to);
                secured.send(&self.stream, before, (length as usize, copy), after)
            }
        }
    }

    /// Has the kernel take all that was sent: an error if there is no room for it.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.secured().map_or(Ok(()), |mut secured| secured.line.flush(&self.stream))
    }

    /// Receives what has come, without a wait; 0 at the end of the stream.
    pub(super) fn receive(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let Some(mut secured) = self.secured() else {
            return receive_slice(self.stream.as_fd(), bytes);
        };
        let received = secured.line.receive(&self.stream, bytes);
        // What TLS says of its own: new keys, or what is wrong. A peer that does not take it any more may have sent its
        // last words before; that it is gone is heard behind those.
        let _ = secured.line.flush(&self.stream);
        received
    }

    /// The same, and waits for it: up to this time with TLS, and without for as long as the socket is set to. Then it is
    /// [`io::ErrorKind::WouldBlock`] or [`io::ErrorKind::TimedOut`].
    pub(super) fn read(&self, bytes: &mut [u8], time: Duration) -> io::Result<usize> {
        if self.secured.is_none() {
            return (&self.stream).read(bytes);
        }
        // Who sends a record byte by byte gets no more time by that.
        let start = Instant::now();
        loop {
            match self.receive(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => return received,
            }
            let left = time.saturating_sub(start.elapsed());
            if left.is_zero() || !self.wait(Readiness::Readable, left)? {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
    }

    /// Sends some of `before` and `data`, and waits for room as [`read`](Self::read) does for bytes.
    pub(super) fn write(&self, before: &[u8], data: &[u8], time: Duration) -> io::Result<usize> {
        if self.secured.is_none() {
            return match before.is_empty() {
                false => (&self.stream).write_vectored(&[IoSlice::new(before), IoSlice::new(data)]),
                true => (&self.stream).write(data),
            };
        }
        let copy = |to: &mut [u8]| {
            to.copy_from_slice(&data[..to.len()]);
            true
        };
        loop {
            let Some(mut secured) = self.secured() else { return Ok(0) };
            let sent = secured.send(&self.stream, before, (data.len(), copy), &[]);
            drop(secured);
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_room(time)?;
                }
                sent => return sent,
            }
        }
    }

    /// Waits until the kernel has all that was sent.
    pub(super) fn finish(&self, time: Duration) -> io::Result<()> {
        loop {
            match self.flush() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_room(time)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                flushed => return flushed,
            }
        }
    }

    fn wait_for_room(&self, time: Duration) -> io::Result<()> {
        match self.wait(Readiness::Writable, time)? {
            true => Ok(()),
            false => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl Secured {
    /// Takes some of `before`, so many bytes that `copy` copies, and `after`; none before all that was taken is with the
    /// kernel.
    fn send(
        &mut self,
        stream: &TcpStream,
        before: &[u8],
        (length, copy): (usize, impl FnOnce(&mut [u8]) -> bool),
        after: &[u8],
    ) -> io::Result<usize> {
        let Self { line, portion } = self;
        line.flush(stream)?;
        portion.resize(PORTION, 0);
        let head = before.len().min(PORTION);
        portion[..head].copy_from_slice(&before[..head]);
        let mut end = head + length.min(PORTION - head);
        if !copy(&mut portion[head..end]) {
            return Err(io::Error::from_raw_os_error(EFAULT));
        }
        if end == before.len() + length {
            let tail = after.len().min(PORTION - end);
            portion[end..end + tail].copy_from_slice(&after[..tail]);
            end += tail;
        }
        line.send(stream, &portion[..end])
    }
}
