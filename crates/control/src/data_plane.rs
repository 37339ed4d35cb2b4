//! The switch's node on its progress thread.

use std::net::IpAddr;
use std::sync::Arc;

use millstream_inc::{
    Abort, CommunicatorCounts, CommunicatorSpec, CreateError, Created, ParentSpec, SwitchEvent,
    SwitchNode,
};
use millstream_net::{Failure, OpenError, Progress, ProgressConfig, Shared};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::switch::SwitchConfig;

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

/// A running switch.
pub(crate) struct DataPlane {
    progress: Progress<SwitchNode>,
    events: mpsc::UnboundedReceiver<SwitchEvent>,
}

impl DataPlane {
    pub(crate) fn open(switch: &SwitchConfig) -> Result<Self, OpenError> {
        let config = ProgressConfig {
            driver: switch.driver,
            segmentation_offload: switch.segmentation_offload,
            name: "switch".to_owned(),
            ..ProgressConfig::new(switch.node.address)
        };
        // Unbounded, but a communicator has three events at most, and their number is limited.
        let (sender, events) = mpsc::unbounded_channel();
        let after_round = move |shared: &Shared<SwitchNode>| {
            // When it has failed there is nothing more to tell, and dropping the sender says so.
            let Ok(mut node) = shared.lock_without_waking() else { return };
            while let Some(event) = node.poll_event() {
                let _ = sender.send(event);
            }
        };
        // SAFETY: the node names bytes of its communicators only, which lie on the heap where
        // they are until the communicator is destroyed. That happens in `DataPlane::destroy`,
        // while nothing is being sent (see there); in a failed `create_communicator`, before
        // there is anything to send; and with the node, after its thread has ended: `DataPlane::shared`
        // can only keep the node longer.
        let progress =
            unsafe { Progress::start(config, SwitchNode::new(switch.node.clone()), after_round)? };
        Ok(Self { progress, events })
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.progress.shared().socket_info().address
    }

    pub(crate) fn create(&self, spec: &CommunicatorSpec) -> Result<Created, DataPlaneError> {
        let shared = self.progress.shared();
        let mut node = shared.lock()?;
        Ok(node.create_communicator(shared.now(), spec)?)
    }

    /// Connects a communicator to the node above it in its tree.
    pub(crate) fn connect_parent(
        &self,
        communicator: u64,
        parent: &ParentSpec,
    ) -> Result<(), DataPlaneError> {
        let shared = self.progress.shared();
        let mut node = shared.lock()?;
        match node.connect_parent(shared.now(), communicator, parent)? {
            true => Ok(()),
            false => Err(DataPlaneError::NoUplink),
        }
    }

    /// Tells the hosts of a communicator why it ends. [`SwitchEvent::Aborted`] follows when they
    /// have heard. `false` when there is none.
    pub(crate) fn abort(&self, communicator: u64, abort: Abort) -> bool {
        let shared = self.progress.shared();
        let Ok(mut node) = shared.lock() else { return false };
        node.abort_communicator(shared.now(), communicator, abort)
    }

    /// Removes a communicator.
    pub(crate) fn destroy(&self, communicator: u64) {
        let shared = self.progress.shared();
        let Ok(mut node) = shared.lock() else { return };
        // The thread may be sending from the slots that are about to be freed. It needs no lock to
        // finish that, and cannot begin another send as long as we hold the node.
        shared.quiesce();
        node.destroy_communicator(shared.now(), communicator);
    }

    /// What all communicators have counted, and when.
    pub(crate) fn counts(&self) -> Result<(u64, Vec<CommunicatorCounts>), Failure> {
        let shared = self.progress.shared();
        let node = shared.lock_without_waking()?;
        Ok((shared.now().nanos(), node.counts()))
    }

    /// The node, for who looks at it.
    pub(crate) const fn shared(&self) -> &Arc<Shared<SwitchNode>> {
        self.progress.shared()
    }

    /// The next event; `None` when the node no longer runs.
    pub(crate) async fn next_event(&mut self) -> Option<SwitchEvent> {
        self.events.recv().await
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.progress.shared().failure().cloned()
    }
}
