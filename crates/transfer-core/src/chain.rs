//! Doubly linked lists of the entries of a slab, which are known by their places.

/// No place.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    previous: u32,
    next: u32,
}

/// The links of all entries of a slab for one purpose: an entry is in at most one list of a chain.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    links: Vec<Link>,
}

/// A list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    first: u32,
    last: u32,
}

impl List {
    pub(crate) const EMPTY: Self = Self { first: NONE, last: NONE };

    pub(crate) const fn is_empty(&self) -> bool {
        self.first == NONE
    }

    pub(crate) const fn first(&self) -> Option<u32> {
        if self.first == NONE { None } else { Some(self.first) }
    }

    pub(crate) const fn last(&self) -> Option<u32> {
        if self.last == NONE { None } else { Some(self.last) }
    }
}

impl Chain {
    /// One that takes so many entries without growing.
    pub(crate) fn with_room(count: usize) -> Self {
        Self { links: Vec::with_capacity(count) }
    }

    pub(crate) fn push_back(&mut self, list: &mut List, place: u32) {
        let index = place as usize;
        if index >= self.links.len() {
            self.links.resize(index + 1, Link { previous: NONE, next: NONE });
        }
        self.links[index] = Link { previous: list.last, next: NONE };
        match list.last {
            NONE => list.first = place,
            last => self.links[last as usize].next = place,
        }
        list.last = place;
    }

    /// Takes an entry out of the list that it is in.
    pub(crate) fn remove(&mut self, list: &mut List, place: u32) {
        let Link { previous, next } = self.links[place as usize];
        match previous {
            NONE => list.first = next,
            previous => self.links[previous as usize].next = next,
        }
        match next {
            NONE => list.last = previous,
            next => self.links[next as usize].previous = previous,
        }
    }

    pub(crate) fn pop_front(&mut self, list: &mut List) -> Option<u32> {
        let first = list.first()?;
        self.remove(list, first);
        Some(first)
    }

    /// What follows an entry in its list.
    pub(crate) fn next(&self, place: u32) -> Option<u32> {
        let next = self.links[place as usize].next;
        (next != NONE).then_some(next)
    }

    /// What is before an entry in its list.
    pub(crate) fn previous(&self, place: u32) -> Option<u32> {
        let previous = self.links[place as usize].previous;
        (previous != NONE).then_some(previous)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is in a list, the same from both its ends.
    fn entries(chain: &Chain, list: &List) -> Vec<u32> {
        let all: Vec<u32> =
            core::iter::successors(list.first(), |&place| chain.next(place)).collect();
        let mut back: Vec<u32> =
            core::iter::successors(list.last(), |&place| chain.previous(place)).collect();
        back.reverse();
        assert_eq!(all, back);
        all
    }

    #[test]
    fn entries_leave_from_anywhere() {
        let mut chain = Chain::default();
        let (mut list, mut other) = (List::EMPTY, List::EMPTY);
        for place in 0..5 {
            chain.push_back(&mut list, place);
        }
        chain.push_back(&mut other, 9);
        for (place, left) in
            [(2, vec![0, 1, 3, 4]), (0, vec![1, 3, 4]), (4, vec![1, 3]), (3, vec![1])]
        {
            chain.remove(&mut list, place);
            assert_eq!(entries(&chain, &list), left);
        }
        chain.push_back(&mut list, 4);
        assert_eq!(chain.pop_front(&mut list), Some(1));
        assert_eq!(chain.pop_front(&mut list), Some(4));
        assert_eq!(chain.pop_front(&mut list), None);
        assert!(list.is_empty());
        assert_eq!(entries(&chain, &other), [9]);
    }
}
