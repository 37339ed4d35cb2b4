//! How a rank waits until all have arrived at a barrier: it spins for a short time, then sleeps, and looks now and then
//! whether there is still something to wait for.

use std::hint;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use millstream_net::shared_memory::futex;

use super::area::Area;

/// How long a rank spins: as long as it takes to sleep and be woken.
const SPIN: Duration = Duration::from_micros(60);

/// Looks at the count between looks at the clock.
const LOOKS: u32 = 64;

/// How long a rank sleeps before it looks whether the others live. A death is noticed within this, and promised within
/// 1 s.
pub(super) const NAP: Duration = Duration::from_millis(50);

/// Whether each rank has a processor to spin on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spinning {
    others_wait: bool,
}

impl Spinning {
    pub(super) fn of(world: u32) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Self { others_wait: world as usize > processors }
    }

    /// Lets others work, or a few instructions pass.
    fn pause(self) {
        match self.others_wait {
            true => thread::yield_now(),
            false => (0..LOOKS).for_each(|_| hint::spin_loop()),
        }
    }
}

/// Waits until all have arrived at a barrier. Calls `look` before it sleeps, and each time that it wakes, with the
/// longest that it may sleep; an error of that ends the waiting.
pub(super) fn wait<E>(
    area: &Area,
    barrier: u64,
    spinning: Spinning,
    mut look: impl FnMut() -> Result<Duration, E>,
) -> Result<(), E> {
    if area.is_passed(barrier) {
        return Ok(());
    }
    let start = Instant::now();
    while start.elapsed() < SPIN {
        spinning.pause();
        if area.is_passed(barrier) {
            return Ok(());
        }
    }
    area.sleepers().fetch_add(1, Ordering::SeqCst);
    let outcome = loop {
        // Looked at after this thread was counted among the sleepers: who arrives last either sees that, or is seen.
        let arrivals = area.arrivals().load(Ordering::SeqCst);
        if area.is_passed(barrier) {
            break Ok(());
        }
        match look() {
            Ok(most) => futex::sleep_while(area.arrivals(), arrivals, most.min(NAP)),
            // What was looked for may have come meanwhile, and then nothing is wrong for this barrier.
            Err(_) if area.is_passed(barrier) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    area.sleepers().fetch_sub(1, Ordering::SeqCst);
    outcome
}
