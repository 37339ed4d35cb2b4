//! Where other servers have a file that an engine offers.

use std::collections::btree_map::Entry;
use std::path::Path;

use thiserror::Error;

use crate::FileOptions;

/// Why a server is not said to have a file.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum MapError {
    /// No server is called so.
    #[error("a server's name is one word, unlike {0:?}")]
    Server(String),
    /// It depends on where the process there is.
    #[error("the path at the server begins with /, unlike {0:?}")]
    Relative(String),
    /// It is said already.
    #[error("that server has the file already: {0}")]
    Twice(String),
}

impl FileOptions {
    /// Says that a server has the file at this path, and opens it there itself if it may.
    pub fn map(&mut self, server: &str, path: &str) -> Result<(), MapError> {
        if server.is_empty() || server.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(MapError::Server(server.to_owned()));
        }
        if !Path::new(path).is_absolute() {
            return Err(MapError::Relative(path.to_owned()));
        }
        match self.local_path_map.entry(server.to_owned()) {
            Entry::Vacant(entry) => {
                entry.insert(path.to_owned());
                Ok(())
            }
            Entry::Occupied(entry) => Err(MapError::Twice(entry.key().clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_has_a_file_at_one_path_from_the_root() {
        let mut options = FileOptions::default();
        options.map("shop", "/mnt/a b").unwrap();
        options.map("127.0.0.1:1", "/").unwrap();
        for (server, path, error) in [
            ("", "/x", MapError::Server(String::new())),
            ("a b", "/x", MapError::Server("a b".to_owned())),
            ("a\0", "/x", MapError::Server("a\0".to_owned())),
            ("other", "", MapError::Relative(String::new())),
            ("other", "x", MapError::Relative("x".to_owned())),
            ("shop", "/x", MapError::Twice("shop".to_owned())),
        ] {
            assert_eq!(options.map(server, path), Err(error));
        }
        let expected = [("127.0.0.1:1", "/"), ("shop", "/mnt/a b")];
        let expected = expected.map(|(server, path)| (server.to_owned(), path.to_owned()));
        assert_eq!(options.local_path_map, expected.into());
    }
}
