//! What is mapped (proc_pid_maps(5)): one area is asked for by PROCMAP_QUERY, since Linux 6.11; before,
//! all are read.

use std::fs::{self, File};
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;

const PATH: &str = "/proc/self/maps";

/// Memory that was mapped at once.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Area {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) of_file: bool,
}

#[derive(Debug)]
pub(super) enum Maps {
    Queried(File),
    /// In the order of their addresses.
    Read(Vec<Area>),
}

/// `struct procmap_query` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    address: u64,
    area_start: u64,
    area_end: u64,
    area_flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name_address: u64,
    build_id_address: u64,
}

const _: () = assert!(size_of::<Query>() == 104);

const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
/// The area with the address, or the first one after it.
const COVERING_OR_NEXT: u64 = 0x10;

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::Ioctl =
    ((3 << 30) | (size_of::<Query>() << 16) | (0x66 << 8) | 17) as libc::Ioctl;

impl Maps {
    pub(super) fn open() -> io::Result<Self> {
        let mut queried = Self::Queried(File::open(PATH)?);
        match queried.area(0) {
            Ok(_) => Ok(queried),
            Err(_) => Self::read(),
        }
    }

    pub(super) fn read() -> io::Result<Self> {
        // Names of files may be any bytes.
        let text = fs::read(PATH)?;
        String::from_utf8_lossy(&text)
            .lines()
            .map(parse)
            .collect::<Option<_>>()
            .map(Self::Read)
            .ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, "/proc/self/maps has a strange line")
            })
    }

    /// The area with this address, or the first one after it.
    pub(super) fn area(&mut self, address: u64) -> io::Result<Option<Area>> {
        let file = match self {
            Self::Queried(file) => file,
            Self::Read(areas) => {
                let index = areas.partition_point(|area| area.end <= address);
                return Ok(areas.get(index).copied());
            }
        };
        let size = size_of::<Query>() as u64;
        let mut query = Query { size, flags: COVERING_OR_NEXT, address, ..Query::default() };
        // SAFETY: the structure is as the kernel wants it, and alive during the call; it asks for no texts.
        let asked = unsafe { libc::ioctl(file.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
        if asked != 0 {
            return match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
                error => Err(error),
            };
        }
        Ok(Some(Area {
            start: query.area_start,
            end: query.area_end,
            readable: query.area_flags & READABLE != 0,
            writable: query.area_flags & WRITABLE != 0,
            of_file: query.inode != 0,
        }))
    }
}

/// `START-END RIGHTS OFFSET DEVICE INODE PATH`.
fn parse(line: &str) -> Option<Area> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let rights = fields.next()?;
    let inode: u64 = fields.nth(2)?.parse().ok()?;
    Some(Area {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        readable: rights.as_bytes().first() == Some(&b'r'),
        writable: rights.as_bytes().get(1) == Some(&b'w'),
        of_file: inode != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_read() {
        let line = "7f0a9c000000-7f0a9c021000 rw-p 00001000 fd:01 4711      /a b/c";
        let area = parse(line).unwrap();
        assert_eq!((area.start, area.end), (0x7f0a_9c00_0000, 0x7f0a_9c02_1000));
        assert!(area.readable && area.writable && area.of_file);
        let area = parse("1000-2000 ---p 00000000 00:00 0").unwrap();
        assert!(!area.readable && !area.writable && !area.of_file);
        for line in ["", "1000 rw-p", "1000-2000", "x-y rw-p 0 0:0 0", "1-2 rw-p 0 0:0"] {
            assert!(parse(line).is_none(), "{line}");
        }
    }
}
