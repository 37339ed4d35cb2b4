//! The proof of a token in frames: messages of [`millstream_net::token`] are the bodies of one type of frame.

use std::io;
use std::net::SocketAddr;

use millstream_net::token::{self, Said};
pub use millstream_net::token::{MESSAGE_LIMIT, Purpose, Token, TokenError, TokenFileError};

use crate::{Frame, FrameType};

/// The side that calls.
#[derive(Debug)]
pub struct Initiator(token::Initiator);

impl Initiator {
    /// Proves to who answers at `address`, as it was connected to, that this process has the token.
    pub fn new(
        token: Token,
        purpose: Purpose,
        address: SocketAddr,
        expected: Option<&str>,
    ) -> io::Result<Self> {
        token::Initiator::new(token, purpose, address, expected).map(Self)
    }

    /// What is said first.
    pub fn opening(&self) -> Frame {
        Frame::new(FrameType::Token, self.0.opening())
    }

    /// Takes a frame of the other side; what is said next, or nothing once both have proved it.
    pub fn take(&mut self, frame: &Frame) -> Result<Option<Frame>, TokenError> {
        if frame.frame_type != FrameType::Token {
            return Err(TokenError::NoProof);
        }
        let next = self.0.take(&frame.body)?;
        Ok(next.map(|body| Frame::new(FrameType::Token, body)))
    }
}

/// The side that is called.
#[derive(Debug)]
pub(crate) struct Responder {
    token: Token,
    inner: token::Responder,
}

impl Responder {
    /// Who was called at `address`, its own.
    pub(crate) fn new(token: Token, purpose: Purpose, address: SocketAddr, name: &str) -> Self {
        Self { token, inner: token::Responder::new(purpose, address, name) }
    }

    /// Takes a frame of the caller; what is said next, and whether he has proved that he has the token. An error is
    /// what the verdict says.
    pub(crate) fn take(&mut self, frame: &Frame) -> io::Result<Result<(Frame, bool), TokenError>> {
        if frame.frame_type != FrameType::Token {
            return Ok(Err(TokenError::Needed));
        }
        let said = self.inner.take(&frame.body, token::draw_nonce()?, [&self.token]);
        Ok(said.map(|said| match said {
            Said::Challenge(body) => (Frame::new(FrameType::Token, body), false),
            Said::Accepted(body, _) => (Frame::new(FrameType::Token, body), true),
        }))
    }
}

/// Why a frame turns somebody away, if that is what it does.
pub fn token_refusal(frame: &Frame) -> Option<TokenError> {
    (frame.frame_type == FrameType::Token).then(|| TokenError::of_verdict(&frame.body))
}

/// The frame that turns somebody away.
pub(crate) fn verdict(error: &TokenError) -> Frame {
    Frame::new(FrameType::Token, error.verdict())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_of_another_type_is_no_proof() {
        let token = Token::new(b"a token of 16 bytes and more").unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], 7));
        let plain = Frame::new(FrameType::Probe, "{}");
        let mut called = Responder::new(token, Purpose::Memory, address, "n");
        assert_eq!(called.take(&plain).unwrap(), Err(TokenError::Needed));
        let mut caller = Initiator::new(token, Purpose::Memory, address, None).unwrap();
        assert_eq!(caller.take(&plain), Err(TokenError::NoProof));
    }
}
