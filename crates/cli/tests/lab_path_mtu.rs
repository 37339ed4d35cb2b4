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

/// A lab, unless there can be none here.
fn up(plan: &Plan) -> Option<Lab> {
    match Lab::up(plan) {
        Ok(lab) => Some(lab),
        Err(LabError::Unavailable(reason)) => {
            skip(&reason);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Has these hosts sum up vectors, and looks that all of it is right; what each has said.
fn all_reduce(lab: &Handle, controller: &str, hosts: &[&str], more: &[&str]) -> Vec<String> {
    let world = hosts.len().to_string();
    let ranks: Vec<Running> = (0..)
        .zip(hosts)
        .map(|(rank, &name): (u32, _)| {
            let (rank, bind) = (rank.to_string(), address(lab, name));
            let words =
                ["allreduce", "--controller", controller, "--world", &world, "--rank", &rank];
            let common = ["--size", "1MiB,64", "--iters", "3", "--verify", "--timeout", "30s"];
            let mut command = at(lab, name, &words);
            command.args(common).args(["--path=switch", "--json", "--bind", &bind]).args(more);
            Running::start(name, &mut command)
        })
        .collect();
    ranks.into_iter().map(|rank| rank.output().success().stdout.clone()).collect()
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
    let Some(lab) = up(&plan) else { return };
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
    all_reduce(&lab, &controller, &names[..4], &["--fallback=off"]);
}

/// The same for hosts that take the place of switches: no interface says that packets between two of them are to be
/// short, only their routes do.
#[test]
fn hosts_in_the_place_of_switches_send_each_other_packets_that_arrive() {
    let link = Link { mtu: 9000, families: vec![Family::Ipv4], ..Link::default() };
    let names = ["a", "b", "c"];
    let plan = names.iter().fold(Plan::new().hosts(names).switch("net"), |plan, name| {
        plan.links(name, "net", 1, &link)
    });
    let Some(lab) = up(&plan) else { return };
    for (host, other) in [("a", "b"), ("b", "a")] {
        let to = format!("{}/32", address(&lab, other));
        let mut ip = lab.command(host, "ip").unwrap();
        ip.args(["route", "replace", &to, "dev", "eth0", "mtu", "1500"]);
        assert!(ip.status().unwrap().success());
    }
    let controller = format!("{}:52200", address(&lab, "c"));
    let words = ["controller", "--listen", &controller];
    let mut running = Running::start("controller", &mut at(&lab, "c", &words));
    running.ready();
    for said in all_reduce(&lab, &controller, &names, &[]) {
        assert!(said.contains("no switch has registered"), "{said}");
    }
}
