//! Installs what the tests need, and says so.
//!
//! A test must run on a machine where nobody installed anything by hand. As root (or where `sudo`
//! asks no password) missing Debian packages are installed; elsewhere they are named, and the
//! tests that need them skip.

use std::process::Command;

use anyhow::{Result, bail};

use crate::process;

/// One program that tests call, the Debian package it comes in, and who calls it.
pub(crate) struct Need {
    pub(crate) program: &'static str,
    package: &'static str,
    pub(crate) reason: &'static str,
}

const TSHARK: Need =
    Need { program: "tshark", package: "tshark", reason: "dissects what we send, as a referee" };
const TCPDUMP: Need =
    Need { program: "tcpdump", package: "tcpdump", reason: "records what crossed a link" };
const IP: Need =
    Need { program: "ip", package: "iproute2", reason: "makes network namespaces and links" };
const QEMU: Need = Need {
    program: "qemu-system-x86_64",
    package: "qemu-system-x86",
    reason: "boots the kernel whose RoCE stack is our peer",
};

const ZSH: Need = Need { program: "zsh", package: "zsh", reason: "tries our completions" };
const FISH: Need = Need { program: "fish", package: "fish", reason: "tries our completions" };
const DPKG: Need = Need { program: "dpkg-deb", package: "dpkg", reason: "makes Debian packages" };
const PERF: Need =
    Need { program: "perf", package: "linux-perf", reason: "says where processor time goes" };
const VALGRIND: Need =
    Need { program: "valgrind", package: "valgrind", reason: "counts instructions" };
const ADDR2LINE: Need =
    Need { program: "addr2line", package: "binutils", reason: "says whose code an address is" };

const MPIRUN: Need = Need {
    program: "mpirun",
    package: "openmpi-bin",
    reason: "adds vectors up beside our collectives",
};
const MPICC: Need =
    Need { program: "mpicc", package: "libopenmpi-dev", reason: "compiles programs for it" };
const CHRT: Need =
    Need { program: "chrt", package: "util-linux", reason: "has steps give way to others" };

const MKE2FS: Need =
    Need { program: "mke2fs", package: "e2fsprogs", reason: "makes a file system for a guest" };

const ETCD: Need =
    Need { program: "etcd", package: "etcd-server", reason: "is a metadata server to test with" };
const REDIS: Need = Need {
    program: "redis-server",
    package: "redis-server",
    reason: "is a metadata server to test with",
};
const MEMCACHED: Need = Need {
    program: "memcached",
    package: "memcached",
    reason: "is a metadata server to test with",
};

const GCC: Need = Need { program: "gcc", package: "gcc", reason: "compiles programs in C" };
const GPP: Need = Need { program: "g++", package: "g++", reason: "reads our headers as C++" };
const NM: Need =
    Need { program: "nm", package: "binutils", reason: "lists what a library exports" };
const PKG_CONFIG: Need =
    Need { program: "pkg-config", package: "pkg-config", reason: "finds our library, as users do" };

const SYSTEMD_ANALYZE: Need =
    Need { program: "systemd-analyze", package: "systemd", reason: "reads our units" };
const CHROMIUM: Need =
    Need { program: "chromium", package: "chromium", reason: "shows our pages to tests" };
const CHROMEDRIVER: Need = Need {
    program: "chromedriver",
    package: "chromium-driver",
    reason: "tells the browser what tests want",
};

const PYTHON: Need = Need {
    program: "python3.11",
    package: "python3.11-venv",
    reason: "runs the original transfer engine, and builds wheels",
};

const OBJDUMP: Need = Need {
    program: "objdump",
    package: "binutils",
    reason: "says which versions of libraries a module needs",
};

const OPENSSL: Need = Need {
    program: "openssl",
    package: "openssl",
    reason: "makes certificates for engines in Python",
};

/// What `cargo xtask test` needs: all of it, as its steps run side by side, and packages are installed by one at a time.
pub(crate) const FOR_TESTS: &[Need] = &[
    TSHARK,
    TCPDUMP,
    IP,
    QEMU,
    ZSH,
    FISH,
    DPKG,
    MKE2FS,
    ETCD,
    REDIS,
    MEMCACHED,
    GCC,
    GPP,
    NM,
    PKG_CONFIG,
    SYSTEMD_ANALYZE,
    CHROMIUM,
    CHROMEDRIVER,
    PYTHON,
    OBJDUMP,
    OPENSSL,
    CHRT,
];

/// Arguments with which programs succeed only where all of their package is there. Debian has `python3.11` without what
/// makes virtual environments.
const PROBES: &[(&str, &[&str])] = &[("python3.11", &["-c", "import ensurepip, venv"])];

/// What `cargo xtask wheel` needs.
pub(crate) const FOR_WHEELS: &[Need] = &[PYTHON, OBJDUMP, OPENSSL];

/// What `cargo xtask mooncake` needs.
pub(crate) const FOR_MOONCAKE: &[Need] = &[PYTHON];

/// What it needs for rows with a metadata server.
pub(crate) const FOR_METADATA: &[Need] = &[ETCD];

/// What `cargo xtask power-cut` needs beside what `interop` does.
pub(crate) const FOR_POWER_CUT: &[Need] = &[MKE2FS];

/// What `cargo xtask package` needs.
pub(crate) const FOR_PACKAGE: &[Need] = &[DPKG, GCC, PKG_CONFIG];

/// What `cargo xtask lab bench-collectives` needs.
pub(crate) const FOR_MPI: &[Need] = &[MPIRUN, MPICC, GCC];

/// What `cargo xtask profile` needs.
pub(crate) const FOR_PROFILE: &[Need] = &[PERF, ADDR2LINE];

/// What `cargo xtask bench-instructions` needs.
pub(crate) const FOR_INSTRUCTIONS: &[Need] = &[VALGRIND];

/// What `cargo xtask interop` needs.
pub(crate) const FOR_INTEROP: &[Need] = &[TSHARK, IP, QEMU];

/// Installs the packages of `needs` that are missing, and returns the ones still missing after it.
pub(crate) fn ensure(needs: &'static [Need]) -> Vec<&'static Need> {
    let missing = absent(needs);
    if missing.is_empty() {
        return missing;
    }
    for need in &missing {
        eprintln!("xtask: {} is missing: it {}", need.program, need.reason);
    }
    let packages: Vec<&str> = missing.iter().map(|need| need.package).collect();
    match install(&packages) {
        Ok(()) => eprintln!("xtask: installed {}", packages.join(" ")),
        Err(error) => {
            eprintln!("xtask: not installed: {error:#}");
            eprintln!("xtask: by hand: apt-get install {}", packages.join(" "));
        }
    }
    absent(needs)
}

/// Installs those of these Debian packages, of libraries, that are not.
pub(crate) fn ensure_libraries(packages: &[&str]) -> Result<()> {
    let is_missing =
        |package: &&&str| !process::succeeds(Command::new("dpkg").args(["-s", package]));
    let missing: Vec<&str> = packages.iter().filter(is_missing).copied().collect();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("xtask: libraries are missing: {}", missing.join(" "));
    install(&missing)
}

pub(crate) fn absent(needs: &'static [Need]) -> Vec<&'static Need> {
    needs.iter().filter(|need| !is_there(need.program, PROBES)).collect()
}

/// Whether there is a program, and it succeeds with the arguments that the table has for it.
fn is_there(program: &str, probes: &[(&str, &[&str])]) -> bool {
    let Some(path) = process::find_program(program) else { return false };
    let mut probes = probes.iter().filter(|(probed, _)| *probed == program);
    probes.all(|(_, arguments)| process::succeeds(Command::new(&path).args(*arguments)))
}

fn install(packages: &[&str]) -> Result<()> {
    if process::find_program("apt-get").is_none() {
        bail!("this machine has no apt-get");
    }
    let prefix: &[&str] = if process::is_root() {
        &[]
    } else if process::succeeds(Command::new("sudo").args(["-n", "true"])) {
        &["sudo", "-n"]
    } else {
        bail!("neither root nor sudo without a password");
    };
    let mut arguments = vec!["install", "-qy", "--no-install-recommends"];
    arguments.extend(packages);
    eprintln!("xtask: apt-get {}", arguments.join(" "));
    // A fresh machine has no package lists or old ones, and then the first try fails at once.
    if apt_get(prefix, &arguments).is_err() {
        apt_get(prefix, &["update", "-q"])?;
        apt_get(prefix, &arguments)?;
    }
    Ok(())
}

/// Runs `apt-get` and has no service started meanwhile: tests start servers themselves, and a machine
/// gets none that listens because somebody ran the tests. Debian asks `policy-rc.d` before it starts one
/// (invoke-rc.d(8)); a policy that is there stays.
const APT_GET: &str = r#"
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 1' INT TERM HUP
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod 755 "$policy"
fi
DEBIAN_FRONTEND=noninteractive apt-get "$@"
"#;

fn apt_get(prefix: &[&str], arguments: &[&str]) -> Result<()> {
    let words = [prefix, &["sh", "-c", APT_GET, "apt-get"], arguments].concat();
    process::run(Command::new(words[0]).args(&words[1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_without_all_of_its_package_is_not_there() {
        assert!(is_there("sh", &[]));
        assert!(is_there("sh", &[("sh", &["-c", "exit 0"]), ("other", &[])]));
        assert!(!is_there("sh", &[("sh", &["-c", "exit 1"])]));
        assert!(!is_there("no-such-program", &[]));
    }
}
