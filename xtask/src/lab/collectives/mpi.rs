//! The same calls over Open MPI, of Debian.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use millstream_lab::{Handle, Lab, Link, Plan, Rate};

use super::{Calls, Figure};
use crate::{install, process};

/// How Open MPI sums up, by the numbers of its parameter `coll_tuned_allreduce_algorithm`: what it chooses
/// itself, a ring, Rabenseifner's.
pub(super) const ALGORITHMS: [(&str, u8); 3] =
    [("MPI, its choice", 0), ("MPI, ring", 4), ("MPI, Rabenseifner", 6)];

/// The compiled program.
pub(super) struct Mpi {
    program: PathBuf,
}

impl Mpi {
    /// Compiles it; installs Open MPI where it is missing.
    pub(super) fn new() -> Result<Self> {
        let missing = install::ensure(install::FOR_MPI);
        if let Some(need) = missing.first() {
            bail!("{} is missing, and was not installed: it {}", need.program, need.reason);
        }
        let folder = process::target_directory().join("mpi");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let source = folder.join("allreduce.c");
        fs::write(&source, include_str!("allreduce.c"))
            .with_context(|| format!("cannot write {}", source.display()))?;
        let program = folder.join("allreduce");
        process::run(Command::new("mpicc").arg("-O2").arg("-o").arg(&program).arg(&source))?;
        Ok(Self { program: program.canonicalize().context("where is what mpicc made?")? })
    }

    /// Ranks at hosts of a lab of their own, each behind a link of this rate to one bridge.
    pub(super) fn over_links(
        &self,
        world: usize,
        rate: Rate,
        algorithm: u8,
        calls: &Calls,
    ) -> Result<Vec<Figure>> {
        let names: Vec<String> = (0..world).map(|rank| format!("h{rank}")).collect();
        let link = Link { rate: Some(rate), ..Link::default() };
        let plan = Plan::new().hosts(names.clone()).switch("s").links("*", "s", 1, &link);
        let lab = Lab::up(&plan)?;
        let agent = lab.folder().join("agent");
        let mut enter = String::new();
        for name in &names {
            enter += &format!("{name}) set -- {} \"$@\" ;;\n", inside(&lab, name)?);
        }
        // In the place of ssh: options, a host, and words that a shell is to read. Each host has a name of its own, as Open MPI
        // takes those of one name for one machine.
        let script = format!(
            "#!/bin/sh\nwhile :; do case $1 in -*) shift ;; *) break ;; esac; done\nhost=$1\nshift\n\
             set -- sh -c \"hostname $host && $*\"\ncase $host in\n{enter}esac\nexec \"$@\"\n"
        );
        fs::write(&agent, script).context("cannot write the agent of mpirun")?;
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o755))?;
        let hosts: Vec<String> = names.iter().map(|name| format!("{name}:1")).collect();
        let mut command = Command::new(&agent);
        command.arg("h0").args(["exec", "mpirun", "--host", &hosts.join(",")]);
        command.args(["--map-by", "node", "--mca", "plm_rsh_no_tree_spawn", "1"]);
        command.arg("--mca").arg("plm_rsh_agent").arg(&agent);
        command.args([
            "--mca",
            "btl_tcp_if_include",
            "eth0",
            "--mca",
            "oob_tcp_if_include",
            "eth0",
        ]);
        // There are more ranks than processors.
        command.args(["--mca", "mpi_yield_when_idle", "1"]);
        self.run(command, world, "tcp,self", algorithm, calls)
    }

    /// Ranks on this machine, over these of Open MPI's transports.
    pub(super) fn here(
        &self,
        world: usize,
        transports: &str,
        algorithm: u8,
        calls: &Calls,
    ) -> Result<Vec<Figure>> {
        let mut command = Command::new("mpirun");
        command.args(["--oversubscribe", "--mca", "btl_tcp_if_include", "lo"]);
        self.run(command, world, transports, algorithm, calls)
    }

    fn run(
        &self,
        mut command: Command,
        world: usize,
        transports: &str,
        algorithm: u8,
        calls: &Calls,
    ) -> Result<Vec<Figure>> {
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command.args(["-n", &world.to_string(), "--bind-to", "none"]);
        command.args(["--mca", "pml", "ob1", "--mca", "btl", transports]);
        if algorithm != 0 {
            command.args(["--mca", "coll_tuned_use_dynamic_rules", "1"]);
            command.args(["--mca", "coll_tuned_allreduce_algorithm", &algorithm.to_string()]);
        }
        command.arg(&self.program);
        command.args([calls.warm_up.to_string(), calls.count.to_string()]);
        command.args(calls.sizes.iter().map(ToString::to_string));
        figures(&process::output(&mut command)?)
    }
}

/// Words for a shell that enter a host of a lab, with a host name of its own.
fn inside(lab: &Handle, host: &str) -> Result<String> {
    let mut command = lab.command(host, "unshare")?;
    command.arg("--uts");
    let words = [command.get_program()].into_iter().chain(command.get_args());
    Ok(words.map(|word| quoted(Path::new(word))).collect::<Vec<_>>().join(" "))
}

fn quoted(word: &Path) -> String {
    format!("'{}'", word.display().to_string().replace('\'', r"'\''"))
}

/// What the program has printed.
fn figures(printed: &str) -> Result<Vec<Figure>> {
    let figure = |line: &str| {
        let mut words = line.split_whitespace();
        let figure = Figure {
            bytes: words.next()?.parse().ok()?,
            mean_us: words.next()?.parse().ok()?,
            p50_us: words.next()?.parse().ok()?,
        };
        words.next().is_none().then_some(figure)
    };
    let lines = printed
        .lines()
        .map(|line| figure(line).with_context(|| format!("the program over MPI printed {line:?}")));
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_s_lines_are_read() {
        let read = figures("8 10.5 9.0\n4096 20.0 19.5\n").unwrap();
        assert_eq!(read[0], Figure { bytes: 8, mean_us: 10.5, p50_us: 9.0 });
        assert_eq!(read.len(), 2);
        for line in ["8 10.5", "eight 1 1", "8 1 1 1"] {
            assert!(figures(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_shell_reads_a_quoted_word_as_it_was() {
        assert_eq!(quoted(Path::new("it's $1")), r"'it'\''s $1'");
    }
}
