//! The proof of a token over sockets that block: at a port that is called, and by who calls.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Instant;

use thiserror::Error;

use crate::stream::{Until, drain};
use crate::token::{Initiator, MESSAGE_LIMIT, Responder, Said, draw_nonce};
use crate::{Frame, FrameDecoder, Purpose, Token, TokenError};

/// Admits those to a port who have the token.
#[derive(Clone, Debug)]
pub struct Gate {
    token: Token,
    purpose: Purpose,
    name: String,
}

/// Why two ends came to no proof.
#[derive(Debug, Error)]
pub enum ProofError {
    /// By their tokens.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// By the connection.
    #[error("the connection failed before both had proved that they have the token: {0}")]
    Io(#[from] io::Error),
}

impl Gate {
    /// For a port with this purpose, of an engine that is called so.
    pub fn new(token: Token, purpose: Purpose, name: &str) -> Self {
        Self { token, purpose, name: name.to_owned() }
    }

    /// What is asked of callers.
    pub const fn token(&self) -> Token {
        self.token
    }

    /// Waits until the caller has proved that he has the token. Who has not is told why, and is to be let go.
    /// Changes the timeouts of the socket.
    pub fn admit(&self, stream: &TcpStream, deadline: Instant) -> Result<(), ProofError> {
        let result = self.try_admit(stream, deadline);
        if let Err(ProofError::Token(error)) = &result {
            // What he still says must not take back what was said to him.
            if write(stream, &error.verdict(), deadline).is_ok() {
                let _ = stream.shutdown(Shutdown::Write);
                drain(stream, deadline);
            }
        }
        result
    }

    fn try_admit(&self, stream: &TcpStream, deadline: Instant) -> Result<(), ProofError> {
        let address = stream.local_addr()?;
        let mut responder = Responder::new(self.token, self.purpose, address, &self.name);
        loop {
            // Whose first words are no frame, or too long, has none.
            let frame = match read(stream, deadline) {
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(TokenError::Needed.into());
                }
                frame => frame?,
            };
            match responder.take(&frame, draw_nonce()?)? {
                Said::Challenge(frame) => write(stream, &frame, deadline)?,
                Said::Accepted(frame) => return Ok(write(stream, &frame, deadline)?),
            }
        }
    }
}

/// Proves to who was connected to that this process has the token, and has him prove it.
pub fn prove(
    stream: &TcpStream,
    token: Token,
    purpose: Purpose,
    deadline: Instant,
) -> Result<(), ProofError> {
    let address: SocketAddr = stream.peer_addr()?;
    let mut initiator = Initiator::new(token, purpose, address, None)?;
    write(stream, &initiator.opening(), deadline)?;
    loop {
        let frame = match read(stream, deadline) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(TokenError::NoProof.into());
            }
            frame => frame?,
        };
        match initiator.take(&frame)? {
            Some(frame) => write(stream, &frame, deadline)?,
            None => return Ok(()),
        }
    }
}

/// A frame, and nothing of what follows it.
fn read(stream: &TcpStream, deadline: Instant) -> io::Result<Frame> {
    let mut decoder = FrameDecoder::new(MESSAGE_LIMIT);
    let mut buffer = [0; MESSAGE_LIMIT];
    let malformed = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    loop {
        let wanted = decoder.wants().map_err(malformed)?.min(buffer.len());
        let count = match Until::new(stream, deadline).read(&mut buffer[..wanted]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        decoder.push(&buffer[..count]).map_err(malformed)?;
        if let Some(frame) = decoder.take() {
            return Ok(frame);
        }
    }
}

fn write(stream: &TcpStream, frame: &Frame, deadline: Instant) -> io::Result<()> {
    Until::new(stream, deadline).write_all(&frame.encode())
}
