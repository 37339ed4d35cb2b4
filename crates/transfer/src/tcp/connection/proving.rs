//! The beginning of a connection: TLS, and the proof of a token, where these are asked for.

use std::io;
use std::net::TcpStream;

use millstream_metadata::{FrameDecoder, Initiator, MESSAGE_LIMIT, TokenError};

use super::{Broken, Line, broke, closed};
use crate::FailureReason;

pub(super) struct Proving {
    initiator: Option<Initiator>,
    decoder: FrameDecoder,
    out: Vec<u8>,
    sent: usize,
}

impl Proving {
    pub(super) fn new(initiator: Option<Initiator>) -> Self {
        let out = initiator.as_ref().map(|initiator| initiator.opening().encode());
        let out = out.unwrap_or_default();
        Self { initiator, decoder: FrameDecoder::new(MESSAGE_LIMIT), out, sent: 0 }
    }

    pub(super) fn wants_room(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Says and hears what it can without a wait; whether it is over.
    pub(super) fn go_on(&mut self, stream: &TcpStream, line: &mut Line) -> Result<bool, Broken> {
        if !line.handshake(stream).map_err(|error| broke(&error))? {
            return Ok(false);
        }
        let Some(mut initiator) = self.initiator.take() else { return Ok(true) };
        let result = self.prove(&mut initiator, stream, line);
        self.initiator = Some(initiator);
        result
    }

    fn prove(
        &mut self,
        initiator: &mut Initiator,
        stream: &TcpStream,
        line: &mut Line,
    ) -> Result<bool, Broken> {
        loop {
            let moved = match self.wants_room() {
                true => self.send(stream, line),
                false => self.receive(stream, line)?,
            };
            match moved {
                Ok(0) => return Err(closed()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broke(&error)),
            }
            let Some(frame) = self.decoder.take() else { continue };
            match initiator.take(&frame).map_err(|error| refused(&error))? {
                None => return Ok(true),
                Some(next) => (self.out, self.sent) = (next.encode(), 0),
            }
        }
    }

    fn send(&mut self, stream: &TcpStream, line: &mut Line) -> io::Result<usize> {
        let sent = line.send(stream, &self.out[self.sent..])?;
        self.sent += sent;
        Ok(sent)
    }

    /// Receives no more than belongs to the proof.
    fn receive(
        &mut self,
        stream: &TcpStream,
        line: &mut Line,
    ) -> Result<io::Result<usize>, Broken> {
        let nonsense = |_| refused(&TokenError::NoProof);
        let mut buffer = [0; MESSAGE_LIMIT];
        let wanted = self.decoder.wants().map_err(nonsense)?.min(buffer.len());
        let received = line.receive(stream, &mut buffer[..wanted]);
        if let Ok(count) = received {
            self.decoder.push(&buffer[..count]).map_err(nonsense)?;
        }
        Ok(received)
    }
}

fn refused(error: &TokenError) -> Broken {
    Broken::Failed(FailureReason::Connection(error.to_string().into()))
}
