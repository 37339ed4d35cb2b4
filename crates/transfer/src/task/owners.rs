//! Who does tasks as a whole, and can end one: a peer, as a transport knows it.
//!
//! Most batches have one owner for all of their tasks, so a task has its owner's number in its batch.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, Weak};

use millstream_transfer_core::TaskId;

use crate::transport::EndTask;

/// The owners of a batch's tasks. They stay for as long as the batch does.
#[derive(Debug, Default)]
pub(super) struct Owners {
    first: OnceLock<Weak<dyn EndTask>>,
    others: Mutex<Vec<Weak<dyn EndTask>>>,
}

/// An owner's number in a batch, counted from 1.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct OwnerNumber(u32);

/// Who does a task, if anyone does it as a whole, and its name there.
#[derive(Debug, Default)]
pub(super) struct Owned {
    name: AtomicU64,
    /// 0 while it has none.
    owner: AtomicU32,
    /// Its owner has begun to do it.
    begun: AtomicBool,
}

impl Owners {
    /// The number of this one, from now on.
    pub(super) fn number(&self, owner: &Weak<dyn EndTask>) -> OwnerNumber {
        if self.first.get_or_init(|| owner.clone()).ptr_eq(owner) {
            return OwnerNumber(1);
        }
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        let known = others.iter().position(|other| other.ptr_eq(owner));
        let index = known.unwrap_or_else(|| {
            others.push(owner.clone());
            others.len() - 1
        });
        // A batch has at most a million tasks, each of which moves a few times at the most.
        OwnerNumber(index as u32 + 2)
    }

    /// Who has this number.
    pub(super) fn get(&self, OwnerNumber(number): OwnerNumber) -> Option<Weak<dyn EndTask>> {
        let Some(index) = number.checked_sub(2) else { return self.first.get().cloned() };
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        others.get(index as usize).cloned()
    }
}

impl Owned {
    /// From here on who cancels it asks its owner.
    pub(super) fn set(&self, OwnerNumber(owner): OwnerNumber, name: TaskId) {
        self.name.store(name.to_bits(), Ordering::Relaxed);
        self.owner.store(owner, Ordering::SeqCst);
    }

    pub(super) fn get(&self) -> Option<(OwnerNumber, TaskId)> {
        let owner = match self.owner.load(Ordering::SeqCst) {
            0 => return None,
            owner => OwnerNumber(owner),
        };
        Some((owner, TaskId::from_bits(self.name.load(Ordering::Relaxed))))
    }

    pub(super) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Debug)]
    struct Owner(u64);

    impl EndTask for Owner {
        fn cancel(&self, task: TaskId) -> bool {
            task.to_bits() == self.0
        }
    }

    #[test]
    fn each_owner_has_one_number_and_each_number_is_of_one_owner() {
        let owners = Owners::default();
        assert!([1, 2].iter().all(|&number| owners.get(OwnerNumber(number)).is_none()));
        let all: Vec<Arc<dyn EndTask>> = (0..3).map(|name| Arc::new(Owner(name)) as _).collect();
        for _ in 0..2 {
            for (name, owner) in (0..).zip(&all) {
                let number = owners.number(&Arc::downgrade(owner));
                assert_eq!(number, OwnerNumber(name as u32 + 1));
                let found = owners.get(number).unwrap().upgrade().unwrap();
                assert!(found.cancel(TaskId::from_bits(name)));
            }
        }
        assert!(owners.get(OwnerNumber(4)).is_none());
    }
}
