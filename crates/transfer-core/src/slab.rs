//! Entries with stable numbers. Memory grows to the most entries that there were at a time, and
//! is used again after that.

/// The name of an entry. An entry that takes the place of another has another name.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Key {
    pub(crate) index: u32,
    generation: u32,
}

impl Key {
    /// One number for both parts, as the identifier of a work request can carry.
    pub(crate) const fn to_bits(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    pub(crate) const fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

#[derive(Debug)]
struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

#[derive(Debug)]
pub(crate) struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(crate) const fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }

    /// One that takes so many entries without growing.
    pub(crate) fn with_room(count: usize) -> Self {
        Self { entries: Vec::with_capacity(count), free: Vec::with_capacity(count) }
    }

    /// How many entries there are.
    pub(crate) const fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(crate) fn insert(&mut self, value: T) -> Key {
        if let Some(index) = self.free.pop() {
            let entry = &mut self.entries[index as usize];
            entry.value = Some(value);
            return Key { index, generation: entry.generation };
        }
        let index = self.entries.len() as u32;
        self.entries.push(Entry { generation: 0, value: Some(value) });
        // So that freeing never allocates.
        self.free.reserve(self.entries.len());
        Key { index, generation: 0 }
    }

    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        let entry = self.entries.get_mut(index as usize)?;
        let value = entry.value.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(index);
        Some(value)
    }

    /// Gives the entry in this place another name.
    pub(crate) fn rename(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        entry.generation = entry.generation.wrapping_add(1);
    }

    /// The entry of this name, unless it was removed.
    pub(crate) fn find(&self, key: Key) -> Option<&T> {
        let entry = self.entries.get(key.index as usize)?;
        entry.value.as_ref().filter(|_| entry.generation == key.generation)
    }

    /// The name of the entry in this place.
    pub(crate) fn key(&self, index: u32) -> Key {
        Key { index, generation: self.entries[index as usize].generation }
    }

    /// The entry in this place, which is known to be there.
    pub(crate) fn at(&self, index: u32) -> &T {
        self.entries[index as usize].value.as_ref().expect("lists name entries that are there")
    }

    pub(crate) fn at_mut(&mut self, index: u32) -> &mut T {
        self.entries[index as usize].value.as_mut().expect("lists name entries that are there")
    }

    /// The places below this one may have entries.
    pub(crate) const fn end(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Whether there is an entry in this place.
    pub(crate) fn holds(&self, index: u32) -> bool {
        self.entries.get(index as usize).is_some_and(|entry| entry.value.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_of_one_entry_only() {
        let mut slab = Slab::new();
        let (first, second) = (slab.insert('a'), slab.insert('b'));
        assert_eq!((slab.find(first), slab.find(second), slab.len()), (Some(&'a'), Some(&'b'), 2));
        assert_eq!(slab.remove(first.index), Some('a'));
        assert_eq!(slab.remove(first.index), None);
        let third = slab.insert('c');
        assert_eq!((third.index, slab.end()), (first.index, 2), "its place is used again");
        assert_eq!((slab.find(first), slab.find(third)), (None, Some(&'c')));
        assert_eq!(Key::from_bits(third.to_bits()), third);
        assert_eq!(slab.key(third.index), third);
        slab.rename(third.index);
        assert_eq!((slab.find(third), slab.find(slab.key(third.index))), (None, Some(&'c')));
        assert!(slab.holds(0) && !slab.holds(2));
        assert_eq!(slab.remove(7), None);
    }
}
