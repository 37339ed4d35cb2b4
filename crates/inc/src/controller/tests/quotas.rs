//! Tokens and quotas: one who wants too much is refused, and disturbs nobody else.

use super::trees::{Answer, Lab};
use super::*;
use crate::protocol::{Resume, TokenProblem};

const HOSTILE: [u8; 4] = [10, 0, 0, 66];
const OTHER: [u8; 4] = [10, 0, 0, 1];

/// Tokens 0 and 1 are for hosts, and have these quotas; 2 is for switches.
fn tokens(quotas: Quotas) -> World {
    let token = |name: &str, kind| TokenRules { name: name.to_owned(), kind, quotas };
    let switch = TokenRules { quotas: Quotas::NONE, ..token("s", TokenKind::Switch) };
    let tokens = vec![token("a", TokenKind::Host), token("b", TokenKind::Host), switch];
    World::with(ControllerConfig { tokens, ..ControllerConfig::new(7) })
}

fn sources(source_quotas: Quotas) -> World {
    World::with(ControllerConfig { source_quotas, ..ControllerConfig::new(7) })
}

/// Someone connects from an address, and has proved a token if one is given.
fn come(
    world: &mut World,
    number: u64,
    source: impl Into<IpAddr>,
    token: Option<usize>,
) -> ConnectionId {
    let connection = ConnectionId(number);
    world.controller.handle_connected_from(world.now, connection, source.into());
    if let Some(token) = token {
        world.controller.handle_proved(world.now, connection, token);
    }
    world.settle();
    connection
}

/// A switch, from an address of its own, with the token for switches if there are tokens.
fn switch(world: &mut World) {
    let token = (!world.controller.config.tokens.is_empty()).then_some(2);
    come(world, SWITCH.0, [10, 0, 1, 1], token);
    let (name, address) = ("s".to_owned(), IpAddr::from([127, 0, 1, 1]));
    let (limits, presence) = (SwitchLimits::NONE, Presence::default());
    world.say(SWITCH, ToController::Register { name, address, limits, presence });
    assert_eq!(world.heard(SWITCH), [FromController::Registered]);
}

/// All ranks of a group join, by connections from `first`.
fn join_all(
    world: &mut World,
    first: u64,
    group: &str,
    source: [u8; 4],
    token: Option<usize>,
) -> [ConnectionId; 2] {
    [0, 1].map(|rank| {
        let connection = come(world, first + u64::from(rank), source, token);
        world.say(connection, ToController::Join(hello(group, 2, rank)));
        connection
    })
}

/// A group of two ranks becomes ready.
fn make(
    world: &mut World,
    first: u64,
    group: &str,
    source: [u8; 4],
    token: Option<usize>,
) -> ([ConnectionId; 2], u64) {
    let hosts = join_all(world, first, group, source, token);
    hosts.iter().for_each(|&host| world.end(host));
    let communicator = world.create();
    for host in hosts {
        let heard = world.heard(host);
        assert!(matches!(heard.last(), Some(FromController::Plan(_))), "{heard:?}");
    }
    (hosts, communicator)
}

/// Refused for a quota of this holder; whether trying again may help.
fn refused(world: &mut World, connection: ConnectionId, holder: &str, what: &str) -> bool {
    let refusal = world.refusal(connection);
    let Refusal::Quota { holder: who, what: of, .. } = &refusal else { panic!("{refusal}") };
    assert_eq!((who.as_str(), of.as_str()), (holder, what));
    refusal.is_for_load()
}

#[test]
fn one_address_with_all_its_connections_leaves_room_for_others() {
    let mut world = sources(Quotas { connections: 3, ..Quotas::NONE });
    switch(&mut world);
    for number in 1..=3 {
        come(&mut world, number, HOSTILE, None);
    }
    for number in 4..100 {
        let stranger = come(&mut world, number, HOSTILE, None);
        assert!(refused(&mut world, stranger, "address 10.0.0.66", "connections"));
    }
    make(&mut world, 100, "g", OTHER, None);
    // Those that end make room.
    world.close(ConnectionId(1));
    let again = come(&mut world, 200, HOSTILE, None);
    assert_eq!(world.heard(again), []);
}

#[test]
fn addresses_of_one_ipv6_network_are_one_source() {
    let mut world = sources(Quotas { connections: 1, ..Quotas::NONE });
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    come(&mut world, 1, address("2001:db8::1"), None);
    let same = come(&mut world, 2, address("2001:db8::ffff:2"), None);
    assert!(refused(&mut world, same, "network 2001:db8::/64", "connections"));
    for (number, other) in [(3, "2001:db8:0:1::1"), (4, "::ffff:10.0.0.1")] {
        let other = come(&mut world, number, address(other), None);
        assert_eq!(world.heard(other), []);
    }
    let same = come(&mut world, 5, OTHER, None);
    assert!(refused(&mut world, same, "address 10.0.0.1", "connections"));
}

#[test]
fn one_token_with_all_its_connections_leaves_room_for_others() {
    let mut world = tokens(Quotas { connections: 2, ..Quotas::NONE });
    switch(&mut world);
    // From an address each.
    for number in 1..=2 {
        come(&mut world, number, [10, 0, 2, number as u8], Some(0));
    }
    for number in 3..50 {
        let one = come(&mut world, number, [10, 0, 2, number as u8], Some(0));
        assert!(refused(&mut world, one, "token \"a\"", "connections"));
    }
    make(&mut world, 100, "g", HOSTILE, Some(1));
}

#[test]
fn one_with_all_his_groups_leaves_room_for_others() {
    let quotas = Quotas { groups: 2, ..Quotas::NONE };
    for (mut world, [bad, good], holder) in [
        (sources(quotas), [None, None], "address 10.0.0.66"),
        (tokens(quotas), [Some(0), Some(1)], "token \"a\""),
    ] {
        switch(&mut world);
        for number in 0..50 {
            let host = come(&mut world, number, HOSTILE, bad);
            world.say(host, ToController::Join(hello(&format!("bad{number}"), 2, 0)));
            if number >= 2 {
                assert!(refused(&mut world, host, holder, "groups"));
            }
        }
        // Groups that are invented count, too.
        let host = come(&mut world, 60, HOSTILE, bad);
        let group = "invented".to_owned();
        let (identity, communicator) = ([1, 2], 3);
        let address = IpAddr::from(HOSTILE);
        let (term, world_size, rank, departed) = (0, 2, 0, false);
        let resume = Resume {
            term,
            group,
            identity,
            communicator,
            world: world_size,
            rank,
            address,
            departed,
            more_addresses: Vec::new(),
        };
        world.say(host, ToController::Resume(resume));
        assert!(refused(&mut world, host, holder, "groups"));
        make(&mut world, 100, "g", OTHER, good);
    }
}

#[test]
fn one_with_all_his_nodes_leaves_room_for_others() {
    let quotas = Quotas { communicators: 1, ..Quotas::NONE };
    for (mut world, [bad, good], holder) in [
        (sources(quotas), [None, None], "address 10.0.0.66"),
        (tokens(quotas), [Some(0), Some(1)], "token \"a\""),
    ] {
        switch(&mut world);
        let (hosts, communicator) = make(&mut world, 0, "bad", HOSTILE, bad);
        // Planned, or made, or being destroyed: a node is a node.
        let second = join_all(&mut world, 10, "bad2", HOSTILE, bad);
        for host in second {
            assert!(refused(&mut world, host, holder, "nodes of trees"));
        }
        for host in hosts {
            world.say(host, ToController::Leave { collectives: 0 });
        }
        for host in join_all(&mut world, 20, "bad3", HOSTILE, bad) {
            assert!(refused(&mut world, host, holder, "nodes of trees"));
        }
        make(&mut world, 100, "g", OTHER, good);
        world.say(SWITCH, ToController::CommunicatorDestroyed { communicator });
        let planned = join_all(&mut world, 30, "bad4", HOSTILE, bad);
        assert!(matches!(world.heard(planned[0])[..], [FromController::GroupReady { .. }]));
        for host in join_all(&mut world, 40, "bad5", HOSTILE, bad) {
            assert!(refused(&mut world, host, holder, "nodes of trees"));
        }
    }
}

#[test]
fn nodes_that_wait_for_those_below_count() {
    let token = |kind| TokenRules { name: "a".to_owned(), kind, quotas: Quotas::NONE };
    let quotas = Quotas { communicators: 3, ..Quotas::NONE };
    let host = TokenRules { quotas, ..token(TokenKind::Host) };
    let tokens = vec![host.clone(), host, token(TokenKind::Switch)];
    let fan_in = FanIn::new(2).unwrap();
    let mut world = World::with(ControllerConfig { tokens, fan_in, ..ControllerConfig::new(7) });
    switch(&mut world);
    let hosts = [0, 1, 2, 3].map(|rank| {
        let connection = come(&mut world, rank.into(), HOSTILE, Some(0));
        world.say(connection, ToController::Join(hello("g", 4, rank)));
        connection
    });
    hosts.iter().for_each(|&host| world.end(host));
    // The two leaves. The root is next.
    assert_eq!(world.heard(SWITCH).len(), 2);
    let more = come(&mut world, 10, HOSTILE, Some(0));
    world.say(more, ToController::Join(hello("more", 1, 0)));
    let refusal = world.refusal(more);
    assert!(matches!(refusal, Refusal::Quota { used: 3, wanted: 1, .. }), "{refusal}");
}

#[test]
fn a_group_that_is_planned_again_is_not_kept_out_by_what_it_is_having_destroyed() {
    let source_quotas = Quotas { communicators: 3, ..Quotas::NONE };
    let fan_in = FanIn::new(2).unwrap();
    // Two leaves and a root, and two connections: whichever of them a switch refuses, the other two have room.
    for refused in 0..5 {
        let config = ControllerConfig { source_quotas, fan_in, ..ControllerConfig::new(7) };
        let mut lab = Lab::with(config, 3);
        let hosts = [0, 1, 2, 3].map(|rank| {
            let connection = come(&mut lab.world, rank.into(), HOSTILE, None);
            lab.world.say(connection, ToController::Join(hello("g", 4, rank)));
            connection
        });
        hosts.iter().for_each(|&host| lab.world.end(host));
        lab.run(|request| if request == refused { Answer::Failed } else { Answer::Done });
        hosts.iter().for_each(|&host| lab.world.end(host));
        lab.run(|_| Answer::Done);
        let state = lab.world.controller.group_state("g");
        assert_eq!(state, Some(GroupState::CommunicatorReady), "{refused}");
        assert_eq!(lab.world.controller.census().communicators, 3);
        // It has its whole quota, and no more.
        let more = come(&mut lab.world, 10, HOSTILE, None);
        lab.world.say(more, ToController::Join(hello("more", 1, 0)));
        let refusal = lab.world.refusal(more);
        assert!(matches!(refusal, Refusal::Quota { used: 3, wanted: 1, .. }), "{refusal}");
    }
}

#[test]
fn one_with_all_his_bytes_of_slots_leaves_room_for_others() {
    let one = World::new().controller.node_bytes(2);
    for (slot_bytes, room) in [(one - 1, 0), (one, 1), (2 * one - 1, 1), (2 * one, 2)] {
        let quotas = Quotas { slot_bytes, ..Quotas::NONE };
        for (mut world, [bad, good]) in
            [(sources(quotas), [None, None]), (tokens(quotas), [Some(0), Some(1)])]
        {
            switch(&mut world);
            for number in 0..room {
                make(&mut world, 10 * number, &format!("bad{number}"), HOSTILE, bad);
            }
            let holder = if bad.is_some() { "token \"a\"" } else { "address 10.0.0.66" };
            for host in join_all(&mut world, 50, "more", HOSTILE, bad) {
                // What is too much by itself is never granted.
                assert_eq!(refused(&mut world, host, holder, "bytes of slots"), room > 0);
            }
            if room > 0 {
                make(&mut world, 100, "g", OTHER, good);
            }
        }
    }
}

#[test]
fn what_a_switch_that_comes_back_still_has_counts() {
    let mut world = tokens(Quotas { communicators: 1, ..Quotas::NONE });
    let presence = Presence { incarnation: 3, ..Presence::default() };
    let register = |held| ToController::Register {
        name: "s".to_owned(),
        address: IpAddr::from([127, 0, 1, 1]),
        limits: SwitchLimits::NONE,
        presence: Presence { held, ..presence },
    };
    come(&mut world, SWITCH.0, [10, 0, 1, 1], Some(2));
    world.say(SWITCH, register(0));
    let (_, communicator) = make(&mut world, 0, "bad", HOSTILE, Some(0));
    let group = world.controller.groups.values().next().unwrap().identity;
    world.close(SWITCH);
    let back = come(&mut world, 1001, [10, 0, 1, 1], Some(2));
    world.say(back, register(1));
    let node =
        crate::protocol::HeldNode { group, communicator, children: 2, below: Vec::new(), tree: 0 };
    world.say(back, ToController::Held { nodes: vec![node] });
    assert_eq!(world.heard(back), [FromController::Registered]);
    for host in join_all(&mut world, 10, "bad2", HOSTILE, Some(0)) {
        assert!(refused(&mut world, host, "token \"a\"", "nodes of trees"));
    }
}

#[test]
fn what_another_switch_says_that_it_has_does_not_count() {
    let mut world = tokens(Quotas { communicators: 2, ..Quotas::NONE });
    switch(&mut world);
    let (_, communicator) = make(&mut world, 0, "g", OTHER, Some(0));
    let ours = world.controller.groups.values().next().unwrap().identity;
    for (number, group) in [(2_u8, ours), (3, [5, 6])] {
        let other = come(&mut world, 1000 + u64::from(number), [10, 0, 1, number], Some(2));
        let (name, address) = (format!("s{number}"), IpAddr::from([127, 0, 1, number]));
        // It is not asked for any.
        let limits = SwitchLimits { communicators: 0, ..SwitchLimits::NONE };
        let presence = Presence { held: 1, ..Presence::default() };
        world.say(other, ToController::Register { name, address, limits, presence });
        let (children, below, tree) = (2, Vec::new(), 0);
        let node = crate::protocol::HeldNode { group, communicator, children, below, tree };
        world.say(other, ToController::Held { nodes: vec![node] });
        let end = FromController::EndCommunicator { communicator };
        assert_eq!(world.heard(other), [end, FromController::Registered]);
    }
    make(&mut world, 10, "h", OTHER, Some(0));
    for host in join_all(&mut world, 20, "i", OTHER, Some(0)) {
        assert!(refused(&mut world, host, "token \"a\"", "nodes of trees"));
    }
}

#[test]
fn a_flood_of_silent_connections_displaces_its_own_source() {
    let config = ControllerConfig { max_strangers: 4, ..ControllerConfig::new(7) };
    let mut world = World::with(config);
    let slow = come(&mut world, 0, OTHER, None);
    for number in 1..100 {
        come(&mut world, number, HOSTILE, None);
    }
    assert_eq!(world.controller.census().connections, 4);
    world.say(slow, ToController::Join(hello("g", 2, 0)));
    assert_eq!(world.heard(slow), []);
    assert_eq!(world.controller.census().groups, 1);
}

#[test]
fn who_has_no_token_for_what_he_says_hears_why_and_only_his_connection_ends() {
    let mut world = tokens(Quotas::NONE);
    switch(&mut world);
    let (hosts, communicator) = make(&mut world, 0, "g", OTHER, Some(0));
    let identity = world.controller.groups.values().next().unwrap().identity;
    let join = || ToController::Join(hello("other", 2, 0));
    let (name, address) = ("t".to_owned(), IpAddr::from([127, 0, 1, 2]));
    let (limits, presence) = (SwitchLimits::NONE, Presence::default());
    let register = || ToController::Register { name: name.clone(), address, limits, presence };
    let resume = || {
        let Hello { group, world, rank, address, .. } = hello("g", 2, 0);
        let (term, departed) = (0, false);
        let more_addresses = Vec::new();
        let resume = Resume {
            term,
            group,
            identity,
            communicator,
            world,
            rank,
            address,
            departed,
            more_addresses,
        };
        ToController::Resume(resume)
    };
    let other_kind = |name: &str, meant_for: &str, asked: &str| TokenProblem::OtherKind {
        name: name.to_owned(),
        meant_for: meant_for.to_owned(),
        asked: asked.to_owned(),
    };
    for (number, (token, said, expected)) in [
        (None, join(), TokenProblem::Needed),
        (None, resume(), TokenProblem::Needed),
        (None, register(), TokenProblem::Needed),
        (Some(2), join(), other_kind("s", "switches", "hosts")),
        (Some(2), resume(), other_kind("s", "switches", "hosts")),
        (Some(0), register(), other_kind("a", "hosts", "switches")),
        (Some(1), resume(), TokenProblem::OtherGroup),
    ]
    .into_iter()
    .enumerate()
    {
        let stranger = come(&mut world, 50 + number as u64, HOSTILE, token);
        world.say(stranger, said);
        let Refusal::Token { problem } = world.refusal(stranger) else { panic!("{expected}") };
        assert_eq!(problem, expected);
    }
    let unproved = come(&mut world, 90, HOSTILE, None);
    world.controller.handle_unproved(world.now, unproved, TokenProblem::Unknown);
    world.settle();
    assert_eq!(world.refusal(unproved), Refusal::Token { problem: TokenProblem::Unknown });
    for host in hosts {
        assert_eq!(world.heard(host), []);
    }
    assert_eq!(world.controller.census().groups, 1);
}

#[test]
fn groups_of_one_name_and_different_tokens_are_different_groups() {
    let mut world = tokens(Quotas::NONE);
    switch(&mut world);
    // He is first, and says that it has another size.
    let host = come(&mut world, 0, HOSTILE, Some(0));
    world.say(host, ToController::Join(hello("default", 7, 0)));
    make(&mut world, 10, "default", OTHER, Some(1));
    assert_eq!(world.heard(host), []);
    assert_eq!(world.controller.census().groups, 2);
}

#[test]
fn who_has_a_token_hears_that_there_are_none() {
    let mut world = World::new();
    let host = come(&mut world, 0, OTHER, None);
    world.say(host, ToController::Token { body: vec![b'O', 1] });
    assert_eq!(world.refusal(host), Refusal::Token { problem: TokenProblem::NoneHere });
}
