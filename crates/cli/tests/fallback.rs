//! Hosts of `collective` and `allreduce` that take the place of switches, as processes.

mod common;

use common::{Running, address, millstream};

fn controller() -> (Running, String) {
    let listen = format!("{}:0", address());
    let mut controller =
        Running::start("controller", millstream().args(["controller", "--listen", &listen]));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    (controller, listen)
}

fn hosts(controller: &str, collective: &str, world: usize, more: &[&str]) -> Vec<Running> {
    let start = |rank: usize| {
        let (bind, count, number) = (address(), world.to_string(), rank.to_string());
        let mut command = millstream();
        command.args(["collective", "--collective", collective, "--path=switch"]);
        command.args(["--controller", controller, "--group", collective, "--bind", &bind]);
        command.args(["--world", &count, "--rank", &number, "--verify"]).args(more);
        Running::start(&format!("rank {rank}"), &mut command)
    };
    (0..world).map(start).collect()
}

#[test]
fn all_collectives_go_without_a_switch_and_say_so() {
    let (_controller, controller) = controller();
    let collectives = ["allreduce", "reduce", "broadcast", "barrier", "reducescatter", "allgather"];
    let worlds = [2, 3, 8, 2, 3, 2];
    // All groups at once: each waits for a switch first.
    let groups: Vec<Vec<Running>> = collectives
        .into_iter()
        .zip(worlds)
        .map(|(collective, world)| {
            let size = if collective == "barrier" { "--size=0" } else { "--size=480000" };
            hosts(&controller, collective, world, &[size, "--iters=2", "--json"])
        })
        .collect();
    for host in groups.into_iter().flatten() {
        let output = host.output().success();
        let report = output.json();
        assert_eq!(report["wrong"], 0, "{report}");
        let reason = "no switch has registered at the controller";
        assert_eq!(report["fallback"], reason, "{report}");
        let note = format!("note: the ranks take the place of a switch: {reason}");
        assert!(output.stderr.contains(&note), "{}", output.stderr);
    }
}

#[test]
fn without_json_the_first_line_names_the_ranks_and_off_is_an_error() {
    let (_controller, controller) = controller();
    let ranks = hosts(&controller, "allreduce", 2, &["--size=4KiB"]);
    for (rank, host) in ranks.into_iter().enumerate() {
        let output = host.output().success();
        let first = output.stdout.lines().next().unwrap();
        let start = format!(
            "rank {rank} of 2 in group allreduce, over 2 trees of the ranks' own switches: that of rank 0 at 127."
        );
        assert!(first.starts_with(&start), "{first}");
        assert!(output.stdout.contains(" 0 wrong"), "{}", output.stdout);
    }
    // Within that time both have started, also on a busy machine.
    let off = ["--size=4KiB", "--fallback=off", "--timeout=5s"];
    for host in hosts(&controller, "allreduce", 2, &off) {
        let output = host.output();
        let told = output.failure(1).contains("there is no switch for group \"allreduce\"");
        assert!(told, "{}", output.stderr);
    }
}
