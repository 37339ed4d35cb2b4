//! There is none.

use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::net::IpAddr;

use super::{CallerFiles, TlsFilesError};

/// What callers have TLS by, in builds that have it.
#[derive(Clone, Debug)]
pub struct CallerTls(Infallible);

/// One connection, in builds with TLS.
#[derive(Debug)]
pub struct CallerSession(Infallible);

/// Why TLS has failed, if it is that.
pub fn reason(_: &io::Error) -> Option<String> {
    None
}

impl CallerTls {
    /// An error that says so.
    pub fn from_files(_: &CallerFiles, _: &str) -> Result<Self, TlsFilesError> {
        Err(TlsFilesError("this build has none".to_owned()))
    }

    /// One connection.
    pub fn session(&self, _: IpAddr) -> io::Result<CallerSession> {
        match self.0 {}
    }
}

impl CallerSession {
    /// What comes before the first message.
    pub fn handshake(&mut self, _: &mut (impl Read + Write)) -> io::Result<()> {
        match self.0 {}
    }

    /// Takes bytes of the stream.
    pub fn feed(&mut self, _: &[u8]) -> io::Result<()> {
        match self.0 {}
    }

    /// Bytes of messages.
    pub fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }

    /// Takes bytes of messages, and writes what is to be written.
    pub fn write(&mut self, _: &[u8], _: &mut impl Write) -> io::Result<()> {
        match self.0 {}
    }

    /// Writes what is to be written.
    pub fn flush(&mut self, _: &mut impl Write) -> io::Result<()> {
        match self.0 {}
    }
}
