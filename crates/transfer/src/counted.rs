//! What many tasks have in common, kept once for all of them.

use std::ops::Index;

/// Values by numbers that are used again. Each is kept as long as somebody has it.
#[derive(Debug)]
pub(crate) struct Counted<T> {
    all: Vec<Option<(T, usize)>>,
    free: Vec<u32>,
}

impl<T> Default for Counted<T> {
    fn default() -> Self {
        Self { all: Vec::new(), free: Vec::new() }
    }
}

impl<T> Counted<T> {
    /// Adds one that so many have, at least one: its number.
    pub(crate) fn insert(&mut self, value: T, users: usize) -> u32 {
        debug_assert!(users > 0);
        let number = self.free.pop().unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() as u32 - 1
        });
        self.all[number as usize] = Some((value, users));
        number
    }

    /// The value of a number, unless nobody has it any more.
    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        let (value, _) = self.all.get(number as usize)?.as_ref()?;
        Some(value)
    }

    /// So many have it no more: the value, if these were the last.
    pub(crate) fn release(&mut self, number: u32, users: usize) -> Option<T> {
        let place = self.all.get_mut(number as usize)?;
        let (_, left) = place.as_mut()?;
        debug_assert!(users <= *left);
        *left = left.saturating_sub(users);
        let last = place.take_if(|(_, left)| *left == 0)?;
        self.free.push(number);
        Some(last.0)
    }
}

impl<T> Index<u32> for Counted<T> {
    type Output = T;

    fn index(&self, number: u32) -> &T {
        self.get(number).expect("who has a value has its number")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_stays_as_long_as_somebody_has_it_and_its_number_is_used_again() {
        let mut counted = Counted::default();
        assert_eq!([("a", 3), ("b", 1)].map(|(value, users)| counted.insert(value, users)), [0, 1]);
        assert_eq!((counted.release(0, 2), counted[0]), (None, "a"));
        assert_eq!((counted.release(0, 1), counted.get(0)), (Some("a"), None));
        assert_eq!(
            (counted.release(0, 1), counted.release(7, 1), counted.get(7)),
            (None, None, None)
        );
        assert_eq!((counted.insert("c", 1), counted[0], counted[1]), (0, "c", "b"));
    }
}
