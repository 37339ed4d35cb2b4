//! Memory that is being registered or unregistered: whoever wants to unregister it meanwhile waits until that is settled,
//! since it may be touched until then.

use std::sync::PoisonError;

use super::{Memory, Region};
use crate::regions::RegionMap;

impl Memory {
    /// Has `change` fill or remove what is being registered or unregistered, and tells who waits for that.
    pub(crate) fn settle(&self, change: impl FnOnce(&mut RegionMap<Option<Region>>)) {
        let mut regions = self.lock();
        change(&mut regions);
        drop(regions);
        // Who waits is asleep, or has not looked yet.
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        drop(waiting);
        self.settled.notify_all();
    }

    /// Waits until nobody registers or unregisters what begins at this address. Who calls this has nothing taken: who is
    /// waited for may be about to wait for that.
    pub(crate) fn wait_until_settled(&self, address: u64) {
        self.wait_while(
            |regions| matches!(regions.find(address, 1), Some((first, None)) if first == address),
        );
    }

    /// Unregisters all of it, when nobody registers any more. Returns once nobody unregisters any more either: others
    /// wait for what is under way here as this waits for theirs.
    pub(crate) fn end(&self) {
        loop {
            // What others unregister is gone then, or there again.
            self.wait_while(|regions| {
                !regions.is_empty() && regions.iter().all(|(_, _, region)| region.is_none())
            });
            let mut regions = self.lock();
            if regions.is_empty() {
                return;
            }
            let entries = regions.entries();
            let taken = entries.filter_map(|(address, it)| Unregistering::take(self, address, it));
            let taken: Vec<_> = taken.collect();
            drop(regions);
            // Their ends wait for others, which may ask for one.
            drop(taken);
        }
    }

    fn wait_while(&self, so: impl Fn(&RegionMap<Option<Region>>) -> bool) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while so(&self.regions.read().unwrap_or_else(PoisonError::into_inner)) {
            waiting = self.settled.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A piece of memory that is being unregistered. Its addresses stay taken until nobody touches them any more, which is
/// waited for when this is dropped.
pub(crate) struct Unregistering<'a> {
    memory: &'a Memory,
    address: u64,
    /// `None` once it was put back.
    region: Option<Region>,
}

impl<'a> Unregistering<'a> {
    /// Takes what is registered at this address out of its entry in the memory. `None` while another thread registers or
    /// unregisters it.
    pub(crate) fn take(
        memory: &'a Memory,
        address: u64,
        entry: &mut Option<Region>,
    ) -> Option<Self> {
        entry.take().map(|region| Self { memory, address, region: Some(region) })
    }

    pub(crate) fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }

    /// Unregisters it, once nobody touches it any more. When that cannot be waited for, it stays registered, and the
    /// reason is returned.
    pub(crate) fn end(mut self) -> Result<(), String> {
        let revoked = self.region.as_ref().map_or(Ok(()), Region::revoke);
        if revoked.is_err() {
            let region = self.region.take();
            self.memory.settle(|regions| {
                if let Some(entry) = regions.entry(self.address) {
                    *entry = region;
                }
            });
        }
        revoked
    }
}

impl Drop for Unregistering<'_> {
    fn drop(&mut self) {
        if let Some(region) = self.region.take() {
            // Waits for copies, devices and other processes.
            drop(region);
            self.memory.settle(|regions| {
                regions.remove(self.address);
            });
        }
    }
}
