//! How long an answer takes, and how long to wait for one before probing.
//!
//! The estimate is that of RFC 6298. A probe costs a packet or two and changes nothing else, so its
//! timer may be short, as in RFC 8985 (tail loss probes); what is short must know a slow peer from
//! a lost packet, so the backoff stays until an answer was measured that no probe blurs (Karn's
//! algorithm).

use core::time::Duration;
use std::collections::VecDeque;

use crate::Instant;

/// Probes are not sent sooner than this: a peer that is about to be scheduled is not a loss.
const MINIMUM: Duration = Duration::from_micros(250);

/// The first probe, before any round trip was measured.
const INITIAL: Duration = Duration::from_millis(20);

/// A longer one is no burst: this process or the peer's stood still.
const LONGEST_SILENCE: Duration = Duration::from_millis(10);

/// Packets under measurement at a time. One a round trip would be enough for steady state, but a
/// window that doubles every round trip doubles the time that packets queue.
const SAMPLES: usize = 16;

#[derive(Debug)]
pub(crate) struct RoundTrip {
    smoothed: Option<Duration>,
    variation: Duration,
    /// The shortest one: without queues on the way. It does not expire: as long as the window is full, no
    /// packet finds the queue empty, and the delay of the queue would be taken for that of the path.
    shortest: Option<Duration>,
    /// `None` when what was under way was lost or late since: it says nothing about what is sent then.
    latest: Option<Duration>,
    /// So long the peer's answer may wait there ([`crate::QueuePairConfig::acknowledgement_delay`]).
    answer_delay: Duration,
    /// The longest silence amid the answers to one request, lately: answers may come in bursts, and a burst that waits for
    /// a slow link takes longer than the path.
    silence: Duration,
    /// The longest one amid the answers to the present request.
    latest_silence: Duration,
    /// Doublings of the timer since an answer was last measured.
    backoff: u32,
    /// Oldest first.
    samples: VecDeque<Sample>,
}

/// A packet under measurement.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// One past its number.
    end: u64,
    sent_at: Instant,
    /// Something was sent twice since: which of the two was answered, nobody knows.
    blurred: bool,
}

impl RoundTrip {
    pub(crate) fn new(answer_delay: Duration) -> Self {
        Self {
            smoothed: None,
            variation: Duration::ZERO,
            shortest: None,
            latest: None,
            answer_delay,
            silence: Duration::ZERO,
            latest_silence: Duration::ZERO,
            backoff: 0,
            samples: VecDeque::with_capacity(SAMPLES),
        }
    }

    /// A packet was sent; `end` is one past its number. It must be sent for the first time, and ask
    /// for an answer.
    pub(crate) fn sent(&mut self, now: Instant, end: u64) {
        if self.samples.len() < SAMPLES {
            self.samples.push_back(Sample { end, sent_at: now, blurred: false });
        }
    }

    /// Everything before `end` is acknowledged.
    pub(crate) fn acknowledged(&mut self, now: Instant, end: u64) {
        // One answer to many packets is an answer to the last of them.
        let mut answered = None;
        while self.samples.front().is_some_and(|sample| sample.end <= end) {
            answered = self.samples.pop_front();
        }
        if let Some(sample) = answered.filter(|sample| !sample.blurred) {
            self.backoff = 0;
            self.measured(now.saturating_duration_since(sample.sent_at));
        }
    }

    fn measured(&mut self, round_trip: Duration) {
        self.shortest = Some(self.shortest.map_or(round_trip, |least| least.min(round_trip)));
        self.latest = Some(round_trip);
        match self.smoothed {
            None => {
                self.smoothed = Some(round_trip);
                self.variation = round_trip / 2;
            }
            Some(smoothed) => {
                self.variation = (self.variation * 3 + smoothed.abs_diff(round_trip)) / 4;
                self.smoothed = Some((smoothed * 7 + round_trip) / 8);
            }
        }
    }

    /// An answer to a READ has followed another one after so long, and not since it was asked for again.
    pub(crate) fn followed(&mut self, silence: Duration) {
        self.latest_silence = self.latest_silence.max(silence.min(LONGEST_SILENCE));
        self.silence = self.silence.max(self.latest_silence);
    }

    /// All answers to a request for data have come.
    pub(crate) fn answered(&mut self) {
        self.silence -= (self.silence - self.latest_silence) / 8;
        self.latest_silence = Duration::ZERO;
    }

    /// What is under measurement will be sent again or late.
    pub(crate) fn forget_samples(&mut self) {
        self.samples.clear();
        self.latest = None;
    }

    /// The peer says that something was lost: then it is not slow. What is sent again queues behind
    /// what is still in flight.
    pub(crate) fn lost(&mut self) {
        self.forget_samples();
        self.backoff = u32::from(self.is_queueing());
    }

    /// The peer was silent for [`RoundTrip::timeout`].
    pub(crate) fn timed_out(&mut self) {
        self.backoff += 1;
        self.latest = None;
        self.samples.iter_mut().for_each(|sample| sample.blurred = true);
    }

    /// Whether an answer can come after so short a time.
    pub(crate) fn is_possible(&self, elapsed: Duration) -> bool {
        self.smoothed.is_some_and(|usual| elapsed >= usual + self.variation)
    }

    /// Whether packets spend most of their time in queues. That an answer waits at the peer is none.
    pub(crate) fn is_queueing(&self) -> bool {
        let is_long = |now, least: Duration| now > least * 3 / 2 + self.answer_delay;
        matches!((self.smoothed, self.shortest), (Some(now), Some(least)) if is_long(now, least))
    }

    /// How much longer the latest packet took than the fastest: most of it was spent in queues.
    pub(crate) fn delay(&self) -> Option<Duration> {
        self.latest.zip(self.shortest).map(|(latest, least)| latest.saturating_sub(least))
    }

    /// How long to wait for an answer before probing; never more than `limit`. Amid the answers to a READ
    /// twice the longest silence is not late.
    pub(crate) fn timeout(&self, limit: Duration, amid_answers: bool) -> Duration {
        let base = match self.smoothed {
            None => INITIAL,
            Some(smoothed) => (smoothed + self.variation * 4).max(MINIMUM) + self.answer_delay,
        };
        let base = if amid_answers { base.max(self.silence * 2) } else { base };
        base.saturating_mul(1 << self.backoff.min(16)).min(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(500);

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    fn measured(micros: u64) -> RoundTrip {
        let mut round_trip = RoundTrip::new(Duration::ZERO);
        round_trip.sent(at(0), 1);
        round_trip.acknowledged(at(micros), 1);
        round_trip
    }

    #[test]
    fn probes_back_off_up_to_the_limit() {
        let mut round_trip = RoundTrip::new(Duration::ZERO);
        assert_eq!(round_trip.timeout(LIMIT, false), INITIAL);
        round_trip.sent(at(0), 1);
        round_trip.acknowledged(at(50), 1);
        assert_eq!(round_trip.timeout(LIMIT, false), MINIMUM);
        round_trip.timed_out();
        assert_eq!(round_trip.timeout(LIMIT, false), MINIMUM * 2);
        for _ in 0..100 {
            round_trip.timed_out();
        }
        assert_eq!(round_trip.timeout(LIMIT, false), LIMIT);
    }

    #[test]
    fn the_variation_counts_four_times() {
        assert_eq!(measured(10_000).timeout(LIMIT, false), Duration::from_millis(30));
    }

    /// As QUIC has it (RFC 9002, 6.2.1).
    #[test]
    fn a_peer_that_may_wait_with_its_answer_is_asked_later() {
        let mut round_trip = RoundTrip::new(Duration::from_millis(1));
        round_trip.sent(at(0), 1);
        round_trip.acknowledged(at(50), 1);
        assert_eq!(round_trip.timeout(LIMIT, false), MINIMUM + Duration::from_millis(1));
        for packet in 0..20 {
            round_trip.sent(at(10_000 * packet), packet + 2);
            round_trip.acknowledged(at(10_000 * packet + 1_000), packet + 2);
        }
        assert!(!round_trip.is_queueing());
    }

    #[test]
    fn the_delay_is_that_of_the_latest_packet() {
        let mut round_trip = measured(100);
        assert_eq!(round_trip.delay(), Some(Duration::ZERO));
        for (micros, delay) in [(5000, 4900), (400, 300), (50, 0)] {
            round_trip.sent(at(0), micros);
            round_trip.acknowledged(at(micros), micros);
            assert_eq!(round_trip.delay(), Some(Duration::from_micros(delay)));
        }
    }

    #[test]
    fn no_delay_is_known_after_a_loss_or_silence() {
        for forget in [RoundTrip::timed_out, RoundTrip::lost, RoundTrip::forget_samples] {
            let mut round_trip = measured(100);
            round_trip.sent(at(1000), 2);
            round_trip.acknowledged(at(6000), 2);
            assert_eq!(round_trip.delay(), Some(Duration::from_micros(4900)));
            forget(&mut round_trip);
            assert_eq!(round_trip.delay(), None);
        }
    }

    /// A peer that has become slow: probes are sent until one of its answers is measured.
    #[test]
    fn a_backoff_lasts_until_an_answer_is_measured() {
        let mut round_trip = measured(100);
        let short = round_trip.timeout(LIMIT, false);
        round_trip.sent(at(1000), 2);
        for _ in 0..5 {
            round_trip.timed_out();
        }
        round_trip.acknowledged(at(9000), 2);
        assert_eq!(round_trip.timeout(LIMIT, false), short * 32, "an answer to whichever copy");
        round_trip.sent(at(10_000), 3);
        round_trip.acknowledged(at(18_000), 3);
        let long = round_trip.timeout(LIMIT, false);
        assert!((8_000..32_000).contains(&long.as_micros()), "{long:?}");
    }

    #[test]
    fn a_loss_is_no_slowness() {
        let mut round_trip = measured(100);
        let short = round_trip.timeout(LIMIT, false);
        for _ in 0..5 {
            round_trip.timed_out();
        }
        round_trip.lost();
        assert_eq!(round_trip.timeout(LIMIT, false), short);
    }
}
