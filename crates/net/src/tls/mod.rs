//! TLS for who calls a daemon: whom it trusts, what it shows of itself, and why there is none.
//!
//! A session has no socket: bytes of the stream go in and come out, so that one thread may read from the socket while
//! another one writes.

use std::path::PathBuf;

use thiserror::Error;

#[cfg(feature = "tls")]
mod on;
#[cfg(feature = "tls")]
pub use on::{
    CallerSession, CallerTls, authorities, calling, certificates, names_of, private_key, reason,
};

#[cfg(not(feature = "tls"))]
mod off;
#[cfg(not(feature = "tls"))]
pub use off::{CallerSession, CallerTls, reason};

/// The files of who calls, all in PEM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CallerFiles {
    /// Certificates of the authorities that may vouch for who is called.
    pub authorities: PathBuf,
    /// Certificate and private key, for who asks callers for one.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// What is wrong with the files.
#[derive(Debug, Error)]
#[error("TLS: {0}")]
pub struct TlsFilesError(String);
