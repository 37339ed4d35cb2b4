//! NUMA nodes (move_pages(2)).

use std::io;
use std::ptr;

/// Bytes of a page.
pub fn page_length() -> u64 {
    // SAFETY: no pointers.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// The NUMA node of the page at each of these addresses; `None` where there is no page (yet).
pub fn nodes(addresses: &[u64]) -> io::Result<Vec<Option<u32>>> {
    let pages: Vec<*mut libc::c_void> =
        addresses.iter().map(|&address| ptr::without_provenance_mut(address as usize)).collect();
    let mut states: Vec<libc::c_int> = vec![-1; pages.len()];
    // SAFETY: two lists of that length, alive during the call. Without nodes to move pages to, it only tells
    // where they are.
    let asked = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len() as libc::c_ulong,
            pages.as_ptr(),
            ptr::null::<libc::c_int>(),
            states.as_mut_ptr(),
            0,
        )
    };
    if asked < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(states.into_iter().map(|node| u32::try_from(node).ok()).collect())
}
