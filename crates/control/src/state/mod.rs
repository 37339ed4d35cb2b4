//! Where a controller keeps what the next one should know: in a file, or in an etcd that several controllers share.
//!
//! A thread asks the store, since that may take long, one request at a time. What to ask is decided by
//! [`millstream_inc::election`].

mod etcd;
mod file;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::mpsc as requests;
use std::thread::{self, JoinHandle};

use millstream_inc::election::{Reply, Request};
pub use millstream_metadata::{TlsFiles, UriError};
use thiserror::Error;
use tokio::sync::mpsc;

/// Where the state is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum StateLocation {
    /// `file:PATH`: of one controller.
    File(PathBuf),
    /// `etcd://HOST:PORT[,HOST:PORT][/PREFIX]`, or `etcds://` over TLS: of several, one of which leads.
    Etcd(String),
}

/// A text that is no such place.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("it is file:PATH, etcd://HOST:PORT[,HOST:PORT][/PREFIX] or etcds://...")]
pub struct NoLocation;

impl FromStr for StateLocation {
    type Err = NoLocation;

    fn from_str(text: &str) -> Result<Self, NoLocation> {
        match text.split_once(':') {
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.into())),
            Some(("etcd" | "etcds", _)) => Ok(Self::Etcd(text.to_owned())),
            _ => Err(NoLocation),
        }
    }
}

/// Why a state cannot be used.
#[derive(Debug, Error)]
pub enum StateError {
    /// The file cannot be read or written.
    #[error("the file of the state, {}, cannot be used: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not what a controller has written.
    #[error(
        "the file of the state, {}, makes no sense: {reason}; move it away to begin without: what runs is not lost, \
         but terms may be given again",
        path.display()
    )]
    Corrupt {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Another controller has it.
    #[error("the file of the state, {}, is in use by another controller", path.display())]
    InUse {
        /// Which.
        path: PathBuf,
    },
    /// The URI is none of an etcd, or its files for TLS cannot be used.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// Files for TLS are of no use there.
    #[error(
        "certificates are set for the state, and {state} has no TLS: etcds://HOST:PORT,.../PREFIX has"
    )]
    NoTls {
        /// Where it is.
        state: String,
    },
    /// Others could not find this controller.
    #[error(
        "controllers that share their state find each other by their addresses, and {listen} is none: say where this \
         one is found (--advertise)"
    )]
    Advertise {
        /// Where it listens.
        listen: SocketAddr,
    },
    /// The system has no thread left.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

/// What carries out requests.
trait Store: Send {
    fn perform(&mut self, request: Request) -> Reply;
}

/// Replies that nobody has read yet: to what was asked last, and to what is asked at the end.
pub(crate) const REPLIES: usize = 2;

/// The thread that asks.
pub(crate) struct Keeper {
    requests: Option<requests::Sender<Request>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").finish_non_exhaustive()
    }
}

impl Keeper {
    /// Opens the state of a controller that others find at this address. Replies go to `replies`, which has room for
    /// [`REPLIES`].
    pub(crate) fn open(
        location: &StateLocation,
        tls: &TlsFiles,
        advertise: SocketAddr,
        replies: mpsc::Sender<Reply>,
    ) -> Result<Self, StateError> {
        let mut store: Box<dyn Store> = match location {
            StateLocation::File(path) if *tls != TlsFiles::default() => {
                return Err(StateError::NoTls { state: format!("file:{}", path.display()) });
            }
            StateLocation::File(path) => Box::new(file::FileStore::open(path)?),
            StateLocation::Etcd(_) if advertise.ip().is_unspecified() => {
                return Err(StateError::Advertise { listen: advertise });
            }
            StateLocation::Etcd(uri) => Box::new(etcd::EtcdStore::new(uri, tls, advertise)?),
        };
        let (requests, asked) = requests::channel();
        let work = move || {
            while let Ok(request) = asked.recv() {
                if replies.blocking_send(store.perform(request)).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("state".to_owned()).spawn(work);
        let thread = thread.map_err(StateError::Thread)?;
        Ok(Self { requests: Some(requests), thread: Some(thread) })
    }

    /// Has something asked.
    pub(crate) fn ask(&self, request: Request) {
        if let Some(requests) = &self.requests {
            // The thread lives as long as this.
            let _ = requests.send(request);
        }
    }

    /// Has the last thing asked, and waits until it is done.
    pub(crate) fn end(mut self, request: Request) {
        self.ask(request);
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // It would have reported a panic on stderr.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_files_or_etcds() {
        let parse = |text: &str| text.parse::<StateLocation>();
        assert_eq!(parse("file:/a:b"), Ok(StateLocation::File("/a:b".into())));
        for uri in ["etcd://a:1,b:2/inc", "etcds://a"] {
            assert_eq!(parse(uri), Ok(StateLocation::Etcd(uri.to_owned())));
        }
        for wrong in ["", "file:", "/a", "redis://a", "file"] {
            assert_eq!(parse(wrong), Err(NoLocation), "{wrong}");
        }
    }
}
