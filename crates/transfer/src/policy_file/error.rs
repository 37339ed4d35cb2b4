//! What can be wrong with a policy file.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a policy file could not be taken.
#[derive(Debug, Error)]
pub enum PolicyFileError {
    /// It cannot be read.
    #[error("cannot read the policy file {}: {error}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// One of a program's own making breaks a rule.
    #[error("the policy file that the program made: class {class:?}: {rule}")]
    Made {
        /// The class.
        class: String,
        /// What it breaks.
        rule: String,
    },
    /// A rule of a program's own making says what cannot be.
    #[error("the policy file that the program made: rule {name:?}: {fault}")]
    MadeRule {
        /// Its name.
        name: String,
        /// What is wrong.
        fault: String,
    },
    /// Something in it breaks a rule.
    #[error("{}:{line}: {rule}", path.display())]
    Rule {
        /// Which file.
        path: PathBuf,
        /// Where in it, from 1.
        line: usize,
        /// What stands there, which rule that breaks, and what can stand there.
        rule: String,
    },
}

/// A rule that is broken at a line.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) line: usize,
    pub(super) rule: String,
}

impl Fault {
    pub(super) fn new(line: usize, rule: impl Into<String>) -> Self {
        Self { line, rule: rule.into() }
    }

    pub(super) fn at(self, path: &Path) -> PolicyFileError {
        let Self { line, rule } = self;
        PolicyFileError::Rule { path: path.to_owned(), line, rule }
    }
}
