//! INCCL on several hosts, and as docs/inccl.md shows it: in network namespaces, where addresses and ports are nobody
//! else's.

mod common;

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use common::cluster::{self, Daemon, PART, Rank};
use common::{compile_with, folder, guide, install, library_folder, package, run};
use millstream_lab::{Lab, LabError, Link, Plan, Rate};

#[test]
fn part_of_another_test() {
    cluster::part_of_another_test();
}

/// Builds a lab; `None`, and the test is skipped, where it cannot be had.
fn lab(plan: &Plan) -> Option<Lab> {
    match Lab::up(plan) {
        Ok(lab) => Some(lab),
        Err(LabError::Unavailable(reason)) => {
            let required = env::var_os("MILLSTREAM_REQUIRE").is_some_and(|value| value == "all");
            assert!(!required, "cannot be skipped, as MILLSTREAM_REQUIRE=all: {reason}");
            println!("skipped: {reason}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn the_example_runs_on_two_three_and_eight_hosts() {
    let ranks: Vec<String> = (0..8).map(|rank| format!("rank{rank}")).collect();
    let link = Link { rate: Some(Rate::from_mbit(200)), ..Link::default() };
    let hosts = ranks.iter().map(String::as_str).chain(["middle"]);
    let plan = Plan::new().hosts(hosts).switch("bridge").links("*", "bridge", 1, &link);
    let Some(lab) = lab(&plan) else { return };
    let middle = lab.host("middle").unwrap().addresses()[0];
    let here = || lab.command("middle", env::current_exe().unwrap()).unwrap();
    let _controller = Daemon::start(here(), &format!("controller --listen {middle}:52200"));
    let words = format!("switch --controller {middle}:52200 --name s0 --bind {middle}");
    let _switch = Daemon::start(here(), &words);

    let wrap = package().join("tests/programs/inccl_wrap.c");
    let flags = ["-Wl,--wrap=inccl_allreduce_write", wrap.to_str().unwrap()];
    let program = compile_with("allreduce-hosts", "examples/allreduce.c", &flags);
    for world in [2, 3, 8] {
        let start = |rank: usize| {
            let mut command = lab.command(&ranks[rank], &program.0).unwrap();
            command.env("LD_LIBRARY_PATH", library_folder()).env("WORLD", world.to_string());
            // The port is the default one, and the address that of the route.
            Rank::start(command.args([world.to_string(), middle.to_string(), rank.to_string()]))
        };
        let started: Vec<Rank> = (0..world).map(start).collect();
        for rank in started {
            assert_eq!(rank.printed(), "1024 elements are right\n");
        }
    }
}

#[test]
fn the_commands_of_the_guide_do_what_it_says() {
    let Some(lab) = lab(&Plan::new().hosts(["here"])) else { return };
    let here = folder("inccl-guide");
    let packages = install(&here.join("prefix"));
    for name in ["allreduce.c", "gather.c"] {
        fs::copy(package().join("examples").join(name), here.join(name)).unwrap();
    }
    // The command's daemons, with the command's words.
    let own = env::current_exe().unwrap();
    let daemon = cluster::DAEMON.join(" ");
    let script = format!("#!/bin/sh\n{PART}=\"--keep $*\" exec {} {daemon}\n", own.display());
    let command = here.join("bin/millstream");
    fs::create_dir_all(command.parent().unwrap()).unwrap();
    fs::write(&command, script).unwrap();
    fs::set_permissions(&command, fs::Permissions::from_mode(0o755)).unwrap();

    let script = guide("inccl.md", "sh").concat();
    assert!(script.contains("pkg-config"), "{script}");
    let path = env::var("PATH").unwrap_or_default();
    let mut shell = lab.command("here", "sh").unwrap();
    shell.args(["-eu", "-c", &script]).current_dir(&here);
    shell.env("PATH", format!("{}:{path}", here.join("bin").display()));
    shell.env("PKG_CONFIG_PATH", packages).env("LD_LIBRARY_PATH", here.join("prefix/lib"));
    let said = String::from_utf8(run(&mut shell).stdout).unwrap();
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, [0, 1, 2].map(|rank| format!("rank {rank} has 0.5 to 2.5")));
}

#[test]
fn the_programs_of_the_guide_are_the_examples() {
    let examples = ["allreduce.c", "gather.c"]
        .map(|name| fs::read_to_string(package().join("examples").join(name)).unwrap());
    let shown = guide("inccl.md", "c");
    assert!(shown.len() >= 5, "{}", shown.len());
    for block in shown {
        assert!(examples.iter().any(|text| text.contains(&block)), "no example has this:\n{block}");
    }
}
