//! The collectives, which return when they are over.

use std::ffi::{c_int, c_void};
use std::ptr;

use millstream_collective::{Call, Collective, DataType, Mode, RawCall, ReduceOperation};

use super::codes::{self, argument};
use super::communicator::{self, CommunicatorPointer};
use crate::boundary::Failure;

/// A collective as C describes it: `struct inccl_call`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawCollective {
    pub(super) collective: c_int,
    pub(super) data_type: c_int,
    pub(super) operation: c_int,
    pub(super) root: c_int,
    pub(super) mode: c_int,
    pub(super) count: usize,
    pub(super) source: *const c_void,
    pub(super) destination: *mut c_void,
}

/// What a caller who does not say it gets.
const NONE: RawCollective = RawCollective {
    collective: Collective::Barrier as c_int,
    data_type: DataType::Int32 as c_int,
    operation: ReduceOperation::Sum as c_int,
    root: 0,
    mode: 0,
    count: 0,
    source: ptr::null(),
    destination: ptr::null_mut(),
};

impl RawCollective {
    /// With numbers that are some of the header's.
    pub(super) fn parse(&self) -> Result<RawCall, Failure> {
        let &Self { collective, mode, count, source, destination, .. } = self;
        let collective = of_code("collective", collective, Collective::from_code)?;
        let call = match collective {
            Collective::AllReduce => Call::AllReduce(self.operation()?),
            Collective::Reduce => Call::Reduce { operation: self.operation()?, root: self.root()? },
            Collective::Broadcast => Call::Broadcast { root: self.root()? },
            Collective::Barrier => Call::Barrier,
            Collective::ReduceScatter => Call::ReduceScatter(self.operation()?),
            Collective::AllGather => Call::AllGather,
        };
        let data_type = match call {
            Call::Barrier => DataType::UInt8,
            _ => of_code("type", self.data_type, DataType::from_code)?,
        };
        let mode = of_code("mode", mode, |code| match code {
            0 => Some(Mode::Write),
            1 => Some(Mode::Send),
            _ => None,
        })?;
        let (source, destination) = (source.cast(), destination.cast());
        Ok(RawCall { call, data_type, mode, count, source, destination })
    }

    fn operation(&self) -> Result<ReduceOperation, Failure> {
        of_code("operation", self.operation, ReduceOperation::from_code)
    }

    fn root(&self) -> Result<u32, Failure> {
        let root = self.root;
        u32::try_from(root).map_err(|_| argument(format!("root is {root}: ranks count from 0")))
    }
}

fn of_code<T>(what: &str, code: c_int, known: impl FnOnce(u8) -> Option<T>) -> Result<T, Failure> {
    let found = u8::try_from(code).ok().and_then(known);
    found.ok_or_else(|| argument(format!("{what} is {code}, which inccl.h does not have")))
}

/// # Safety
///
/// The vectors have as many elements as the header says. Nobody changes them until this returns.
unsafe fn call(communicator: CommunicatorPointer, collective: &RawCollective) -> c_int {
    codes::code(|| {
        // SAFETY: the caller promises it.
        unsafe { communicator::call(communicator, || collective.parse())? };
        Ok(codes::SUCCESS)
    })
}

/// # Safety
///
/// As of [`call`].
unsafe fn all_reduce(
    function: &str,
    communicator: CommunicatorPointer,
    mode: Mode,
    [source, destination]: [*mut i32; 2],
    length: u32,
) {
    codes::said(function, || {
        if communicator.is_null() {
            return Err(nothing());
        }
        let all_reduce = RawCall {
            call: Call::AllReduce(ReduceOperation::Sum),
            data_type: DataType::Int32,
            mode,
            count: length as usize,
            source: source.cast(),
            destination: destination.cast(),
        };
        // SAFETY: the caller promises it.
        unsafe { communicator::call(communicator, || Ok(all_reduce)) }
    });
}

/// There is no communicator, and the reason is known, unless its maker did not look.
fn nothing() -> Failure {
    const NULL: &str = "the communicator is null";
    let before = crate::last_error::text();
    match before.is_empty() || before.starts_with(NULL) {
        true => argument(if before.is_empty() { NULL } else { &before }),
        false => argument(format!("{NULL}; what failed before this: {before}")),
    }
}

/// # Safety
///
/// `src_data` and `dst_data` have `len` elements each, which nobody changes until this returns.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_allreduce_write(
    communicator: CommunicatorPointer,
    src_data: *mut i32,
    len: u32,
    dst_data: *mut i32,
) {
    let vectors = [src_data, dst_data];
    // SAFETY: the caller promises it.
    unsafe { all_reduce("inccl_allreduce_write", communicator, Mode::Write, vectors, len) };
}

/// # Safety
///
/// As of [`inccl_allreduce_write`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_allreduce_sendrecv(
    communicator: CommunicatorPointer,
    src_data: *mut i32,
    len: u32,
    dst_data: *mut i32,
) {
    let vectors = [src_data, dst_data];
    // SAFETY: the caller promises it.
    unsafe { all_reduce("inccl_allreduce_sendrecv", communicator, Mode::Send, vectors, len) };
}

/// # Safety
///
/// As of [`call`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_allreduce_v2(
    communicator: CommunicatorPointer,
    source: *const c_void,
    destination: *mut c_void,
    count: usize,
    data_type: c_int,
    operation: c_int,
) -> c_int {
    let collective = Collective::AllReduce as c_int;
    let it = RawCollective { collective, data_type, operation, count, source, destination, ..NONE };
    // SAFETY: the caller promises it.
    unsafe { call(communicator, &it) }
}

/// # Safety
///
/// As of [`call`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_reduce_v2(
    communicator: CommunicatorPointer,
    source: *const c_void,
    destination: *mut c_void,
    count: usize,
    data_type: c_int,
    operation: c_int,
    root: c_int,
) -> c_int {
    let collective = Collective::Reduce as c_int;
    let it = RawCollective {
        collective,
        data_type,
        operation,
        root,
        count,
        source,
        destination,
        ..NONE
    };
    // SAFETY: the caller promises it.
    unsafe { call(communicator, &it) }
}

/// # Safety
///
/// As of [`call`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_broadcast_v2(
    communicator: CommunicatorPointer,
    source: *const c_void,
    destination: *mut c_void,
    count: usize,
    data_type: c_int,
    root: c_int,
) -> c_int {
    let collective = Collective::Broadcast as c_int;
    let it = RawCollective { collective, data_type, root, count, source, destination, ..NONE };
    // SAFETY: the caller promises it.
    unsafe { call(communicator, &it) }
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn inccl_barrier_v2(communicator: CommunicatorPointer) -> c_int {
    // SAFETY: a barrier has no vectors.
    unsafe { call(communicator, &NONE) }
}

/// # Safety
///
/// As of [`call`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_reducescatter_v2(
    communicator: CommunicatorPointer,
    source: *const c_void,
    destination: *mut c_void,
    count: usize,
    data_type: c_int,
    operation: c_int,
) -> c_int {
    let collective = Collective::ReduceScatter as c_int;
    let it = RawCollective { collective, data_type, operation, count, source, destination, ..NONE };
    // SAFETY: the caller promises it.
    unsafe { call(communicator, &it) }
}

/// # Safety
///
/// As of [`call`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn inccl_allgather_v2(
    communicator: CommunicatorPointer,
    source: *const c_void,
    destination: *mut c_void,
    count: usize,
    data_type: c_int,
) -> c_int {
    let collective = Collective::AllGather as c_int;
    let it = RawCollective { collective, data_type, count, source, destination, ..NONE };
    // SAFETY: the caller promises it.
    unsafe { call(communicator, &it) }
}
