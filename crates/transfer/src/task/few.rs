//! What each task of a batch has.

use std::ops::Deref;
use std::slice;

/// One for each task: that of a single request needs no memory of its own.
#[derive(Debug)]
pub(super) enum Few<T> {
    One(T),
    Many(Box<[T]>),
}

impl<T: Default> Few<T> {
    pub(super) fn new(count: usize) -> Self {
        match count {
            1 => Self::One(T::default()),
            _ => Self::Many((0..count).map(|_| T::default()).collect()),
        }
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::One(one) => slice::from_ref(one),
            Self::Many(all) => all,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_as_were_asked_for() {
        for count in [0, 1, 2, 7] {
            assert_eq!(Few::<u64>::new(count).len(), count);
        }
    }
}
