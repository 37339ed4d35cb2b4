//! Registration with several devices.

use std::sync::Arc;
use std::thread;

use millstream_net::ends_between_forks;
use millstream_net::own_memory::{page_length, populate};
use millstream_verbs::{Access, MemoryRegion, Provider};

use super::device::LocalDevice;
use crate::memory::RawMemory;

/// Memory from this length on gets its pages before devices pin them, on several processors where there are
/// so many: a device does that page after page.
const POPULATED: u64 = 4 << 30;
const PROCESSORS: usize = 4;
const MAX_THREADS: usize = 16;

/// The most regions of a device that a piece of memory can be. A descriptor has no more buffers.
const MAX_REGIONS: u64 = 65_536;

/// How long a region can be on each of these devices, and may be: whole pages, and one at least.
pub(super) fn longest_region(devices: &[Arc<LocalDevice>], most: u64) -> u64 {
    let longest = devices.iter().map(|it| it.device.attributes().max_memory_region_length);
    let longest = longest.min().unwrap_or(u64::MAX).min(most);
    let page = page_length();
    (longest / page).max(1) * page
}

/// Registers memory with all devices, in their order: with all at once if `parallel`, or if that is
/// `None` and the memory is long. Each has it as regions of at most so many bytes. When one of them cannot
/// be registered, none is.
pub(super) fn register(
    devices: &[Arc<LocalDevice>],
    memory: &RawMemory,
    access: Access,
    parallel: Option<bool>,
    longest: u64,
) -> Result<Vec<Vec<MemoryRegion>>, String> {
    let count = memory.length().div_ceil(longest);
    if count > MAX_REGIONS {
        return Err(format!(
            "it would be {count} regions of {longest} bytes, and may be {MAX_REGIONS} \
             (rdma.max_region_length)"
        ));
    }
    let one = |device: &Arc<LocalDevice>| -> Result<Vec<MemoryRegion>, String> {
        let part = |index: u64| {
            let first = index * longest;
            let region =
                memory.register(first..first.saturating_add(longest), &device.domain, access);
            region.map_err(|error| {
                let of = if count > 1 {
                    format!(", region {} of {count}", index + 1)
                } else {
                    String::new()
                };
                format!("device {}{of}: {error}", device.device.name())
            })
        };
        (0..count).map(part).collect()
    };
    let pinned = || devices.iter().any(|it| it.device.provider() == Provider::Ibverbs);
    // Reads files of the system: only for what takes longer.
    let processors = match memory.length() >= POPULATED && memory.gpu().is_none() && pinned() {
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
            thread.spawn_scoped(scope, ends_between_forks(move || one(device)))
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
    use std::sync::atomic::AtomicU8;
    use std::sync::{Barrier, Weak};

    use super::*;
    use crate::RdmaConfig;

    /// The device has room for all regions but the last ones.
    #[test]
    fn regions_that_were_registered_before_one_that_cannot_be_go_again() {
        static BYTES: [AtomicU8; 5 * 4096] = [const { AtomicU8::new(0) }; 5 * 4096];
        let address = [127, 96, std::process::id() as u8, 1].into();
        let config = RdmaConfig::new(&[address]);
        let device = Arc::new(LocalDevice::open_all(&config, &Weak::new()).unwrap().remove(0));
        let memory = RawMemory::of(&BYTES);
        let (access, limit) = (Access::LOCAL_WRITE, device.device.attributes().max_memory_regions);
        let one = || memory.register(0..1, &device.domain, access);
        let mut others: Vec<_> = (0..limit - 4).map(|_| one().unwrap()).collect();
        let all = || register(&[Arc::clone(&device)], &memory, access, None, 4096);
        let error = all().unwrap_err();
        assert!(error.contains("region 5 of 5"), "{error}");
        others.extend((0..4).map(|_| one().unwrap()));
        assert!(one().is_err(), "those four were all that there was room for");
        others.truncate(limit - 5);
        let regions = all().unwrap();
        assert_eq!(regions.iter().map(Vec::len).collect::<Vec<_>>(), [5]);
    }

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
