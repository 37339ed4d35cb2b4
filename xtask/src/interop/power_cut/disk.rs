//! A disk with a volatile cache, whose power can be cut: the device at the other end of qemu's NBD client.
//!
//! A write is in the cache when it is answered, and stable once a flush was. Cutting the power keeps some of
//! what is in the cache and loses the rest, sector by sector: no order holds but that of flushes.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};

const SECTOR: usize = 512;

/// What a guest may ask for at once.
const MAX_LENGTH: u32 = 32 << 20;

/// What survives a cut, and what is in the cache.
pub(super) struct Disk {
    stable: Vec<u8>,
    cache: BTreeMap<usize, [u8; SECTOR]>,
    /// Flushes that were answered.
    pub(super) flushes: u64,
    /// Whether flushes are answered and do nothing.
    lies: bool,
}

/// What became of a disk's cache.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cut {
    pub(super) kept: usize,
    pub(super) lost: usize,
}

impl Disk {
    /// One with these bytes, in whole sectors.
    pub(super) fn new(stable: Vec<u8>, lies: bool) -> Self {
        assert!(stable.len().is_multiple_of(SECTOR), "a disk has whole sectors");
        Self { stable, cache: BTreeMap::new(), flushes: 0, lies }
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.stable[offset..offset + bytes.len()]);
        let sectors = offset / SECTOR..(offset + bytes.len()) / SECTOR;
        for (sector, cached) in self.cache.range(sectors) {
            let at = sector * SECTOR - offset;
            bytes[at..at + SECTOR].copy_from_slice(cached);
        }
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        for (index, sector) in bytes.as_chunks::<SECTOR>().0.iter().enumerate() {
            self.cache.insert(offset / SECTOR + index, *sector);
        }
    }

    fn flush(&mut self) {
        self.flushes += 1;
        if !self.lies {
            for (sector, bytes) in std::mem::take(&mut self.cache) {
                self.stable[sector * SECTOR..][..SECTOR].copy_from_slice(&bytes);
            }
        }
    }

    /// Cuts its power: of what is in the cache, `random` keeps half.
    pub(super) fn cut(&mut self, mut random: impl FnMut() -> u64) -> Cut {
        let mut cut = Cut::default();
        for (sector, bytes) in std::mem::take(&mut self.cache) {
            if random() & 1 == 0 {
                self.stable[sector * SECTOR..][..SECTOR].copy_from_slice(&bytes);
                cut.kept += 1;
            } else {
                cut.lost += 1;
            }
        }
        cut
    }

    /// Whether a request is one for whole sectors that it has.
    fn holds(&self, offset: u64, length: u32) -> bool {
        let whole = offset.is_multiple_of(SECTOR as u64) && length.is_multiple_of(SECTOR as u32);
        let end = offset.checked_add(length.into());
        whole && length <= MAX_LENGTH && end.is_some_and(|end| end <= self.stable.len() as u64)
    }
}

pub(super) fn lock(disk: &Mutex<Disk>) -> MutexGuard<'_, Disk> {
    disk.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves a disk to the one who connects to this socket, until that goes away.
pub(super) fn serve(disk: &Arc<Mutex<Disk>>, socket: &Path) -> Result<JoinHandle<()>> {
    let listener = UnixListener::bind(socket)
        .with_context(|| format!("cannot listen at {}", socket.display()))?;
    let disk = Arc::clone(disk);
    Ok(thread::spawn(move || {
        let served = listener.accept().and_then(|(stream, _)| Session { disk, stream }.serve());
        // A guest that is reset breaks it off amid a request.
        if let Err(error) = served
            && error.kind() != io::ErrorKind::UnexpectedEof
        {
            eprintln!("xtask: a disk: {error}");
        }
    }))
}

/// A conversation by the NBD protocol, fixed newstyle, with simple replies.
struct Session {
    disk: Arc<Mutex<Disk>>,
    stream: UnixStream,
}

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// NBD_FLAG_FIXED_NEWSTYLE.
const HANDSHAKE_FLAGS: u16 = 1;
const OPTION_ABORT: u32 = 2;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_UNSUPPORTED: u32 = 0x8000_0001;
const INFO_EXPORT: u16 = 0;
/// NBD_FLAG_HAS_FLAGS and NBD_FLAG_SEND_FLUSH.
const TRANSMISSION_FLAGS: u16 = 1 | 4;
const COMMAND_READ: u16 = 0;
const COMMAND_WRITE: u16 = 1;
const COMMAND_DISCONNECT: u16 = 2;
const COMMAND_FLUSH: u16 = 3;
const EINVAL: u32 = 22;

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Session {
    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn serve(mut self) -> io::Result<()> {
        let mut hello = b"NBDMAGIC".to_vec();
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(HANDSHAKE_FLAGS.to_be_bytes());
        self.stream.write_all(&hello)?;
        self.take::<4>()?;
        while !self.option()? {}
        while self.command()? {}
        Ok(())
    }

    /// Answers an option; whether commands come next.
    fn option(&mut self) -> io::Result<bool> {
        if u64::from_be_bytes(self.take()?) != OPTION_MAGIC {
            return Err(wrong("no option of NBD"));
        }
        let option = u32::from_be_bytes(self.take()?);
        let length = u32::from_be_bytes(self.take()?);
        io::copy(&mut Read::by_ref(&mut self.stream).take(length.into()), &mut io::sink())?;
        if !matches!(option, OPTION_GO | OPTION_INFO) {
            let known = option == OPTION_ABORT;
            self.answer(option, if known { REPLY_ACK } else { REPLY_UNSUPPORTED }, &[])?;
            return if known { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(false) };
        }
        let mut export = INFO_EXPORT.to_be_bytes().to_vec();
        export.extend((lock(&self.disk).stable.len() as u64).to_be_bytes());
        export.extend(TRANSMISSION_FLAGS.to_be_bytes());
        self.answer(option, REPLY_INFO, &export)?;
        self.answer(option, REPLY_ACK, &[])?;
        Ok(option == OPTION_GO)
    }

    fn answer(&mut self, option: u32, what: u32, data: &[u8]) -> io::Result<()> {
        let mut answer = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        for word in [option, what, data.len() as u32] {
            answer.extend(word.to_be_bytes());
        }
        answer.extend(data);
        self.stream.write_all(&answer)
    }

    /// Does a command; whether more come.
    fn command(&mut self) -> io::Result<bool> {
        if u32::from_be_bytes(self.take()?) != REQUEST_MAGIC {
            return Err(wrong("no command of NBD"));
        }
        self.take::<2>()?;
        let command = u16::from_be_bytes(self.take()?);
        let cookie: [u8; 8] = self.take()?;
        let offset = u64::from_be_bytes(self.take()?);
        let length = u32::from_be_bytes(self.take()?);
        let mut data = Vec::new();
        let mut error = 0_u32;
        let holds = lock(&self.disk).holds(offset, length);
        match command {
            COMMAND_READ if holds => {
                data = vec![0; length as usize];
                lock(&self.disk).read(offset as usize, &mut data);
            }
            COMMAND_WRITE if holds => {
                let mut bytes = vec![0; length as usize];
                self.stream.read_exact(&mut bytes)?;
                lock(&self.disk).write(offset as usize, &bytes);
            }
            COMMAND_WRITE => return Err(wrong("a write beyond the disk")),
            COMMAND_FLUSH => lock(&self.disk).flush(),
            COMMAND_DISCONNECT => return Ok(false),
            _ => error = EINVAL,
        }
        let mut reply = REPLY_MAGIC.to_be_bytes().to_vec();
        reply.extend(error.to_be_bytes());
        reply.extend(cookie);
        reply.extend(data);
        self.stream.write_all(&reply)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(lies: bool) -> Disk {
        Disk::new(vec![0; 8 * SECTOR], lies)
    }

    fn sectors(disk: &Disk) -> Vec<u8> {
        let mut bytes = vec![0; 8 * SECTOR];
        disk.read(0, &mut bytes);
        bytes.chunks(SECTOR).map(|sector| sector[0]).collect()
    }

    #[test]
    fn what_was_flushed_survives_and_of_the_rest_some() {
        let mut disk = disk(false);
        disk.write(0, &[1; 4 * SECTOR]);
        disk.flush();
        disk.write(2 * SECTOR, &[2; 4 * SECTOR]);
        assert_eq!(sectors(&disk), [1, 1, 2, 2, 2, 2, 0, 0], "the guest sees what it has written");
        let mut turn = 0;
        let cut = disk.cut(|| {
            turn += 1;
            turn
        });
        assert_eq!((cut.kept, cut.lost), (2, 2));
        assert_eq!(sectors(&disk), [1, 1, 1, 2, 0, 2, 0, 0]);
    }

    #[test]
    fn one_that_lies_flushes_nothing() {
        let mut disk = disk(true);
        disk.write(0, &[1; SECTOR]);
        disk.flush();
        assert_eq!((disk.cut(|| 1).lost, disk.flushes), (1, 1));
        assert_eq!(sectors(&disk), [0; 8]);
    }

    #[test]
    fn only_whole_sectors_that_are_there() {
        let disk = disk(false);
        assert!(disk.holds(0, 8 * 512) && disk.holds(7 * 512, 512));
        for (offset, length) in [(7 * 512, 1024), (1, 512), (0, 100), (u64::MAX - 511, 512)] {
            assert!(!disk.holds(offset, length), "{offset} {length}");
        }
    }
}
