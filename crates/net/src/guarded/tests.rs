use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::{ptr, slice};

use super::*;

/// Memory of its own mapping.
struct Mapped(*mut u8, usize);

impl Mapped {
    fn new(length: usize) -> Self {
        Self::of(length, -1, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
    }

    fn of(length: usize, file: libc::c_int, flags: libc::c_int) -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        let address = unsafe { libc::mmap(ptr::null_mut(), length, access, flags, file, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        Self(address.cast(), length)
    }

    /// Takes rights to these pages away.
    fn protect(&self, page: usize, count: usize, access: libc::c_int) {
        let address = self.0.wrapping_add(page * PAGE).cast();
        // SAFETY: memory of ours, to which there are no references.
        assert_eq!(unsafe { libc::mprotect(address, count * PAGE, access) }, 0);
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: memory of ours, to which there are no references.
        unsafe { libc::munmap(self.0.cast(), self.1) };
    }
}

fn guarded(from: *const u8, to: *mut u8, length: usize, caching: Caching) -> Result<(), Fault> {
    recover().unwrap();
    // SAFETY: the ranges are in memory of `Mapped`, or of vectors without references to them.
    unsafe { copy(from, to, length, caching) }
}

#[test]
fn overlapping_ranges_are_copied_as_they_were() {
    let original: Vec<u8> = (0..1000_u32).map(|index| ((index * 7) >> 3) as u8).collect();
    for length in (0..200).chain([500, 700]) {
        for (from, to) in
            [(0, 0), (0, 1), (1, 0), (0, 15), (15, 0), (3, 70), (70, 3), (0, 64), (64, 0), (0, 256)]
        {
            let (mut ours, mut expected) = (original.clone(), original.clone());
            expected.copy_within(from..from + length, to);
            let pointer = ours.as_mut_ptr();
            let (from, to) = (pointer.wrapping_add(from), pointer.wrapping_add(to));
            guarded(from, to, length, Caching::Through).unwrap();
            assert!(ours == expected, "{length}");
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_fault_ends_the_copy_and_is_named() {
    let (good, bad) = (Mapped::new(16 * PAGE), Mapped::new(16 * PAGE));
    bad.protect(8, 1, libc::PROT_NONE);
    bad.protect(9, 1, libc::PROT_READ);
    let page = |page: usize| bad.at(page * PAGE).addr() as u64;
    for caching in [Caching::Through, Caching::Around] {
        for offset in [0, 1, 4000] {
            let length = 16 * PAGE - offset;
            // Around the caches pages are copied four at a time.
            let fault = guarded(bad.at(offset), good.at(0), length, caching).unwrap_err();
            assert_eq!(fault.address & !0xfff, page(8));
            let fault = guarded(good.at(0), bad.at(offset), length, caching).unwrap_err();
            assert!([page(8), page(9)].contains(&(fault.address & !0xfff)), "{fault}");
            // Others are as good as ever.
            guarded(good.at(offset), bad.at(0), 7 * PAGE, caching).unwrap();
        }
    }
    // From the end: page 9 can be read, and page 10 written.
    let fault = guarded(bad.at(0), bad.at(PAGE), 10 * PAGE, Caching::Through).unwrap_err();
    assert_eq!(fault.address & !0xfff, page(8));
    // At each size of a step.
    for length in [1, 8, 16, 64] {
        let fault = guarded(good.at(0), bad.at(9 * PAGE), length, Caching::Through).unwrap_err();
        assert_eq!(fault.address, page(9), "cannot be written");
        guarded(bad.at(9 * PAGE), good.at(0), length, Caching::Through).unwrap();
    }
    // SAFETY: memory of ours.
    unsafe {
        assert_eq!(probe(bad.at(9 * PAGE), 7 * PAGE), Ok(()));
        assert_eq!(probe(bad.at(7), 9 * PAGE).unwrap_err().address, page(8));
        assert_eq!(probe_write(bad.at(9 * PAGE + 7), 1).unwrap_err().address, page(9) + 7);
        assert_eq!(probe_write(bad.at(10 * PAGE), 6 * PAGE), Ok(()));
    }
    let fault = guarded(bad.at(5), good.at(0), 8 * PAGE, Caching::Through).unwrap_err();
    assert_eq!(fault.address, page(8));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_file_that_has_become_shorter_is_a_fault() {
    // SAFETY: a name, and a new descriptor that is nobody else's.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"shrinks".as_ptr(), 0)) };
    file.set_len(4 * PAGE as u64).unwrap();
    let memory = Mapped::of(4 * PAGE, file.as_raw_fd(), libc::MAP_SHARED);
    recover().unwrap();
    // SAFETY: memory of ours.
    assert_eq!(unsafe { probe(memory.at(1), 4 * PAGE - 1) }, Ok(()));
    file.set_len(2 * PAGE as u64).unwrap();
    let first = memory.at(2 * PAGE);
    // SAFETY: memory of ours.
    let fault = unsafe { probe(memory.at(1), 4 * PAGE - 1) }.unwrap_err();
    assert_eq!(fault.address, first.addr() as u64);
    // SAFETY: memory of ours.
    assert_eq!(unsafe { probe(memory.at(1), 2 * PAGE - 1) }, Ok(()));
    let other = Mapped::new(PAGE);
    assert!(guarded(other.at(0), first, PAGE, Caching::Through).is_err());
}

/// Faults elsewhere end the process, as without us.
#[cfg(target_arch = "x86_64")]
#[test]
fn other_faults_are_what_they_were() {
    use std::os::unix::process::ExitStatusExt;

    const ROLE: &str = "MILLSTREAM_TEST_FAULT";
    if std::env::var_os(ROLE).is_some() {
        let memory = Mapped::new(PAGE);
        memory.protect(0, 1, libc::PROT_NONE);
        guarded(memory.at(0), memory.at(1), 1, Caching::Through).unwrap_err();
        // SAFETY: none: it is to fault.
        unsafe { memory.at(0).write_volatile(1) };
        std::process::exit(0);
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "guarded::tests::other_faults_are_what_they_were"])
        .env(ROLE, "1")
        .output()
        .unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
}

/// Sent by the kernel, but of no instruction: it ends the process, as without us, at once.
#[cfg(target_arch = "x86_64")]
#[test]
fn memory_that_is_broken_elsewhere_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;

    const ROLE: &str = "MILLSTREAM_TEST_BROKEN_MEMORY";
    if std::env::var_os(ROLE).is_some() {
        // SAFETY: the handler of Rust's library lets such a signal pass; nobody else is in this process.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        recover().unwrap();
        // SAFETY: plain old data, of which zeros are a valid value; the process sends it to itself.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            info.si_signo = libc::SIGBUS;
            info.si_code = libc::BUS_MCEERR_AO;
            let (process, thread) = (libc::getpid(), libc::gettid());
            let call = libc::SYS_rt_tgsigqueueinfo;
            assert_eq!(libc::syscall(call, process, thread, libc::SIGBUS, &raw const info), 0);
        }
        std::process::exit(0);
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "guarded::tests::memory_that_is_broken_elsewhere_ends_the_process"])
        .env(ROLE, "1")
        .output()
        .unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
}

/// Bytes that differ, at the beginning of a page.
fn pattern(length: usize) -> (Vec<u8>, Mapped) {
    let bytes: Vec<u8> = (0..length).map(|index| ((index * 7) >> 3) as u8 | 1).collect();
    let mapped = Mapped::new(length);
    // SAFETY: memory of ours, to which there are no references.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), mapped.at(0), length) };
    (bytes, mapped)
}

#[test]
fn both_ways_copy_every_byte_and_no_other() {
    let (source, from_here) = pattern(100_000);
    for length in [0, 1, 63, 64, 4096, 16_383, 16_384, 16_447, 16_448, 50_000, 65_536, 99_000] {
        for (from, to) in
            [(0, 0), (1, 0), (0, 1), (13, 63), (64, 65), (0, 64), (64, 0), (0, 600), (9, 20)]
        {
            for caching in [Caching::Through, Caching::Around] {
                let target = Mapped::new(100_000);
                guarded(from_here.at(from), target.at(to), length, caching).unwrap();
                // SAFETY: memory of ours, which nobody writes meanwhile.
                let target = unsafe { slice::from_raw_parts(target.at(0), 100_000) };
                assert!(target[to..to + length] == source[from..from + length], "{length} {to}");
                assert!(target[..to].iter().all(|&byte| byte == 0), "{length} {to}");
                assert!(target[to + length..].iter().all(|&byte| byte == 0), "{length} {to}");
            }
        }
    }
}

#[test]
fn ranges_are_copied_together_and_no_other_byte() {
    const STEP: usize = 20_000;
    // Up to eight at once, four at once, and what is left one by one.
    for count in [1, 3, 4, 5, 8, 9, 15] {
        let (source, from) = pattern(count * STEP);
        recover().unwrap();
        for length in [0, 1, 63, 64, 127, 4096, 4097, 16_383] {
            for skew in [0, 1, 16, 63, 600] {
                // Backwards, each at another distance from a line, and all as far ahead of where they come from.
                let apart = |at| (at * STEP, (count - 1 - at) * STEP + skew * at / count);
                let alike = |at| (at * STEP, at * STEP + skew);
                for places in [(0..count).map(apart).collect(), (0..count).map(alike).collect()] {
                    let places: Vec<(usize, usize)> = places;
                    let target = Mapped::new(count * STEP + 600);
                    let range = |&(at, there): &_| (from.at(at).cast_const(), target.at(there));
                    let ranges: Vec<_> = places.iter().map(range).collect();
                    // SAFETY: within the mappings, of which there are no references meanwhile.
                    unsafe { copy_together(&ranges, length).unwrap() };
                    fence();
                    let mut expected = vec![0; count * STEP + 600];
                    for (at, there) in places {
                        expected[there..there + length].copy_from_slice(&source[at..at + length]);
                    }
                    // SAFETY: memory of ours, which nobody writes meanwhile.
                    let target = unsafe { slice::from_raw_parts(target.at(0), expected.len()) };
                    assert!(target == expected, "{count} {length} {skew}");
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_fault_ends_a_copy_of_ranges_together() {
    let (good, bad) = (Mapped::new(16 * PAGE), Mapped::new(16 * PAGE));
    bad.protect(5, 1, libc::PROT_READ);
    recover().unwrap();
    for count in [4, 8] {
        let ranges = |from: &Mapped, to: &Mapped| -> Vec<_> {
            let page = |at: usize| (3 * at + 2) % 16 * PAGE;
            (0..count).map(|at| (from.at(page(at)).cast_const(), to.at(page(at)))).collect()
        };
        // SAFETY: memory of ours, which faults at one page.
        unsafe {
            assert_eq!(copy_together(&ranges(&bad, &good), PAGE), Ok(()));
            let fault = copy_together(&ranges(&good, &bad), PAGE).unwrap_err();
            assert_eq!(fault.address, bad.at(5 * PAGE).addr() as u64);
        }
    }
}
