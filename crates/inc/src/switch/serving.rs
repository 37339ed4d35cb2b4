//! Between what a controller and a switch say to each other and what the switch's node takes and tells.

use core::net::IpAddr;

use millstream_roce::CompletionStatus;
use millstream_wire::Mtu;

use super::{Created, SwitchEvent, broken_by};
use crate::protocol::{
    FromController, SwitchChild, SwitchEdge, SwitchReport, SwitchUplink, ToController,
};
use crate::spec::{ChildSpec, CommunicatorSpec};

impl From<SwitchChild> for ChildSpec {
    fn from(child: SwitchChild) -> Self {
        let SwitchChild { ranks, address, qpn, psn, is_switch, receive_share } = child;
        Self { ranks, address, qpn, psn, is_switch, receive_share }
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
        let edge = |it: super::Edge| {
            let super::Edge { rank, qpn, psn, receive_share } = it;
            SwitchEdge { rank, qpn, psn, receive_share }
        };
        let way_up = |it: super::Uplink| {
            let super::Uplink { qpn, psn, receive_share } = it;
            SwitchUplink { qpn, psn, receive_share }
        };
        let edges = self.edges.into_iter().map(edge).collect();
        let uplink = self.uplink.map(way_up);
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
            // The violation that follows says what it has done. None follows of a switch.
            Self::ChildLost { is_switch: false, status, .. } if broken_by(status).is_some() => {
                return None;
            }
            Self::ChildLost { rank, status, .. } => {
                let detail = how_lost("the switch", status);
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
                let detail = how_lost("the switch below", status);
                SwitchReport::ParentLost { address: above?, detail }
            }
            // What is left is to destroy it.
            Self::Aborted { .. } => return None,
        })
    }
}

/// How the connection of `switch` to one that is lost has ended, for people.
fn how_lost(switch: &str, status: CompletionStatus) -> String {
    match status {
        CompletionStatus::RetryExceeded => format!("it does not answer {switch}: {status}"),
        _ => format!("its connection to {switch} broke: {status}"),
    }
}

#[cfg(test)]
mod tests {
    use core::net::Ipv4Addr;

    use millstream_wire::{Psn, Qpn};

    use super::*;
    use crate::abort::{Abort, Mismatch, Overdue, Violation};
    use crate::descriptor::Field;
    use crate::switch::{Edge, Uplink};
    use crate::{CommunicatorOptions, Ranks};

    const fn ip(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
    }

    #[test]
    fn a_node_is_made_as_it_was_asked_for() {
        let child = |rank: u32, is_switch| {
            let (address, qpn, psn) = (ip(rank as u8), Qpn::new(100 + rank), Psn::new(rank));
            let ranks = Ranks::one(rank);
            let asked = SwitchChild {
                ranks: ranks.clone(),
                address,
                qpn,
                psn,
                is_switch,
                receive_share: Some(rank << 16),
            };
            (
                asked,
                ChildSpec { ranks, address, qpn, psn, is_switch, receive_share: Some(rank << 16) },
            )
        };
        let (asked, children): (Vec<_>, Vec<_>) =
            [child(0, false), child(1, true)].into_iter().unzip();
        let options = CommunicatorOptions { reproducible: true, plain: false };
        let message = FromController::CreateCommunicator {
            communicator: 9,
            group: [1, 2],
            path_mtu: Mtu::B1024,
            segment_bytes: 4096,
            window: 8,
            world: 5,
            has_parent: true,
            children: asked,
            tree: 1,
            options,
        };
        let spec = CommunicatorSpec {
            id: 9,
            path_mtu: Mtu::B1024,
            segment_bytes: 4096,
            window: 8,
            world: 5,
            children,
            has_parent: true,
            options,
        };
        assert_eq!(CommunicatorSpec::asked_for(&message), Some(spec));
        assert_eq!(CommunicatorSpec::asked_for(&FromController::Ping), None);
    }

    #[test]
    fn a_controller_is_told_which_way_takes_shorter_packets_only() {
        let told = |ways: &[(Mtu, IpAddr)]| {
            let ways = ways.iter().copied();
            match packets_too_long(9, Mtu::B2048, ip(1), ways) {
                Some(ToController::CommunicatorFailed { communicator: 9, reason, path_mtu }) => {
                    path_mtu.map(|mtu| (mtu, reason))
                }
                None => None,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(told(&[]), None);
        assert_eq!(told(&[(Mtu::B2048, ip(2)), (Mtu::B4096, ip(3))]), None);
        let reason = "packets from 10.0.0.1 to 10.0.0.4 hold at most 512 bytes, as the interface's MTU is, and \
                      those of the communicator 2048";
        let shortest = Some((Mtu::B512, reason.to_owned()));
        let ways = [(Mtu::B1024, ip(2)), (Mtu::B4096, ip(3)), (Mtu::B512, ip(4))];
        assert_eq!(told(&ways), shortest);
    }

    #[test]
    fn what_was_made_is_told_with_both_ways() {
        let (qpn, psn) = (Qpn::new(7), Psn::new(8));
        let edges = vec![Edge { rank: 3, qpn, psn, receive_share: Some(70_000) }];
        let up = Uplink { qpn: Qpn::new(9), psn: Psn::new(10), receive_share: Some(80_000) };
        for uplink in [None, Some(up)] {
            let message = Created { edges: edges.clone(), uplink }.message(5);
            let edges = vec![SwitchEdge { rank: 3, qpn, psn, receive_share: Some(70_000) }];
            let uplink = uplink.map(|it| SwitchUplink {
                qpn: it.qpn,
                psn: it.psn,
                receive_share: Some(80_000),
            });
            let wanted = ToController::CommunicatorCreated { communicator: 5, edges, uplink };
            assert_eq!(message, wanted);
        }
    }

    #[test]
    fn what_ends_a_communicator_is_reported_with_who_it_was() {
        let (communicator, status) = (5, CompletionStatus::RetryExceeded);
        let silent = "retry count exceeded: the peer does not answer";
        let field = Field::Count;
        let mismatch =
            Mismatch { sequence: 1, rank: 2, reference: 0, field, expected: 10, found: 12 };
        let violation = Violation::Window;
        let overdue = |ranks: &[u32]| Overdue::of(1, ranks.iter().copied());
        let broken = CompletionStatus::RemoteAccess;
        let child_lost =
            |is_switch, status| SwitchEvent::ChildLost { communicator, rank: 3, is_switch, status };
        let peer_lost =
            |detail: String| Some(SwitchReport::PeerLost { rank: 3, detail, switch: None });
        let events = [
            (
                child_lost(false, status),
                peer_lost(format!("it does not answer the switch: {silent}")),
            ),
            // The violation follows.
            (child_lost(false, broken), None),
            (child_lost(false, CompletionStatus::Flushed), None),
            (
                child_lost(true, status),
                peer_lost(format!("it does not answer the switch: {silent}")),
            ),
            (
                child_lost(true, broken),
                peer_lost(format!("its connection to the switch broke: {broken}")),
            ),
            (
                SwitchEvent::ParentLost { communicator, status },
                Some(SwitchReport::ParentLost {
                    address: ip(1),
                    detail: format!("it does not answer the switch below: {silent}"),
                }),
            ),
            (
                SwitchEvent::ParentLost { communicator, status: broken },
                Some(SwitchReport::ParentLost {
                    address: ip(1),
                    detail: format!("its connection to the switch below broke: {broken}"),
                }),
            ),
            (
                SwitchEvent::Mismatch { communicator, mismatch },
                Some(SwitchReport::Mismatch { rank: 2, detail: mismatch.to_string() }),
            ),
            (
                SwitchEvent::Violation { communicator, rank: 4, violation },
                Some(SwitchReport::Violation { rank: 4, detail: violation.to_string() }),
            ),
            (
                SwitchEvent::Overdue { communicator, overdue: overdue(&[6, 7]) },
                Some(SwitchReport::Overdue { rank: 6, detail: overdue(&[6, 7]).to_string() }),
            ),
            // Nobody is to blame: the rank that waits no longer says it.
            (SwitchEvent::Overdue { communicator, overdue: overdue(&[]) }, None),
            (SwitchEvent::Aborted { communicator, abort: Abort::ParentLost }, None),
        ];
        for (event, report) in events {
            assert_eq!(event.communicator(), communicator);
            assert_eq!(event.report(Some(ip(1))), report);
        }
        // A root has nobody above that it could lose.
        assert_eq!(SwitchEvent::ParentLost { communicator, status }.report(None), None);
    }
}
