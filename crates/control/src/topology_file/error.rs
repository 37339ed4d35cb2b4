//! What can be wrong with a topology file.

use std::fmt;
use std::io;
use std::path::PathBuf;

use millstream_inc::topology::Problem;
use thiserror::Error;

use super::MAX_BYTES;

/// What is wrong, and where.
#[derive(Debug)]
pub struct TopologyFileError {
    /// Which file.
    pub file: PathBuf,
    /// The line, from 1, where there is one.
    pub line: Option<usize>,
    /// Which switch and which of its connections, from 1; empty where it is neither.
    pub place: String,
    /// What.
    pub problem: Box<FileProblem>,
}

impl fmt::Display for TopologyFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, place, problem } = self;
        write!(f, "topology {}", file.display())?;
        if let Some(line) = line {
            write!(f, ":{line}")?;
        }
        if !place.is_empty() {
            write!(f, ": {place}")?;
        }
        write!(f, ": {problem}")
    }
}

impl std::error::Error for TopologyFileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &*self.problem {
            FileProblem::Io(error) => Some(error),
            _ => None,
        }
    }
}

/// What is wrong with a file, and what to do.
#[derive(Debug, Error)]
pub enum FileProblem {
    /// It cannot be read.
    #[error("cannot be read")]
    Io(#[source] io::Error),
    /// It is too large.
    #[error("the file is larger than {} MiB, which no network of this size needs", MAX_BYTES >> 20)]
    TooLarge,
    /// It is no text.
    #[error("this is no UTF-8, and YAML is")]
    NotUtf8,
    /// It is no YAML.
    #[error("this is no YAML: {0}")]
    Yaml(String),
    /// Anchors and aliases.
    #[error("anchors and aliases (`&`, `*`) are not read: write out what is meant")]
    Alias,
    /// Tags.
    #[error("tags (`!`) are not read: remove it")]
    Tag,
    /// More than one document.
    #[error("a second document begins here: a topology is one")]
    SecondDocument,
    /// Something is of another kind.
    #[error("{what} is {expected}, and this is {found}")]
    Kind {
        /// Of what.
        what: String,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        found: &'static str,
    },
    /// A key that means nothing.
    #[error("{key:?} is no key here: known are {known}")]
    UnknownKey {
        /// The key.
        key: String,
        /// Those that there are.
        known: String,
    },
    /// A key twice.
    #[error("`{0}` is there twice")]
    DuplicateKey(&'static str),
    /// A key that is not there.
    #[error("there is no `{0}`, which has to be there")]
    MissingKey(&'static str),
    /// A value that cannot be.
    #[error("`{key}` is {expected}, and not {value:?}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// The entries are no network.
    #[error(transparent)]
    Topology(Problem),
}
