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
//! ends slow start (as in RFC 9406), a longer one ends growth, and takes back what has grown before, once a
//! round trip and in proportion (as Swift, Kumar et al., SIGCOMM 2020). What was never used is no measure
//! of the path, so only a window that is used grows (RFC 7661).

use core::time::Duration;

/// The smallest window after a reported loss, in packets.
const MINIMUM: u32 = 4;

/// The first window, in packets.
const FIRST: u32 = 64;

/// Ends slow start: packets wait so long that the link before them is full. Not shorter, as the
/// acknowledgement may wait behind a burst of the other direction, too: 64 KiB take 5 ms at 100 Mbit/s. Not longer, as the
/// queue is twice as long when this is known, and longer by a round trip; those of the lab hold 20 ms.
const SLOW_START_DELAY: Duration = Duration::from_millis(8);

/// Ends all growth. What is in flight is enough for the link, and more of it than makes such a delay is
/// too much. A queue of 20 ms is not full then.
const GROWTH_DELAY: Duration = Duration::from_millis(16);

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
    /// The most packets in flight in the round trip before, and in this one.
    used: [u32; 2],
    /// Packets acknowledged in this round trip.
    round: u32,
    /// A delay has taken its part of the window in this round trip.
    cut: bool,
}

impl Window {
    pub(crate) fn new(limit: u32) -> Self {
        // With none in flight nothing would ever move.
        let limit = limit.max(1);
        Self {
            size: limit.min(FIRST),
            limit,
            slow_start_threshold: limit,
            credit: 0,
            silences: 0,
            used: [0; 2],
            round: 0,
            cut: false,
        }
    }

    /// Packets that may be in flight.
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// A window up to this grows, and is left, whatever packets wait: they may do so behind the other
    /// direction, other traffic, or a peer that had no processor. Where the path itself has become longer, as
    /// long as that takes to queue, this is all there is.
    fn undelayed(&self) -> u32 {
        (self.limit / 8).max(FIRST)
    }

    /// Whether the peer has been silent for so long that it may be dead.
    pub(crate) fn is_silent(&self) -> bool {
        self.silences >= PERSISTENT
    }

    /// So many packets are in flight now.
    pub(crate) fn sent(&mut self, in_flight: u64) {
        let in_flight = u32::try_from(in_flight).unwrap_or(u32::MAX);
        self.used[1] = self.used[1].max(in_flight);
    }

    /// The peer acknowledged this many more packets, and they have waited so long on their way. Where that
    /// could not be measured, it was silent or lost some: it may have been long.
    pub(crate) fn acknowledged(&mut self, packets: u32, delay: Option<Duration>) {
        let is_known = delay.is_some();
        let delay = delay.unwrap_or_default();
        self.silences = 0;
        let used = self.used[0].max(self.used[1]);
        self.round = self.round.saturating_add(packets);
        if self.round >= used {
            self.rested();
        }
        if delay > GROWTH_DELAY && !self.cut {
            self.cut_to(used, delay);
        }
        if delay >= SLOW_START_DELAY {
            self.slow_start_threshold =
                self.slow_start_threshold.min(self.size.max(self.undelayed()));
        }
        if (delay >= GROWTH_DELAY || !is_known) && self.size >= self.undelayed() {
            return;
        }
        // Acknowledgements come in a row, and what they make room for is sent after the last of them: a
        // window that is used is not full all the time.
        let needed = if self.size < self.slow_start_threshold { 2 } else { 4 };
        if used < self.size - self.size / needed {
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

    /// A round trip is over, as one is when nothing is in flight.
    pub(crate) fn rested(&mut self) {
        self.used = [self.used[1], 0];
        self.round = 0;
        self.cut = false;
    }

    /// So much was in flight, and made such a delay: the window becomes what makes one of [`SLOW_START_DELAY`],
    /// so that there is room to grow for those whose acknowledgements wait behind it.
    fn cut_to(&mut self, used: u32, delay: Duration) {
        let smallest = self.undelayed();
        if used > smallest {
            let part = SLOW_START_DELAY.as_secs_f64() / delay.as_secs_f64();
            self.size = self.size.min(((f64::from(used) * part) as u32).max(smallest));
            self.slow_start_threshold = self.slow_start_threshold.min(self.size);
            self.cut = true;
        }
    }

    /// The peer reported a loss. Where packets hardly queue on their way, there is less reason to
    /// think that there were too many of them.
    pub(crate) fn lost(&mut self, in_flight: u64, queueing: bool) {
        // Since it collapsed one packet is in flight. That one was sent behind those that are lost.
        if self.size > 1 {
            let before = self.size.max(self.slow_start_threshold);
            self.shrink(in_flight, if queueing { 5 } else { 7 });
            self.slow_start_threshold = self.slow_start_threshold.min(before);
            self.size = self.size.min(self.slow_start_threshold);
        }
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

    /// All that may be in flight is, and `packets` of it are acknowledged.
    fn acknowledged(window: &mut Window, packets: u32, delay: Duration) {
        window.sent(window.size().into());
        window.acknowledged(packets, Some(delay));
    }

    #[test]
    fn shrinks_on_loss_and_grows_back_one_packet_a_round_trip() {
        let mut window = Window::new(256);
        window.lost(100, true);
        assert_eq!(window.size(), 50);
        window.lost(100, false);
        assert_eq!(window.size(), 50, "a loss is no reason to send more");
        for _ in 0..50 {
            acknowledged(&mut window, 1, Duration::ZERO);
        }
        assert_eq!(window.size(), 51);
        window.lost(50, false);
        assert_eq!(window.size(), 35);
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
            acknowledged(&mut window, 1, Duration::ZERO);
        }
        assert!((50..54).contains(&window.size()), "{}", window.size());
    }

    #[test]
    fn packets_that_wait_long_end_its_growth() {
        let milliseconds = Duration::from_millis;
        let mut window = Window::new(256);
        acknowledged(&mut window, 64, milliseconds(7));
        assert_eq!(window.size(), 128, "slow start");
        acknowledged(&mut window, 128, milliseconds(8));
        assert_eq!(window.size(), 129, "a packet a round trip");
        acknowledged(&mut window, 129, milliseconds(1));
        assert_eq!(window.size(), 130, "slow start is over");
        acknowledged(&mut window, 10_000, milliseconds(16));
        assert_eq!(window.size(), 130, "no growth");
        // The queue is gone: other traffic made it.
        acknowledged(&mut window, 130, milliseconds(1));
        assert_eq!(window.size(), 131);
    }

    #[test]
    fn a_small_window_grows_whatever_packets_wait() {
        let mut window = Window::new(256);
        window.collapse(100);
        acknowledged(&mut window, 1, GROWTH_DELAY);
        assert_eq!(window.size(), 2, "slow start goes on");
        acknowledged(&mut window, 2, GROWTH_DELAY);
        assert_eq!(window.size(), MINIMUM);
        for _ in 0..100 {
            let size = window.size();
            acknowledged(&mut window, size, GROWTH_DELAY);
        }
        assert_eq!(window.size(), FIRST, "a packet a round trip");
    }

    /// What is in flight then was sent before the silence.
    #[test]
    fn a_loss_after_a_long_silence_changes_nothing() {
        let mut window = Window::new(256);
        window.collapse(100);
        for in_flight in [100, 1] {
            window.lost(in_flight, true);
            assert_eq!((window.size(), window.slow_start_threshold), (1, 50));
        }
    }

    #[test]
    fn where_no_delay_is_known_it_grows_no_further_than_under_any() {
        let mut window = Window::new(1024);
        for _ in 0..100 {
            window.sent(window.size().into());
            window.acknowledged(64, None);
        }
        assert_eq!(window.size(), 128);
        acknowledged(&mut window, 64, Duration::ZERO);
        assert_eq!(window.size(), 192, "slow start is not over");
    }

    #[test]
    fn never_beyond_its_limit() {
        let mut window = Window::new(3);
        for _ in 0..1000 {
            acknowledged(&mut window, 100, Duration::ZERO);
        }
        assert_eq!(window.size(), 3);
        window.lost(1000, false);
        assert!(window.size() <= 3);
    }

    #[test]
    fn a_queue_that_stays_takes_back_what_has_grown() {
        let delay = SLOW_START_DELAY * 4;
        let mut window = Window::new(1024);
        for _ in 0..100 {
            acknowledged(&mut window, 64, Duration::ZERO);
        }
        assert_eq!(window.size(), 1024);
        acknowledged(&mut window, 64, delay);
        assert_eq!(window.size(), 256, "a queue of four times the length, a quarter of the window");
        window.acknowledged(64, Some(delay));
        assert_eq!(window.size(), 256, "what was sent before is not counted twice");
        for _ in 0..100 {
            acknowledged(&mut window, 256, delay * 10);
        }
        assert_eq!(window.size(), 128, "an eighth of its limit is left");
    }

    #[test]
    fn a_delay_says_nothing_of_what_was_in_flight_long_ago() {
        let mut window = Window::new(512);
        for _ in 0..100 {
            acknowledged(&mut window, 64, Duration::ZERO);
        }
        for _ in 0..3 {
            window.sent(1);
            window.acknowledged(1, Some(Duration::ZERO));
            window.rested();
        }
        window.sent(1);
        window.acknowledged(1, Some(GROWTH_DELAY * 10));
        assert_eq!(window.size(), 512, "one packet makes no queue");
    }

    #[test]
    fn a_window_that_is_not_used_does_not_grow() {
        let mut window = Window::new(512);
        for _ in 0..1000 {
            window.sent(20);
            window.acknowledged(20, Some(Duration::ZERO));
        }
        assert_eq!(window.size(), FIRST);
        window.sent(40);
        window.acknowledged(40, Some(Duration::ZERO));
        assert_eq!(window.size(), FIRST + 40, "slow start, when more than half is used");
        window.lost(100, true);
        // What was in flight before is of other round trips.
        window.rested();
        window.rested();
        for _ in 0..1000 {
            window.sent(30);
            window.acknowledged(30, Some(Duration::ZERO));
        }
        assert_eq!(window.size(), 50, "three quarters, when it is over");
    }
}
