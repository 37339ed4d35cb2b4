//! What dpkg is told about the package.

use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

const MAINTAINER: &str = "The Millstream authors <maintainers@millstream.invalid>";

/// The version of Debian's package: ours, packaged for the first time.
pub(super) fn version() -> String {
    concat!(env!("CARGO_PKG_VERSION"), "-1").to_owned()
}

/// The control file of a package with these programs.
pub(super) fn control(
    version: &str,
    architecture: &str,
    kibibytes: u64,
    programs: &[u8],
) -> Result<String> {
    let libc = libc_version(programs).context("the programs need no version of libc")?;
    Ok(format!(
        "\
Package: millstream
Version: {version}
Architecture: {architecture}
Maintainer: {MAINTAINER}
Installed-Size: {kibibytes}
Depends: libc6 (>= 2.{libc}), libgcc-s1
Suggests: libibverbs1, ibverbs-providers
Section: net
Priority: optional
Description: moves bytes between the memories of many machines
 A transfer engine, in-network collectives and a RoCEv2 stack in user space.
 Millstream copies into and out of the memory of other machines over RDMA,
 with RDMA devices or, by UDP sockets, without, and sums the vectors of many
 hosts in switches on the way.
 .
 The C library libmillstream, with the C API of Mooncake's transfer engine, and
 what programs are compiled with are in it, too.
"
    ))
}

/// The changelog of the packaging, as Debian's tools read it.
pub(super) fn changelog() -> Result<String> {
    let (version, date) = (version(), commit_time("%cD")?);
    Ok(format!(
        "millstream ({version}) unstable; urgency=medium\n\n  * See changelog.gz.\n\n \
         -- {MAINTAINER}  {date}\n"
    ))
}

/// When the sources were committed, in one of git's formats; of sources without git, now.
pub(super) fn commit_time(format: &str) -> Result<String> {
    let root = process::repository_root();
    let mut git = Command::new("git");
    git.current_dir(&root).args(["log", "-1", &format!("--format={format}")]);
    let now = if format == "%ct" { "+%s" } else { "-R" };
    let time = process::output(&mut git)
        .or_else(|_| process::output(Command::new("date").args(["-u", now])))?;
    Ok(time.trim().to_owned())
}

/// The newest version 2.x of the GNU C library that a program names. Versions of symbols stand in
/// it as texts.
fn libc_version(program: &[u8]) -> Option<u32> {
    const PREFIX: &[u8] = b"GLIBC_2.";
    let versions = program.windows(PREFIX.len()).enumerate().filter_map(|(at, window)| {
        let text = &program[at + PREFIX.len()..];
        let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let found = (window == PREFIX).then(|| std::str::from_utf8(&text[..digits]).ok())??;
        found.parse().ok()
    });
    versions.max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_libc_is_needed() {
        assert_eq!(libc_version(b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.9\0GLIBC_PRIVATE"), Some(34));
        assert_eq!(libc_version(b"GLIBC_2."), None);
        assert_eq!(libc_version(b""), None);
    }

    #[test]
    fn the_changelog_has_debians_form() {
        let text = changelog().unwrap();
        assert!(text.starts_with("millstream ("), "{text}");
        assert!(
            text.lines().any(|line| line.starts_with(" -- The Millstream authors <")),
            "{text}"
        );
    }
}
