//! The trees that a controller has planned, before they are connected.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;

use millstream_inc::protocol::HostQueuePair;
use millstream_inc::{ACKNOWLEDGEMENT_DELAY, CONTROL_BYTES, HostConfig};
use millstream_verbs::{
    Device, Mtu, ProtectionDomain, Psn, QueuePair, QueuePairCapabilities, QueuePairOptions,
    ReceiveShare,
};

use crate::JoinError;
use crate::engine::{EngineSlot, completion_queue};
use crate::memory::ControlBlock;
use crate::tree::granted;

/// The switches of all trees.
pub(super) fn all_switches(first: IpAddr, more: Vec<IpAddr>) -> Vec<IpAddr> {
    [first].into_iter().chain(more).collect()
}

/// The trees that the controller has planned.
pub(super) struct Trees<'a> {
    /// The switch of each, which this rank is connected to.
    pub(super) switches: Vec<IpAddr>,
    /// Those that they use, one after the other: several trees may be on one.
    pub(super) devices: &'a [&'a Device],
    /// Why their switches are those of the ranks' own processes, if so.
    pub(super) fallback: Option<String>,
}

impl Trees<'_> {
    /// The device of each.
    pub(super) fn devices(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().copied().cycle().take(self.switches.len())
    }

    /// The largest path MTU that works to all switches, from the device of each tree.
    pub(super) fn path_mtu(&self) -> Result<Mtu, JoinError> {
        let mut smallest = Mtu::B4096;
        for (device, &switch) in self.devices().zip(&self.switches) {
            let path_mtu = device.path_mtu(switch);
            smallest = smallest.min(path_mtu.map_err(|source| JoinError::Path { switch, source })?);
        }
        Ok(smallest)
    }
}

/// This rank's end of a tree, before it is connected.
pub(super) struct TreeEnd {
    /// Goes before what its requests name.
    pub(super) pair: QueuePair,
    pub(super) control: ControlBlock<CONTROL_BYTES>,
    pub(super) psn: Psn,
    /// What the switch may have in flight to the pair; none where nothing limits it.
    pub(super) receive_share: Option<ReceiveShare>,
}

impl TreeEnd {
    pub(super) fn new(
        device: &Device,
        domain: &ProtectionDomain,
        host: &HostConfig,
        slot: &EngineSlot,
        tree: usize,
    ) -> Result<Self, JoinError> {
        let control = ControlBlock::new(domain)?;
        let capabilities = QueuePairCapabilities::new(
            host.required_send_requests() as usize,
            host.required_receive_requests() as usize,
        );
        let QueuePairCapabilities { max_send_requests, max_receive_requests, .. } = capabilities;
        let capacity = max_send_requests + max_receive_requests;
        let completions = completion_queue(device, capacity, slot, tree)?;
        let pair = domain.create_queue_pair_with(&QueuePairOptions {
            acknowledgement_delay: ACKNOWLEDGEMENT_DELAY,
            ..QueuePairOptions::new(&completions, capabilities)
        })?;
        let psn = Psn::from_extended(RandomState::new().hash_one(pair.number().value()));
        let receive_share = device.grant_receive_share(1);
        Ok(Self { pair, control, psn, receive_share })
    }

    /// What the controller is told of it.
    pub(super) fn described(&self) -> HostQueuePair {
        let receive_share = granted(self.receive_share.as_ref());
        HostQueuePair { qpn: self.pair.number(), psn: self.psn, receive_share }
    }
}
