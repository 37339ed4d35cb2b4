//! Why a communicator is over, and why a peer is turned away.

use core::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{RankList, TokenProblem};
use crate::plan::MAX_DEPTH;

/// Why a communicator is over before its time.
#[derive(Clone, Debug, Deserialize, Eq, Error, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AbortReason {
    /// A rank is gone.
    #[error("rank {rank} is lost: {detail}")]
    PeerLost {
        /// Which.
        rank: u32,
        /// How that is known.
        detail: String,
    },
    /// The ranks called different collectives.
    #[error("{detail}")]
    Mismatch {
        /// Who differs from most.
        rank: u32,
        /// In what.
        detail: String,
    },
    /// A rank broke the protocol.
    #[error("rank {rank} broke the protocol: {detail}")]
    Violation {
        /// Which.
        rank: u32,
        /// How.
        detail: String,
    },
    /// A rank waits no longer for another one, which may live.
    #[error("{detail}")]
    Overdue {
        /// The first of those for whom it has waited.
        rank: u32,
        /// For what, and for whom else.
        detail: String,
    },
    /// The switch is gone.
    #[error("switch {}at {address} is lost: {detail}", quoted(name))]
    SwitchLost {
        /// Its name; empty where it is not known.
        name: String,
        /// Its address.
        address: IpAddr,
        /// How that is known.
        detail: String,
        /// Which process it was, if that is known. Another process there is another switch.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        incarnation: Option<u64>,
    },
}

impl AbortReason {
    /// With no more text than is sent along.
    pub(crate) fn shortened(mut self) -> Self {
        let (Self::PeerLost { detail, .. }
        | Self::Mismatch { detail, .. }
        | Self::Violation { detail, .. }
        | Self::Overdue { detail, .. }
        | Self::SwitchLost { detail, .. }) = &mut self;
        *detail = super::shortened(core::mem::take(detail));
        self
    }
}

/// Why the controller turns a peer away.
#[derive(Clone, Debug, Deserialize, Eq, Error, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Refusal {
    /// Not all ranks came in time.
    #[error(
        "group {group:?} is incomplete: {} of its {world} ranks did not join in time: {}",
        missing.count(),
        missing
    )]
    Incomplete {
        /// The group.
        group: String,
        /// How many ranks it has.
        world: u32,
        /// Who did not come.
        missing: RankList,
    },
    /// All ranks came, but there was no switch for them.
    #[error(
        "there is no switch for group {group:?}: start one with \
         `millstream switch --controller ADDRESS --name NAME --bind IP`{}",
        hosts.as_ref().map_or_else(String::new, |why| format!("; its hosts cannot take the place of one: {why}"))
    )]
    NoSwitch {
        /// The group.
        group: String,
        /// Why its hosts cannot take the place of a switch, if they would.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hosts: Option<String>,
    },
    /// Some ranks joined, and then did not connect.
    #[error("group {group:?} was complete, but these ranks did not connect: {ranks}")]
    Unconnected {
        /// The group.
        group: String,
        /// Who did not.
        ranks: RankList,
    },
    /// The tree needs switches that have not registered.
    #[error(
        "group {group:?} needs what the controller's topology has and what has not registered: switch \
         {switches}; start it, or look why it does not register"
    )]
    SwitchesMissing {
        /// The group.
        group: String,
        /// Which, for people.
        switches: String,
    },
    /// The topology has no tree for the hosts of the group.
    #[error("the controller's topology has no tree for group {group:?}: {reason}")]
    NotPlaced {
        /// The group.
        group: String,
        /// Why.
        reason: String,
    },
    /// A host that is not in the topology.
    #[error(
        "rank {rank} is at {address}, and the controller's topology has no host there: add it to the file, or \
         give the rank an address that is in it"
    )]
    UnknownHost {
        /// Which rank.
        rank: u32,
        /// Its address.
        address: IpAddr,
    },
    /// A switch that is not in the topology.
    #[error(
        "the controller's topology has no switch {name:?} with the address {address}: add it to the file, or \
         give this one the name and an address of one that is in it"
    )]
    UnknownSwitch {
        /// Its name.
        name: String,
        /// Its address.
        address: IpAddr,
    },
    /// A rank wants no switch, and the ranks cannot share memory.
    #[error("group {group:?} cannot use shared memory as rank {rank} wants it: {reason}")]
    NotShared {
        /// The group.
        group: String,
        /// Who wants it.
        rank: u32,
        /// What is in the way.
        reason: String,
    },
    /// The switch did not make the communicator.
    #[error("switch {name:?} could not make the communicator: {reason}")]
    SwitchFailed {
        /// The switch.
        name: String,
        /// Why, in its words.
        reason: String,
    },
    /// The group ended while it was being made.
    #[error("the group ended while it was being made: {reason}")]
    Aborted {
        /// Why.
        reason: AbortReason,
    },
    /// There are no ranks, or too many.
    #[error("a group of {world} ranks is out of range: 1 to {limit}")]
    World {
        /// What was asked for.
        world: u32,
        /// The most that this controller takes.
        limit: u32,
    },
    /// The tree of switches would be too deep.
    #[error(
        "a group of {world} ranks needs more than {MAX_DEPTH} levels of switches with {fan_in} \
         children each: start the controller with a larger --fan-in"
    )]
    Depth {
        /// What was asked for.
        world: u32,
        /// How many children a switch may have.
        fan_in: u32,
    },
    /// Ranks count from 0.
    #[error("rank {rank} is out of range: a group of {world} has ranks 0 to {}", world.saturating_sub(1))]
    Rank {
        /// What was asked for.
        rank: u32,
        /// How many there are.
        world: u32,
    },
    /// Another rank said otherwise.
    #[error("rank {rank} says that group {group:?} has {found} ranks, the others say {expected}")]
    WorldDiffers {
        /// The group.
        group: String,
        /// Who differs.
        rank: u32,
        /// What it says.
        found: u32,
        /// What the others say.
        expected: u32,
    },
    /// Someone is this rank already.
    #[error(
        "group {group:?} has a rank {rank} already, at {holder}: \
         give every process its own rank, or another group name"
    )]
    RankTaken {
        /// The group.
        group: String,
        /// The rank.
        rank: u32,
        /// Who has it.
        holder: IpAddr,
    },
    /// A communicator of the group is in use.
    #[error(
        "group {group:?} is in use by ranks that have their communicator: take another group name, or wait until \
         they have left"
    )]
    GroupTaken {
        /// The group.
        group: String,
    },
    /// Another switch has the name or the address.
    #[error("there is a switch {name:?} at {address} already: give this one its own {what}")]
    SwitchTaken {
        /// The other's name.
        name: String,
        /// The other's address.
        address: IpAddr,
        /// What is the same.
        what: String,
    },
    /// Names have some characters, and not too many.
    #[error(
        "the name of a {what} has 1 to {max} bytes and no control characters, and is neither `.` nor `..`",
        max = super::MAX_NAME_BYTES
    )]
    Name {
        /// Of what.
        what: String,
    },
    /// The controller has as many as it can.
    #[error("the controller has its {limit} {what} already")]
    Limit {
        /// Of what.
        what: String,
        /// How many.
        limit: usize,
    },
    /// The peer broke the protocol.
    #[error("{detail}")]
    Protocol {
        /// How.
        detail: String,
    },
    /// One token or one address would have more than it may.
    #[error(
        "{holder} may have {limit} {what} at the controller at a time: there are {used}, and {wanted} more were \
         asked for"
    )]
    Quota {
        /// The token or the address, for people.
        holder: String,
        /// Of what.
        what: String,
        /// How many.
        limit: u64,
        /// How many it has.
        used: u64,
        /// How many more it would have.
        wanted: u64,
    },
    /// The peer has not proved that it has a token for this.
    #[error("{problem}")]
    Token {
        /// What is wrong.
        problem: TokenProblem,
    },
    /// The controller is one of several, and does not lead.
    #[error("this controller does not lead: {detail}")]
    NotLeader {
        /// The one that does, where that is known.
        leader: Option<SocketAddr>,
        /// The same for people, or why nobody does.
        detail: String,
    },
}

impl Refusal {
    /// Whether the same may be granted a little later: the controller is loaded, or others of the same token or
    /// address have what is asked for.
    pub const fn is_for_load(&self) -> bool {
        match self {
            Self::Limit { .. } => true,
            // Not what is more than there may ever be.
            Self::Quota { limit, wanted, .. } => *wanted <= *limit,
            _ => false,
        }
    }

    /// Whether the same may be granted a little later, or by another controller.
    pub const fn is_for_now(&self) -> bool {
        self.is_for_load() || matches!(self, Self::NotLeader { .. })
    }
}

/// A name before what follows it, if there is one.
fn quoted(name: &str) -> String {
    if name.is_empty() { String::new() } else { format!("{name:?} ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{FrameDecoder, FromController, encode};

    #[test]
    fn a_refusal_survives_the_wire() {
        let reason = AbortReason::SwitchLost {
            name: "s\"1".to_owned(),
            address: "127.0.0.9".parse().unwrap(),
            detail: "é".to_owned(),
            incarnation: Some(u64::MAX),
        };
        let message = FromController::Refused { reason: Refusal::Aborted { reason } };
        let mut decoder = FrameDecoder::new();
        decoder.extend(&encode(&message).unwrap());
        assert_eq!(decoder.next_message(), Ok(Some(message)));
    }
}
