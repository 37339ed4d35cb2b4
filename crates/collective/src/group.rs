//! Ranks that make communicators together.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::time::SystemTime;
use std::{mem, process};

use millstream_inc::protocol::{MAX_NAME_BYTES, Refusal};

use crate::join::{JoinConfig, Waiting};
use crate::joining::Learned;
use crate::{Communicator, JoinError};

/// The ranks of a job, which make communicators, one after the other.
///
/// Who has the name of a group meets once, when it is made. All else is named by a number that the ranks draw
/// then, so that nothing of one run meets anything of another.
#[derive(Debug)]
pub struct Group {
    config: JoinConfig,
    /// Drawn by rank 0.
    id: [u64; 2],
    /// The communicator that the ranks met by: the first one.
    first: Option<Communicator>,
    /// Controllers that the last communicator has learned of.
    learned: Learned,
    /// How many communicators were made.
    made: u64,
}

impl Group {
    /// Returns when all ranks have called it. When the name is taken, waits up to 6 s of the time that there is for it: for the
    /// end of a run before this one.
    pub fn create(config: &JoinConfig) -> Result<Self, JoinError> {
        Self::create_reporting(config, |_| {})
    }

    /// As [`Group::create`]. Calls `waiting` about every second while something is missing, with what it is, and more often
    /// at first while others have the name.
    pub fn create_reporting(
        config: &JoinConfig,
        mut waiting: impl FnMut(&Waiting),
    ) -> Result<Self, JoinError> {
        // The ranks leave the controller one after the other, and a short time for calls is not for that.
        let patient = config.call_timeout.max(config.timeout);
        let meeting = JoinConfig { call_timeout: patient, ..config.clone() };
        let mut first = Communicator::join_when_free(&meeting, is_name_taken, &mut waiting)?;
        let mut id = draw([(); 2].map(|()| RandomState::new()), process::id(), SystemTime::now());
        first.broadcast(&mut id, 0).map_err(JoinError::Agreement)?;
        first.set_call_timeout(config.call_timeout);
        let learned = first.sender().learned().clone();
        Ok(Self { config: config.clone(), id, first: Some(first), learned, made: 0 })
    }

    /// Makes a communicator. All ranks make the same number of them, in the same order. The first one is there since the
    /// group was made; making another one returns when all ranks have called this.
    pub fn communicator(&mut self) -> Result<Communicator, JoinError> {
        let number = self.made;
        let made = match self.first.take() {
            Some(first) => match first.failure() {
                Some(failure) => Err(JoinError::Agreement(failure)),
                None => Ok(first),
            },
            None => {
                let group = self.name(number);
                let controllers = self.config.controllers.with_learned(&self.learned.all());
                Communicator::join(&JoinConfig { group, controllers, ..self.config.clone() })
            }
        };
        if let Ok(made) = &made {
            let before = mem::replace(&mut self.learned, made.sender().learned().clone());
            self.learned.begin_with(&before);
        }
        // Others have counted this one, too.
        self.made += 1;
        made
    }

    /// Which rank this is.
    pub fn rank(&self) -> u32 {
        self.config.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> u32 {
        self.config.world
    }

    /// By which the ranks meet for a communicator: that of the group, cut to what fits, for people.
    fn name(&self, number: u64) -> String {
        let [high, low] = self.id;
        let unique = format!("#{high:016x}{low:016x}.{number}");
        let group = &self.config.group;
        let end = group.floor_char_boundary(MAX_NAME_BYTES - unique.len());
        format!("{}{unique}", &group[..end])
    }
}

/// A number that no other group has. A process that is forked off has the keys of the other one.
fn draw(keys: [RandomState; 2], process: u32, now: SystemTime) -> [u64; 2] {
    keys.map(|keys| keys.hash_one((process, now)))
}

/// Others have the name, and may be about to end.
const fn is_name_taken(refusal: &Refusal, _own: IpAddr) -> bool {
    use Refusal::{GroupTaken, RankTaken, WorldDiffers};
    matches!(refusal, WorldDiffers { .. } | GroupTaken { .. } | RankTaken { .. })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn processes_with_the_same_keys_draw_different_numbers_and_so_does_one_later() {
        let keys = [(); 2].map(|()| RandomState::new());
        let now = SystemTime::now();
        let later = now + Duration::from_nanos(1);
        let drawn =
            [(1, now), (2, now), (1, later)].map(|(process, at)| draw(keys.clone(), process, at));
        for half in 0..2 {
            let [a, b, c] = drawn.map(|id| id[half]);
            assert!(a != b && a != c && b != c, "{drawn:?}");
        }
        assert_ne!(drawn[0][0], drawn[0][1]);
    }
}
