//! Why something was not copied, and whether another transport may do it.

use std::thread;

use millstream_net::shared_memory::{AccessError, Peer, Region, Visit};

use crate::FailureReason;
use crate::gpu::Exchanged;
use crate::memory::Inside;

/// Enters memory of a peer.
pub(super) fn visit<'a>(peer: &'a Peer, region: &'a Region) -> Result<Visit<'a>, Failed> {
    loop {
        match peer.enter(region).map_err(reason)? {
            Some(visit) => return Ok(visit),
            // More threads than a peer has words: they are copying, and soon done.
            None => thread::yield_now(),
        }
    }
}

/// Why bytes were not copied between memory here and a peer's.
pub(super) fn not_exchanged(local: &Inside<'_>, error: Exchanged) -> Failed {
    match error {
        // What is mapped of the peer has another address here than there.
        Exchanged::Access(AccessError::Fault(fault)) if !local.has(fault.address) => {
            let text = "a page of it is not there, or cannot be accessed so";
            FailureReason::Access(text.to_owned()).into()
        }
        Exchanged::Access(error) => reason(error),
        Exchanged::Gpu(error) => FailureReason::Gpu(error).into(),
    }
}

pub(super) fn reason(error: AccessError) -> Failed {
    let reason = match error {
        AccessError::Ended => FailureReason::ProcessEnded,
        AccessError::Unregistered => return FailureReason::Unregistered.into(),
        AccessError::Fault(fault) => {
            return FailureReason::MemoryGone { address: fault.address }.into();
        }
        error => FailureReason::Access(error.to_string()),
    };
    // Whether its process is there is asked by who looks for another transport.
    Failed { reason, elsewhere: true }
}

/// Why something was not copied.
#[derive(Clone)]
pub(super) struct Failed {
    pub(super) reason: FailureReason,
    /// It is the way that is wrong, and not the memory: another transport may do it.
    pub(super) elsewhere: bool,
}

impl From<FailureReason> for Failed {
    fn from(reason: FailureReason) -> Self {
        Self { reason, elsewhere: false }
    }
}
