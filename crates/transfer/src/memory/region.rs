//! A piece of registered memory, with what transports keep of it and what its descriptor says.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;

use millstream_metadata::{BufferDesc, WholeDesc};

use super::{LocalMemory, RawMemory};
use crate::placement::Place;
use crate::transport::{ANYWHERE, Registration, Transport};

/// A piece of registered memory, and what each transport keeps with it.
pub(crate) struct Region {
    /// Dropped before `memory`: fields are dropped in their order.
    registrations: Vec<Registration>,
    pub(crate) local: Arc<LocalMemory>,
    memory: RawMemory,
    /// Which of the registrations has the keys of the descriptor.
    keyed: Option<usize>,
    places: Vec<Place>,
    remote: bool,
    text_length: usize,
}

impl Region {
    pub(crate) fn new(
        registrations: Vec<Registration>,
        keyed: Option<usize>,
        memory: RawMemory,
        places: Vec<Place>,
        locations: Box<[(u64, u16)]>,
        remote: bool,
    ) -> Self {
        let local = Arc::new(LocalMemory {
            pointer: memory.pointer,
            first: memory.address(),
            length: memory.length(),
            gpu: memory.gpu.clone(),
            keys: registrations.iter().map(|each| each.keys.clone()).collect(),
            locations,
            gate: Arc::default(),
        });
        let mut region =
            Self { registrations, local, memory, keyed, places, remote, text_length: 0 };
        region.count_text();
        region
    }

    fn count_text(&mut self) {
        let text = |buffer| serde_json::to_vec(&buffer).unwrap_or_default();
        // With a comma.
        self.text_length = self.buffers().map(|buffer| text(buffer).len() + 1).sum();
    }

    /// What a transport keeps with it that is installed later.
    pub(crate) fn register_with(&self, transport: &dyn Transport) -> Result<Registration, String> {
        // Nobody gets at it any more.
        let remote = self.remote && !self.local.is_closed();
        transport.register(&self.memory, remote)
    }

    /// Adds what the last of all transports keeps with it.
    pub(crate) fn add(&mut self, registration: Registration, transport: &dyn Transport) {
        let mut locations = self.local.locations.clone();
        if transport.capabilities().needs_keys && self.keyed.is_none() {
            self.keyed = Some(self.registrations.len());
            let number = |place: &Place| (place.offset, transport.location(&place.location));
            locations = self.places.iter().map(number).collect();
        }
        self.registrations.push(registration);
        self.renew(locations);
    }

    /// Takes back what was added last.
    pub(crate) fn take_last(&mut self) -> Option<Registration> {
        let last = self.registrations.pop();
        let mut locations = self.local.locations.clone();
        if self.keyed == Some(self.registrations.len()) {
            self.keyed = None;
            locations = self.places.iter().map(|place| (place.offset, ANYWHERE)).collect();
        }
        self.renew(locations);
        last
    }

    /// Others see it with the keys of now from here on. What is under way has those of before, and the same gate.
    fn renew(&mut self, locations: Box<[(u64, u16)]>) {
        let LocalMemory { pointer, first, length, .. } = *self.local;
        let keys = self.registrations.iter().map(|each| each.keys.clone()).collect();
        let (gpu, gate) = (self.local.gpu.clone(), Arc::clone(&self.local.gate));
        self.local = Arc::new(LocalMemory { pointer, first, length, gpu, keys, locations, gate });
        self.count_text();
    }

    /// What peers are told of it: a buffer for each place of each region, with the keys of the region.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = BufferDesc> {
        let keyed = self.keyed.and_then(|index| self.registrations.get(index));
        let shm_key = self.registrations.iter().find_map(|each| each.shared_key);
        let whole = self.region_length().map(|region_length| {
            let addr = self.local.first;
            WholeDesc { addr, region_length }
        });
        self.parts().map(move |(location, Range { start, end })| BufferDesc {
            name: location.to_owned(),
            addr: self.local.first + start,
            length: end - start,
            rkey: keyed.map(|it| it.remote_keys.at(start).to_vec()).unwrap_or_default(),
            lkey: keyed.map(|it| it.keys.at(start).to_vec()).unwrap_or_default(),
            shm_key,
            part_of: whole,
            ..BufferDesc::default()
        })
    }

    /// Bytes of each region but the last, if devices have several.
    fn region_length(&self) -> Option<NonZeroU64> {
        let keyed = self.registrations.get(self.keyed?)?;
        keyed.keys.region_length().and_then(NonZeroU64::new)
    }

    /// Its places, cut where a region ends and the next begins: locations, and offsets.
    fn parts(&self) -> impl Iterator<Item = (&str, Range<u64>)> {
        let region = self.region_length().map_or(u64::MAX, NonZeroU64::get);
        self.places.iter().flat_map(move |place| {
            let (start, end) = (place.offset, place.offset + place.length);
            let part = move |from: u64| {
                let until = (from / region + 1).saturating_mul(region).min(end);
                from..until
            };
            let next = move |before: &Range<u64>| (before.end < end).then(|| part(before.end));
            let parts = std::iter::successors(Some(part(start)), next);
            parts.map(|range| (place.location.as_str(), range))
        })
    }

    /// How many buffers that are.
    pub(crate) fn buffer_count(&self) -> usize {
        self.parts().count()
    }

    /// How many bytes that takes in the descriptor.
    pub(crate) const fn text_length(&self) -> usize {
        self.text_length
    }

    /// Whether peers may know of it.
    pub(crate) fn is_offered(&self) -> bool {
        self.remote && !self.local.is_closed()
    }

    /// Ends all access to it; why that does not work, if so: then somebody still has access, but nobody
    /// gets any.
    pub(crate) fn revoke(&self) -> Result<(), String> {
        self.local.gate.close();
        let revoked = self.registrations.iter().map(|registration| registration.guard.revoke());
        revoked.fold(Ok(()), Result::and)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // What the registrations do not know of: copies of our own.
        self.local.gate.close();
    }
}
