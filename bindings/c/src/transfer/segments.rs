//! Segments are opened by name, and closed.

use std::ffi::{c_char, c_int};

use millstream_transfer::SegmentId;

use super::engine::{Call, Engine, OpenSegment};
use super::layout::EnginePointer;
use crate::boundary::{self, Failure, code};

/// # Safety
///
/// `segment_name` is null or ends with a zero, and nobody changes it during the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn openSegment(
    engine: EnginePointer,
    segment_name: *const c_char,
) -> i32 {
    boundary::value(-1, || {
        let engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        open(&engine, unsafe { name(segment_name) }?)
    })
}

/// # Safety
///
/// `segment_name` is null or ends with a zero, and nobody changes it during the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn openSegmentNoCache(
    engine: EnginePointer,
    segment_name: *const c_char,
) -> i32 {
    boundary::value(-1, || {
        let engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        let name = unsafe { name(segment_name) }?;
        let known = find(&engine, name);
        let id = open(&engine, name)?;
        if let Some(id) = known {
            refresh(&engine, id)?;
        }
        Ok(id)
    })
}

/// Closed when it was closed as often as it was opened: threads that open the same segment have the same number.
#[unsafe(no_mangle)]
pub(super) extern "C" fn closeSegment(engine: EnginePointer, segment_id: i32) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        let id = SegmentId(segment_id as u32);
        if id == SegmentId::LOCAL {
            return Ok(());
        }
        let mut segments = engine.segments();
        let open = segments.get_mut(&id);
        let open = open.ok_or_else(|| {
            Failure::invalid(format!("segment {segment_id} is not open, or was closed"))
        })?;
        open.times -= 1;
        if open.times > 0 {
            return Ok(());
        }
        segments.remove(&id);
        // With the lock held: who opens it again meanwhile gets another number.
        close(&engine, id)
    })
}

/// Closes a segment that was opened by this name, however often it was.
///
/// # Safety
///
/// `segment_name` is null or ends with a zero, and nobody changes it during the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn removeLocalSegment(
    engine: EnginePointer,
    segment_name: *const c_char,
) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        let name = unsafe { name(segment_name) }?;
        if name == engine.transfer.name() {
            return Err(Failure::invalid("the engine's own segment goes with the engine"));
        }
        let mut segments = engine.segments();
        let id = segments.iter().find(|(_, open)| open.name == name).map(|(id, _)| *id);
        match id {
            Some(id) => {
                segments.remove(&id);
                close(&engine, id)
            }
            None => Ok(()),
        }
    })
}

/// Asks for the descriptors of all open segments again.
#[unsafe(no_mangle)]
pub(super) extern "C" fn syncSegmentCache(engine: EnginePointer) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        let ids: Vec<_> = engine.segments().keys().copied().collect();
        // All of them, also when one cannot be asked.
        let results: Vec<_> = ids.into_iter().map(|id| refresh(&engine, id)).collect();
        results.into_iter().collect()
    })
}

/// Connections are made when they are needed, or a segment is opened: nothing to do.
///
/// # Safety
///
/// `segment_name` is null or ends with a zero, and nobody changes it during the call.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn warmupEfaSegment(
    engine: EnginePointer,
    segment_name: *const c_char,
) -> c_int {
    boundary::negative(|| {
        let _engine = Call::on(engine)?;
        // SAFETY: the caller promises it.
        unsafe { boundary::optional("segment_name", segment_name) }.map(drop)
    })
}

/// The name of a segment: slashes before it do not count.
///
/// # Safety
///
/// As of [`boundary::text`].
unsafe fn name<'a>(segment_name: *const c_char) -> Result<&'a str, Failure> {
    // SAFETY: the caller promises it.
    let name = unsafe { boundary::text("segment_name", segment_name) }?.trim_start_matches('/');
    match name {
        "" => Err(Failure::invalid("segment_name is empty")),
        name => Ok(name),
    }
}

fn find(engine: &Engine, name: &str) -> Option<SegmentId> {
    engine.segments().iter().find(|(_, open)| open.name == name).map(|(id, _)| *id)
}

fn open(engine: &Engine, name: &str) -> Result<i32, Failure> {
    loop {
        let segment = engine.transfer.open_segment(name);
        let segment = segment.map_err(|error| Failure::of(error.code(), &error))?;
        let id = segment.id();
        let number = i32::try_from(id.0)
            .map_err(|_| Failure::new(code::TOO_MANY_REQUESTS, "too many segments were opened"))?;
        if id == SegmentId::LOCAL {
            return Ok(number);
        }
        let mut segments = engine.segments();
        // Another thread may have closed it just now, which it does with this lock held.
        if engine.transfer.paths(id).is_err() {
            continue;
        }
        let open = segments.entry(id);
        let open = open.or_insert_with(|| OpenSegment { name: name.to_owned(), times: 0 });
        open.times += 1;
        return Ok(number);
    }
}

fn close(engine: &Engine, id: SegmentId) -> Result<(), Failure> {
    engine.transfer.close_segment(id).map_err(|error| Failure::of(error.code(), &error))
}

fn refresh(engine: &Engine, id: SegmentId) -> Result<(), Failure> {
    let refreshed = engine.transfer.refresh_segment(id);
    refreshed.map_err(|error| Failure::new(code::METADATA, error))
}
