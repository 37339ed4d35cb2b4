//! Connections whose server says why it closes them.
//!
//! A server that refuses may close before it has read all that is sent to it: with TLS 1.3 one that asks for a certificate
//! does, since its client has sent a request before it can know of it (RFC 8446 4.4.2). Who sends on is told that nobody
//! reads (`EPIPE`, `ECONNRESET`), and not why. That is to be read: so sending on such a connection succeeds, and reading fails.

use std::io;

use ureq::Error;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, NextTimeout, TcpConnector, Transport,
};

use super::securing::Securing;
use super::tls::Sessions;

/// Whether the other end has closed a connection that was written to.
pub(super) fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

/// TCP, and TLS by these where the URI says so.
pub(super) fn connector(sessions: Option<Sessions>) -> impl Connector<()> {
    ().chain(TcpConnector::default()).chain(Listening).chain(Securing::by(sessions))
}

/// Makes connections below TLS that can be read when they are closed.
#[derive(Debug)]
struct Listening;

#[derive(Debug)]
struct Listener<T> {
    inner: T,
    is_closed: bool,
}

impl<In: Transport> Connector<In> for Listening {
    type Out = Listener<In>;

    fn connect(
        &self,
        _: &ConnectionDetails<'_>,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, Error> {
        Ok(chained.map(|inner| Listener { inner, is_closed: false }))
    }
}

impl<T: Transport> Transport for Listener<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.inner.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        match self.inner.transmit_output(amount, timeout) {
            Err(Error::Io(error)) if is_closed(&error) => {
                self.is_closed = true;
                Ok(())
            }
            result => result,
        }
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.inner.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        !self.is_closed && self.inner.is_open()
    }
}
