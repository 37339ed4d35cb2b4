//! What an engine tells of its NICs and of the ways to its segments.

use std::ffi::{c_char, c_int};
use std::fmt::Write;

use millstream_transfer::SegmentId;
use serde_json::json;

use super::engine::{Call, Engine};
use super::layout::{EnginePointer, RawNicLoad};
use crate::boundary::{self, Failure};

/// The names of the NICs. How much is under way on each is not told: 0.
///
/// # Safety
///
/// `count` is null or may be read and written; `stats` is null, or `count` of its elements may be written.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn getNicLoadStats(
    engine: EnginePointer,
    stats: *mut RawNicLoad,
    count: *mut usize,
) -> c_int {
    boundary::negative(|| {
        if count.is_null() || stats.is_null() {
            return Err(Failure::invalid("stats or count is null"));
        }
        let engine = Call::on(engine)?;
        let devices = engine.transfer.devices();
        // SAFETY: it is not null, and the caller promises the rest.
        let room = unsafe { count.read() };
        for (index, name) in devices.iter().take(room).enumerate() {
            let mut load =
                RawNicLoad { device_name: [0; 64], inflight_bytes: 0, ewma_bandwidth_bps: 0.0 };
            let (place, length) = (load.device_name.as_mut_ptr(), load.device_name.len());
            // SAFETY: so long is the place. There is room for this one, the caller says.
            unsafe {
                boundary::write_text(place, length, name)?;
                stats.add(index).write(load);
            }
        }
        // SAFETY: as above.
        unsafe { count.write(devices.len()) };
        Ok(())
    })
}

/// # Safety
///
/// `buf_out` is null, or `buf_len` bytes may be written there.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn showLinks(
    engine: EnginePointer,
    buf_out: *mut c_char,
    buf_len: usize,
    json: c_int,
) -> c_int {
    boundary::negative(|| {
        let engine = Call::on(engine)?;
        let text = if json == 0 { readable(&engine) } else { as_json(&engine) };
        // SAFETY: the caller promises it.
        unsafe { boundary::write_text(buf_out, buf_len, &text) }
    })
}

/// The open segments, by number, and the transport that takes requests to each, if one does.
fn links(engine: &Engine) -> Vec<(SegmentId, String, Option<&'static str>)> {
    let open: Vec<_> = engine.segments().iter().map(|(id, it)| (*id, it.name.clone())).collect();
    let path = |id| {
        let paths = engine.transfer.paths(id).unwrap_or_default();
        paths.iter().find(|path| path.chosen).map(|path| path.transport)
    };
    let mut links: Vec<_> = open.into_iter().map(|(id, name)| (id, name, path(id))).collect();
    links.sort_unstable();
    links
}

fn as_json(engine: &Engine) -> String {
    let segments: Vec<_> = links(engine)
        .into_iter()
        .map(|(id, name, path)| json!({ "id": id.0, "name": name, "transport": path }))
        .collect();
    let transports: Vec<_> =
        engine.transfer.transports().into_iter().map(|(name, _)| name).collect();
    let nics: Vec<_> =
        engine.transfer.devices().into_iter().map(|name| json!({ "name": name })).collect();
    json!({ "local_nics": nics, "transports": transports, "segments": segments }).to_string()
}

fn readable(engine: &Engine) -> String {
    let list = |names: Vec<String>| if names.is_empty() { "none".into() } else { names.join(", ") };
    let transports = engine.transfer.transports().into_iter().map(|(name, _)| name.to_owned());
    let nics = list(engine.transfer.devices());
    let mut text = format!("Local NICs: {nics}\nTransports: {}\n", list(transports.collect()));
    for (id, name, path) in links(engine) {
        // Writing to a text does not fail.
        let _ = writeln!(text, "Segment {} {name}: {}", id.0, path.unwrap_or("no way there"));
    }
    text
}
