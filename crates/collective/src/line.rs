//! A connection to the controller, in the clear or over TLS: one thread may read while others write.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_net::tls::{CallerSession, CallerTls};

/// Bytes read at a time. Messages to a host are short.
const READ_BYTES: usize = 4096;

/// The shortest wait that the socket can be told.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// The connection. A clone is the same one.
#[derive(Clone)]
pub(crate) struct Line {
    stream: Arc<TcpStream>,
    session: Option<Arc<Mutex<CallerSession>>>,
}

impl Line {
    /// Over TLS, if that is set: then both sides say who they are first, before `deadline`.
    pub(crate) fn new(
        stream: TcpStream,
        tls: Option<&CallerTls>,
        deadline: Instant,
    ) -> io::Result<Self> {
        let session = match tls {
            None => None,
            Some(tls) => {
                let mut session = tls.session(stream.peer_addr()?.ip())?;
                session.handshake(&mut Until { stream: &stream, deadline })?;
                Some(Arc::new(Mutex::new(session)))
            }
        };
        Ok(Self { stream: Arc::new(stream), session })
    }

    pub(crate) fn peer_address(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    pub(crate) fn shutdown(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Both)
    }

    pub(crate) fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stream = &*self.stream;
        match &self.session {
            None => stream.write_all(bytes),
            Some(session) => lock(session).write(bytes, &mut stream),
        }
    }

    /// Bytes of messages, of which some come before `deadline`; 0 at the end. May return early with an error that
    /// says that nothing came.
    pub(crate) fn read(&self, bytes: &mut [u8], deadline: Instant) -> io::Result<usize> {
        let mut stream = Until { stream: &self.stream, deadline };
        let Some(session) = &self.session else { return stream.read(bytes) };
        loop {
            match lock(session).read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            // Without the lock: others write meanwhile.
            let mut records = [0; READ_BYTES];
            let count = stream.read(&mut records)?;
            if count == 0 {
                return Ok(0);
            }
            let mut session = lock(session);
            let fed = session.feed(&records[..count]);
            // Where it has failed, the controller should know why.
            let flushed = session.flush(&mut &*self.stream);
            fed.and(flushed)?;
        }
    }
}

fn lock(session: &Mutex<CallerSession>) -> MutexGuard<'_, CallerSession> {
    // A panic elsewhere leaves nothing half done that matters more than going on.
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A socket whose reads have one deadline. What a write may take the socket was told.
struct Until<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        self.stream.set_read_timeout(Some(left.max(SHORTEST_WAIT)))?;
        self.stream.read(bytes)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
