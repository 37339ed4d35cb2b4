//! When groups that wait for trees are planned again, as there may be more room.
//!
//! A plan looks at all groups, and whoever joins and leaves in turn makes room each time. So they are planned in rounds, some at
//! a time, and what others say is read in between.

use core::ops::Bound;
use core::time::Duration;

use millstream_roce::Instant;

use super::group::Group;
use super::{Controller, GroupId};

/// So many are planned at a time.
const AT_A_TIME: usize = 16;

/// After so long the next ones of a round are planned.
const NEXT_TURN: Duration = Duration::from_millis(20);

/// After so long as many as at first may be planned again.
const PAUSE: Duration = Duration::from_millis(100);

/// How far that is.
#[derive(Debug)]
pub(super) struct Replanning {
    /// A switch has more room than when the last round began.
    pub(super) has_new_room: bool,
    /// The last group that was planned in a round that is under way.
    after: Option<GroupId>,
    /// So many more may be planned before this time.
    left: usize,
    until: Option<Instant>,
}

impl Replanning {
    pub(super) const fn new() -> Self {
        Self { has_new_room: false, after: None, left: AT_A_TIME, until: None }
    }

    const fn is_due(&self) -> bool {
        self.has_new_room || self.after.is_some()
    }

    /// When it goes on.
    pub(super) fn at(&self) -> Option<Instant> {
        self.until.filter(|_| self.is_due())
    }
}

impl Controller {
    /// Plans the next full groups that have no tree, the oldest first, if nodes of others have ended since or a switch has
    /// come. Where few wait, that is at once.
    pub(super) fn use_new_room(&mut self) {
        let now = self.now;
        if self.replanning.until.is_some_and(|until| until <= now) {
            (self.replanning.left, self.replanning.until) = (AT_A_TIME, None);
        }
        let Replanning { after, left, .. } = self.replanning;
        if !self.replanning.is_due() || left == 0 {
            return;
        }
        if after.is_none() {
            // A round begins.
            self.replanning.has_new_room = false;
        }
        let later = after.map_or(Bound::Unbounded, Bound::Excluded);
        let later = self.groups.range((later, Bound::Unbounded));
        let waits = |(&id, group): (&GroupId, &Group)| group.waits_for_trees().then_some(id);
        let mut next: Vec<GroupId> = later.filter_map(waits).take(left + 1).collect();
        let has_more = next.len() > left;
        next.truncate(left);
        for &id in &next {
            self.plan(id);
        }
        let replanning = &mut self.replanning;
        replanning.left -= next.len();
        replanning.after = next.last().copied().filter(|_| has_more);
        if has_more {
            replanning.until = Some(now + NEXT_TURN);
        } else if !next.is_empty() || replanning.has_new_room {
            replanning.until.get_or_insert(now + PAUSE);
        }
    }
}
