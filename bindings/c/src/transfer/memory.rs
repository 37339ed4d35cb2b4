//! Memory is registered and unregistered.

use std::ffi::{c_char, c_int, c_void};

use millstream_transfer::{ANY_LOCATION, RegisterError};

use super::engine::{Call, Engine};
use super::layout::{EnginePointer, RawBuffer};
use crate::boundary::{self, Failure};

/// # Safety
///
/// `location` is null or ends with a zero. Until it is unregistered, the memory is there, and is changed by nobody
/// while a transfer reads it, or read while one writes it.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn registerLocalMemory(
    engine: EnginePointer,
    addr: *mut c_void,
    length: usize,
    location: *const c_char,
    remote_accessible: c_int,
) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        let location = unsafe { boundary::optional("location", location) }?;
        // SAFETY: the caller promises it.
        unsafe { register(&engine, &[(addr.cast(), length)], location, remote_accessible != 0) }
    })
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn unregisterLocalMemory(engine: EnginePointer, addr: *mut c_void) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        check_own(&engine, &[addr.cast()])?;
        engine.transfer.unregister_memory(addr.cast()).map_err(failure)
    })
}

/// # Safety
///
/// As of [`registerLocalMemory`], for each buffer; `buffer_list` is null, or has so many.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn registerLocalMemoryBatch(
    engine: EnginePointer,
    buffer_list: *mut RawBuffer,
    buffer_len: usize,
    location: *const c_char,
) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        let buffers = unsafe { boundary::array("buffer_list", buffer_list, buffer_len) }?;
        // SAFETY: the caller promises it.
        let location = unsafe { boundary::optional("location", location) }?;
        let pieces: Vec<_> = buffers.iter().map(|it| (it.addr.cast(), it.length)).collect();
        // SAFETY: the caller promises it.
        unsafe { register(&engine, &pieces, location, true) }
    })
}

/// # Safety
///
/// `addr_list` is null, or has so many addresses.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn unregisterLocalMemoryBatch(
    engine: EnginePointer,
    addr_list: *mut *mut c_void,
    addr_len: usize,
) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        let addresses = unsafe { boundary::array("addr_list", addr_list, addr_len) }?;
        let addresses: Vec<*mut u8> = addresses.iter().map(|address| address.cast()).collect();
        check_own(&engine, &addresses)?;
        engine.transfer.unregister_memory_batch(&addresses).map_err(failure)
    })
}

/// # Safety
///
/// As of [`millstream_transfer::TransferEngine::register_memory`], for each of them.
unsafe fn register(
    engine: &Engine,
    pieces: &[(*mut u8, usize)],
    location: Option<&str>,
    remote: bool,
) -> Result<(), Failure> {
    let location = location.unwrap_or(ANY_LOCATION);
    // SAFETY: the caller promises it.
    let register = || unsafe { engine.transfer.register_memory_batch(pieces, location, remote) };
    let registered = match register() {
        // What was borrowed for a transfer that is over is no memory of the caller's.
        Err(RegisterError::Overlap { .. }) if engine.give_back_borrowed() => register(),
        result => result,
    };
    registered.map_err(failure)
}

/// Refuses what was borrowed for transfers: the caller has not registered it.
fn check_own(engine: &Engine, addresses: &[*mut u8]) -> Result<(), Failure> {
    let mut addresses = addresses.iter().map(|it| it.addr() as u64);
    match addresses.find(|&address| engine.borrowed.needs(address)) {
        Some(address) => Err(failure(RegisterError::Unknown { address })),
        None => Ok(()),
    }
}

fn failure(error: RegisterError) -> Failure {
    Failure::of(error.code(), &error)
}
