//! Which files an engine offers, by the names of their segments.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use millstream_metadata::FileKey;

use crate::FileError;

/// The most files that an engine offers.
const MAX_FILES: usize = 4096;

/// Files by name. One that is being offered or taken back, which may wait for a disk or a server, has its
/// name meanwhile and no key: the lock is not held for so long.
#[derive(Default)]
pub(super) struct Offered {
    by_name: Mutex<HashMap<String, Option<FileKey>>>,
}

impl Offered {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Option<FileKey>>> {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offers a file by `work`, unless another one has its name.
    pub(super) fn offer(
        &self,
        name: &str,
        work: impl FnOnce() -> Result<FileKey, FileError>,
    ) -> Result<(), FileError> {
        let mut by_name = self.lock();
        if by_name.contains_key(name) {
            return Err(FileError::Twice(name.to_owned()));
        }
        if by_name.len() >= MAX_FILES {
            return Err(FileError::TooMany { limit: MAX_FILES });
        }
        by_name.insert(name.to_owned(), None);
        drop(by_name);
        match work() {
            Ok(key) => {
                self.lock().insert(name.to_owned(), Some(key));
                Ok(())
            }
            Err(error) => {
                self.lock().remove(name);
                Err(error)
            }
        }
    }

    /// Takes a file back by `work`.
    pub(super) fn take_back<E: Into<FileError>>(
        &self,
        name: &str,
        work: impl FnOnce(FileKey) -> Result<(), E>,
    ) -> Result<(), FileError> {
        let key = self.lock().get_mut(name).and_then(Option::take);
        let key = key.ok_or_else(|| FileError::Unknown(name.to_owned()))?;
        let taken = work(key);
        self.lock().remove(name);
        taken.map_err(Into::into)
    }

    /// Their names, in order.
    pub(super) fn names(&self) -> Vec<String> {
        let by_name = self.lock();
        let offered = by_name.iter().filter(|(_, key)| key.is_some());
        let mut names: Vec<_> = offered.map(|(name, _)| name.clone()).collect();
        names.sort();
        names
    }

    /// Takes all of them.
    pub(super) fn take(&self) -> impl Iterator<Item = FileKey> {
        std::mem::take(&mut *self.lock()).into_values().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one file waits for holds up no other one, nor who asks for names.
    #[test]
    fn nothing_is_locked_while_a_file_is_offered_or_taken_back() {
        let offered = Offered::default();
        let offer = |name: &str, key| offered.offer(name, || Ok(FileKey(key)));
        offered
            .offer("a", || {
                assert!(matches!(offer("a", 2), Err(FileError::Twice(_))));
                let taken = offered.take_back("a", |_| Ok::<_, FileError>(()));
                assert!(matches!(taken, Err(FileError::Unknown(_))), "it is not there yet");
                offer("b", 3)?;
                assert_eq!(offered.names(), ["b"]);
                Ok(FileKey(1))
            })
            .unwrap();
        assert_eq!(offered.names(), ["a", "b"]);
        let taken = offered.take_back("a", |key| {
            assert_eq!(key, FileKey(1));
            assert_eq!(offered.names(), ["b"]);
            let again = offered.take_back("a", |_| Ok::<_, FileError>(()));
            assert!(matches!(again, Err(FileError::Unknown(_))));
            assert!(matches!(offer("a", 4), Err(FileError::Twice(_))), "it is still published");
            Ok::<_, FileError>(())
        });
        taken.unwrap();
        offer("a", 5).unwrap();
        // One that cannot be opened does not keep the name.
        let failed = offered.offer("c", || Err(FileError::Unknown(String::new())));
        assert!(failed.is_err());
        offer("c", 6).unwrap();
        assert_eq!(offered.take().count(), 3);
        assert!(offered.names().is_empty());
    }
}
