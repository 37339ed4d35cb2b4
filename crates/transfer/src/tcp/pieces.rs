//! Pieces of registered memory whose bytes cross a stream one after the other, straight from where they are.
//!
//! Memory can be unregistered or unmapped meanwhile. That is the fault of the piece that has it, and of no other:
//! bytes that are received for it are thrown away, and zeros are sent in their place.
//!
//! Memory of GPUs is *staged*: its bytes go through a buffer of the host that the connection has, piece by piece. While
//! one is copied, those before it are in the socket's buffers, from which the network goes on.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;

use millstream_net::prefetch_all;
use millstream_net::stream::{receive_slice, send_slice};

use super::message::Fault;
use super::stage::ROOM as STAGE;
use crate::memory::{Gathered, Inside, LocalMemory};

/// Bad address: nothing is mapped there.
const EFAULT: i32 = 14;

/// Sent for what is not there any more.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// A piece that has fewer bytes than this is copied as fast as it is loaded.
const SHORTEST: usize = 512;

/// So many bytes are prefetched, and received, before the next ones are: more may not stay in a processor's second cache
/// until they are copied.
const PREFETCHED: u64 = 256 << 10;

/// A piece of memory.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Its place among the memories. `None`, and a fault, when it is in none.
    memory: Option<u32>,
    pub(super) address: u64,
    pub(super) length: u64,
    pub(super) fault: Option<Fault>,
}

/// Pieces, and how far they are.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    list: Vec<Piece>,
    /// What they are in: pieces that follow each other are often in the same.
    memories: Vec<Arc<LocalMemory>>,
    /// The first one that is not done, and how much of it is.
    next: usize,
    done: u64,
    /// Bytes of all that are left.
    left: u64,
    /// Of so many of these the places were [prefetched](Self::prefetch_room).
    prefetched: u64,
    /// Memory of one of several was not there: they are tried one by one.
    singly: bool,
    /// No zeros are sent: sending fails where memory is not there.
    strict: bool,
}

impl Pieces {
    /// Has none any more. It keeps its memory. If `strict`, a fault ends what is sent, since the other end has no
    /// way to hear of it.
    pub(super) fn clear(&mut self, strict: bool) {
        self.list.clear();
        self.memories.clear();
        self.strict = strict;
        self.rewind();
    }

    /// Begins again.
    pub(super) fn rewind(&mut self) {
        (self.next, self.done, self.prefetched, self.singly) = (0, 0, 0, false);
        self.left = self.list.iter().map(|piece| piece.length).sum();
    }

    /// Begins again with pieces of these lengths, of which none has failed yet.
    pub(super) fn begin_again(&mut self, lengths: impl Iterator<Item = u64>) {
        for (piece, length) in self.list.iter_mut().zip(lengths) {
            (piece.length, piece.fault) = (length, None);
        }
        self.rewind();
    }

    /// Adds a piece of this memory; without, it has a fault.
    pub(super) fn push(&mut self, memory: Option<&Arc<LocalMemory>>, address: u64, length: u64) {
        let Some(memory) = memory else {
            let fault = Some(Fault::NotRegistered);
            return self.add(Piece { memory: None, address, length, fault });
        };
        if !self.memories.last().is_some_and(|last| Arc::ptr_eq(last, memory)) {
            self.memories.push(Arc::clone(memory));
        }
        self.push_same(address, length);
    }

    /// Adds a piece of [that memory](Self::last_memory).
    pub(super) fn push_same(&mut self, address: u64, length: u64) {
        let memory = (self.memories.len() as u32).checked_sub(1);
        debug_assert!(memory.is_some());
        self.add(Piece { memory, address, length, fault: None });
    }

    fn add(&mut self, piece: Piece) {
        self.left += piece.length;
        self.list.push(piece);
    }

    /// The memory of the last one that is in any.
    pub(super) fn last_memory(&self) -> Option<&Arc<LocalMemory>> {
        self.memories.last()
    }

    fn memory(&self, piece: &Piece) -> Option<&LocalMemory> {
        self.memories.get(piece.memory? as usize).map(|memory| &**memory)
    }

    /// Takes one out, before anything is moved.
    pub(super) fn remove(&mut self, index: usize) {
        self.list.remove(index);
    }

    pub(super) fn list(&self) -> &[Piece] {
        &self.list
    }

    /// Bytes that are left of all.
    pub(super) const fn left(&self) -> u64 {
        self.left
    }

    /// Whether what comes next is memory of a GPU, which [`Pieces::copy_out`] and [`Pieces::take`] copy.
    pub(super) fn is_staged(&mut self) -> bool {
        self.settle();
        let next = self.list.get(self.next).filter(|piece| piece.fault.is_none());
        next.and_then(|piece| self.memory(piece)).is_some_and(LocalMemory::is_gpu)
    }

    /// Leaves out those that have a fault: none of their bytes cross the stream.
    pub(super) fn skip_faulty(&mut self) {
        self.left = self.list.iter().filter(|it| it.fault.is_none()).map(|it| it.length).sum();
        for piece in &mut self.list {
            if piece.fault.is_some() {
                piece.length = 0;
            }
        }
    }

    /// The peer has said that this piece failed.
    pub(super) fn set_fault(&mut self, index: usize, fault: Fault) -> bool {
        match self.list.get_mut(index) {
            Some(piece) => {
                piece.fault.get_or_insert(fault);
                true
            }
            None => false,
        }
    }

    /// Has the processor load what is sent next while the kernel is entered, if it is short and one piece. What is longer
    /// the kernel loads as it copies, as fast.
    pub(super) fn prefetch(&self) {
        if self.list.len() == 1 && self.left <= STAGE as u64 {
            self.prefetch_next(self.left);
        }
    }

    /// Has the processor load the places of the next bytes that are received. The kernel copies slower to places that are
    /// in no cache, and here there is mostly something else to wait for.
    pub(super) fn prefetch_room(&mut self) {
        self.prefetched = self.left.min(PREFETCHED);
        self.prefetch_next(self.prefetched);
    }

    /// Prefetches so many bytes.
    fn prefetch_next(&self, mut bytes: u64) {
        let mut skip = self.done;
        for piece in &self.list[self.next..] {
            let address = piece.address.wrapping_add(skip) as usize;
            let now = (piece.length - skip).min(bytes);
            (skip, bytes) = (0, bytes - now);
            let is_here = || self.memory(piece).is_some_and(|memory| !memory.is_gpu());
            if now as usize >= SHORTEST && piece.fault.is_none() && is_here() {
                prefetch_all(std::ptr::without_provenance(address), now as usize);
            }
            if bytes == 0 {
                return;
            }
        }
    }

    /// Those with faults, and their indexes.
    pub(super) fn faults(&self) -> impl Iterator<Item = (u32, Fault)> {
        (0..).zip(&self.list).filter_map(|(index, piece)| Some((index, piece.fault?)))
    }

    /// Sends what there is room for, behind the rest of `before` and in front of `after`: how many bytes of all
    /// three.
    pub(super) fn send(
        &mut self,
        stream: &TcpStream,
        before: &[u8],
        after: &[u8],
    ) -> io::Result<usize> {
        loop {
            self.settle();
            if self.left == 0 {
                let mut gathered = Gathered::default();
                gathered.add_bytes(before);
                gathered.add_bytes(after);
                return gathered.send(stream.as_fd());
            }
            let (count, result) = match self.send_last(stream, before, after) {
                Some(result) => {
                    (1 + [before, after].iter().filter(|it| !it.is_empty()).count(), result)
                }
                None => self.send_gathered(stream, before, after),
            };
            if count == 0 {
                // Its memory is not there.
                if self.strict {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                self.blame_absent();
                let left = (self.list[self.next].length - self.done) as usize;
                let sent = send_slice(stream.as_fd(), &ZEROS[..left.min(ZEROS.len())])?;
                self.advance(sent as u64);
                return Ok(sent);
            }
            match result {
                Err(error) if error.raw_os_error() == Some(EFAULT) => {
                    if count > 1 && !before.is_empty() {
                        return send_slice(stream.as_fd(), before);
                    }
                    self.blame(count > 1);
                }
                result => {
                    let sent = result?;
                    let data = sent.saturating_sub(before.len()) as u64;
                    self.advance(data.min(self.left));
                    return Ok(sent);
                }
            }
        }
    }

    /// As [`Self::send_gathered`] where there is one piece left, which needs no list: `None` where there are more, or its
    /// memory is not there.
    fn send_last(
        &self,
        stream: &TcpStream,
        before: &[u8],
        after: &[u8],
    ) -> Option<io::Result<usize>> {
        let [piece @ Piece { address, length, fault: None, .. }] = self.list.get(self.next..)?
        else {
            return None;
        };
        let inside = self.memory(piece)?.enter().filter(|_| !self.singly)?;
        let (from, left) = (address.wrapping_add(self.done), length - self.done);
        inside.pointer(from, left)?;
        Some(inside.send(stream.as_fd(), before, (from, left), after))
    }

    /// Sends all that can be sent at once; of how many pieces that was.
    fn send_gathered(
        &self,
        stream: &TcpStream,
        before: &[u8],
        after: &[u8],
    ) -> (usize, io::Result<usize>) {
        let mut gathered = Gathered::default();
        gathered.add_bytes(before);
        if self.gather(&mut gathered, u64::MAX) {
            gathered.add_bytes(after);
        }
        match gathered.pieces() {
            0 => (0, Ok(0)),
            count => (count, gathered.send(stream.as_fd())),
        }
    }

    /// Receives what has come; 0 at the end of the stream. `scratch` is for what has no place.
    pub(super) fn receive(&mut self, stream: &TcpStream, scratch: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.is_staged() {
                let left = usize::try_from(self.left).unwrap_or(usize::MAX);
                let room = scratch.len().min(left);
                let count = receive_slice(stream.as_fd(), &mut scratch[..room])?;
                self.take(&scratch[..count]);
                return Ok(count);
            }
            if self.prefetched == 0 {
                self.prefetch_room();
            }
            let mut gathered = Gathered::default();
            self.gather(&mut gathered, self.prefetched);
            let (pieces, result) = match gathered.pieces() {
                0 => (0, Ok(0)),
                pieces => (pieces, gathered.receive(stream.as_fd())),
            };
            drop(gathered);
            if pieces == 0 {
                self.blame_absent();
                let left = self.list.get(self.next).map_or(0, |piece| piece.length - self.done);
                let room = scratch.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                let count = receive_slice(stream.as_fd(), &mut scratch[..room])?;
                self.advance(count as u64);
                return Ok(count);
            }
            match result {
                Err(error) if error.raw_os_error() == Some(EFAULT) => self.blame(pieces > 1),
                result => {
                    let count = result?;
                    self.advance(count as u64);
                    return Ok(count);
                }
            }
        }
    }

    /// The memory of the next piece is not there any more, since it was looked at.
    fn blame_absent(&mut self) {
        if let Some(piece) = self.list.get_mut(self.next) {
            piece.fault.get_or_insert(Fault::NotRegistered);
        }
    }

    /// Takes bytes that were received already; how many of them.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> usize {
        let before = bytes.len();
        loop {
            self.settle();
            let Some(piece) = self.list.get(self.next) else { break };
            let left = piece.length - self.done;
            let count = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            if count == 0 {
                break;
            }
            let (now, rest) = bytes.split_at(count);
            if piece.fault.is_none() {
                let to = piece.address + self.done;
                let fault = self.fault_of_copy(piece, |inside| inside.copy_in(to, now));
                self.list[self.next].fault = fault;
            }
            bytes = rest;
            self.advance(count as u64);
        }
        before - bytes.len()
    }

    /// Copies what comes next, as [`send`](Self::send) sends it; how many bytes.
    pub(super) fn copy_out(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut count = 0;
        while count < bytes.len() {
            self.settle();
            let Some(piece) = self.list.get(self.next) else { break };
            let left = usize::try_from(piece.length - self.done).unwrap_or(usize::MAX);
            let room = bytes.len() - count;
            let now = &mut bytes[count..][..room.min(left)];
            if piece.fault.is_none() {
                let from = piece.address + self.done;
                let fault = self.fault_of_copy(piece, |inside| inside.copy_out(from, now));
                self.list[self.next].fault = fault;
            }
            if self.list[self.next].fault.is_some() {
                if self.strict {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                now.fill(0);
            }
            let moved = now.len();
            count += moved;
            self.advance(moved as u64);
        }
        Ok(count)
    }

    /// Copies from or to the memory of a piece: what is wrong with it, if that is not done.
    fn fault_of_copy(
        &self,
        piece: &Piece,
        copy: impl FnOnce(&Inside<'_>) -> bool,
    ) -> Option<Fault> {
        match self.memory(piece).and_then(LocalMemory::enter) {
            None => Some(Fault::NotRegistered),
            Some(inside) if copy(&inside) => None,
            // Registered memory that was not copied.
            Some(inside) => Some(if inside.gpu().is_some() { Fault::Gpu } else { Fault::Gone }),
        }
    }

    /// Adds what can be moved at once, up to so many bytes; whether that is all.
    fn gather<'a>(&'a self, gathered: &mut Gathered<'a>, mut most: u64) -> bool {
        let mut skip = self.done;
        for piece in self.list.iter().skip(self.next) {
            let Piece { address, length, fault, .. } = piece;
            // What a peer says need not be an address of anything.
            let (from, left) = (address.wrapping_add(skip), length - skip);
            skip = 0;
            if left == 0 {
                continue;
            }
            let now = left.min(most);
            most -= now;
            let added = match self.memory(piece) {
                Some(memory) if fault.is_none() && now > 0 => gathered.add(memory, from, now),
                _ => false,
            };
            if !added || now < left || self.singly {
                return false;
            }
        }
        true
    }

    /// Memory was not there. Of several pieces that were tried together it is not known whose.
    fn blame(&mut self, many: bool) {
        if many && !self.singly {
            self.singly = true;
            return;
        }
        if let Some(piece) = self.list.get_mut(self.next) {
            piece.fault.get_or_insert(Fault::Gone);
        }
        self.singly = false;
    }

    /// Notes what is wrong with the next piece, where that is to be seen at once.
    fn settle(&mut self) {
        while let Some(piece) = self.list.get(self.next)
            && piece.length == self.done
        {
            self.next += 1;
            self.done = 0;
        }
        if let Some(piece) = self.list.get(self.next)
            && piece.fault.is_none()
            && self.memory(piece).is_none_or(LocalMemory::is_closed)
        {
            self.list[self.next].fault = Some(Fault::NotRegistered);
        }
    }

    fn advance(&mut self, mut count: u64) {
        self.left -= count;
        self.prefetched = self.prefetched.saturating_sub(count);
        while let Some(piece) = self.list.get(self.next) {
            let left = piece.length - self.done;
            if count < left {
                self.done += count;
                return;
            }
            count -= left;
            self.next += 1;
            self.done = 0;
            self.singly = false;
            if count == 0 {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::time::Duration;

    use millstream_net::stream::{Readiness, wait_for_stream};
    use proptest::prelude::*;

    use super::*;
    use crate::tcp::testing::Room;

    /// A piece for each of these lengths, one behind the other.
    fn pieces(room: &Room, lengths: &[u64]) -> Pieces {
        let mut pieces = Pieces::default();
        let mut address = room.address();
        for &length in lengths {
            pieces.push(Some(&room.local), address, length);
            address += length;
        }
        pieces
    }

    fn faults(pieces: &Pieces) -> Vec<(u32, Fault)> {
        pieces.faults().collect()
    }

    #[test]
    fn no_pieces_and_pieces_of_nothing_take_nothing() {
        let room = Room::new(8);
        for lengths in [&[][..], &[0], &[0, 0, 0]] {
            let mut pieces = pieces(&room, lengths);
            assert_eq!(pieces.left(), 0);
            assert_eq!(pieces.take(b"more"), 0);
            assert_eq!(pieces.copy_out(&mut [9; 4]).unwrap(), 0);
            assert_eq!(faults(&pieces), []);
            pieces.rewind();
            assert_eq!(pieces.take(b"more"), 0);
        }
        assert_eq!(room.contents(), [0; 8]);
    }

    #[test]
    fn what_is_behind_the_last_byte_stays() {
        let room = Room::new(10);
        let mut pieces = pieces(&room, &[3, 0, 5]);
        assert_eq!(pieces.take(b"ab"), 2);
        assert_eq!(pieces.left(), 6);
        assert_eq!(pieces.take(b"cdefgh and the next answer"), 6);
        assert_eq!((pieces.left(), pieces.take(b"x")), (0, 0));
        assert_eq!(room.contents(), b"abcdefgh\0\0");
    }

    #[test]
    fn a_piece_that_is_wrong_costs_its_own_bytes_only() {
        let room = Room::new(9);
        for (memory, address, fault) in [
            (None, room.address(), Fault::NotRegistered),
            (None, u64::MAX, Fault::NotRegistered),
            (Some(Arc::clone(&room.local)), room.address() + 7, Fault::Gone),
            // Its end is beyond all addresses.
            (Some(Arc::clone(&room.local)), u64::MAX - 1, Fault::Gone),
        ] {
            let mut pieces = Pieces::default();
            pieces.push(Some(&room.local), room.address(), 3);
            pieces.push(memory.as_ref(), address, 3);
            pieces.push(Some(&room.local), room.address() + 6, 3);
            for byte in b"abcxyzghi" {
                assert_eq!(pieces.take(&[*byte]), 1);
            }
            assert_eq!(faults(&pieces), [(1, fault)]);
            assert_eq!(room.contents(), b"abc\0\0\0ghi", "{address:#x}");
            // Sent, zeros are in its place; and where nobody can be told of the fault, nothing is.
            pieces.rewind();
            let mut out = [1; 12];
            assert_eq!(pieces.copy_out(&mut out).unwrap(), 9);
            assert_eq!(&out, b"abc\0\0\0ghi\x01\x01\x01");
            pieces.strict = true;
            pieces.rewind();
            assert!(pieces.copy_out(&mut out).is_err());
        }
    }

    #[test]
    fn memory_that_goes_amid_a_piece_is_touched_no_more() {
        let (mut goes, stays) = (Room::new(4), Room::new(4));
        let mut pieces = pieces(&goes, &[4]);
        pieces.push(Some(&stays.local), stays.address(), 4);
        assert_eq!(pieces.take(b"ab"), 2);
        goes.unregister();
        assert_eq!(pieces.take(b"cdefgh"), 6);
        assert_eq!(faults(&pieces), [(0, Fault::NotRegistered)]);
        assert_eq!((goes.contents(), stays.contents()), (b"ab\0\0".to_vec(), b"efgh".to_vec()));
    }

    #[test]
    fn faults_of_the_peer_are_of_pieces_that_are_there_and_the_first_one_counts() {
        let room = Room::new(8);
        let mut pieces = pieces(&room, &[2, 3, 3]);
        assert!(pieces.set_fault(1, Fault::Gone) && pieces.set_fault(1, Fault::Gpu));
        assert!(!pieces.set_fault(3, Fault::Gone) && !pieces.set_fault(usize::MAX, Fault::Gone));
        assert_eq!(faults(&pieces), [(1, Fault::Gone)]);
        pieces.skip_faulty();
        assert_eq!(pieces.left(), 5);
        assert_eq!(pieces.take(b"abcdefg"), 5);
        assert_eq!(room.contents(), b"ab\0\0\0cde");
        // Once more, with all of them.
        pieces.begin_again([2, 3, 3].into_iter());
        assert_eq!((pieces.left(), faults(&pieces)), (8, vec![]));
        assert_eq!(pieces.take(b"12345678"), 8);
        assert_eq!(room.contents(), b"12345678");
        // And without one that was taken out.
        pieces.remove(0);
        pieces.rewind();
        assert_eq!((pieces.left(), pieces.take(b"xxxxxxxx")), (6, 6));
    }

    #[test]
    fn what_is_received_in_several_portions_is_where_it_belongs() {
        let portion = PREFETCHED as usize;
        for lengths in [&[portion + 1][..], &[portion, 1], &[10, 2 * portion, 0, 700, portion - 1]]
        {
            let sum = lengths.iter().sum();
            let (room, bytes) = (Room::new(sum), (1..=251).cycle().take(sum).collect::<Vec<u8>>());
            let lengths: Vec<_> = lengths.iter().map(|&length| length as u64).collect();
            let mut pieces = pieces(&room, &lengths);
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let near = listener.accept().unwrap().0;
            std::thread::scope(|scope| {
                scope.spawn(|| far.write_all(&bytes).unwrap());
                pieces.prefetch_room();
                while pieces.left() > 0 {
                    wait_for_stream(near.as_fd(), Readiness::Readable, Duration::from_secs(60))
                        .unwrap();
                    let count = pieces.receive(&near, &mut []).unwrap();
                    assert!((1..=portion).contains(&count), "{count} of {lengths:?}");
                }
            });
            assert!(room.contents() == bytes && faults(&pieces).is_empty(), "{lengths:?}");
        }
    }

    proptest! {
        #[test]
        fn bytes_come_out_as_they_were_put_in(
            lengths in prop::collection::vec(0_u64..20, 0..12),
            portions in prop::collection::vec(1_usize..40, 1..8),
        ) {
            let sum: u64 = lengths.iter().sum();
            let room = Room::new(240);
            let mut pieces = pieces(&room, &lengths);
            let bytes: Vec<u8> = (1..=255).cycle().take(sum as usize).collect();
            let mut rest = &bytes[..];
            for portion in portions.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let now = rest.len().min(*portion);
                prop_assert_eq!(pieces.take(&rest[..now]), now);
                rest = &rest[now..];
                prop_assert_eq!(pieces.left(), rest.len() as u64);
            }
            prop_assert_eq!(&room.contents()[..bytes.len()], &bytes);
            pieces.rewind();
            let mut out = Vec::new();
            for portion in portions.iter().cycle() {
                let mut part = vec![0; *portion];
                let count = pieces.copy_out(&mut part).unwrap();
                out.extend_from_slice(&part[..count]);
                if count < *portion || pieces.left() == 0 {
                    break;
                }
            }
            prop_assert_eq!(out, bytes);
        }
    }
}
