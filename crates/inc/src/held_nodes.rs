//! What a switch's process says to controllers of the nodes that it has: to one that does not know them, what they were made
//! for, and why those ended of which no controller has heard yet.
//!
//! It knows no connection. Who carries the messages says when one begins ([`HeldNodes::introduction`]) and ends
//! ([`HeldNodes::recall`]), and has what is to be told ([`HeldNodes::next_untold`]) sent while a controller knows this switch.

use core::net::IpAddr;
use core::time::Duration;
use std::collections::BTreeMap;

use millstream_wire::Mtu;

use crate::SwitchEvent;
use crate::protocol::{
    FromController, GroupIdentity, HeldNode, MAX_HELD_AT_ONCE, ObeyedTerm, Presence, SwitchBelow,
    SwitchLimits, SwitchReport, TermError, ToController,
};

/// A connection that breaks may take with it what was written for so long: the kernel gives it up after 8 s.
const UNREAD: Duration = Duration::from_secs(15);

/// What a node was made for.
#[derive(Clone, Debug)]
struct Held {
    group: GroupIdentity,
    children: u32,
    below: Vec<SwitchBelow>,
    /// The address of the switch above.
    above: Option<IpAddr>,
    tree: u8,
    path_mtu: Mtu,
}

/// The nodes of a switch's process, and what controllers have yet to hear of them.
#[derive(Clone, Debug)]
pub struct HeldNodes {
    incarnation: u64,
    /// The highest term that was obeyed.
    term: ObeyedTerm,
    nodes: BTreeMap<u64, Held>,
    /// Why communicators end: one for each at most, and until a controller has heard it.
    untold: BTreeMap<u64, SwitchReport>,
    /// Those that were written a short time ago: they may be lost with the connection.
    told: Vec<(Duration, u64, SwitchReport)>,
}

impl HeldNodes {
    /// Of a process that has none yet. `incarnation` is drawn when it starts.
    pub const fn new(incarnation: u64) -> Self {
        Self {
            incarnation,
            term: ObeyedTerm::NONE,
            nodes: BTreeMap::new(),
            untold: BTreeMap::new(),
            told: Vec::new(),
        }
    }

    /// Takes the term of a command. Who gets an error does nothing of what the command says.
    pub const fn obey(&mut self, term: u64) -> Result<(), TermError> {
        self.term.obey(term)
    }

    /// What is said first over each connection: who this is, what no controller has heard, and which nodes there are.
    pub fn introduction(
        &self,
        name: String,
        address: IpAddr,
        limits: SwitchLimits,
    ) -> Vec<ToController> {
        let Self { incarnation, term, .. } = *self;
        let presence = Presence { incarnation, term: term.get(), held: self.nodes.len() as u32 };
        let node = |(&communicator, held): (&u64, &Held)| {
            let &Held { group, children, ref below, tree, .. } = held;
            HeldNode { group, communicator, children, below: below.clone(), tree }
        };
        let nodes: Vec<HeldNode> = self.nodes.iter().map(node).collect();
        let report = |(&communicator, report): (&u64, &SwitchReport)| ToController::Report {
            communicator,
            report: report.clone(),
        };
        let held = nodes.chunks(MAX_HELD_AT_ONCE);
        // Reports first: what is not held any more may be why.
        [ToController::Register { name, address, limits, presence }]
            .into_iter()
            .chain(self.untold.iter().map(report))
            .chain(held.map(|nodes| ToController::Held { nodes: nodes.to_vec() }))
            .collect()
    }

    /// A node was made, as a controller has asked by this message; no other says anything.
    pub fn made(&mut self, message: &FromController) {
        let &FromController::CreateCommunicator {
            communicator,
            group,
            path_mtu,
            tree,
            ref children,
            ..
        } = message
        else {
            return;
        };
        let below = children.iter().filter(|child| child.is_switch).map(|child| SwitchBelow {
            rank: child.ranks.first().unwrap_or_default(),
            address: child.address,
        });
        let (below, children) = (below.collect(), children.len() as u32);
        let held = Held { group, children, below, above: None, tree, path_mtu };
        self.nodes.insert(communicator, held);
    }

    /// A node was connected to the switch above.
    pub fn connected(&mut self, communicator: u64, above: IpAddr) {
        if let Some(held) = self.nodes.get_mut(&communicator) {
            held.above = Some(above);
        }
    }

    /// The path MTU of a node that there is.
    pub fn path_mtu(&self, communicator: u64) -> Option<Mtu> {
        self.nodes.get(&communicator).map(|held| held.path_mtu)
    }

    /// A node is removed; whether there was one.
    pub fn remove(&mut self, communicator: u64) -> bool {
        self.nodes.remove(&communicator).is_some()
    }

    /// A node has reported something. What a controller must hear of it is kept until one has.
    pub fn happened(&mut self, event: &SwitchEvent) {
        let communicator = event.communicator();
        let Some(held) = self.nodes.get(&communicator) else { return };
        if let Some(mut report) = event.report(held.above) {
            if let SwitchReport::PeerLost { rank, switch, .. } = &mut report {
                // The edge has the name of the lowest rank below it.
                let below = held.below.iter().find(|below| below.rank == *rank);
                *switch = below.map(|below| below.address);
            }
            self.untold.entry(communicator).or_insert(report);
        }
    }

    /// What is to be told next to a controller that knows this switch.
    pub fn next_untold(&self) -> Option<(u64, SwitchReport)> {
        let (&communicator, report) = self.untold.first_key_value()?;
        Some((communicator, report.clone()))
    }

    /// The reason of this communicator was written, so long after some moment that is always the same.
    pub fn told(&mut self, communicator: u64, now: Duration) {
        self.told.retain(|&(at, ..)| now < at + UNREAD);
        if let Some(report) = self.untold.remove(&communicator) {
            self.told.push((now, communicator, report));
        }
    }

    /// A connection has ended. What was written to it may not have been read: it is said again. Who knows it takes it for one
    /// of a communicator that is over.
    pub fn recall(&mut self, now: Duration) {
        for (at, communicator, report) in self.told.drain(..) {
            if now < at + UNREAD {
                self.untold.entry(communicator).or_insert(report);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use core::net::Ipv4Addr;

    use millstream_roce::CompletionStatus;
    use millstream_wire::{Psn, Qpn};

    use super::*;
    use crate::protocol::SwitchChild;
    use crate::{CommunicatorOptions, Ranks, Violation};

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const ABOVE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

    fn create(communicator: u64) -> FromController {
        let child = |rank: u32, is_switch| SwitchChild {
            ranks: Ranks::one(rank),
            address: HERE,
            qpn: Qpn::new(rank + 100),
            psn: Psn::new(0),
            is_switch,
            receive_share: None,
        };
        FromController::CreateCommunicator {
            communicator,
            group: [1, 2],
            path_mtu: Mtu::B1024,
            segment_bytes: 4096,
            window: 2,
            world: 2,
            has_parent: true,
            children: vec![child(0, false), child(1, true)],
            tree: 1,
            options: CommunicatorOptions::default(),
        }
    }

    fn introduction(nodes: &HeldNodes) -> Vec<ToController> {
        let limits = SwitchLimits { communicators: 64, ..SwitchLimits::NONE };
        nodes.introduction("s".into(), HERE, limits)
    }

    /// The connection to one of the children of `create` ends like this.
    fn broken(communicator: u64, rank: u32, status: CompletionStatus) -> SwitchEvent {
        SwitchEvent::ChildLost { communicator, rank, is_switch: rank == 1, status }
    }

    fn lost(communicator: u64, rank: u32) -> SwitchEvent {
        broken(communicator, rank, CompletionStatus::RetryExceeded)
    }

    #[test]
    fn a_controller_hears_what_there_is_and_what_it_was_made_for() {
        let mut nodes = HeldNodes::new(7);
        assert_eq!(nodes.obey(5), Ok(()));
        assert!(nodes.obey(4).is_err());
        nodes.made(&create(3));
        nodes.made(&create(4));
        nodes.made(&FromController::Ping);
        assert!(nodes.remove(4) && !nodes.remove(4));
        assert_eq!((nodes.path_mtu(3), nodes.path_mtu(4)), (Some(Mtu::B1024), None));
        let presence = Presence { incarnation: 7, term: 5, held: 1 };
        let below = vec![SwitchBelow { rank: 1, address: HERE }];
        let node = HeldNode { group: [1, 2], communicator: 3, children: 2, below, tree: 1 };
        let limits = SwitchLimits { communicators: 64, ..SwitchLimits::NONE };
        let register = ToController::Register { name: "s".into(), address: HERE, limits, presence };
        assert_eq!(introduction(&nodes), [register, ToController::Held { nodes: vec![node] }]);
    }

    #[test]
    fn why_a_communicator_ended_is_told_once_and_again_where_it_may_not_have_been_read() {
        let mut nodes = HeldNodes::new(7);
        nodes.made(&create(3));
        nodes.happened(&lost(9, 0));
        assert_eq!(nodes.next_untold(), None, "there is no such node");
        nodes.happened(&lost(3, 0));
        nodes.happened(&lost(3, 1));
        let first = lost(3, 0).report(None).unwrap();
        // Before what there is, also when the node is gone.
        nodes.remove(3);
        let report = ToController::Report { communicator: 3, report: first.clone() };
        assert_eq!(introduction(&nodes)[1..], [report]);
        let at = Duration::from_secs;
        for (told, ended, again) in [(0, 14, true), (20, 35, false)] {
            assert_eq!(nodes.next_untold(), Some((3, first.clone())));
            nodes.told(3, at(told));
            assert_eq!(nodes.next_untold(), None);
            nodes.recall(at(ended));
            assert_eq!(nodes.next_untold().is_some(), again);
        }
    }

    #[test]
    fn what_was_told_a_moment_ago_is_said_again_also_where_more_was_told_since() {
        let mut nodes = HeldNodes::new(7);
        for communicator in [3, 4] {
            nodes.made(&create(communicator));
            nodes.happened(&lost(communicator, 0));
        }
        nodes.told(3, Duration::from_secs(1));
        nodes.told(4, Duration::from_secs(14));
        assert_eq!(nodes.next_untold(), None);
        nodes.recall(Duration::from_secs(15));
        for communicator in [3, 4] {
            assert_eq!(nodes.next_untold().map(|(untold, _)| untold), Some(communicator));
            nodes.told(communicator, Duration::from_secs(15));
        }
    }

    #[test]
    fn a_node_that_loses_a_switch_below_names_its_address() {
        for (rank, named) in [(0, None), (1, Some(HERE))] {
            let mut nodes = HeldNodes::new(7);
            nodes.made(&create(3));
            nodes.happened(&lost(3, rank));
            let Some((3, SwitchReport::PeerLost { switch, .. })) = nodes.next_untold() else {
                panic!("{:?}", nodes.next_untold())
            };
            assert_eq!(switch, named);
        }
    }

    #[test]
    fn who_breaks_the_protocol_is_told_as_that_and_a_switch_by_its_address() {
        for (status, violation) in [
            (CompletionStatus::RemoteAccess, Violation::Destination),
            (CompletionStatus::ReceiverNotReadyExceeded, Violation::Receives),
            (CompletionStatus::BadResponse, Violation::Response),
            (CompletionStatus::Flushed, Violation::Request),
        ] {
            let told = |rank| {
                let mut nodes = HeldNodes::new(7);
                nodes.made(&create(3));
                // As a switch says it.
                nodes.happened(&broken(3, rank, status));
                nodes.happened(&SwitchEvent::Violation { communicator: 3, rank, violation });
                nodes.next_untold()
            };
            let report = SwitchReport::Violation { rank: 0, detail: violation.to_string() };
            assert_eq!(told(0), Some((3, report)));
            let detail = format!("its connection to the switch broke: {status}");
            let report = SwitchReport::PeerLost { rank: 1, detail, switch: Some(HERE) };
            assert_eq!(told(1), Some((3, report)));
        }
    }

    #[test]
    fn a_node_that_loses_the_switch_above_names_its_address() {
        let mut nodes = HeldNodes::new(7);
        nodes.made(&create(3));
        let status = CompletionStatus::RetryExceeded;
        let event = SwitchEvent::ParentLost { communicator: 3, status };
        nodes.happened(&event);
        assert_eq!(nodes.next_untold(), None, "it was connected to none");
        nodes.connected(3, ABOVE);
        nodes.happened(&event);
        let (_, report) = nodes.next_untold().unwrap();
        assert!(matches!(report, SwitchReport::ParentLost { address: ABOVE, .. }), "{report:?}");
    }
}
