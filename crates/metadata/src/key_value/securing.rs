//! TLS below HTTP, by sessions that are made once: the HTTP client's own connector reads all authorities anew for each
//! connection of a request with times of its own, and does not tell a handshake that stalls from a connection that does.

use std::io::{Read, Write};
use std::sync::Arc;
use std::{error, fmt};

use ureq::Error;
use ureq::unversioned::transport::time::Duration;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, Transport,
    TransportAdapter,
};

use super::tls::{Session, Sessions};

/// The connection was accepted, and nothing of TLS came in time.
#[derive(Debug)]
pub(super) struct Stalled;

impl fmt::Display for Stalled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it accepted the connection and said nothing of TLS in time")
    }
}

impl error::Error for Stalled {}

impl Stalled {
    /// Whether that is why a call failed.
    pub(super) fn is(error: &Error) -> bool {
        matches!(error, Error::Other(inner) if inner.is::<Self>())
    }
}

/// Makes TLS of connections to `https://`.
#[derive(Debug)]
pub(super) struct Securing(Option<Sessions>);

impl Securing {
    /// Without sessions, all connections stay as they are.
    pub(super) const fn by(sessions: Option<Sessions>) -> Self {
        Self(sessions)
    }
}

impl<In: Transport> Connector<In> for Securing {
    type Out = Either<In, Secured<In>>;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, Error> {
        let Some(transport) = chained else { return Ok(None) };
        let Some(sessions) = self.0.as_ref().filter(|_| details.needs_tls()) else {
            return Ok(Some(Either::A(transport)));
        };
        let host = details.uri.host().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let mut session = sessions.with(host).map_err(|text| Error::Other(text.into()))?;
        let mut stream = TransportAdapter::new(transport, Arc::clone(&details.current_time));
        stream.set_timeout(left(details));
        session.handshake(&mut stream).map_err(|error| match Error::from(error) {
            Error::Timeout(_) => Error::Other(Stalled.into()),
            error => error,
        })?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(Either::B(Secured { session, stream, buffers })))
    }
}

/// What is left of the time to connect: the connection below has taken some of it.
fn left(details: &ConnectionDetails<'_>) -> NextTimeout {
    use ureq::unversioned::transport::time::Instant;
    let spent = match (details.now, (details.current_time)()) {
        (Instant::Exact(begun), Instant::Exact(now)) => now.saturating_duration_since(begun),
        _ => std::time::Duration::ZERO,
    };
    let after = match details.timeout.after {
        Duration::Exact(after) => Duration::Exact(after.saturating_sub(spent)),
        Duration::NotHappening => Duration::NotHappening,
    };
    NextTimeout { after, ..details.timeout }
}

/// A connection within TLS.
pub(super) struct Secured<T: Transport> {
    session: Session,
    stream: TransportAdapter<T>,
    buffers: LazyBuffers,
}

impl<T: Transport> fmt::Debug for Secured<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secured").field("inner", self.stream.inner()).finish_non_exhaustive()
    }
}

impl<T: Transport> Transport for Secured<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        self.stream.set_timeout(timeout);
        let mut over = self.session.over(&mut self.stream);
        let sent = over.write_all(&self.buffers.output()[..amount]).and_then(|()| over.flush());
        Ok(sent?)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.stream.set_timeout(timeout);
        let count = self.session.over(&mut self.stream).read(self.buffers.input_append_buf())?;
        self.buffers.input_appended(count);
        Ok(count > 0)
    }

    fn is_open(&mut self) -> bool {
        self.stream.get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}
