//! The state in a file, of one controller: JSON, written aside and renamed, so that nobody sees half of it.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use millstream_inc::controller::Record;
use millstream_inc::election::{MAX_RECORDS, Reply, Request};
use millstream_inc::protocol::MAX_TERM;
use serde::{Deserialize, Serialize};

use super::{StateError, Store};

/// The version of the file.
const VERSION: u32 = 1;

/// Longer than any that a controller writes but for communicators of many thousand ranks.
const MAX_BYTES: u64 = 256 << 20;

/// As long as a process lives.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Nobody else has the file.
const REVISION: i64 = 1;

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    /// The highest term that was given.
    term: u64,
    communicators: Vec<Record>,
}

pub(super) struct FileStore {
    path: PathBuf,
    term: u64,
    /// By their keys, as text.
    records: BTreeMap<String, String>,
    /// Locked as long as this lives. The file itself is replaced at each change.
    _lock: File,
}

impl FileStore {
    pub(super) fn open(path: &Path) -> Result<Self, StateError> {
        let failed = |source| StateError::File { path: path.to_owned(), source };
        let corrupt = |reason| StateError::Corrupt { path: path.to_owned(), reason };
        let lock = File::create(with_suffix(path, ".lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(StateError::InUse { path: path.to_owned() });
            }
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        let mut store =
            Self { path: path.to_owned(), term: 0, records: BTreeMap::new(), _lock: lock };
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // Whether it can be written is known now, and not when it is needed.
                store.save().map_err(failed)?;
                return Ok(store);
            }
            Err(error) => return Err(failed(error)),
        };
        let mut text = String::new();
        match file.take(MAX_BYTES + 1).read_to_string(&mut text) {
            Ok(_) if text.len() as u64 <= MAX_BYTES => {}
            Ok(_) => return Err(corrupt(format!("it has more than {MAX_BYTES} bytes"))),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(corrupt("it is no text".to_owned()));
            }
            Err(error) => return Err(failed(error)),
        }
        let document: Document =
            serde_json::from_str(&text).map_err(|error| corrupt(error.to_string()))?;
        let Document { version, term, communicators } = document;
        if version != VERSION || term >= MAX_TERM || communicators.len() > MAX_RECORDS {
            let count = communicators.len();
            return Err(corrupt(format!(
                "it has version {version} (known is {VERSION}), term {term} and {count} communicators"
            )));
        }
        store.term = term;
        for record in communicators {
            let text =
                serde_json::to_string(&record).map_err(|error| corrupt(error.to_string()))?;
            store.records.insert(Record::key(record.identity), text);
        }
        Ok(store)
    }

    /// Writes the whole file.
    fn save(&self) -> io::Result<()> {
        let unfinished = with_suffix(&self.path, ".new");
        let mut file = File::create(&unfinished)?;
        let mut text =
            format!("{{\"version\":{VERSION},\"term\":{},\"communicators\":[", self.term);
        for (index, record) in self.records.values().enumerate() {
            text.push_str(if index == 0 { "\n" } else { ",\n" });
            text.push_str(record);
        }
        text.push_str("]}\n");
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&unfinished, &self.path)?;
        // The name is in the folder.
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }

    fn saved(&self, reply: Reply) -> Reply {
        match self.save() {
            Ok(()) => reply,
            Err(error) => {
                let reason = format!("the file {} cannot be written: {error}", self.path.display());
                Reply::Failed { reason, again: true }
            }
        }
    }
}

impl Store for FileStore {
    fn perform(&mut self, request: Request) -> Reply {
        match request {
            Request::Grant => Reply::Granted { lease: REVISION, time: FOR_EVER },
            Request::Renew { .. } => Reply::Renewed { time: Some(FOR_EVER) },
            // Nobody else has the file.
            Request::List => Reply::Listed { controllers: Vec::new() },
            Request::Campaign { .. } => {
                Reply::Campaigned { revision: Some(REVISION), leader: None, term: self.term }
            }
            Request::SetTerm { term, .. } => {
                self.term = self.term.max(term);
                self.saved(Reply::TermSet { leads: true, term: self.term })
            }
            Request::Load { after } => {
                let records = self.records.clone().into_iter();
                let records = records.filter(|(key, _)| Some(key) > after.as_ref()).collect();
                Reply::Loaded { records, more: false }
            }
            Request::Write { changes, .. } => {
                for (key, value) in changes {
                    match value {
                        Some(value) => self.records.insert(key, value),
                        None => self.records.remove(&key),
                    };
                }
                self.saved(Reply::Written { leads: true })
            }
            Request::Release { .. } => Reply::Released,
        }
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir()
                .join(format!("millstream-state-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn record(number: u64) -> (String, String) {
        let record = Record {
            group: "g\"".to_owned(),
            identity: [number, 2],
            communicator: number,
            world: 2,
            departed: Vec::new(),
            links: Vec::new(),
            placement: None,
        };
        (Record::key(record.identity), serde_json::to_string(&record).unwrap())
    }

    #[test]
    fn what_was_written_is_there_after_a_restart() {
        let folder = Folder::new("restart");
        let path = folder.0.join("state");
        let mut store = FileStore::open(&path).unwrap();
        let error = FileStore::open(&path).err().unwrap();
        assert!(matches!(error, StateError::InUse { .. }), "{error}");
        let set = store.perform(Request::SetTerm { revision: 1, term: 7 });
        assert_eq!(set, Reply::TermSet { leads: true, term: 7 });
        let changes: Vec<_> =
            [1, 2].map(record).map(|(key, text)| (key, Some(text))).into_iter().collect();
        let written = store.perform(Request::Write { revision: 1, changes });
        assert_eq!(written, Reply::Written { leads: true });
        let changes = vec![(record(1).0, None)];
        store.perform(Request::Write { revision: 1, changes });
        drop(store);
        let mut store = FileStore::open(&path).unwrap();
        let campaigned = store.perform(Request::Campaign { lease: 1 });
        assert_eq!(campaigned, Reply::Campaigned { revision: Some(1), leader: None, term: 7 });
        let loaded = store.perform(Request::Load { after: None });
        assert_eq!(loaded, Reply::Loaded { records: vec![record(2)], more: false });
        // A file that cannot be written is told, and what was to be written is not lost.
        fs::remove_dir_all(&folder.0).unwrap();
        let failed = store.perform(Request::SetTerm { revision: 1, term: 8 });
        assert!(matches!(failed, Reply::Failed { again: true, .. }), "{failed:?}");
        fs::create_dir_all(&folder.0).unwrap();
        store.perform(Request::SetTerm { revision: 1, term: 8 });
        assert!(fs::read_to_string(&path).unwrap().contains("\"term\":8,"));
    }

    #[test]
    fn a_file_that_makes_no_sense_is_no_empty_state() {
        let folder = Folder::new("corrupt");
        let path = folder.0.join("state");
        let term = MAX_TERM.to_string();
        for (text, what) in [
            (&b""[..], "EOF"),
            (b"{", "EOF"),
            (b"\xff", "no text"),
            (br#"{"version":1,"term":1,"communicators":[{}]}"#, "missing field"),
            (br#"{"version":2,"term":1,"communicators":[]}"#, "version 2"),
            (br#"{"version":1,"term":1,"communicators":[],"x":1}"#, "unknown field"),
            (format!(r#"{{"version":1,"term":{term},"communicators":[]}}"#).as_bytes(), "term 9"),
        ] {
            fs::write(&path, text).unwrap();
            let error = FileStore::open(&path).err().unwrap();
            assert!(matches!(error, StateError::Corrupt { .. }), "{error}");
            let error = error.to_string();
            assert!(error.contains(what) && error.contains(path.to_str().unwrap()), "{error}");
            assert_eq!(fs::read(&path).unwrap(), text);
        }
        let error = FileStore::open(&folder.0.join("none/state")).err().unwrap();
        assert!(matches!(error, StateError::File { .. }), "{error}");
    }
}
