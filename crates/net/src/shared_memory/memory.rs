//! Memory that several processes map: memfds (memfd_create(2)), sealed so that no process can take
//! pages away that another one accesses.

use std::ffi::CStr;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};

/// Memory of this process that peers can map. Zeroed and page-aligned.
///
/// Dropping it takes its pages away from peers that still map it: they read zeros.
#[derive(Debug)]
pub struct SharedMemory {
    mapping: Mapping,
    file: OwnedFd,
}

impl SharedMemory {
    /// So many bytes, at least one.
    pub fn new(length: usize) -> io::Result<Self> {
        let file = memfd(c"millstream", length)?;
        let mapping = Mapping::new(file.as_fd(), length, Access::ReadWrite)?;
        mapping.ask_for_huge_pages();
        seal(file.as_fd(), libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL)?;
        Ok(Self { mapping, file })
    }

    /// Its first byte.
    pub fn pointer(&self) -> NonNull<u8> {
        self.mapping.pointer()
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.mapping.length()
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let (mode, length) =
            (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, self.length() as libc::off_t);
        // SAFETY: no pointers. The pages go, and nobody has a reference to their bytes.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, 0, length) };
    }
}

/// How a mapping may be used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Access {
    Read,
    ReadWrite,
}

/// A shared mapping of a file's first bytes. Other processes may change them at any time, so there are
/// no references to them but to atomics.
#[derive(Debug)]
pub(super) struct Mapping {
    pointer: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; it gives out no references.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Of a file that has so many bytes and keeps them (see [`adopt`]).
    pub(super) fn new(file: BorrowedFd<'_>, length: usize, access: Access) -> io::Result<Self> {
        let protection = match access {
            Access::Read => libc::PROT_READ,
            Access::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: a new mapping, which touches none that is there.
        let pointer = unsafe {
            libc::mmap(ptr::null_mut(), length, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if pointer == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let pointer = NonNull::new(pointer.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { pointer, length })
    }

    /// Maps the first bytes of a file that another process sent: all, but no more than so many. Believes
    /// nothing that it may have said of it.
    ///
    /// What must hold so that no access raises SIGBUS: the file cannot shrink, and its pages do not come
    /// from a pool that can be empty, as huge pages do, or from a file system that another process
    /// serves. So it is a sealed file of tmpfs.
    pub(super) fn adopt(file: BorrowedFd<'_>, most: usize, access: Access) -> io::Result<Self> {
        let refused = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        // SAFETY: no pointers.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return refused("the file is not sealed against shrinking");
        }
        // SAFETY: zeros are a valid value.
        let mut system: libc::statfs = unsafe { mem::zeroed() };
        // SAFETY: `system` is borrowed exclusively.
        if unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut system) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if system.f_type != libc::TMPFS_MAGIC {
            return refused("the file is not of tmpfs");
        }
        // SAFETY: zeros are a valid value.
        let mut status: libc::stat = unsafe { mem::zeroed() };
        // SAFETY: `status` is borrowed exclusively.
        if unsafe { libc::fstat(file.as_raw_fd(), &raw mut status) } != 0 {
            return Err(io::Error::last_os_error());
        }
        match usize::try_from(status.st_size) {
            Ok(length) if length > 0 => Self::new(file, length.min(most), access),
            _ => refused("the file is empty"),
        }
    }

    pub(super) const fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    pub(super) const fn length(&self) -> usize {
        self.length
    }

    /// Where `length` bytes at `offset` are; `None` where they are not all in the mapping.
    pub(super) fn range(&self, offset: u64, length: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(length)?;
        (end <= self.length).then(|| self.pointer.as_ptr().wrapping_add(offset))
    }

    pub(super) fn ask_for_huge_pages(&self) {
        // SAFETY: advice on our own mapping. Where the system gives none, that is fine too.
        unsafe { libc::madvise(self.pointer.as_ptr().cast(), self.length, libc::MADV_HUGEPAGE) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which nobody has a pointer or reference any more.
        unsafe { libc::munmap(self.pointer.as_ptr().cast(), self.length) };
    }
}

/// A new file in memory that can be sealed.
pub(super) fn memfd(name: &CStr, length: usize) -> io::Result<OwnedFd> {
    let size = libc::off_t::try_from(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a C string, and a descriptor that is nobody else's.
    let file = unsafe {
        match libc::memfd_create(name.as_ptr(), flags) {
            ..0 => return Err(io::Error::last_os_error()),
            descriptor => OwnedFd::from_raw_fd(descriptor),
        }
    };
    // SAFETY: no pointers.
    match unsafe { libc::ftruncate(file.as_raw_fd(), size) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Adds these seals (fcntl(2)).
pub(super) fn seal(file: BorrowedFd<'_>, seals: libc::c_int) -> io::Result<()> {
    // SAFETY: no pointers.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn two_mappings_show_the_same_bytes_and_the_file_keeps_its_length() {
        let memory = SharedMemory::new(10_000).unwrap();
        let mapping = Mapping::adopt(memory.file(), 20_000, Access::ReadWrite).unwrap();
        assert_eq!(mapping.length(), 10_000);
        let part = Mapping::adopt(memory.file(), 5000, Access::ReadWrite).unwrap();
        assert_eq!(part.length(), 5000);
        // SAFETY: both pointers are to 10,000 bytes that nothing else uses.
        unsafe {
            mapping.pointer().add(9_999).write(7);
            assert_eq!(memory.pointer().add(9_999).read(), 7);
        }
        let file = File::from(memory.file.try_clone().unwrap());
        for length in [0, 9_999, 10_001] {
            let error = file.set_len(length).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{length}");
        }
        assert!(seal(memory.file(), libc::F_SEAL_WRITE).is_err(), "no seal can be added");
        drop(memory);
        // SAFETY: the mapping still has its pages, which are new ones.
        assert_eq!(unsafe { mapping.pointer().add(9_999).read() }, 0, "taken away");
    }

    #[test]
    fn ranges_are_checked_against_the_mapping() {
        let memory = SharedMemory::new(100).unwrap();
        for (offset, length, inside) in [
            (0, 100, true),
            (99, 1, true),
            (100, 0, true),
            (99, 2, false),
            (101, 0, false),
            (u64::MAX, 2, false),
            (2, usize::MAX, false),
        ] {
            assert_eq!(memory.mapping.range(offset, length).is_some(), inside, "{offset} {length}");
        }
    }

    #[test]
    fn files_that_could_raise_sigbus_are_refused() {
        let adopt =
            |file: BorrowedFd<'_>| Mapping::adopt(file, 1, Access::Read).unwrap_err().to_string();
        let unsealed = memfd(c"test", 4096).unwrap();
        assert!(adopt(unsealed.as_fd()).contains("not sealed"));
        seal(unsealed.as_fd(), libc::F_SEAL_GROW).unwrap();
        assert!(adopt(unsealed.as_fd()).contains("not sealed"));
        let empty = memfd(c"test", 0).unwrap();
        seal(empty.as_fd(), libc::F_SEAL_SHRINK).unwrap();
        assert!(adopt(empty.as_fd()).contains("empty"));
        let ordinary = File::open("/proc/self/exe").unwrap();
        assert!(adopt(ordinary.as_fd()).contains("not sealed"));
        // Of huge pages, if this kernel has any.
        // SAFETY: a C string, and a descriptor that is nobody else's.
        let huge = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | libc::MFD_HUGETLB;
            match libc::memfd_create(c"test".as_ptr(), flags) {
                ..0 => return,
                descriptor => OwnedFd::from_raw_fd(descriptor),
            }
        };
        seal(huge.as_fd(), libc::F_SEAL_SHRINK).unwrap();
        assert!(adopt(huge.as_fd()).contains("not of tmpfs"));
    }
}
