//! How much a requester keeps in flight, and how long it waits for an answer.
//!
//! InfiniBand leaves congestion control to the fabric. Over ordinary networks and socket buffers
//! packets are lost when too many are under way, and go-back-N makes every loss costly. So the
//! window follows TCP's rules: slow start, additive increase, halving on a reported loss, one
//! packet after a timeout (RFC 5681); the probe timer follows RFC 6298.

use core::time::Duration;

use crate::Instant;

/// The smallest window after a reported loss, in packets.
const MINIMUM: u32 = 4;

/// Probes are not sent sooner than this: a machine that schedules other work is not a loss.
const MINIMUM_PROBE: Duration = Duration::from_millis(4);

/// The first probe, before any round trip was measured.
const INITIAL_PROBE: Duration = Duration::from_millis(40);

#[derive(Debug)]
pub(crate) struct Window {
    size: u32,
    limit: u32,
    slow_start_threshold: u32,
    /// Packets acknowledged since the window last grew by one.
    credit: u32,
    smoothed: Option<Duration>,
    variation: Duration,
    /// Doublings of the probe timer since the peer last answered.
    backoff: u32,
    /// A packet under measurement: one past its number, and when it was sent.
    sample: Option<(u64, Instant)>,
}

impl Window {
    pub(crate) fn new(limit: u32) -> Self {
        // With none in flight nothing would ever move.
        let limit = limit.max(1);
        Self {
            size: limit.min(64),
            limit,
            slow_start_threshold: limit,
            credit: 0,
            smoothed: None,
            variation: Duration::ZERO,
            backoff: 0,
            sample: None,
        }
    }

    /// Packets that may be in flight.
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// A packet was sent; `end` is one past its number. Only packets that are sent for the first
    /// time and ask for an answer are measured (Karn's rule).
    pub(crate) fn sent(&mut self, now: Instant, end: u64, measurable: bool) {
        if measurable && self.sample.is_none() {
            self.sample = Some((end, now));
        }
    }

    /// Everything before `end` is acknowledged, `packets` more than before.
    pub(crate) fn acknowledged(&mut self, now: Instant, end: u64, packets: u32) {
        self.backoff = 0;
        if let Some((_, at)) = self.sample.filter(|&(measured, _)| measured <= end) {
            self.sample = None;
            self.measured(now.saturating_duration_since(at));
        }
        if self.size < self.slow_start_threshold {
            self.size = self.size.saturating_add(packets).min(self.limit);
            return;
        }
        self.credit = self.credit.saturating_add(packets);
        if self.credit >= self.size {
            self.credit = 0;
            self.size = (self.size + 1).min(self.limit);
        }
    }

    fn measured(&mut self, round_trip: Duration) {
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

    /// What is under measurement will be sent again or late.
    pub(crate) fn forget_sample(&mut self) {
        self.sample = None;
    }

    /// The peer reported a loss.
    pub(crate) fn lost(&mut self, in_flight: u64) {
        self.shrink(in_flight);
        self.size = self.slow_start_threshold;
    }

    /// The peer was silent.
    pub(crate) fn timed_out(&mut self, in_flight: u64) {
        // Only the first silence says something about the window; later ones repeat it.
        if self.backoff == 0 {
            self.shrink(in_flight);
        }
        self.size = 1;
        self.backoff += 1;
    }

    fn shrink(&mut self, in_flight: u64) {
        self.sample = None;
        self.credit = 0;
        let half = u32::try_from(in_flight / 2).unwrap_or(u32::MAX);
        self.slow_start_threshold = half.max(MINIMUM).min(self.limit);
    }

    /// How long to wait before sending again; never more than the transport timeout.
    pub(crate) fn retransmission_timeout(&self, timeout: Duration) -> Duration {
        let base = match self.smoothed {
            None => INITIAL_PROBE,
            Some(smoothed) => (smoothed + self.variation * 4).max(MINIMUM_PROBE),
        };
        base.saturating_mul(1 << self.backoff.min(16)).min(timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(500);

    #[test]
    fn halves_on_loss_and_grows_back_one_packet_a_round_trip() {
        let mut window = Window::new(256);
        window.lost(100);
        assert_eq!(window.size(), 50);
        for _ in 0..50 {
            window.acknowledged(Instant::ZERO, 0, 1);
        }
        assert_eq!(window.size(), 51);
    }

    #[test]
    fn one_packet_after_silence_then_slow_start_to_half() {
        let mut window = Window::new(256);
        window.timed_out(100);
        window.timed_out(100);
        assert_eq!(window.size(), 1);
        for _ in 0..100 {
            window.acknowledged(Instant::ZERO, 0, 1);
        }
        assert!((50..54).contains(&window.size()), "{}", window.size());
    }

    #[test]
    fn never_beyond_its_limit() {
        let mut window = Window::new(3);
        for _ in 0..1000 {
            window.acknowledged(Instant::ZERO, 0, 100);
        }
        assert_eq!(window.size(), 3);
        window.lost(1000);
        assert!(window.size() <= 3);
    }

    #[test]
    fn probes_back_off_up_to_the_timeout() {
        let mut window = Window::new(256);
        assert_eq!(window.retransmission_timeout(TIMEOUT), INITIAL_PROBE);
        window.sent(Instant::ZERO, 1, true);
        window.acknowledged(Instant::from_nanos(100_000), 1, 1);
        assert_eq!(window.retransmission_timeout(TIMEOUT), MINIMUM_PROBE);
        window.timed_out(1);
        assert_eq!(window.retransmission_timeout(TIMEOUT), MINIMUM_PROBE * 2);
        for _ in 0..100 {
            window.timed_out(1);
        }
        assert_eq!(window.retransmission_timeout(TIMEOUT), TIMEOUT);
    }
}
