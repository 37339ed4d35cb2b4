//! What a communicator is made from, and what it costs a switch.

use core::net::IpAddr;
use core::time::Duration;

use millstream_wire::{Mtu, Psn, Qpn};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::abort::ABORT_BYTES;
use crate::ranks::Ranks;
use crate::slots::{MAX_CHILDREN, held_bytes};

/// How long both ends of an edge keep the acknowledgement of a SEND of one packet, for the next message to leave with:
/// a descriptor, an agreement and the next call's descriptor follow each other.
pub const ACKNOWLEDGEMENT_DELAY: Duration = Duration::from_millis(1);

/// The most segments in a window.
pub const MAX_WINDOW: u32 = 4096;

/// The most bytes in a segment.
pub const MAX_SEGMENT_BYTES: u32 = 1 << 20;

/// Receive requests on every edge of the switch. More SENDs may be under way: each is taken, and its request
/// posted again, before the next packet.
pub(crate) const RECEIVES_PER_CHILD: usize = 2;

/// How many cells may be on their way on an edge beside the window's results.
const CELLS_UNDERWAY: u32 = 60;

/// What a send request costs in its queue, its completion queue and two targets of results.
const QUEUE_BYTES_PER_REQUEST: u64 = 256;

/// The most ranks of a communicator.
pub const MAX_WORLD: u32 = 65_536;

/// A child of a node: a host, which may have several ranks, or a switch with all hosts below it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ChildSpec {
    /// The ranks below it: of a host its own. No rank is below two children.
    pub ranks: Ranks,
    /// Its address.
    pub address: IpAddr,
    /// Its queue pair.
    pub qpn: Qpn,
    /// The first packet sequence number that it sends.
    pub psn: Psn,
    /// Whether it is a switch.
    pub is_switch: bool,
    /// Bytes that may be in flight to it, as [`millstream_roce::QueuePairAttributes::send_window_bytes`].
    pub receive_share: Option<u32>,
}

/// The node above: where its switch is, and the queue pair that it has for this node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ParentSpec {
    /// Its address.
    pub address: IpAddr,
    /// Its queue pair.
    pub qpn: Qpn,
    /// The first packet sequence number that it sends.
    pub psn: Psn,
    /// Bytes that may be in flight to it, as [`millstream_roce::QueuePairAttributes::send_window_bytes`].
    pub receive_share: Option<u32>,
}

/// Bytes that may be in flight on the way up an edge, of what the end above has room for, and of what it was told that it may
/// have in flight on the way down.
///
/// What goes up waits before its link, and the acknowledgements of what comes down wait behind it. With more under way up
/// than down, these would be too late for results to come as fast as the link is.
pub fn send_window_up(share: Option<u32>, granted: Option<u32>) -> Option<u32> {
    [share, granted].into_iter().flatten().min()
}

/// What the ranks of a communicator may ask for. What one of them asks for, all have.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct CommunicatorOptions {
    /// Sums, products and averages of floats are combined in the order of ranks at each switch, whoever comes first:
    /// the same calls on the same trees have the same bits.
    #[serde(default, skip_serializing_if = "is_not")]
    pub reproducible: bool,
    /// Hosts send no descriptors: each SEND is a vector of 32-bit integers, up to a segment, and is answered by a SEND of
    /// the sum of all ranks' messages with the same number. There is one switch.
    #[serde(default, skip_serializing_if = "is_not")]
    pub plain: bool,
}

impl CommunicatorOptions {
    /// Whether nothing is asked for.
    pub const fn is_default(&self) -> bool {
        let &Self { reproducible, plain } = self;
        !reproducible && !plain
    }

    /// What either asks for.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        Self {
            reproducible: self.reproducible || other.reproducible,
            plain: self.plain || other.plain,
        }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "what serde calls it with")]
const fn is_not(option: &bool) -> bool {
    !*option
}

/// What a node of a communicator's tree is made from.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CommunicatorSpec {
    /// Its number, chosen by whoever controls the switch.
    pub id: u64,
    /// Payload bytes per packet on every edge.
    pub path_mtu: Mtu,
    /// Bytes of a segment: a multiple of the path MTU.
    pub segment_bytes: u32,
    /// Segments that a host may be ahead of its last result.
    pub window: u32,
    /// How many ranks the communicator has, in all nodes.
    pub world: u32,
    /// Who is below: 1 to 64 hosts and switches.
    pub children: Vec<ChildSpec>,
    /// Whether there is a node above: not at the root. The node serves once it is connected to that
    /// ([`crate::SwitchNode::connect_parent`]).
    pub has_parent: bool,
    /// What the ranks have asked for.
    pub options: CommunicatorOptions,
}

/// Why a specification is no good.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum SpecError {
    /// Too many children, or none.
    #[error("a switch serves 1 to {MAX_CHILDREN} children in a communicator, not {0}")]
    FanIn(usize),
    /// Two children with one rank.
    #[error("rank {0} occurs twice")]
    DuplicateRank(u32),
    /// A child without ranks.
    #[error("a child has no ranks: a host has its own, and a switch those of the hosts below it")]
    NoRanks,
    /// More ranks than there may be, or fewer than are below this node.
    #[error(
        "a world of {world} ranks is no good: 1 to {MAX_WORLD}, no fewer than the {below} below the switch, and all of them below the root"
    )]
    World {
        /// What was asked for.
        world: u32,
        /// How many are below the node.
        below: u64,
    },
    /// A node with others, or with several ranks of a host, whose hosts send no descriptors.
    #[error("a communicator without descriptors has one switch, and hosts of one rank below it")]
    Plain,
    /// The window is out of range.
    #[error("a window of {0} segments is out of range: 1 to {MAX_WINDOW}")]
    Window(u32),
    /// The segment size is out of range.
    #[error(
        "a segment of {segment_bytes} bytes is no good: it must be a multiple of the path MTU \
         {path_mtu} up to {MAX_SEGMENT_BYTES}"
    )]
    SegmentBytes {
        /// What was asked for.
        segment_bytes: u32,
        /// What it must be a multiple of.
        path_mtu: Mtu,
    },
}

/// Checks a window.
pub(crate) const fn check_window(window: u32) -> Result<(), SpecError> {
    if window == 0 || window > MAX_WINDOW { Err(SpecError::Window(window)) } else { Ok(()) }
}

/// Checks a segment size.
pub(crate) const fn check_segment_bytes(
    segment_bytes: u32,
    path_mtu: Mtu,
) -> Result<(), SpecError> {
    let multiple = segment_bytes.is_multiple_of(path_mtu.bytes() as u32);
    if segment_bytes == 0 || segment_bytes > MAX_SEGMENT_BYTES || !multiple {
        return Err(SpecError::SegmentBytes { segment_bytes, path_mtu });
    }
    Ok(())
}

impl CommunicatorSpec {
    /// Checks everything that does not depend on the switch.
    pub fn check(&self) -> Result<(), SpecError> {
        if self.children.is_empty() || self.children.len() > MAX_CHILDREN {
            return Err(SpecError::FanIn(self.children.len()));
        }
        let is_one = |child: &ChildSpec| !child.is_switch && child.ranks.len() <= 1;
        let has_others = self.has_parent || !self.children.iter().all(is_one);
        if self.options.plain && has_others {
            return Err(SpecError::Plain);
        }
        check_window(self.window)?;
        check_segment_bytes(self.segment_bytes, self.path_mtu)?;
        let mut ranges: Vec<_> =
            self.children.iter().flat_map(|child| child.ranks.ranges()).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        if self.children.iter().any(|child| child.ranks.is_empty()) {
            return Err(SpecError::NoRanks);
        }
        if let Some(pair) = ranges.windows(2).find(|pair| pair[1].start < pair[0].end) {
            return Err(SpecError::DuplicateRank(pair[1].start));
        }
        let below = self.children.iter().map(|child| child.ranks.len()).sum();
        let last = ranges.last().map_or(0, |range| range.end);
        let world = self.world;
        let all = self.has_parent || below == u64::from(world);
        // There is a rank, so a world of none is one too small.
        if world > MAX_WORLD || last > world || !all {
            return Err(SpecError::World { world, below });
        }
        Ok(())
    }

    /// How many slots it takes: the range between what the slowest host has and what the fastest
    /// sends.
    pub(crate) const fn slots(&self) -> u32 {
        2 * self.window
    }

    /// Send requests on an edge: a window of results, cells of them, and a few agreements; one place is
    /// kept for the abort message. Cells that find no room go together, later.
    pub(crate) const fn send_requests(&self) -> u32 {
        send_requests(self.window)
    }

    /// Receive requests for a child: those that are in use are posted again at once, but for messages without a
    /// descriptor, of which there may be no more than a window.
    pub(crate) const fn child_receives(&self) -> usize {
        if self.options.plain { self.window as usize } else { RECEIVES_PER_CHILD }
    }

    /// Receive requests on the way up: the answers of a window, an agreement and an abort.
    pub(crate) const fn parent_receives(&self) -> usize {
        self.window as usize + 2
    }

    /// Of a packet each: receive buffers of the children, two small vectors behind their descriptors,
    /// and what comes from above; and who is awaited, and the abort message.
    pub(crate) fn control_bytes(&self) -> usize {
        control_bytes(self.children.len(), self.path_mtu)
    }

    /// Bytes of memory that it takes on a switch: its slots and, roughly, its queues.
    /// Specifications that [`CommunicatorSpec::check`] refuses have no meaningful size.
    pub fn memory_bytes(&self) -> u64 {
        let &Self { segment_bytes, window, path_mtu, .. } = self;
        let children = self.children.len();
        let held = match self.options.reproducible {
            true => held_bytes(children, window, segment_bytes),
            false => 0,
        };
        let receives = match self.options.plain {
            true => children as u64 * u64::from(window) * QUEUE_BYTES_PER_REQUEST,
            false => 0,
        };
        held + receives + node_bytes(children, self.has_parent, segment_bytes, window, path_mtu)
    }
}

/// Bytes of a segment, no more than `segment_bytes`, with which a node of so many children takes no more memory
/// in a reproducible communicator than it would in another. A multiple of every path MTU, if that is one.
pub(crate) fn reproducible_segment_bytes(segment_bytes: u32, children: usize) -> u32 {
    let most = Mtu::B4096.bytes() as u32;
    // A window of segments takes twice as many slots of three times their bytes, and once more for each child but
    // one. The counts beside them take less than a child.
    let parts = 6 + children as u32;
    let part = u64::from(segment_bytes) * 6 / u64::from(parts);
    (part as u32 / most * most).max(segment_bytes.min(most))
}

/// Send requests on an edge, for a window.
const fn send_requests(window: u32) -> u32 {
    window + CELLS_UNDERWAY + 4
}

/// Bytes of packets that a node keeps beside its slots.
fn control_bytes(children: usize, path_mtu: Mtu) -> usize {
    let packets = children * RECEIVES_PER_CHILD + 3;
    packets * path_mtu.bytes() + 2 * ABORT_BYTES
}

/// Queue pairs of a node with so many children: the root has no way up, but which node that will be is not always known.
pub(crate) const fn node_queue_pairs(children: usize) -> usize {
    children + 1
}

/// Bytes of memory that a node with so many children takes on a switch.
pub(crate) fn node_bytes(
    children: usize,
    has_parent: bool,
    segment_bytes: u32,
    window: u32,
    path_mtu: Mtu,
) -> u64 {
    // What is sent, and accumulators of 16-bit floats.
    let slots = 3 * 2 * u64::from(window) * u64::from(segment_bytes);
    let ports = children as u64 + u64::from(has_parent);
    let queues = ports * u64::from(send_requests(window));
    // Accumulators of 16-bit floats of small vectors, too.
    let control = control_bytes(children, path_mtu) as u64 + 2 * path_mtu.bytes() as u64;
    slots + control + queues * QUEUE_BYTES_PER_REQUEST
}

#[cfg(test)]
mod tests {
    use core::net::Ipv4Addr;

    use super::*;

    fn child(ranks: Ranks, is_switch: bool) -> ChildSpec {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        ChildSpec {
            ranks,
            address,
            qpn: Qpn::new(5),
            psn: Psn::new(0),
            is_switch,
            receive_share: None,
        }
    }

    /// A host and a switch with two ranks.
    fn spec(has_parent: bool) -> CommunicatorSpec {
        CommunicatorSpec {
            id: 1,
            path_mtu: Mtu::B1024,
            segment_bytes: 4096,
            window: 8,
            world: 3,
            children: vec![child(Ranks::one(0), false), child((1..3_u32).collect(), true)],
            has_parent,
            options: CommunicatorOptions::default(),
        }
    }

    #[test]
    fn the_world_has_all_ranks_below_and_at_the_root_no_others() {
        let world = |has_parent, world| CommunicatorSpec { world, ..spec(has_parent) }.check();
        let refused = |world| Err(SpecError::World { world, below: 3 });
        assert_eq!((world(false, 3), world(true, 3)), (Ok(()), Ok(())));
        assert_eq!((world(false, 4), world(true, 4)), (refused(4), Ok(())));
        assert_eq!(world(true, MAX_WORLD), Ok(()));
        for bad in [0, 1, 2, MAX_WORLD + 1, u32::MAX] {
            assert_eq!((world(false, bad), world(true, bad)), (refused(bad), refused(bad)));
        }
        // As many as there are below, but others.
        let mut other = spec(false);
        other.children[0].ranks = Ranks::one(3);
        assert_eq!(other.check(), refused(3));
    }

    #[test]
    fn hosts_and_switches_have_ranks_and_no_two_children_one() {
        for (ranks, is_switch, error) in [
            (0..0, true, Some(SpecError::NoRanks)),
            (0..0, false, Some(SpecError::NoRanks)),
            (1..3, false, None),
            (1..2, false, None),
            (1..2, true, None),
            (0..3, true, Some(SpecError::DuplicateRank(0))),
        ] {
            let mut spec = spec(true);
            spec.children[1] = child([ranks.clone()].into_iter().collect(), is_switch);
            assert_eq!(spec.check().err(), error, "{ranks:?}");
        }
    }

    #[test]
    fn without_descriptors_there_is_one_switch() {
        let options = CommunicatorOptions { plain: true, ..CommunicatorOptions::default() };
        let hosts = vec![child(Ranks::one(0), false), child(Ranks::one(1), false)];
        let of = |world, children: &[ChildSpec], has_parent| {
            let children = children.to_vec();
            CommunicatorSpec { options, world, children, ..spec(has_parent) }.check()
        };
        assert_eq!(of(2, &hosts, false), Ok(()));
        assert_eq!(of(2, &hosts, true), Err(SpecError::Plain));
        assert_eq!(of(3, &spec(false).children, false), Err(SpecError::Plain));
        let several = vec![child(Ranks::one(0), false), child((1..3_u32).collect(), false)];
        assert_eq!(of(3, &several, false), Err(SpecError::Plain));
    }

    #[test]
    fn what_is_just_within_the_limits_is_taken() {
        let largest = CommunicatorSpec {
            window: MAX_WINDOW,
            segment_bytes: MAX_SEGMENT_BYTES,
            world: 64,
            children: (0..64).map(|rank| child(Ranks::one(rank), false)).collect(),
            ..spec(false)
        };
        assert_eq!(largest.check(), Ok(()));
        let smallest = CommunicatorSpec { window: 1, segment_bytes: 1024, ..spec(false) };
        assert_eq!(smallest.check(), Ok(()));
    }

    /// Operators size `max_memory` by these.
    #[test]
    fn what_a_node_costs() {
        let root = spec(false);
        // A window, 60 cells, and four messages.
        assert_eq!(root.send_requests(), 72);
        // Two packets for each child and three others, and two messages of 40 bytes.
        assert_eq!(root.control_bytes(), 7 * 1024 + 80);
        // 16 slots with accumulators of twice their size, small vectors likewise, and requests of 256 bytes.
        let control = 7 * 1024 + 80 + 2 * 1024;
        assert_eq!(root.memory_bytes(), 3 * 16 * 4096 + control + 2 * 72 * 256);
        assert_eq!(spec(true).memory_bytes(), root.memory_bytes() + 72 * 256);
        // One child may be a window ahead of the other. There are two numbers of 4 bytes for each of them and each slot.
        let options = CommunicatorOptions { reproducible: true, ..CommunicatorOptions::default() };
        let held = 8 * 4096 + 16 * 2 * 8;
        let reproducible = CommunicatorSpec { options, ..spec(false) };
        assert_eq!(reproducible.memory_bytes(), root.memory_bytes() + held);
        // And messages without descriptors are received in a window of requests.
        let options = CommunicatorOptions { plain: true, ..CommunicatorOptions::default() };
        let plain = CommunicatorSpec { options, ..spec(false) };
        assert_eq!(plain.memory_bytes(), root.memory_bytes() + 2 * 8 * 256);
        assert_eq!(spec(true).parent_receives(), 10);
    }

    #[test]
    fn a_node_of_a_reproducible_communicator_takes_no_more_than_another() {
        for segment_bytes in [64 << 10, 256 << 10, 1 << 20] {
            for children in 1..=MAX_CHILDREN {
                let cost = |segment_bytes, reproducible| {
                    let rank = |rank| child(Ranks::one(rank), false);
                    let spec = CommunicatorSpec {
                        segment_bytes,
                        children: (0..children as u32).map(rank).collect(),
                        options: CommunicatorOptions {
                            reproducible,
                            ..CommunicatorOptions::default()
                        },
                        ..spec(true)
                    };
                    spec.memory_bytes()
                };
                let smaller = reproducible_segment_bytes(segment_bytes, children);
                assert!((4096..=segment_bytes).contains(&smaller) && smaller.is_multiple_of(4096));
                let (ours, others) = (cost(smaller, true), cost(segment_bytes, false));
                assert!(ours <= others, "{children} children: {ours} of {others}");
                // Of a long segment not much is lost to whole packets.
                let is_enough = segment_bytes < 1 << 20 || 5 * ours >= 4 * others;
                assert!(is_enough, "{children} children: {ours} of {others}");
            }
        }
        // No smaller than the longest packet, and no larger than what is configured.
        assert_eq!([4096, 512].map(|bytes| reproducible_segment_bytes(bytes, 64)), [4096, 512]);
    }
}
