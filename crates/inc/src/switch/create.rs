//! Making communicators and removing them.

use millstream_roce::{
    Access, CompletionQueueId, Instant, ProtectionDomainId, QueuePairAttributes,
    QueuePairCapabilities, QueuePairConfig, QueuePairState,
};
use millstream_wire::{Mtu, Psn, Qpn};
use thiserror::Error;

use super::{MAX_QUEUE_PAIRS, SwitchNode};
use crate::communicator::{Communicator, Progress};
use crate::mix::{STEP, mix};
use crate::slots::Slots;
use crate::spec::{
    ACKNOWLEDGEMENT_DELAY, ChildSpec, CommunicatorSpec, ParentSpec, SpecError, send_window_up,
};

/// The switch's end of the connection to one child.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Edge {
    /// The child: the lowest rank below it.
    pub rank: u32,
    /// The switch's queue pair for it.
    pub qpn: Qpn,
    /// The first packet sequence number that the switch sends to it.
    pub psn: Psn,
    /// Bytes that the other end may have in flight to it; none where the switch has no limit.
    pub receive_share: Option<u32>,
}

/// A node's end of the connection to the node above.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Uplink {
    /// The node's queue pair.
    pub qpn: Qpn,
    /// The first packet sequence number that it sends.
    pub psn: Psn,
    /// Bytes that the other end may have in flight to it; none where the switch has no limit.
    pub receive_share: Option<u32>,
}

/// A node that was made.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Created {
    /// Its edges, in the order of the lowest ranks below them.
    pub edges: Vec<Edge>,
    /// Its way up, unless it is the root.
    pub uplink: Option<Uplink>,
}

/// Why a communicator could not be made. Nothing is left of it.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum CreateError {
    /// The specification is no good.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// There is one with this number.
    #[error("communicator {0} exists already")]
    Exists(u64),
    /// The switch has as many as it can.
    #[error("the switch has its {limit} communicators already")]
    TooMany {
        /// How many.
        limit: usize,
    },
    /// It has more ports than the switch has queue pairs left.
    #[error(
        "the communicator needs {needed} queue pairs and the switch has {available} left of \
         {MAX_QUEUE_PAIRS}: let it have fewer children, or start the switch with more shards"
    )]
    QueuePairs {
        /// How many ports it has.
        needed: usize,
        /// What is left.
        available: usize,
    },
    /// It would take more memory than is left.
    #[error(
        "the slots and queues need {needed} bytes and the switch has {available} left: \
         use a smaller window or segment, or raise max_memory"
    )]
    Memory {
        /// What the specification takes.
        needed: u64,
        /// What is left.
        available: u64,
    },
    /// The device refused a queue.
    #[error("the switch's device cannot serve the communicator: {0}")]
    Device(#[from] millstream_roce::CreateError),
    /// The queue pair to the switch above could not be connected.
    #[error("the queue pair to the switch above cannot be connected: {error}")]
    ConnectParent {
        /// Why.
        error: millstream_roce::ModifyError,
    },
    /// A queue pair could not be connected.
    #[error("the queue pair for rank {rank} cannot be connected: {error}")]
    Connect {
        /// The child.
        rank: u32,
        /// Why.
        error: millstream_roce::ModifyError,
    },
}

/// A communicator to be made, with its slots, which are megabytes that have to be cleared: that needs no node, which others
/// may wait for.
#[derive(Debug)]
pub struct PreparedCommunicator {
    spec: CommunicatorSpec,
    slots: Slots,
}

impl PreparedCommunicator {
    /// What [`SwitchNode::check_communicator`] has found to fit. The error says what is wrong with the specification.
    pub fn new(spec: CommunicatorSpec) -> Result<Self, SpecError> {
        spec.check()?;
        let slots = Slots::of(&spec);
        Ok(Self { spec, slots })
    }
}

impl SwitchNode {
    /// Makes a communicator, ready for its children, and returns its edges in the order of ranks.
    pub fn create_communicator(
        &mut self,
        now: Instant,
        spec: &CommunicatorSpec,
    ) -> Result<Created, CreateError> {
        self.check_communicator(spec)?;
        self.create_prepared(now, PreparedCommunicator::new(spec.clone())?)
    }

    /// Whether a communicator could be made now, as far as this node's limits say.
    pub fn check_communicator(&self, spec: &CommunicatorSpec) -> Result<(), CreateError> {
        spec.check()?;
        if self.communicators.contains_key(&spec.id) {
            return Err(CreateError::Exists(spec.id));
        }
        if self.communicators.len() >= self.config.max_communicators {
            return Err(CreateError::TooMany { limit: self.config.max_communicators });
        }
        let ports = spec.children.len() + usize::from(spec.has_parent);
        let available = MAX_QUEUE_PAIRS.saturating_sub(self.edges.len());
        if ports > available {
            return Err(CreateError::QueuePairs { needed: ports, available });
        }
        let (needed, available) =
            (spec.memory_bytes(), self.config.max_memory.saturating_sub(self.memory_used));
        if needed > available {
            return Err(CreateError::Memory { needed, available });
        }
        Ok(())
    }

    /// As [`SwitchNode::create_communicator`], with slots that are there.
    pub fn create_prepared(
        &mut self,
        now: Instant,
        prepared: PreparedCommunicator,
    ) -> Result<Created, CreateError> {
        let PreparedCommunicator { spec, slots } = prepared;
        let spec = &spec;
        self.check_communicator(spec)?;
        // Room for all requests of all ports.
        let sends = spec.send_requests() as usize;
        let below = spec.children.iter().map(|_| spec.child_receives());
        let receives = below.chain(spec.has_parent.then(|| spec.parent_receives()));
        let requests = receives.map(|receives| sends + receives).sum();
        let queue = self.endpoint.create_completion_queue(requests)?;
        let index = self.endpoint.memory_mut().create(spec, slots);
        if self.queues.len() <= index as usize {
            self.queues.resize(index as usize + 1, None);
        }
        self.queues[index as usize] = Some(queue);
        self.communicators.insert(spec.id, index);
        self.memory_used += spec.memory_bytes();
        let created = self.create_ports(now, spec, index, queue);
        if created.is_err() {
            self.destroy(spec.id);
        }
        created
    }

    fn create_ports(
        &mut self,
        now: Instant,
        spec: &CommunicatorSpec,
        index: u32,
        queue: CompletionQueueId,
    ) -> Result<Created, CreateError> {
        let mut children = spec.children.clone();
        children.sort_unstable_by_key(|child| child.ranks.first());
        let receive_share = self.grant_shares(spec);
        let mut edges = Vec::with_capacity(children.len());
        for (number, child) in children.iter().enumerate() {
            let rank = child.ranks.first().unwrap_or_default();
            let qpn = self.create_port(spec, index, queue, number)?;
            let psn = Psn::from_extended(self.random());
            let &ChildSpec { address, receive_share: share_of_child, .. } = child;
            let (child_qpn, child_psn) = (child.qpn, child.psn);
            let other = ParentSpec {
                address,
                qpn: child_qpn,
                psn: child_psn,
                receive_share: share_of_child,
            };
            self.connect(now, qpn, &other, spec.path_mtu, psn)
                .map_err(|error| CreateError::Connect { rank, error })?;
            self.post_receives(index, number);
            edges.push(Edge { rank, qpn, psn, receive_share });
        }
        let mut uplink = None;
        if spec.has_parent {
            let qpn = self.create_port(spec, index, queue, children.len())?;
            let psn = Psn::from_extended(self.random());
            let way_up = Uplink { qpn, psn, receive_share };
            self.uplinks.insert(spec.id, (way_up, spec.path_mtu));
            uplink = Some(way_up);
        }
        Ok(Created { edges, uplink })
    }

    /// The part of the receive buffer for what comes by each port: all of them send at the same time.
    fn grant_shares(&mut self, spec: &CommunicatorSpec) -> Option<u32> {
        let ports = spec.children.len() + usize::from(spec.has_parent);
        let share = self.endpoint.grant_receive_shares(ports, spec.path_mtu)?;
        self.granted.insert(spec.id, share * ports as u64);
        Some(u32::try_from(share).unwrap_or(u32::MAX))
    }

    /// Makes the queue pair of a port.
    fn create_port(
        &mut self,
        spec: &CommunicatorSpec,
        index: u32,
        queue: CompletionQueueId,
        port: usize,
    ) -> Result<Qpn, CreateError> {
        let sends = spec.send_requests() as usize;
        let memory = self.endpoint.memory();
        let (domain, receives) = memory
            .get(index)
            .map_or((ProtectionDomainId(0), 0), |it| (it.domain(port), it.receives(port)));
        let capabilities = QueuePairCapabilities::new(sends, receives);
        let config = QueuePairConfig {
            acknowledgement_delay: ACKNOWLEDGEMENT_DELAY,
            ..QueuePairConfig::new(domain, queue, capabilities)
        };
        let qpn = self.endpoint.create_queue_pair(&config)?;
        self.edges.insert(qpn, (index, port));
        if let Some(communicator) = self.endpoint.memory_mut().get_mut(index) {
            communicator.set_qpn(port, qpn);
        }
        Ok(qpn)
    }

    /// Posts the receive requests of a port.
    fn post_receives(&mut self, index: u32, port: usize) {
        let Some(communicator) = self.endpoint.memory().get(index) else { return };
        let qpn = communicator.qpn(port);
        // Of an uplink they are all the same, and of what comes without descriptors.
        let requests: Vec<_> = (0..communicator.receives(port))
            .map(|buffer| {
                let same = communicator.is_uplink(port) || communicator.is_plain();
                let buffer = if same { 0 } else { buffer };
                communicator.receive_request(port, buffer)
            })
            .collect();
        for request in &requests {
            let posted = self.endpoint.post_receive(qpn, request);
            debug_assert_eq!(posted, Ok(()), "there is room for as many as the queue holds");
        }
    }

    /// Connects a queue pair.
    fn connect(
        &mut self,
        now: Instant,
        qpn: Qpn,
        other: &ParentSpec,
        path_mtu: Mtu,
        psn: Psn,
    ) -> Result<(), millstream_roce::ModifyError> {
        for attributes in self.path_to(other, path_mtu, psn) {
            self.endpoint.modify_queue_pair(now, qpn, &attributes)?;
        }
        Ok(())
    }

    /// The steps that connect a queue pair to the one at the other end.
    fn path_to(&self, other: &ParentSpec, path_mtu: Mtu, psn: Psn) -> [QueuePairAttributes; 3] {
        let none = QueuePairAttributes::default();
        [
            QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                access: Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToReceive),
                remote_address: Some(other.address),
                path_mtu: Some(path_mtu),
                destination_qpn: Some(other.qpn),
                receive_psn: Some(other.psn),
                responder_resources: Some(0),
                // 0.64 ms: a child that sends faster than its messages are taken can wait.
                minimum_rnr_timer: Some(12),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToSend),
                send_psn: Some(psn),
                timeout: Some(self.config.timeout),
                retry_count: Some(self.config.retry_count),
                // A host posts its receives before it sends what they answer, so a host that is
                // not ready stays so. Not 7, which would be for ever.
                rnr_retry: Some(6),
                initiator_depth: Some(0),
                send_window_bytes: other.receive_share,
                ..none
            },
        ]
    }

    /// Connects a node to the one above, which knows the queue pair of its [`Uplink`]. `false` when there is
    /// no such node, it is the root, connected already, or aborted.
    pub fn connect_parent(
        &mut self,
        now: Instant,
        id: u64,
        parent: &ParentSpec,
    ) -> Result<bool, CreateError> {
        let Some(&index) = self.communicators.get(&id) else { return Ok(false) };
        let aborted = self.endpoint.memory().get(index).and_then(Communicator::aborted);
        let Some(&(way_up, path_mtu)) = self.uplinks.get(&id) else { return Ok(false) };
        let Uplink { qpn, psn, receive_share } = way_up;
        if aborted.is_some() {
            return Ok(false);
        }
        let receive_share = send_window_up(parent.receive_share, receive_share);
        let parent = ParentSpec { receive_share, ..*parent };
        self.connect(now, qpn, &parent, path_mtu, psn)
            .map_err(|error| CreateError::ConnectParent { error })?;
        self.uplinks.remove(&id);
        let port = self.endpoint.memory().get(index).map_or(0, |it| it.ports() - 1);
        self.post_receives(index, port);
        // Children may have been faster.
        let memory = self.endpoint.memory_mut();
        if let Some(communicator) = memory.get_mut(index) {
            communicator.connected();
            memory.mark(index, Progress::Ready);
        }
        self.settle(now);
        Ok(true)
    }

    /// Removes a communicator at once; hosts that were not told hear nothing more. `false` when
    /// there is none.
    pub fn destroy_communicator(&mut self, _now: Instant, id: u64) -> bool {
        self.destroy(id)
    }

    fn destroy(&mut self, id: u64) -> bool {
        let Some(index) = self.communicators.remove(&id) else { return false };
        self.uplinks.remove(&id);
        self.ending.retain(|&(_, ending)| ending != index);
        if let Some(bytes) = self.granted.remove(&id) {
            self.endpoint.withdraw_receive_share(bytes);
        }
        self.edges.retain(|&qpn, &mut (other, _)| {
            if other == index {
                self.endpoint.destroy_queue_pair(qpn);
            }
            other != index
        });
        if let Some(queue) = self.queues[index as usize].take() {
            let destroyed = self.endpoint.destroy_completion_queue(queue);
            debug_assert_eq!(destroyed, Ok(()), "its queue pairs are gone");
        }
        if let Some(communicator) = self.endpoint.memory().get(index) {
            self.memory_used -= communicator.memory_bytes();
        }
        self.endpoint.memory_mut().destroy(index);
        true
    }

    /// SplitMix64, as the endpoint's queue pair numbers.
    fn random(&mut self) -> u64 {
        let state = self.random;
        self.random = state.wrapping_add(STEP);
        mix(state)
    }
}

#[cfg(test)]
mod tests {
    use core::net::Ipv4Addr;

    use super::*;
    use crate::SwitchConfig;

    #[test]
    fn no_more_is_in_flight_to_an_other_end_than_that_has_room_for() {
        let address = Ipv4Addr::LOCALHOST.into();
        let switch = SwitchNode::new(SwitchConfig::new(address, 1));
        for receive_share in [None, Some(70_000)] {
            let (qpn, psn) = (Qpn::new(5), Psn::new(6));
            let other = ParentSpec { address, qpn, psn, receive_share };
            let steps = switch.path_to(&other, Mtu::B1024, psn);
            let windows = steps.map(|step| step.send_window_bytes);
            assert_eq!(windows, [None, None, receive_share]);
        }
    }
}
