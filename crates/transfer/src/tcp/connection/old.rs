//! Answers in the framing of the original.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use millstream_net::stream::receive_slice;

use super::{Broken, Connection, SCRATCH, broke, closed, nonsense};
use crate::tcp::original::{self, STATUS_LENGTH, Version};
use crate::tcp::peer::Peer;
use crate::{FailureReason, Opcode};

/// What is awaited before the data, if any, of what is under way.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Status {
    #[default]
    None,
    /// A status, of which so many bytes have come.
    Awaited([u8; STATUS_LENGTH], usize),
    /// A byte that is read behind a WRITE.
    Behind,
    /// It has come, and the data of a READ comes.
    Data,
}

impl Status {
    pub(super) const fn of(version: Version, opcode: Opcode, behind: bool) -> Self {
        match (version, opcode) {
            (Version::Two, _) => Self::Awaited([0; STATUS_LENGTH], 0),
            (Version::One, Opcode::Read) => Self::Data,
            (Version::One, Opcode::Write) if behind => Self::Behind,
            (Version::One, Opcode::Write) => Self::None,
        }
    }
}

impl Connection {
    /// Receives what there is.
    pub(super) fn receive_old(&mut self, peer: &Arc<Peer>, version: Version) -> Result<(), Broken> {
        let Some(stream) = self.stream.clone() else { return Ok(()) };
        loop {
            let received = match (&mut self.status, self.under_way.front_mut()) {
                (Status::Data, Some(message)) if message.opcode == Some(Opcode::Read) => {
                    self.scratch.resize(SCRATCH, 0);
                    message.pieces.receive(&stream, &mut self.scratch)
                }
                (Status::Awaited(bytes, count), Some(_)) => {
                    let received = receive_slice(stream.as_fd(), &mut bytes[*count..]);
                    *count += *received.as_ref().unwrap_or(&0);
                    received
                }
                (Status::Behind, Some(_)) => receive_slice(stream.as_fd(), &mut [0]),
                // Nothing is to come but the end.
                _ => receive_slice(stream.as_fd(), &mut [0]),
            };
            match received {
                Ok(0) if self.under_way.is_empty() && self.answered => return Err(Broken::Done),
                Ok(0) => return Err(self.ended(version)),
                Ok(_) => self.moved = Some(Instant::now()),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broke(&error)),
            }
            if !std::mem::replace(&mut self.answered, true) {
                peer.connected();
            }
            self.go_on(peer, version)?;
        }
    }

    /// Something more has come.
    fn go_on(&mut self, peer: &Arc<Peer>, version: Version) -> Result<(), Broken> {
        let Some(message) = self.under_way.front_mut() else {
            return Err(nonsense("it says something unasked"));
        };
        match self.status {
            Status::None => return Err(nonsense("it says something unasked")),
            Status::Awaited(_, count) if count < STATUS_LENGTH => return Ok(()),
            Status::Awaited(bytes, _) => match original::Status::parse(bytes) {
                None => return Err(nonsense("its status is none")),
                Some(original::Status::Rejected(_)) => {
                    message.reject();
                    self.finish(peer, true);
                    // It closes the connection.
                    return Err(Broken::Done);
                }
                Some(original::Status::Done) if message.opcode == Some(Opcode::Read) => {
                    self.status = Status::Data;
                    return Ok(());
                }
                Some(original::Status::Done) if self.sending => {
                    return Err(nonsense("it has acknowledged what was not sent yet"));
                }
                Some(original::Status::Done) => {}
            },
            Status::Behind if self.sending => {
                return Err(nonsense("it answers what was not sent yet"));
            }
            Status::Behind => {}
            Status::Data if message.pieces.left() > 0 => return Ok(()),
            Status::Data => {}
        }
        self.finish(peer, true);
        // Whether it serves another request cannot be told.
        if version == Version::One { Err(Broken::Done) } else { Ok(()) }
    }

    /// The message under way is over.
    fn finish(&mut self, peer: &Arc<Peer>, confirmed: bool) {
        if let Some(message) = self.under_way.pop_front() {
            self.under_way_bytes = 0;
            self.sending = false;
            self.status = Status::None;
            peer.flow().done(message, confirmed);
        }
    }

    /// Why the end of the stream comes amid a request.
    fn ended(&self, version: Version) -> Broken {
        let text = match (version, self.status) {
            (Version::One, Status::Behind) => {
                "it has closed the connection and confirmed no WRITE: it rejected the range, or serves one \
                 request for a connection"
            }
            (Version::One, Status::Data) => {
                "it has closed the connection, as it does when the range is not in memory that is registered \
                 there"
            }
            _ => return closed(),
        };
        Broken::Ended(FailureReason::Connection(text.into()))
    }
}
