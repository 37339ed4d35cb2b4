//! Why entries are no network.

use core::fmt;
use core::net::IpAddr;

use thiserror::Error;

/// What is wrong, and in which entry.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TopologyError {
    /// The number of the switch's entry, from 0; `None` where it is the whole.
    pub switch: Option<usize>,
    /// The number of its connection, from 0; `None` where it is the switch.
    pub connection: Option<usize>,
    /// What.
    pub problem: Problem,
}

impl TopologyError {
    pub(super) fn all(problem: Problem) -> Self {
        Self { switch: None, connection: None, problem }
    }

    pub(super) fn at(switch: usize, problem: Problem) -> Self {
        Self { switch: Some(switch), connection: None, problem }
    }

    pub(super) fn connection(switch: usize, connection: usize, problem: Problem) -> Self {
        Self { switch: Some(switch), connection: Some(connection), problem }
    }
}

impl fmt::Display for TopologyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem.fmt(f)
    }
}

impl core::error::Error for TopologyError {}

/// What is wrong, and what to do. Switches and hosts are named by their numbers in the file.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum Problem {
    /// There is no switch, or no host.
    #[error("there is no {0}: a network has a switch and a host at least")]
    Nothing(&'static str),
    /// There are too many.
    #[error("{count} {what} are too many: the limit is {limit}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// How many there may be.
        limit: usize,
    },
    /// Two switches with one number.
    #[error("there is a switch {0} already: give this one its own `id`")]
    DuplicateId(u64),
    /// Two switches with one name.
    #[error("switch {other} has the name {name:?} already: give this one its own")]
    DuplicateName {
        /// The name.
        name: String,
        /// Who has it.
        other: u64,
    },
    /// A switch that nothing leads to.
    #[error("it has no connections, so that it has no address: add one, or remove the switch")]
    NoConnections,
    /// An address that nobody can have.
    #[error("{0} is no address of one machine")]
    Address(IpAddr),
    /// IPv4 to IPv6.
    #[error("`my_ip` {0} and `peer_ip` {1} are not of one family: both are IPv4, or both IPv6")]
    Families(IpAddr, IpAddr),
    /// Two switches with one address.
    #[error("`my_ip` {address} is an address of switch {other}: each switch has its own")]
    SharedAddress {
        /// The address.
        address: IpAddr,
        /// Who has it.
        other: u64,
    },
    /// A connection to itself.
    #[error("`peer_ip` {0} is an address of this switch itself")]
    Itself(IpAddr),
    /// The way up leads to no switch.
    #[error(
        "`up: true`, but no switch has the address `peer_ip` {0}: add the switch, or mend the address"
    )]
    NoSwitchAbove(IpAddr),
    /// The way down leads to nobody.
    #[error(
        "no switch has the address `peer_ip` {0}, and there is no `host_id`: add the switch, or say \
         which host it is"
    )]
    Nobody(IpAddr),
    /// Hosts are below.
    #[error("`up: true` with a `host_id`: hosts are below switches; remove one of both")]
    HostAbove,
    /// A host that is a switch.
    #[error("`host_id` {host}, but `peer_ip` {address} is an address of switch {switch}")]
    HostIsSwitch {
        /// The host.
        host: u64,
        /// The address.
        address: IpAddr,
        /// The switch that has it.
        switch: u64,
    },
    /// Two hosts with one address.
    #[error("`peer_ip` {address} is an address of host {other}, and not of host {host}")]
    SharedHostAddress {
        /// The address.
        address: IpAddr,
        /// Who it is said to be.
        host: u64,
        /// Who has it already.
        other: u64,
    },
    /// One connection twice.
    #[error("the connection from {0} to {1} occurs twice in this switch")]
    DuplicateConnection(IpAddr, IpAddr),
    /// Each end says that the other is above, or below.
    #[error(
        "switch {other} says of this connection that it is {}, too: of its two ends, one is up",
        if *up { "`up: true`" } else { "`up: false`" }
    )]
    BothEnds {
        /// The other.
        other: u64,
        /// What both say.
        up: bool,
    },
    /// Two rates.
    #[error(
        "switch {other} says that this connection has another `rate`: both ends say the same, or one of them"
    )]
    Rates {
        /// The other.
        other: u64,
    },
    /// Switches above themselves.
    #[error("switches {} are above each other in a circle: one of their connections is up where it should be down", list(.0))]
    Cycle(Vec<u64>),
    /// Two roots.
    #[error("switch {0} is the root already: of all switches, one has `root: true` at most")]
    TwoRoots(u64),
    /// Something is above the root.
    #[error("it has `root: true`, and switch {0} is above it")]
    AboveRoot(u64),
    /// Something is beside the root.
    #[error(
        "it is not below the root, switch {0}: connect it, or remove `root: true`, so that any switch \
         can be a tree's root"
    )]
    BesideRoot(u64),
}

/// Some of many.
fn list(ids: &[u64]) -> String {
    const MOST: usize = 8;
    let mut text = ids.iter().take(MOST).map(u64::to_string).collect::<Vec<_>>().join(", ");
    if ids.len() > MOST {
        text += &format!(" and {} more", ids.len() - MOST);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_reads_as_what_to_do() {
        let up = |up| Problem::BothEnds { other: 4, up };
        let circle = "are above each other in a circle: one of their connections is up where it should be down";
        for (problem, text) in [
            (
                Problem::Nothing("host"),
                "there is no host: a network has a switch and a host at least".to_owned(),
            ),
            (
                up(true),
                "switch 4 says of this connection that it is `up: true`, too: of its two ends, one is up".to_owned(),
            ),
            (
                up(false),
                "switch 4 says of this connection that it is `up: false`, too: of its two ends, one is up".to_owned(),
            ),
            (Problem::Cycle(vec![1, 2]), format!("switches 1, 2 {circle}")),
            (
                Problem::Cycle((1..=8).collect()),
                format!("switches 1, 2, 3, 4, 5, 6, 7, 8 {circle}"),
            ),
            (
                Problem::Cycle((1..=11).collect()),
                format!("switches 1, 2, 3, 4, 5, 6, 7, 8 and 3 more {circle}"),
            ),
        ] {
            assert_eq!(TopologyError::connection(1, 2, problem).to_string(), text);
        }
    }
}
