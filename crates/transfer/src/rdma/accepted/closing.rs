//! Telling peers that this engine closes, or has closed their connection: they need not find out by silence.
//!
//! Where an initiator answers is what it says itself, and anybody may connect. So only IP addresses are called:
//! nobody can have this engine look up names, of hosts or at a metadata server. There is one for each connection at
//! most, no more are called at a time than [`Calls`] allows, and what is said there means nothing to anybody else.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use millstream_metadata::{Frame, FrameType, HandShakeDesc, HostPort, NicPath};

use super::store::Evicted;
use crate::calls::Calls;

/// How long those who are told may take, from when all addresses are known.
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
        let Some(address) = sender.told_at else { return };
        if !self.may_tell(Instant::now()) {
            return;
        }
        let address = HostPort::from_address(address.ip(), address.port());
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

/// Where the sender of a request to connect is told something: where it says that it answers. Of engines that do not
/// say so, it is their name, if that has an IP address.
pub(super) fn address_of(request: &HandShakeDesc) -> Option<SocketAddr> {
    let by_name = || {
        let path: NicPath = request.local_nic_path.parse().ok()?;
        let HostPort { host, port } = path.server.parse().ok()?;
        Some(SocketAddr::new(host.parse().ok()?, port))
    };
    let address = request.control_address.or_else(by_name)?;
    (!address.ip().is_unspecified() && address.port() != 0).then_some(address)
}

/// Tells the engines at these addresses, as far as that is quick, that the engine of this incarnation closes. Each once,
/// and before the next address is asked for.
pub(in super::super) fn tell(
    calls: &Calls,
    incarnation: u64,
    addresses: impl Iterator<Item = HostPort>,
) {
    let message =
        HandShakeDesc { closing: true, incarnation: Some(incarnation), ..HandShakeDesc::default() };
    let frame = Frame::new(FrameType::Connection, message.to_json());
    let (done, all_done) = mpsc::channel::<()>();
    let mut told = BTreeSet::new();
    for address in addresses {
        if !told.insert(address.clone()) {
            continue;
        }
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
    if matches!(all_done.recv_timeout(PATIENCE), Err(RecvTimeoutError::Timeout)) {
        tracing::debug!("not all peers were told in time that this engine closes");
    }
}

#[cfg(test)]
mod tests {
    use millstream_metadata::ClientConfig;

    use super::*;

    #[test]
    fn initiators_are_told_at_addresses_only() {
        for (name, said, expected) in [
            ("192.0.2.1:7000", None, Some("192.0.2.1:7000")),
            ("[2001:db8::1]:7000", None, Some("[2001:db8::1]:7000")),
            ("192.0.2.1:7000", Some("192.0.2.2:8000"), Some("192.0.2.2:8000")),
            ("host:7000", Some("192.0.2.2:8000"), Some("192.0.2.2:8000")),
            ("node-a", Some("[2001:db8::2]:8000"), Some("[2001:db8::2]:8000")),
            ("host:7000", None, None),
            ("node-a", None, None),
            ("", None, None),
            ("0.0.0.0:7000", None, None),
            ("node-a", Some("192.0.2.2:0"), None),
            // Whoever takes requests knows where they come from.
            ("node-a", Some("0.0.0.0:8000"), None),
        ] {
            let request = HandShakeDesc {
                local_nic_path: format!("{name}@nic"),
                control_address: said.map(|said| said.parse().unwrap()),
                ..HandShakeDesc::default()
            };
            let expected = expected.map(|expected| expected.parse().unwrap());
            assert_eq!(address_of(&request), expected, "{name} {said:?}");
        }
    }

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
