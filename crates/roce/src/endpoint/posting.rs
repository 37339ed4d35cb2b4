//! Work requests are appended to the queues of a queue pair.

use millstream_wire::Qpn;

use super::Endpoint;
use crate::Instant;
use crate::attributes::QueuePairState;
use crate::completion::CompletionStatus;
use crate::config::Transport;
use crate::error::PostError;
use crate::memory::Memory;
use crate::work::{Piece, ReceiveRequest, SendRequest};

impl<M: Memory> Endpoint<M> {
    /// Appends a request to the send queue.
    pub fn post_send<P: AsRef<[Piece]>>(
        &mut self,
        now: Instant,
        qpn: Qpn,
        request: &SendRequest<P>,
    ) -> Result<(), PostError> {
        self.post_sends(now, qpn, core::slice::from_ref(request)).map_err(|(_, error)| error)
    }

    /// Appends requests to the send queue, in order. On error, the number that were accepted
    /// before the one that was not.
    pub fn post_sends<P: AsRef<[Piece]>>(
        &mut self,
        _now: Instant,
        qpn: Qpn,
        requests: &[SendRequest<P>],
    ) -> Result<(), (usize, PostError)> {
        let index = self.index(qpn).ok_or((0, PostError::Unknown(qpn)))?;
        let mut requests = requests.iter().enumerate();
        let posted = requests.try_for_each(|(position, request)| {
            self.post(index, &request.borrowed(), None).map_err(|error| (position, error))
        });
        if !matches!(posted, Err((0, _))) {
            self.after_change(index);
        }
        posted
    }

    /// Appends a request to the send queue that brings its bytes along, and has no pieces. They are
    /// copied, and need no region.
    pub fn post_send_inline<P: AsRef<[Piece]>>(
        &mut self,
        _now: Instant,
        qpn: Qpn,
        request: &SendRequest<P>,
        bytes: &[u8],
    ) -> Result<(), PostError> {
        let index = self.index(qpn).ok_or(PostError::Unknown(qpn))?;
        let limit = self.queue_pairs[index].as_ref().map_or(0, |p| p.capabilities.max_inline);
        request.check_inline(qpn, bytes, limit)?;
        self.post(index, &request.borrowed(), Some(bytes))?;
        self.after_change(index);
        Ok(())
    }

    /// Appends a request to the send queue of the queue pair at this index; `after_change` must
    /// follow.
    fn post(
        &mut self,
        index: usize,
        request: &SendRequest<&[Piece]>,
        inline: Option<&[u8]>,
    ) -> Result<(), PostError> {
        // Whoever gives the index has looked it up.
        let Some(pair) = self.queue_pairs[index].as_mut() else { return Ok(()) };
        let shared = &mut self.shared;
        let (qpn, state) = (pair.qpn, pair.state);
        if !state.takes_sends() {
            return Err(PostError::State { qpn, state });
        }
        if pair.transport == Transport::UnreliableDatagram {
            return pair.post_datagram(shared, request, inline);
        }
        if request.datagram.is_some() {
            return Err(PostError::DestinationNotAllowed(qpn));
        }
        request.check_pieces()?;
        let (length, limit) = (request.length(), shared.config.max_message_length);
        if length > limit.into() {
            return Err(PostError::TooLong { length, limit });
        }
        if pair.requester.is_full() {
            return Err(PostError::QueueFull { limit: pair.capabilities.max_send_requests });
        }
        request.operation.check_atomic(length)?;
        let fetches = request.operation.fetches();
        if fetches && pair.requester.initiator_depth == 0 && state.sends() {
            return Err(PostError::NoReads(qpn));
        }
        let allowed = |piece: &Piece| {
            piece.length == 0 || shared.memory.check_local(pair.domain, piece, fetches).is_ok()
        };
        let broken = !request.pieces.iter().all(allowed);
        pair.requester.post(request, length, inline, pair.path.mtu, broken);
        if state == QueuePairState::Error {
            // IBTA 10.8.3.1: accepted, and flushed at once.
            while let Some(work) = pair.requester.take_oldest() {
                let completion = work.completion(qpn, CompletionStatus::Flushed);
                shared.complete(pair.send_completions, completion);
            }
        }
        Ok(())
    }

    /// Appends a request to the receive queue.
    pub fn post_receive<P: AsRef<[Piece]>>(
        &mut self,
        qpn: Qpn,
        request: &ReceiveRequest<P>,
    ) -> Result<(), PostError> {
        let index = self.index(qpn).ok_or(PostError::Unknown(qpn))?;
        let Some(pair) = self.queue_pairs[index].as_mut() else {
            return Err(PostError::Unknown(qpn));
        };
        if pair.state == QueuePairState::Reset {
            return Err(PostError::State { qpn, state: pair.state });
        }
        pair.responder.receives.post(qpn, &request.borrowed())?;
        if pair.state == QueuePairState::Error {
            pair.flush_receives(&mut self.shared);
        }
        Ok(())
    }
}
