//! The keys of a topology file.

use std::path::Path;
use std::str::FromStr;

use millstream_inc::plan::FanIn;
use millstream_inc::protocol::MAX_NAME_BYTES;
use millstream_inc::topology::{
    ConnectionEntry, MAX_CONNECTIONS, MAX_QUEUE_PAIR, MAX_SWITCHES, Problem, SwitchEntry,
};

use super::events::Events;
use super::lab::{self, Lab};
use super::{FileProblem, TopologyFileError};

/// The port of RoCEv2.
const PORT: u64 = 4791;

/// Above this, programs that read numbers as 64-bit floats confuse them.
const MAX_ID: u64 = (1 << 53) - 1;

const NETWORK: &[&str] = &["switches", "group", "communicator", "path_mtu", "lab"];
const SWITCH: &[&str] = &["id", "root", "connections", "name", "fan_in", "communicator"];
const CONNECTION: &[&str] = &[
    "up",
    "host_id",
    "my_ip",
    "my_mac",
    "my_port",
    "my_qp",
    "peer_ip",
    "peer_mac",
    "peer_port",
    "peer_qp",
    "rate",
    "rank",
];

const AN_ID: &str = "a whole number up to 2^53 - 1";
const A_BOOL: &str = "true or false";
const AN_IP: &str = "an IPv4 or IPv6 address";
const A_MAC: &str = "a MAC address, as 00:11:22:33:44:55";

/// What a file says.
#[derive(Debug, Default)]
pub(super) struct Network {
    pub(super) entries: Vec<SwitchEntry>,
    /// The line of each switch, and those of its connections.
    pub(super) lines: Vec<(usize, Vec<usize>)>,
    /// Whether it has numbers of queue pairs.
    pub(super) queue_pairs: bool,
    pub(super) lab: Lab,
}

pub(super) fn read(path: &Path, text: &str) -> Result<Network, TopologyFileError> {
    let mut events = Events::new(path, text);
    let mut network = Network::default();
    events.map("a topology")?;
    let (mut seen, mut has_switches) = (0, false);
    while let Some(key) = events.key(NETWORK, &mut seen)? {
        match key {
            "switches" => {
                has_switches = true;
                events.list("`switches`")?;
                while events.another("a switch")? {
                    switch(&mut events, &mut network)?;
                }
                events.place.clear();
            }
            "lab" => network.lab = lab::read(&mut events)?,
            // What plans have beside the network.
            key => events.value(key, "a text or a number", |_, _| Some(()))?,
        }
    }
    if !has_switches {
        return Err(events.error(FileProblem::MissingKey("switches")));
    }
    match events.next()? {
        None => Ok(network),
        Some(_) => Err(events.error(FileProblem::SecondDocument)),
    }
}

fn switch(events: &mut Events<'_>, network: &mut Network) -> Result<(), TopologyFileError> {
    let count = network.entries.len() + 1;
    if count > MAX_SWITCHES {
        let problem = Problem::TooMany { what: "switches", count, limit: MAX_SWITCHES };
        return Err(events.error(FileProblem::Topology(problem)));
    }
    let line = events.line;
    let nameless = format!("switch number {count}");
    events.place.clone_from(&nameless);
    let (mut id, mut connections, mut lines) = (None, None, Vec::new());
    let (mut name, mut root, mut fan_in) = (None, false, None);
    let others: usize = network.entries.iter().map(|entry| entry.connections.len()).sum();
    let mut seen = 0;
    while let Some(key) = events.key(SWITCH, &mut seen)? {
        match key {
            "id" => {
                let number = events.value(key, AN_ID, number)?;
                events.place = format!("switch {number}");
                id = Some(number);
            }
            "root" => root = events.value(key, A_BOOL, boolean)?,
            "name" => {
                let fits = |text: &str, _| {
                    let fits = (1..=MAX_NAME_BYTES).contains(&text.len());
                    (fits && !text.chars().any(char::is_control)).then(|| text.to_owned())
                };
                name =
                    Some(events.value(key, "1 to 128 bytes without control characters", fits)?);
            }
            "fan_in" => {
                let fits = |text: &str, plain| FanIn::new(number(text, plain)?.try_into().ok()?);
                fan_in = Some(events.value(key, "a number of children, 1 to 64", fits)?);
            }
            "connections" => {
                events.list("`connections`")?;
                let mut all = Vec::new();
                let place = events.place.clone();
                while events.another("a connection")? {
                    events.place = format!("{place}, connection {}", all.len() + 1);
                    let count = others + all.len() + 1;
                    if count > MAX_CONNECTIONS {
                        let (what, limit) = ("connections", MAX_CONNECTIONS);
                        let problem = Problem::TooMany { what, count, limit };
                        return Err(events.error(FileProblem::Topology(problem)));
                    }
                    lines.push(events.line);
                    all.push(connection(events, &mut network.queue_pairs)?);
                }
                events.place = place;
                connections = Some(all);
            }
            // Of plans.
            key => events.value(key, "a number", number).map(drop)?,
        }
    }
    let missing = |events: &Events<'_>, key| {
        let mut error = events.error(FileProblem::MissingKey(key));
        error.line = Some(line);
        error
    };
    let id = id.ok_or_else(|| missing(events, "id"))?;
    let connections = connections.ok_or_else(|| missing(events, "connections"))?;
    network.entries.push(SwitchEntry { id, name, root, fan_in, connections });
    network.lines.push((line, lines));
    Ok(())
}

fn connection(
    events: &mut Events<'_>,
    queue_pairs: &mut bool,
) -> Result<ConnectionEntry, TopologyFileError> {
    let line = events.line;
    let (mut up, mut host_id, mut rate) = (None, None, None);
    let (mut my_ip, mut my_mac, mut peer_ip, mut peer_mac) = (None, None, None, None);
    let mut seen = 0;
    while let Some(key) = events.key(CONNECTION, &mut seen)? {
        match key {
            "up" => up = Some(events.value(key, A_BOOL, boolean)?),
            "host_id" => host_id = Some(events.value(key, AN_ID, number)?),
            "my_ip" => my_ip = Some(events.value(key, AN_IP, parsed)?),
            "peer_ip" => peer_ip = Some(events.value(key, AN_IP, parsed)?),
            "my_mac" => my_mac = Some(events.value(key, A_MAC, parsed)?),
            "peer_mac" => peer_mac = Some(events.value(key, A_MAC, parsed)?),
            "my_port" | "peer_port" => {
                let fits = |text: &str, plain| (number(text, plain)? == PORT).then_some(());
                events.value(key, "4791, the port of RoCEv2", fits)?;
            }
            "my_qp" | "peer_qp" => {
                let fits = |text: &str, plain| {
                    (number(text, plain)? <= u64::from(MAX_QUEUE_PAIR)).then_some(())
                };
                events.value(key, "a queue pair number, up to 2^24 - 1", fits)?;
                *queue_pairs = true;
            }
            "rate" => {
                let expected = "a rate of 1kbit to 1000tbit per second, as 100mbit or 10gbit";
                rate = Some(events.value(key, expected, parsed)?);
            }
            // Of plans.
            key => events.value(key, "a number", number).map(drop)?,
        }
    }
    let missing = |key| {
        let mut error = events.error(FileProblem::MissingKey(key));
        error.line = Some(line);
        error
    };
    Ok(ConnectionEntry {
        up: up.ok_or_else(|| missing("up"))?,
        host_id,
        my_ip: my_ip.ok_or_else(|| missing("my_ip"))?,
        my_mac,
        peer_ip: peer_ip.ok_or_else(|| missing("peer_ip"))?,
        peer_mac,
        rate,
    })
}

fn number(text: &str, plain: bool) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|&number| plain && digits && number <= MAX_ID)
}

fn boolean(text: &str, plain: bool) -> Option<bool> {
    match text {
        "true" | "True" | "TRUE" if plain => Some(true),
        "false" | "False" | "FALSE" if plain => Some(false),
        _ => None,
    }
}

pub(super) fn parsed<T: FromStr>(text: &str, _plain: bool) -> Option<T> {
    text.parse().ok()
}
