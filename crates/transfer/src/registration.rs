//! Registration of memory: addresses are reserved, transports asked, and what came of it is shown, all
//! of a batch or nothing of it. Transports work meanwhile under no lock that others need.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};

use millstream_net::own_memory::Inspector;

use crate::RegisterError;
use crate::engine::Inner;
use crate::gpu;
use crate::memory::{LocalMemory, Memory, RawMemory, Region, Unregistering};
use crate::placement::Place;
use crate::transport::{ANY_LOCATION, ANYWHERE, Transport};

/// The longest name of a location: it stands in the descriptor once for each buffer.
const MAX_LOCATION: usize = 64;

impl Inner {
    /// Registers each of these, or none.
    pub(crate) fn register(
        &self,
        mut wanted: Vec<RawMemory>,
        location: &str,
        remote: bool,
    ) -> Result<(), RegisterError> {
        let _installed = self.installed();
        if self.is_stopped() {
            return Err(RegisterError::ShutDown);
        }
        let location = check_location(location)?;
        let mut reserved = Reserved { memory: self.memory(), addresses: Vec::new() };
        reserved.add(&wanted)?;
        gpu::recognise(&mut wanted)?;
        check_mapping(&wanted)?;
        let register = |memory| self.register_one(memory, location, remote);
        let regions = wanted.into_iter().map(register).collect::<Result<Vec<_>, _>>()?;
        if !remote {
            let _ = reserved.fill(regions);
            reserved.keep();
            return Ok(());
        }
        self.add(&regions)?;
        let filled = reserved.fill(regions);
        if let Err(error) = self.changed() {
            let regions = reserved.empty(&filled);
            self.publication.remove(regions.iter());
            self.changed_back();
            return Err(error.into());
        }
        reserved.keep();
        Ok(())
    }

    fn register_one(
        &self,
        memory: RawMemory,
        location: &str,
        remote: bool,
    ) -> Result<Region, RegisterError> {
        let mut registrations = Vec::new();
        let mut keyed = None;
        for (index, transport) in self.transports().iter().enumerate() {
            let registration = transport.register(&memory, remote).map_err(|reason| {
                let (address, length) = (memory.address(), memory.length());
                RegisterError::Transport { transport: transport.name(), address, length, reason }
            })?;
            registrations.push(registration);
            if transport.capabilities().needs_keys {
                keyed.get_or_insert(index);
            }
        }
        let mut places = match (location, memory.gpu()) {
            (ANY_LOCATION, Some(gpu)) => Place::whole(memory.length(), &gpu.location()),
            (ANY_LOCATION, None) => Place::find(memory.address(), memory.length()),
            (location, _) => Place::whole(memory.length(), location),
        };
        // Peers know by the keys that places belong together.
        if keyed.is_none() && registrations.iter().all(|each| each.shared_key.is_none()) {
            places = Place::whole(memory.length(), &places[0].location);
        }
        let transports = self.transports();
        let number = |place: &Place| {
            keyed.map_or(ANYWHERE, |index| transports[index].location(&place.location))
        };
        let locations = places.iter().map(|place| (place.offset, number(place))).collect();
        Ok(Region::new(registrations, keyed, memory, places, locations, remote))
    }

    /// Registers all memory with a transport that is about to be the last of all, or none. Who calls this installs
    /// it: nobody else registers or unregisters meanwhile.
    pub(crate) fn take_along(&self, transport: &dyn Transport) -> Result<(), RegisterError> {
        let regions = self.memory().regions.read().unwrap_or_else(PoisonError::into_inner);
        let mut made = Vec::new();
        for (address, length, region) in regions.iter() {
            let Some(region) = region else { continue };
            let registration = region.register_with(transport).map_err(|reason| {
                RegisterError::Transport { transport: transport.name(), address, length, reason }
            });
            made.push((address, registration?));
        }
        drop(regions);
        let mut regions = self.memory().lock();
        for (address, registration) in made {
            if let Some(region) = regions.entry(address).and_then(Option::as_mut) {
                region.add(registration, transport);
            }
        }
        Ok(())
    }

    /// Takes back what [`Inner::take_along`] did last.
    pub(crate) fn leave_behind(&self) {
        let mut regions = self.memory().lock();
        let taken: Vec<_> = regions.values().flatten().filter_map(Region::take_last).collect();
        drop(regions);
        // Their ends may wait for others.
        drop(taken);
    }

    /// Unregisters the memory at each of these addresses, whatever becomes of the others. The first
    /// failure is returned. What another thread registers or unregisters is waited for: it is touched until then.
    pub(crate) fn unregister(&self, addresses: &[u64]) -> Result<(), RegisterError> {
        let mut failures = Failures::new();
        let mut known = HashSet::with_capacity(addresses.len());
        let mut wanted = Vec::with_capacity(addresses.len());
        for (index, &address) in addresses.iter().enumerate() {
            match known.insert(address) {
                true => wanted.push((index, address)),
                // It is there once.
                false => failures.push((index, RegisterError::Unknown { address })),
            }
        }
        loop {
            wanted = self.unregister_settled(wanted, &mut failures);
            let Some(&(_, address)) = wanted.first() else { break };
            // Nothing is taken or locked meanwhile: two may want what the other one has taken.
            self.memory().wait_until_settled(address);
        }
        match failures.into_iter().min_by_key(|(index, _)| *index) {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    /// Unregisters those of these that nobody else registers or unregisters now; the others are returned. Each has its
    /// place among the addresses that were given.
    fn unregister_settled(
        &self,
        wanted: Vec<(usize, u64)>,
        failures: &mut Failures,
    ) -> Vec<(usize, u64)> {
        let _installed = self.installed();
        let memory = self.memory();
        let mut taken = Vec::with_capacity(wanted.len());
        let mut others = Vec::new();
        let mut regions = memory.lock();
        for (index, address) in wanted {
            let Some(entry) = regions.entry(address) else {
                failures.push((index, RegisterError::Unknown { address }));
                continue;
            };
            match Unregistering::take(memory, address, entry) {
                Some(region) => taken.push((index, address, region)),
                None => others.push((index, address)),
            }
        }
        drop(regions);
        let offered = taken.iter().filter_map(|(_, _, taken)| taken.region());
        let mut offered = offered.filter(|it| it.is_offered());
        if let Some(first) = offered.next() {
            self.publication.remove(std::iter::once(first).chain(offered));
            // The memory goes, whether the server hears of it now or later.
            if let Err(error) = self.changed() {
                self.changed_back();
                // Of none of them: theirs are told first.
                failures.push((usize::MAX, error.into()));
            }
        }
        for (index, address, region) in taken {
            // Waits for copies, devices and other processes.
            if let Err(reason) = region.end() {
                failures.push((index, RegisterError::InUse { address, reason }));
            }
        }
        others
    }
}

/// What went wrong with which of the addresses that were given, by their places.
type Failures = Vec<(usize, RegisterError)>;

/// Addresses that are free again when this is dropped, unless they are kept.
struct Reserved<'a> {
    memory: &'a Memory,
    addresses: Vec<u64>,
}

impl Reserved<'_> {
    fn add(&mut self, wanted: &[RawMemory]) -> Result<(), RegisterError> {
        let mut regions = self.memory.lock();
        for memory in wanted {
            let (address, length) = (memory.address(), memory.length());
            regions.check(address, length)?;
            regions.insert(address, length, None);
            self.addresses.push(address);
        }
        Ok(())
    }

    /// From here on transfers find them, and anybody can unregister them.
    fn fill(&self, filling: Vec<Region>) -> Vec<Arc<LocalMemory>> {
        let filled = filling.iter().map(|region| Arc::clone(&region.local)).collect();
        self.memory.settle(|regions| {
            for (&address, region) in self.addresses.iter().zip(filling) {
                if let Some(entry) = regions.entry(address) {
                    *entry = Some(region);
                }
            }
        });
        filled
    }

    /// Takes back what `fill` returned this for. What was unregistered since is not, nor what somebody else
    /// has registered there.
    fn empty(&mut self, filled: &[Arc<LocalMemory>]) -> Vec<Region> {
        let mut regions = self.memory.lock();
        let addresses = std::mem::take(&mut self.addresses);
        let mut taken = Vec::with_capacity(filled.len());
        for (address, memory) in addresses.into_iter().zip(filled) {
            let own = |region: &mut Region| Arc::ptr_eq(&region.local, memory);
            if let Some(region) = regions.entry(address).and_then(|entry| entry.take_if(own)) {
                taken.push(region);
                self.addresses.push(address);
            }
        }
        taken
    }

    fn keep(mut self) {
        self.addresses.clear();
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.memory.settle(|regions| {
            for &address in &self.addresses {
                regions.remove(address);
            }
        });
    }
}

/// What callers bring must be there, all of it. Of memory of GPUs their driver has said so.
fn check_mapping(wanted: &[RawMemory]) -> Result<(), RegisterError> {
    let is_mapped = |memory: &&RawMemory| memory.is_brought() && memory.gpu().is_none();
    let mut brought = wanted.iter().filter(is_mapped).peekable();
    if brought.peek().is_none() {
        return Ok(());
    }
    let unknown = |error| tracing::debug!(%error, "memory is registered without a look at it");
    let mut inspector = match Inspector::new() {
        Ok(inspector) => inspector,
        Err(error) => {
            unknown(error);
            return Ok(());
        }
    };
    for memory in brought {
        let (address, length) = (memory.address(), memory.length());
        match inspector.first_defect(address, length) {
            Ok(None) => {}
            Ok(Some((first, defect))) => {
                return Err(RegisterError::Defective { address, length, first, defect });
            }
            Err(error) => unknown(error),
        }
    }
    Ok(())
}

/// What a location can be called. Mooncake refuses descriptors that have one without a name, so
/// that is [`ANY_LOCATION`].
fn check_location(location: &str) -> Result<&str, RegisterError> {
    if location.is_empty() {
        return Ok(ANY_LOCATION);
    }
    let printable = location.bytes().all(|byte| byte.is_ascii_graphic());
    if printable && location.len() <= MAX_LOCATION {
        return Ok(location);
    }
    let location = location.chars().take(MAX_LOCATION).collect();
    Err(RegisterError::Location { location, limit: MAX_LOCATION })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU8;
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::thread;
    use std::time::Duration;

    use millstream_metadata::StoreError;

    use super::*;
    use crate::{Config, TransferEngine};

    #[test]
    fn what_others_have_registered_meanwhile_is_not_taken_back() {
        static BYTES: [AtomicU8; 200] = [const { AtomicU8::new(0) }; 200];
        let pieces = || BYTES.chunks(100).map(RawMemory::of);
        let address = [127, 97, std::process::id() as u8, 2].into();
        let engine = TransferEngine::new(Config::new(address)).unwrap();
        let inner = &engine.inner;
        let addresses: Vec<u64> = pieces().map(|it| it.address()).collect();
        let mut reserved = Reserved { memory: inner.memory(), addresses: Vec::new() };
        reserved.add(&pieces().collect::<Vec<_>>()).unwrap();
        let register = |memory| inner.register_one(memory, ANY_LOCATION, false).unwrap();
        let filled = reserved.fill(pieces().map(register).collect());
        inner.unregister(&addresses[..1]).unwrap();
        inner.register(pieces().take(1).collect(), ANY_LOCATION, false).unwrap();
        assert_eq!(reserved.empty(&filled).len(), 1);
        drop(reserved);
        inner.unregister(&addresses[..1]).unwrap();
        assert!(inner.unregister(&addresses[1..]).is_err(), "it was taken back");
    }

    /// The one who waits has nothing that others may wait for, and what it could unregister is unregistered.
    #[test]
    fn what_another_thread_unregisters_is_unknown_only_when_nobody_touches_it() {
        static BYTES: [AtomicU8; 300] = [const { AtomicU8::new(0) }; 300];
        let address = [127, 97, std::process::id() as u8, 4].into();
        let engine = TransferEngine::new(Config::new(address)).unwrap();
        let inner = &engine.inner;
        let pieces: Vec<_> = BYTES.chunks(100).map(RawMemory::of).collect();
        let [a, b, c] = [0, 1, 2].map(|index: usize| pieces[index].address());
        inner.register(pieces, ANY_LOCATION, false).unwrap();
        let touched = inner.memory().find(b, 100).unwrap();
        let inside = touched.enter().unwrap();
        thread::scope(|scope| {
            let first = scope.spawn(|| inner.unregister(&[b, a]));
            while !touched.is_closed() && !first.is_finished() {
                thread::yield_now();
            }
            let (tell, told) = channel();
            let second = scope.spawn(move || {
                let unregistered = inner.unregister(&[c, a, a]);
                let _ = tell.send(());
                unregistered
            });
            while inner.memory().registered().0 > 2 && !second.is_finished() {
                thread::yield_now();
            }
            let early = told.recv_timeout(Duration::from_millis(100));
            drop(inside);
            assert_eq!(early, Err(RecvTimeoutError::Timeout), "somebody was inside");
            first.join().unwrap().unwrap();
            let error = second.join().unwrap().unwrap_err();
            assert!(matches!(error, RegisterError::Unknown { address } if address == a), "{error}");
        });
        assert_eq!(inner.memory().registered().0, 0);
    }

    #[test]
    fn what_does_not_fit_takes_no_room() {
        static BYTES: [AtomicU8; 800] = [const { AtomicU8::new(0) }; 800];
        let mut config = Config::new([127, 97, std::process::id() as u8, 3].into());
        config.client.frame_limit = 400;
        let engine = TransferEngine::new(config).unwrap();
        let register = |bytes: &'static [AtomicU8], remote| {
            engine.inner.register(bytes.chunks(100).map(RawMemory::of).collect(), "cpu:0", remote)
        };
        let error = register(&BYTES, true).unwrap_err();
        assert!(
            matches!(error, RegisterError::Publish(StoreError::TooLong { limit: 399, .. })),
            "{error}"
        );
        register(&BYTES[..100], true).unwrap();
        register(&BYTES[100..], false).unwrap();
    }
}
