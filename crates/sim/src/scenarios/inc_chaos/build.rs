//! Hosts, switches and connections, as a world says.

use core::ops::Range;
use core::time::Duration;
use std::collections::BTreeMap;

use millstream_inc::{
    ACKNOWLEDGEMENT_DELAY, CONTROL_BYTES, ChildSpec, CommunicatorOptions, CommunicatorSpec,
    HostConfig, HostWorker, ParentSpec, Ranks, SwitchConfig, SwitchNode, Uplink,
};
use millstream_roce::{
    Access, Endpoint, EndpointConfig, IcrcCheck, Instant, OwnedMemory, QueuePairCapabilities,
    QueuePairConfig,
};
use millstream_wire::{Psn, Qpn};

use super::call::Arena;
use super::machine::{Kind, Participant};
use super::member::{Call, Member};
use super::outsider::Known;
use super::plain;
use super::world::{Group, Rudeness, World, address};
use crate::connection::{Remote, connect};
use crate::rank::DOMAIN;
use crate::{ConnectionOptions, HostOptions, LinkId, LinkOptions, NodeId, Rng, Simulation};

pub(super) type Network<'a> = Simulation<'a, Participant>;

/// The number of a node of a communicator's tree.
pub(super) const fn number(group: usize, node: usize) -> u64 {
    (group as u64) << 32 | node as u64
}

/// What was built.
pub(super) struct Built {
    /// All queue pairs.
    pub(super) known: Vec<Known>,
    /// The links of each machine.
    pub(super) links: Vec<Vec<LinkId>>,
    /// The outsider.
    pub(super) outsider: NodeId,
    /// Bytes of all vectors.
    pub(super) bytes: u64,
    /// Bytes of memory of each node.
    pub(super) memory: BTreeMap<u64, u64>,
}

/// A host that is being made.
pub(super) struct Host {
    pub(super) endpoint: Endpoint<OwnedMemory>,
    members: Vec<Member>,
    pub(super) plain: Vec<plain::Member>,
    regions: u64,
    pub(super) changes_sources: bool,
    call_limit: Duration,
    probe_every: Duration,
}

impl Host {
    fn new(world: &World, machine: usize, rng: &mut Rng) -> Self {
        let on_it = |group: &Group| group.hosts.iter().filter(|&&host| host == machine).count();
        let regions = world.groups.iter().map(|group| on_it(group) * (1 + group.calls.len()));
        let config = EndpointConfig {
            icrc: IcrcCheck::Exact,
            ..EndpointConfig::new(address(machine), rng.bits())
        };
        let more = world.failover.as_ref().map_or(0, |group| group.regions_on(machine));
        let memory = OwnedMemory::new(regions.sum::<usize>() + more);
        let endpoint = Endpoint::new(config, memory);
        // Results may come to where sources are.
        let changes_sources = world.failover.as_ref().is_some_and(|group| group.is_on(machine));
        let (members, plain) = (Vec::new(), Vec::new());
        Self {
            endpoint,
            members,
            plain,
            regions: 0,
            changes_sources,
            call_limit: world.call_limit(),
            probe_every: world.probe_every(),
        }
    }

    pub(super) fn register(&mut self, rng: &mut Rng, access: Access, bytes: Vec<u8>) -> (u32, u64) {
        self.regions += 1;
        let address = (self.regions << 32) + rng.below(64);
        let memory = self.endpoint.memory_mut();
        let key = memory.register(DOMAIN, address, access, bytes);
        (key.expect("room was made for all regions"), address)
    }

    /// Makes a rank's queue pair, memory and worker; where its switch finds it.
    fn add(
        &mut self,
        rng: &mut Rng,
        (number, group): (usize, &Group),
        ranks: &[u32],
        arenas: Vec<Arena>,
    ) -> (Qpn, Psn) {
        let (sizes, rank) = (&group.sizes, ranks[0]);
        let (control_key, control_address) = {
            let bytes = vec![0; CONTROL_BYTES];
            self.register(rng, Access::LOCAL_WRITE, bytes)
        };
        let mut config = HostConfig {
            segment_bytes: sizes.segment_bytes,
            window: sizes.window,
            control_key,
            control_address,
            rank,
            world: sizes.world,
            path_mtu: group.path_mtu,
        };
        match group.rude.filter(|(rude, _)| *rude == rank) {
            Some((_, Rudeness::Window)) => config.window += rng.between(1, 9) as u32,
            Some((_, Rudeness::SegmentBytes)) => {
                config.segment_bytes = sizes.path_mtu * rng.between(1, 5) as u32;
            }
            Some((_, Rudeness::Rank)) => config.rank = rng.below(sizes.world.into()) as u32,
            Some((_, Rudeness::Post(_))) | None => {}
        }
        let all: Ranks = ranks.iter().copied().collect();
        let worker = match ranks.len() {
            1 => HostWorker::new(config),
            _ => HostWorker::of_ranks(config, all),
        };
        let worker = worker.expect("segment and window are in range");
        let sends = worker.required_send_requests() as usize + 8;
        let receives = worker.required_receive_requests() as usize;
        let completions = self.endpoint.create_completion_queue(sends + receives);
        let completions = completions.expect("each rank has one completion queue");
        let capabilities = QueuePairCapabilities::new(sends, receives);
        let config = QueuePairConfig {
            acknowledgement_delay: ACKNOWLEDGEMENT_DELAY,
            ..QueuePairConfig::new(DOMAIN, completions, capabilities)
        };
        let qpn = self.endpoint.create_queue_pair(&config).expect("each rank has one queue pair");
        let mut calls = Vec::new();
        for (index, mut arena) in arenas.into_iter().enumerate() {
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            // What is posted past the worker may be under way when the call has ended.
            self.changes_sources |= arena.is_in_place() || group.posts(rank);
            let at = self.register(rng, access, arena.bytes.clone());
            arena.registered(&group.shape(index, rank), ranks, sizes.world, at);
            let pause = match rng.below(4) {
                0 | 1 => 0,
                2 => rng.below(100_000),
                _ => rng.below(3_000_000),
            };
            let pause = Duration::from_nanos(pause);
            calls.push(Call { key: at.0, arena, pause, started: None });
        }
        let mut leaves_out = None;
        for absence in group.absences.iter().filter(|it| it.rank == rank) {
            match absence.late {
                Some(late) => calls[absence.call].pause = late,
                None => leaves_out = Some(absence.call),
            }
        }
        let mut member = Member {
            group: number,
            family: group.family,
            rank,
            qpn,
            completions,
            control_key,
            control_address,
            worker,
            ended: 0,
            start_at: None,
            calls,
            leaves_out,
            deadline: None,
            overdue: false,
            probe_at: None,
            call_limit: self.call_limit,
            probe_every: self.probe_every,
            failed: None,
            failed_at: None,
            is_confused: group.is_confused(rank),
            rng: Rng::new(rng.bits()),
        };
        member.plan_start(Instant::ZERO);
        self.members.push(member);
        (qpn, draw_psn(rng))
    }
}

/// Half of the first numbers wrap soon.
pub(super) fn draw_psn(rng: &mut Rng) -> Psn {
    let psn = rng.bits() as u32;
    Psn::new(if psn & 1 == 0 { psn } else { 0u32.wrapping_sub(1 + (psn >> 20) % 64) })
}

impl Group {
    /// The memory of these hosts for all calls.
    fn arenas(&self, rng: &mut Rng, members: &[Vec<u32>]) -> Vec<Vec<Arena>> {
        let world = self.sizes.world;
        let mut by_member: Vec<Vec<Arena>> = members.iter().map(|_| Vec::new()).collect();
        for (number, shape) in self.calls.iter().enumerate() {
            let mut arenas = shape.arenas(rng, &self.tree, &self.sizes, members);
            if let Some((call, rank, other)) = self.mismatch
                && call <= number
            {
                arenas.iter_mut().for_each(|arena| arena.expected = None);
                let differs = members.iter().position(|ranks| ranks[0] == rank);
                if let Some(at) = differs.filter(|_| call == number) {
                    arenas[at] = other.arena(rng, &members[at], world, false);
                }
            }
            by_member.iter_mut().zip(arenas).for_each(|(all, arena)| all.push(arena));
        }
        by_member
    }
}

/// Adds all machines, links and communicators.
pub(super) fn build(world: &World, rng: &mut Rng, network: &mut Network<'_>) -> Built {
    let mut hosts: Vec<Host> =
        (0..world.hosts).map(|machine| Host::new(world, machine, rng)).collect();
    let mut switches: Vec<SwitchNode> = (0..world.switches)
        .map(|number| {
            SwitchNode::new(SwitchConfig {
                icrc: IcrcCheck::Exact,
                timeout: world.timeout,
                ..SwitchConfig::new(address(world.hosts + number), rng.bits())
            })
        })
        .collect();
    let mut known = Vec::new();
    let (mut bytes, mut memory) = (0, BTreeMap::new());
    for group in world.groups.iter().enumerate() {
        let made = (&mut known, &mut memory);
        bytes += connect_group(world, rng, group, &mut hosts, &mut switches, made);
    }
    for (machine, host) in hosts.into_iter().enumerate() {
        let Host { endpoint, members, plain, changes_sources, .. } = host;
        let (endpoint, ranks) = (Box::new(endpoint), Vec::new());
        let kind = Kind::Host { endpoint, members, plain, ranks };
        let options = HostOptions::default();
        let node = network.add_machine(address(machine), Participant::new(kind), options);
        if changes_sources {
            network.allow_changed_sources_of(node);
        }
    }
    for (number, switch) in switches.into_iter().enumerate() {
        let (kind, options) = (Kind::Switch(Box::new(switch)), HostOptions::default());
        let address = address(world.hosts + number);
        let node = network.add_machine(address, Participant::new(kind), options);
        // A slot is used again once a child's next contribution shows that it has the result, though its
        // acknowledgement was lost.
        network.allow_changed_sources_of(node);
    }
    let outsider = network.add_machine(
        address(world.hosts + world.switches),
        Participant::new(Kind::Outsider),
        HostOptions::default(),
    );
    if world.has_own_switches() {
        for host in 0..world.hosts {
            let address = address(world.own_switch(host));
            let switch = SwitchNode::new(SwitchConfig {
                icrc: IcrcCheck::Exact,
                timeout: world.timeout,
                ..SwitchConfig::new(address, rng.bits())
            });
            let kind = Kind::Switch(Box::new(switch));
            let node = network.add_machine(address, Participant::new(kind), HostOptions::default());
            network.allow_changed_sources_of(node);
        }
    }
    let links = add_links(world, network, outsider);
    if let Some(slow) = &world.slow {
        network.machine_mut(NodeId(slow.machine)).slow_down(slow);
    }
    Built { known, links, outsider, bytes, memory }
}

/// Links of all machines, and of the outsider to them.
fn add_links(world: &World, network: &mut Network<'_>, outsider: NodeId) -> Vec<Vec<LinkId>> {
    let machines = world.hosts + world.switches;
    let outside = network.add_link(LinkOptions { rate: None, ..world.link });
    let mut links = link_machines(network, world.hosts..machines, world.link);
    if world.has_own_switches() {
        link_own_switches(world, network, &mut links);
        for host in 0..world.hosts {
            network.route(outsider, NodeId(world.own_switch(host)), outside);
        }
    }
    for machine in 0..machines {
        network.route(outsider, NodeId(machine), outside);
    }
    links
}

/// Each machine sends everything over one link, and gets all from a switch over another. Hosts come before the switches.
pub(super) fn link_machines(
    network: &mut Network<'_>,
    switches: Range<usize>,
    options: LinkOptions,
) -> Vec<Vec<LinkId>> {
    let mut links: Vec<Vec<LinkId>> = (0..switches.end).map(|_| Vec::new()).collect();
    for switch in switches {
        for other in 0..=switch {
            let pairs = [(switch, other), (other, switch)];
            for (from, to) in pairs.into_iter().take(1 + usize::from(other != switch)) {
                let link = network.add_link(options);
                network.route(NodeId(from), NodeId(to), link);
                links[from].push(link);
                links[to].push(link);
            }
        }
    }
    links
}

/// The switch of each host has links to all hosts and their switches, which are cut with the host's.
fn link_own_switches(world: &World, network: &mut Network<'_>, links: &mut [Vec<LinkId>]) {
    for host in 0..world.hosts {
        let own = world.own_switch(host);
        let hosts = (0..world.hosts).map(|other| (other, other));
        let switches = (0..=host).map(|other| (other, world.own_switch(other)));
        for (machine, other) in hosts.chain(switches) {
            let pairs = [(own, other), (other, own)];
            for (from, to) in pairs.into_iter().take(1 + usize::from(other != own)) {
                let link = network.add_link(world.link);
                network.route(NodeId(from), NodeId(to), link);
                links[host].push(link);
                links[machine].push(link);
            }
        }
    }
}

/// Makes all nodes of a tree from the leaves up, and connects them and the hosts; bytes of all vectors.
fn connect_group(
    world: &World,
    rng: &mut Rng,
    (number_of_group, group): (usize, &Group),
    hosts: &mut [Host],
    switches: &mut [SwitchNode],
    (known, memory): (&mut Vec<Known>, &mut BTreeMap<u64, u64>),
) -> u64 {
    let members = group.members();
    let arenas = group.arenas(rng, &members);
    let bytes = arenas.iter().flatten().map(|arena| arena.bytes.len() as u64).sum();
    let ends: BTreeMap<u32, (Qpn, Psn)> = members
        .iter()
        .zip(arenas)
        .map(|(ranks, arenas)| {
            let host = &mut hosts[group.hosts[ranks[0] as usize]];
            let end = match &group.plain {
                Some(plain) => {
                    host.add_plain(rng, (number_of_group, group, plain), ranks[0], arenas)
                }
                None => host.add(rng, (number_of_group, group), ranks, arenas),
            };
            (ranks[0], end)
        })
        .collect();
    let options = ConnectionOptions {
        path_mtu: group.path_mtu,
        timeout: world.timeout,
        reads: 0,
        ..ConnectionOptions::DEFAULT
    };
    let tree = &group.tree;
    let place = |node: usize| address(world.hosts + tree.nodes[node].switch);
    let mut ways_up: Vec<Option<Uplink>> = vec![None; tree.nodes.len()];
    for node in (0..tree.nodes.len()).rev() {
        let of_hosts = tree.nodes[node].ranks.iter().map(|&rank| {
            let (qpn, psn) = ends[&rank];
            let address = address(group.hosts[rank as usize]);
            let ranks = group.ranks_with(rank).into_iter().collect();
            ChildSpec { ranks, address, qpn, psn, is_switch: false, receive_share: None }
        });
        let of_nodes = tree.below(node).map(|below| {
            let way_up = ways_up[below].expect("children were made before");
            let Uplink { qpn, psn, receive_share } = way_up;
            let ranks = tree.ranks(below).into_iter().flat_map(|rank| group.ranks_with(rank));
            let ranks: Ranks = ranks.collect();
            ChildSpec { ranks, address: place(below), qpn, psn, is_switch: true, receive_share }
        });
        let spec = CommunicatorSpec {
            id: number(number_of_group, node),
            path_mtu: group.path_mtu,
            segment_bytes: group.sizes.segment_bytes,
            window: group.sizes.window,
            world: group.sizes.world,
            children: of_hosts.chain(of_nodes).collect(),
            has_parent: tree.nodes[node].parent.is_some(),
            // The same in all runs of a seed, and nothing is drawn for it.
            options: CommunicatorOptions {
                reproducible: number_of_group % 2 == 1,
                plain: group.plain.is_some(),
            },
        };
        let created = switches[tree.nodes[node].switch]
            .create_communicator(Instant::ZERO, &spec)
            .expect("a switch has room for all");
        memory.insert(spec.id, spec.memory_bytes());
        ways_up[node] = created.uplink;
        for edge in created.edges {
            let below =
                tree.below(node).find(|&it| tree.ranks(it).into_iter().min() == Some(edge.rank));
            let (peer, peer_qpn) = match below {
                Some(below) => (place(below), ways_up[below].map(|it| it.qpn).unwrap_or_default()),
                None => (address(group.hosts[edge.rank as usize]), ends[&edge.rank].0),
            };
            known.push(Known { address: place(node), qpn: edge.qpn, peer });
            known.push(Known { address: peer, qpn: peer_qpn, peer: place(node) });
            let (qpn, psn, receive_share) = (edge.qpn, edge.psn, edge.receive_share);
            let parent = ParentSpec { address: place(node), qpn, psn, receive_share };
            match below {
                Some(below) => {
                    let id = number(number_of_group, below);
                    let connected = switches[tree.nodes[below].switch].connect_parent(
                        Instant::ZERO,
                        id,
                        &parent,
                    );
                    assert_eq!(connected, Ok(true));
                }
                None => {
                    let (qpn, psn) = ends[&edge.rank];
                    let remote = Remote {
                        address: parent.address,
                        qpn: parent.qpn,
                        send_psn: psn,
                        receive_psn: parent.psn,
                        receive_share: parent.receive_share,
                    };
                    let host = &mut hosts[group.hosts[edge.rank as usize]];
                    connect(&mut host.endpoint, qpn, &remote, &options);
                }
            }
        }
    }
    bytes
}
