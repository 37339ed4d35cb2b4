#[cfg(target_arch = "x86_64")]
use std::fs::File;
#[cfg(target_arch = "x86_64")]
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;

use super::*;

const PAGE: u64 = 4096;

fn map(pages: u64, rights: libc::c_int, flags: libc::c_int, file: libc::c_int) -> u64 {
    let length = (pages * PAGE) as usize;
    // SAFETY: a new mapping.
    let address = unsafe { libc::mmap(ptr::null_mut(), length, rights, flags, file, 0) };
    assert_ne!(address, libc::MAP_FAILED);
    address.expose_provenance() as u64
}

fn unmap(address: u64, pages: u64) {
    let address = ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: memory of a test, to which there are no references.
    assert_eq!(unsafe { libc::munmap(address, (pages * PAGE) as usize) }, 0);
}

fn protect(address: u64, rights: libc::c_int) {
    let address = ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: memory of a test, to which there are no references.
    assert_eq!(unsafe { libc::mprotect(address, PAGE as usize, rights) }, 0);
}

const ANONYMOUS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const BOTH: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// By both ways to ask.
fn defect(address: u64, length: u64) -> Option<(u64, Defect)> {
    guarded::recover().unwrap();
    let read = Inspector(Maps::read().unwrap()).first_defect(address, length).unwrap();
    let asked = Inspector::new().unwrap().first_defect(address, length).unwrap();
    assert_eq!(read, asked);
    asked
}

#[test]
fn the_first_bad_address_is_found() {
    let first = map(8, BOTH, ANONYMOUS, -1);
    let page = |page: u64| first + page * PAGE;
    assert_eq!(defect(first, 8 * PAGE), None);
    assert_eq!(defect(first + 1, 1), None);
    protect(page(5), libc::PROT_READ);
    assert_eq!(defect(first + 7, 8 * PAGE - 7), Some((page(5), Defect::NotWritable)));
    assert_eq!(defect(page(5) + 9, 1), Some((page(5) + 9, Defect::NotWritable)));
    assert_eq!(defect(page(6), PAGE), None);
    protect(page(3), libc::PROT_NONE);
    assert_eq!(defect(first, 8 * PAGE), Some((page(3), Defect::NotReadable)));
    assert_eq!(defect(first, 3 * PAGE), None);
    assert_eq!(defect(1, 5), Some((1, Defect::Unmapped)));
    assert_eq!(defect(u64::MAX - 4096, 4096).map(|(_, defect)| defect), Some(Defect::Unmapped));
    unmap(first, 8);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_file_may_be_shorter_than_its_mapping() {
    // SAFETY: a name, and a new descriptor that is nobody else's.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"short".as_ptr(), 0)) };
    for (pages, bad) in [(0, 0), (1, 1), (5, 5), (15, 15)] {
        file.set_len(pages * PAGE).unwrap();
        let first = map(16, BOTH, libc::MAP_SHARED, file.as_raw_fd());
        let beyond = Some((first + bad * PAGE, Defect::BeyondFile));
        assert_eq!(defect(first, 16 * PAGE), beyond, "{pages}");
        assert_eq!(defect(first, pages * PAGE), None);
        unmap(first, 16);
    }
    file.set_len(16 * PAGE).unwrap();
    let first = map(16, BOTH, libc::MAP_SHARED, file.as_raw_fd());
    assert_eq!(defect(first, 16 * PAGE), None);
    unmap(first, 16);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn names_of_files_are_any_bytes() {
    // SAFETY: a name, and a new descriptor that is nobody else's.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"\xff\xfe".as_ptr(), 0)) };
    file.set_len(PAGE).unwrap();
    let first = map(1, BOTH, libc::MAP_SHARED, file.as_raw_fd());
    assert_eq!(defect(first, PAGE), None);
    unmap(first, 1);
}

#[test]
fn pages_have_nodes_once_they_are_there() {
    let first = map(4, BOTH, ANONYMOUS, -1);
    let pages: Vec<u64> = (0..4).map(|page| first + page * PAGE).collect();
    let found = match nodes(&pages) {
        Ok(found) => found,
        // Kernels without NUMA, and filters of system calls.
        Err(error) => return eprintln!("skipped: move_pages: {error}"),
    };
    assert_eq!(found, [None; 4]);
    // SAFETY: memory of this test.
    unsafe { ptr::with_exposed_provenance_mut::<u8>(pages[2] as usize).write(1) };
    let found: Vec<bool> = nodes(&pages).unwrap().iter().map(Option::is_some).collect();
    assert_eq!(found, [false, false, true, false]);
    unmap(first, 4);
}

#[test]
fn memory_has_all_its_pages_at_once() {
    // Three threads' work, and a little.
    let pages = 3 * (4 << 10) + 5;
    let first = map(pages, BOTH, ANONYMOUS, -1);
    let middle = first + 70_000 * 4;
    // SAFETY: memory of this test.
    unsafe { ptr::with_exposed_provenance_mut::<u8>(middle as usize).write(7) };
    let all: Vec<u64> = (0..pages).step_by(97).map(|page| first + page * PAGE).collect();
    let there = |all: &[u64]| nodes(all).map(|found| found.iter().flatten().count());
    match there(&all) {
        Ok(count) => assert!(count < all.len()),
        Err(error) => return eprintln!("skipped: move_pages: {error}"),
    }
    match populate(first + 5, pages * PAGE - 10, 4) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return eprintln!("skipped: MADV_POPULATE_WRITE needs Linux 5.14");
        }
        Err(error) => panic!("{error}"),
    }
    assert_eq!(there(&all).unwrap(), all.len());
    // SAFETY: memory of this test.
    assert_eq!(unsafe { ptr::with_exposed_provenance::<u8>(middle as usize).read() }, 7);
    unmap(first, pages);
    assert!(populate(1, 5, 4).is_err());
    assert!(populate(u64::MAX - 5, 100, 4).is_err());
}
