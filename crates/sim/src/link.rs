//! One direction of a cable: rate, latency, a queue that overflows, and everything that can go
//! wrong with a packet on it.

use core::time::Duration;

use millstream_roce::Instant;

use crate::{Probability, Rng};

/// What a link is like.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LinkOptions {
    /// Bits per second; `None` when sending takes no time.
    pub rate: Option<u64>,
    /// From the last bit sent to the last bit received.
    pub latency: Duration,
    /// The most that is added to the latency, at random. Packets keep their order all the same.
    pub jitter: Duration,
    /// Bytes that wait to be sent before newcomers are dropped.
    pub queue_bytes: u64,
    /// Bytes that wait before newcomers are marked "congestion experienced"; `None` for never.
    pub mark_bytes: Option<u64>,
    /// How likely a packet is lost after it was sent.
    pub loss: Probability,
    /// How likely it arrives twice.
    pub duplicate: Probability,
    /// How likely it is held back, so that later ones overtake it.
    pub reorder: Probability,
    /// The longest that it is held back.
    pub reorder_delay: Duration,
    /// How likely one of its bits is flipped.
    pub corrupt: Probability,
}

impl LinkOptions {
    /// A faultless link.
    pub const fn new(rate: u64, latency: Duration) -> Self {
        Self {
            rate: Some(rate),
            latency,
            jitter: Duration::ZERO,
            queue_bytes: 4 << 20,
            mark_bytes: None,
            loss: Probability::NEVER,
            duplicate: Probability::NEVER,
            reorder: Probability::NEVER,
            reorder_delay: Duration::from_micros(50),
            corrupt: Probability::NEVER,
        }
    }

    /// With this loss.
    #[must_use]
    pub const fn loss(self, loss: Probability) -> Self {
        Self { loss, ..self }
    }
}

impl Default for LinkOptions {
    /// 10 Gbit/s, 5 us.
    fn default() -> Self {
        Self::new(10_000_000_000, Duration::from_micros(5))
    }
}

/// What becomes of a packet that was given to a link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fate {
    /// The link is cut.
    Partitioned,
    /// No room in the queue.
    Overflowed,
    /// Sent, and lost.
    Lost,
    /// Sent, and will arrive.
    Carried(Carried),
}

/// How a packet arrives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Carried {
    pub(crate) at: Instant,
    /// When its copy arrives, if there is one.
    pub(crate) copy_at: Option<Instant>,
    pub(crate) held_back: bool,
    pub(crate) marked: bool,
    /// A random number to choose the flipped bit by.
    pub(crate) flip: Option<u64>,
}

/// The state of a link.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) options: LinkOptions,
    rng: Rng,
    /// When the last packet accepted has been sent.
    busy_until: Instant,
    /// When the last packet that was not held back arrives.
    last_arrival: Instant,
    pub(crate) cut: bool,
}

impl Link {
    pub(crate) fn new(options: LinkOptions, rng: Rng) -> Self {
        Self { options, rng, busy_until: Instant::ZERO, last_arrival: Instant::ZERO, cut: false }
    }

    /// From now on the link is as these say. What waits leaves the queue at the new rate, if that is another one. Its
    /// packets arrive when they would have all the same: those that follow may overtake them.
    pub(crate) fn set_options(&mut self, now: Instant, options: LinkOptions) {
        if options.rate != self.options.rate {
            let waiting = self.waiting_bytes(now);
            self.busy_until = now + transmission_time(options.rate, waiting);
            self.last_arrival = self.last_arrival.min(now);
        }
        self.options = options;
    }

    /// Takes a packet of `length` bytes on the wire.
    pub(crate) fn carry(&mut self, now: Instant, length: u64) -> Fate {
        let (options, rng) = (self.options, &mut self.rng);
        // All dice are thrown for every packet, so that a packet's luck with one fault does not
        // depend on the other options.
        let lost = options.loss.happens(rng);
        let duplicated = options.duplicate.happens(rng);
        let held_back = options.reorder.happens(rng);
        let corrupted = options.corrupt.happens(rng);
        let jitter = random_duration(rng, options.jitter);
        let hold = random_duration(rng, options.reorder_delay);
        let copy_delay = random_duration(rng, options.jitter.max(options.latency));
        let flip = rng.bits();

        if self.cut {
            return Fate::Partitioned;
        }
        let waiting = self.waiting_bytes(now);
        if waiting + length > options.queue_bytes && waiting > 0 {
            return Fate::Overflowed;
        }
        let marked = options.mark_bytes.is_some_and(|limit| waiting > limit);
        let sent = self.busy_until.max(now) + transmission_time(options.rate, length);
        self.busy_until = sent;
        if lost {
            return Fate::Lost;
        }
        let in_order = (sent + options.latency + jitter).max(self.last_arrival);
        let at = if held_back {
            in_order + hold
        } else {
            self.last_arrival = in_order;
            in_order
        };
        Fate::Carried(Carried {
            at,
            copy_at: duplicated.then(|| at + copy_delay),
            held_back,
            marked,
            flip: corrupted.then_some(flip),
        })
    }

    /// Bytes accepted and not yet sent.
    fn waiting_bytes(&self, now: Instant) -> u64 {
        let Some(rate) = self.options.rate else { return 0 };
        let nanos = self.busy_until.saturating_duration_since(now).as_nanos();
        (nanos * u128::from(rate) / 8_000_000_000) as u64
    }
}

/// How long `length` bytes take at `rate` bits per second, rounded up to nanoseconds.
fn transmission_time(rate: Option<u64>, length: u64) -> Duration {
    let Some(rate) = rate else { return Duration::ZERO };
    let nanos = (u128::from(length) * 8_000_000_000).div_ceil(u128::from(rate.max(1)));
    Duration::from_nanos(nanos.min(u64::MAX.into()) as u64)
}

fn random_duration(rng: &mut Rng, limit: Duration) -> Duration {
    Duration::from_nanos(rng.between(0, limit.as_nanos().min(u64::MAX.into()) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    fn link(options: LinkOptions) -> Link {
        Link::new(options, Rng::new(1))
    }

    fn arrival(fate: Fate) -> Instant {
        let Fate::Carried(carried) = fate else { panic!("{fate:?}") };
        carried.at
    }

    #[test]
    fn packets_queue_behind_each_other() {
        // 1 byte per nanosecond.
        let mut link = link(LinkOptions::new(8_000_000_000, MICROSECOND));
        assert_eq!(arrival(link.carry(Instant::ZERO, 100)), Instant::from_nanos(1100));
        assert_eq!(arrival(link.carry(Instant::ZERO, 100)), Instant::from_nanos(1200));
        assert_eq!(arrival(link.carry(Instant::from_nanos(5000), 1)), Instant::from_nanos(6001));
    }

    #[test]
    fn a_full_queue_drops_the_newcomer() {
        let options =
            LinkOptions { queue_bytes: 250, ..LinkOptions::new(8_000_000_000, MICROSECOND) };
        let mut link = link(options);
        for _ in 0..2 {
            arrival(link.carry(Instant::ZERO, 100));
        }
        assert_eq!(link.carry(Instant::ZERO, 100), Fate::Overflowed);
        // 50 bytes have left since.
        arrival(link.carry(Instant::from_nanos(50), 100));
        // A packet larger than the whole queue passes when the link is free.
        arrival(link.carry(Instant::from_nanos(1000), 1000));
    }

    /// Seed 40005088 of tent-chaos: a link was full for as long as its queue would have taken at the rate of before.
    #[test]
    fn what_waits_leaves_at_the_new_rate() {
        let slow = LinkOptions { queue_bytes: 250, ..LinkOptions::new(8_000_000, MICROSECOND) };
        let mut link = link(slow);
        for _ in 0..2 {
            arrival(link.carry(Instant::ZERO, 100));
        }
        let at = Instant::from_nanos(50_000);
        link.set_options(at, LinkOptions { rate: Some(8_000_000_000), ..slow });
        assert_eq!(link.waiting_bytes(at), 150);
        // 150 bytes at a byte a nanosecond, then this, and the latency.
        assert_eq!(arrival(link.carry(at, 100)), Instant::from_nanos(51_250));
    }

    #[test]
    fn jitter_keeps_the_order_and_reordering_does_not() {
        let steady = LinkOptions {
            jitter: 100 * MICROSECOND,
            ..LinkOptions::new(8_000_000_000, MICROSECOND)
        };
        let arrivals = |options| -> Vec<_> {
            let mut link = link(options);
            (0..200).map(|i| arrival(link.carry(Instant::from_nanos(i * 1000), 100))).collect()
        };
        assert!(arrivals(steady).is_sorted());
        let reordering = LinkOptions { reorder: Probability::per_mille(100), ..steady };
        assert!(!arrivals(reordering).is_sorted());
    }

    #[test]
    fn a_filling_queue_marks() {
        let options =
            LinkOptions { mark_bytes: Some(100), ..LinkOptions::new(8_000_000_000, MICROSECOND) };
        let mut link = link(options);
        let marks: Vec<bool> = (0..3)
            .map(|_| matches!(link.carry(Instant::ZERO, 100), Fate::Carried(c) if c.marked))
            .collect();
        assert_eq!(marks, [false, false, true]);
    }

    #[test]
    fn turning_one_fault_on_leaves_the_others_where_they_were() {
        let lost = |options| -> Vec<u64> {
            let mut link = link(options);
            (0..1000)
                .filter(|i| link.carry(Instant::from_nanos(i * 1000), 100) == Fate::Lost)
                .collect()
        };
        let lossy = LinkOptions::default().loss(Probability::per_mille(50));
        let worse = LinkOptions {
            duplicate: Probability::per_mille(500),
            corrupt: Probability::per_mille(500),
            jitter: MICROSECOND,
            ..lossy
        };
        let expected = lost(lossy);
        assert!((30..70).contains(&expected.len()));
        assert_eq!(lost(worse), expected);
    }

    #[test]
    fn a_cut_link_carries_nothing() {
        let mut link = link(LinkOptions::default());
        link.cut = true;
        assert_eq!(link.carry(Instant::ZERO, 1), Fate::Partitioned);
        link.cut = false;
        arrival(link.carry(Instant::ZERO, 1));
    }
}
