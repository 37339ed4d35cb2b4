//! A local RDMA device, and who its completions are for.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use millstream_metadata::Gid;
use millstream_verbs::{
    Completion, CompletionQueue, Device, DeviceChoice, DeviceConfig, DeviceError, IbverbsError,
    Mtu, ProtectionDomain,
};

use super::accepted::Accepted;
use super::links::Links;
use crate::{FailureReason, InstallError, RdmaConfig};

pub(super) struct LocalDevice {
    pub(super) device: Device,
    pub(super) domain: ProtectionDomain,
    pub(super) completions: CompletionQueue,
    /// Of its queue pairs.
    pub(super) partition_key_index: u16,
    max_path_mtu: Mtu,
    /// The connections that this engine has made.
    pub(super) links: Arc<Links>,
}

impl LocalDevice {
    /// Opens what a configuration asks for, at least one. Of devices by name, those that work.
    pub(super) fn open_all(
        config: &RdmaConfig,
        accepted: &Weak<Accepted>,
    ) -> Result<Vec<Self>, InstallError> {
        let open = |choice| Self::open(choice, config, Weak::clone(accepted));
        let Some(names) = config.named_devices() else {
            let choice = |&address| DeviceChoice::Address(address, config.provider);
            return config.addresses.iter().map(choice).map(open).collect();
        };
        let all = match names.is_empty() {
            true => Device::list_ibverbs().map_err(DeviceError::from)?,
            false => names.to_vec(),
        };
        let (mut devices, mut first_error) = (Vec::<Self>::new(), None);
        for name in all {
            if devices.iter().any(|known| known.device.name() == name) {
                continue;
            }
            // As a port without a cable, or a NIC that another machine of these has.
            match open(DeviceChoice::Name(name.clone())) {
                Ok(device) => devices.push(device),
                Err(error) => {
                    tracing::warn!(name, %error, "RDMA device left out");
                    first_error.get_or_insert(error);
                }
            }
        }
        match first_error {
            Some(error) if devices.is_empty() => Err(error),
            None if devices.is_empty() => Err(DeviceError::from(IbverbsError::NoDevice).into()),
            _ => Ok(devices),
        }
    }

    fn open(
        choice: DeviceChoice,
        config: &RdmaConfig,
        accepted: Weak<Accepted>,
    ) -> Result<Self, InstallError> {
        let device = Device::open_chosen(&DeviceConfig {
            choice,
            soft: config.soft.clone(),
            ibverbs: config.ibverbs.clone(),
        })?;
        let (name, provider) = (device.name(), device.provider());
        tracing::info!(name, %provider, address = %device.address(), "device open");
        let (capacity, max_endpoints) = completions_for(
            config.max_endpoints,
            config.queue_pairs_per_endpoint * config.send_queue_depth,
            config.max_accepted_queue_pairs,
            device.attributes().max_completions,
        );
        let links = Arc::new(Links::new(max_endpoints));
        let table = Arc::clone(&links);
        // One queue for all: the device looks into each of its queues in every round.
        let completions = device
            .create_completion_queue_with_progress_handler(
                capacity,
                Box::new(move |completions| dispatch(completions, &accepted, &table)),
            )
            .map_err(|error| InstallError::Create { device: device.name().to_owned(), error })?;
        let domain = device.allocate_protection_domain();
        let &RdmaConfig { max_path_mtu, partition_key_index, .. } = config;
        Ok(Self { device, domain, completions, partition_key_index, max_path_mtu, links })
    }

    pub(super) fn gid(&self) -> Gid {
        Gid::from_address(self.device.address())
    }

    /// What becomes of rails whose port here does not work.
    pub(super) fn port_down(&self) -> FailureReason {
        FailureReason::PortDown(self.device.name().to_owned())
    }

    /// The largest path MTU to a peer.
    pub(super) fn path_mtu(&self, peer: IpAddr) -> io::Result<Mtu> {
        Ok(self.device.path_mtu(peer)?.min(self.max_path_mtu))
    }
}

/// Tells peers what has completed, and `accepted` which questions. On the device's own thread, or one
/// that waits for a batch, which holds no lock.
fn dispatch(completions: &[Completion], accepted: &Weak<Accepted>, links: &Links) {
    for run in completions.chunk_by(|a, b| a.qpn == b.qpn) {
        // By the queue pair: slices have all identifiers there are.
        if let Some((peer, link)) = links.find(run[0].qpn) {
            peer.completed(&link, run);
        } else if Accepted::is_question(&run[0])
            && let Some(accepted) = accepted.upgrade()
        {
            run.iter().for_each(|completion| accepted.ended(completion));
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
            let device = LocalDevice::open_all(&config, &Weak::new()).unwrap().remove(0);
            assert_eq!(device.path_mtu(address).unwrap(), expected);
        }
    }

    #[test]
    fn links_are_as_many_as_their_completions_fit() {
        assert_eq!(completions_for(1024, 256, 2048, 1 << 20), (264_192, 1024));
        // The kernel's soft-RoCE.
        assert_eq!(completions_for(1024, 256, 2048, 32_767), (32_512, 119));
        assert_eq!(completions_for(1024, 4096, 10, 1000), (4106, 1));
    }
}
