//! A local RDMA device, and who its completions are for.

use std::sync::{Arc, PoisonError, RwLock, Weak};

use millstream_metadata::Gid;
use millstream_verbs::{
    Completion, CompletionQueue, Device, DeviceChoice, DeviceConfig, ProtectionDomain,
};

use super::endpoint::{Endpoint, Finished};
use crate::{InstallError, RdmaConfig};

pub(super) struct LocalDevice {
    pub(super) device: Device,
    pub(super) domain: ProtectionDomain,
    pub(super) completions: CompletionQueue,
    endpoints: Arc<EndpointTable>,
    max_endpoints: usize,
}

/// Endpoints by their number, which is the upper half of the identifiers of their work requests.
#[derive(Default)]
struct EndpointTable(RwLock<Vec<Weak<Endpoint>>>);

impl LocalDevice {
    pub(super) fn open(
        address: std::net::IpAddr,
        config: &RdmaConfig,
    ) -> Result<Self, InstallError> {
        let mut chosen = DeviceConfig::new(DeviceChoice::Address(address, config.provider))?;
        chosen.soft.segmentation_offload = config.segmentation_offload;
        chosen.soft.busy_poll = config.busy_poll;
        let device = Device::open_chosen(&chosen)?;
        let endpoints = Arc::new(EndpointTable::default());
        let table = Arc::clone(&endpoints);
        let mut finished = Vec::new();
        let (capacity, max_endpoints) = completions_for(
            config.max_endpoints,
            config.queue_pairs_per_endpoint * config.send_queue_depth,
            device.attributes().max_completions,
        );
        // One queue for all endpoints: the device looks into each of its queues in every round.
        let completions = device
            .create_completion_queue_with_handler(
                capacity,
                Box::new(move |completions| table.dispatch(completions, &mut finished)),
            )
            .map_err(|error| InstallError::Create { device: device.name().to_owned(), error })?;
        let domain = device.allocate_protection_domain();
        Ok(Self { device, domain, completions, endpoints, max_endpoints })
    }

    pub(super) fn gid(&self) -> Gid {
        Gid::from_address(self.device.address())
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
    /// Tells endpoints what has completed. On the device's progress thread.
    fn dispatch(&self, completions: &[Completion], finished: &mut Vec<Finished>) {
        let number = |completion: &Completion| completion.id >> 32;
        for run in completions.chunk_by(|a, b| number(a) == number(b)) {
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
/// that is: at most so many, of which each has up to `each` outstanding. At least one, as the
/// device refuses what it cannot hold.
fn completions_for(max_endpoints: usize, each: usize, limit: usize) -> (usize, usize) {
    let endpoints = max_endpoints.min(limit / each).max(1);
    (endpoints * each, endpoints)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_as_many_as_their_completions_fit() {
        assert_eq!(completions_for(1024, 128, 1 << 20), (131_072, 1024));
        // The kernel's soft-RoCE.
        assert_eq!(completions_for(1024, 128, 32_767), (32_640, 255));
        assert_eq!(completions_for(1024, 4096, 1000), (4096, 1));
    }
}
