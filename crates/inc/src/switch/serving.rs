//! Between what a controller and a switch say to each other and what the switch's node takes and tells.

use core::net::IpAddr;

use millstream_wire::Mtu;

use super::{Created, SwitchEvent};
use crate::protocol::{
    FromController, SwitchChild, SwitchEdge, SwitchReport, SwitchUplink, ToController,
};
use crate::spec::{ChildSpec, CommunicatorSpec};

impl From<SwitchChild> for ChildSpec {
    fn from(child: SwitchChild) -> Self {
        let SwitchChild { ranks, address, qpn, psn, is_switch } = child;
        Self { ranks, address, qpn, psn, is_switch }
    }
}

impl CommunicatorSpec {
    /// The node that a controller asks a switch for, if it does by this message.
    pub fn asked_for(message: &FromController) -> Option<Self> {
        let &FromController::CreateCommunicator {
            communicator: id,
            path_mtu,
            segment_bytes,
            window,
            world,
            has_parent,
            ref children,
            options,
            ..
        } = message
        else {
            return None;
        };
        let children = children.iter().cloned().map(Into::into).collect();
        Some(Self { id, path_mtu, segment_bytes, window, world, has_parent, children, options })
    }
}

/// What the controller is told of a node that is not made, as packets from `own` to a neighbour are shorter than its path
/// MTU; `ways` has the path MTUs of neighbours.
pub fn packets_too_long(
    communicator: u64,
    path_mtu: Mtu,
    own: IpAddr,
    ways: impl Iterator<Item = (Mtu, IpAddr)>,
) -> Option<ToController> {
    let (shorter, other) = ways.min().filter(|&(shortest, _)| shortest < path_mtu)?;
    let reason = format!(
        "packets from {own} to {other} hold at most {shorter} bytes, as the interface's MTU is, and those of \
         the communicator {path_mtu}"
    );
    Some(ToController::CommunicatorFailed { communicator, reason, path_mtu: Some(shorter) })
}

impl Created {
    /// What the controller is told of a node that was made.
    pub fn message(self, communicator: u64) -> ToController {
        let edge = |it: super::Edge| SwitchEdge { rank: it.rank, qpn: it.qpn, psn: it.psn };
        let edges = self.edges.into_iter().map(edge).collect();
        let uplink = self.uplink.map(|it| SwitchUplink { qpn: it.qpn, psn: it.psn });
        ToController::CommunicatorCreated { communicator, edges, uplink }
    }
}

impl SwitchEvent {
    /// Of which communicator it is.
    pub const fn communicator(&self) -> u64 {
        match *self {
            Self::ChildLost { communicator, .. }
            | Self::ParentLost { communicator, .. }
            | Self::Mismatch { communicator, .. }
            | Self::Overdue { communicator, .. }
            | Self::Violation { communicator, .. }
            | Self::Aborted { communicator, .. } => communicator,
        }
    }

    /// What the controller is told of it, if something. `above` is the address of the switch above.
    pub fn report(&self, above: Option<IpAddr>) -> Option<SwitchReport> {
        Some(match *self {
            Self::ChildLost { rank, status, .. } => {
                let detail = format!("it does not answer the switch: {status}");
                SwitchReport::PeerLost { rank, detail, switch: None }
            }
            Self::Mismatch { mismatch, .. } => {
                let detail = mismatch.to_string();
                SwitchReport::Mismatch { rank: mismatch.rank, detail }
            }
            Self::Violation { rank, violation, .. } => {
                SwitchReport::Violation { rank, detail: violation.to_string() }
            }
            Self::Overdue { overdue, .. } => {
                // Where nobody is to blame, the rank that waits no longer tells the controller.
                let &rank = overdue.named().first()?;
                SwitchReport::Overdue { rank, detail: overdue.to_string() }
            }
            Self::ParentLost { status, .. } => {
                let detail = format!("it does not answer the switch below: {status}");
                SwitchReport::ParentLost { address: above?, detail }
            }
            // What is left is to destroy it.
            Self::Aborted { .. } => return None,
        })
    }
}
