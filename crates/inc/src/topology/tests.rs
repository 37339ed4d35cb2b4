//! Entries that are a network, and entries that are none.

use core::net::IpAddr;

use super::{ConnectionEntry, Problem, SwitchEntry, Topology, TopologyError};

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn switch(id: u64, connections: &[ConnectionEntry]) -> SwitchEntry {
    SwitchEntry { id, name: None, root: false, fan_in: None, connections: connections.to_vec() }
}

pub(super) fn root(id: u64, connections: &[ConnectionEntry]) -> SwitchEntry {
    SwitchEntry { root: true, ..switch(id, connections) }
}

fn connection(up: bool, host_id: Option<u64>, my_ip: &str, peer_ip: &str) -> ConnectionEntry {
    let (my_ip, peer_ip) = (ip(my_ip), ip(peer_ip));
    ConnectionEntry { up, host_id, my_ip, my_mac: None, peer_ip, peer_mac: None, rate: None }
}

pub(super) fn host(id: u64, my_ip: &str, peer_ip: &str) -> ConnectionEntry {
    connection(false, Some(id), my_ip, peer_ip)
}

pub(super) fn down(my_ip: &str, peer_ip: &str) -> ConnectionEntry {
    connection(false, None, my_ip, peer_ip)
}

pub(super) fn up(my_ip: &str, peer_ip: &str) -> ConnectionEntry {
    connection(true, None, my_ip, peer_ip)
}

pub(super) fn rate(rate: &str, connection: ConnectionEntry) -> ConnectionEntry {
    ConnectionEntry { rate: Some(rate.parse().unwrap()), ..connection }
}

/// A root with two leaves of two hosts each. Both ends say that they are connected.
pub(super) fn two_levels() -> Vec<SwitchEntry> {
    vec![
        root(0, &[down("10.0.0.1", "10.0.1.1"), down("10.0.0.1", "10.0.2.1")]),
        switch(
            1,
            &[
                up("10.0.1.1", "10.0.0.1"),
                host(0, "10.0.1.1", "10.1.0.1"),
                host(1, "10.0.1.1", "10.1.0.2"),
            ],
        ),
        switch(
            2,
            &[
                up("10.0.2.1", "10.0.0.1"),
                host(2, "10.0.2.1", "10.1.0.3"),
                host(3, "10.0.2.1", "10.1.0.4"),
            ],
        ),
    ]
}

#[test]
fn a_link_that_both_ends_have_is_one() {
    let both = Topology::new(&two_levels()).unwrap();
    assert_eq!((both.switches().len(), both.links().len()), (3, 6));
    let mut entries = two_levels();
    entries[1].connections.remove(0);
    entries[0].connections.remove(1);
    assert_eq!(Topology::new(&entries).unwrap().links().len(), 6);
    assert!(both.has_host(ip("10.1.0.3")) && !both.has_host(ip("10.0.2.1")));
    assert_eq!(both.host_id(ip("10.1.0.3")), Some(2));
    // One has the rate, or both have the same.
    entries[0].connections[0] = rate("10gbit", entries[0].connections[0]);
    entries[1].connections.push(up("10.0.1.1", "10.0.0.1"));
    Topology::new(&entries).unwrap();
    entries[1].connections[2] = rate("10gbit", entries[1].connections[2]);
    let rates = Topology::new(&entries).unwrap();
    assert_eq!(rates.links().iter().filter(|link| link.rate.is_some()).count(), 1);
}

#[test]
fn a_switch_is_known_by_its_addresses_and_its_name() {
    let mut entries = two_levels();
    entries[1].name = Some("leaf".to_owned());
    entries[2].connections[2].my_ip = ip("10.0.2.2");
    let topology = Topology::new(&entries).unwrap();
    for (name, address, index) in [
        ("any", "10.0.0.1", Some(0)),
        ("leaf", "10.0.1.1", Some(1)),
        ("any", "10.0.1.1", None),
        ("leaf", "10.0.2.1", Some(2)),
        ("any", "10.0.2.2", Some(2)),
        ("leaf", "10.0.9.9", None),
        ("any", "10.1.0.1", None),
    ] {
        assert_eq!(topology.switch(name, ip(address)), index, "{name} {address}");
    }
    assert_eq!(topology.describe(1), "1 (\"leaf\")");
    assert_eq!(topology.describe(2), "2 (10.0.2.1)");
}

/// What is wrong with a network that was right before it was changed.
fn wrong(change: impl FnOnce(&mut Vec<SwitchEntry>)) -> TopologyError {
    let mut entries = two_levels();
    change(&mut entries);
    Topology::new(&entries).unwrap_err()
}

#[test]
fn what_is_no_network_is_refused() {
    let at = TopologyError::at;
    let all = TopologyError::all;
    let of = TopologyError::connection;
    type Change = fn(&mut Vec<SwitchEntry>);
    let table: [(Change, TopologyError); 22] = [
        (|it| it.clear(), all(Problem::Nothing("switch"))),
        (
            |it| {
                *it = vec![
                    switch(0, &[down("10.0.0.1", "10.0.1.1")]),
                    switch(1, &[up("10.0.1.1", "10.0.0.1")]),
                ];
            },
            all(Problem::Nothing("host")),
        ),
        (|it| it[2].id = 1, at(2, Problem::DuplicateId(1))),
        (
            |it| it.iter_mut().for_each(|entry| entry.name = Some("s".to_owned())),
            at(1, Problem::DuplicateName { name: "s".to_owned(), other: 0 }),
        ),
        (|it| it[1].connections.clear(), at(1, Problem::NoConnections)),
        (
            |it| it[0].connections[0].my_ip = ip("0.0.0.0"),
            of(0, 0, Problem::Address(ip("0.0.0.0"))),
        ),
        (
            |it| it[1].connections[1].peer_ip = ip("239.1.1.1"),
            of(1, 1, Problem::Address(ip("239.1.1.1"))),
        ),
        (
            |it| it[1].connections[2].peer_ip = ip("::2"),
            of(1, 2, Problem::Families(ip("10.0.1.1"), ip("::2"))),
        ),
        (
            |it| it[2].connections[1].my_ip = ip("10.0.1.1"),
            of(2, 1, Problem::SharedAddress { address: ip("10.0.1.1"), other: 1 }),
        ),
        (
            |it| it[0].connections[1].peer_ip = ip("10.0.0.1"),
            of(0, 1, Problem::Itself(ip("10.0.0.1"))),
        ),
        (
            |it| it[2].connections[0].peer_ip = ip("10.0.0.9"),
            of(2, 0, Problem::NoSwitchAbove(ip("10.0.0.9"))),
        ),
        (
            |it| it[0].connections[1].peer_ip = ip("10.0.0.9"),
            of(0, 1, Problem::Nobody(ip("10.0.0.9"))),
        ),
        (|it| it[1].connections[0].host_id = Some(7), of(1, 0, Problem::HostAbove)),
        (
            |it| it[0].connections[0].host_id = Some(7),
            of(0, 0, Problem::HostIsSwitch { host: 7, address: ip("10.0.1.1"), switch: 1 }),
        ),
        (
            |it| it[2].connections[1].peer_ip = ip("10.1.0.1"),
            of(2, 1, Problem::SharedHostAddress { address: ip("10.1.0.1"), host: 2, other: 0 }),
        ),
        (
            |it| it[1].connections[2] = it[1].connections[1],
            of(1, 2, Problem::DuplicateConnection(ip("10.0.1.1"), ip("10.1.0.1"))),
        ),
        (|it| it[0].connections[0].up = true, of(1, 0, Problem::BothEnds { other: 0, up: true })),
        (|it| it[2].connections[0].up = false, of(2, 0, Problem::BothEnds { other: 0, up: false })),
        (
            |it| {
                it[0].connections[0] = rate("1gbit", it[0].connections[0]);
                it[1].connections[0] = rate("2gbit", it[1].connections[0]);
            },
            of(1, 0, Problem::Rates { other: 0 }),
        ),
        (|it| it[2].root = true, at(2, Problem::TwoRoots(0))),
        (
            |it| {
                it[0].root = false;
                it[1].root = true;
            },
            at(1, Problem::AboveRoot(0)),
        ),
        (
            |it| it.push(switch(3, &[host(9, "10.0.3.1", "10.1.0.9")])),
            at(3, Problem::BesideRoot(0)),
        ),
    ];
    for (number, (change, error)) in table.into_iter().enumerate() {
        assert_eq!(wrong(change), error, "{number}");
    }
}

#[test]
fn switches_above_themselves_are_named() {
    // 5 above 1 above 2 above 5, and 4 below all of them.
    let entries = [
        switch(4, &[up("10.0.4.1", "10.0.1.1"), host(0, "10.0.4.1", "10.1.0.1")]),
        switch(1, &[up("10.0.1.1", "10.0.5.1")]),
        switch(2, &[up("10.0.2.1", "10.0.1.1")]),
        switch(5, &[up("10.0.5.1", "10.0.2.1")]),
    ];
    let error = Topology::new(&entries).unwrap_err();
    let Problem::Cycle(ids) = &error.problem else { panic!("{error}") };
    let mut sorted = ids.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [1, 2, 5]);
    assert!(error.switch.is_some_and(|index| [1, 2, 3].contains(&index)));
    // Two switches that are connected twice, each above the other.
    let two = [
        switch(1, &[up("10.0.1.1", "10.0.2.1"), host(0, "10.0.1.1", "10.1.0.1")]),
        switch(2, &[up("10.0.2.2", "10.0.1.1"), down("10.0.2.1", "10.0.1.1")]),
    ];
    assert!(
        matches!(Topology::new(&two).unwrap_err().problem, Problem::Cycle(ids) if ids.len() == 2)
    );
}

#[test]
fn too_many_of_anything_are_refused() {
    let many = |count: u64| (0..count).map(|id| switch(id, &[])).collect::<Vec<_>>();
    let problem = Topology::new(&many(1025)).unwrap_err().problem;
    assert_eq!(problem, Problem::TooMany { what: "switches", count: 1025, limit: 1024 });
    let one = vec![host(0, "10.0.0.1", "10.1.0.1"); (1 << 18) + 1];
    let problem = Topology::new(&[switch(0, &one)]).unwrap_err().problem;
    assert!(matches!(problem, Problem::TooMany { what: "connections", .. }));
}

#[test]
fn as_many_as_there_may_be_are_looked_at() {
    let many: Vec<_> = (0..1024).map(|id| switch(id, &[])).collect();
    assert_eq!(Topology::new(&many).unwrap_err(), TopologyError::at(0, Problem::NoConnections));
    let one = vec![host(0, "10.0.0.1", "10.1.0.1"); 1 << 18];
    let problem = Topology::new(&[switch(0, &one)]).unwrap_err().problem;
    assert_eq!(problem, Problem::DuplicateConnection(ip("10.0.0.1"), ip("10.1.0.1")));
}

#[test]
fn who_is_above_a_circle_is_no_part_of_it() {
    // 1 and 2 above each other, and 9 above both.
    let entries = [
        switch(1, &[up("10.0.1.1", "10.0.9.1"), up("10.0.1.1", "10.0.2.1")]),
        switch(
            2,
            &[up("10.0.2.2", "10.0.9.1"), up("10.0.2.2", "10.0.1.1"), down("10.0.2.1", "10.0.1.1")],
        ),
        switch(9, &[host(0, "10.0.9.1", "10.1.0.1")]),
    ];
    let error = Topology::new(&entries).unwrap_err();
    let Problem::Cycle(mut ids) = error.problem else { panic!("{error}") };
    ids.sort_unstable();
    assert_eq!(ids, [1, 2]);
}
