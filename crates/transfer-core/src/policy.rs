//! Who chooses the rail of a slice.

use crate::{Instant, Opcode, Rail, RailId};

/// A slice that waits, as a policy sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SliceInfo {
    /// Which way.
    pub opcode: Opcode,
    /// Bytes.
    pub length: u32,
    /// How often it has ended in an error of a rail.
    pub attempt: u8,
    /// A small number for its pair of locations: the same pair has the same number.
    pub class: u16,
    /// Where the local memory is.
    pub local_location: u16,
    /// Where the peer's memory is.
    pub peer_location: u16,
}

/// The rails of a flow.
#[derive(Clone, Copy, Debug)]
pub struct Rails<'a> {
    /// All of them, by number.
    pub all: &'a [Rail],
    /// Another number after each change of a rail's state, or when one may be connected again.
    pub version: u64,
}

/// What is to be done for a slice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Pick {
    /// Post it on this rail, which has room.
    Post(RailId),
    /// Connect this rail, which may be connected, and ask again.
    Connect(RailId),
    /// Wait for room.
    Wait,
    /// No rail is up that could take it: wait for one.
    NoRail,
}

/// Chooses rails. The same calls give the same answers: randomness comes from a seed.
pub trait Policy {
    /// Chooses for the slice that waits first.
    fn pick(&mut self, now: Instant, slice: &SliceInfo, rails: &Rails<'_>) -> Pick;
}
