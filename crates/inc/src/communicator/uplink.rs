//! The port to the switch above: to that one this node is as a host, whose source and destination are the
//! slots.

use millstream_roce::{AccessDenied, Piece, ProtectionDomainId, SendOperation, SendRequest};
use millstream_wire::Qpn;

use super::{CONTROL_BASE, Communicator, Progress, Tag};
use crate::abort::{ABORT_BYTES, Abort};
use crate::answer::Answer;
use crate::descriptor::{DESCRIPTOR_BYTES, Descriptor};
use crate::layout::Layout;
use crate::ranks::Ranks;

#[derive(Debug)]
pub(crate) struct Uplink {
    /// All ranks below this node.
    ranks: Ranks,
    pub(crate) domain: ProtectionDomainId,
    /// Known once the queue pair exists.
    pub(crate) qpn: Qpn,
    /// The queue pair can send.
    pub(super) connected: bool,
    /// Descriptors sent.
    pub(super) announced: u64,
    /// Collectives up to the last one of which the first call was told.
    pub(super) told: u64,
    /// Segments that were sent up, whole.
    sent: u64,
    /// Bytes of the next one that were.
    sent_bytes: u32,
    /// Answers that have come, without gaps.
    results: u64,
    /// Bytes of the next one that have.
    result_bytes: u32,
    /// Send requests that are not complete.
    pub(super) outstanding: u32,
}

impl Uplink {
    pub(super) fn new(domain: ProtectionDomainId, ranks: Ranks) -> Self {
        Self {
            ranks,
            domain,
            qpn: Qpn::default(),
            connected: false,
            announced: 0,
            told: 0,
            sent: 0,
            sent_bytes: 0,
            results: 0,
            result_bytes: 0,
            outstanding: 0,
        }
    }
}

impl Uplink {
    /// Whether an agreement or an answer is to come.
    pub(super) fn awaits(&self, agreement: bool, layout: &Layout) -> bool {
        self.connected && (agreement || self.results < layout.end())
    }
}

impl Communicator {
    /// The next message to the switch above.
    pub(super) fn next_up(&mut self) -> Option<SendRequest> {
        let port = self.children.len();
        if let Some(note) = self.next_first_call() {
            return Some(note);
        }
        let uplink = self.uplink.as_mut()?;
        if uplink.announced < self.called {
            let sequence = uplink.announced;
            uplink.announced += 1;
            let vector = self.call.layout.small_source_of(&uplink.ranks).len();
            let descriptor =
                Descriptor { destination_address: 0, destination_key: 0, ..self.call.descriptor };
            let start = self.small_offset(sequence) - DESCRIPTOR_BYTES;
            self.control[start..start + DESCRIPTOR_BYTES].copy_from_slice(&descriptor.to_bytes());
            let address = CONTROL_BASE + start as u64;
            let piece =
                Piece { key: self.key, address, length: (DESCRIPTOR_BYTES + vector) as u32 };
            return Some(self.message(port, Tag::Up, None, piece));
        }
        let layout = &self.call.layout;
        let segment = uplink.sent;
        if segment >= layout.end() {
            return None;
        }
        let (complete, length) = self.slots.contributions(segment).ok()?;
        let place = layout.place(segment);
        if place.sources.among(&uplink.ranks) {
            let offset = uplink.sent_bytes;
            if complete <= offset {
                return None;
            }
            let whole = complete == length;
            uplink.sent += u64::from(whole);
            uplink.sent_bytes = if whole { 0 } else { complete };
            uplink.outstanding += 1;
            let piece = Piece {
                key: self.key,
                address: self.slots.offset(segment) + u64::from(offset),
                length: complete - offset,
            };
            let operation = SendOperation::Write {
                remote_address: place.start + u64::from(offset),
                remote_key: 0,
                immediate: None,
            };
            return Some(SendRequest::new(Tag::Up.id(port), operation, [piece]));
        }
        // Nothing of ours: a credit, for as many segments as are ready.
        let mut end = segment;
        while end < layout.end()
            && !layout.place(end).sources.among(&uplink.ranks)
            && self.slots.contributions(end).is_ok_and(|(complete, length)| complete == length)
        {
            end += 1;
        }
        if end == segment {
            return None;
        }
        uplink.sent = end;
        let answer = Answer::credit(end).to_immediate();
        Some(self.message(port, Tag::Up, Some(answer), Piece::default()))
    }

    /// The switch above has broken the protocol.
    fn nonsense(&mut self) -> AccessDenied {
        let _ = self.abort_above();
        AccessDenied::InvalidRequest
    }

    /// Admits a WRITE of the switch above: a part of the next result.
    pub(crate) fn admit_result(&mut self, address: u64, length: u32) -> Result<(), AccessDenied> {
        if self.abort.is_some() {
            return Ok(());
        }
        let layout = &self.call.layout;
        let Some(uplink) = &self.uplink else { return Err(AccessDenied::InvalidRequest) };
        let segment = uplink.results;
        if segment >= layout.end() || self.agreed != self.called {
            return Err(self.nonsense());
        }
        let place = layout.place(segment);
        let rest = place.length - uplink.result_bytes;
        let expected = place.start + u64::from(uplink.result_bytes);
        let wanted = place.targets.among(&uplink.ranks);
        let aligned = length == rest || length.is_multiple_of(self.path_mtu);
        if !wanted || length > rest || !aligned || address != expected {
            return Err(self.nonsense());
        }
        Ok(())
    }

    /// Takes a packet of a result.
    pub(crate) fn take_result(&mut self, payload: &[u8]) -> Result<Progress, AccessDenied> {
        if self.abort.is_some() {
            return Ok(Progress::None);
        }
        let Some(uplink) = &mut self.uplink else { return Err(AccessDenied::InvalidRequest) };
        let (segment, offset) = (uplink.results, uplink.result_bytes);
        // What was not sent up yet cannot have come back.
        let sent = segment < uplink.sent || offset + payload.len() as u32 <= uplink.sent_bytes;
        let taken = self.slots.receive(segment, offset, payload);
        let (true, Ok(more)) = (sent, taken) else { return Err(self.nonsense()) };
        uplink.result_bytes += payload.len() as u32;
        if uplink.result_bytes == self.call.layout.place(segment).length {
            uplink.results += 1;
            uplink.result_bytes = 0;
        }
        Ok(if more { Progress::Ready } else { Progress::None })
    }

    /// A message of the switch above has arrived: an agreement, an answer, or the end.
    pub(crate) fn answered(
        &mut self,
        immediate: Option<u32>,
        write: bool,
        length: u32,
    ) -> Progress {
        if self.abort.is_some() {
            return Progress::None;
        }
        let Some(answer) = immediate.and_then(Answer::from_immediate) else {
            return self.abort_above();
        };
        let Some(uplink) = &mut self.uplink else { return Progress::None };
        match answer {
            Answer::Aborted if !write => {
                let start = self.message_start();
                let message = &self.control[start..start + (length as usize).min(ABORT_BYTES)];
                let abort = Abort::parse(message).unwrap_or(Abort::ParentLost);
                self.abort_heard(self.children.len(), abort)
            }
            Answer::Awaited(_) if !write && length == 0 => {
                // It may have crossed our descriptor.
                if answer == Answer::awaited(self.agreed) {
                    self.awaited = Some(self.agreed);
                }
                Progress::None
            }
            Answer::Missing(_) if !write && length == 0 => self.asked(answer),
            Answer::Agreed(_) if !write => {
                let expected = answer == Answer::agreed(self.agreed);
                let result = self.call.layout.small_target_of(&uplink.ranks).len();
                if !expected || length as usize != result || uplink.announced <= self.agreed {
                    return self.abort_above();
                }
                self.receive_small(result);
                self.agreed += 1;
                Progress::Ready
            }
            Answer::Result(_) if write && length == 0 => {
                let segment = uplink.results;
                let layout = &self.call.layout;
                let empty = segment < layout.end()
                    && self.agreed == self.called
                    && segment < uplink.sent
                    && answer == Answer::result(segment)
                    && !layout.place(segment).targets.among(&uplink.ranks);
                if !empty || self.slots.receive_nothing(segment).is_err() {
                    return self.abort_above();
                }
                uplink.results += 1;
                Progress::Ready
            }
            // The bytes have been counted.
            Answer::Result(_)
                if write && answer.distance_from(uplink.results.wrapping_sub(1)) == Some(0) =>
            {
                Progress::None
            }
            _ => self.abort_above(),
        }
    }
}
