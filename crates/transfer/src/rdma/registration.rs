//! Registration with several devices.

use std::sync::Arc;
use std::thread;

use millstream_net::own_memory::populate;
use millstream_verbs::{Access, MemoryRegion, Provider};

use super::device::LocalDevice;
use crate::memory::RawMemory;

/// Memory from this length on gets its pages before devices pin them, on several processors where there are
/// so many: a device does that page after page.
const POPULATED: u64 = 4 << 30;
const PROCESSORS: usize = 4;
const MAX_THREADS: usize = 16;

/// Registers memory with all devices, in their order: with all at once if `parallel`, or if that is
/// `None` and the memory is long.
pub(super) fn register(
    devices: &[Arc<LocalDevice>],
    memory: &RawMemory,
    access: Access,
    parallel: Option<bool>,
) -> Result<Vec<MemoryRegion>, String> {
    let one = |device: &Arc<LocalDevice>| {
        let failed = |error| format!("device {}: {error}", device.device.name());
        memory.register(&device.domain, access).map_err(failed)
    };
    let pinned = || devices.iter().any(|it| it.device.provider() == Provider::Ibverbs);
    // Reads files of the system: only for what takes longer.
    let processors = match memory.length() >= POPULATED && pinned() {
        true => thread::available_parallelism().map_or(1, usize::from),
        false => 1,
    };
    let populated = processors >= PROCESSORS;
    if populated
        && let Err(error) = populate(memory.address(), memory.length(), processors.min(MAX_THREADS))
    {
        tracing::debug!(%error, "memory is registered without all of its pages");
    }
    match devices.len() >= 2 && parallel.unwrap_or(populated) {
        true => at_once(devices, one),
        false => devices.iter().map(one).collect(),
    }
}

/// Does this with each device on a thread of its own. The results are in the order of the devices.
fn at_once<D: Sync, R: Send>(
    devices: &[D],
    one: impl Fn(&D) -> Result<R, String> + Copy + Send,
) -> Result<Vec<R>, String> {
    thread::scope(|scope| {
        let begin = |device| {
            let thread = thread::Builder::new().name("register".to_owned());
            thread.spawn_scoped(scope, move || one(device))
        };
        let threads: Vec<_> = devices.iter().map(|device| (device, begin(device))).collect();
        let end = |(device, thread): (_, std::io::Result<thread::ScopedJoinHandle<'_, _>>)| {
            match thread {
                Ok(thread) => thread.join().unwrap_or_else(|_| Err("a panic".to_owned())),
                // For want of threads.
                Err(_) => one(device),
            }
        };
        // All of them end, whatever one of them says.
        threads.into_iter().map(end).collect::<Vec<_>>().into_iter().collect()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn several_devices_register_at_once() {
        let devices = [3, 1, 4, 1];
        let all = Barrier::new(devices.len());
        let one = |device: &u32| {
            // Passed by all of them together, or never.
            all.wait();
            if *device == 9 { Err("nine".to_owned()) } else { Ok(device * 10) }
        };
        assert_eq!(at_once(&devices, one), Ok(vec![30, 10, 40, 10]));
        assert_eq!(at_once(&[3, 9, 4, 1], one), Err("nine".to_owned()));
    }
}
