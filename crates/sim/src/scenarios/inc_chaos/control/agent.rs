//! What hosts and switches have in common: a connection to the controller, which is made anew when it breaks.

use core::time::Duration;

use millstream_roce::Instant;

use crate::Rng;

/// Between attempts, as of the daemons: doubled each time, and up to half of it is left out by chance.
const BACK_OFF: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// How far it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Link {
    /// None is wanted.
    Off,
    /// The next attempt.
    Pause { until: Instant },
    /// An attempt is under way.
    Connecting,
    /// By this stream.
    Open(u64),
}

/// One end.
#[derive(Debug)]
pub(super) struct Agent {
    /// Which process of the machine.
    pub(super) life: u64,
    pub(super) link: Link,
    /// Attempts since the controller was there.
    pub(super) attempts: u32,
    /// The highest term of a command that it has obeyed.
    obeyed: u64,
}

impl Agent {
    pub(super) const fn new() -> Self {
        Self { life: 0, link: Link::Off, attempts: 0, obeyed: 0 }
    }

    /// It obeys a command of this term; whether it may.
    pub(super) fn obeys(&mut self, term: u64) -> bool {
        let right = term >= self.obeyed;
        self.obeyed = self.obeyed.max(term);
        right
    }

    pub(super) fn stream(&self) -> Option<u64> {
        if let Link::Open(stream) = self.link { Some(stream) } else { None }
    }

    /// The connection is lost: when the next attempt is.
    pub(super) fn come_back(&mut self, now: Instant, rng: &mut Rng) -> Instant {
        let [first, longest] = BACK_OFF;
        let pause = longest.min(first * 2_u32.saturating_pow(self.attempts.min(16)));
        let until = now + (pause - pause * rng.below(1024) as u32 / 2048);
        self.attempts = self.attempts.saturating_add(1);
        self.link = Link::Pause { until };
        until
    }
}
