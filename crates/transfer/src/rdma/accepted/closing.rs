//! Telling peers that this engine closes, or has closed their connection: they need not find out by silence.
//!
//! Where an initiator answers is what it says itself, and anybody may connect. So only IP addresses are called:
//! nobody can have this engine look up names, of hosts or at a metadata server.

use std::net::IpAddr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use millstream_metadata::{Frame, FrameType, HandShakeDesc, HostPort, NicPath};

use super::store::{Evicted, Sender};
use crate::calls::Calls;

/// How long telling all of them may take.
const PATIENCE: Duration = Duration::from_millis(250);

/// So many are told of a closed connection in a second. They connect again, and drive out each other where there
/// is room for fewer than are at work: then the others find out by silence.
const NOTICES_PER_SECOND: u32 = 256;

/// How long telling one may take.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(1);

/// Tells initiators that their connections were closed to make room.
pub(in super::super) struct Notices {
    calls: Arc<Calls>,
    incarnation: u64,
    /// When the second began, and how many were told in it.
    told: Mutex<(Instant, u32)>,
}

impl Notices {
    pub(in super::super) fn new(calls: Arc<Calls>, incarnation: u64) -> Self {
        Self { calls, incarnation, told: Mutex::new((Instant::now(), 0)) }
    }

    /// Tells the initiator of a connection, if it would understand. The connection is closed already.
    pub(super) fn evicted(&self, connection: &Evicted) {
        let Evicted { initiator, epoch, sender } = connection;
        let Some(server) = server_of(sender) else { return };
        if !self.may_tell(Instant::now()) {
            return;
        }
        let Ok(address) = server.parse() else { return };
        let message = HandShakeDesc {
            evicted: true,
            incarnation: Some(self.incarnation),
            rail: Some(initiator.rail),
            epoch: Some(*epoch),
            ..HandShakeDesc::default()
        };
        let told = Box::new(move |reply: Result<Frame, _>| {
            if let Err(error) = reply {
                tracing::debug!(%error, "a peer was not told that its connection was closed");
            }
        });
        let frame = Frame::new(FrameType::Connection, message.to_json());
        self.calls.call(&address, frame, NOTICE_TIMEOUT, told);
    }

    fn may_tell(&self, now: Instant) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(told.0) >= Duration::from_secs(1) {
            *told = (now, 0);
        }
        told.1 += 1;
        told.1 <= NOTICES_PER_SECOND
    }
}

/// Where a sender is told something, if it would understand: only where its host is an IP address.
pub(super) fn server_of(sender: &Sender) -> Option<String> {
    let path = sender.nic_path.parse::<NicPath>().ok().filter(|_| sender.numbered)?;
    let HostPort { host, .. } = path.server.parse().ok()?;
    host.parse::<IpAddr>().is_ok().then_some(path.server)
}

/// Tells the engines at these addresses, as far as that is quick, that the engine of this incarnation closes.
pub(in super::super) fn tell(
    calls: &Calls,
    incarnation: u64,
    addresses: impl Iterator<Item = HostPort>,
) {
    let deadline = Instant::now() + PATIENCE;
    let message =
        HandShakeDesc { closing: true, incarnation: Some(incarnation), ..HandShakeDesc::default() };
    let frame = Frame::new(FrameType::Connection, message.to_json());
    let (done, all_done) = mpsc::channel::<()>();
    for address in addresses {
        let done = done.clone();
        let told = Box::new(move |reply: Result<Frame, _>| {
            if let Err(error) = reply {
                tracing::debug!(%error, "a peer was not told that this engine closes");
            }
            drop(done);
        });
        calls.call(&address, frame.clone(), PATIENCE, told);
    }
    drop(done);
    let left = deadline.saturating_duration_since(Instant::now());
    if matches!(all_done.recv_timeout(left), Err(RecvTimeoutError::Timeout)) {
        tracing::debug!("not all peers were told in time that this engine closes");
    }
}

#[cfg(test)]
mod tests {
    use millstream_metadata::ClientConfig;

    use super::*;

    #[test]
    fn no_more_are_told_in_a_second_than_may_be() {
        let notices = Notices::new(Arc::new(Calls::new(ClientConfig::default())), 1);
        let start = Instant::now() + Duration::from_secs(10);
        for second in 0..3 {
            let now = start + Duration::from_secs(second);
            let told = (0..1000).filter(|_| notices.may_tell(now)).count();
            assert_eq!(told, NOTICES_PER_SECOND as usize);
        }
    }
}
