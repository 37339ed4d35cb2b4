//! Files with one value each.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

/// No value of the kernel is longer: it fills a page at most.
const TEXT_MAX: u64 = 4096;
/// Devices of a kind, and NUMA nodes. Linux itself has a limit of 1024 NUMA nodes.
pub(crate) const DEVICES_MAX: usize = 1024;

/// The text of a file without the white space around it; `None` when it cannot be read or is empty.
pub(crate) fn text(path: &Path) -> Option<String> {
    // A tree that is not the kernel's may hold pipes, which would be waited for.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(TEXT_MAX).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    // What is shown on a terminal has no control characters.
    let text: String = text.chars().filter(|char| *char == '\n' || !char.is_control()).collect();
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// The number in a file.
pub(crate) fn number<T: FromStr>(path: &Path) -> Option<T> {
    text(path)?.parse().ok()
}

/// The number in a file, in hexadecimal with `0x` before it.
pub(crate) fn hexadecimal(path: &Path) -> Option<u32> {
    u32::from_str_radix(text(path)?.strip_prefix("0x")?, 16).ok()
}

/// The names in a folder, in the order of people: `mlx5_2` before `mlx5_10`. None when there is no
/// such folder. What is more than `max` is left out, whichever the file system names last.
pub(crate) fn names(folder: &Path, max: usize) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> =
        names.filter(|name| !name.contains(char::is_control)).take(max).collect();
    names.sort_by_cached_key(|name| in_order(name));
    names
}

/// What names are sorted by, so that numbers at their end count as numbers.
pub(crate) fn in_order(name: &str) -> (String, u64, String) {
    let stem = name.trim_end_matches(|char: char| char.is_ascii_digit());
    let number = match &name[stem.len()..] {
        "" => 0,
        digits => digits.parse().unwrap_or(u64::MAX),
    };
    (stem.to_owned(), number, name.to_owned())
}

/// The NUMA node that a device's folder names; the kernel says -1 where there is none.
pub(crate) fn numa_node(device: &Path) -> Option<u32> {
    number(&device.join("numa_node"))
}
