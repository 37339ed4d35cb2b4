//! How much a requester keeps in flight.
//!
//! InfiniBand leaves congestion control to the fabric. Over ordinary networks and socket buffers
//! packets are lost when too many are under way, and go-back-N makes every loss costly. So the
//! window follows TCP's rules: slow start, additive increase, a cut on a loss (RFC 5681, by the
//! factors of RFC 9438 where packets hardly queue), one packet when the peer stays silent.
//!
//! A link that is slow and does not drop would let the window grow to its limit, and with it the queue
//! before the link: a second on a link of 10 Mbit/s. What stands there delays everything else on the
//! link, the acknowledgements of the other direction among it. So a delay is taken for what it is: it
//! ends slow start (as in RFC 9406), and a longer one ends growth.

use core::time::Duration;

/// The smallest window after a reported loss, in packets.
const MINIMUM: u32 = 4;

/// The first window, in packets. A delay does not keep one from growing that is smaller: so few packets
/// make no queue that matters, and the path itself may have become longer.
const FIRST: u32 = 64;

/// Ends slow start: packets wait so long that the link before them is full. Not shorter, as the
/// acknowledgement may wait behind a burst of the other direction, too: 64 KiB take 5 ms at 100 Mbit/s.
const SLOW_START_DELAY: Duration = Duration::from_millis(12);

/// Ends all growth. What is in flight is enough for the link.
const GROWTH_DELAY: Duration = Duration::from_millis(20);

/// Silences in a row after which the path is taken to be congested: one or two are a probe that
/// was lost too (RFC 9002, 7.6).
const PERSISTENT: u32 = 3;

#[derive(Debug)]
pub(crate) struct Window {
    size: u32,
    limit: u32,
    slow_start_threshold: u32,
    /// Packets acknowledged since the window last grew by one.
    credit: u32,
    /// Timeouts since the peer last moved us forward.
    silences: u32,
}

impl Window {
    pub(crate) fn new(limit: u32) -> Self {
        // With none in flight nothing would ever move.
        let limit = limit.max(1);
        Self { size: limit.min(FIRST), limit, slow_start_threshold: limit, credit: 0, silences: 0 }
    }

    /// Packets that may be in flight.
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// Whether the peer has been silent for so long that it may be dead.
    pub(crate) fn is_silent(&self) -> bool {
        self.silences >= PERSISTENT
    }

    /// The peer acknowledged this many more packets, and they have waited so long on their way.
    pub(crate) fn acknowledged(&mut self, packets: u32, delay: Duration) {
        self.silences = 0;
        if delay >= SLOW_START_DELAY {
            self.slow_start_threshold = self.slow_start_threshold.min(self.size.max(MINIMUM));
        }
        if delay >= GROWTH_DELAY && self.size >= FIRST {
            return;
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

    /// The peer reported a loss. Where packets hardly queue on their way, there is less reason to
    /// think that there were too many of them.
    pub(crate) fn lost(&mut self, in_flight: u64, queueing: bool) {
        self.shrink(in_flight, if queueing { 5 } else { 7 });
        self.size = self.slow_start_threshold;
    }

    /// The peer was silent. Returns whether it was for so long that what is in flight must be given
    /// up, and sent again one by one.
    pub(crate) fn timed_out(&mut self, in_flight: u64) -> bool {
        self.silences = self.silences.saturating_add(1);
        let persistent = self.silences >= PERSISTENT;
        if persistent {
            self.collapse(in_flight);
        }
        persistent
    }

    /// Starts again with one packet.
    pub(crate) fn collapse(&mut self, in_flight: u64) {
        // Only the first silence says something about the window; later ones repeat it.
        if self.size > 1 {
            self.shrink(in_flight, 5);
        }
        self.size = 1;
    }

    fn shrink(&mut self, in_flight: u64, tenths: u64) {
        self.credit = 0;
        let part = u32::try_from(in_flight.saturating_mul(tenths) / 10).unwrap_or(u32::MAX);
        self.slow_start_threshold = part.max(MINIMUM).min(self.limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shrinks_on_loss_and_grows_back_one_packet_a_round_trip() {
        let mut window = Window::new(256);
        window.lost(100, true);
        assert_eq!(window.size(), 50);
        window.lost(100, false);
        assert_eq!(window.size(), 70);
        for _ in 0..70 {
            window.acknowledged(1, Duration::ZERO);
        }
        assert_eq!(window.size(), 71);
    }

    #[test]
    fn one_packet_after_a_long_silence_then_slow_start() {
        let mut window = Window::new(256);
        let size = window.size();
        for _ in 1..PERSISTENT {
            assert!(!window.timed_out(100));
            assert_eq!(window.size(), size, "a probe takes nothing from the window");
        }
        for _ in 0..3 {
            assert!(window.timed_out(100));
            assert_eq!(window.size(), 1);
        }
        for _ in 0..100 {
            window.acknowledged(1, Duration::ZERO);
        }
        assert!((50..54).contains(&window.size()), "{}", window.size());
    }

    #[test]
    fn packets_that_wait_long_end_its_growth() {
        let milliseconds = Duration::from_millis;
        let mut window = Window::new(1024);
        window.acknowledged(64, milliseconds(11));
        assert_eq!(window.size(), 128, "slow start");
        window.acknowledged(128, milliseconds(12));
        assert_eq!(window.size(), 129, "a packet a round trip");
        window.acknowledged(129, milliseconds(1));
        assert_eq!(window.size(), 130, "slow start is over");
        window.acknowledged(10_000, milliseconds(20));
        assert_eq!(window.size(), 130, "no growth");
        // The queue is gone: other traffic made it.
        window.acknowledged(130, milliseconds(1));
        assert_eq!(window.size(), 131);
    }

    #[test]
    fn a_small_window_grows_whatever_packets_wait() {
        let mut window = Window::new(256);
        window.collapse(100);
        window.acknowledged(1, GROWTH_DELAY);
        assert_eq!(window.size(), 2, "slow start goes on to the minimum");
        window.acknowledged(2, GROWTH_DELAY);
        assert_eq!(window.size(), MINIMUM);
        for _ in 0..100 {
            window.acknowledged(window.size(), GROWTH_DELAY);
        }
        assert_eq!(window.size(), FIRST, "a packet a round trip");
    }

    #[test]
    fn never_beyond_its_limit() {
        let mut window = Window::new(3);
        for _ in 0..1000 {
            window.acknowledged(100, Duration::ZERO);
        }
        assert_eq!(window.size(), 3);
        window.lost(1000, false);
        assert!(window.size() <= 3);
    }
}
