//! Pieces of registered memory, and other bytes, that one system call sends or receives into.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;

use millstream_net::stream;

use super::{Inside, LocalMemory};

/// Bytes of registered memory and others that are sent by one call, or received into by one.
pub(crate) struct Gathered<'a> {
    /// Who is entered: pieces of one memory share a pass.
    inside: [Option<Inside<'a>>; GATHERED_MEMORIES],
    memories: usize,
    parts: [stream::Part; GATHERED_PARTS],
    /// How many parts there are.
    count: usize,
    /// How many pieces and slices were added. Pieces that are adjacent in the same memory, and are added one after the other, are one part: the
    /// kernel copies one long part faster than many short ones.
    pieces: usize,
    /// The last part is of the last memory.
    ends_in_memory: bool,
    /// Some of the parts are slices, which are only read.
    read_only: bool,
}

/// How many pieces a call has at the most, and of how many registrations.
const GATHERED_PARTS: usize = 130;
const GATHERED_MEMORIES: usize = 32;

impl Default for Gathered<'_> {
    fn default() -> Self {
        Self {
            inside: [const { None }; GATHERED_MEMORIES],
            memories: 0,
            parts: [stream::Part::NONE; GATHERED_PARTS],
            count: 0,
            pieces: 0,
            ends_in_memory: false,
            read_only: false,
        }
    }
}

impl<'a> Gathered<'a> {
    /// Adds bytes that are no registered memory.
    pub(crate) fn add_bytes(&mut self, bytes: &'a [u8]) {
        if !bytes.is_empty() && self.count < GATHERED_PARTS {
            self.parts[self.count] = stream::Part::of(bytes);
            self.count += 1;
            self.pieces += 1;
            self.ends_in_memory = false;
            self.read_only = true;
        }
    }

    /// Adds bytes of the memory; `false` when there is no room, or they are not in it, or it is not registered
    /// any more, or of a GPU.
    pub(crate) fn add(&mut self, memory: &'a LocalMemory, address: u64, length: u64) -> bool {
        // The last one is for bytes that come after. And each call looks at no more pieces, however few parts they are.
        if self.pieces + 1 >= GATHERED_PARTS {
            return false;
        }
        let last = self.memories.checked_sub(1).and_then(|last| self.inside[last].as_ref());
        if !last.is_some_and(|inside| std::ptr::eq(inside.memory, memory)) {
            if self.memories == GATHERED_MEMORIES {
                return false;
            }
            let Some(inside) = memory.enter() else { return false };
            self.inside[self.memories] = Some(inside);
            self.memories += 1;
            self.ends_in_memory = false;
        }
        let last = self.inside[self.memories - 1].as_ref();
        let Some(pointer) = last.and_then(|inside| inside.pointer(address, length)) else {
            return false;
        };
        let part = stream::Part::new(pointer, length as usize);
        let last = self.parts[..self.count].last_mut().filter(|_| self.ends_in_memory);
        if !last.is_some_and(|last| last.append(part)) {
            self.parts[self.count] = part;
            self.count += 1;
        }
        self.pieces += 1;
        self.ends_in_memory = true;
        true
    }

    /// How many pieces and slices were added.
    pub(crate) const fn pieces(&self) -> usize {
        self.pieces
    }

    /// Sends the first so many bytes as there is room for.
    pub(crate) fn send(&self, stream: BorrowedFd<'_>) -> io::Result<usize> {
        // SAFETY: slices that are borrowed, and ranges of registered memory, which stays valid while it is
        // entered.
        unsafe { stream::send_parts(stream, &self.parts[..self.count]) }
    }

    /// Receives into them; 0 at the end of the stream.
    pub(crate) fn receive(&self, stream: BorrowedFd<'_>) -> io::Result<usize> {
        if self.read_only {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: ranges of registered memory only, which stays valid while it is entered.
        unsafe { stream::receive_parts(stream, &self.parts[..self.count]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::testing::Room;

    #[test]
    fn pieces_that_follow_each_other_are_one_part() {
        let (room, other) = (Room::new(100), Room::new(100));
        // Where each begins, and how many parts there are then.
        for (table, what) in [
            (&[(0, 1), (10, 1), (20, 1)][..], "in a row"),
            (&[(10, 1), (0, 2), (10, 2)], "backwards"),
            (&[(0, 1), (20, 2), (30, 2)], "with a gap"),
            (&[(0, 1), (5, 2)], "overlapping"),
        ] {
            let mut gathered = Gathered::default();
            for (pieces, &(at, parts)) in (1..).zip(table) {
                assert!(gathered.add(&room.local, room.address() + at, 10));
                assert_eq!((gathered.pieces, gathered.count), (pieces, parts), "{what}");
            }
        }
        let mut gathered = Gathered::default();
        assert!(gathered.add(&room.local, room.address(), 10));
        gathered.add_bytes(&[1]);
        assert!(gathered.add(&room.local, room.address() + 10, 10));
        assert!(gathered.add(&other.local, other.address(), 10));
        assert!(gathered.add(&room.local, room.address() + 20, 10));
        assert!(!gathered.add(&room.local, room.address() + 95, 10));
        assert_eq!((gathered.pieces, gathered.count), (5, 5));
        let lengths: Vec<_> = gathered.parts[..5].iter().map(stream::Part::length).collect();
        assert_eq!(lengths, [10, 1, 10, 10, 10]);
    }

    #[test]
    fn a_call_has_so_many_pieces_and_room_for_bytes_behind_them() {
        let room = Room::new(1000);
        for (distance, parts) in [(2, GATHERED_PARTS - 1), (1, 1)] {
            let mut gathered = Gathered::default();
            let mut add =
                |number: u64| gathered.add(&room.local, room.address() + distance * number, 1);
            assert_eq!((0..).take_while(|it| add(*it)).count(), GATHERED_PARTS - 1);
            assert_eq!((gathered.pieces, gathered.count), (GATHERED_PARTS - 1, parts));
            gathered.add_bytes(&[1]);
            assert_eq!((gathered.pieces(), gathered.count), (GATHERED_PARTS, parts + 1));
        }
    }
}
