//! Registered memory that Rust owns or borrows. The other `unsafe` of this crate is in `communicator`, which keeps the
//! borrows as long as its calls, and in `raw` and `registrations`, for memory that is named by its address: there callers
//! promise what borrows promise here.
//!
//! Remotes write at any time they like, as far as regions let them. So here only the destination of a collective
//! that is answered by WRITEs is registered for writing by them, in a protection domain that only its communicator's queue pairs have, as long
//! as the collective runs and until its caller has taken the result; and until then no Rust reference to it is used: a [`Buffer`] was given away, a
//! slice is borrowed by the call that waits.
//!
//! Here is also what keeps the memory that a switch of this process sends from: [`RunningSwitch`].

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use millstream_inc::{MAX_TREES, Mode, SwitchNode};
use millstream_net::shared_memory::GroupMemory;
use millstream_net::{Hook, OpenError, Opened, Progress, Shared};
use millstream_verbs::{Access, Device, MemoryRegion, ProtectionDomain, RegionError};

use crate::Element;
use crate::call::Shape;

const READABLE: Access = Access::empty();

/// What the region of a destination allows: WRITEs of the switch, or receives of our own.
pub(crate) const fn writable(mode: Mode) -> Access {
    match mode {
        Mode::Write => Access::LOCAL_WRITE.union(Access::REMOTE_WRITE),
        Mode::Send => Access::LOCAL_WRITE,
    }
}

/// Memory of a caller that a small vector is copied from, or its result to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: whoever makes one promises that its bytes can be used from any thread.
unsafe impl Send for Span {}

impl Span {
    pub(crate) const EMPTY: Self = Self { address: NonNull::dangling(), length: 0 };

    /// # Safety
    /// As long as a collective that names it goes on, the bytes must stay where they are and not be referred to in conflict
    /// with being read, or written where they are a destination.
    pub(crate) unsafe fn new(address: *mut u8, length: usize) -> Self {
        match NonNull::new(address) {
            Some(address) => Self { address, length },
            None => Self::EMPTY,
        }
    }

    /// # Safety
    /// As of [`Span::new`]: the borrow must last as long.
    pub(crate) unsafe fn of_source<T: Element>(elements: &[T]) -> Self {
        // SAFETY: the caller promises it, and a source is only read.
        unsafe { Self::new(elements.as_ptr().cast_mut().cast(), size_of_val(elements)) }
    }

    /// # Safety
    /// As of [`Span::new`]: the borrow must last as long.
    pub(crate) unsafe fn of_destination<T: Element>(elements: &mut [T]) -> Self {
        // SAFETY: the caller promises it. Any bytes are elements, which are plain numbers.
        unsafe { Self::new(elements.as_mut_ptr().cast(), size_of_val(elements)) }
    }

    /// Some of the elements from this one on.
    ///
    /// # Safety
    /// As of [`Span::new`], and the range must be within one allocation that begins there.
    unsafe fn of_range<T: Element>(elements: NonNull<T>, range: &Range<usize>) -> Self {
        // SAFETY: the caller promises it.
        unsafe {
            let start = elements.as_ptr().add(range.start);
            Self::new(start.cast(), range.len() * size_of::<T>())
        }
    }

    /// Whether so many bytes from an offset on are also some of another one.
    pub(crate) fn overlaps(self, offset: usize, length: usize, other: Self) -> bool {
        let (start, theirs) = (self.address.addr().get() + offset, other.address.addr().get());
        length > 0 && other.length > 0 && start < theirs + other.length && theirs < start + length
    }

    /// Bytes.
    pub(crate) const fn length(self) -> usize {
        self.length
    }

    /// Where so many bytes from an offset on are, if they are all of it.
    fn range(self, offset: usize, length: usize) -> Option<*mut u8> {
        let within = offset.checked_add(length).is_some_and(|end| end <= self.length);
        within.then(|| self.address.as_ptr().wrapping_add(offset))
    }

    /// Copies bytes of it, from an offset on.
    pub(crate) fn load(self, offset: usize, bytes: &mut [u8]) {
        if let Some(from) = self.range(offset, bytes.len()) {
            // SAFETY: within what whoever made the span promised, and `bytes` is other memory.
            unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        }
    }

    /// Copies bytes to it, from an offset on.
    pub(crate) fn store(self, offset: usize, bytes: &[u8]) {
        if let Some(to) = self.range(offset, bytes.len()) {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        }
    }

    /// Copies a part of another one, which may be the same, to a part of this.
    pub(crate) fn copy(self, offset: usize, other: Self, from: usize, length: usize) {
        if let (Some(to), Some(from)) = (self.range(offset, length), other.range(from, length))
            && from != to
        {
            // SAFETY: within what whoever made the spans promised.
            unsafe { std::ptr::copy(from, to, length) };
        }
    }

    /// Copies a part of it to what ranks share.
    pub(crate) fn share(self, offset: usize, length: usize, to: &GroupMemory, at: usize) {
        if let Some(from) = self.range(offset, length) {
            // SAFETY: within what whoever made the span promised.
            unsafe { to.write_from(at, from, length) };
        }
    }

    /// Copies what ranks share to a part of it.
    pub(crate) fn fetch(self, offset: usize, length: usize, from: &GroupMemory, at: usize) {
        if let Some(to) = self.range(offset, length) {
            // SAFETY: within what whoever made the span promised.
            unsafe { from.read_to(at, to, length) };
        }
    }

    /// The source and the destination of a call in place.
    ///
    /// # Safety
    /// As of [`Span::new`]: the borrow must last as long.
    pub(crate) unsafe fn of_parts<T: Element>(vector: &mut [T], shape: &Shape) -> [Self; 2] {
        // One pointer for both, since they may be the same elements.
        let (start, length) = (vector.as_mut_ptr(), vector.len());
        [&shape.source, &shape.destination].map(|range| {
            assert!(range.start <= range.end && range.end <= length, "{range:?} of {length}");
            // SAFETY: within the vector, and the caller promises the rest.
            unsafe { Self::new(start.add(range.start).cast(), range.len() * size_of::<T>()) }
        })
    }
}

/// The protection domains of a communicator: one for each device, for all trees that use it. Trees that replace lost ones
/// have the same, so what is registered serves them, too.
#[derive(Clone, Debug)]
pub(crate) struct Domains(Vec<ProtectionDomain>);

impl Domains {
    /// Of 1 to [`MAX_TREES`] devices.
    pub(crate) fn of<'a>(devices: impl IntoIterator<Item = &'a Device>) -> Self {
        let domains: Vec<_> = devices.into_iter().map(Device::allocate_protection_domain).collect();
        debug_assert!((1..=MAX_TREES).contains(&domains.len()));
        Self(domains)
    }

    /// Those of the first devices only.
    pub(crate) fn first(&self, count: usize) -> Self {
        Self(self.0.iter().take(count).cloned().collect())
    }

    /// That of each device.
    pub(crate) fn each(&self) -> &[ProtectionDomain] {
        &self.0
    }

    /// Registers the memory of a span. Who has the regions lets go of them before the collective is over that names
    /// the span.
    pub(crate) fn register_span(
        &self,
        span: Span,
        access: Access,
    ) -> Result<Option<Regions>, RegionError> {
        Ok(match span.length {
            0 => None,
            // SAFETY: whoever made the span promised that so many bytes can be used as long.
            length => Some(unsafe { self.register_memory(span.address.as_ptr(), length, access)? }),
        })
    }

    /// Registers memory with all devices.
    ///
    /// # Safety
    /// As of [`ProtectionDomain::register_memory`], until the regions are dropped.
    pub(crate) unsafe fn register_memory(
        &self,
        address: *mut u8,
        length: usize,
        access: Access,
    ) -> Result<Regions, RegionError> {
        let register = |domain: &ProtectionDomain| {
            // SAFETY: the caller promises it.
            unsafe { domain.register_memory(address, length, access) }
        };
        Ok(Regions(self.0.iter().map(register).collect::<Result<_, _>>()?))
    }
}

/// The regions of the same memory on all devices.
#[derive(Debug)]
pub(crate) struct Regions(Box<[MemoryRegion]>);

/// The keys of a region.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Keys {
    pub(crate) local: u32,
    /// As the switch must name it. Only soft devices have one key for both.
    pub(crate) remote: u32,
}

/// Memory as work requests name it. Without elements, nothing is registered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operand {
    /// On each device.
    pub(crate) keys: [Keys; MAX_TREES],
    pub(crate) address: u64,
}

impl Operand {
    /// All of what was registered.
    pub(crate) fn of(regions: &Regions) -> Self {
        let mut keys = [Keys::default(); MAX_TREES];
        for (keys, region) in keys.iter_mut().zip(&regions.0) {
            *keys = Keys { local: region.key(), remote: region.remote_key() };
        }
        // Where the memory is, for all of them.
        let address = regions.0.first().map_or(0, MemoryRegion::address);
        Self { keys, address }
    }

    /// The part of it from this element on.
    fn at_element<T>(self, index: usize) -> Self {
        Self { address: self.address + (index * size_of::<T>()) as u64, ..self }
    }
}

/// What a call reads and writes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operands {
    pub(crate) source: Operand,
    pub(crate) destination: Operand,
}

/// Slices that are registered for one call.
pub(crate) struct Borrowed<'a, T> {
    source: Option<Regions>,
    destination: Option<Regions>,
    operands: Operands,
    spans: [Span; 2],
    /// Neither used nor released by their owner meanwhile.
    _slices: PhantomData<&'a mut [T]>,
}

impl<'a, T: Element> Borrowed<'a, T> {
    /// Registers what a call reads of one slice and writes of another.
    pub(crate) fn apart(
        domain: &Domains,
        mode: Mode,
        shape: &Shape,
        source: &'a [T],
        destination: &'a mut [T],
    ) -> Result<Self, RegionError> {
        let (source, destination) =
            (&source[shape.source.clone()], &mut destination[shape.destination.clone()]);
        // SAFETY: only read, and both `register` and `Span` ask for what is kept here.
        let (source, source_span) = unsafe {
            let span = Span::of_source(source);
            (register(domain, source.as_ptr().cast_mut(), source.len(), READABLE)?, span)
        };
        let (elements, length) = (destination.as_mut_ptr(), destination.len());
        // SAFETY: the slice is exclusively ours, and the rest is as above.
        let (destination, destination_span) = unsafe {
            let span = Span::new(elements.cast(), length * size_of::<T>());
            (register(domain, elements, length, writable(mode))?, span)
        };
        let spans = [source_span, destination_span];
        let operands = Operands {
            source: operand(source.as_ref()),
            destination: operand(destination.as_ref()),
        };
        Ok(Self { source, destination, operands, spans, _slices: PhantomData })
    }

    /// Registers what a call reads and writes of one slice.
    pub(crate) fn in_place(
        domain: &Domains,
        mode: Mode,
        shape: &Shape,
        vector: &'a mut [T],
    ) -> Result<Self, RegionError> {
        let elements = NonNull::from(vector).cast::<T>();
        // SAFETY: the slice is exclusively ours as long as this lives, and both ranges are within it.
        let (source, destination, spans) = unsafe {
            let (source, destination) = register_in_place(domain, mode, shape, elements)?;
            let span = |range: &Range<usize>| Span::of_range(elements, range);
            (source, destination, [span(&shape.source), span(&shape.destination)])
        };
        let operands = operands_in_place::<T>(shape, source.as_ref(), destination.as_ref());
        Ok(Self { source, destination, operands, spans, _slices: PhantomData })
    }

    /// Source and destination.
    pub(crate) fn spans(&self) -> [Span; 2] {
        self.spans
    }

    pub(crate) fn operands(&self) -> Operands {
        self.operands
    }
}

impl<T> Drop for Borrowed<'_, T> {
    fn drop(&mut self) {
        // Here and not when the fields go, so that the borrow lasts until then.
        self.source = None;
        self.destination = None;
    }
}

/// # Safety
/// The elements must be borrowed, in a way that allows `access`, until the region is dropped. The callers in
/// `communicator` keep what has it in a local variable, which they neither forget nor give away.
unsafe fn register<T: Element>(
    domain: &Domains,
    elements: *mut T,
    length: usize,
    access: Access,
) -> Result<Option<Regions>, RegionError> {
    Ok(match length * size_of::<T>() {
        0 => None,
        // SAFETY: the elements stay where they are as long as the borrow lasts. Any bytes are elements.
        bytes => Some(unsafe { domain.register_memory(elements.cast(), bytes, access)? }),
    })
}

/// The regions of what a call reads and writes of one vector: what is read has none of its own where it
/// is a part of what is written.
///
/// # Safety
/// As of [`register`], for all elements of the shape, exclusively.
unsafe fn register_in_place<T: Element>(
    domain: &Domains,
    mode: Mode,
    shape: &Shape,
    elements: NonNull<T>,
) -> Result<(Option<Regions>, Option<Regions>), RegionError> {
    let part = |range: &Range<usize>, access| {
        // SAFETY: within the vector, and the caller promised the rest.
        unsafe { register(domain, elements.as_ptr().add(range.start), range.len(), access) }
    };
    let destination = part(&shape.destination, writable(mode))?;
    let source = match is_within(&shape.source, &shape.destination) {
        true => None,
        false => part(&shape.source, READABLE)?,
    };
    Ok((source, destination))
}

fn is_within(inner: &Range<usize>, outer: &Range<usize>) -> bool {
    inner.start >= outer.start && inner.end <= outer.end
}

/// What work requests of a call in place name, with the regions of [`register_in_place`].
fn operands_in_place<T>(
    shape: &Shape,
    source: Option<&Regions>,
    destination: Option<&Regions>,
) -> Operands {
    let destination = operand(destination);
    let source = match is_within(&shape.source, &shape.destination) {
        true if shape.source.is_empty() => Operand::default(),
        true => destination.at_element::<T>(shape.source.start - shape.destination.start),
        false => operand(source),
    };
    Operands { source, destination }
}

pub(crate) fn operand(region: Option<&Regions>) -> Operand {
    region.map_or_else(Operand::default, Operand::of)
}

/// A vector that is registered as a source as long as it lives, and as a destination while a
/// collective writes to it. Made by [`crate::Communicator::allocate`].
pub struct Buffer<T: Element> {
    /// Only to be read. Goes before the elements do.
    region: Option<Regions>,
    elements: NonNull<T>,
    length: usize,
    /// Which communicator can use it.
    owner: u64,
}

/// The right of a call to write to a [`Buffer`].
pub(crate) struct Window {
    /// Until the window goes.
    _region: Option<Regions>,
    operand: Operand,
}

impl Window {
    pub(crate) fn operand(&self) -> Operand {
        self.operand
    }
}

/// A buffer that was given away to a collective. Nobody can refer to its elements.
pub(crate) struct Pending<T: Element> {
    /// Goes before the buffer does. None where the result is copied.
    window: Option<Window>,
    operands: Operands,
    buffer: Buffer<T>,
}

impl<T: Element> Pending<T> {
    /// Takes a buffer and lets a call in place write to it.
    pub(crate) fn new(
        mut buffer: Buffer<T>,
        domain: &Domains,
        mode: Mode,
        shape: &Shape,
    ) -> Result<Self, (Buffer<T>, RegionError)> {
        // SAFETY: the two are kept together, out of reach, and end in this order.
        match unsafe { buffer.open(domain, mode, &shape.destination) } {
            Ok(window) => {
                let operands = buffer.operands_in_place(shape, &window);
                Ok(Self { window: Some(window), operands, buffer })
            }
            Err(error) => Err((buffer, error)),
        }
    }

    /// Takes a buffer whose result is copied.
    pub(crate) fn copied(buffer: Buffer<T>) -> Self {
        Self { window: None, operands: Operands::default(), buffer }
    }

    /// A part of its elements, as long as it lives.
    pub(crate) fn span(&self, range: &Range<usize>) -> Span {
        // SAFETY: nobody can refer to the buffer. Its owner keeps it until the collective is over, or ends that first.
        unsafe { self.buffer.span(range) }
    }

    pub(crate) fn operands(&self) -> Operands {
        self.operands
    }

    /// Gives the buffer back; the switch can write no more.
    pub(crate) fn close(self) -> Buffer<T> {
        let Self { window, buffer, .. } = self;
        drop(window);
        buffer
    }
}

// SAFETY: it owns its elements, which are plain numbers.
unsafe impl<T: Element> Send for Buffer<T> {}
// SAFETY: as above; shared, it only gives shared references.
unsafe impl<T: Element> Sync for Buffer<T> {}

impl<T: Element> Buffer<T> {
    pub(crate) fn new(domain: &Domains, length: usize, owner: u64) -> Result<Self, RegionError> {
        let elements = Box::into_raw(vec![T::default(); length].into_boxed_slice()).cast::<T>();
        // A pointer to a boxed slice is never null.
        let elements = NonNull::new(elements).unwrap_or(NonNull::dangling());
        let mut buffer = Self { region: None, elements, length, owner };
        let bytes = length * size_of::<T>();
        if bytes > 0 {
            // SAFETY: the elements are ours until `drop`, where the region goes first, and nobody
            // can write through it.
            let region =
                unsafe { domain.register_memory(elements.as_ptr().cast(), bytes, READABLE)? };
            buffer.region = Some(region);
        }
        Ok(buffer)
    }

    /// A part of it, as a source.
    pub(crate) fn source(&self, range: &Range<usize>) -> Operand {
        match range.is_empty() {
            true => Operand::default(),
            false => operand(self.region.as_ref()).at_element::<T>(range.start),
        }
    }

    /// A part of it.
    ///
    /// # Safety
    /// As of [`Span::new`]: the buffer must live, and not be referred to in conflict with the collective.
    pub(crate) unsafe fn span(&self, range: &Range<usize>) -> Span {
        debug_assert!(range.end <= self.length);
        // SAFETY: within the buffer, and the caller promises the rest.
        unsafe { Span::of_range(self.elements, range) }
    }

    /// What a call in place reads and writes.
    pub(crate) fn operands_in_place(&self, shape: &Shape, window: &Window) -> Operands {
        Operands { source: self.source(&shape.source), destination: window.operand() }
    }

    /// Lets a call write to a part of it, as long as the window lives.
    ///
    /// # Safety
    /// Until the window is dropped, nobody may refer to the elements, and the buffer must live.
    pub(crate) unsafe fn open(
        &mut self,
        domain: &Domains,
        mode: Mode,
        range: &Range<usize>,
    ) -> Result<Window, RegionError> {
        debug_assert!(range.end <= self.length);
        // SAFETY: within the buffer, which is ours, and the caller promised the rest.
        let region = unsafe {
            let elements = self.elements.as_ptr().add(range.start);
            register(domain, elements, range.len(), writable(mode))?
        };
        let operand = operand(region.as_ref());
        Ok(Window { _region: region, operand })
    }

    pub(crate) fn owner(&self) -> u64 {
        self.owner
    }
}

impl<T: Element> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: so many elements, initialised, ours; the switch writes only through a `Window`.
        unsafe { slice::from_raw_parts(self.elements.as_ptr(), self.length) }
    }
}

impl<T: Element> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.elements.as_ptr(), self.length) }
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        self.region = None;
        let elements = std::ptr::slice_from_raw_parts_mut(self.elements.as_ptr(), self.length);
        // SAFETY: from a box of this length, and nobody else has it.
        drop(unsafe { Box::from_raw(elements) });
    }
}

impl<T: Element> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} x {})", self.length, T::DATA_TYPE)
    }
}

/// Bytes that are registered for reading and writing: what is sent for other memory, as that of all ranks of a host, and the
/// results of that. Collectives that use it are over before it goes.
pub(crate) struct Scratch {
    /// They go before the bytes do.
    regions: Option<Regions>,
    bytes: NonNull<u8>,
    length: usize,
}

// SAFETY: it owns its bytes.
unsafe impl Send for Scratch {}

impl Scratch {
    /// So many bytes, which is not 0, for the connections of these domains.
    pub(crate) fn new(domains: &Domains, length: usize) -> Result<Self, RegionError> {
        let bytes = Box::into_raw(vec![0_u8; length].into_boxed_slice()).cast::<u8>();
        // A pointer to a boxed slice is never null.
        let bytes = NonNull::new(bytes).unwrap_or(NonNull::dangling());
        let mut scratch = Self { regions: None, bytes, length };
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        // SAFETY: the bytes are ours until `drop`, where the regions go first, and never referred to: spans copy.
        scratch.regions = Some(unsafe { domains.register_memory(bytes.as_ptr(), length, access)? });
        Ok(scratch)
    }

    /// All of it, as work requests name it.
    pub(crate) fn operand(&self) -> Operand {
        operand(self.regions.as_ref())
    }

    /// From this byte on.
    pub(crate) fn operand_at(&self, offset: usize) -> Operand {
        debug_assert!(offset <= self.length);
        let whole = self.operand();
        Operand { address: whole.address + offset as u64, ..whole }
    }

    /// All of it, for as long as it lives: its owner ends what uses that before.
    pub(crate) fn span(&self) -> Span {
        self.part(0..self.length)
    }

    /// A part of it, for as long.
    pub(crate) fn part(&self, range: Range<usize>) -> Span {
        assert!(range.start <= range.end && range.end <= self.length, "{range:?}");
        // SAFETY: within the bytes, to which nobody refers.
        unsafe { Span::new(self.bytes.as_ptr().add(range.start), range.len()) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.regions = None;
        let bytes = std::ptr::slice_from_raw_parts_mut(self.bytes.as_ptr(), self.length);
        // SAFETY: from a box of this length, and nobody else has it.
        drop(unsafe { Box::from_raw(bytes) });
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scratch({})", self.length)
    }
}

/// Room for control messages: descriptors out, aborts in.
pub(crate) struct ControlBlock<const BYTES: usize> {
    /// Goes before the bytes do.
    region: Option<MemoryRegion>,
    bytes: NonNull<[u8; BYTES]>,
}

// SAFETY: it owns its bytes.
unsafe impl<const BYTES: usize> Send for ControlBlock<BYTES> {}

impl<const BYTES: usize> ControlBlock<BYTES> {
    pub(crate) fn new(domain: &ProtectionDomain) -> Result<Self, RegionError> {
        let bytes = NonNull::from(Box::leak(Box::new([0; BYTES])));
        let mut block = Self { region: None, bytes };
        // SAFETY: the bytes are ours until `drop`, where the region goes first, and never referred
        // to: `load` and `store` copy. Remotes cannot write here, only receives of ours can.
        let region =
            unsafe { domain.register_memory(bytes.as_ptr().cast(), BYTES, Access::LOCAL_WRITE)? };
        block.region = Some(region);
        Ok(block)
    }

    /// The key of its region, and its address.
    pub(crate) fn place(&self) -> (u32, u64) {
        self.region.as_ref().map_or((0, 0), |region| (region.key(), region.address()))
    }

    /// Copies what it holds from an offset on to a part of a caller's memory, as far as that goes.
    pub(crate) fn copy_to(&self, offset: usize, destination: Span, at: usize, length: usize) {
        let there = destination.length.saturating_sub(at);
        let length = length.min(there).min(BYTES.saturating_sub(offset));
        if length == 0 {
            return;
        }
        // SAFETY: within the allocation, as in `load`. Who made the span promised that so many bytes there can be
        // written; the allocation was never given away, so they are others.
        unsafe {
            let start = self.bytes.as_ptr().cast::<u8>().add(offset);
            let to = destination.address.as_ptr().add(at);
            std::ptr::copy_nonoverlapping(start, to, length);
        }
    }

    /// Copies a caller's memory to it, from an offset on, as far as there is room.
    pub(crate) fn copy_from(&mut self, offset: usize, source: Span) {
        let length = source.length.min(BYTES.saturating_sub(offset));
        if length == 0 {
            return;
        }
        // SAFETY: within the allocation. Who made the span promised that so many bytes there can be read; the
        // allocation was never given away, so they are others.
        unsafe {
            let start = self.bytes.as_ptr().cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(source.address.as_ptr(), start, length);
        }
    }

    /// Copies what it holds now, from an offset on. What is beyond its end is left out.
    pub(crate) fn load(&self, offset: usize, bytes: &mut [u8]) {
        let length = bytes.len().min(BYTES.saturating_sub(offset));
        if length == 0 {
            return;
        }
        // SAFETY: within the allocation, which is initialised, and `bytes` is another one. What the device may
        // be writing belongs to a receive that is not complete; a message is loaded when it is.
        unsafe {
            let start = self.bytes.as_ptr().cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(start, bytes.as_mut_ptr(), length);
        }
    }

    /// Copies bytes to it, from an offset on. Those beyond its end are left out.
    pub(crate) fn store(&mut self, offset: usize, bytes: &[u8]) {
        let length = bytes.len().min(BYTES.saturating_sub(offset));
        if length == 0 {
            return;
        }
        // SAFETY: within the allocation, and `bytes` is another one.
        unsafe {
            let start = self.bytes.as_ptr().cast::<u8>().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, length);
        }
    }
}

impl<const BYTES: usize> Drop for ControlBlock<BYTES> {
    fn drop(&mut self) {
        self.region = None;
        // SAFETY: from the box in `new`, and nobody else has it.
        drop(unsafe { Box::from_raw(self.bytes.as_ptr()) });
    }
}

/// The node of a switch of this process, at work. Dropped, it stops.
pub(crate) struct RunningSwitch(Progress<SwitchNode>);

impl RunningSwitch {
    pub(crate) fn start(
        opened: Opened,
        node: SwitchNode,
        hook: impl Hook<SwitchNode> + 'static,
    ) -> Result<Self, OpenError> {
        // SAFETY: the node names bytes of its communicators only, which lie on the heap where they are until the
        // communicator is destroyed. That happens in `destroy`, while nothing is being sent (see there); in a failed
        // `create_prepared`, before there is anything to send; and with the node, after its thread has ended.
        // `shared` gives no way to destroy one without a lock on the node, and its only callers are in `hosted`.
        Ok(Self(unsafe { Progress::run(opened, node, hook)? }))
    }

    /// The node, for all but the removal of communicators.
    pub(crate) fn shared(&self) -> &Arc<Shared<SwitchNode>> {
        self.0.shared()
    }

    /// Removes a communicator.
    pub(crate) fn destroy(&self, communicator: u64) {
        let shared = self.shared();
        let Ok(mut node) = shared.lock() else { return };
        // The thread may be sending from the slots that are about to be freed. It needs no lock to finish that, and
        // cannot begin another send as long as we hold the node.
        shared.quiesce();
        node.destroy_communicator(shared.now(), communicator);
    }
}
