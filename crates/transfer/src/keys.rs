//! The keys of registered memory.

use std::sync::Arc;

use millstream_transfer_core::Borders;

/// The keys of a piece of memory for the devices of a transport. Each device has it as one region or,
/// where it is longer than a region can be, as several of equal length, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    /// Of the first region of each device, then of the second of each.
    all: Arc<[u32]>,
    devices: usize,
    /// Bytes of each region but the last.
    region_length: u64,
}

impl Keys {
    /// Of a transport that needs none.
    pub(crate) fn none() -> Self {
        Self { all: Arc::new([]), devices: 0, region_length: u64::MAX }
    }

    /// Those of so many devices, region by region. All regions but the last have so many bytes.
    pub(crate) fn new(all: impl Iterator<Item = u32>, devices: usize, region_length: u64) -> Self {
        debug_assert!(region_length > 0, "every region has a byte");
        Self { all: all.collect(), devices, region_length }
    }

    /// The keys of all devices for the byte at an offset.
    pub(crate) fn at(&self, offset: u64) -> &[u32] {
        // Most memory is one region, and a division takes long.
        let region = if offset < self.region_length { 0 } else { offset / self.region_length };
        let first =
            usize::try_from(region).ok().and_then(|region| region.checked_mul(self.devices));
        let of_region = first.and_then(|first| self.all.get(first..)?.get(..self.devices));
        of_region.unwrap_or_default()
    }

    /// Bytes of each region but the last, where there are several.
    pub(crate) fn region_length(&self) -> Option<u64> {
        (self.all.len() > self.devices).then_some(self.region_length)
    }

    /// Where one region ends and the next begins, of memory that begins at this address.
    pub(crate) fn borders(&self, first: u64) -> Borders {
        match self.region_length() {
            Some(distance) => Borders { first, distance },
            None => Borders::NONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_region_has_a_key_for_each_device() {
        let keys = Keys::new([11, 12, 21, 22, 31, 32].into_iter(), 2, 100);
        for (offset, expected) in
            [(0, &[11, 12][..]), (99, &[11, 12]), (100, &[21, 22]), (299, &[31, 32]), (300, &[])]
        {
            assert_eq!(keys.at(offset), expected, "{offset}");
        }
        assert!(keys.at(u64::MAX).is_empty());
        assert_eq!(keys.borders(7), Borders { first: 7, distance: 100 });
        let one = Keys::new([1, 2].into_iter(), 2, 100);
        assert_eq!((one.at(50), one.region_length()), (&[1, 2][..], None));
        assert_eq!(one.borders(7), Borders::NONE);
        assert!(Keys::none().at(0).is_empty());
    }
}
