//! Standard input and output as files: `-`.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::closed;

/// Whether this means standard input or output. `./-` is a file of that name.
pub(super) fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Standard output without a buffer.
pub(super) fn output() -> io::Result<File> {
    closed::check(libc::STDOUT_FILENO)?;
    Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?))
}

/// Whether this is the file that standard output goes to.
pub(super) fn is_output(metadata: &Metadata) -> bool {
    let same = |stdout: Metadata| (stdout.dev(), stdout.ino()) == (metadata.dev(), metadata.ino());
    fs::metadata("/proc/self/fd/1").is_ok_and(same)
}
