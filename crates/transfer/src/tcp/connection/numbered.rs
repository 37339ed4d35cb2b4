//! Answers to numbered messages.

use std::sync::Arc;
use std::time::Instant;

use millstream_metadata::{FrameDecoder, MESSAGE_LIMIT, TokenError};

use super::{Broken, Connection, SCRATCH, STAGE, broke, closed, nonsense};
use crate::tcp::message::{Answer, Fault, Welcome};
use crate::tcp::peer::Peer;
use crate::{FailureReason, Opcode};

/// What comes next.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Receiving {
    #[default]
    Welcome,
    Answer,
    /// So many faults, and what they belong to.
    Faults(u32, Answer),
    /// The data of the first message under way.
    Data,
}

impl Receiving {
    /// How many bytes are needed at once.
    const fn length(self) -> usize {
        match self {
            Self::Welcome => Welcome::LENGTH,
            Self::Answer => Answer::LENGTH,
            Self::Faults(..) => Fault::LENGTH,
            Self::Data => 0,
        }
    }
}

impl Connection {
    /// Receives what there is.
    pub(super) fn receive_numbered(&mut self, peer: &Arc<Peer>) -> Result<(), Broken> {
        let Some(stream) = self.stream.clone() else { return Ok(()) };
        loop {
            self.read_stage(peer)?;
            let received = match (self.receiving, self.under_way.front_mut()) {
                (Receiving::Data, Some(message)) => {
                    self.scratch.resize(SCRATCH, 0);
                    self.line.receive_pieces(&stream, &mut message.pieces, &mut self.scratch)
                }
                _ => {
                    self.stage.drain(..self.start);
                    self.start = 0;
                    let had = self.stage.len();
                    self.stage.resize(STAGE, 0);
                    let received = self.line.receive(&stream, &mut self.stage[had..]);
                    self.stage.truncate(had + received.as_ref().unwrap_or(&0));
                    received
                }
            };
            match received {
                Ok(0) if self.under_way.is_empty() && self.answered => return Err(Broken::Done),
                Ok(0) => return Err(self.turned_away().unwrap_or_else(closed)),
                Ok(_) => self.moved = Some(Instant::now()),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(self.without_records().unwrap_or_else(|| broke(&error)));
                }
            }
        }
    }

    /// What a port has said that asks for more than it was shown. It says so in no record: it has not read the hello.
    fn turned_away(&self) -> Option<Broken> {
        let mut decoder = FrameDecoder::new(MESSAGE_LIMIT);
        decoder.push(&self.stage[self.start..]).ok()?;
        decoder.push(self.line.unread()).ok()?;
        let said = decoder.take().filter(|_| self.receiving == Receiving::Welcome)?;
        let reason = TokenError::said(&said)?.to_string();
        Some(Broken::Failed(FailureReason::Connection(reason.into())))
    }

    /// The answer to the hello of a peer that knows of no records, which is no damaged one.
    fn without_records(&self) -> Option<Broken> {
        if self.receiving != Receiving::Welcome {
            return None;
        }
        let welcome = Welcome::parse(self.line.unread().first_chunk()?)?;
        let taken = nonsense("it answers without checksums, though it says that it knows of them");
        Some(welcomed(Some(welcome)).err().unwrap_or(taken))
    }

    /// Reads what has come.
    fn read_stage(&mut self, peer: &Arc<Peer>) -> Result<(), Broken> {
        loop {
            if self.receiving == Receiving::Data {
                let Some(message) = self.under_way.front_mut() else {
                    return Err(nonsense("data of nothing"));
                };
                self.start += message.pieces.take(&self.stage[self.start..]);
                if message.pieces.left() > 0 {
                    return Ok(());
                }
                self.receiving = Receiving::Answer;
            }
            let bytes = &self.stage[self.start..];
            let length = self.receiving.length();
            if bytes.len() < length {
                return Ok(());
            }
            match self.receiving {
                Receiving::Welcome => {
                    let welcome = bytes.first_chunk().and_then(Welcome::parse);
                    welcomed(welcome)?;
                    self.answered = true;
                    self.receiving = Receiving::Answer;
                }
                Receiving::Answer => {
                    let answer = bytes.first_chunk().and_then(Answer::parse);
                    let answer = answer.ok_or_else(|| nonsense("no answer begins so"))?;
                    let (Answer::Data { id, faults, .. } | Answer::Ended { id, faults }) = answer;
                    let is_sending = self.sending && self.under_way.len() == 1;
                    let front = self.under_way.front().filter(|message| message.id == id);
                    if front.is_none() || is_sending {
                        return Err(nonsense("it answers what was not asked"));
                    }
                    // Not before: what takes connections, and closes them, serves nobody.
                    if !std::mem::replace(&mut self.served, true) {
                        peer.connected();
                    }
                    self.receiving = Receiving::Faults(faults, answer);
                    self.start += length;
                    self.read_faults(peer)?;
                    continue;
                }
                Receiving::Faults(left, answer) => {
                    let fault = bytes.first_chunk().and_then(Fault::parse);
                    let (index, fault) = fault.ok_or_else(|| nonsense("a fault is none"))?;
                    let Some(message) = self.under_way.front_mut() else {
                        return Err(nonsense("it answers what was not asked"));
                    };
                    if message.opcode.is_some() && !message.set_fault(index, fault) {
                        return Err(nonsense("a piece has a fault that is not there"));
                    }
                    if message.opcode.is_none() {
                        self.start += length;
                        self.receiving = Receiving::Answer;
                        if let Some(message) = self.under_way.pop_front() {
                            peer.flow().not_fenced(message);
                        }
                        continue;
                    }
                    self.receiving = Receiving::Faults(left - 1, answer);
                    self.start += length;
                    self.read_faults(peer)?;
                    continue;
                }
                Receiving::Data => {}
            }
            self.start += length;
        }
    }

    /// Goes on where no faults are to come any more.
    fn read_faults(&mut self, peer: &Arc<Peer>) -> Result<(), Broken> {
        let Receiving::Faults(0, answer) = self.receiving else { return Ok(()) };
        let Some(message) = self.under_way.front_mut() else { return Ok(()) };
        match answer {
            Answer::Data { length, .. } => {
                if message.opcode != Some(Opcode::Read) {
                    return Err(nonsense("it sends data that was not asked for"));
                }
                message.expect_data();
                if message.pieces.left() != length {
                    return Err(nonsense("its data is not as long as was asked for"));
                }
                self.receiving = Receiving::Data;
            }
            Answer::Ended { .. } => {
                if message.opcode == Some(Opcode::Read) && !message.is_received() {
                    return Err(nonsense("it ends a READ without its data"));
                }
                self.receiving = Receiving::Answer;
                if let Some(message) = self.under_way.pop_front() {
                    self.under_way_bytes -= message.length;
                    peer.flow().done(message, true);
                }
            }
        }
        Ok(())
    }
}

fn welcomed(welcome: Option<Welcome>) -> Result<(), Broken> {
    let text = match welcome {
        Some(Welcome::Taken) => return Ok(()),
        Some(Welcome::OtherIncarnation) => return Err(Broken::Failed(FailureReason::Restarted)),
        Some(Welcome::OtherVersion) => {
            "it does not understand this version of the framing".to_owned()
        }
        Some(Welcome::Fenced) => "it has ended the connection".to_owned(),
        None => "what answers there is no engine of this kind".to_owned(),
    };
    Err(Broken::Failed(FailureReason::Connection(text.into())))
}
