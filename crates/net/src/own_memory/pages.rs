//! Memory of this process alone, for much that is copied.

use std::io;
use std::ptr::{self, NonNull};

use super::{page_length, populate};

/// Bytes of a huge page on most machines. Where they are longer, there may be none in it.
const HUGE: usize = 2 << 20;

/// Zeroed memory that begins with a page. All of its pages are there, which are huge ones where it is long
/// enough and the system gives any: what is copied here and there then finds its translations in the
/// processor.
#[derive(Debug)]
pub struct Pages {
    pointer: NonNull<u8>,
    length: usize,
    /// Bytes that are mapped: whole pages.
    mapped: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Pages {}
// SAFETY: as above; it gives out no references.
unsafe impl Sync for Pages {}

impl Pages {
    /// So many bytes, at least one.
    pub fn new(length: usize) -> io::Result<Self> {
        let page = page_length() as usize;
        let mapped =
            length.checked_next_multiple_of(page).ok_or(io::ErrorKind::OutOfMemory)?.max(page);
        let huge = mapped >= HUGE;
        // With room to begin where a huge page can.
        let room = if huge { HUGE - page } else { 0 };
        let all = mapped.checked_add(room).ok_or(io::ErrorKind::OutOfMemory)?;
        let first = map(all)?;
        let before = if huge { first.addr().wrapping_neg() % HUGE } else { 0 };
        let start = first.wrapping_add(before);
        unmap(first, before);
        unmap(start.wrapping_add(mapped), room - before);
        let pointer = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        let pages = Self { pointer, length, mapped };
        if huge {
            // SAFETY: advice on our own mapping. Where the system gives none, that is fine too.
            unsafe { libc::madvise(start.cast(), mapped, libc::MADV_HUGEPAGE) };
        }
        // Kernels before 5.14 give them when they are written.
        if let Err(error) = populate(start.expose_provenance() as u64, mapped as u64, 1) {
            tracing::debug!(%error, length, "memory has its pages only when it is used");
        }
        Ok(pages)
    }

    /// Its first byte.
    pub const fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    /// Bytes.
    pub const fn length(&self) -> usize {
        self.length
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        unmap(self.pointer.as_ptr(), self.mapped);
    }
}

fn map(length: usize) -> io::Result<*mut u8> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, which touches none that is there.
    let pointer = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, -1, 0) };
    match pointer {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        pointer => Ok(pointer.cast()),
    }
}

/// Of a mapping of [`map`], which nobody uses any more.
fn unmap(first: *mut u8, length: usize) {
    if length > 0 {
        // SAFETY: whole pages of our own mapping, to which there is no pointer or reference any more.
        unsafe { libc::munmap(first.cast(), length) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::{Defect, Inspector, nodes};
    use super::*;

    #[test]
    fn all_of_it_is_there_and_zero_and_begins_where_a_page_can() {
        // Since Linux 5.14.
        let populates = populate(ptr::from_mut(&mut 0_u8).expose_provenance() as u64, 1, 1);
        let populates =
            !matches!(populates, Err(error) if error.kind() == io::ErrorKind::InvalidInput);
        for (length, aligned) in [(1, 4096), (5000, 4096), (HUGE, HUGE), (2 * HUGE + 12_345, HUGE)]
        {
            let pages = Pages::new(length).unwrap();
            assert_eq!((pages.length(), pages.pointer().addr().get() % aligned), (length, 0));
            let first = pages.pointer().addr().get() as u64;
            let addresses: Vec<_> = (0..length as u64).step_by(4096).map(|at| first + at).collect();
            match nodes(&addresses) {
                Ok(found) => assert!(!populates || found.iter().all(Option::is_some), "{length}"),
                Err(error) => eprintln!("not seen whether it is there: move_pages: {error}"),
            }
            let byte = |at| pages.pointer().as_ptr().wrapping_add(at);
            // SAFETY: inside the memory, which nobody else uses.
            let all: Vec<u8> = (0..length).map(|at| unsafe { byte(at).read() }).collect();
            assert!(all.iter().all(|&byte| byte == 0), "{length}");
            // SAFETY: as above.
            unsafe { byte(length - 1).write(7) };
        }
    }

    #[test]
    fn more_than_there_is_room_for_is_refused() {
        assert!(Pages::new(usize::MAX).is_err());
        assert!(Pages::new(usize::MAX - HUGE).is_err());
        assert!(Pages::new(1 << 60).is_err());
    }

    /// By what the kernel says of the mapping.
    #[test]
    fn huge_pages_are_asked_for_where_they_fit() {
        let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        if !enabled.is_ok_and(|enabled| !enabled.contains("[never]")) {
            return eprintln!("skipped: transparent huge pages are off");
        }
        for (length, expected) in [(HUGE / 2, false), (HUGE - 1, true), (4 * HUGE, true)] {
            let pages = Pages::new(length).unwrap();
            let flags = flags_at(pages.pointer().addr().get());
            assert_eq!(flags.split(' ').any(|flag| flag == "hg"), expected, "{length}: {flags}");
        }
    }

    /// The flags of the mapping that has an address.
    fn flags_at(address: usize) -> String {
        let all = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in all.lines() {
            if let Some((start, rest)) = line.split_once('-')
                && let Ok(start) = usize::from_str_radix(start, 16)
            {
                let end = rest.split(' ').next().unwrap();
                inside = (start..usize::from_str_radix(end, 16).unwrap()).contains(&address);
            } else if inside && let Some(flags) = line.strip_prefix("VmFlags: ") {
                return flags.to_owned();
            }
        }
        panic!("nothing is mapped at {address:#x}");
    }

    #[test]
    fn what_is_dropped_is_not_mapped_any_more() {
        let gone = || {
            let pages = Pages::new(2 * HUGE).unwrap();
            let (first, page) = (pages.pointer().addr().get() as u64, page_length());
            drop(pages);
            let mut inspector = Inspector::new().unwrap();
            let mut unmapped = |at| {
                let defect = inspector.first_defect(at, 1).unwrap();
                defect.is_some_and(|(_, defect)| defect == Defect::Unmapped)
            };
            unmapped(first) && unmapped(first + 2 * HUGE as u64 - page)
        };
        // Another thread may map something there meanwhile.
        assert!((0..100).any(|_| gone()));
    }
}
