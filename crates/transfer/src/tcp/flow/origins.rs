//! What the tasks of a run have in common, kept once for all of them.

use std::ops::Index;
use std::sync::Arc;

use crate::batch::BatchShared;
use crate::memory::LocalMemory;
use crate::segment::OpenSegment;
use crate::terms::Terms;

/// What tasks of one run are of.
#[derive(Clone)]
pub(in crate::tcp) struct Origin {
    pub(in crate::tcp) batch: Arc<BatchShared>,
    pub(in crate::tcp) local: Arc<LocalMemory>,
    pub(in crate::tcp) segment: Arc<OpenSegment>,
    pub(in crate::tcp) terms: Terms,
}

/// Origins of which there are tasks, by numbers that are used again.
#[derive(Default)]
pub(super) struct Origins {
    all: Vec<Option<(Origin, usize)>>,
    free: Vec<u32>,
}

impl Origins {
    /// Adds one for so many tasks, at least one.
    pub(super) fn insert(&mut self, origin: Origin, tasks: usize) -> u32 {
        debug_assert!(tasks > 0);
        let number = self.free.pop().unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() as u32 - 1
        });
        self.all[number as usize] = Some((origin, tasks));
        number
    }

    /// So many of its tasks are gone: what they are of, which is forgotten with the last ones.
    pub(super) fn take(&mut self, number: u32, tasks: usize) -> Origin {
        let place = &mut self.all[number as usize];
        if let Some((origin, left)) = place.as_mut().filter(|(_, left)| *left > tasks) {
            *left -= tasks;
            return origin.clone();
        }
        self.free.push(number);
        let (origin, left) = place.take().expect("a task has its origin");
        debug_assert_eq!(left, tasks);
        origin
    }
}

impl Index<u32> for Origins {
    type Output = Origin;

    fn index(&self, number: u32) -> &Origin {
        &self.all[number as usize].as_ref().expect("a task has its origin").0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Opcode;
    use crate::tcp::testing::{Room, segment, tasks};

    #[test]
    fn an_origin_stays_as_long_as_it_has_tasks_and_its_number_is_used_again() {
        let (room, mut origins) = (Room::new(8), Origins::default());
        let (batch, _) = tasks(Opcode::Read, room.address(), &[1]);
        let origin = || Origin {
            batch: Arc::clone(&batch.shared),
            local: Arc::clone(&room.local),
            segment: segment(),
            terms: Terms::default(),
        };
        let users = || Arc::strong_count(&batch.shared);
        let before = users();
        let numbers = [3, 1].map(|tasks| origins.insert(origin(), tasks));
        assert_eq!((numbers, users()), ([0, 1], before + 2));
        drop(origins.take(0, 2));
        assert_eq!(users(), before + 2);
        assert!(Arc::ptr_eq(&origins[0].batch, &batch.shared));
        drop(origins.take(0, 1));
        assert_eq!(users(), before + 1);
        assert_eq!(origins.insert(origin(), 1), 0);
        drop((origins.take(1, 1), origins.take(0, 1)));
        assert_eq!(users(), before);
    }
}
