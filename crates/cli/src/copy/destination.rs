//! Where `get` puts the bytes, and how.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::standard;
use crate::failure::usage;
use crate::output;

pub(super) enum Destination {
    /// Standard output.
    Output,
    /// What is no regular file: a device, a FIFO.
    Direct(PathBuf),
    /// A regular file, there or not, that is written over.
    InPlace(PathBuf),
    /// A temporary file, which replaces `path` in the end. The mode is that of the file there.
    Beside { path: PathBuf, mode: Option<u32> },
}

impl Destination {
    /// What this path means. Symbolic links are followed.
    pub(super) fn of(path: &Path, in_place: bool) -> anyhow::Result<Self> {
        if standard::is_dash(path) {
            return Ok(Self::Output);
        }
        let name = output::escaped(path);
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if path.as_os_str().as_bytes().ends_with(b"/") {
                    return Err(usage(format!("{name} is a directory: get copies into one file")));
                }
                if fs::symlink_metadata(path).is_ok() {
                    bail!(
                        "cannot write {name}: it is a symbolic link to what is not there: remove \
                         it, or give the path that it means"
                    );
                }
                let path = path.to_owned();
                return Ok(if in_place {
                    Self::InPlace(path)
                } else {
                    Self::Beside { path, mode: None }
                });
            }
            Err(error) => return Err(error).with_context(|| format!("cannot write {name}")),
        };
        if metadata.is_dir() {
            return Err(usage(format!("{name} is a directory: get copies into one file")));
        }
        // As /dev/stdout is: then nothing else may be printed there.
        if standard::is_output(&metadata) {
            return Ok(Self::Output);
        }
        if !metadata.is_file() {
            return Ok(Self::Direct(path.to_owned()));
        }
        if in_place {
            return Ok(Self::InPlace(path.to_owned()));
        }
        // The link stays, and what it points to is replaced.
        let real = fs::canonicalize(path).with_context(|| format!("cannot write {name}"))?;
        Ok(Self::Beside { path: real, mode: Some(metadata.permissions().mode() & 0o777) })
    }

    /// Whether standard output has the bytes.
    pub(super) fn is_output(&self) -> bool {
        matches!(self, Self::Output)
    }
}
