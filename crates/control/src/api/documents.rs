//! The documents of the API. `openapi.json` says what is in them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use millstream_inc::controller::{GroupOverview, Overview, SwitchOverview};
use millstream_inc::protocol::SwitchLimits;
use millstream_inc::topology::{Lower, Topology};
use serde::Serialize;

/// `/api/v1/switches`.
#[derive(Serialize)]
pub(super) struct Switches<'a> {
    pub(super) switches: &'a [SwitchOverview],
}

/// `/api/v1/groups`.
#[derive(Serialize)]
pub(super) struct Groups<'a> {
    groups: Vec<GroupSummary<'a>>,
}

#[derive(Serialize)]
struct GroupSummary<'a> {
    name: &'a str,
    world: u32,
    joined: usize,
    state: &'static str,
    waits_for: Option<&'a str>,
    communicator: Option<u64>,
    nodes: usize,
    collectives: Option<u64>,
    /// What the ranks send into the tree.
    payload_bytes_per_second: Option<f64>,
}

pub(super) fn groups(overview: &Overview) -> Groups<'_> {
    Groups { groups: overview.groups.iter().map(summary).collect() }
}

fn summary(group: &GroupOverview) -> GroupSummary<'_> {
    let communicator = group.communicator.as_ref();
    let nodes = communicator.map_or(&[][..], |it| &it.nodes);
    let from_hosts = nodes.iter().flat_map(|node| &node.edges).filter(|edge| edge.rank.is_some());
    let rates: Option<Vec<f64>> =
        from_hosts.map(|edge| Some(edge.rates?.payload_bytes_received)).collect();
    GroupSummary {
        name: &group.name,
        world: group.world,
        joined: group.members.len(),
        state: group.state,
        waits_for: group.waits_for.as_deref(),
        communicator: communicator.and_then(|it| it.communicator),
        nodes: nodes.len(),
        collectives: nodes.first().and_then(|root| root.collectives),
        payload_bytes_per_second: rates.filter(|it| !it.is_empty()).map(|it| it.iter().sum()),
    }
}

/// `/api/v1/topology`.
#[derive(Serialize)]
pub(super) struct TopologyDocument<'a> {
    /// `file`, or `trees` where links are those that trees use.
    source: &'static str,
    switches: Vec<SwitchPlace<'a>>,
    hosts: Vec<HostPlace>,
    links: Vec<LinkPlace>,
}

#[derive(Serialize)]
struct SwitchPlace<'a> {
    id: Option<u64>,
    name: Option<&'a str>,
    addresses: Vec<IpAddr>,
    registered: bool,
    limits: Option<SwitchLimits>,
    communicators: Option<usize>,
}

#[derive(Serialize)]
struct HostPlace {
    id: Option<u64>,
    addresses: BTreeSet<IpAddr>,
}

#[derive(Serialize)]
struct LinkPlace {
    /// An index of `switches`.
    upper: usize,
    upper_address: IpAddr,
    /// An index of `switches`, if a switch is below.
    lower_switch: Option<usize>,
    /// An index of `hosts`, if a host is below.
    lower_host: Option<usize>,
    lower_address: IpAddr,
    rate_bits_per_second: Option<u64>,
}

pub(super) fn topology<'a>(
    file: Option<&'a Topology>,
    overview: &'a Overview,
) -> TopologyDocument<'a> {
    match file {
        Some(file) => of_file(file, overview),
        None => of_trees(overview),
    }
}

fn of_file<'a>(file: &'a Topology, overview: &'a Overview) -> TopologyDocument<'a> {
    let switches = file.switches().iter().map(|switch| {
        let known = overview.switches.iter().find(|it| it.topology_id == Some(switch.id));
        SwitchPlace {
            id: Some(switch.id),
            name: known.map(|it| it.name.as_str()).or(switch.name.as_deref()),
            addresses: switch.addresses.clone(),
            registered: known.is_some_and(|it| it.connected),
            limits: known.map(|it| it.limits),
            communicators: known.map(|it| it.communicators),
        }
    });
    let mut hosts: Vec<HostPlace> = Vec::new();
    let mut by_id = BTreeMap::new();
    let links = file.links().iter().map(|link| {
        let (lower_switch, lower_host) = match link.lower {
            Lower::Switch(index) => (Some(index), None),
            Lower::Host(id) => {
                let index = *by_id.entry(id).or_insert_with(|| {
                    hosts.push(HostPlace { id: Some(id), addresses: BTreeSet::new() });
                    hosts.len() - 1
                });
                hosts[index].addresses.insert(link.lower_address);
                (None, Some(index))
            }
        };
        LinkPlace {
            upper: link.upper,
            upper_address: link.upper_address,
            lower_switch,
            lower_host,
            lower_address: link.lower_address,
            rate_bits_per_second: link.rate.map(|rate| rate.bits_per_s()),
        }
    });
    let links = links.collect();
    TopologyDocument { source: "file", switches: switches.collect(), hosts, links }
}

/// The switches that are registered, the ranks' hosts, and who is connected to whom.
fn of_trees(overview: &Overview) -> TopologyDocument<'_> {
    let switches = overview.switches.iter().map(|switch| SwitchPlace {
        id: None,
        name: Some(&switch.name),
        addresses: vec![switch.address],
        registered: switch.connected,
        limits: Some(switch.limits),
        communicators: Some(switch.communicators),
    });
    let members = overview.groups.iter().flat_map(|group| &group.members);
    let mut hosts: BTreeMap<IpAddr, BTreeSet<IpAddr>> = BTreeMap::new();
    for member in members {
        let all = [member.address].into_iter().chain(member.more_addresses.iter().copied());
        hosts.entry(member.address).or_default().extend(all);
    }
    let index = |(index, switch): (usize, &SwitchOverview)| (switch.address, index);
    let switch_at: BTreeMap<IpAddr, usize> =
        overview.switches.iter().enumerate().map(index).collect();
    let host_at: BTreeMap<IpAddr, usize> = hosts
        .values()
        .enumerate()
        .flat_map(|(at, all)| all.iter().map(move |&it| (it, at)))
        .collect();
    let communicators = overview.groups.iter().filter_map(|group| group.communicator.as_ref());
    let edges = communicators.flat_map(|it| &it.nodes).flat_map(|node| &node.edges);
    let below = edges.filter(|edge| !edge.up);
    let pairs: BTreeSet<(IpAddr, IpAddr, bool)> = below
        .filter_map(|edge| Some((edge.my.ip?, edge.peer.ip?, edge.rank.is_some())))
        // Two nodes of a tree that are on one switch have no link between them.
        .filter(|&(upper, lower, is_host)| is_host || upper != lower)
        .collect();
    let link = |(upper_address, lower_address, is_host): (IpAddr, IpAddr, bool)| {
        let host = host_at.get(&lower_address).copied().filter(|_| is_host);
        let switch = switch_at.get(&lower_address).copied().filter(|_| !is_host);
        (host.is_some() || switch.is_some()).then_some(LinkPlace {
            upper: *switch_at.get(&upper_address)?,
            upper_address,
            lower_switch: switch,
            lower_host: host,
            lower_address,
            rate_bits_per_second: None,
        })
    };
    let host = |addresses: BTreeSet<IpAddr>| HostPlace { id: None, addresses };
    TopologyDocument {
        source: "trees",
        switches: switches.collect(),
        hosts: hosts.into_values().map(host).collect(),
        links: pairs.into_iter().filter_map(link).collect(),
    }
}
