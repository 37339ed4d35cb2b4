//! How the time of an allreduce grows with the number of hosts: trees of three levels of switches, each
//! packet simulated, beside what a ring and a tree of messages between the same hosts could do at best.
//!
//! Hosts and switches take no time to compute here, in the models neither. What is compared is what the
//! network costs: steps, latencies and bytes.

use core::fmt::Write;
use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;

use millstream_inc::plan::{Candidate, Child, FanIn, PlanOptions, SwitchId, Tree, TreeNode};
use millstream_inc::{
    ChildSpec, CommunicatorOptions, CommunicatorSpec, ParentSpec, SwitchConfig, SwitchNode, Uplink,
    send_window_up,
};
use millstream_roce::{IcrcCheck, Instant};
use millstream_wire::Mtu;

use super::allreduce::{AllReduceOptions, Builder, draw_calls};
use super::{INC_SCALE, NetworkCounts, Outputs, Parameters, Report, ScenarioError, within};
use crate::connection::{ConnectionOptions, Remote};
use crate::rank::Participant;
use crate::{Happening, HostOptions, LinkOptions, NodeId, Outcome, Rng, Simulation};

/// Hosts, if none are given: fan-ins of 2, 4 and 8. What takes longer is asked for.
const HOSTS: [u32; 3] = [8, 64, 512];
/// Bytes of the vector, if none are given.
const LENGTHS: [u64; 3] = [8, 4 << 10, 64 << 10];
/// Levels of switches.
const LEVELS: u32 = 3;
const RATE: u64 = 100_000_000_000;
/// Of one link.
const LATENCY: Duration = Duration::from_micros(1);
const MTU: Mtu = Mtu::B4096;
/// IPv4, UDP, BTH, RETH, immediate, ICRC; Ethernet with preamble, FCS and gap.
const HEADERS: u64 = 20 + 8 + 12 + 16 + 4 + 4 + 38;
/// Vectors and results of all hosts.
const MOST_BYTES: u64 = 8 << 30;

/// A point of the table.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    /// How many hosts.
    pub hosts: u32,
    /// The most children that a switch has.
    pub fan_in: u32,
    /// Bytes of the vector.
    pub bytes: u64,
    /// From the start, which is the same for all, until the last host had the sum.
    pub simulated: Duration,
    /// The least that a ring takes: twice as many steps as there are other hosts, each with its share of the
    /// vector.
    pub ring: Duration,
    /// The least that recursive doubling takes, or halving and doubling if that is less (Thakur, Rabenseifner
    /// and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).
    pub doubling: Duration,
}

/// The fan-in of a tree of three levels.
fn fan_in(hosts: u32) -> u32 {
    (2..64).find(|fan_in: &u32| fan_in.pow(LEVELS) >= hosts).unwrap_or(64)
}

/// A tree of that fan-in, each of whose nodes is on a switch of its own.
fn balanced(hosts: u32, fan_in: u32) -> Tree {
    // More switches than nodes.
    let candidates: Vec<Candidate> = (0..u64::from(hosts))
        .map(|switch| Candidate { switch: SwitchId(switch), communicators: 0, free: usize::MAX })
        .collect();
    let fan_in = FanIn::new(fan_in).expect("a switch has 64 children at most");
    Tree::plan(hosts, &candidates, &PlanOptions { fan_in, hosts: &[] })
        .expect("the fan-in is enough for three levels")
}

/// A root, and below it a switch for each host.
fn broad(hosts: u32) -> Tree {
    let leaf = |rank: u32| TreeNode {
        switch: SwitchId(u64::from(rank) + 1),
        parent: Some(0),
        children: vec![Child::Host { rank }],
    };
    let children = (0..hosts as usize).map(|rank| Child::Switch { node: rank + 1 }).collect();
    let root = TreeNode { switch: SwitchId(0), parent: None, children };
    Tree::new([root].into_iter().chain((0..hosts).map(leaf)).collect()).expect("it is a tree")
}

/// How long a link is busy with a message, headers and all.
fn wire(bytes: u64) -> Duration {
    let packets = bytes.div_ceil(MTU.bytes() as u64).max(1);
    let nanos = u128::from(bytes + packets * HEADERS) * 8 * 1_000_000_000 / u128::from(RATE);
    Duration::from_nanos(nanos as u64)
}

/// The latency between two hosts over the switches of the tree: up to the first that is above both.
fn between(a: u32, b: u32, fan_in: u32) -> Duration {
    let apart = |level: &u32| a / fan_in.pow(*level) != b / fan_in.pow(*level);
    let levels = (1..LEVELS).filter(apart).count() as u32 + 1;
    LATENCY * (2 * levels)
}

/// Each chunk goes round once to be summed and once to be told, and passes all links but one each time.
fn ring(hosts: u32, fan_in: u32, bytes: u64) -> Duration {
    let latencies: Duration = (1..hosts).map(|host| between(host - 1, host, fan_in)).sum();
    2 * (latencies + wire(bytes.div_ceil(hosts.into())) * (hosts - 1))
}

/// Where the number of hosts is no power of two, that of the next lower one.
fn doubling(hosts: u32, fan_in: u32, bytes: u64) -> Duration {
    let steps = || (0..hosts.ilog2()).map(|step| between(0, 1 << step, fan_in));
    let doubled: Duration = steps().map(|latency| latency + wire(bytes)).sum();
    let halves = (1..).map(|step| wire(bytes.div_ceil(1 << step)));
    let halved: Duration = steps().zip(halves).map(|(latency, wire)| 2 * (latency + wire)).sum();
    doubled.min(halved)
}

/// Runs one allreduce of so many bytes over a tree for so many hosts; what is wrong is in the report.
pub fn run_point(seed: u64, hosts: u32, bytes: u64) -> (Point, Report) {
    let options = AllReduceOptions {
        seed,
        hosts,
        counts: vec![bytes / 4],
        in_place: false,
        segment_bytes: 64 << 10,
        window: 8,
        pause: Duration::ZERO,
        link: LinkOptions::new(RATE, LATENCY),
        connection: ConnectionOptions { path_mtu: MTU, reads: 0, ..ConnectionOptions::DEFAULT },
        call_limit: Duration::from_secs(60),
        ..AllReduceOptions::default()
    };
    let fan_in = fan_in(hosts);
    let (simulation, simulated) = run_tree(&options, &balanced(hosts, fan_in));
    let point = Point {
        hosts,
        fan_in,
        bytes,
        simulated,
        ring: ring(hosts, fan_in, bytes),
        doubling: doubling(hosts, fan_in, bytes),
    };
    let what = format!("{hosts} hosts, fan-in {fan_in}, {bytes} bytes");
    (point, report_of(&simulation, seed, what, bytes * u64::from(hosts), simulated))
}

/// Runs one allreduce of so many bytes, where each host has a switch of its own below the root. The receive buffer of each
/// machine is so long by the kernel's account and is looked at every 0.1 ms; says how many datagrams found it full.
/// `divided` says whether senders are told how much of it they may fill.
pub fn run_buffered(
    seed: u64,
    hosts: u32,
    bytes: u64,
    receive_buffer: u64,
    divided: bool,
) -> (u64, Report) {
    let options = AllReduceOptions {
        seed,
        hosts,
        counts: vec![bytes / 4],
        segment_bytes: 64 << 10,
        window: 16,
        pause: Duration::ZERO,
        link: LinkOptions { queue_bytes: u64::MAX, ..LinkOptions::new(RATE, LATENCY) },
        host: HostOptions {
            coalescing: Duration::from_micros(100),
            receive_buffer,
            ..HostOptions::default()
        },
        receive_budget: divided.then_some(receive_buffer / 2),
        connection: ConnectionOptions { path_mtu: MTU, reads: 0, ..ConnectionOptions::DEFAULT },
        call_limit: Duration::from_secs(60),
        ..AllReduceOptions::default()
    };
    let (simulation, simulated) = run_tree(&options, &broad(hosts));
    let what = format!("{hosts} hosts, each below a switch, {bytes} bytes, divided: {divided}");
    let report = report_of(&simulation, seed, what, bytes * u64::from(hosts), simulated);
    (simulation.count(Happening::ReceiveBufferFull), report)
}

/// Runs one allreduce of so many bytes where the root has one switch below it, over a link of 1 Gbit/s, and that has all
/// hosts, over links that are faster. The receive buffers of the switches hold `budget` bytes.
pub fn run_chain(seed: u64, hosts: u32, bytes: u64, budget: u64) -> Report {
    let options = AllReduceOptions {
        seed,
        hosts,
        counts: vec![bytes / 4],
        segment_bytes: 64 << 10,
        window: 32,
        pause: Duration::ZERO,
        link: LinkOptions::new(RATE, LATENCY),
        uplink: Some(LinkOptions {
            queue_bytes: u64::MAX,
            ..LinkOptions::new(1_000_000_000, LATENCY)
        }),
        receive_budget: Some(budget),
        connection: ConnectionOptions { path_mtu: MTU, reads: 0, ..ConnectionOptions::DEFAULT },
        call_limit: Duration::from_secs(60),
        ..AllReduceOptions::default()
    };
    let leaf = (0..hosts).map(|rank| Child::Host { rank }).collect();
    let nodes = vec![
        TreeNode { switch: SwitchId(0), parent: None, children: vec![Child::Switch { node: 1 }] },
        TreeNode { switch: SwitchId(1), parent: Some(0), children: leaf },
    ];
    let tree = Tree::new(nodes).expect("it is a tree");
    let (simulation, simulated) = run_tree(&options, &tree);
    let what = format!("{hosts} hosts below two switches, {bytes} bytes, budget {budget}");
    report_of(&simulation, seed, what, bytes * u64::from(hosts), simulated)
}

fn report_of(
    simulation: &Simulation<'_, Participant>,
    seed: u64,
    what: String,
    bytes: u64,
    simulated: Duration,
) -> Report {
    Report {
        digest: simulation.digest(),
        bytes,
        virtual_time: simulated,
        network: NetworkCounts::of(simulation),
        violations: simulation.violations().to_vec(),
        ..Report::of_many(INC_SCALE, seed, what)
    }
}

/// Runs the calls of all hosts; how long they took is that of the last. What is wrong are violations.
fn run_tree(
    options: &AllReduceOptions,
    tree: &Tree,
) -> (Simulation<'static, Participant>, Duration) {
    let mut simulation = Simulation::new(options.seed);
    simulation.allow_changed_sources();
    let nodes = build(options, tree, &mut simulation);
    let outcome = simulation.run_until(Instant::ZERO + options.time_limit, |_| false);
    let mut last = Instant::ZERO;
    let mut failures = Vec::new();
    for (rank, &node) in nodes.iter().enumerate() {
        let Participant::Rank(host) = simulation.machine_mut(node) else { continue };
        failures.extend(host.take_wrong().into_iter().map(|what| format!("rank {rank}: {what}")));
        match host.outcome() {
            Some((at, Ok(()))) => last = last.max(at),
            Some((at, Err(error))) => failures.push(format!("rank {rank}, at {at} s: {error}")),
            None => failures.push(format!("the call of rank {rank} has not ended ({outcome:?})")),
        }
    }
    if outcome != Outcome::Quiet && failures.is_empty() {
        failures.push(format!("all is done, yet timers or packets go on ({outcome:?})"));
    }
    failures.into_iter().for_each(|what| simulation.violate(what));
    (simulation, Duration::from_nanos(last.nanos()))
}

/// Adds hosts, switches and a cable for each edge of the tree; the hosts, by rank.
fn build(
    options: &AllReduceOptions,
    tree: &Tree,
    simulation: &mut Simulation<'_, Participant>,
) -> Vec<NodeId> {
    let mut rng = Rng::fork(options.seed, u64::MAX);
    let mut hosts: Vec<Builder> =
        (0..options.hosts).map(|rank| Builder::new(rank, rng.bits(), options)).collect();
    let calls = draw_calls(&mut rng, options, &mut hosts);
    let place = |node: usize| IpAddr::from(Ipv4Addr::from(0x0a80_0001 + node as u32));
    let mut switches: Vec<SwitchNode> = (0..tree.nodes().len())
        .map(|node| {
            let mut switch = SwitchNode::new(SwitchConfig {
                icrc: IcrcCheck::Exact,
                timeout: options.connection.timeout,
                retry_count: options.connection.retry_count,
                ..SwitchConfig::new(place(node), rng.bits())
            });
            if let Some(bytes) = options.receive_budget {
                switch.set_receive_budget(bytes);
            }
            switch
        })
        .collect();
    let mut ways_up: Vec<Option<Uplink>> = vec![None; switches.len()];
    let mut remotes: Vec<Option<Remote>> = vec![None; hosts.len()];
    // Children come behind their parents.
    for (index, node) in tree.nodes().iter().enumerate().rev() {
        let children = node.children.iter().map(|&child| match child {
            Child::Host { rank } => hosts[rank as usize].child.clone(),
            Child::Switch { node: below } => {
                let way_up = ways_up[below].expect("it was made before");
                let Uplink { qpn, psn, receive_share } = way_up;
                let (ranks, address) = (tree.ranks(child), place(below));
                ChildSpec { ranks, address, qpn, psn, is_switch: true, receive_share }
            }
        });
        let spec = CommunicatorSpec {
            id: index as u64 + 1,
            path_mtu: options.connection.path_mtu,
            segment_bytes: options.segment_bytes,
            window: options.window,
            children: children.collect(),
            world: options.hosts,
            has_parent: node.parent.is_some(),
            options: CommunicatorOptions::default(),
        };
        let created = switches[index].create_communicator(Instant::ZERO, &spec);
        let created = created.expect("a switch has room for one");
        ways_up[index] = created.uplink;
        for edge in created.edges {
            let child = node.children.iter().find(|child| tree.lowest_rank(**child) == edge.rank);
            match *child.expect("an edge is a child's") {
                Child::Host { rank } => {
                    let &ChildSpec { psn: send_psn, receive_share: granted, .. } =
                        &hosts[rank as usize].child;
                    remotes[rank as usize] = Some(Remote {
                        address: place(index),
                        qpn: edge.qpn,
                        send_psn,
                        receive_psn: edge.psn,
                        receive_share: send_window_up(edge.receive_share, granted),
                    });
                }
                Child::Switch { node: below } => {
                    let (qpn, psn, receive_share) = (edge.qpn, edge.psn, edge.receive_share);
                    let parent = ParentSpec { address: place(index), qpn, psn, receive_share };
                    let id = below as u64 + 1;
                    let connected = switches[below].connect_parent(Instant::ZERO, id, &parent);
                    assert_eq!(connected, Ok(true), "it has waited for that");
                }
            }
        }
    }
    let places: Vec<NodeId> = switches
        .into_iter()
        .enumerate()
        .map(|(node, switch)| {
            let participant = Participant::Switch(Box::new(switch), Vec::new());
            simulation.add_machine(place(node), participant, options.host)
        })
        .collect();
    for (index, node) in tree.nodes().iter().enumerate() {
        if let Some(parent) = node.parent {
            let link = options.uplink.unwrap_or(options.link);
            simulation.connect(places[index], places[parent], link);
        }
    }
    let hosts = hosts.into_iter().zip(calls).zip(remotes).enumerate();
    hosts
        .map(|(rank, ((builder, calls), remote))| {
            let address = builder.child.address;
            let remote = remote.expect("every rank is on an edge");
            let rank_of = builder.build(&remote, options, calls);
            let participant = Participant::Rank(Box::new(rank_of));
            let host = simulation.add_machine(address, participant, options.host);
            let leaf = tree.leaf_of(rank as u32).expect("every rank is below a leaf");
            simulation.connect(host, places[leaf], options.link);
            host
        })
        .collect()
}

/// The scenario `inc-scale`. Faults are none: their parameters do not count.
pub(super) fn scenario(
    parameters: &Parameters,
    outputs: &Outputs<'_>,
) -> Result<Report, ScenarioError> {
    if outputs.pcap.is_some() || outputs.log.is_some() {
        return Err(ScenarioError::NoOutput(INC_SCALE));
    }
    let what = format!(
        "an allreduce over {LEVELS} levels of switches, each link {} Gbit/s and {} us, path MTU {}",
        RATE / 1_000_000_000,
        LATENCY.as_micros(),
        MTU.bytes()
    );
    let mut report = Report::of_many(INC_SCALE, parameters.seed, what);
    let hosts = match parameters.hosts {
        Some(_) => vec![within("hosts", parameters.hosts, 8, 1, 1 << 16)?],
        None => HOSTS.to_vec(),
    };
    let most = |hosts: u32| MOST_BYTES / 2 / u64::from(hosts);
    let lengths = match parameters.length {
        Some(_) => {
            let limit = hosts.iter().map(|hosts| most(*hosts)).min().unwrap_or(0);
            // Whole elements.
            vec![within("length", parameters.length, 0, 0, limit)? / 4 * 4]
        }
        None => LENGTHS.to_vec(),
    };
    let micros = |time: Duration| time.as_nanos() as f64 / 1000.0;
    // Writing to a string does not fail.
    let mut table = String::new();
    let _ = writeln!(
        table,
        "\n{:>7}{:>8}{:>9}{:>14}{:>12}{:>12}{:>10}",
        "hosts", "fan-in", "bytes", "simulated us", "doubling us", "ring us", "packets"
    );
    for &bytes in &lengths {
        for &hosts in &hosts {
            let (point, one) = run_point(parameters.seed, hosts, bytes);
            let _ = writeln!(
                table,
                "{hosts:>7}{:>8}{bytes:>9}{:>14.1}{:>12.1}{:>12.1}{:>10}",
                point.fan_in,
                micros(point.simulated),
                micros(point.doubling),
                micros(point.ring),
                one.network.sent
            );
            report.bytes += one.bytes;
            report.absorb(one);
        }
    }
    report.table = Some(table);
    Ok(report)
}
