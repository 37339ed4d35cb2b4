//! Records with a checksum each: no byte is used before its record was found to be as it was sent.
//!
//! | what | bytes |
//! | --- | --- |
//! | record | length of its payload (4); CRC-32C of the payload (4); CRC-32C of these 8 bytes (4). Then the payload |
//!
//! A record without payload says that one of the other end arrived damaged. All numbers are little-endian.

use std::fmt;
use std::io::{self, Read, Write};

/// The longest payload.
const MAX_PAYLOAD: usize = 64 << 10;

const HEADER: usize = 12;

/// Bytes that are read at a time.
const READ: usize = 128 << 10;

/// A record that is not as it was sent: the connection is of no use any more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::tcp) enum Damaged {
    /// It came here.
    Here,
    /// The peer says so.
    There,
}

impl fmt::Display for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Here => "what it sent was damaged on its way here: its checksum is wrong",
            Self::There => "what was sent to it was damaged on its way: its checksum is wrong",
        })
    }
}

impl std::error::Error for Damaged {}

impl From<Damaged> for io::Error {
    fn from(damaged: Damaged) -> Self {
        Self::new(io::ErrorKind::InvalidData, damaged)
    }
}

/// Both directions of a connection.
#[derive(Debug, Default)]
pub(in crate::tcp) struct Checked {
    /// What has come: from `start` on so many bytes are ready, and up to `end` the others were not checked yet.
    incoming: Vec<u8>,
    start: usize,
    ready: usize,
    end: usize,
    outgoing: Vec<u8>,
    sent: usize,
}

impl Checked {
    /// Whose first bytes are these, which are in no record, and those that have come already.
    pub(in crate::tcp) fn new(first: &[u8], received: &[u8]) -> Self {
        let (outgoing, incoming) = (first.to_vec(), received.to_vec());
        Self { incoming, outgoing, end: received.len(), ..Self::default() }
    }

    pub(super) fn ready(&self) -> &[u8] {
        &self.incoming[self.start..][..self.ready]
    }

    /// What has come and is in no record that was found to be right.
    pub(super) fn unread(&self) -> &[u8] {
        &self.incoming[self.start + self.ready..self.end]
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
        self.ready -= count;
    }

    pub(super) fn fill(&mut self, stream: &mut dyn Read) -> io::Result<usize> {
        // What was received with the first bytes of the connection.
        if self.check()? {
            return Ok(self.ready);
        }
        // Less than a record, which is shorter than this.
        self.incoming.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        self.incoming.resize(READ, 0);
        let count = stream.read(&mut self.incoming[self.end..])?;
        self.end += count;
        self.check()?;
        Ok(count)
    }

    /// Looks at the next record if all of it has come; whether something is ready.
    fn check(&mut self) -> io::Result<bool> {
        if self.ready > 0 {
            return Ok(true);
        }
        let rest = &self.incoming[self.start..self.end];
        let Some((header, payload)) = rest.split_first_chunk::<HEADER>() else { return Ok(false) };
        let word = |at: usize| {
            let [a, b, c, d] = [header[at], header[at + 1], header[at + 2], header[at + 3]];
            u32::from_le_bytes([a, b, c, d])
        };
        let length = word(0) as usize;
        if crc32c::crc32c(&header[..8]) != word(8) || length > MAX_PAYLOAD {
            return Err(self.damaged());
        }
        if length == 0 {
            return Err(Damaged::There.into());
        }
        let Some(payload) = payload.get(..length) else { return Ok(false) };
        if crc32c::crc32c(payload) != word(4) {
            return Err(self.damaged());
        }
        self.start += HEADER;
        self.ready = length;
        Ok(true)
    }

    /// The other end is to hear of it.
    fn damaged(&mut self) -> io::Error {
        self.outgoing.extend_from_slice(&header(&[]));
        Damaged::Here.into()
    }

    pub(super) fn accept(&mut self, bytes: &[u8]) {
        for payload in bytes.chunks(MAX_PAYLOAD) {
            self.outgoing.extend_from_slice(&header(payload));
            self.outgoing.extend_from_slice(payload);
        }
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    pub(super) fn flush(&mut self, stream: &mut dyn Write) -> io::Result<()> {
        while self.has_unsent() {
            match stream.write(&self.outgoing[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(())
    }
}

fn header(payload: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    header[4..8].copy_from_slice(&crc32c::crc32c(payload).to_le_bytes());
    let own = crc32c::crc32c(&header[..8]);
    header[8..].copy_from_slice(&own.to_le_bytes());
    header
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What a connection sends that is given these bytes.
    fn sent(bytes: &[u8]) -> Vec<u8> {
        let (mut records, mut stream) = (Checked::default(), Vec::new());
        records.accept(bytes);
        records.flush(&mut stream).unwrap();
        assert!(!records.has_unsent());
        stream
    }

    /// What one gets of it.
    fn received(records: &mut Checked, mut stream: &[u8]) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        while records.fill(&mut stream)? > 0 {
            all.extend_from_slice(records.ready());
            records.consume(records.ready().len());
        }
        Ok(all)
    }

    fn damage(error: &io::Error) -> Option<Damaged> {
        error.get_ref()?.downcast_ref().copied()
    }

    #[test]
    fn bytes_come_as_they_were_sent() {
        let bytes: Vec<u8> = (0..200_000_u32).map(|index| (index % 251) as u8).collect();
        let stream = sent(&bytes);
        assert_eq!(stream.len(), bytes.len() + 4 * HEADER);
        assert_eq!(received(&mut Checked::default(), &stream).unwrap(), bytes);
        // Of which some came with what was before.
        let (first, rest) = stream.split_at(70_000);
        assert_eq!(received(&mut Checked::new(&[], first), rest).unwrap(), bytes);
    }

    #[test]
    fn both_ends_hear_of_a_wrong_bit_wherever_it_is() {
        let stream = sent(b"some bytes");
        for bit in 0..stream.len() * 8 {
            let mut wrong = stream.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            let mut records = Checked::default();
            let error = received(&mut records, &wrong).unwrap_err();
            assert_eq!(damage(&error), Some(Damaged::Here), "bit {bit}");
            let mut answer = Vec::new();
            records.flush(&mut answer).unwrap();
            let error = received(&mut Checked::default(), &answer).unwrap_err();
            assert_eq!(damage(&error), Some(Damaged::There), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_waits_for_more(bytes: Vec<u8>) {
            let mut records = Checked::default();
            let _ = received(&mut records, &bytes);
            prop_assert!(records.incoming.len() <= READ);
        }
    }
}
