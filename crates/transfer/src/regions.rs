//! Which addresses are registered: ranges that do not overlap.

use std::collections::BTreeMap;

use crate::RegisterError;

/// The most registrations at a time.
const MAX_REGIONS: usize = 65_536;

/// Ranges of addresses, each with a value, in the order of their first addresses.
#[derive(Debug)]
pub(crate) struct RegionMap<T> {
    /// By first address: the length and the value.
    regions: BTreeMap<u64, (u64, T)>,
}

impl<T> Default for RegionMap<T> {
    fn default() -> Self {
        Self { regions: BTreeMap::new() }
    }
}

impl<T> RegionMap<T> {
    /// Whether a range could be added: it has bytes, none of which is in another range.
    pub(crate) fn check(&self, address: u64, length: u64) -> Result<(), RegisterError> {
        if length == 0 {
            return Err(RegisterError::Empty);
        }
        let end = match address.checked_add(length) {
            Some(end) if address != 0 => end,
            _ => return Err(RegisterError::Invalid { address, length }),
        };
        // Only the last range that starts before the end can reach into this one.
        if let Some((&other_address, &(other_length, _))) = self.regions.range(..end).next_back()
            && other_address + other_length > address
        {
            return Err(RegisterError::Overlap { address, length, other_address, other_length });
        }
        if self.regions.len() >= MAX_REGIONS {
            return Err(RegisterError::TooMany { limit: MAX_REGIONS });
        }
        Ok(())
    }

    /// Adds a range that `check` has admitted.
    pub(crate) fn insert(&mut self, address: u64, length: u64, value: T) {
        self.regions.insert(address, (length, value));
    }

    /// The value of the range that starts at `address`.
    pub(crate) fn entry(&mut self, address: u64) -> Option<&mut T> {
        self.regions.get_mut(&address).map(|(_, value)| value)
    }

    /// Removes the range that starts at `address`.
    pub(crate) fn remove(&mut self, address: u64) -> Option<T> {
        self.regions.remove(&address).map(|(_, value)| value)
    }

    /// The range that holds all of these bytes: its first address and its value.
    pub(crate) fn find(&self, address: u64, length: u64) -> Option<(u64, &T)> {
        let (&first, (region_length, value)) = self.regions.range(..=address).next_back()?;
        let end = (address - first).checked_add(length)?;
        (end <= *region_length).then_some((first, value))
    }

    /// All ranges: first address, length, value.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64, &T)> {
        self.regions.iter().map(|(&address, (length, value))| (address, *length, value))
    }

    /// Whether there are no ranges.
    pub(crate) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// All ranges: first address and value.
    pub(crate) fn entries(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.regions.iter_mut().map(|(&address, (_, value))| (address, value))
    }

    /// The values of all ranges.
    pub(crate) fn values(&mut self) -> impl Iterator<Item = &mut T> {
        self.regions.values_mut().map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(ranges: &[(u64, u64)]) -> RegionMap<u64> {
        let mut map = RegionMap::default();
        for &(address, length) in ranges {
            map.check(address, length).unwrap();
            map.insert(address, length, address);
        }
        map
    }

    #[test]
    fn overlaps_are_refused_with_the_code_of_the_c_api() {
        let map = map(&[(100, 100), (300, 100)]);
        for (address, length) in
            [(100, 100), (50, 51), (199, 1), (199, 200), (150, 10), (1, 1000), (399, 1)]
        {
            let error = map.check(address, length).unwrap_err();
            assert_eq!(error.code(), -7, "{address} {length}: {error}");
        }
        for (address, length) in [(200, 100), (50, 50), (400, 1), (99, 1)] {
            assert!(map.check(address, length).is_ok(), "adjacent is fine: {address} {length}");
        }
    }

    #[test]
    fn what_is_no_memory_is_refused() {
        let map = map(&[]);
        assert_eq!(map.check(5, 0).unwrap_err().code(), -1);
        assert_eq!(map.check(0, 5).unwrap_err().code(), -1);
        assert_eq!(map.check(u64::MAX, 2).unwrap_err().code(), -1);
    }

    #[test]
    fn a_range_is_found_by_what_it_holds() {
        let map = map(&[(100, 100), (200, 50)]);
        let found = |address, length| map.find(address, length).map(|(first, _)| first);
        assert_eq!(found(100, 100), Some(100));
        assert_eq!(found(199, 1), Some(100));
        assert_eq!(found(200, 50), Some(200));
        assert_eq!(found(199, 2), None, "adjacent ranges are not one");
        assert_eq!(found(99, 1), None);
        assert_eq!(found(250, 1), None);
        assert_eq!(found(101, u64::MAX), None);
    }

    #[test]
    fn a_removed_range_is_free_again() {
        let mut map = map(&[(100, 100)]);
        assert_eq!(map.remove(150), None, "only by its first address");
        assert_eq!(map.remove(100), Some(100));
        assert_eq!(map.remove(100), None);
        assert!(map.check(100, 100).is_ok());
    }
}
