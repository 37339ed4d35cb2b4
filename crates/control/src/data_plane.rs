//! The switch's nodes on their progress threads.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use millstream_inc::plan::FanIn;
use millstream_inc::{
    Abort, CommunicatorCounts, CommunicatorSpec, CreateError, Created, MAX_QUEUE_PAIRS, ParentSpec,
    PreparedCommunicator, SwitchConfig, SwitchEvent, SwitchNode,
};
use millstream_net::{
    AfterRound, Driver, Failure, OpenError, Opened, Progress, ProgressConfig, Shared,
};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::switch::SwitchConfig as RunConfig;

/// What one address has room for, with some left for devices of others (docs/shared-address.md).
const MAX_SHARDS: usize = 16;

/// Why a communicator was not made, or not connected.
#[derive(Debug, Error)]
pub(crate) enum DataPlaneError {
    #[error(transparent)]
    Create(#[from] CreateError),
    #[error(transparent)]
    Failed(#[from] Failure),
    #[error("there is no such communicator, or it has no node above")]
    NoUplink,
}

/// A running switch: some shards at one address, each a node with a socket and a thread of its own. A
/// communicator's node is in one of them.
pub(crate) struct DataPlane {
    shards: Box<[Progress<SwitchNode>]>,
    /// In which shard a communicator is.
    places: BTreeMap<u64, usize>,
    limits: SwitchConfig,
    events: mpsc::UnboundedReceiver<Option<SwitchEvent>>,
}

/// Where a shard tells of events, and of its own end.
struct Teller(mpsc::UnboundedSender<Option<SwitchEvent>>);

impl Drop for Teller {
    fn drop(&mut self) {
        // Nobody hears of it who ends the switch.
        let _ = self.0.send(None);
    }
}

impl DataPlane {
    pub(crate) fn open(switch: &RunConfig) -> Result<Self, OpenError> {
        let &RunConfig { shards: count, driver, .. } = switch;
        let address = switch.node.address;
        if !(1..=MAX_SHARDS).contains(&count) {
            return Err(OpenError::Shards { shards: count, limit: MAX_SHARDS });
        }
        if driver == Driver::Packet && count > 1 {
            return Err(OpenError::PacketDriverShards { address, shards: count });
        }
        // Unbounded, but a communicator has three events at most, and their number is limited.
        let (sender, events) = mpsc::unbounded_channel();
        let shards = (0..count).map(|shard| Self::start(switch, shard, Teller(sender.clone())));
        let shards = shards.collect::<Result<_, _>>()?;
        Ok(Self { shards, places: BTreeMap::new(), limits: switch.node.clone(), events })
    }

    fn start(
        switch: &RunConfig,
        shard: usize,
        teller: Teller,
    ) -> Result<Progress<SwitchNode>, OpenError> {
        let opened = Opened::new(ProgressConfig {
            driver: switch.driver,
            share_address: switch.shards > 1,
            segmentation_offload: switch.segmentation_offload,
            name: if switch.shards > 1 { format!("switch-{shard}") } else { "switch".to_owned() },
            ..ProgressConfig::new(switch.node.address)
        })?;
        let node = SwitchNode::new(SwitchConfig {
            seed: switch.node.seed.wrapping_add(shard as u64),
            queue_pair_numbers: opened.queue_pair_numbers(),
            ..switch.node.clone()
        });
        let after_round = move |shared: &Shared<SwitchNode>| {
            // When it has failed there is nothing more to tell, and dropping the teller says so.
            let Ok(mut node) = shared.lock_without_waking() else { return };
            while let Some(event) = node.poll_event() {
                let _ = teller.0.send(Some(event));
            }
        };
        // SAFETY: the node names bytes of its communicators only, which lie on the heap where
        // they are until the communicator is destroyed. That happens in `DataPlane::destroy`,
        // while nothing is being sent (see there); in a failed `create_prepared`, before
        // there is anything to send; and with the node, after its thread has ended: `DataPlane::shared`
        // can only keep the node longer.
        let progress = unsafe { Progress::run(opened, node, AfterRound::new(after_round)) }?;
        let budget = progress.shared().socket_info().receive_budget();
        progress.shared().lock_regardless().set_receive_budget(budget);
        Ok(progress)
    }

    /// Queue pairs that its communicators can have, whatever their sizes.
    pub(crate) fn queue_pairs(&self) -> usize {
        queue_pairs(self.shards.len())
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.shards[0].shared().socket_info().address
    }

    /// Makes a communicator's node, of the shards that have room for it in the one that has the fewest.
    pub(crate) fn create(&mut self, spec: &CommunicatorSpec) -> Result<Created, DataPlaneError> {
        let (mut memory, mut count) = (0, 0);
        let (mut fewest, mut refused) = (None, None);
        for (index, shard) in self.shards.iter().enumerate() {
            let node = shard.shared().lock_without_waking()?;
            match node.check_communicator(spec) {
                Ok(()) => fewest = fewest.into_iter().chain([(node.communicators(), index)]).min(),
                Err(error) => refused = Some(error),
            }
            (memory, count) = (memory + node.memory_used(), count + node.communicators());
        }
        // Each shard knows of its own nodes only.
        let SwitchConfig { max_communicators: limit, max_memory, .. } = self.limits;
        if self.places.contains_key(&spec.id) {
            return Err(CreateError::Exists(spec.id).into());
        }
        if count >= limit {
            return Err(CreateError::TooMany { limit }.into());
        }
        spec.check().map_err(CreateError::from)?;
        let (needed, available) = (spec.memory_bytes(), max_memory.saturating_sub(memory));
        if needed > available {
            return Err(CreateError::Memory { needed, available }.into());
        }
        let Some((_, index)) = fewest else {
            return Err(refused.unwrap_or(CreateError::TooMany { limit }).into());
        };
        let shared = self.shards[index].shared();
        let prepared = PreparedCommunicator::new(spec.clone()).map_err(CreateError::from)?;
        let created = shared.lock()?.create_prepared(shared.now(), prepared)?;
        self.places.insert(spec.id, index);
        Ok(created)
    }

    /// The shard with a communicator's node.
    fn shard_of(&self, communicator: u64) -> Option<&Arc<Shared<SwitchNode>>> {
        Some(self.shards[*self.places.get(&communicator)?].shared())
    }

    /// Connects a communicator to the node above it in its tree.
    pub(crate) fn connect_parent(
        &self,
        communicator: u64,
        parent: &ParentSpec,
    ) -> Result<(), DataPlaneError> {
        let shared = self.shard_of(communicator).ok_or(DataPlaneError::NoUplink)?;
        let mut node = shared.lock()?;
        match node.connect_parent(shared.now(), communicator, parent)? {
            true => Ok(()),
            false => Err(DataPlaneError::NoUplink),
        }
    }

    /// Tells the hosts of a communicator why it ends. [`SwitchEvent::Aborted`] follows when they
    /// have heard. `false` when there is none.
    pub(crate) fn abort(&self, communicator: u64, abort: Abort) -> bool {
        let Some(shared) = self.shard_of(communicator) else { return false };
        let Ok(mut node) = shared.lock() else { return false };
        node.abort_communicator(shared.now(), communicator, abort)
    }

    /// Removes a communicator.
    pub(crate) fn destroy(&mut self, communicator: u64) {
        let Some(index) = self.places.remove(&communicator) else { return };
        let shared = self.shards[index].shared();
        let Ok(mut node) = shared.lock() else { return };
        // The thread may be sending from the slots that are about to be freed. It needs no lock to
        // finish that, and cannot begin another send as long as we hold the node.
        shared.quiesce();
        node.destroy_communicator(shared.now(), communicator);
    }

    /// What all communicators have counted, and when.
    pub(crate) fn counts(&self) -> Result<(u64, Vec<CommunicatorCounts>), Failure> {
        let (mut now, mut counts) = (0, Vec::new());
        for shard in &self.shards {
            let shared = shard.shared();
            let node = shared.lock_without_waking()?;
            now = shared.now().nanos();
            counts.extend(node.counts());
        }
        Ok((now, counts))
    }

    /// The nodes, for who looks at them.
    pub(crate) fn shared(&self) -> impl Iterator<Item = &Arc<Shared<SwitchNode>>> {
        self.shards.iter().map(Progress::shared)
    }

    /// The next event; `None` when a shard no longer runs.
    pub(crate) async fn next_event(&mut self) -> Option<SwitchEvent> {
        self.events.recv().await.flatten()
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.shards.iter().find_map(|shard| shard.shared().failure().cloned())
    }
}

/// Queue pairs that can be promised of so many shards, where a communicator is on one: all but one may be left with as many
/// as are too few by one.
fn queue_pairs(shards: usize) -> usize {
    // Of a node with as many children as there can be, the way up is one more.
    let too_few = FanIn::MAX.get() as usize;
    MAX_QUEUE_PAIRS * shards - too_few * (shards - 1)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use millstream_inc::{ChildSpec, CommunicatorOptions, Ranks};
    use millstream_wire::{Mtu, Psn, Qpn};

    use super::*;

    /// A switch with room for whatever there are queue pairs for.
    fn open(shards: usize) -> DataPlane {
        let process = std::process::id();
        let host = Ipv4Addr::new(127, 64 | (process >> 8) as u8 & 63, process as u8, 9);
        let controller = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let config = RunConfig::new(controller, "switch", host.into());
        let node = SwitchConfig { max_communicators: 1000, ..config.node };
        DataPlane::open(&RunConfig { shards, node, ..config }).unwrap()
    }

    fn spec(id: u64, children: u32) -> CommunicatorSpec {
        let child = |rank| ChildSpec {
            ranks: Ranks::one(rank),
            address: Ipv4Addr::new(127, 0, 0, 2).into(),
            qpn: Qpn::new(0x100 + rank),
            psn: Psn::new(rank),
            is_switch: false,
            receive_share: None,
        };
        CommunicatorSpec {
            id,
            path_mtu: Mtu::B1024,
            segment_bytes: 1024,
            window: 1,
            world: children,
            children: (0..children).map(child).collect(),
            has_parent: false,
            options: CommunicatorOptions::default(),
        }
    }

    #[test]
    fn queue_pairs_that_are_promised_are_there_for_nodes_of_any_size() {
        assert_eq!([1, 2, 4].map(queue_pairs), [4096, 8128, 16192]);
        // Each in the shard that has the fewest nodes, of those with room.
        let ports = FanIn::MAX.get() as usize + 1;
        let mut free = [MAX_QUEUE_PAIRS; 4];
        for _ in 0..queue_pairs(4) / ports {
            let most = free.iter_mut().max().unwrap();
            *most = most.checked_sub(ports).expect("it has room");
        }
    }

    #[test]
    fn a_node_is_in_the_shard_with_the_fewest_of_those_with_queue_pairs_for_it() {
        let mut switch = open(2);
        let mut shard_of = |id, children| {
            switch.create(&spec(id, children)).unwrap();
            switch.places[&id]
        };
        // All that are large are in the first shard: of 4,096 queue pairs one is left there.
        for id in (0..130).step_by(2) {
            assert_eq!([shard_of(id, 63), shard_of(id + 1, 1)], [0, 1], "{id}");
        }
        // There are as many in both, and then one less where there is one queue pair.
        assert_eq!([(130, 63), (131, 2), (132, 1)].map(|(id, n)| shard_of(id, n)), [1, 1, 0]);
    }
}
