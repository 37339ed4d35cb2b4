//! The tasks of a batch.

use std::ops::Deref;
use std::slice;

use super::Task;

/// Tasks: that of a single request needs no memory of its own.
#[derive(Debug)]
pub(super) enum Few {
    One(Task),
    Many(Box<[Task]>),
}

impl Few {
    pub(super) fn new(count: usize) -> Self {
        match count {
            1 => Self::One(Task::default()),
            _ => Self::Many((0..count).map(|_| Task::default()).collect()),
        }
    }
}

impl Deref for Few {
    type Target = [Task];

    fn deref(&self) -> &[Task] {
        match self {
            Self::One(task) => slice::from_ref(task),
            Self::Many(tasks) => tasks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_as_were_asked_for() {
        for count in [0, 1, 2, 7] {
            assert_eq!(Few::new(count).len(), count);
        }
    }
}
