//! What can be wrong with settings.

use std::io;
use std::path::PathBuf;

use millstream_metadata::TokenFileError;
use thiserror::Error;

use crate::PolicyFileError;

/// Why settings could not be taken.
#[derive(Debug, Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The file is no TOML.
    #[error("{}:{line}: {message}", path.display())]
    Syntax {
        /// Which.
        path: PathBuf,
        /// Where in it, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// A file or an argument names a setting that there is not.
    #[error(
        "{place}there is no setting {key:?}{}",
        nearest.map_or("; `millstream config` lists them".to_owned(), |it| format!(": is {it} meant?"))
    )]
    Unknown {
        /// Where it is named: `FILE:LINE: `, or nothing.
        place: String,
        /// What is named.
        key: String,
        /// What is perhaps meant.
        nearest: Option<&'static str>,
    },
    /// A setting cannot have this value.
    #[error("{place}{name}={value}: {key} is {range}")]
    Value {
        /// Where it stands: `FILE:LINE: `, or nothing.
        place: String,
        /// The variable or the setting that has it.
        name: String,
        /// The value.
        value: String,
        /// The setting.
        key: &'static str,
        /// What it can have.
        range: String,
    },
    /// Values of several settings do not go together.
    #[error("{0}")]
    Together(String),
    /// The policy file is none.
    #[error(transparent)]
    PolicyFile(#[from] PolicyFileError),
    /// The token is none.
    #[error(transparent)]
    Token(#[from] TokenFileError),
    /// An argument is no setting and value.
    #[error("{0:?} is no setting and its value: write NAME=VALUE")]
    Argument(String),
}
