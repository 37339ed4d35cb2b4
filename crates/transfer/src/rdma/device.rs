//! A local RDMA device, and who its completions are for.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use millstream_metadata::Gid;
use millstream_verbs::{
    Completion, CompletionQueue, Device, DeviceChoice, DeviceConfig, Mtu, ProtectionDomain,
};

use super::accepted::Accepted;
use super::endpoint::{Endpoint, Finished};
use crate::{InstallError, RdmaConfig};

pub(super) struct LocalDevice {
    pub(super) device: Device,
    pub(super) domain: ProtectionDomain,
    pub(super) completions: CompletionQueue,
    /// Of its queue pairs.
    pub(super) partition_key_index: u16,
    max_path_mtu: Mtu,
    endpoints: Arc<EndpointTable>,
    max_endpoints: usize,
}

/// Endpoints by their number, which is the upper half of the identifiers of their work requests.
#[derive(Default)]
struct EndpointTable(RwLock<Vec<Weak<Endpoint>>>);

impl LocalDevice {
    pub(super) fn open(
        address: IpAddr,
        config: &RdmaConfig,
        accepted: Weak<Accepted>,
    ) -> Result<Self, InstallError> {
        let device = Device::open_chosen(&DeviceConfig {
            choice: DeviceChoice::Address(address, config.provider),
            soft: config.soft.clone(),
            ibverbs: config.ibverbs.clone(),
        })?;
        let (name, provider) = (device.name(), device.provider());
        tracing::info!(name, %provider, address = %device.address(), "device open");
        let endpoints = Arc::new(EndpointTable::default());
        let table = Arc::clone(&endpoints);
        let mut finished = Vec::new();
        let (capacity, max_endpoints) = completions_for(
            config.max_endpoints,
            config.queue_pairs_per_endpoint * config.send_queue_depth,
            config.max_accepted,
            device.attributes().max_completions,
        );
        // One queue for all: the device looks into each of its queues in every round.
        let completions = device
            .create_completion_queue_with_progress_handler(
                capacity,
                Box::new(move |completions| table.dispatch(completions, &accepted, &mut finished)),
            )
            .map_err(|error| InstallError::Create { device: device.name().to_owned(), error })?;
        let domain = device.allocate_protection_domain();
        let &RdmaConfig { max_path_mtu, partition_key_index, .. } = config;
        Ok(Self {
            device,
            domain,
            completions,
            partition_key_index,
            max_path_mtu,
            endpoints,
            max_endpoints,
        })
    }

    pub(super) fn gid(&self) -> Gid {
        Gid::from_address(self.device.address())
    }

    /// The largest path MTU to a peer.
    pub(super) fn path_mtu(&self, peer: IpAddr) -> io::Result<Mtu> {
        Ok(self.device.path_mtu(peer)?.min(self.max_path_mtu))
    }

    /// Makes an endpoint with the number it is given; `None` when there are as many as there may
    /// be.
    pub(super) fn add(
        &self,
        make: impl FnOnce(u32, Weak<Endpoint>) -> Endpoint,
    ) -> Option<Arc<Endpoint>> {
        let mut table = self.endpoints.0.write().unwrap_or_else(PoisonError::into_inner);
        if table.len() >= self.max_endpoints {
            return None;
        }
        let number = table.len() as u32;
        let endpoint = Arc::new_cyclic(|own| make(number, own.clone()));
        table.push(Arc::downgrade(&endpoint));
        Some(endpoint)
    }
}

impl EndpointTable {
    /// Tells endpoints what has completed, and `accepted` which questions. On the device's own thread,
    /// or one that waits for a batch, which holds no lock.
    fn dispatch(
        &self,
        completions: &[Completion],
        accepted: &Weak<Accepted>,
        finished: &mut Vec<Finished>,
    ) {
        let number = |completion: &Completion| completion.id >> 32;
        for run in completions.chunk_by(|a, b| number(a) == number(b)) {
            if Accepted::is_question(&run[0]) {
                if let Some(accepted) = accepted.upgrade() {
                    run.iter().for_each(|completion| accepted.ended(completion));
                }
                continue;
            }
            let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
            let endpoint = table.get(number(&run[0]) as usize).and_then(Weak::upgrade);
            drop(table);
            if let Some(endpoint) = endpoint {
                endpoint.completed(run, finished);
            }
        }
    }
}

/// How many completions a queue must hold so that it never overruns, and for how many endpoints
/// that is: at most so many, of which each has up to `each` outstanding, beside one question to each
/// peer that was accepted. At least one, as the device refuses what it cannot hold.
fn completions_for(
    max_endpoints: usize,
    each: usize,
    accepted: usize,
    limit: usize,
) -> (usize, usize) {
    let endpoints = max_endpoints.min(limit.saturating_sub(accepted) / each).max(1);
    (endpoints * each + accepted, endpoints)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_mtu_is_no_larger_than_what_may_be_used() {
        let address: IpAddr = [127, 97, std::process::id() as u8, 1].into();
        for (most, expected) in [(Mtu::B512, Mtu::B512), (Mtu::B4096, Mtu::B4096)] {
            let config = RdmaConfig { max_path_mtu: most, ..RdmaConfig::new(&[address]) };
            let device = LocalDevice::open(address, &config, Weak::new()).unwrap();
            assert_eq!(device.path_mtu(address).unwrap(), expected);
        }
    }

    #[test]
    fn endpoints_are_as_many_as_their_completions_fit() {
        assert_eq!(completions_for(1024, 128, 1024, 1 << 20), (132_096, 1024));
        // The kernel's soft-RoCE.
        assert_eq!(completions_for(1024, 128, 1024, 32_767), (32_640, 247));
        assert_eq!(completions_for(1024, 4096, 10, 1000), (4106, 1));
    }
}
