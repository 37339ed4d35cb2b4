//! What a communicator is made from, and what it costs a switch.

use core::net::IpAddr;

use millstream_wire::{Mtu, Psn, Qpn};
use thiserror::Error;

use crate::abort::ABORT_BYTES;
use crate::ranks::Ranks;
use crate::slots::MAX_CHILDREN;

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

/// A child of a node: a host, or a switch with all hosts below it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ChildSpec {
    /// The ranks below it: of a host one. No rank is below two children.
    pub ranks: Ranks,
    /// Its address.
    pub address: IpAddr,
    /// Its queue pair.
    pub qpn: Qpn,
    /// The first packet sequence number that it sends.
    pub psn: Psn,
    /// Whether it is a switch.
    pub is_switch: bool,
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
    /// A child without ranks, or a host with several.
    #[error("a child has {0} ranks: a host has one, and a switch has those of the hosts below it")]
    Ranks(u64),
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
        check_window(self.window)?;
        check_segment_bytes(self.segment_bytes, self.path_mtu)?;
        let mut ranges: Vec<_> =
            self.children.iter().flat_map(|child| child.ranks.ranges()).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let bad = |child: &&ChildSpec| match child.ranks.len() {
            0 => true,
            ranks => ranks > 1 && !child.is_switch,
        };
        if let Some(child) = self.children.iter().find(bad) {
            return Err(SpecError::Ranks(child.ranks.len()));
        }
        if let Some(pair) = ranges.windows(2).find(|pair| pair[1].start < pair[0].end) {
            return Err(SpecError::DuplicateRank(pair[1].start));
        }
        let below = self.children.iter().map(|child| child.ranks.len()).sum();
        let last = ranges.last().map_or(0, |range| range.end);
        let world = self.world;
        let all = self.has_parent || below == u64::from(world);
        if world == 0 || world > MAX_WORLD || last > world || !all {
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
        self.window + CELLS_UNDERWAY + 4
    }

    /// Receive requests on the way up: the answers of a window, an agreement and an abort.
    pub(crate) const fn parent_receives(&self) -> usize {
        self.window as usize + 2
    }

    /// Of a packet each: receive buffers of the children, two small vectors behind their descriptors,
    /// and what comes from above; and who is awaited, and the abort message.
    pub(crate) fn control_bytes(&self) -> usize {
        let packets = self.children.len() * RECEIVES_PER_CHILD + 3;
        packets * self.path_mtu.bytes() + 2 * ABORT_BYTES
    }

    /// Bytes of memory that it takes on a switch: its slots and, roughly, its queues.
    /// Specifications that [`CommunicatorSpec::check`] refuses have no meaningful size.
    pub fn memory_bytes(&self) -> u64 {
        // What is sent, and accumulators of 16-bit floats.
        let slots = 3 * u64::from(self.slots()) * u64::from(self.segment_bytes);
        let ports = self.children.len() as u64 + u64::from(self.has_parent);
        let queues = ports * u64::from(self.send_requests());
        // Accumulators of 16-bit floats of small vectors, too.
        let control = self.control_bytes() as u64 + 2 * self.path_mtu.bytes() as u64;
        slots + control + queues * QUEUE_BYTES_PER_REQUEST
    }
}
