//! Which of several ways leads to a switch, and what the nodes of one switch need.

use super::*;

fn slow(connection: ConnectionEntry) -> ConnectionEntry {
    rate("10gbit", connection)
}

fn fast(connection: ConnectionEntry) -> ConnectionEntry {
    rate("40gbit", connection)
}

impl Net {
    /// The switches of the tree for the hosts of [`leaf`] with these numbers, from the root down.
    fn switches(&self, hosts: [u8; 2]) -> Vec<u64> {
        let hosts = hosts.map(|number| format!("10.1.0.{number}"));
        let nodes = self.nodes(&[&hosts[0], &hosts[1]]);
        nodes.iter().map(|node| node.switch.0).collect()
    }
}

fn address(switch: u8) -> String {
    format!("10.0.{switch}.1")
}

/// A switch with links to these below it.
fn above(number: u8, below: &[u8]) -> SwitchEntry {
    let below = below.iter().map(|&lower| fast(down(&address(number), &address(lower))));
    switch(number.into(), &below.collect::<Vec<_>>())
}

/// A switch with one host.
fn leaf(number: u8, nic: &str) -> SwitchEntry {
    let host = host(number.into(), &address(number), &format!("10.1.0.{number}"));
    switch(number.into(), &[rate(nic, host)])
}

#[test]
fn a_root_goes_around_a_switch_below_it_that_has_no_room() {
    // From switch 0 two ways lead to the second leaf. Switch 1 is above both leaves as well, over slower links.
    let mut slower = above(1, &[]);
    slower.connections = [2, 5].map(|leaf| slow(down(&address(1), &address(leaf)))).to_vec();
    let mut net = Net::new(&[
        above(0, &[2, 3, 4]),
        slower,
        leaf(2, "40gbit"),
        above(3, &[5]),
        above(4, &[5]),
        leaf(5, "40gbit"),
    ]);
    assert_eq!(net.switches([2, 5]), [0, 2, 3, 5]);
    net.state(3).free_bytes = 1 << 20;
    assert_eq!(net.switches([2, 5]), [0, 2, 4, 5]);
    net.state(4).free_bytes = 1 << 20;
    assert_eq!(net.switches([2, 5]), [1, 2, 5]);
}

#[test]
fn a_faster_way_over_more_switches_is_taken_where_hosts_are_no_slower() {
    let net = |nic: &str| {
        let mut root = above(0, &[1, 3]);
        root.connections.push(slow(down(&address(0), &address(2))));
        Net::new(&[root, above(1, &[2]), leaf(2, nic), leaf(3, nic)])
    };
    assert_eq!(net("40gbit").switches([2, 3]), [0, 1, 3, 2]);
    assert_eq!(net("10gbit").switches([2, 3]), [0, 2, 3]);
}

#[test]
fn of_ways_of_one_rate_the_one_over_fewest_switches_is_taken_whatever_these_serve() {
    let mut net = Net::new(&[
        above(0, &[1, 2, 5]),
        above(1, &[4]),
        above(2, &[3]),
        above(3, &[4]),
        leaf(4, "40gbit"),
        leaf(5, "40gbit"),
    ]);
    net.state(1).nodes = 9;
    assert_eq!(net.switches([4, 5]), [0, 1, 5, 4]);
}

#[test]
fn of_ways_over_as_many_switches_the_one_whose_switches_serve_least_together_is_taken() {
    let mut net = Net::new(&[
        above(0, &[1, 3, 6]),
        above(1, &[2]),
        above(2, &[5]),
        above(3, &[4]),
        above(4, &[5]),
        leaf(5, "40gbit"),
        leaf(6, "40gbit"),
    ]);
    for root in [0, 1] {
        for (nodes, tree) in [
            ([0, 3, 1, 1], [0, 3, 6, 4, 5]),
            ([3, 0, 1, 1], [0, 3, 6, 4, 5]),
            ([1, 1, 0, 3], [0, 1, 6, 2, 5]),
            ([1, 1, 3, 0], [0, 1, 6, 2, 5]),
        ] {
            net.state(0).nodes = root;
            (1..5).zip(nodes).for_each(|(switch, nodes)| net.state(switch).nodes = nodes);
            assert_eq!(net.switches([5, 6]), tree, "{root} {nodes:?}");
        }
    }
}

#[test]
fn a_switch_has_room_for_all_of_its_nodes_or_for_none() {
    let mut entries = two_levels();
    entries[1].fan_in = FanIn::new(2);
    let [a, b, ..] = HOSTS;
    let hosts = [a, a, a, b, b, b].map(ip);
    // Three nodes with two ranks each, two above these, and one above those.
    let of_one = node_bytes(2, true, 256 << 10, 8, Mtu::B4096);
    let needed = (6 * of_one, 18);
    for (lacking, fits) in [((0, 0), true), ((1, 0), false), ((0, 1), false)] {
        let mut net = Net::new(&entries);
        let (free_bytes, free_queue_pairs) = (needed.0 - lacking.0, needed.1 - lacking.1);
        *net.state(1) = SwitchState { free_bytes, free_queue_pairs, ..*net.state(1) };
        match net.place(&hosts) {
            Ok(placed) => assert!(fits && placed.tree.nodes().len() == 6, "{lacking:?}"),
            Err(PlaceError::Full { switch: 1, nodes: 6, bytes, queue_pairs }) => {
                assert_eq!(((bytes, queue_pairs), fits), (needed, false));
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}
