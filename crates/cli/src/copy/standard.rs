//! Standard input and output as files: `-`.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Device 1:3, `/dev/null`.
const NULL_DEVICE: u64 = 1 << 8 | 3;

/// Whether this means standard input or output. `./-` is a file of that name.
pub(super) fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Standard output without a buffer.
pub(super) fn output() -> io::Result<File> {
    check_open(1)?;
    Ok(File::from(io::stdout().as_fd().try_clone_to_owned()?))
}

/// Whether this is the file that standard output goes to.
pub(super) fn is_output(metadata: &Metadata) -> bool {
    let same = |stdout: Metadata| (stdout.dev(), stdout.ino()) == (metadata.dev(), metadata.ino());
    fs::metadata("/proc/self/fd/1").is_ok_and(same)
}

/// An error when the descriptor 0 or 1 was closed when this process was started, as by `<&-`. Rust
/// opens `/dev/null` in its place then, for reading and writing: bytes would come from nowhere, and
/// vanish.
pub(super) fn check_open(descriptor: u32) -> io::Result<()> {
    let metadata = fs::metadata(format!("/proc/self/fd/{descriptor}"))?;
    if !metadata.file_type().is_char_device() || metadata.rdev() != NULL_DEVICE {
        return Ok(());
    }
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}"))?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    match flags {
        Some(flags) if flags & libc::O_ACCMODE == libc::O_RDWR => {
            Err(io::Error::other("it is closed"))
        }
        _ => Ok(()),
    }
}
