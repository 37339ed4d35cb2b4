//! What is asked of a flow.

use thiserror::Error;

use crate::slab::Key;
use crate::{Instant, PriorityLevel};

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Opcode {
    /// From the peer into local memory.
    Read,
    /// From local memory to the peer.
    Write,
}

/// A run of bytes with an end at each side.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Piece {
    /// Address of the first byte here.
    pub local: u64,
    /// Address of the first byte at the peer.
    pub remote: u64,
    /// Bytes.
    pub length: u64,
}

/// The bytes of a request.
#[derive(Clone, Copy, Debug)]
pub enum Ranges<'a> {
    /// One run.
    Contiguous(Piece),
    /// Equally long runs at equal distances.
    Strided {
        /// The first.
        first: Piece,
        /// How many.
        count: u32,
        /// From the start of one to that of the next, here.
        local_stride: u64,
        /// From the start of one to that of the next, at the peer.
        remote_stride: u64,
    },
    /// Any runs. They are copied into memory of the flow, which is used again.
    List(&'a [Piece]),
}

/// Addresses that no piece of a slice goes across: the first one, and others at equal distances after it. Memory that
/// is longer than a region of a device can be is registered as several, each with keys of its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Borders {
    /// An address.
    pub first: u64,
    /// From each to the next one.
    pub distance: u64,
}

impl Borders {
    /// There are none.
    pub const NONE: Self = Self { first: 0, distance: u64::MAX };

    /// How many bytes there are from an address to the next border.
    pub(crate) const fn room(&self, address: u64) -> u64 {
        match address.checked_sub(self.first) {
            None => self.first - address,
            // Most memory has no borders, and a division takes longer than the rest of a slice's cut.
            Some(offset) if offset < self.distance => self.distance - offset,
            Some(offset) => match offset.checked_rem(self.distance) {
                Some(beyond) => self.distance - beyond,
                None => u64::MAX,
            },
        }
    }
}

/// Something to move. It becomes a task.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Which way.
    pub opcode: Opcode,
    /// What.
    pub ranges: Ranges<'a>,
    /// When it ends as TIMEOUT if it has not ended before.
    pub deadline: Option<Instant>,
    /// How soon it is wanted, for policies that have priorities.
    pub priority: PriorityLevel,
    /// Which start of the peer's process the remote addresses are of.
    pub incarnation: u64,
    /// Where the local memory is: the policy's number of a location.
    pub local_location: u16,
    /// Where the peer's memory is.
    pub peer_location: u16,
    /// What slices do not go across here.
    pub local_borders: Borders,
    /// What they do not go across at the peer.
    pub peer_borders: Borders,
    /// The caller's own number, which comes back with all that is told of the task.
    pub user: u64,
}

/// The name of a task. No two tasks of a flow have the same, also one after the other (but for the
/// wrap of a generation of 32 bits).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct TaskId(pub(crate) Key);

impl TaskId {
    /// The name as one number.
    pub const fn to_bits(self) -> u64 {
        self.0.to_bits()
    }

    /// The name that [`TaskId::to_bits`] has made this number of. Who does tasks without a flow can name
    /// them so, too.
    pub const fn from_bits(bits: u64) -> Self {
        Self(Key::from_bits(bits))
    }
}

/// The name of a slice: a part of a task that is posted at once, a work request for each piece.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct SliceId(pub(crate) Key);

impl SliceId {
    /// The identifier of its work requests.
    pub const fn to_bits(self) -> u64 {
        self.0.to_bits()
    }

    /// The slice of a work request. Any number is a name, perhaps of no slice.
    pub const fn from_bits(bits: u64) -> Self {
        Self(Key::from_bits(bits))
    }
}

/// Why a request does not become a task. Nothing was changed.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum SubmitError {
    /// Nothing to move.
    #[error("a request of 0 bytes")]
    ZeroLength,
    /// A run would go beyond the end of the address space.
    #[error("a run of the request goes beyond the end of the address space")]
    Overflow,
    /// The peer was restarted since its addresses were looked up.
    #[error("the peer was started again (incarnation {current}): look its segment up again")]
    Stale {
        /// The incarnation of the peer.
        current: u64,
    },
    /// As many tasks are unfinished as may be.
    #[error("{limit} tasks are unfinished already: wait for some of them")]
    TooManyTasks {
        /// The limit.
        limit: usize,
    },
    /// As many pieces are kept as may be.
    #[error("unfinished tasks and this one have more than {limit} pieces: wait for some of them")]
    TooManyPieces {
        /// The limit.
        limit: usize,
    },
    /// As many pairs of locations are known as may be.
    #[error("requests are of {limit} pairs of locations already, which is the limit")]
    TooManyLocations {
        /// The limit.
        limit: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_up_to_the_next_border() {
        let every_hundred = Borders { first: 1000, distance: 100 };
        for (address, room) in
            [(900, 100), (1000, 100), (1030, 70), (1099, 1), (1100, 100), (1130, 70), (2001, 99)]
        {
            assert_eq!(every_hundred.room(address), room, "{address}");
        }
        assert_eq!(Borders::NONE.room(7), u64::MAX - 7);
        assert_eq!(Borders { first: 5, distance: 0 }.room(9), u64::MAX);
    }
}
