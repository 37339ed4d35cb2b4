//! What the C library's allocator keeps of memory that was freed.

/// Bytes of a block that has a mapping of its own.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAPPED: libc::c_int = 128 << 10;

/// Has large blocks given back to the system when they are freed, for the life of this process: for a program that has
/// many of them at times, as a switch has slots of communicators.
///
/// glibc begins so, and ceases when the first of them is freed: then blocks up to that size come from its heap, which keeps
/// them below whatever lives above them (mallopt(3), "dynamic mmap threshold"). And a block that comes zeroed from the heap
/// is written to as a whole, where a new mapping takes no memory before it is used. Other C libraries are left as they are.
pub fn give_back_large_blocks() {
    // Whoever started this process has said what is to be.
    if std::env::var_os("MALLOC_MMAP_THRESHOLD_").is_some() {
        return;
    }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it may be called at any time, and reads and writes nothing of ours.
    unsafe {
        // Failing, the allocator goes on as it is.
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED);
    }
}
