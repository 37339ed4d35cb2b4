//! A seed that the commit chooses: each commit tries other runs, and the same one the same again.

use std::process::Command;

use crate::process;

/// Below it, seeds leave room for any number of runs.
const BOUND: u64 = 1 << 63;

/// The seed of the commit that is checked out; what it comes from is printed. Changes that are not
/// committed do not count.
pub(super) fn seed() -> u64 {
    let mut command = Command::new("git");
    command.current_dir(process::repository_root()).args(["rev-parse", "HEAD"]);
    let commit = process::output(&mut command).ok();
    let drawn = commit.as_deref().map(str::trim).and_then(|name| Some((name, of(name)?)));
    if let Some((name, seed)) = drawn {
        eprintln!("xtask: seeds from 0, and from {seed}, which commit {name} chooses");
        return seed;
    }
    let seed = BOUND / 2;
    eprintln!("xtask: seeds from 0, and from {seed}, since git names no commit that chooses");
    seed
}

/// The first 16 hexadecimal digits of a commit's name, as a number below [`BOUND`].
fn of(name: &str) -> Option<u64> {
    Some(u64::from_str_radix(name.get(..16)?, 16).ok()? % BOUND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_chooses_one_seed() {
        assert_eq!(of("00000000000000ff24da2e2000000000"), Some(255));
        assert_eq!(of("ffffffffffffffff0000000000000000"), Some(BOUND - 1));
        assert_eq!(of("24da2e2"), None);
        assert_eq!(of("not a commit's name"), None);
        assert_eq!(of(""), None);
    }
}
