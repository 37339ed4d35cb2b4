//! Who chooses the rail of a slice.

use core::time::Duration;

use crate::{Classic, Instant, Opcode, PriorityLevel, Rail, RailId, Tent};

/// A slice that waits, as a policy sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SliceInfo {
    /// Which way.
    pub opcode: Opcode,
    /// Bytes.
    pub length: u32,
    /// Bytes for which there must be room: all, or one where it is the turn of a level that has waited for long.
    pub room: u32,
    /// The priority of its task; where the policy has none, the same for all.
    pub level: PriorityLevel,
    /// Something of a higher level comes, for which it leaves room.
    pub yields: bool,
    /// How often it has ended in an error of a rail.
    pub attempt: u8,
    /// A small number for its pair of locations: the same pair has the same number.
    pub class: u16,
    /// Where the local memory is.
    pub local_location: u16,
    /// Where the peer's memory is.
    pub peer_location: u16,
}

/// The rails of a flow.
#[derive(Clone, Copy, Debug)]
pub struct Rails<'a> {
    /// All of them, by number.
    pub all: &'a [Rail],
    /// Another number after each change of a rail's state, or when one may be connected again.
    pub version: u64,
}

impl<'a> Rails<'a> {
    /// The rail of a number.
    pub(crate) fn rail(&self, id: RailId) -> &'a Rail {
        &self.all[usize::from(id.0)]
    }
}

/// What is to be done for a slice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Pick {
    /// Post it on this rail, which has room.
    Post(RailId),
    /// Connect this rail, which may be connected, and ask again.
    Connect(RailId),
    /// Wait for room.
    Wait,
    /// Wait for room, but ask again at this time.
    WaitUntil(Instant),
    /// No rail is up that could take it: wait for one.
    NoRail,
}

/// Chooses rails. The same calls give the same answers: randomness comes from a seed.
pub trait Policy {
    /// Chooses for the slice that waits first.
    fn pick(&mut self, now: Instant, slice: &SliceInfo, rails: &Rails<'_>) -> Pick;

    /// Whether tasks of a higher priority go first, and within one those with an earlier deadline. If not, they
    /// go in the order in which they came.
    fn has_priorities(&self) -> bool {
        false
    }

    /// Whether a rail has no room for a slice that waits since it has as much in flight as it can use: then what
    /// it carries is all that it can.
    fn is_full(&self, rail: &Rail, slice: &SliceInfo) -> bool {
        !rail.has_room(slice.length)
    }

    /// How old the oldest byte in flight on a rail may become, though the rail completes others, before the
    /// rail breaks: of one that may be silent for so long while others complete. `None` is no limit.
    fn most_age(&self, _patience: Duration) -> Option<Duration> {
        None
    }
}

/// One of the policies that there are.
#[derive(Debug)]
pub enum AnyPolicy {
    /// NICs near to the memory first.
    Classic(Classic),
    /// Where a slice is expected to be finished first.
    Tent(Tent),
}

impl Policy for AnyPolicy {
    fn pick(&mut self, now: Instant, slice: &SliceInfo, rails: &Rails<'_>) -> Pick {
        match self {
            Self::Classic(classic) => classic.pick(now, slice, rails),
            Self::Tent(tent) => tent.pick(now, slice, rails),
        }
    }

    fn has_priorities(&self) -> bool {
        match self {
            Self::Classic(classic) => classic.has_priorities(),
            Self::Tent(tent) => tent.has_priorities(),
        }
    }

    fn is_full(&self, rail: &Rail, slice: &SliceInfo) -> bool {
        match self {
            Self::Classic(classic) => classic.is_full(rail, slice),
            Self::Tent(tent) => tent.is_full(rail, slice),
        }
    }

    fn most_age(&self, patience: Duration) -> Option<Duration> {
        match self {
            Self::Classic(classic) => classic.most_age(patience),
            Self::Tent(tent) => tent.most_age(patience),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Order, RailSpec, RailState, TentConfig};

    /// Posts nothing, and says nothing else.
    #[derive(Debug)]
    struct Plain;

    impl Policy for Plain {
        fn pick(&mut self, _now: Instant, _slice: &SliceInfo, _rails: &Rails<'_>) -> Pick {
            Pick::Wait
        }
    }

    const SLICE: SliceInfo = SliceInfo {
        opcode: Opcode::Read,
        length: 1000,
        room: 1000,
        level: PriorityLevel::Normal,
        yields: false,
        attempt: 0,
        class: 0,
        local_location: 0,
        peer_location: 0,
    };

    #[test]
    fn policies_say_what_theirs_does() {
        let (access, max_requests) = (Access::Connection, 4);
        let spec = RailSpec { local_nic: 0, peer_nic: 0, transport: 0, access, max_requests };
        let mut rail = Rail::new(spec);
        rail.state = RailState::Up;
        let classic = Classic::new(Order::RoundRobin, Vec::new(), Vec::new());
        let tent = Tent::new(TentConfig::default(), Vec::new(), Vec::new());
        let policies = (Plain, AnyPolicy::Classic(classic), AnyPolicy::Tent(tent));
        for (policy, is_tent) in
            [(&policies.0 as &dyn Policy, false), (&policies.1, false), (&policies.2, true)]
        {
            assert_eq!(policy.has_priorities(), is_tent);
            let patience = Duration::from_secs(1);
            assert_eq!(policy.most_age(patience), is_tent.then_some(4 * patience));
            for (requests, expected) in [(0, false), (4, true)] {
                rail.requests = requests;
                assert_eq!(policy.is_full(&rail, &SLICE), expected);
            }
        }
    }
}
