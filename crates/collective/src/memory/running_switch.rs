//! The switch of this process, which sends from memory that it must not outlive.

use std::sync::Arc;

use millstream_inc::SwitchNode;
use millstream_net::{Hook, OpenError, Opened, Progress, Shared};

/// The node of a switch of this process, at work. Dropped, it stops.
pub(crate) struct RunningSwitch(Progress<SwitchNode>);

impl RunningSwitch {
    pub(crate) fn start(
        opened: Opened,
        node: SwitchNode,
        hook: impl Hook<SwitchNode> + 'static,
    ) -> Result<Self, OpenError> {
        // SAFETY: the node names bytes of its communicators only, which lie on the heap where they are until the
        // communicator is destroyed. That happens in `destroy`, while nothing is being sent (see there); in a failed
        // `create_prepared`, before there is anything to send; and with the node, after its thread has ended.
        // `shared` gives no way to destroy one without a lock on the node, and its only callers are in `hosted`.
        Ok(Self(unsafe { Progress::run(opened, node, hook)? }))
    }

    /// The node, for all but the removal of communicators.
    pub(crate) fn shared(&self) -> &Arc<Shared<SwitchNode>> {
        self.0.shared()
    }

    /// Removes a communicator.
    pub(crate) fn destroy(&self, communicator: u64) {
        let shared = self.shared();
        let Ok(mut node) = shared.lock() else { return };
        // The thread may be sending from the slots that are about to be freed. It needs no lock to finish that, and
        // cannot begin another send as long as we hold the node.
        shared.quiesce();
        node.destroy_communicator(shared.now(), communicator);
    }
}
