//! `switch --shards`: nodes of trees are divided among threads with sockets of their own.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use common::{Folder, Running, address, eventually, millstream, run};

/// Two ranks that go on until they are killed.
fn job(controller: &str, group: &str) -> Vec<Running> {
    let rank = |rank: &str| {
        let mut command = millstream();
        command.args(["allreduce", "--path=switch", "--fallback=off", "--world=2", "--rank", rank]);
        command.args(["--controller", controller, "--group", group, "--bind", &address()]);
        command.args(["--dtype=int32", "--size=64KiB", "--iters=1000000", "--verify"]);
        Running::start(group, &mut command)
    };
    let mut ranks = ["0", "1"].map(rank).into_iter().collect::<Vec<_>>();
    ranks.iter_mut().for_each(|rank| assert!(rank.line().contains("over switch s0")));
    ranks
}

/// In which slots of the address the queue pairs of a plan's switch are: the upper five bits of their numbers.
fn slots(plan: &str) -> BTreeSet<u32> {
    let numbers = plan.lines().filter_map(|line| line.split_once("my_qp: "));
    numbers.map(|(_, number)| number.trim().parse::<u32>().unwrap() >> 19).collect()
}

fn plans(folder: &str) -> Vec<String> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_plan = |path: &std::path::PathBuf| path.extension().is_some_and(|it| it == "yaml");
    paths.filter(is_plan).filter_map(|path| fs::read_to_string(path).ok()).collect()
}

fn threads(process: u32) -> Vec<String> {
    let tasks = fs::read_dir(Path::new("/proc").join(process.to_string()).join("task")).unwrap();
    let name = |path: std::path::PathBuf| fs::read_to_string(path.join("comm")).unwrap_or_default();
    tasks.map(|task| name(task.unwrap().path()).trim().to_owned()).collect()
}

#[test]
fn groups_are_divided_among_the_shards_of_a_switch() {
    let (folder, listen) = (Folder::new(), format!("{}:0", address()));
    let at = folder.file("plans");
    let arguments = ["controller", "--listen", &listen, "--plans", &at];
    let mut controller = Running::start("controller", millstream().args(arguments));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    let arguments = ["switch", "--controller", &listen, "--name=s0", "--shards=2"];
    let mut switch =
        Running::start("switch", millstream().args(arguments).args(["--bind", &address()]));
    switch.ready();
    let names = threads(switch.id());
    for name in ["switch-0", "switch-1"] {
        assert!(names.iter().any(|it| it == name), "{names:?}");
    }
    let jobs: Vec<_> = ["one", "two", "three"].map(|group| job(&listen, group)).into();
    eventually("the plans are there", || plans(&at).len() == 3);
    let found: Vec<_> = plans(&at).iter().map(|plan| slots(plan)).collect();
    assert!(found.iter().all(|slots| slots.len() == 1), "a node is in one shard: {found:?}");
    let all: BTreeSet<u32> = found.into_iter().flatten().collect();
    assert_eq!(all.len(), 2, "{all:?}");
    drop(jobs);
    // Each node went from the shard that it was in: the limits are those of all.
    eventually("the plans are removed", || plans(&at).is_empty());
    drop(job(&listen, "four"));
    switch.signal("TERM");
    switch.output().success();
}

#[test]
fn shards_that_cannot_be_are_refused() {
    let with = |shards: &str| run(&["switch", "--controller=127.0.0.1:1", shards]);
    with("--shards=0").failure(2);
    with("--shards=17").failure(2);
    let output = run(&["switch", "--controller=127.0.0.1:1", "--driver=packet", "--shards=2"]);
    assert!(output.failure(1).contains("2 shards for 127.0.0.1: a device of the packet driver"));
}
