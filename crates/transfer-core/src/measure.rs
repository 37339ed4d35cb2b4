//! What a rail is measured to do: its recent peak rate, its smallest round trip, and what it carries now.

use core::time::Duration;

use crate::Instant;

/// A rate is taken over at least so many nanoseconds: a link may let some packets pass at once that has sent nothing
/// for a while, and a rail that may hold too much takes what others would have carried.
const SAMPLE: u64 = 2_000_000;
/// The past counts for between one and two of these, in nanoseconds.
const MEMORY: u64 = 5_000_000_000;

/// Of how regularly slices complete counts what was for between one and two of these, in nanoseconds: how busy a machine
/// is changes sooner than what a link carries.
const REGULAR: u64 = 2_000_000_000;
/// So many slices at least say how regularly they complete.
const ENOUGH: u32 = 64;

/// The most of the recent past: of the present epoch and of the one before.
#[derive(Debug, Default)]
struct Best {
    epoch_start: Instant,
    present: Option<u64>,
    past: Option<u64>,
}

/// The smallest round trip, in nanoseconds.
///
/// What waits in a rail's queue makes every round trip longer, and what may be in flight grows with the smallest: if
/// it were forgotten while the queue is never empty, both would double again and again. So it is measured anew over a
/// queue that has been emptied (Cardwell et al., "BBR Congestion Control", draft-ietf-ccwg-bbr, ProbeRTT).
#[derive(Debug, Default)]
struct RoundTrip {
    smallest: Option<u64>,
    /// When it was measured.
    at: Instant,
    /// It was measured long ago, and since then little is in flight.
    emptied_at: Option<Instant>,
}

/// The longest times in which nothing completed of what was in flight: of the present epoch, and of the one before if
/// enough completed in it.
#[derive(Debug, Default)]
struct Silences {
    epoch_start: Instant,
    completed: u32,
    present: u64,
    past: Option<u64>,
}

/// Over so much time in which it had something to do is looked at what a rail carries now.
const WINDOW: u64 = 8_000_000;
/// What completes within so long was perhaps told in one go.
const BURST: u64 = 1_000_000;
/// A shorter slice that is alone on its rail says nothing of a rate: it takes the time of a round trip.
const LEAST_SAMPLE: u64 = 16 << 10;
/// Nanoseconds of a byte have so many binary places: 1 byte/s and 6 TB/s can both be told.
pub(crate) const COST_PLACES: u32 = 16;

#[derive(Debug, Default)]
pub(crate) struct Measure {
    /// Bytes per second.
    rate: Best,
    round_trip: RoundTrip,
    silences: Silences,
    present: Mark,
    cost: Cost,
    /// How long the slice took that completed last.
    last: Duration,
}

/// What a byte costs now: time in which the rail had something to do, by what it has done in it.
#[derive(Debug, Default)]
struct Cost {
    /// Nanoseconds of a byte, with [`COST_PLACES`]. 0 is unknown.
    present: u64,
    /// It is of a whole window, or several.
    settled: bool,
    bytes: u64,
    nanos: u64,
    /// `nanos` when it was a window first.
    reached: u64,
}

/// What had completed on a rail at a time: a slice keeps that of when it was posted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Mark {
    /// Bytes in all.
    bytes: u64,
    /// When the last of them did, or something was posted when nothing was in flight.
    at: Instant,
    /// When that was posted.
    posted_at: Instant,
    /// For how long this process had been held up then, in all.
    held_up: Duration,
}

impl Best {
    fn add(&mut self, now: Instant, value: u64) {
        let age = now.nanos_since(self.epoch_start);
        if age >= MEMORY {
            self.past = self.present.take().filter(|_| age < 2 * MEMORY);
            self.epoch_start = now;
        }
        self.present = Some(self.present.map_or(value, |best| best.max(value)));
    }

    fn get(&self) -> Option<u64> {
        self.past.into_iter().chain(self.present).max()
    }
}

impl Silences {
    /// Something has completed, after so many nanoseconds.
    fn add(&mut self, now: Instant, nanos: u64) {
        let age = now.nanos_since(self.epoch_start);
        if age >= REGULAR {
            let enough = age < 2 * REGULAR && self.completed >= ENOUGH;
            let past = enough.then_some(self.present);
            *self = Self { epoch_start: now, past, ..Self::default() };
        }
        self.completed = self.completed.saturating_add(1);
        self.present = self.present.max(nanos);
    }

    /// What was before a rest says nothing of what comes after it.
    fn longest(&self, now: Instant) -> Option<u64> {
        let past = self.past.filter(|_| now.nanos_since(self.epoch_start) < 2 * REGULAR);
        past.map(|past| past.max(self.present))
    }
}

impl RoundTrip {
    fn is_old(&self, now: Instant) -> bool {
        self.smallest.is_some() && now.nanos_since(self.at) >= 2 * MEMORY
    }

    /// A slice has completed that was posted then, `alone` if nothing else was in flight. `little` is in flight now.
    fn add(&mut self, now: Instant, posted_at: Instant, alone: bool, little: bool) {
        let nanos = now.nanos_since(posted_at);
        let over_empty_queue = alone || self.emptied_at.is_some_and(|since| posted_at >= since);
        if self.smallest.is_none_or(|smallest| nanos <= smallest)
            || (self.is_old(now) && over_empty_queue)
        {
            *self = Self { smallest: Some(nanos), at: now, emptied_at: None };
        } else if little && self.emptied_at.is_none() && self.is_old(now) {
            self.emptied_at = Some(now);
        }
    }
}

impl Cost {
    /// A slice that was posted while others were in flight: from one completion to the next.
    fn follows(&mut self, bytes: u64, nanos: u64) {
        // What is told in one go, after a thread was held up, belongs to the time before it.
        if self.nanos >= WINDOW && (nanos >= BURST || self.nanos - self.reached >= BURST) {
            self.take();
        }
        let below = self.nanos < WINDOW;
        self.bytes += bytes;
        self.nanos += nanos;
        if below {
            self.reached = self.nanos;
        }
    }

    /// Takes what a window has shown.
    fn take(&mut self) {
        let sample = cost(self.bytes, self.nanos);
        self.present = match self.present {
            _ if !self.settled => sample,
            // What is much slower holds what it has for long, and what is much faster stands idle: that is
            // believed soon.
            before if sample / 2 > before || sample < before / 2 => {
                before / 4 + sample - sample / 4
            }
            before => before / 2 + sample / 2,
        }
        .max(1);
        *self = Self { present: self.present, settled: true, ..Self::default() };
    }

    /// A slice that was alone took so long, a round trip of at least `round_trip` in it. It counts where
    /// nothing is known, and where it was faster, or much slower, than what is known.
    fn alone(&mut self, bytes: u64, nanos: u64, round_trip: u64) {
        if bytes < LEAST_SAMPLE {
            return;
        }
        let sample = cost(bytes, nanos).max(1);
        let expected = times(bytes, self.present).saturating_add(2 * round_trip);
        if self.present == 0 || (!self.settled && sample < self.present) {
            self.present = sample;
        } else if sample < self.present {
            self.follows(bytes, nanos);
        } else if nanos / 2 > expected {
            if self.nanos >= WINDOW {
                self.take();
            }
            // What was in time before says nothing of now.
            (self.bytes, self.nanos) = (0, 0);
            self.follows(bytes, nanos);
        }
    }
}

/// What a byte costs.
const fn cost(bytes: u64, nanos: u64) -> u64 {
    // A slice has at least a byte, and no window is as long as 2^48 ns.
    (if nanos >> (64 - COST_PLACES) == 0 { nanos << COST_PLACES } else { u64::MAX }) / bytes
}

/// What bytes take at this cost each, in nanoseconds.
pub(crate) const fn times(bytes: u64, cost: u64) -> u64 {
    bytes.saturating_mul(cost) >> COST_PLACES
}

/// `value` times `by` over `over`, which is not 0; no more than fits.
pub(crate) fn scaled(value: u64, by: u64, over: u64) -> u64 {
    match value.checked_mul(by) {
        Some(product) => product / over,
        // To divide 128 bits takes many instructions.
        None => (u128::from(value) * u128::from(by) / u128::from(over)).min(u64::MAX.into()) as u64,
    }
}

impl Measure {
    /// Something is posted on a rail that had nothing in flight: the time before says nothing.
    pub(crate) const fn begin(&mut self, now: Instant, held_up: Duration) {
        (self.present.at, self.present.posted_at, self.present.held_up) = (now, now, held_up);
    }

    /// For a slice that is posted.
    pub(crate) const fn mark(&self) -> Mark {
        self.present
    }

    /// A slice of so many bytes has completed that was posted at `posted_at`. By now this process was held up
    /// for so long in all; and `little` is in flight now, as much as any rail may have.
    ///
    /// The rate is that of all that has completed since the last completion before it was posted, over that
    /// time or over that in which it was posted, whatever is longer. So what is told in one go, after a thread
    /// was held up, is as slow as it was (Cheng et al., "Delivery Rate Estimation",
    /// draft-cheng-iccrg-delivery-rate-estimation).
    pub(crate) fn completed(
        &mut self,
        now: Instant,
        (posted_at, posted): (Instant, Mark),
        bytes: u64,
        held_up: Duration,
        little: bool,
    ) {
        let took = now.nanos_since(posted_at);
        let alone = posted.posted_at == posted_at && posted.bytes == self.present.bytes;
        self.round_trip.add(now, posted_at, alone, little);
        let before = self.present;
        self.silences.add(now, now.nanos_since(posted_at.max(before.at)));
        if posted_at < before.at {
            // Mostly it was not held up.
            let held_up = (held_up - before.held_up).as_nanos() as u64;
            self.cost.follows(bytes, now.nanos_since(before.at).saturating_sub(held_up));
        } else {
            let round_trip = self.round_trip_nanos();
            // Whether it was slow or this process was held up nobody knows of one slice.
            self.cost.alone(bytes, took, round_trip);
        }
        self.last = Duration::from_nanos(took);
        self.present = Mark { bytes: before.bytes + bytes, at: now, posted_at, held_up };
        let completing = now.nanos_since(posted.at);
        let posting = posted_at.nanos_since(posted.posted_at);
        let elapsed = completing.max(posting);
        if elapsed > 0 {
            let done = self.present.bytes - posted.bytes;
            self.rate.add(now, scaled(done, 1_000_000_000, elapsed.max(SAMPLE)));
        }
    }

    /// What was measured says nothing any more.
    pub(crate) fn forget(&mut self) {
        (self.rate, self.round_trip) = (Best::default(), RoundTrip::default());
        (self.cost, self.last) = (Cost::default(), Duration::ZERO);
        self.silences = Silences::default();
    }

    /// The longest time of the last 2 to 4 s in which nothing completed of what was in flight; `None` where too little
    /// did to say that.
    pub(crate) fn longest_silence(&self, now: Instant) -> Option<Duration> {
        self.silences.longest(now).map(Duration::from_nanos)
    }

    /// Bytes per second; `None` before anything was measured.
    pub(crate) fn peak_rate(&self) -> Option<u64> {
        self.rate.get()
    }

    /// What a byte costs now, in nanoseconds with [`COST_PLACES`]; `None` where that is unknown.
    pub(crate) const fn cost(&self) -> Option<u64> {
        if self.cost.present == 0 { None } else { Some(self.cost.present) }
    }

    /// Whether that is of a whole window, in which the rail was busy, and not of single slices.
    pub(crate) const fn is_settled(&self) -> bool {
        self.cost.settled
    }

    /// How long the slice took that completed last.
    pub(crate) const fn last(&self) -> Duration {
        self.last
    }

    /// The smallest round trip in nanoseconds, or 0.
    pub(crate) fn round_trip_nanos(&self) -> u64 {
        self.round_trip.smallest.unwrap_or_default()
    }

    pub(crate) fn smallest_round_trip(&self) -> Option<Duration> {
        self.round_trip.smallest.map(Duration::from_nanos)
    }

    /// Whether that was measured long ago: then its queue has to be emptied, to measure it anew.
    pub(crate) fn round_trip_is_old(&self, now: Instant) -> bool {
        self.round_trip.is_old(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELD_UP: Duration = Duration::ZERO;

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    /// A slice that was posted when nothing else was in flight.
    fn alone(measure: &mut Measure, posted: u64, now: u64, bytes: u64) {
        measure.begin(at(posted), HELD_UP);
        let mark = measure.mark();
        measure.completed(at(now), (at(posted), mark), bytes, HELD_UP, true);
    }

    #[test]
    fn the_peak_of_the_recent_past_counts() {
        let mut measure = Measure::default();
        assert_eq!((measure.peak_rate(), measure.smallest_round_trip()), (None, None));
        alone(&mut measure, 100, 104, 2000);
        assert_eq!(measure.peak_rate(), Some(500_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(4)));
        alone(&mut measure, 1000, 1002, 100);
        assert_eq!(measure.peak_rate(), Some(500_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(2)));
        // The first epoch is the past of the second and forgotten in the third.
        alone(&mut measure, 6000, 6010, 1000);
        assert_eq!(measure.peak_rate(), Some(500_000));
        alone(&mut measure, 11_000, 11_010, 900);
        assert_eq!(measure.peak_rate(), Some(100_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(10)));
        // After two epochs without any nothing of the past is recent; nor after more.
        let mut best = Best::default();
        best.add(at(0), 9);
        best.add(at(9999), 5);
        assert_eq!(best.get(), Some(9));
        best.add(at(19_999), 3);
        assert_eq!(best.get(), Some(3));
        alone(&mut measure, 90_000, 90_020, 200);
        assert_eq!(measure.peak_rate(), Some(10_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(20)));
        measure.forget();
        assert_eq!((measure.peak_rate(), measure.smallest_round_trip()), (None, None));
        alone(&mut measure, 90_100, 90_102, 100);
        assert_eq!(measure.peak_rate(), Some(50_000));
    }

    #[test]
    fn an_old_round_trip_is_measured_anew_over_an_empty_queue() {
        let mut round_trip = RoundTrip::default();
        let mut add = |posted: u64, now: u64, little| {
            round_trip.add(at(now), at(posted), false, little);
            (round_trip.smallest.unwrap() / 1_000_000, round_trip.is_old(at(now)))
        };
        assert_eq!(add(0, 4, false), (4, false));
        assert_eq!(add(5, 9, false), (4, false), "as short is as good");
        assert_eq!(add(9_000, 10_008, true), (4, false));
        // Ten seconds: what is posted before the queue is empty says nothing.
        assert_eq!(add(9_000, 10_009, false), (4, true));
        assert_eq!(add(10_000, 10_100, true), (4, true), "it was posted before");
        assert_eq!(add(10_099, 10_199, true), (4, true));
        assert_eq!(add(10_100, 10_110, false), (10, false));
        // It is not as old as the one before.
        assert_eq!(add(10_110, 20_109, true), (10, false));
        assert_eq!(add(10_110, 20_110, true), (10, true));
        round_trip.add(at(30_000), at(29_980), true, true);
        assert_eq!(round_trip.smallest, Some(20_000_000), "nothing else was in flight");
    }

    /// Bytes per second now.
    fn rate(measure: &Measure) -> Option<u64> {
        measure.cost().map(|cost| (1_000_000_000 << COST_PLACES) / cost)
    }

    /// So many slices of 64,000 bytes, four in flight, each of which takes so many milliseconds.
    fn stream(measure: &mut Measure, mut now: u64, slices: usize, each: u64) -> u64 {
        measure.begin(at(now), HELD_UP);
        let mut marks = vec![(now, measure.mark()); 4];
        for _ in 0..slices {
            now += each;
            let (posted, mark) = marks.remove(0);
            measure.completed(at(now), (at(posted), mark), 64_000, HELD_UP, true);
            marks.push((now, measure.mark()));
        }
        now
    }

    #[test]
    fn the_present_rate_follows_in_tens_of_milliseconds() {
        let mut measure = Measure::default();
        let now = stream(&mut measure, 0, 50, 1);
        let fast = rate(&measure).unwrap();
        assert!((63_000_000..65_000_000).contains(&fast), "{fast}");
        // A tenth: after four slices, which is 40 ms.
        let now = stream(&mut measure, now, 4, 10);
        let slow = rate(&measure).unwrap();
        assert!((6_300_000..8_500_000).contains(&slow), "{slow}");
        // And back.
        stream(&mut measure, now, 40, 1);
        let fast = rate(&measure).unwrap();
        assert!(fast > 50_000_000, "{fast}");
        assert_eq!(measure.peak_rate(), Some(64_000_000));
        measure.forget();
        assert_eq!(measure.cost(), None);
    }

    #[test]
    fn what_is_offered_seldom_is_no_slow_rail() {
        let mut measure = Measure::default();
        stream(&mut measure, 0, 50, 1);
        let before = measure.cost();
        // Alone, a slice takes a round trip, too; and a short one nothing else.
        for round in 0..100 {
            alone(&mut measure, 1000 + 10 * round, 1002 + 10 * round, 64_000);
            alone(&mut measure, 1005 + 10 * round, 1009 + 10 * round, 100);
        }
        assert_eq!(measure.cost(), before);
        // But two that take ten times as long are believed.
        alone(&mut measure, 5000, 5050, 64_000);
        alone(&mut measure, 5100, 5150, 64_000);
        assert!(rate(&measure).unwrap() < 2_000_000);
    }

    #[test]
    fn what_is_told_in_one_go_is_as_fast_as_it_was() {
        let mut measure = Measure::default();
        let now = stream(&mut measure, 0, 100, 1);
        // Nothing is told for 90 ms, and then 50 slices.
        measure.begin(at(now), HELD_UP);
        let mark = measure.mark();
        for _ in 0..50 {
            measure.completed(at(now + 90), (at(now), mark), 64_000, HELD_UP, true);
        }
        stream(&mut measure, now + 90, 30, 1);
        let rate = rate(&measure).unwrap();
        assert!(rate > 55_000_000, "{rate}");
    }

    #[test]
    fn the_time_in_which_this_process_was_held_up_does_not_count() {
        let mut measure = Measure::default();
        let now = stream(&mut measure, 0, 100, 1);
        let before = measure.cost();
        for round in 0..10 {
            let start = now + 1000 * round;
            let held_up = |rounds| Duration::from_millis(899 * rounds);
            measure.begin(at(start), held_up(round));
            let mark = measure.mark();
            for (after, rounds) in [(1, round), (901, round + 1), (902, round + 1)] {
                let now = at(start + after);
                measure.completed(now, (at(start), mark), 64_000, held_up(rounds), true);
            }
        }
        assert_eq!(measure.cost(), before);
    }

    #[test]
    fn a_first_slice_that_is_long_enough_is_a_rate() {
        let mut measure = Measure::default();
        alone(&mut measure, 0, 2, 1000);
        assert_eq!((measure.cost(), measure.last()), (None, Duration::from_millis(2)));
        alone(&mut measure, 10, 14, 64_000);
        assert_eq!(rate(&measure), Some(16_000_000));
        alone(&mut measure, 20, 22, 64_000);
        assert_eq!(rate(&measure), Some(32_000_000), "the first was not the best");
        assert_eq!(times(64_000, measure.cost().unwrap()), 2_000_000);
        assert_eq!((cost(1, u64::MAX), times(u64::MAX, 2)), (u64::MAX, u64::MAX >> 16));
    }

    #[test]
    fn what_is_in_flight_together_is_measured_together() {
        let mut measure = Measure::default();
        measure.begin(at(0), HELD_UP);
        // Two at once, and each that completes is followed by another.
        let mut marks = vec![(0, measure.mark()), (0, measure.mark())];
        for step in 1..=10 {
            let (posted, mark) = marks.remove(0);
            measure.completed(at(step * 4), (at(posted), mark), 1000, HELD_UP, true);
            marks.push((step * 4, measure.mark()));
        }
        assert_eq!(measure.peak_rate(), Some(250_000));
        assert_eq!(measure.smallest_round_trip(), Some(Duration::from_millis(4)));
    }

    /// As after a bucket of tokens was filled.
    #[test]
    fn a_slice_that_passes_at_once_is_no_rate() {
        let mut measure = Measure::default();
        alone(&mut measure, 100, 101, 64_000);
        assert_eq!(measure.peak_rate(), Some(32_000_000));
        let mut measure = Measure::default();
        alone(&mut measure, 100, 100, 64_000);
        assert_eq!(measure.peak_rate(), None, "in no time at all");
    }

    /// What is told after a thread was held up, while more is posted.
    #[test]
    fn a_burst_is_no_rate() {
        let mut measure = Measure::default();
        measure.begin(at(0), HELD_UP);
        let mut marks: Vec<(u64, Mark)> = (0..8).map(|_| (0, measure.mark())).collect();
        // The first eight are told together, and each is followed by another, which takes 1 ms.
        for now in (0..30).map(|step: u64| 200 + step.saturating_sub(7)) {
            let (posted, mark) = marks.remove(0);
            measure.completed(at(now), (at(posted), mark), 1000, HELD_UP, true);
            marks.push((now, measure.mark()));
        }
        assert_eq!(measure.peak_rate(), Some(1_000_000), "a slice each millisecond");
    }

    /// What a cost of `before` becomes when a window shows `sample`.
    fn taken(before: u64, sample: u64, settled: bool) -> u64 {
        let bytes = 1 << COST_PLACES;
        let mut cost = Cost { present: before, settled, bytes, nanos: sample, reached: sample };
        cost.take();
        assert_eq!((cost.settled, cost.bytes, cost.nanos, cost.reached), (true, 0, 0, 0));
        cost.present
    }

    #[test]
    fn what_is_much_faster_or_slower_is_believed_sooner() {
        let half = [(2000, 500 + 1000), (2001, 500 + 1000), (500, 500 + 250)];
        let most = [(2002, 250 + 2002 - 500), (499, 250 + 499 - 124)];
        for (sample, expected) in half.into_iter().chain(most) {
            assert_eq!(taken(1000, sample, true), expected, "{sample}");
        }
        assert_eq!(taken(1000, 5000, false), 5000, "the first window is all that is known");
        assert_eq!(taken(0, 0, false), 1, "0 is unknown");
    }

    #[test]
    fn a_window_ends_before_what_is_told_after_a_burst() {
        let mut cost = Cost::default();
        for _ in 0..8 {
            cost.follows(1000, 1_000_000);
        }
        // More than a window, but told within a millisecond.
        for nanos in [BURST - 1, 1] {
            cost.follows(1000, nanos);
            assert!(!cost.settled);
        }
        assert_eq!((cost.bytes, cost.nanos), (10_000, 9_000_000));
        cost.follows(500, 1);
        assert_eq!((cost.present, cost.settled), (self::cost(10_000, 9_000_000), true));
        assert_eq!((cost.bytes, cost.nanos, cost.reached), (500, 1, 1));
        // What follows later than that is told by itself.
        cost.follows(500, WINDOW);
        cost.follows(300, BURST);
        assert_eq!((cost.bytes, cost.nanos), (300, BURST));
    }

    /// A cost that is known: a nanosecond for each byte.
    fn known(bytes: u64, nanos: u64) -> Cost {
        let present = 1 << COST_PLACES;
        Cost { present, settled: true, bytes, nanos, reached: 0 }
    }

    #[test]
    fn a_slice_alone_counts_where_it_was_faster_or_much_slower() {
        const LENGTH: u64 = 100_000;
        let after = |nanos| {
            let mut cost = known(7, 11);
            cost.alone(LENGTH, nanos, 10_000);
            assert_eq!(cost.present, 1 << COST_PLACES, "it is no window");
            (cost.bytes, cost.nanos)
        };
        assert_eq!(after(LENGTH - 1), (LENGTH + 7, LENGTH + 10), "faster");
        // Up to twice what is expected, two round trips among it, it may be anything.
        assert_eq!((after(LENGTH), after(240_001)), ((7, 11), (7, 11)));
        assert_eq!(after(240_002), (LENGTH, 240_002), "slower, and what was before is over");
        // A window that is full is taken before that.
        for (nanos, present) in [(WINDOW, 8 << COST_PLACES), (WINDOW - 1, 1 << COST_PLACES)] {
            let mut cost = known(1_000_000, nanos);
            cost.alone(LENGTH, 2_400_002, 10_000);
            let expected = match nanos {
                WINDOW => present - present / 4 + (1 << COST_PLACES) / 4,
                _ => present,
            };
            assert_eq!((cost.present, cost.bytes), (expected, LENGTH), "{nanos}");
        }
        // While it is not settled the fastest counts; and what is short never does.
        let mut cost = Cost::default();
        for (bytes, nanos, expected) in [
            (LEAST_SAMPLE - 1, 1_000_000, 0),
            (LEAST_SAMPLE, 4 * LEAST_SAMPLE, 4),
            (LEAST_SAMPLE, 5 * LEAST_SAMPLE, 4),
            (LEAST_SAMPLE, 3 * LEAST_SAMPLE, 3),
        ] {
            cost.alone(bytes, nanos, 0);
            assert_eq!((cost.present, cost.bytes), (expected << COST_PLACES, 0), "{nanos}");
        }
    }

    #[test]
    fn what_is_scaled_may_have_more_bits_than_it_has_room_for() {
        assert_eq!(scaled(7, 10, 4), 17);
        assert_eq!(scaled(u64::MAX, 1, 1), u64::MAX);
        assert_eq!(scaled(1 << 63, 6, 3), u64::MAX);
        assert_eq!(scaled(1 << 63, 6, 4), 3 << 62);
        assert_eq!(scaled((1 << 63) + 1, 2, 4), 1 << 62);
    }

    #[test]
    fn costs_of_any_length_can_be_told() {
        assert_eq!(cost(1, (1 << 48) - 1), ((1 << 48) - 1) << COST_PLACES);
        assert_eq!(cost(2, 1 << 48), u64::MAX / 2);
        assert_eq!(cost(3, 10), (10 << COST_PLACES) / 3);
    }

    /// Not that before, however long it was.
    #[test]
    fn the_time_that_does_not_count_is_that_since_the_slice_before() {
        const LONG: Duration = Duration::from_secs(5);
        let mut measure = Measure::default();
        measure.begin(at(0), LONG);
        let mark = measure.mark();
        for now in 1..=20 {
            assert_eq!(measure.is_settled(), now > 10, "{now}");
            measure.completed(at(now), (at(0), mark), 64_000, LONG, true);
        }
        assert_eq!(rate(&measure), Some(64_000_000));
    }

    /// Only that is over an empty queue.
    #[test]
    fn a_slice_is_alone_that_was_posted_when_nothing_was_in_flight_and_completes_first() {
        let mut measure = Measure::default();
        alone(&mut measure, 0, 4, 1000);
        let millis = |measure: &Measure| measure.round_trip_nanos() / 1_000_000;
        // The second completes first.
        measure.begin(at(20_000), HELD_UP);
        let mark = measure.mark();
        for (now, posted) in [(20_030, 20_001), (20_040, 20_000)] {
            measure.completed(at(now), (at(posted), mark), 1000, HELD_UP, false);
            assert_eq!((millis(&measure), measure.round_trip_is_old(at(now))), (4, true));
        }
        alone(&mut measure, 20_050, 20_070, 1000);
        assert_eq!((millis(&measure), measure.round_trip_is_old(at(20_070))), (20, false));
    }

    /// What was longest counts from one epoch after its own began, and until two have passed.
    #[test]
    fn how_regularly_slices_complete_is_known_of_the_epoch_before_and_no_earlier_one() {
        let known = |next: u64, asked: u64| {
            let mut silences = Silences::default();
            (0..u64::from(ENOUGH)).for_each(|_| silences.add(at(0), 7));
            silences.add(at(next), 5);
            silences.longest(at(next + asked))
        };
        let (epoch, ends) = (2000, 4000);
        assert_eq!(known(epoch - 1, 0), None);
        assert_eq!([epoch, ends - 1, ends].map(|next| known(next, 0)), [Some(7), Some(7), None]);
        assert_eq!([0, ends - 1, ends].map(|asked| known(epoch, asked)), [Some(7), Some(7), None]);
    }
}
