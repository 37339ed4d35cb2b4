//! What messages contain, and what may be expected of a peer.
//!
//! `ibv_rc_pingpong` has one buffer, which it sends from and receives into: what it got, it sends
//! back. At first that is filled with 0x7b; with its option `-c`, the first byte of every page is 0
//! in the client's, and in the end the server checks those bytes and no other. So ours are 0 too,
//! and the rest of a message is different for each side and each exchange, so that an old or a
//! reflected message is not taken for the right one.

/// What the original fills its buffer with.
const FILLING: u8 = 0x7b;
/// The smallest page there is: starts of larger ones are starts of these too.
const PAGE: usize = 4096;
/// Pages of the machines that the original runs on.
const PAGES: [usize; 3] = [4096, 16384, 65536];

/// A side of the conversation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Side {
    Client,
    Server,
}

/// Fills `message` with what `side` sends in exchange number `exchange`.
pub(super) fn fill(message: &mut [u8], side: Side, exchange: u32) {
    Filling::new(side, exchange).fill(message);
}

/// The bytes of a message, from the first on.
pub(super) struct Filling {
    state: u32,
}

impl Filling {
    pub(super) fn new(side: Side, exchange: u32) -> Self {
        let salt = exchange.wrapping_mul(2) | u32::from(side == Side::Server);
        Self { state: salt.wrapping_mul(0x9e37_79b9) ^ 0x6d69_6c6c }
    }

    /// Writes the next bytes: whole pages, but for the last part of a message.
    pub(super) fn fill(&mut self, part: &mut [u8]) {
        for page in part.chunks_mut(PAGE) {
            for piece in page.chunks_mut(4) {
                // xorshift32: the state is never 0, as the step is one to one and 0 maps to itself.
                let mut state = self.state.max(1);
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                self.state = state;
                piece.copy_from_slice(&state.to_le_bytes()[..piece.len()]);
            }
            page[0] = 0;
        }
    }
}

/// What a peer may be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Peer {
    /// One of us.
    Millstream,
    /// `ibv_rc_pingpong`, with `-c` and this page size, or without.
    Original { page: Option<usize> },
}

/// Checks what a peer sends. What it is shows in its first messages.
pub(super) struct Checker {
    /// Our side.
    side: Side,
    /// What the peer may still be.
    candidates: Vec<Peer>,
    expected: Vec<u8>,
    pub(super) bytes_checked: u64,
}

/// A byte that is not what the peer should have sent.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct WrongByte {
    pub(super) offset: usize,
    pub(super) expected: u8,
    pub(super) found: u8,
}

impl Checker {
    pub(super) fn new(side: Side, size: usize) -> Self {
        let mut candidates = vec![Peer::Millstream, Peer::Original { page: None }];
        if side == Side::Server {
            candidates.extend(PAGES.map(|page| Peer::Original { page: Some(page) }));
        }
        Self { side, candidates, expected: vec![0; size], bytes_checked: 0 }
    }

    /// Checks the message that came in exchange number `exchange`.
    pub(super) fn check(&mut self, message: &[u8], exchange: u32) -> Result<(), WrongByte> {
        let mut wrong = None;
        let mut left = Vec::with_capacity(self.candidates.len());
        for &peer in &self.candidates {
            expect(&mut self.expected, self.side, peer, exchange);
            if self.expected == message {
                left.push(peer);
                continue;
            }
            let mut pairs = self.expected.iter().zip(message);
            let offset = pairs.position(|(expected, byte)| expected != byte);
            // No difference but the length.
            let offset = offset.unwrap_or_else(|| message.len().min(self.expected.len()));
            let byte = |bytes: &[u8]| bytes.get(offset).copied().unwrap_or_default();
            let (expected, found) = (byte(&self.expected), byte(message));
            // The candidate that explains most of the message is the likely one.
            if wrong.as_ref().is_none_or(|best: &WrongByte| best.offset < offset) {
                wrong = Some(WrongByte { offset, expected, found });
            }
        }
        if let (true, Some(wrong)) = (left.is_empty(), wrong) {
            return Err(wrong);
        }
        self.candidates = left;
        self.bytes_checked += message.len() as u64;
        Ok(())
    }

    /// What the peer has sent, in words, if the original is called `original`.
    pub(super) fn bytes_of(&self, original: &str) -> String {
        match self.candidates[..] {
            [Peer::Millstream] => "millstream's pattern".to_owned(),
            [Peer::Original { page: None }] => format!("{original}'s bytes"),
            [Peer::Original { page: Some(_) }] => format!("{original}'s bytes, validating"),
            _ => "what any pingpong would have sent".to_owned(),
        }
    }
}

/// Fills `message` with what `peer` sends to us, on side `side`, in an exchange.
fn expect(message: &mut [u8], side: Side, peer: Peer, exchange: u32) {
    match (peer, side) {
        (Peer::Millstream, Side::Client) => fill(message, Side::Server, exchange),
        (Peer::Millstream, Side::Server) => fill(message, Side::Client, exchange),
        // It sends back what it got.
        (Peer::Original { .. }, Side::Client) => fill(message, Side::Client, exchange),
        (Peer::Original { .. }, Side::Server) if exchange > 0 => {
            fill(message, Side::Server, exchange - 1);
        }
        (Peer::Original { page }, Side::Server) => {
            message.fill(FILLING);
            if let Some(page) = page {
                message.iter_mut().step_by(page).for_each(|byte| *byte = 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(size: usize, side: Side, exchange: u32) -> Vec<u8> {
        let mut message = vec![0xaa; size];
        fill(&mut message, side, exchange);
        message
    }

    #[test]
    fn the_original_accepts_the_pattern() {
        for size in [1, 4096, 4097, 1 << 20] {
            let message = message(size, Side::Server, 999);
            assert!(message.iter().step_by(4096).all(|&byte| byte == 0));
        }
    }

    #[test]
    fn messages_differ_by_side_and_exchange() {
        let messages = [(Side::Client, 0), (Side::Client, 1), (Side::Server, 0), (Side::Server, 1)]
            .map(|(side, exchange)| message(1000, side, exchange));
        for (index, one) in messages.iter().enumerate() {
            for other in &messages[index + 1..] {
                let same = one.iter().zip(other).filter(|(one, other)| one == other).count();
                assert!(same < 30, "{same} of 1000 bytes are the same");
            }
        }
    }

    #[test]
    fn two_of_us_understand_each_other() {
        for size in [0, 1, 2, 5, 5000] {
            let mut client = Checker::new(Side::Client, size);
            let mut server = Checker::new(Side::Server, size);
            for exchange in 0..50 {
                server.check(&message(size, Side::Client, exchange), exchange).unwrap();
                client.check(&message(size, Side::Server, exchange), exchange).unwrap();
            }
            assert_eq!(client.bytes_checked, 50 * size as u64);
            if size > 4 {
                assert_eq!(client.bytes_of("x"), "millstream's pattern");
                assert_eq!(server.bytes_of("x"), "millstream's pattern");
            }
        }
    }

    #[test]
    fn the_original_is_understood_on_both_sides() {
        for size in [0, 1, 2, 5, 100_000] {
            for page in [None, Some(4096), Some(65536)] {
                let mut server = Checker::new(Side::Server, size);
                let mut buffer = vec![FILLING; size];
                if let Some(page) = page {
                    buffer.iter_mut().step_by(page).for_each(|byte| *byte = 0);
                }
                for exchange in 0..5 {
                    server.check(&buffer, exchange).unwrap();
                    fill(&mut buffer, Side::Server, exchange);
                }
                if size > 4 && page.is_none() {
                    assert_eq!(server.bytes_of("original"), "original's bytes");
                }
            }
            let mut client = Checker::new(Side::Client, size);
            for exchange in 0..5 {
                client.check(&message(size, Side::Client, exchange), exchange).unwrap();
            }
        }
    }

    #[test]
    fn one_wrong_byte_is_found() {
        let mut checker = Checker::new(Side::Client, 5000);
        checker.check(&message(5000, Side::Server, 0), 0).unwrap();
        let mut wrong = message(5000, Side::Server, 1);
        wrong[4999] ^= 0x80;
        let expected = wrong[4999] ^ 0x80;
        let found = wrong[4999];
        let error = checker.check(&wrong, 1).unwrap_err();
        assert_eq!(error, WrongByte { offset: 4999, expected, found });
        // An old message is wrong, and a short one.
        checker.check(&message(5000, Side::Server, 0), 1).unwrap_err();
        checker.check(&message(5000, Side::Server, 1)[..4999], 1).unwrap_err();
        // And so is ours, reflected: this peer has shown that it is no original.
        checker.check(&message(5000, Side::Client, 1), 1).unwrap_err();
        assert_eq!(checker.bytes_checked, 5000);
    }
}
