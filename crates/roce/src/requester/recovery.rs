//! What a requester does about losses, silence, and a peer that is not ready.

use crate::Instant;
use crate::completion::CompletionStatus;
use crate::endpoint::Shared;
use crate::memory::Memory;
use crate::queue_pair::QueuePair;
use crate::rnr::rnr_wait;

use super::Probe;

impl QueuePair {
    /// The packet with this number must be sent again.
    pub(super) fn lost<M: Memory>(&mut self, now: Instant, shared: &mut Shared<M>, psn: u64) {
        let requester = &mut self.requester;
        // Everything in flight behind the loss reports it again; once is enough. And what was in
        // flight behind a packet that the peer was not ready for is no loss: it is sent again
        // after the wait anyhow.
        if psn != requester.unacknowledged
            || requester.recovered.is_some_and(|(at, _)| at == psn)
            || requester.rnr_until.is_some()
        {
            return;
        }
        // Several of what was in flight are one reason to send less, one that was lost again is another.
        let newest = if requester.lost == Some(psn) { requester.next } else { requester.sent };
        requester.recovered = Some((psn, now));
        requester.lost = Some(psn);
        requester.window.lost(newest - psn, requester.round_trip.is_queueing());
        requester.round_trip.lost();
        requester.go_back(psn, &mut shared.budget);
        requester.arm(now);
        self.forget_early_refusals(shared);
        shared.counters.retransmissions += 1;
    }

    pub(super) fn receiver_not_ready<M: Memory>(
        &mut self,
        now: Instant,
        shared: &mut Shared<M>,
        psn: u64,
        timer: u8,
    ) {
        let requester = &mut self.requester;
        // Nothing is sent during a wait, so what comes then is a repeat.
        if psn != requester.unacknowledged || requester.rnr_until.is_some() {
            return;
        }
        if requester.rnr_retry < 7 {
            if requester.rnr_retries_used == requester.rnr_retry {
                self.fail_fatally(shared, Some(CompletionStatus::ReceiverNotReadyExceeded));
                return;
            }
            requester.rnr_retries_used += 1;
        }
        requester.rnr_until = Some(now + rnr_wait(timer));
        requester.go_back(psn, &mut shared.budget);
        // The peer is alive: silence is counted anew from when we ask again.
        requester.deadline = None;
        requester.round_trip.forget_samples();
        shared.counters.retransmissions += 1;
    }

    /// Acts on the requester's deadlines.
    pub(crate) fn handle_deadline<M: Memory>(&mut self, now: Instant, shared: &mut Shared<M>) {
        self.handle_answer_gap_deadlines(now, shared);
        let requester = &mut self.requester;
        if requester.rnr_until.is_some_and(|at| at <= now) {
            requester.rnr_until = None;
            requester.last_progress = now;
        }
        let (Some(at), Some(timeout)) = (requester.deadline, requester.timeout) else { return };
        if at > now {
            return;
        }
        let patience = requester.patience(timeout);
        if now >= requester.last_progress + patience {
            self.fail_fatally(shared, Some(CompletionStatus::RetryExceeded));
            return;
        }
        // What asks again has not left yet, for want of rate: it is not the peer who is silent.
        let asks = requester.probe.is_some() || requester.next == requester.unacknowledged;
        if let Some(until) = self.congestion.deadline().filter(|_| asks) {
            let next = until + requester.silence(timeout);
            requester.deadline = Some(next.min(requester.last_progress + patience));
            return;
        }
        requester.recovered = None;
        requester.round_trip.timed_out();
        let in_flight = requester.sent - requester.unacknowledged;
        let persistent = requester.window.timed_out(in_flight);
        if persistent || !requester.can_probe() {
            requester.suspect();
            requester.window.collapse(in_flight);
            requester.round_trip.forget_samples();
            requester.go_back(requester.unacknowledged, &mut shared.budget);
            self.forget_early_refusals(shared);
        } else {
            requester.probe = Some(Probe::Oldest);
        }
        let requester = &mut self.requester;
        let next = now + requester.silence(timeout);
        requester.deadline = Some(next.min(requester.last_progress + patience));
        shared.counters.retransmissions += 1;
        shared.counters.timeouts += 1;
    }
}
