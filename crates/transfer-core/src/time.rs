//! Time as the state machines see it.

use core::fmt;
use core::ops::Add;
use core::time::Duration;

/// A point in time: nanoseconds since an epoch that the caller chose. Threads use a monotonic
/// clock, the simulator its virtual one.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Instant(u64);

impl Instant {
    /// The epoch.
    pub const ZERO: Self = Self(0);

    /// So many nanoseconds after the epoch.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the epoch.
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// The time since `earlier`, or zero when that is later.
    pub const fn saturating_duration_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.nanos_since(earlier))
    }

    /// The same in nanoseconds, for what is done with each slice: seconds of a [`Duration`] are divisions.
    pub(crate) const fn nanos_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

impl fmt::Display for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}", self.0 / 1_000_000_000, self.0 % 1_000_000_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_ends_and_does_not_wrap() {
        let late = Instant::from_nanos(u64::MAX - 5);
        assert_eq!(late + Duration::from_nanos(5), Instant::from_nanos(u64::MAX));
        assert_eq!(late + Duration::MAX, Instant::from_nanos(u64::MAX));
        assert_eq!(Instant::ZERO.saturating_duration_since(late), Duration::ZERO);
        assert_eq!(late.saturating_duration_since(late), Duration::ZERO);
    }

    #[test]
    fn it_is_shown_in_seconds() {
        assert_eq!(Instant::from_nanos(12_000_000_034).to_string(), "12.000000034");
    }
}
