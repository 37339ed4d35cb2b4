//! Entries on disk: a file to which each change is appended, and forced out before it counts.
//!
//! A record is the length of its payload and the CRC-32C of that, little-endian, and the payload: what is
//! done (1: put, 2: remove), the length of the key, the key, and the value. What a crash has left of the last
//! record is dropped when the file is opened. A damaged record before others is no crash's: such a file is not
//! opened, since what follows would be lost. A file that is mostly of the past is written anew beside it, and
//! takes its name.
//!
//! The file begins with what it is, and with a salt: lengths and checksums depend on it. Nobody who knows a file's form
//! only can make a value in which there is something that looks like a record, and would be taken for one where a
//! crash has torn the record with that value.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::fs::{File, OpenOptions, TryLockError};
use std::hash::BuildHasher;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use hyper::body::Bytes;

const NAME: &str = "entries.log";
const NEW_NAME: &str = "entries.log.new";
const LOCK_NAME: &str = "lock";

/// What the file begins with: what it is, and the version of its form.
const MAGIC: &[u8; 8] = b"MSmeta\x00\x02";

/// Bytes before the first record.
const START: usize = MAGIC.len() + size_of::<Salt>();

/// Length and CRC of a record.
const HEADER: usize = 8;

const PUT: u8 = 1;
const REMOVE: u8 = 2;

/// No file is compacted that is shorter.
const LEAST_COMPACTED: u64 = 1 << 20;

/// The entries and their keys.
pub(super) type Entries = BTreeMap<String, Bytes>;

/// What lengths and checksums of a file depend on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Salt {
    length: u32,
    checksum: u32,
}

impl Salt {
    fn draw() -> Self {
        let random = RandomState::new().hash_one(MAGIC);
        // Neither zeros nor ones are the length of a record.
        let length = (random as u32 & 0x3fff_ffff) | 0x8000_0000;
        Self { length, checksum: (random >> 32) as u32 }
    }

    const fn emit(self) -> [u8; 8] {
        (self.length as u64 | (self.checksum as u64) << 32).to_le_bytes()
    }

    const fn parse(bytes: [u8; 8]) -> Self {
        let both = u64::from_le_bytes(bytes);
        Self { length: both as u32, checksum: (both >> 32) as u32 }
    }

    /// What stands before a payload.
    fn header(self, payload: &[u8]) -> [u8; HEADER] {
        let length = payload.len() as u32 ^ self.length;
        let both = u64::from(length) | u64::from(self.sum(payload)) << 32;
        both.to_le_bytes()
    }

    /// The length of the payload, and its checksum.
    const fn read(self, header: [u8; HEADER]) -> (usize, u32) {
        let both = u64::from_le_bytes(header);
        ((both as u32 ^ self.length) as usize, (both >> 32) as u32)
    }

    fn sum(self, payload: &[u8]) -> u32 {
        crc32c::crc32c_append(self.checksum, payload)
    }
}

/// The open file.
#[derive(Debug)]
pub(super) struct Log {
    folder: PathBuf,
    file: File,
    salt: Salt,
    /// Bytes up to the end of the last whole record.
    length: u64,
    /// What the file must not have more than twice of: bytes of the entries that there are.
    live: u64,
    /// It may have something after `length`, or other than that.
    is_broken: bool,
    /// It is not written anew below this many bytes.
    compact_from: u64,
    /// Held as long as this lives.
    _lock: File,
}

impl Log {
    /// Opens or makes the file in a folder, which is made if it is not there; what is in the file. Keys and
    /// values are no longer together than `limit`.
    pub(super) fn open(folder: &Path, limit: usize) -> io::Result<(Self, Entries)> {
        std::fs::create_dir_all(folder)?;
        let lock = OpenOptions::new().create(true).append(true).open(folder.join(LOCK_NAME))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::other("another metadata server has it open"));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Of one that was being written when the server ended.
        match std::fs::remove_file(folder.join(NEW_NAME)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let path = folder.join(NAME);
        let mut options = OpenOptions::new();
        let mut file = options.create(true).read(true).write(true).truncate(false).open(&path)?;
        let total = file.metadata()?.len();
        if total < START as u64 {
            // Made just now, or before a crash.
            file.set_len(0)?;
            file.write_all(&[*MAGIC, Salt::draw().emit()].concat())?;
            file.sync_all()?;
            File::open(folder)?.sync_all()?;
        }
        let mut reader = Reader::new(&file, limit)?;
        let mut entries = Entries::new();
        while let Some(change) = reader.next()? {
            match change {
                Change::Put(key, value) => drop(entries.insert(key, value)),
                Change::Remove(key) => drop(entries.remove(&key)),
            }
        }
        let (salt, length) = (reader.salt, reader.length);
        if !is_torn_end(&file, salt, length, limit)? {
            let file = path.display();
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "{NAME} in it is damaged at byte {length}, and more follows than a crash leaves: restore it \
                     from a copy, or move it away, or keep a copy and go on with what is before the damage: \
                     truncate -s {length} {file}"
                ),
            ));
        }
        if let Some(dropped) = total.checked_sub(length).filter(|&dropped| dropped > 0) {
            tracing::warn!(path = %path.display(), dropped, "the torn end of the file is dropped");
            file.set_len(length)?;
            file.sync_all()?;
        }
        file.seek(SeekFrom::Start(length))?;
        let live = entries.iter().map(|(key, value)| record_length(key, value)).sum();
        let folder = folder.to_owned();
        let compact_from = LEAST_COMPACTED;
        Ok((
            Self { folder, file, salt, length, live, is_broken: false, compact_from, _lock: lock },
            entries,
        ))
    }

    /// Writes that a key has a value, or none any more, and has had `before`. When this returns it is on disk,
    /// or, with an error, is not.
    pub(super) fn append(
        &mut self,
        key: &str,
        value: Option<&[u8]>,
        before: Option<&[u8]>,
    ) -> io::Result<()> {
        if self.is_broken {
            self.mend()?;
        }
        let record = record(self.salt, key, value);
        self.is_broken = true;
        if let Err(error) = self.file.write_all(&record).and_then(|()| self.file.sync_data()) {
            // So that a start does not find it after all. What fails here is tried again before the next one.
            let _ = self.mend();
            return Err(error);
        }
        self.is_broken = false;
        self.length += record.len() as u64;
        self.live -= before.map_or(0, |before| record_length(key, before));
        self.live += value.map_or(0, |value| record_length(key, value));
        Ok(())
    }

    /// Cuts off what a failed write has left.
    fn mend(&mut self) -> io::Result<()> {
        self.file.set_len(self.length)?;
        self.file.seek(SeekFrom::Start(self.length))?;
        self.file.sync_all()?;
        self.is_broken = false;
        Ok(())
    }

    /// Whether it is mostly of the past.
    pub(super) fn wants_compaction(&self) -> bool {
        self.length > self.compact_from && self.length / 2 > self.live
    }

    /// Writes it anew with just these entries. With an error, it is as it was, and is not tried again before it has
    /// grown.
    pub(super) fn compact(&mut self, entries: &Entries) -> io::Result<()> {
        let outcome = self.write_anew(entries);
        self.compact_from = LEAST_COMPACTED;
        if outcome.is_err() {
            self.compact_from = self.compact_from.max(self.length + self.length / 2);
            let _ = std::fs::remove_file(self.folder.join(NEW_NAME));
        }
        outcome
    }

    fn write_anew(&mut self, entries: &Entries) -> io::Result<()> {
        let path = self.folder.join(NEW_NAME);
        let mut file = File::create(&path)?;
        let mut writer = io::BufWriter::new(&mut file);
        writer.write_all(&[*MAGIC, self.salt.emit()].concat())?;
        for (key, value) in entries {
            writer.write_all(&record(self.salt, key, Some(value)))?;
        }
        writer.flush()?;
        drop(writer);
        file.sync_all()?;
        let length = file.stream_position()?;
        std::fs::rename(&path, self.folder.join(NAME))?;
        // From here on the other file has no name.
        let before = self.length;
        (self.file, self.length, self.is_broken) = (file, length, false);
        self.live = length - START as u64;
        File::open(&self.folder)?.sync_all()?;
        tracing::info!(before, after = length, "the file of entries was written anew");
        Ok(())
    }
}

fn record_length(key: &str, value: &[u8]) -> u64 {
    (HEADER + 1 + 4 + key.len() + value.len()) as u64
}

/// The bytes of a change.
fn record(salt: Salt, key: &str, value: Option<&[u8]>) -> Vec<u8> {
    let bytes = value.unwrap_or_default();
    let mut record = vec![0; HEADER];
    record.push(if value.is_some() { PUT } else { REMOVE });
    record.extend_from_slice(&(key.len() as u32).to_le_bytes());
    record.extend_from_slice(key.as_bytes());
    record.extend_from_slice(bytes);
    let header = salt.header(&record[HEADER..]);
    record[..HEADER].copy_from_slice(&header);
    record
}

enum Change {
    Put(String, Bytes),
    Remove(String),
}

/// Reads records up to the first that is none.
struct Reader<'a> {
    input: BufReader<&'a File>,
    limit: usize,
    salt: Salt,
    /// Bytes up to the end of the last whole record.
    length: u64,
}

impl<'a> Reader<'a> {
    fn new(mut file: &'a File, limit: usize) -> io::Result<Self> {
        file.seek(SeekFrom::Start(0))?;
        let mut input = BufReader::new(file);
        let mut magic = [0; MAGIC.len()];
        input.read_exact(&mut magic)?;
        if magic != *MAGIC {
            let what = format!("{NAME} in it is no file of entries, or of another version");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let mut salt = [0; size_of::<Salt>()];
        input.read_exact(&mut salt)?;
        Ok(Self { input, limit, salt: Salt::parse(salt), length: START as u64 })
    }

    fn next(&mut self) -> io::Result<Option<Change>> {
        let mut header = [0; HEADER];
        if !fill(&mut self.input, &mut header)? {
            return Ok(None);
        }
        let (length, checksum) = self.salt.read(header);
        if length < 5 || length > self.limit + 5 {
            return Ok(None);
        }
        let mut payload = vec![0; length];
        if !fill(&mut self.input, &mut payload)? || self.salt.sum(&payload) != checksum {
            return Ok(None);
        }
        let change = change(&payload);
        if change.is_some() {
            self.length += (HEADER + length) as u64;
        }
        Ok(change)
    }
}

fn change(payload: &[u8]) -> Option<Change> {
    let (&what, rest) = payload.split_first()?;
    let (length, rest) = rest.split_first_chunk()?;
    let (key, value) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    let key = String::from_utf8(key.to_vec()).ok()?;
    match what {
        PUT => Some(Change::Put(key, Bytes::copy_from_slice(value))),
        REMOVE if value.is_empty() => Some(Change::Remove(key)),
        _ => None,
    }
}

/// Whether what is in a file from here on can be what a crash has left of one record: no more than that, and no
/// whole record in it.
fn is_torn_end(mut file: &File, salt: Salt, from: u64, limit: usize) -> io::Result<bool> {
    let longest = HEADER + 5 + limit;
    let mut rest = Vec::new();
    file.seek(SeekFrom::Start(from))?;
    file.take(longest as u64 + 1).read_to_end(&mut rest)?;
    if rest.len() > longest {
        return Ok(false);
    }
    for at in 1..rest.len() {
        let record = &rest[at..];
        let Some((header, payload)) = record.split_first_chunk::<HEADER>() else { break };
        // As the salt is a secret, few have a length that fits, whatever the bytes are.
        let (length, checksum) = salt.read(*header);
        let Some(payload) = payload.get(..length).filter(|_| length >= 5) else { continue };
        if salt.sum(payload) == checksum && change(payload).is_some() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether there were so many bytes.
fn fill(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match input.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 4096;

    /// A folder that goes away.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("millstream-log-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = std::fs::remove_dir_all(&path);
            Self(path)
        }

        fn file(&self) -> PathBuf {
            self.0.join(NAME)
        }

        fn entries(&self) -> Entries {
            Log::open(&self.0, LIMIT).unwrap().1
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn entries(list: &[(&str, &[u8])]) -> Entries {
        let entry =
            |(key, value): &(&str, &[u8])| ((*key).to_owned(), Bytes::copy_from_slice(value));
        list.iter().map(entry).collect()
    }

    #[test]
    fn what_was_appended_is_there_again() {
        let folder = Folder::new("again");
        let (mut log, empty) = Log::open(&folder.0, LIMIT).unwrap();
        assert!(empty.is_empty());
        let other = Log::open(&folder.0, LIMIT).unwrap_err();
        assert_eq!(other.to_string(), "another metadata server has it open");
        log.append("a", Some(b"1"), None).unwrap();
        log.append("b", Some(b""), None).unwrap();
        log.append("a", Some(b"22"), Some(b"1")).unwrap();
        log.append("c", Some(b"3"), None).unwrap();
        log.append("c", None, Some(b"3")).unwrap();
        let live = log.live;
        drop(log);
        let (log, found) = Log::open(&folder.0, LIMIT).unwrap();
        assert_eq!(found, entries(&[("a", b"22"), ("b", b"")]));
        assert_eq!(log.live, live);
    }

    /// Wherever a crash cuts the file, all that was written before the cut is there, and more can be written.
    #[test]
    fn a_torn_end_is_dropped() {
        let folder = Folder::new("torn");
        let (mut log, _) = Log::open(&folder.0, LIMIT).unwrap();
        log.append("a", Some(b"1"), None).unwrap();
        let first = log.length;
        log.append("b", Some(b"22"), None).unwrap();
        let end = log.length;
        drop(log);
        let whole = std::fs::read(folder.file()).unwrap();
        assert_eq!(whole.len() as u64, end);
        for cut in 0..end {
            std::fs::write(folder.file(), &whole[..cut as usize]).unwrap();
            let (mut log, found) = Log::open(&folder.0, LIMIT).unwrap();
            let expected = if cut < first { entries(&[]) } else { entries(&[("a", b"1")]) };
            assert_eq!(found, expected, "{cut}");
            log.append("c", Some(b"3"), None).unwrap();
            drop(log);
            assert_eq!(folder.entries()["c"], b"3"[..], "{cut}");
        }
        // What follows may be anything: zeros that a crash has left, or noise.
        for tail in [&[0_u8; 100][..], &[0xff; 100], &whole[whole.len() - 10..], b"x"] {
            std::fs::write(folder.file(), [&whole, tail].concat()).unwrap();
            assert_eq!(folder.entries(), entries(&[("a", b"1"), ("b", b"22")]));
        }
        for bit in 0..8 * (end - first) {
            let mut text = whole.clone();
            text[(first + bit / 8) as usize] ^= 1 << (bit % 8);
            std::fs::write(folder.file(), text).unwrap();
            assert_eq!(folder.entries(), entries(&[("a", b"1")]), "{bit}");
        }
    }

    /// Clients choose values: one may be what a record of a file looks like, or many lengths of such.
    #[test]
    fn a_torn_record_whose_value_looks_like_records_is_dropped() {
        let folder = Folder::new("within");
        let lengths = [200, 0, 0, 0].repeat(LIMIT / 8);
        let looks = [[0, 0], [1 << 31, 0], [1 << 31, 1]].map(|[length, checksum]| {
            record(Salt { length, checksum }, "x", Some(b"1")).repeat(10)
        });
        for value in [lengths, looks.concat()] {
            let _ = std::fs::remove_dir_all(&folder.0);
            let (mut log, _) = Log::open(&folder.0, LIMIT).unwrap();
            log.append("a", Some(b"1"), None).unwrap();
            let first = log.length;
            log.append("b", Some(&value), None).unwrap();
            let end = log.length;
            drop(log);
            let whole = std::fs::read(folder.file()).unwrap();
            for cut in [first + 20, end - 100, end - 1] {
                std::fs::write(folder.file(), &whole[..cut as usize]).unwrap();
                assert_eq!(folder.entries(), entries(&[("a", b"1")]), "{cut}");
            }
        }
    }

    #[test]
    fn neither_zeros_nor_ones_begin_a_record() {
        for _ in 0..1000 {
            let salt = Salt::draw();
            for header in [[0; HEADER], [0xff; HEADER]] {
                assert!(salt.read(header).0 > 1 << 29, "{salt:?}");
            }
            assert_eq!(Salt::parse(salt.emit()), salt);
        }
    }

    /// What follows the damage is not dropped: the server does not start.
    #[test]
    fn a_damaged_record_before_others_is_told_of() {
        let folder = Folder::new("damaged");
        let (mut log, _) = Log::open(&folder.0, LIMIT).unwrap();
        log.append("a", Some(b"1"), None).unwrap();
        let (first, second) = (START as u64, log.length);
        log.append("b", Some(b"22"), None).unwrap();
        log.append("c", Some(b"3"), None).unwrap();
        drop(log);
        let whole = std::fs::read(folder.file()).unwrap();
        for bit in 0..8 * (second - first) {
            let mut text = whole.clone();
            text[(first + bit / 8) as usize] ^= 1 << (bit % 8);
            std::fs::write(folder.file(), &text).unwrap();
            let error = Log::open(&folder.0, LIMIT).unwrap_err().to_string();
            assert!(error.contains(&format!("damaged at byte {first}")), "{bit}: {error}");
            assert!(error.contains(&format!("truncate -s {first} ")), "{bit}: {error}");
            assert!(std::fs::read(folder.file()).unwrap() == text, "{bit}: it is left alone");
        }
        // More than a crash leaves of one record.
        std::fs::write(folder.file(), [whole, vec![0xff; LIMIT + 100]].concat()).unwrap();
        Log::open(&folder.0, LIMIT).unwrap_err();
    }

    #[test]
    fn another_file_is_left_alone() {
        let folder = Folder::new("other");
        std::fs::create_dir_all(&folder.0).unwrap();
        std::fs::write(folder.file(), "some notes of mine").unwrap();
        let error = Log::open(&folder.0, LIMIT).unwrap_err().to_string();
        assert!(error.contains("no file of entries"), "{error}");
        assert_eq!(std::fs::read(folder.file()).unwrap(), b"some notes of mine");
    }

    #[test]
    fn a_file_of_the_past_is_written_anew() {
        let folder = Folder::new("anew");
        let (mut log, _) = Log::open(&folder.0, LIMIT).unwrap();
        let value = [7; 4000];
        let mut before = None;
        while !log.wants_compaction() {
            log.append("a", Some(&value), before).unwrap();
            before = Some(&value[..]);
        }
        let now = entries(&[("a", &value)]);
        log.compact(&now).unwrap();
        assert!(log.length < 5000 && !log.wants_compaction());
        log.append("b", Some(b"1"), None).unwrap();
        drop(log);
        assert_eq!(folder.entries(), entries(&[("a", &value), ("b", b"1")]));
    }
}
