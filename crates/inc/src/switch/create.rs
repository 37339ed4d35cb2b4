//! Making communicators and removing them.

use millstream_roce::{
    Access, CompletionQueueId, Instant, QueuePairAttributes, QueuePairCapabilities,
    QueuePairConfig, QueuePairState,
};
use millstream_wire::{Psn, Qpn};
use thiserror::Error;

use super::SwitchNode;
use crate::spec::{ChildSpec, CommunicatorSpec, ParentSpec, RECEIVES_PER_CHILD, SpecError};

/// The switch's end of the connection to one child.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Edge {
    /// The child: the lowest rank below it.
    pub rank: u32,
    /// The switch's queue pair for it.
    pub qpn: Qpn,
    /// The first packet sequence number that the switch sends to it.
    pub psn: Psn,
}

/// A node's end of the connection to the node above.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Uplink {
    /// The node's queue pair.
    pub qpn: Qpn,
    /// The first packet sequence number that it sends.
    pub psn: Psn,
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
    /// A queue pair could not be connected.
    #[error("the queue pair for rank {rank} cannot be connected: {error}")]
    Connect {
        /// The child.
        rank: u32,
        /// Why.
        error: millstream_roce::ModifyError,
    },
}

impl SwitchNode {
    /// Makes a communicator, ready for its children, and returns its edges in the order of ranks.
    pub fn create_communicator(
        &mut self,
        now: Instant,
        spec: &CommunicatorSpec,
    ) -> Result<Created, CreateError> {
        spec.check()?;
        if self.communicators.contains_key(&spec.id) {
            return Err(CreateError::Exists(spec.id));
        }
        if self.communicators.len() >= self.config.max_communicators {
            return Err(CreateError::TooMany { limit: self.config.max_communicators });
        }
        let (needed, available) =
            (spec.memory_bytes(), self.config.max_memory.saturating_sub(self.memory_used));
        if needed > available {
            return Err(CreateError::Memory { needed, available });
        }
        let requests = spec.send_requests() as usize + RECEIVES_PER_CHILD;
        let queue = self.endpoint.create_completion_queue(spec.children.len() * requests)?;
        let index = self.endpoint.memory_mut().create(spec);
        if self.queues.len() <= index as usize {
            self.queues.resize(index as usize + 1, None);
        }
        self.queues[index as usize] = Some(queue);
        self.communicators.insert(spec.id, index);
        self.memory_used += needed;
        let edges = self.create_edges(now, spec, index, queue);
        if edges.is_err() {
            self.destroy(spec.id);
        }
        Ok(Created { edges: edges?, uplink: None })
    }

    fn create_edges(
        &mut self,
        now: Instant,
        spec: &CommunicatorSpec,
        index: u32,
        queue: CompletionQueueId,
    ) -> Result<Vec<Edge>, CreateError> {
        let mut children = spec.children.clone();
        children.sort_unstable_by_key(|child| child.ranks.first());
        let mut edges = Vec::with_capacity(children.len());
        for (number, child) in children.iter().enumerate() {
            let rank = child.ranks.first().unwrap_or(0);
            let Some(communicator) = self.endpoint.memory_mut().get_mut(index) else { break };
            let receives: [_; RECEIVES_PER_CHILD] =
                core::array::from_fn(|buffer| communicator.receive_request(number, buffer));
            let config = QueuePairConfig::new(
                communicator.children[number].domain,
                queue,
                QueuePairCapabilities::new(spec.send_requests() as usize, RECEIVES_PER_CHILD),
            );
            let qpn = self.endpoint.create_queue_pair(&config)?;
            self.edges.insert(qpn, (index, number));
            if let Some(communicator) = self.endpoint.memory_mut().get_mut(index) {
                communicator.children[number].qpn = qpn;
            }
            let psn = Psn::from_extended(self.random());
            for attributes in self.path_to(child, spec, psn) {
                self.endpoint
                    .modify_queue_pair(now, qpn, &attributes)
                    .map_err(|error| CreateError::Connect { rank, error })?;
            }
            for receive in &receives {
                let posted = self.endpoint.post_receive(qpn, receive);
                debug_assert_eq!(posted, Ok(()), "there is room for as many as the queue holds");
            }
            edges.push(Edge { rank, qpn, psn });
        }
        Ok(edges)
    }

    /// The steps that connect a queue pair to a child.
    fn path_to(
        &self,
        child: &ChildSpec,
        spec: &CommunicatorSpec,
        psn: Psn,
    ) -> [QueuePairAttributes; 3] {
        let none = QueuePairAttributes::default();
        [
            QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                access: Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToReceive),
                remote_address: Some(child.address),
                path_mtu: Some(spec.path_mtu),
                destination_qpn: Some(child.qpn),
                receive_psn: Some(child.psn),
                responder_resources: Some(0),
                // 0.64 ms: a child that sends descriptors faster than it may can wait.
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
                ..none
            },
        ]
    }

    /// Connects a node to the one above, which knows the queue pair of its [`Uplink`]. `false` when there is
    /// no such node, or it is the root.
    pub fn connect_parent(
        &mut self,
        _now: Instant,
        _id: u64,
        _parent: &ParentSpec,
    ) -> Result<bool, CreateError> {
        Ok(false)
    }

    /// Removes a communicator at once; hosts that were not told hear nothing more. `false` when
    /// there is none.
    pub fn destroy_communicator(&mut self, _now: Instant, id: u64) -> bool {
        self.destroy(id)
    }

    fn destroy(&mut self, id: u64) -> bool {
        let Some(index) = self.communicators.remove(&id) else { return false };
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
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
