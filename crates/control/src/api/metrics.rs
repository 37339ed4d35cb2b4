//! The metrics of a controller.

use millstream_inc::controller::{EdgeOverview, GroupOverview, NodeOverview, Overview};
use millstream_inc::protocol::PortCounters;

use crate::prometheus::{Kind, Metric, Samples};

const STATES: [&str; 5] =
    ["creating_group", "group_ready", "creating_communicator", "communicator_ready", "leaving"];

const EDGE: &[&str] = &["group", "communicator", "switch", "edge", "tree"];

/// All that there are.
pub(crate) const METRICS: &[Metric<Overview>] = &[
    Metric {
        name: "millstream_controller_info",
        kind: Kind::Gauge,
        labels: &["version"],
        help: "1, with the version of the controller.",
        values: |_, to| to.add(&[env!("CARGO_PKG_VERSION")], 1),
    },
    Metric {
        name: "millstream_controller_leads",
        kind: Kind::Gauge,
        labels: &[],
        help: "1 if the controller leads, 0 if another one does or none.",
        values: |overview, to| to.add(&[], u64::from(overview.leadership.leads)),
    },
    Metric {
        name: "millstream_controller_term",
        kind: Kind::Gauge,
        labels: &[],
        help: "The term that the controller commands with, if it leads.",
        values: |overview, to| {
            if let Some(term) = overview.leadership.term {
                to.add(&[], term);
            }
        },
    },
    Metric {
        name: "millstream_controller_connections",
        kind: Kind::Gauge,
        labels: &[],
        help: "Connections of switches, hosts and peers that have not said what they are.",
        values: |overview, to| to.add(&[], overview.connections),
    },
    Metric {
        name: "millstream_controller_switches",
        kind: Kind::Gauge,
        labels: &[],
        help: "Switches that are registered.",
        values: |overview, to| to.add(&[], overview.switches.len()),
    },
    Metric {
        name: "millstream_controller_groups",
        kind: Kind::Gauge,
        labels: &["state"],
        help: "Groups, by how far they are.",
        values: |overview, to| {
            for state in STATES {
                let groups = overview.groups.iter().filter(|group| group.state == state);
                to.add(&[state], groups.count());
            }
        },
    },
    Metric {
        name: "millstream_controller_switch_nodes",
        kind: Kind::Gauge,
        labels: &["switch"],
        help: "Nodes of trees on a switch, those that are being destroyed among them.",
        values: |overview, to| {
            for switch in &overview.switches {
                to.add(&[&switch.name], switch.communicators);
            }
        },
    },
    Metric {
        name: "millstream_tree_collectives_total",
        kind: Kind::Counter,
        labels: &["group", "communicator", "switch", "tree"],
        help: "Collectives that a node of a tree has taken part in.",
        values: |overview, to| {
            each_node(overview, |group, node, number| {
                if let Some(collectives) = node.collectives {
                    let tree = node.tree.to_string();
                    to.add(&[&group.name, number, &node.switch, &tree], collectives);
                }
            });
        },
    },
    Metric {
        name: "millstream_tree_edge_packets_sent_total",
        kind: Kind::Counter,
        labels: EDGE,
        help: "Packets that a switch has sent on an edge of a tree.",
        values: |overview, to| edges(overview, to, |it| it.packets_sent),
    },
    Metric {
        name: "millstream_tree_edge_packets_received_total",
        kind: Kind::Counter,
        labels: EDGE,
        help: "Packets that it has received there.",
        values: |overview, to| edges(overview, to, |it| it.packets_received),
    },
    Metric {
        name: "millstream_tree_edge_payload_sent_bytes_total",
        kind: Kind::Counter,
        labels: EDGE,
        help: "Bytes of payload that it has sent there, those of repetitions among them.",
        values: |overview, to| edges(overview, to, |it| it.payload_bytes_sent),
    },
    Metric {
        name: "millstream_tree_edge_payload_received_bytes_total",
        kind: Kind::Counter,
        labels: EDGE,
        help: "Bytes of payload that it has received there in order.",
        values: |overview, to| edges(overview, to, |it| it.payload_bytes_received),
    },
    Metric {
        name: "millstream_tree_edge_retransmissions_total",
        kind: Kind::Counter,
        labels: EDGE,
        help: "How often it went back to send again there.",
        values: |overview, to| edges(overview, to, |it| it.retransmissions),
    },
];

/// The nodes that are being made or were, each with its number.
fn each_node(overview: &Overview, mut act: impl FnMut(&GroupOverview, &NodeOverview, &str)) {
    for group in &overview.groups {
        for node in group.communicator.iter().flat_map(|it| &it.nodes) {
            if let Some(number) = node.communicator {
                act(group, node, &number.to_string());
            }
        }
    }
}

fn edges(overview: &Overview, to: &mut Samples<'_>, value: fn(&PortCounters) -> u64) {
    each_node(overview, |group, node, number| {
        let tree = node.tree.to_string();
        for EdgeOverview { counters, .. } in &node.edges {
            let Some(counters) = counters else { continue };
            let labels = [&*group.name, number, &node.switch, &edge_name(counters.rank), &tree];
            to.add(&labels, value(counters));
        }
    });
}

/// How an edge is called: by the lowest rank below it.
pub(crate) fn edge_name(rank: Option<u32>) -> String {
    rank.map_or_else(|| "up".to_owned(), |rank| format!("rank {rank}"))
}
