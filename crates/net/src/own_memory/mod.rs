//! What the kernel says of this process's memory, whether a range can be read and written and on which NUMA
//! nodes its pages are, and what it does to it.

mod maps;
mod nodes;
mod pages;
mod populate;

use std::io;

use thiserror::Error;

use self::maps::Maps;
use crate::guarded;

pub use self::nodes::{nodes, page_length};
pub use self::pages::Pages;
pub use self::populate::populate;

/// Why memory cannot be used.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum Defect {
    /// There is none.
    #[error("nothing is mapped there")]
    Unmapped,
    /// It must not be read.
    #[error("it must not be read (PROT_READ)")]
    NotReadable,
    /// It must not be written.
    #[error("it must not be written (PROT_WRITE)")]
    NotWritable,
    /// It is of a file that ends before, or has no page there that could be read: no huge page is free, or its
    /// memory is broken.
    #[error("its file ends before, or has no page there")]
    BeyondFile,
}

/// Looks at memory of this process. Made for some ranges that are looked at one after the other, since what
/// is mapped changes.
#[derive(Debug)]
pub struct Inspector(Maps);

impl Inspector {
    /// Fails where there is no /proc.
    pub fn new() -> io::Result<Self> {
        // Whether there is a file behind memory, only an access tells.
        guarded::recover()?;
        Maps::open().map(Self)
    }

    /// The first address in a range that cannot be read and written, and why.
    pub fn first_defect(&mut self, address: u64, length: u64) -> io::Result<Option<(u64, Defect)>> {
        let end = address.saturating_add(length);
        let mut at = address;
        while at < end {
            let area = match self.0.area(at)? {
                Some(area) if area.start <= at => area,
                _ => return Ok(Some((at, Defect::Unmapped))),
            };
            if !area.readable {
                return Ok(Some((at, Defect::NotReadable)));
            }
            if !area.writable {
                return Ok(Some((at, Defect::NotWritable)));
            }
            let until = area.end.min(end);
            if area.of_file
                && guarded::RECOVERS
                && let Some(first) = first_beyond(at, until)
            {
                return Ok(Some((first, Defect::BeyondFile)));
            }
            at = until;
        }
        Ok(None)
    }
}

/// The first page of a mapped file that is beyond its end. Those that follow it are, too.
fn first_beyond(first: u64, end: u64) -> Option<u64> {
    let is_there = |address: u64| {
        let pointer = std::ptr::with_exposed_provenance::<u8>(address as usize);
        // SAFETY: it is mapped, and faults are recovered from. Nobody is told what is there.
        unsafe { guarded::probe(pointer, 1) }.is_ok()
    };
    if is_there(end - 1) {
        return None;
    }
    let page = page_length();
    // Between a page that is there, or none, and one that is not.
    let (mut there, mut beyond) = (first / page, (end - 1) / page);
    if !is_there(first) {
        return Some(first);
    }
    while beyond - there > 1 {
        let middle = there + (beyond - there) / 2;
        match is_there(middle * page) {
            true => there = middle,
            false => beyond = middle,
        }
    }
    Some(beyond * page)
}

#[cfg(test)]
mod tests;
