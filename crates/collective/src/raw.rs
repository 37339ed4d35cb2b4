//! Collectives on memory that is named by its address, of a type that is known at run time only. They are started,
//! several of them one after the other, and waited for by handles.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use millstream_inc::{DataType, Mode};
use millstream_verbs::Access;

use crate::call::Call;
use crate::communicator::Communicator;
use crate::control::Sender;
use crate::memory::{Operand, Operands, Regions, Span, writable};
use crate::path::Way;
use crate::registrations::{Registered, RegistrationError};
use crate::tree::Work;
use crate::{CollectiveError, communicator};

/// A collective on memory that is named by its address.
#[derive(Clone, Copy, Debug)]
pub struct RawCall {
    /// Which collective.
    pub call: Call,
    /// What the elements are.
    pub data_type: DataType,
    /// By which operations of RDMA they travel, the same on all ranks.
    pub mode: Mode,
    /// How many elements, as the table of [`Call`] counts them.
    pub count: usize,
    /// The source. Any alignment will do; null where this rank has none.
    pub source: *const u8,
    /// The destination. It may be the source, or one of the two this rank's part of the other, as the table
    /// says; else they must not overlap.
    pub destination: *mut u8,
}

impl Communicator {
    /// Starts a collective, and returns at once. Up to 64 may be started and not over: they end in the order in which
    /// they were started, which must be the same on all ranks. Over several trees more than one is under way: none may
    /// use what an earlier one writes before that is over.
    ///
    /// Memory that was registered ([`Communicator::register_raw`]) is used as it is. Any other is registered for this
    /// call, unless the vector is small.
    ///
    /// # Safety
    /// Until [`Handle::wait`] or [`Handle::test`] has told the end, or the handle has been dropped, the bytes of the source must
    /// be readable and not be changed, and those of the destination be writable and not be referred to. A handle
    /// that is forgotten tells no end.
    pub unsafe fn start_raw(&self, call: &RawCall) -> Result<Handle, CollectiveError> {
        // SAFETY: the caller promises it.
        unsafe { self.begin_raw(call, true) }
    }

    /// As above. What is `unattended` goes on though nobody waits for it.
    ///
    /// # Safety
    /// As above.
    unsafe fn begin_raw(
        &self,
        call: &RawCall,
        unattended: bool,
    ) -> Result<Handle, CollectiveError> {
        let shape = RawShape::new(call, self.rank(), self.world())?;
        let copied = self.way().copies(&self.raw_request(call, &Operands::default()));
        // SAFETY: the caller promises it.
        let [source, destination] = unsafe {
            [
                Span::new(call.source.cast_mut(), shape.source_bytes),
                Span::new(call.destination, shape.destination_bytes),
            ]
        };
        let (held, operands) = match copied {
            true => (self.registered(call, &shape), Operands::default()),
            // SAFETY: the caller promises it, and the handle keeps them until the call is over.
            false => unsafe { self.hold(call, &shape)? },
        };
        let registered = !copied;
        let limit = self.call_timeout();
        let call = self.raw_request(call, &operands);
        let work = Work { call, operands, registered, source, destination, limit };
        let sequence = self.way().start(&work, unattended)?;
        let (way, sender) = (self.way().clone(), Arc::clone(self.sender()));
        Ok(Handle { way, sender, sequence, held: Mutex::new(Some(held)) })
    }

    /// Calls a collective, and waits for its end.
    ///
    /// # Safety
    /// As of [`Communicator::start_raw`], until this returns.
    pub unsafe fn call_raw(&self, call: &RawCall) -> Result<(), CollectiveError> {
        // SAFETY: the caller promises it.
        let handle = unsafe { self.begin_raw(call, false)? };
        handle.finish()
    }

    /// Registers memory for this communicator: collectives whose vectors lie in it, wherever, register nothing. The
    /// switch may write to it until it is deregistered, and not just during collectives, as it may to other memory.
    ///
    /// # Safety
    /// Until [`Communicator::deregister_raw`] has returned `Ok`, or the communicator and all its handles have been
    /// dropped, the bytes must stay mapped and writable, and Rust code must not refer to them while a collective uses them.
    pub unsafe fn register_raw(
        &self,
        address: *mut u8,
        length: usize,
    ) -> Result<(), RegistrationError> {
        // SAFETY: the caller promises it.
        unsafe { self.registrations().add(self.domains(), address, length) }
    }

    /// Deregisters what was registered from this address on. When it returns, nothing arrives there any more.
    pub fn deregister_raw(&self, address: *const u8) -> Result<(), RegistrationError> {
        self.registrations().remove(address.addr())
    }

    /// What a call needs registered, and what work requests name of it.
    ///
    /// # Safety
    /// As of [`Communicator::start_raw`], as long as what is held lives.
    unsafe fn hold(
        &self,
        call: &RawCall,
        shape: &RawShape,
    ) -> Result<(Held, Operands), CollectiveError> {
        let &RawShape { source_bytes, destination_bytes, .. } = shape;
        let mut held = Held::default();
        let destination = call.destination;
        // SAFETY: the caller promises it.
        let (target, target_at) =
            unsafe { self.range(destination, destination_bytes, writable(call.mode))? };
        held.destination = target;
        let source = call.source.cast_mut();
        let source_at = if shape.source_is_within() {
            let offset = source.addr() - destination.addr();
            Operand { address: target_at.address + offset as u64, ..target_at }
        } else {
            // SAFETY: the caller promises it, and it is only read.
            let (range, at) = unsafe { self.range(source, source_bytes, Access::empty())? };
            held.source = range;
            at
        };
        Ok((held, Operands { source: source_at, destination: target_at }))
    }

    /// What of the memory of a call that is copied is registered: that is in use meanwhile, too.
    fn registered(&self, call: &RawCall, shape: &RawShape) -> Held {
        let find = |address: *const u8, bytes: usize| {
            let found = (bytes > 0).then(|| self.registrations().find(address.addr(), bytes));
            found.flatten().map_or(Range::None, Range::Registered)
        };
        Held {
            source: find(call.source, shape.source_bytes),
            destination: find(call.destination, shape.destination_bytes),
        }
    }

    /// A range that is registered, or is now for a call.
    ///
    /// # Safety
    /// As of [`Communicator::start_raw`], as long as what it gives lives.
    unsafe fn range(
        &self,
        address: *mut u8,
        bytes: usize,
        access: Access,
    ) -> Result<(Range, Operand), CollectiveError> {
        if bytes == 0 {
            return Ok((Range::None, Operand::default()));
        }
        if let Some(registered) = self.registrations().find(address.addr(), bytes) {
            let operand = registered.operand(address.addr());
            return Ok((Range::Registered(registered), operand));
        }
        // SAFETY: the caller promises it.
        let region = unsafe { self.domains().register_memory(address, bytes, access)? };
        let operand = Operand::of(&region);
        Ok((Range::Own(region), operand))
    }
}

/// How many bytes a rank reads and writes, and where.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct RawShape {
    source: usize,
    source_bytes: usize,
    destination: usize,
    destination_bytes: usize,
}

impl RawShape {
    fn new(call: &RawCall, rank: u32, world: u32) -> Result<Self, CollectiveError> {
        let &RawCall { count, data_type, .. } = call;
        let too_long = CollectiveError::TooLong { count: count as u64, data_type };
        let elements = call.call.used_lengths(rank, world, count)?.ok_or(too_long.clone())?;
        let size = data_type.size() as usize;
        let bytes = elements.map(|elements| elements.checked_mul(size));
        let [Some(source_bytes), Some(destination_bytes)] = bytes else { return Err(too_long) };
        let (source, destination) = (call.source.addr(), call.destination.addr());
        for (what, address, bytes) in
            [("source", source, source_bytes), ("destination", destination, destination_bytes)]
        {
            if bytes > 0 && address == 0 {
                return Err(CollectiveError::Null { what });
            }
            if bytes > isize::MAX as usize || address.checked_add(bytes).is_none() {
                return Err(too_long);
            }
        }
        let shape = Self { source, source_bytes, destination, destination_bytes };
        let offset = |bytes: usize| rank as usize * bytes;
        let in_place = match call.call {
            Call::ReduceScatter(_) => destination == source.wrapping_add(offset(destination_bytes)),
            Call::AllGather => source == destination.wrapping_add(offset(source_bytes)),
            _ => source == destination,
        };
        match in_place || !shape.overlaps() {
            true => Ok(shape),
            false => Err(CollectiveError::Overlap),
        }
    }

    const fn overlaps(&self) -> bool {
        let &Self { source, source_bytes, destination, destination_bytes } = self;
        source_bytes > 0
            && destination_bytes > 0
            && source < destination + destination_bytes
            && destination < source + source_bytes
    }

    /// The source is a part of the destination, or all of it.
    const fn source_is_within(&self) -> bool {
        let &Self { source, source_bytes, destination, destination_bytes } = self;
        self.overlaps()
            && source >= destination
            && source + source_bytes <= destination + destination_bytes
    }
}

/// What a call keeps registered.
#[derive(Debug, Default)]
struct Held {
    source: Range,
    destination: Range,
}

#[derive(Debug, Default)]
#[expect(dead_code, reason = "held, and dropped")]
enum Range {
    #[default]
    None,
    Own(Regions),
    Registered(Arc<Registered>),
}

/// A collective that was started. Any thread may ask for its end, any number of times.
///
/// Dropped before its end, it cancels the collective.
#[must_use = "dropped, it cancels the collective"]
pub struct Handle {
    way: Way,
    sender: Arc<Sender>,
    sequence: u64,
    /// Until somebody was told the end.
    held: Mutex<Option<Held>>,
}

impl Handle {
    /// How the collective has ended, if it has. The memory is the caller's again then.
    pub fn test(&self) -> Option<Result<(), CollectiveError>> {
        self.wait(Duration::ZERO)
    }

    /// How the collective has ended, if it does within `timeout`. The memory is the caller's again then. `None`
    /// means that it goes on, as if nobody had waited.
    pub fn wait(&self, timeout: Duration) -> Option<Result<(), CollectiveError>> {
        let outcome = self.way.wait(self.sequence, timeout)?;
        let first = self.release();
        if first {
            communicator::report(&self.way, &self.sender, &outcome);
        }
        Some(outcome)
    }

    /// Waits for the end, which comes by itself, with an error when the time is up.
    pub fn finish(&self) -> Result<(), CollectiveError> {
        loop {
            if let Some(outcome) = self.wait(Duration::MAX) {
                return outcome;
            }
        }
    }

    /// Ends the collective with [`CollectiveError::Canceled`], unless it is over. Since the others cannot do without
    /// this rank, it ends the communicator: they hear that this rank is lost, and why.
    pub fn cancel(&self) {
        let error = CollectiveError::Canceled { sequence: self.sequence };
        if self.way.cancel(self.sequence, error.clone()) {
            communicator::give_up(&self.way, &self.sender, &error);
        }
    }

    /// Lets go of the memory; `true` for the first time.
    fn release(&self) -> bool {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        // With the lock held: whoever else is told the end may free the memory.
        held.take().is_some()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.cancel();
        self.release();
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    use millstream_inc::ReduceOperation::Sum;

    fn shape(call: Call, count: usize, source: usize, destination: usize) -> RawCall {
        RawCall {
            call,
            data_type: DataType::Int32,
            mode: Mode::Write,
            count,
            source: ptr::without_provenance(source),
            destination: ptr::without_provenance_mut(destination),
        }
    }

    #[test]
    fn what_may_be_the_same_memory() {
        const A: usize = 0x1000;
        // Rank 1 of 3, and 4 elements, which have 16 bytes.
        for (call, source, destination, good) in [
            (Call::AllReduce(Sum), A, A + 16, true),
            (Call::AllReduce(Sum), A, A, true),
            (Call::AllReduce(Sum), A, A + 4, false),
            (Call::AllReduce(Sum), A + 15, A, false),
            (Call::Reduce { operation: Sum, root: 1 }, A, A + 1, false),
            (Call::Reduce { operation: Sum, root: 0 }, A, A + 1, true),
            (Call::Broadcast { root: 1 }, A, A, true),
            (Call::ReduceScatter(Sum), A, A + 16, true),
            (Call::ReduceScatter(Sum), A, A, false),
            (Call::ReduceScatter(Sum), A, A + 48, true),
            (Call::AllGather, A + 16, A, true),
            (Call::AllGather, A, A, false),
            (Call::Barrier, A, A, true),
        ] {
            let outcome = RawShape::new(&shape(call, 4, source, destination), 1, 3);
            let wanted = if good { None } else { Some(CollectiveError::Overlap) };
            assert_eq!(outcome.err(), wanted, "{call:?} {source:#x} {destination:#x}");
        }
        let gather = RawShape::new(&shape(Call::AllGather, 4, A + 16, A), 1, 3).unwrap();
        assert!(gather.source_is_within());
        let scatter = RawShape::new(&shape(Call::ReduceScatter(Sum), 4, A, A + 16), 1, 3).unwrap();
        assert!(scatter.overlaps() && !scatter.source_is_within());
    }

    #[test]
    fn what_is_null_or_too_long() {
        let call = Call::AllReduce(Sum);
        let null = |what| Some(CollectiveError::Null { what });
        assert_eq!(RawShape::new(&shape(call, 1, 0, 8), 0, 1).err(), null("source"));
        assert_eq!(RawShape::new(&shape(call, 1, 8, 0), 0, 1).err(), null("destination"));
        assert_eq!(RawShape::new(&shape(call, 0, 0, 0), 0, 1).err(), None);
        let broadcast = Call::Broadcast { root: 0 };
        assert_eq!(RawShape::new(&shape(broadcast, 1, 0, 8), 1, 2).err(), None, "not read");
        for (call, count, address) in [
            (call, usize::MAX, 8),
            (call, usize::MAX / 4, 8),
            (call, 1 << 61, 8),
            (call, 2, usize::MAX - 6),
            (Call::AllGather, usize::MAX / 2, 8),
        ] {
            let outcome = RawShape::new(&shape(call, count, address, address), 0, 3);
            assert!(matches!(outcome, Err(CollectiveError::TooLong { .. })), "{outcome:?}");
        }
        let root = RawShape::new(&shape(Call::Broadcast { root: 3 }, 1, 8, 8), 0, 3);
        assert_eq!(root.err(), Some(CollectiveError::Root { root: 3, world: 3 }));
    }
}
