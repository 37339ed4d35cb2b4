//! Developer tasks, run as `cargo xtask TASK`.
//!
//! Everything that checks the repository is a task here, so that a developer's machine and CI run
//! the same thing: `.ci/run` is one line that calls `cargo xtask test`.

#![forbid(unsafe_code)]

mod campaign;
mod compare;
mod install;
mod interop;
mod lab;
mod licences;
mod machine;
mod manual;
mod mooncake;
mod package;
mod process;
mod profile;
mod programs;
mod scheduler;
mod test;
mod tidy;
mod wheel;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask TASK

  test [--only STEP]   install what the tests need, then check and test everything; or one step of it
  tidy                 check the architecture and the style rules that no other tool checks
  licences             check the licence of every dependency
  man                  write the manual pages (packaging/man) anew
  config-docs          write the reference of settings (docs/reference/configuration.md) anew
  package              make a Debian package in target/package
  interop [OPTIONS]    run millstream against the Linux kernel's soft-RoCE in a guest
      --only TEXT        only the rows whose name contains TEXT
      --accel tcg|kvm    how qemu runs the guest (tcg)
      --list             print the rows and stop
      --bench            print figures of our stack beside the kernel's, and run no row
  mooncake [OPTIONS]   run our transfer engine with the original's, which is installed from PyPI
      --only TEXT        only the cases whose name contains TEXT
      --list             print the cases and stop
  wheel                build the wheels for Python in target/wheels, and test them in fresh environments
  power-cut [OPTIONS]  reset a guest that offers files amid WRITEs, and see what is there then (docs/nvmeof.md)
      --rounds N         resets (3)
      --seed S           of the moments, and of what the disks' caches lose
      --lying-disk       its flushes do nothing: this must fail
  campaign [OPTIONS]   run all simulations side by side, from seeds that were not tried before
      --minutes N        for so long (10)
      --runs R           so many of each scenario, in place of --minutes
      --seed BASE        from this seed on, tried before or not; what was tried is not kept
      --only SCENARIO    one scenario
  compare OPTIONS      run `millstream bench rdma` of two builds by turns, and print medians of both
      --before PATH      a millstream
      --after PATH       another one
      --runs N           of each (5)
      --json             print one JSON object
      ...                all other arguments are for `bench rdma`
  lab TASK             hosts and links of a set rate on this machine (docs/lab.md)
      up FILE            make the lab that FILE describes, such as crates/lab/plans/four-links.toml; FILE.yaml is a
                         topology, with its controller and switches
      exec HOST -- ...   run a program at a host
      cut HOST:NIC       take a link down; with --silent, lose what it is given
      restore HOST:NIC   make it whole again
      rate HOST:NIC R    change its rate: 20mbit, none
      status             NICs, addresses, rates, and what is cut
      down               end it, and all that runs in it
      bench              what several links give together, and what a cut costs
      bench-policies     what classic and TENT make of links of unlike rates, of one that changes, and of small
                         requests beside a stream
      bench-collectives  AllReduce beside Open MPI, which it installs, over links of 100 Mbit/s
        --loopback         on this machine alone
        --runs N           rounds (3)
        --no-cuts          only rates, and small requests
        --mixed            only small requests
        --json             print one JSON object
      --name NAME        one of several labs
  bench-instructions   instructions of a slice in the transfer engine's scheduler, for classic and TENT (--json)
  bench-one-rail       the rate of TENT in parts of classic's over one rail, by turns
      --turns N          pairs of runs (10)
      --json             print one JSON object
  profile [OPTIONS]    where the processor time of a gigabyte goes, by perf, for both ends of `bench rdma`
      --size S           bytes of a message (64KiB)
      --op O             write, read or send (write)
      ...                all other arguments are for `bench rdma`

MILLSTREAM_REQUIRE=all makes every skipped test or row a failure.
MILLSTREAM_BIN names a millstream that was built already, for interop, package, profile and wheel; MILLSTREAM_LIBRARY a
libmillstream.so, for package.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((task, rest)) = arguments.split_first() else {
        eprint!("{USAGE}");
        return ExitCode::from(2);
    };
    let outcome = match (task.as_str(), rest) {
        ("test", options) => match test::Options::parse(options) {
            Ok(options) => test::run(&options),
            Err(error) => return usage(&error.to_string()),
        },
        ("tidy", []) => tidy::run(),
        ("licences", []) => licences::run(),
        ("man", []) => manual::run(),
        ("config-docs", []) => manual::configuration(),
        ("package", []) => package::run(),
        ("interop", options) => match interop::Options::parse(options) {
            Ok(options) => interop::run(&options),
            Err(error) => return usage(&error.to_string()),
        },
        ("mooncake", options) => match mooncake::Options::parse(options) {
            Ok(options) => mooncake::run(&options),
            Err(error) => return usage(&error.to_string()),
        },
        ("wheel", []) => wheel::run(),
        ("power-cut", options) => match interop::power_cut::Options::parse(options) {
            Ok(options) => interop::power_cut::run(&options),
            Err(error) => return usage(&format!("{error:#}")),
        },
        ("campaign", options) => match campaign::Options::parse(options) {
            Ok(options) => campaign::run(&options),
            Err(error) => return usage(&format!("{error:#}")),
        },
        ("compare", options) => match compare::Options::parse(options) {
            Ok(options) => compare::run(&options),
            Err(error) => return usage(&format!("{error:#}")),
        },
        ("lab", options) => match lab::Options::parse(options) {
            Ok(options) => lab::run(&options),
            Err(error) => return usage(&format!("{error:#}")),
        },
        ("bench-instructions", options) => match scheduler::Options::parse(options) {
            Ok(options) => scheduler::instructions(&options),
            Err(error) => return usage(&format!("bench-instructions: {error:#}")),
        },
        ("bench-one-rail", options) => match scheduler::Options::parse(options) {
            Ok(options) => scheduler::one_rail(&options),
            Err(error) => return usage(&format!("bench-one-rail: {error:#}")),
        },
        ("profile", options) => match profile::Options::parse(options) {
            Ok(options) => profile::run(&options),
            Err(error) => return usage(&format!("{error:#}")),
        },
        ("help" | "--help" | "-h", _) => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => return usage(&format!("no task {:?}", arguments.join(" "))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn usage(problem: &str) -> ExitCode {
    eprintln!("xtask: {problem}\n");
    eprint!("{USAGE}");
    ExitCode::from(2)
}
