//! Collectives over links with unlike MTUs.

mod common;

use std::process::Command;

use common::{PROGRAM, Running, skip};
use millstream_lab::{Family, Handle, Lab, LabError, Link, Plan};

/// The command at a host.
fn at(lab: &Handle, host: &str, words: &[&str]) -> Command {
    let mut command = lab.command(host, PROGRAM).unwrap();
    command.env_remove("MILLSTREAM_LOG").env_remove("RUST_LOG").args(words);
    command
}

fn address(lab: &Handle, host: &str) -> String {
    lab.host(host).unwrap().nics[0].addresses[0].to_string()
}

/// One switch has an interface of 1500 bytes on a network where all else has 9000. What is too long for it is lost on
/// the way to it, and it is at the other end of links of hosts and of the other switch.
#[test]
fn a_switch_on_a_slower_link_gets_packets_that_it_can_take() {
    let link = |mtu| Link { mtu, families: vec![Family::Ipv4], ..Link::default() };
    let names = ["a", "b", "c", "d", "long", "short"];
    let mut plan = Plan::new().hosts(names).switch("net");
    for name in names {
        let mtu = if name == "short" { 1500 } else { 9000 };
        plan = plan.links(name, "net", 1, &link(mtu));
    }
    let lab = match Lab::up(&plan) {
        Ok(lab) => lab,
        Err(LabError::Unavailable(reason)) => return skip(&reason),
        Err(error) => panic!("{error}"),
    };
    let controller = format!("{}:52200", address(&lab, "a"));
    let words = ["controller", "--listen", &controller, "--fan-in", "2"];
    let mut running = vec![Running::start("controller", &mut at(&lab, "a", &words))];
    running[0].ready();
    for name in ["long", "short"] {
        let bind = address(&lab, name);
        let words = ["switch", "--controller", &controller, "--name", name, "--bind", &bind];
        let mut switch = Running::start(name, &mut at(&lab, name, &words));
        switch.ready();
        running.push(switch);
    }
    let ranks: Vec<Running> = (0..)
        .zip(&names[..4])
        .map(|(rank, &name): (u32, _)| {
            let (rank, bind) = (rank.to_string(), address(&lab, name));
            let words = ["allreduce", "--controller", &controller, "--world", "4", "--rank", &rank];
            let more = ["--size", "1MiB,64", "--iters", "3", "--verify", "--timeout", "30s"];
            let mut command = at(&lab, name, &words);
            command.args(more).args(["--path=switch", "--fallback=off", "--json", "--bind", &bind]);
            Running::start(name, &mut command)
        })
        .collect();
    for rank in ranks {
        rank.output().success();
    }
}
