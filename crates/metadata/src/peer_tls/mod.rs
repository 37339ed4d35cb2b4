//! TLS between engines: each proves by a certificate who it is, and nobody between reads or changes what is said.
//!
//! It has version 1.3 (RFC 8446) and no resumption: each connection is looked at anew. Who calls knows by which host he
//! called, and the certificate is to be for that; who is called looks whether an authority vouches for the caller.

use std::io::{self, Read, Write};

use thiserror::Error;

#[cfg(feature = "tls")]
mod on;
#[cfg(feature = "tls")]
pub use on::{PeerTls, TlsSession};

#[cfg(not(feature = "tls"))]
mod off;
#[cfg(not(feature = "tls"))]
pub use off::{PeerTls, TlsSession};

/// Why two ends have no TLS with each other.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum TlsError {
    /// Somebody else answers, or it is called by a name that it does not have.
    #[error("it was called {called}, and its certificate is for {certificate}")]
    OtherName {
        /// By which host it was called.
        called: String,
        /// The names in its certificate.
        certificate: String,
    },
    /// The time of its certificate is over.
    #[error("its certificate has expired")]
    Expired,
    /// Its time has not begun.
    #[error("its certificate is not valid yet: is the clock right?")]
    NotYet,
    /// An authority of somebody else vouches for it.
    #[error("no authority in security.ca_file vouches for its certificate")]
    UnknownAuthority,
    /// It has shown none.
    #[error("it has shown no certificate: see security.certificate_file there")]
    NoCertificate,
    /// It does not like ours.
    #[error("it says that {0}")]
    Refused(&'static str),
    /// It speaks something else, or closes the connection before it has said anything.
    #[error(
        "it does not speak TLS, and certificates are set here: set some there (security.certificate_file), or \
         none here"
    )]
    NoTls,
    /// Something else is wrong.
    #[error("TLS with it failed: {0}")]
    Other(String),
}

impl From<TlsError> for io::Error {
    fn from(error: TlsError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

impl TlsError {
    /// What a stream has failed for, if it is this.
    pub fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

/// Whether a connection that begins with these bytes speaks TLS: a record of a handshake (RFC 8446 5.1).
pub fn begins_tls(bytes: &[u8]) -> bool {
    matches!(bytes, [0x16] | [0x16, 3, ..])
}

/// A stream below TLS, as a stream.
pub(crate) struct Over<'a, S> {
    pub(crate) session: Option<&'a mut TlsSession>,
    pub(crate) stream: S,
}

impl<S: Read + Write> Read for Over<'_, S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match &mut self.session {
            None => self.stream.read(bytes),
            Some(session) => {
                // What there was no room for before.
                match session.flush(&mut self.stream) {
                    Err(error) if !is_pause(&error) => return Err(error),
                    _ => {}
                }
                while session.ready().is_empty() {
                    if session.fill(&mut self.stream)? == 0 {
                        return Ok(0);
                    }
                }
                let ready = session.ready();
                let count = bytes.len().min(ready.len());
                bytes[..count].copy_from_slice(&ready[..count]);
                session.consume(count);
                Ok(count)
            }
        }
    }
}

impl<S: Read + Write> Write for Over<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.session {
            None => self.stream.write(bytes),
            Some(session) => {
                session.flush(&mut self.stream)?;
                session.accept(bytes)?;
                match session.flush(&mut self.stream) {
                    Err(error) if !is_pause(&error) => Err(error),
                    _ => Ok(bytes.len()),
                }
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a stream would block, or has for as long as it may.
fn is_pause(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
