//! Bytes that were received where a header may begin, and were not read yet.

/// Bytes that are received at once there: with its header a small message comes whole. More of a large one would be
/// copied once more than need be.
pub(super) const ROOM: usize = 8 << 10;

/// See above. Its memory is cleared once: what is received overwrites what was read.
#[derive(Default)]
pub(super) struct Stage {
    /// None before the first bytes are received.
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Stage {
    /// What was received and not read.
    pub(super) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// So many bytes were read.
    pub(super) fn read(&mut self, count: usize) {
        self.start = self.end.min(self.start + count);
    }

    /// Where the next bytes are received: all the room that there is.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.bytes.is_empty() {
            self.bytes = vec![0; ROOM].into_boxed_slice();
        }
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// So many bytes are in what was the [room](Self::room). Whether it could have taken more.
    pub(super) fn received(&mut self, count: usize) -> bool {
        self.end = self.bytes.len().min(self.end + count);
        self.end < self.bytes.len()
    }

    /// Nothing was received.
    pub(super) fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }
}

#[cfg(test)]
impl Stage {
    pub(super) fn receive(&mut self, bytes: &[u8]) {
        self.room()[..bytes.len()].copy_from_slice(bytes);
        self.received(bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_in_their_order_and_make_room_for_others() {
        let mut stage = Stage::default();
        assert!(stage.unread().is_empty() && stage.is_empty());
        assert_eq!(stage.room().len(), ROOM);
        stage.receive(b"abcdef");
        stage.read(4);
        assert_eq!(stage.unread(), b"ef");
        assert_eq!(stage.room().len(), ROOM - 2);
        stage.receive(b"gh");
        assert_eq!((stage.unread(), stage.is_empty()), (&b"efgh"[..], false));
        stage.read(5);
        assert!(stage.is_empty());
        assert!(!{
            stage.room().fill(7);
            stage.received(ROOM)
        });
        assert_eq!(stage.unread(), [7; ROOM]);
        assert!(stage.room().is_empty());
        stage.clear();
        assert!(stage.is_empty() && stage.room().len() == ROOM);
    }
}
