//! Queue pairs that peers have connected to ours. They only answer: what this engine sends goes
//! over connections that it opened itself.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use millstream_metadata::{Gid, HandShakeDesc};

use super::connection::{Connection, MAX_QUEUE_PAIRS, Peer, Unconnected};
use super::device::LocalDevice;

/// Longer than any host name, port and device name are together.
const MAX_NIC_PATH_LENGTH: usize = 512;

/// Who is connected: the peer's NIC and the device here. A peer's NIC is known by its address too:
/// names such as `localhost:12345` are not unique.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Key {
    nic_path: String,
    gid: Gid,
    device: String,
}

struct Entry {
    /// Its turn among all that were ever made.
    number: u64,
    connection: Connection,
    /// The peer's queue pairs.
    peer_queue_pairs: Vec<u32>,
}

pub(super) struct Accepted {
    limit: usize,
    acknowledge_timeout: u8,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    by_key: HashMap<Key, Entry>,
    /// How many were ever made.
    made: u64,
}

impl Accepted {
    pub(super) fn new(limit: usize, acknowledge_timeout: u8) -> Self {
        Self { limit, acknowledge_timeout, entries: Mutex::default() }
    }

    /// Connects new queue pairs of `device` to those of a peer. A peer that connects again has lost
    /// its earlier connection, which is closed: late packets of it find nobody.
    ///
    /// Returns the reply, without what only the engine knows, or why the request is refused.
    pub(super) fn accept(
        &self,
        device: &LocalDevice,
        request: &HandShakeDesc,
    ) -> Result<HandShakeDesc, String> {
        let Some(gid) = request.local_gid else {
            return Err("the handshake does not say the GID of its sender".to_owned());
        };
        if request.local_nic_path.len() > MAX_NIC_PATH_LENGTH {
            return Err(format!("a NIC path of more than {MAX_NIC_PATH_LENGTH} bytes"));
        }
        let key = Key {
            nic_path: request.local_nic_path.clone(),
            gid,
            device: device.device.name().to_owned(),
        };
        if request.disconnect {
            self.disconnect(&key, &request.qp_num);
            return Ok(HandShakeDesc::default());
        }
        let count = request.qp_num.len();
        if count == 0 || count > MAX_QUEUE_PAIRS {
            return Err(format!(
                "{count} queue pairs between two NICs: 1 to {MAX_QUEUE_PAIRS} are possible"
            ));
        }
        let own_mtu = device.device.path_mtu(gid.address()).map_err(|error| error.to_string())?;
        let peer = Peer::parse(request, gid.address(), count, own_mtu)?;
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.by_key.remove(&key).is_none() && entries.by_key.len() >= self.limit {
            // Peers that were killed never say goodbye, so the oldest connection makes room. If it
            // still serves somebody, that peer connects again by itself.
            let oldest = entries.by_key.iter().min_by_key(|(_, entry)| entry.number);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                tracing::warn!(peer = %oldest.nic_path, limit = self.limit, "made room");
                entries.by_key.remove(&oldest);
            }
        }
        let unconnected =
            Unconnected::new(device, count, 1).map_err(|reason| reason.to_string())?;
        let reply = HandShakeDesc {
            qp_num: unconnected.numbers(),
            start_psn: unconnected.start_psn(),
            path_mtu: Some(own_mtu.bytes() as u32),
            ..HandShakeDesc::default()
        };
        let connection = unconnected
            .connect(&peer, self.acknowledge_timeout)
            .map_err(|reason| reason.to_string())?;
        let peer_queue_pairs = request.qp_num.clone();
        entries.made += 1;
        let number = entries.made;
        entries.by_key.insert(key, Entry { number, connection, peer_queue_pairs });
        Ok(reply)
    }

    pub(super) fn clear(&self) {
        let entries =
            std::mem::take(&mut *self.entries.lock().unwrap_or_else(PoisonError::into_inner));
        entries.by_key.values().for_each(|entry| entry.connection.close());
    }

    fn disconnect(&self, key: &Key, peer_queue_pairs: &[u32]) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        // Not if it has connected again meanwhile.
        let known = entries.by_key.get(key);
        if known.is_some_and(|entry| entry.peer_queue_pairs == peer_queue_pairs) {
            entries.by_key.remove(key);
        }
    }
}
