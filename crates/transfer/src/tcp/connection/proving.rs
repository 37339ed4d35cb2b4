//! The proof of a token at the beginning of a connection.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;

use millstream_metadata::{FrameDecoder, Initiator, MESSAGE_LIMIT, TokenError};
use millstream_net::stream::{receive_slice, send_slice};

use super::{Broken, broke, closed};
use crate::FailureReason;

pub(super) struct Proving {
    initiator: Initiator,
    decoder: FrameDecoder,
    out: Vec<u8>,
    sent: usize,
}

impl Proving {
    pub(super) fn new(initiator: Initiator) -> Self {
        let out = initiator.opening().encode();
        Self { initiator, decoder: FrameDecoder::new(MESSAGE_LIMIT), out, sent: 0 }
    }

    pub(super) fn wants_room(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Says and hears what it can without a wait; whether it is over.
    pub(super) fn go_on(&mut self, stream: &TcpStream) -> Result<bool, Broken> {
        loop {
            let moved = match self.wants_room() {
                true => self.send(stream),
                false => self.receive(stream)?,
            };
            match moved {
                Ok(0) => return Err(closed()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broke(&error)),
            }
            let Some(frame) = self.decoder.take() else { continue };
            match self.initiator.take(&frame).map_err(|error| refused(&error))? {
                None => return Ok(true),
                Some(next) => (self.out, self.sent) = (next.encode(), 0),
            }
        }
    }

    fn send(&mut self, stream: &TcpStream) -> io::Result<usize> {
        let sent = send_slice(stream.as_fd(), &self.out[self.sent..])?;
        self.sent += sent;
        Ok(sent)
    }

    /// Receives no more than belongs to the proof.
    fn receive(&mut self, stream: &TcpStream) -> Result<io::Result<usize>, Broken> {
        let nonsense = |_| refused(&TokenError::NoProof);
        let mut buffer = [0; MESSAGE_LIMIT];
        let wanted = self.decoder.wants().map_err(nonsense)?.min(buffer.len());
        let received = receive_slice(stream.as_fd(), &mut buffer[..wanted]);
        if let Ok(count) = received {
            self.decoder.push(&buffer[..count]).map_err(nonsense)?;
        }
        Ok(received)
    }
}

fn refused(error: &TokenError) -> Broken {
    Broken::Failed(FailureReason::Connection(error.to_string().into()))
}
