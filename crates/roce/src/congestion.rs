//! Congestion of the fabric: telling the peer of marks on its packets, and sending slower when the
//! peer tells us (RoCEv2, annex A17.9).
//!
//! Where the rate comes from is DCQCN (Zhu et al., SIGCOMM 2015): a notification cuts it by a
//! factor that depends on how often they come; without any it returns half way to where it was, a
//! few times, and then grows steadily. All of this is computed when something is to be sent, so
//! there are no timers beside that of the next packet. Without notifications there is no limit.

use core::time::Duration;

use crate::Instant;

/// The peer is told at most once in this time, and a rate is cut at most as often.
const NOTIFICATION_INTERVAL: Duration = Duration::from_micros(50);

/// The period of recovery, and of the decay of the severity.
const PERIOD: Duration = Duration::from_micros(50);

/// Recovery is half the way to the last rate for so many periods; then the target grows.
const FAST_RECOVERY: u32 = 5;

/// Growth of the target in a period: 40 Mbit/s.
const ADDITIVE: u64 = 5_000_000;

/// And when twice as many periods have passed in peace, ten times as much.
const HYPER: u64 = 10 * ADDITIVE;

/// The limit is lifted after so many periods in peace: 50 ms.
const LIFTED: u32 = 1000;

/// Severity 1, as an integer.
const ONE: u64 = 1024;

/// What a period changes of the severity: a sixteenth.
const GAIN: u64 = 16;

/// No rate is lower, in bytes per second: 10 Mbit/s.
const MINIMUM: u64 = 1_250_000;

/// How long a rate is measured.
const MEASURED: Duration = Duration::from_micros(100);

/// Bytes that leave together under a limit, so that the kernel may segment them; at the lowest
/// rates fewer.
const BATCH: u64 = 32 << 10;

/// The longest that a batch gathers.
const LONGEST_GATHER: Duration = Duration::from_micros(500);

#[derive(Debug, Default)]
pub(crate) struct Congestion {
    /// The peer is to be told.
    notify: bool,
    notified_at: Option<Instant>,
    limit: Option<Limit>,
    /// Nothing more leaves before this.
    wait: Option<Instant>,
    meter: Meter,
}

/// A limit on what is sent. Rates are in bytes per second.
#[derive(Clone, Copy, Debug)]
struct Limit {
    rate: u64,
    target: u64,
    /// In parts of [`ONE`].
    severity: u64,
    /// Periods since the last cut.
    periods: u32,
    /// The end of the last period.
    at: Instant,
    cut_at: Instant,
    /// When the next packet may leave, were it not for batches.
    next: Instant,
}

/// The rate at which we have been sending.
#[derive(Debug, Default)]
struct Meter {
    since: Instant,
    bytes: u64,
    last: u64,
}

impl Congestion {
    /// A packet that came with data was marked.
    pub(crate) fn marked(&mut self, now: Instant) {
        let told = |at| now.saturating_duration_since(at) < NOTIFICATION_INTERVAL;
        if !self.notified_at.is_some_and(told) {
            self.notified_at = Some(now);
            self.notify = true;
        }
    }

    /// Whether the peer is to be told now; asked once for each time.
    pub(crate) fn take_notification(&mut self) -> bool {
        core::mem::take(&mut self.notify)
    }

    /// The peer says that our packets were marked.
    pub(crate) fn notified(&mut self, now: Instant) {
        self.recover(now);
        let limit = self.limit.get_or_insert_with(|| Limit {
            rate: self.meter.rate(now).max(MINIMUM),
            target: 0,
            severity: ONE,
            periods: 0,
            at: now,
            cut_at: Instant::ZERO,
            next: now,
        });
        if limit.target > 0 && now.saturating_duration_since(limit.cut_at) < NOTIFICATION_INTERVAL {
            return;
        }
        limit.target = limit.rate;
        limit.rate = (limit.rate - limit.rate * limit.severity / (2 * ONE)).max(MINIMUM);
        limit.severity += (ONE - limit.severity).div_ceil(GAIN);
        limit.periods = 0;
        limit.at = now;
        limit.cut_at = now;
    }

    /// Whether a packet with data may leave.
    pub(crate) fn allows(&mut self, now: Instant) -> bool {
        self.wait_is_over(now);
        if self.wait.is_some() {
            return false;
        }
        self.recover(now);
        let Some(limit) = &mut self.limit else { return true };
        if limit.next <= now {
            return true;
        }
        self.wait = Some(limit.next + limit.time_of(BATCH).min(LONGEST_GATHER));
        false
    }

    /// A packet of so many bytes leaves.
    pub(crate) fn sent(&mut self, now: Instant, bytes: u64) {
        self.meter.add(now, bytes);
        if let Some(limit) = &mut self.limit {
            limit.next = limit.next_after(now, bytes);
        }
    }

    /// Whether a packet of so many bytes, if it left now, would be the last for a while.
    pub(crate) fn pauses_after(&self, now: Instant, bytes: u64) -> bool {
        self.limit.is_some_and(|limit| limit.next_after(now, bytes) > now)
    }

    /// When something may leave again, if it must wait.
    pub(crate) const fn deadline(&self) -> Option<Instant> {
        self.wait
    }

    /// Forgets a wait whose end has come.
    pub(crate) fn wait_is_over(&mut self, now: Instant) {
        self.wait = self.wait.filter(|&until| until > now);
    }

    /// Catches up with the periods that have passed.
    fn recover(&mut self, now: Instant) {
        if let Some(limit) = &mut self.limit {
            while limit.at + PERIOD <= now {
                limit.at = limit.at + PERIOD;
                limit.periods += 1;
                limit.severity -= limit.severity / GAIN;
                limit.target += match limit.periods {
                    ..=FAST_RECOVERY => 0,
                    periods if periods <= 2 * FAST_RECOVERY => ADDITIVE,
                    _ => HYPER,
                };
                limit.rate = u64::midpoint(limit.rate, limit.target);
                if limit.periods >= LIFTED {
                    self.limit = None;
                    return;
                }
            }
        }
    }
}

impl Limit {
    /// When the next packet may leave if one of so many bytes leaves now.
    fn next_after(&self, now: Instant, bytes: u64) -> Instant {
        // What was not used while a batch gathered, or the timer was late, may leave at once. Not
        // more: after a rest of any length, two batches.
        let credit = 2 * self.time_of(BATCH).min(LONGEST_GATHER);
        let unused = now.saturating_duration_since(self.next);
        self.next + unused.saturating_sub(credit) + self.time_of(bytes)
    }

    /// How long so many bytes take.
    fn time_of(&self, bytes: u64) -> Duration {
        Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / self.rate.max(1))
    }
}

impl Meter {
    fn add(&mut self, now: Instant, bytes: u64) {
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed >= MEASURED {
            self.last = self.over(elapsed);
            self.since = now;
            self.bytes = 0;
        }
        self.bytes += bytes;
    }

    /// The present rate, or the last one when it was higher.
    fn rate(&self, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.since);
        self.over(elapsed.max(MEASURED)).max(self.last)
    }

    fn over(&self, elapsed: Duration) -> u64 {
        let nanos = elapsed.as_nanos().max(1);
        (u128::from(self.bytes) * 1_000_000_000 / nanos) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: u64 = 4096;

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    /// Sends packets as fast as allowed from one microsecond to another; returns bytes per second.
    fn rate(congestion: &mut Congestion, from: u64, until: u64) -> u64 {
        let mut bytes = 0;
        for micros in from..until {
            // 4 GB/s is what the machine can do.
            if congestion.allows(at(micros)) {
                congestion.sent(at(micros), PACKET);
                bytes += PACKET;
            }
        }
        bytes * 1_000_000 / (until - from)
    }

    #[test]
    fn the_peer_is_told_once_an_interval() {
        let mut congestion = Congestion::default();
        assert!(!congestion.take_notification());
        congestion.marked(at(0));
        congestion.marked(at(1));
        assert!(congestion.take_notification());
        congestion.marked(at(49));
        assert!(!congestion.take_notification());
        congestion.marked(at(50));
        assert!(congestion.take_notification());
        assert!(!congestion.take_notification());
    }

    #[test]
    fn without_notifications_there_is_no_limit() {
        let mut congestion = Congestion::default();
        assert_eq!(rate(&mut congestion, 0, 10_000), PACKET * 1_000_000);
        assert_eq!(congestion.deadline(), None);
    }

    #[test]
    fn a_notification_cuts_the_rate_and_peace_restores_it() {
        let mut congestion = Congestion::default();
        let full = rate(&mut congestion, 0, 1000);
        congestion.notified(at(1000));
        // Within the interval they are one.
        congestion.notified(at(1020));
        let cut = rate(&mut congestion, 1020, 1140);
        assert!((full * 5 / 10..full * 9 / 10).contains(&cut), "{cut} of {full}");
        let recovered = rate(&mut congestion, 2500, 3500);
        assert!(recovered > full * 8 / 10, "{recovered} of {full}");
        assert!(congestion.allows(at(1000 + 51_000)));
        assert!(congestion.limit.is_none());
    }

    #[test]
    fn many_notifications_go_down_to_the_minimum_and_no_further() {
        let mut congestion = Congestion::default();
        rate(&mut congestion, 0, 1000);
        for round in 0..1000 {
            congestion.notified(at(1000 + round * 60));
        }
        let slow = rate(&mut congestion, 61_000, 61_000 + 45);
        assert!(slow > 0 && congestion.limit.is_some_and(|limit| limit.rate < 20 * MINIMUM));
    }

    #[test]
    fn who_waits_knows_until_when() {
        let mut congestion = Congestion::default();
        rate(&mut congestion, 0, 1000);
        congestion.notified(at(1000));
        congestion.sent(at(1000), PACKET);
        assert!(!congestion.allows(at(1000)));
        let until = congestion.deadline().unwrap();
        assert!(!congestion.allows(Instant::from_nanos(until.nanos() - 1)));
        assert!(congestion.allows(until));
        assert_eq!(congestion.deadline(), None);
    }
}
