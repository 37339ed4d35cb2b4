//! A version of a segment's descriptor, and which of its buffers has which bytes.

use std::sync::Arc;
use std::time::Instant;

use millstream_metadata::{BufferDesc, SegmentDesc};

/// A version of a segment's descriptor, and the order of its buffers in memory.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) descriptor: Arc<SegmentDesc>,
    /// Indexes of the buffers that can be used, by their addresses.
    order: Arc<[u32]>,
    /// When it was heard of.
    pub(crate) since: Instant,
}

impl View {
    pub(super) fn new(descriptor: SegmentDesc) -> Self {
        let buffers = &descriptor.buffers;
        let usable = (0..).zip(buffers).filter(|(_, buffer)| buffer.fault.is_none());
        let mut order: Vec<u32> = usable.map(|(index, _)| index).collect();
        order.sort_by_key(|&index| buffers[index as usize].addr);
        Self { order: order.into(), descriptor: Arc::new(descriptor), since: Instant::now() }
    }

    /// The index of the buffer that holds all of these bytes.
    pub(crate) fn find(&self, address: u64, length: u64) -> Option<usize> {
        let buffers = &self.descriptor.buffers;
        let after = self.order.partition_point(|&index| buffers[index as usize].addr <= address);
        let before = self.order.get(after.checked_sub(1)?).map(|&index| index as usize);
        let holds = |&index: &usize| buffers[index].contains(address, length);
        if let Some(index) = before
            && self.holds_together(after - 1, address, length)
        {
            return Some(index);
        }
        // Buffers of one process do not overlap, but nobody says that a descriptor is true.
        let usable = || (0..buffers.len()).filter(|&index| buffers[index].fault.is_none());
        before.filter(holds).or_else(|| usable().find(holds))
    }

    /// The buffer whose keys the byte at an address has, of a request that begins in this one: of memory
    /// that is several regions, each has its own.
    pub(crate) fn part(&self, buffer: usize, address: u64) -> Option<&BufferDesc> {
        let buffers = &self.descriptor.buffers;
        let first = buffers.get(buffer)?;
        if first.part_of.is_none() || first.contains(address, 1) {
            return Some(first);
        }
        let after = self.order.partition_point(|&index| buffers[index as usize].addr <= address);
        let found = &buffers[*self.order.get(after.checked_sub(1)?)? as usize];
        (found.part_of == first.part_of && found.contains(address, 1)).then_some(found)
    }

    /// Bytes from the start of a buffer to the end of the piece of memory that it is of.
    pub(super) fn length_from(&self, buffer: usize) -> u64 {
        let buffers = &self.descriptor.buffers;
        let Some(first) = buffers.get(buffer).filter(|it| it.fault.is_none()) else { return 0 };
        let place = self.order.partition_point(|&index| buffers[index as usize].addr < first.addr);
        let found = self.order.get(place).is_some_and(|&index| index as usize == buffer);
        let end = found.then(|| self.pieces_from(place).last()).flatten();
        end.map_or(first.length, |end| end - first.addr)
    }

    /// The ends of the buffer at this place in the order, and of those that follow it without a gap and are of
    /// the same piece of memory.
    fn pieces_from(&self, place: usize) -> impl Iterator<Item = u64> {
        let mut parts = self.order[place..].iter().map(|&it| &self.descriptor.buffers[it as usize]);
        let first = parts.next();
        let end = |it: &BufferDesc| it.addr.saturating_add(it.length);
        let keyed = first.is_some_and(|it| !it.rkey.is_empty() || it.shm_key.is_some());
        let mut until = first.map(end);
        let following = parts.map_while(move |next| {
            let goes_on = keyed && until == Some(next.addr) && goes_on(first?, next);
            // One of no bytes ends nowhere.
            until = Some(end(next)).filter(|_| goes_on && next.length > 0);
            until
        });
        first.map(end).into_iter().chain(following)
    }

    /// Whether these bytes lie in the buffer at this place in the order and those that follow it without a
    /// gap, which have the same keys, or are parts of the same: one piece of memory whose pages are on several
    /// NUMA nodes, or that is several regions of each device.
    fn holds_together(&self, place: usize, address: u64, length: u64) -> bool {
        let Some(end) = address.checked_add(length) else { return false };
        let first = &self.descriptor.buffers[self.order[place] as usize];
        let mut ends = self.pieces_from(place);
        // In the first one is a byte at least.
        first.contains(address, 1) && ends.any(|until| until >= end)
    }
}

/// Whether two buffers are of one piece of memory.
fn goes_on(first: &BufferDesc, next: &BufferDesc) -> bool {
    let parts = first.part_of.is_some() && next.part_of == first.part_of;
    next.shm_key == first.shm_key && (parts || next.rkey == first.rkey)
}
