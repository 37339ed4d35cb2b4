//! Waiting for what passes by itself: an address in use, a server that is not there yet.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use millstream_metadata::StoreError;
use millstream_transfer::{InstallError, NewError};
use millstream_verbs::{DeviceError, OpenError};

use crate::address::NoneFree;
use crate::failure::sentence;
use crate::note::note;

/// Between attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// Attempts until one succeeds, fails of something else than what `passes`, or `until` is over. Says
/// once that it waits, and for what.
pub(crate) fn until<T>(
    until: Instant,
    passes: impl Fn(&anyhow::Error) -> bool,
    mut attempt: impl FnMut() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut told = false;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match attempt() {
            Err(error) if !left.is_zero() && passes(&error) => {
                if !std::mem::replace(&mut told, true) {
                    note(&format!("waiting up to {left:.1?}: {}", sentence(&error)));
                }
                // Nothing tells when such things pass.
                thread::sleep(PAUSE.min(left));
            }
            result => return result,
        }
    }
}

/// Another process has the address or the port, and may go.
pub(crate) fn is_address_in_use(error: &anyhow::Error) -> bool {
    let device =
        |error: &DeviceError| matches!(error, DeviceError::Soft(error) if error.is_in_use());
    let io = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
    error.chain().any(|cause| {
        cause.is::<NoneFree>()
            || cause.downcast_ref().is_some_and(io)
            || cause.downcast_ref().is_some_and(device)
            || cause.downcast_ref().is_some_and(OpenError::is_in_use)
            || matches!(cause.downcast_ref(), Some(InstallError::Open(error)) if device(error))
            || matches!(cause.downcast_ref(), Some(NewError::Listen { error, .. }) if io(error))
    })
}

/// An engine cannot start, and may a moment later: its address or its name is in use, or the metadata
/// server does not answer.
pub(crate) fn may_start_later(error: &anyhow::Error) -> bool {
    let store =
        |error: &StoreError| error.is_transient() || matches!(error, StoreError::Taken { .. });
    let new = |error: &NewError| matches!(error, NewError::Publish(error) if store(error));
    is_address_in_use(error) || error.chain().any(|cause| cause.downcast_ref().is_some_and(new))
}

/// Nobody listens there, or there is no way there now; both may change.
pub(crate) fn is_unreachable(error: &anyhow::Error) -> bool {
    let unreachable = |error: &io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::ConnectionRefused
                | io::ErrorKind::HostUnreachable
                | io::ErrorKind::NetworkUnreachable
                | io::ErrorKind::TimedOut
        )
    };
    error.chain().any(|cause| cause.downcast_ref().is_some_and(unreachable))
}
