//! Threads of several processes that sleep until a number of shared memory changes (futex(2)).

use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while the number is this, until somebody wakes those who sleep here, and for so long at most. It may also
/// return for no reason.
pub fn sleep_while(number: &AtomicU32, value: u32, most: Duration) {
    let most = libc::timespec {
        tv_sec: most.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: most.subsec_nanos().into(),
    };
    // SAFETY: the number and the time are alive during the call. Whatever it returns, the caller looks again.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            number.as_ptr(),
            libc::FUTEX_WAIT,
            value,
            ptr::from_ref(&most),
            ptr::null::<u32>(),
            0,
        )
    };
}

/// Wakes all who sleep at this number, of all processes that map it.
pub fn wake_all(number: &AtomicU32) {
    // SAFETY: the number is there.
    unsafe { libc::syscall(libc::SYS_futex, number.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::thread;
    use std::time::Instant;

    use super::super::GroupOwner;
    use super::*;

    #[test]
    fn sleepers_wake_when_told_and_when_the_number_is_another_one() {
        let (_owner, memory) = GroupOwner::create(4096).unwrap();
        let number = memory.word(64).unwrap();
        let start = Instant::now();
        sleep_while(number, 1, Duration::from_secs(60));
        sleep_while(number, 0, Duration::from_millis(1));
        thread::scope(|scope| {
            scope.spawn(|| {
                while number.load(Ordering::SeqCst) == 0 {
                    sleep_while(number, 0, Duration::from_secs(60));
                }
            });
            number.store(1, Ordering::SeqCst);
            wake_all(number);
        });
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
