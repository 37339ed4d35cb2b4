//! What a rail has done in all, for who watches it. Nothing is decided by it.

use crate::Opcode;

/// What a rail has done since it was added to its flow.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RailCounters {
    /// Slices that were posted, each time anew.
    pub posted_slices: u64,
    /// Their bytes.
    pub posted_bytes: u64,
    /// Slices that were done.
    pub completed_slices: u64,
    /// Bytes of READs among them.
    pub read_bytes: u64,
    /// Bytes of WRITEs among them.
    pub written_bytes: u64,
    /// Slices that did not end here, and were posted on another rail next.
    pub moved_slices: u64,
    /// How often it was connected.
    pub connections: u64,
    /// How often it failed: could not be connected, broke or fell silent.
    pub failures: u64,
    /// How often it was paused since it failed too often.
    pub pauses: u64,
    /// How often the peer was asked for a fence, repetitions not counted.
    pub fences: u64,
    /// How often a fence was needed and not confirmed: WRITEs were given up as undefined.
    pub lost_fences: u64,
}

impl RailCounters {
    /// A slice of so many bytes was posted.
    pub const fn posted(&mut self, length: u64) {
        self.posted_slices += 1;
        self.posted_bytes += length;
    }

    /// A slice of so many bytes was done.
    pub const fn completed(&mut self, opcode: Opcode, length: u64) {
        self.completed_slices += 1;
        match opcode {
            Opcode::Read => self.read_bytes += length,
            Opcode::Write => self.written_bytes += length,
        }
    }
}
