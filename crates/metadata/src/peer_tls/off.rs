//! There is none.

use std::convert::Infallible;
use std::io::{self, Read, Write};

use super::TlsError;
use crate::TlsFiles;

/// What an engine has TLS with others by, in builds that have it.
#[derive(Clone, Debug)]
pub struct PeerTls(Infallible);

/// One connection, in builds with TLS.
#[derive(Debug)]
pub struct TlsSession(Infallible);

impl PeerTls {
    /// An error that says so.
    pub fn from_files(_: &TlsFiles) -> Result<Self, String> {
        Err("this build has no TLS".to_owned())
    }

    /// The side of who calls somebody by this host.
    pub fn calling(&self, _: &str) -> Result<TlsSession, TlsError> {
        match self.0 {}
    }

    /// The side of who is called.
    pub fn called(&self) -> Result<TlsSession, TlsError> {
        match self.0 {}
    }
}

impl TlsSession {
    /// Says and hears what comes before the first message.
    pub fn handshake(&mut self, _: &mut (impl Read + Write)) -> io::Result<bool> {
        match self.0 {}
    }

    /// Bytes of messages that have come.
    pub fn ready(&mut self) -> &[u8] {
        match self.0 {}
    }

    /// So many of these were taken.
    pub fn consume(&mut self, _: usize) {
        match self.0 {}
    }

    /// Reads a record, or what has come of it.
    pub fn fill(&mut self, _: &mut (impl Read + ?Sized)) -> io::Result<usize> {
        match self.0 {}
    }

    /// Whether the first bytes of a record have come, and not all of it.
    pub fn is_amid_record(&self) -> bool {
        match self.0 {}
    }

    /// Takes bytes of messages.
    pub fn accept(&mut self, _: &[u8]) -> io::Result<()> {
        match self.0 {}
    }

    /// Whether something is to be written.
    pub fn has_unsent(&self) -> bool {
        match self.0 {}
    }

    /// Writes all that is to be written.
    pub fn flush(&mut self, _: &mut (impl Write + ?Sized)) -> io::Result<()> {
        match self.0 {}
    }
}
