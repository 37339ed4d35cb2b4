//! Which seeds were tried on this machine: a file in the user's cache.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// The version of the file's format.
const FORMAT: u64 = 1;
/// Seeds are below it, so that any number of runs has room above them.
const BOUND: u64 = 1 << 63;

/// How far earlier campaigns came. While it is open no other process has it.
#[derive(Debug)]
pub(super) struct History {
    path: PathBuf,
    /// Where scenarios begin that were never tried.
    start: u64,
    /// Each scenario's first seed that was not tried.
    next: BTreeMap<String, u64>,
    _lock: File,
}

/// A place to begin: campaigns of different people should not repeat each other.
pub(super) fn draw() -> u64 {
    RandomState::new().hash_one(FORMAT) % (BOUND / 2)
}

impl History {
    /// That of the user; `None`, with a word of it, when there is no place for one.
    pub(super) fn open() -> Result<Option<Self>> {
        let folder = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let cache = folder("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        match cache.or_else(|| Some(folder("HOME")?.join(".cache"))) {
            Some(cache) => Self::open_in(&cache.join("millstream")).map(Some),
            None => {
                eprintln!(
                    "xtask: without HOME and XDG_CACHE_HOME, nothing is kept of what is tried"
                );
                Ok(None)
            }
        }
    }

    fn open_in(folder: &Path) -> Result<Self> {
        let cannot = || format!("cannot use {}", folder.display());
        fs::create_dir_all(folder).with_context(cannot)?;
        let lock = File::create(folder.join("campaign.lock")).with_context(cannot)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "another campaign is running and keeps {}: wait for it, or give this one its own \
                 seeds by --seed",
                folder.display()
            ),
            Err(TryLockError::Error(error)) => return Err(error).with_context(cannot),
        }
        let path = folder.join("campaign.json");
        let read = match fs::read_to_string(&path) {
            Ok(text) => parse(&text),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok((draw(), BTreeMap::new())),
            Err(error) => Err(error.into()),
        };
        let (start, next) = read.unwrap_or_else(|error| {
            let start = draw();
            eprintln!(
                "xtask: {} is of no use ({error:#}): begun anew, from seed {start}",
                path.display()
            );
            (start, BTreeMap::new())
        });
        Ok(Self { path, start, next, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The first seed of a scenario that was not tried.
    pub(super) fn next(&self, scenario: &str) -> u64 {
        self.next.get(scenario).copied().unwrap_or(self.start)
    }

    /// All seeds of a scenario below this one were tried.
    pub(super) fn keep(&mut self, scenario: &str, next: u64) -> Result<()> {
        self.next.insert(scenario.to_owned(), next);
        let text = json!({ "format": FORMAT, "start": self.start, "next": self.next }).to_string();
        // Whoever is killed while writing leaves the file as it was.
        let temporary = self.path.with_extension("new");
        fs::write(&temporary, text)?;
        Ok(fs::rename(&temporary, &self.path)?)
    }
}

fn parse(text: &str) -> Result<(u64, BTreeMap<String, u64>)> {
    let value: Value = serde_json::from_str(text).context("it is damaged")?;
    let format = &value["format"];
    ensure!(*format == FORMAT, "its format is {format}, and this version knows {FORMAT}");
    let seed = |value: &Value| {
        let seed = value.as_u64().context("it is damaged: a seed is missing")?;
        ensure!(seed < BOUND, "it is damaged: seed {seed} is not below 2^63");
        Ok(seed)
    };
    let next = value["next"].as_object().context("it is damaged: it names no scenarios")?;
    let next = next.iter().map(|(name, value)| Ok((name.clone(), seed(value)?)));
    Ok((seed(&value["start"])?, next.collect::<Result<_>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of this test's own, empty.
    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("millstream-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn what_was_tried_is_known_to_the_next_campaign() {
        let folder = folder("history");
        let mut first = History::open_in(&folder).unwrap();
        let start = first.next("swarm");
        assert_eq!(first.next("transfer"), start);
        first.keep("swarm", start + 10).unwrap();
        let second = History::open_in(&folder).unwrap_err();
        assert!(second.to_string().contains("another campaign"), "{second}");
        drop(first);
        let third = History::open_in(&folder).unwrap();
        assert_eq!((third.next("swarm"), third.next("transfer")), (start + 10, start));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_of_no_use_is_begun_anew() {
        let folder = folder("damaged");
        for (text, words) in [
            ("", "damaged"),
            ("{\"format\":1,\"start\":5,\"next\":{\"swarm\":", "damaged"),
            ("[]", "format is null"),
            ("{\"format\":2,\"start\":5,\"next\":{}}", "format is 2, and this version knows 1"),
            ("{\"format\":1,\"next\":{}}", "a seed is missing"),
            ("{\"format\":1,\"start\":5}", "no scenarios"),
            ("{\"format\":1,\"start\":5,\"next\":{\"swarm\":-1}}", "a seed is missing"),
            ("{\"format\":1,\"start\":5,\"next\":{\"swarm\":9223372036854775808}}", "below 2^63"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(words), "{text}: {error}");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("campaign.json"), text).unwrap();
            let mut history = History::open_in(&folder).unwrap();
            let start = history.next("swarm");
            assert_ne!(start, 5);
            history.keep("swarm", start + 1).unwrap();
            drop(history);
            assert_eq!(History::open_in(&folder).unwrap().next("swarm"), start + 1);
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
