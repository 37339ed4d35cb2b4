//! What a queue pair for datagrams knows of the ways to its destinations.

use std::collections::HashMap;
use std::net::IpAddr;

/// Destinations that are remembered, even if fewer requests are outstanding.
const REMEMBERED: usize = 1024;

/// Handles by address, bounded. Those whose requests are all complete make room for others.
#[derive(Debug)]
pub(super) struct AddressHandles<H> {
    limit: usize,
    entries: HashMap<IpAddr, Entry<H>>,
}

#[derive(Debug)]
struct Entry<H> {
    handle: H,
    /// The sequence number of the last request that goes there.
    last_used: u32,
}

impl<H> AddressHandles<H> {
    /// For a queue of at most so many requests that are outstanding or about to be posted.
    pub(super) fn new(requests: usize) -> Self {
        // One more than can be in use: there is always one to give up.
        Self { limit: REMEMBERED.max(requests + 1), entries: HashMap::new() }
    }

    /// The handle for the request with this sequence number; all before `completed` are complete.
    /// One is made where there is none.
    pub(super) fn prepare<E>(
        &mut self,
        address: IpAddr,
        sequence: u32,
        completed: u32,
        make: impl FnOnce() -> Result<H, E>,
    ) -> Result<(), E> {
        if let Some(entry) = self.entries.get_mut(&address) {
            entry.last_used = sequence;
            return Ok(());
        }
        // First, so that a destination that cannot be reached costs no other its place.
        let handle = make()?;
        if self.entries.len() >= self.limit {
            // In use from the oldest outstanding request on, and half of the circle is more than
            // there can be.
            self.entries.retain(|_, entry| entry.last_used.wrapping_sub(completed) < 1 << 31);
        }
        self.entries.insert(address, Entry { handle, last_used: sequence });
        Ok(())
    }

    /// The handle that was prepared for this address.
    pub(super) fn get(&self, address: IpAddr) -> Option<&H> {
        self.entries.get(&address).map(|entry| &entry.handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u32) -> IpAddr {
        std::net::Ipv4Addr::from_bits(number).into()
    }

    #[test]
    fn a_way_is_looked_up_once() {
        let mut handles = AddressHandles::new(4);
        for sequence in 0..10 {
            let make = || if sequence == 0 { Ok(7) } else { Err("again") };
            assert_eq!(handles.prepare(address(1), sequence, 0, make), Ok(()));
        }
        assert_eq!(handles.get(address(1)), Some(&7));
        assert_eq!(handles.prepare(address(2), 10, 0, || Err("unreachable")), Err("unreachable"));
        assert_eq!(handles.get(address(2)), None);
    }

    #[test]
    fn there_are_never_too_many_and_none_in_use_goes() {
        for start in [0_u32, u32::MAX - 2000] {
            let outstanding = 3000;
            let mut handles = AddressHandles::new(outstanding);
            for step in 0..20_000_u32 {
                let sequence = start.wrapping_add(step);
                let completed = start.wrapping_add(step.saturating_sub(outstanding as u32 - 1));
                let made =
                    handles.prepare(address(step), sequence, completed, || Ok::<_, ()>(step));
                assert_eq!(made, Ok(()));
                assert!(handles.entries.len() <= handles.limit);
                let oldest = completed.wrapping_sub(start);
                assert_eq!(handles.get(address(oldest)), Some(&oldest));
                assert_eq!(handles.get(address(step)), Some(&step));
            }
        }
    }
}
