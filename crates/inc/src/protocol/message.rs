//! The messages.

use core::net::{IpAddr, SocketAddr};
use core::ops::Not;

use millstream_wire::{Mtu, Psn, Qpn};
use serde::{Deserialize, Serialize};

use super::token::hex;
use super::{
    AbortReason, Awaited, Failover, FallbackOffer, HostsTrees, LostSwitch, MeetingPoint, Message,
    PortCounters, Refusal, fields,
};
use crate::ranks::Ranks;
use crate::spec::CommunicatorOptions;
#[cfg(doc)]
use crate::stripe::MAX_TREES;

impl Message for ToController {
    // The longest has the counters of the 65 ports of a node, in some 14 KiB.
    const MAX_FRAME_BYTES: usize = 64 << 10;
}

impl Message for Commanded {
    const MAX_FRAME_BYTES: usize = FromController::MAX_FRAME_BYTES;
}

impl Message for FromController {
    // The longest says which of 65,536 ranks are below which of 64 children: 7 bytes a rank where
    // they are in runs of two.
    const MAX_FRAME_BYTES: usize = 512 << 10;
}

/// What a switch or a host says to the controller.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToController {
    /// Switch: I am here. The first message of a switch.
    Register {
        /// Its name, for people.
        name: String,
        /// Its address on the data network.
        address: IpAddr,
        /// What it can serve.
        limits: SwitchLimits,
        /// Which process it is, and what it has from before.
        presence: Presence,
    },
    /// Switch: nodes that it has, after [`ToController::Register`] until all have been named.
    Held {
        /// Some of them: 1 to [`MAX_HELD_AT_ONCE`](super::MAX_HELD_AT_ONCE).
        nodes: Vec<HeldNode>,
    },
    /// Switch: the communicator exists, its children may connect.
    CommunicatorCreated {
        /// Which.
        communicator: u64,
        /// Its queue pairs, one for each child.
        edges: Vec<SwitchEdge>,
        /// Its queue pair for the node above, unless it is the root.
        uplink: Option<SwitchUplink>,
    },
    /// Switch: the communicator is connected to the node above.
    ParentConnected {
        /// Which.
        communicator: u64,
    },
    /// Switch: the communicator could not be made, or not be connected to the node above. Nothing is
    /// left of it.
    CommunicatorFailed {
        /// Which.
        communicator: u64,
        /// Why.
        reason: String,
        /// Packets to one of the node's neighbours hold at most so many bytes, which are fewer than were asked for: with
        /// this path MTU it might be made.
        #[serde(default, skip_serializing_if = "Option::is_none", with = "fields::optional_mtu")]
        path_mtu: Option<Mtu>,
    },
    /// Switch: nothing is left of the communicator.
    CommunicatorDestroyed {
        /// Which.
        communicator: u64,
    },
    /// Switch: a communicator is ending by itself. Its hosts hear it from the switch.
    Report {
        /// Which.
        communicator: u64,
        /// What happened.
        report: SwitchReport,
    },
    /// Host: I am a rank of a group. The first message of a host.
    Join(Hello),
    /// Host: I am a rank of a communicator that is ready, and was cut off. The first message of a host that comes
    /// back.
    Resume(Resume),
    /// Host: my end of the connection to the switch.
    Connect {
        /// Its queue pair.
        #[serde(with = "fields::qpn")]
        qpn: Qpn,
        /// The first packet sequence number that it sends.
        #[serde(with = "fields::psn")]
        psn: Psn,
        /// The largest path MTU to the switch that it knows to work.
        #[serde(with = "fields::mtu")]
        path_mtu: Mtu,
        /// Bytes that may be in flight to it, of packets and of what a receive buffer needs beside them; none where there is no
        /// limit, or whoever made it knows of none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        receive_share: Option<u32>,
        /// Those of further trees, as many as [`FromController::GroupReady`] has said.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        more: Vec<HostQueuePair>,
    },
    /// Host: I am done. It keeps its queue pair until it hears [`FromController::Closed`], so that
    /// the switch does not take it for dead.
    Leave {
        /// How many collectives it has called.
        collectives: u64,
    },
    /// Host: I cannot go on.
    Fail {
        /// Why.
        reason: String,
        /// What is wrong with a rank of its machine, if it is that: then this ends the communicator, and not that the
        /// host gives up.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<AbortReason>,
    },
    /// Host: the switch that I am connected to answers no longer on the data network, or another one of the tree.
    SwitchLost {
        /// How that is known.
        detail: String,
        /// The switch of which tree.
        #[serde(default, skip_serializing_if = "is_first")]
        tree: u8,
        /// Which it is, or with `further_up` which the rank is connected to: a controller that was restarted may never have
        /// heard of it. That of a host in the place of a switch has incarnation 0.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        switch: Option<LostSwitch>,
        /// The switch that it is connected to lives, and has told that another one of its tree is lost.
        #[serde(default, skip_serializing_if = "Not::not")]
        further_up: bool,
    },
    /// The answer to [`FromController::Ping`].
    Pong,
    /// Switch: what the ports of a node have counted. The answer to [`FromController::ReadCounters`] is one of
    /// these for each node.
    Counters {
        /// Which.
        communicator: u64,
        /// When, by a clock of the switch that never goes back.
        at_ns: u64,
        /// Collectives that the node has taken part in.
        collectives: u64,
        /// One for each port.
        ports: Vec<PortCounters>,
    },
    /// Anyone who has a token: part of the proof. The first message then, and before it is over the only one.
    Token {
        /// Its bytes.
        #[serde(with = "hex")]
        body: Vec<u8>,
    },
}

/// What the controller says.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromController {
    /// To a switch: you are known, and so is what you hold.
    Registered,
    /// To a switch: make this, a node of a communicator's tree.
    CreateCommunicator {
        /// The node's number.
        communicator: u64,
        /// The group that it is made for.
        group: GroupIdentity,
        /// Payload bytes per packet on every edge.
        #[serde(with = "fields::mtu")]
        path_mtu: Mtu,
        /// Bytes of a segment.
        segment_bytes: u32,
        /// Segments that a host may be ahead of its last result.
        window: u32,
        /// How many ranks the tree has.
        world: u32,
        /// Whether there is a node above. [`FromController::ConnectParent`] says where.
        has_parent: bool,
        /// Who is below.
        children: Vec<SwitchChild>,
        /// Of which tree of the communicator it is.
        #[serde(default, skip_serializing_if = "is_first")]
        tree: u8,
        /// What its ranks have asked for.
        #[serde(default, skip_serializing_if = "CommunicatorOptions::is_default")]
        options: CommunicatorOptions,
    },
    /// To a switch: connect this to the node above. Answered with [`ToController::ParentConnected`].
    ConnectParent {
        /// Which.
        communicator: u64,
        /// The other switch's address, which may be its own.
        address: IpAddr,
        /// The queue pair of the node above for this one.
        #[serde(with = "fields::qpn")]
        qpn: Qpn,
        /// The first packet sequence number that it sends.
        #[serde(with = "fields::psn")]
        psn: Psn,
        /// Bytes that may be in flight to it, of packets and of what a receive buffer needs beside them; none where there is no
        /// limit, or whoever made it knows of none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        receive_share: Option<u32>,
    },
    /// To a switch: nobody needs this any more.
    DestroyCommunicator {
        /// Which.
        communicator: u64,
    },
    /// To a switch: a rank of this is dead; tell the others, then destroy it.
    AbortCommunicator {
        /// Which.
        communicator: u64,
        /// Who is dead.
        rank: u32,
    },
    /// To a switch: no rank of this has come back to the controller. Tell those that may live, then destroy it.
    EndCommunicator {
        /// Which.
        communicator: u64,
    },
    /// To a host that has come back: you are known.
    Resumed,
    /// To a host: all ranks are here. Answer with [`ToController::Connect`].
    GroupReady {
        /// The address of the switch that this host will be connected to.
        switch_address: IpAddr,
        /// Bytes of a segment.
        segment_bytes: u32,
        /// Segments that a host may be ahead of its last result: what its queue pair must hold.
        window: u32,
        /// The switches of further trees, for the host's further addresses in their order. There may be fewer. With
        /// `hosts`, tree `t` is for its address `t` modulo [`HostsTrees::addresses`].
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        more_switches: Vec<IpAddr>,
        /// Where there is no switch: the hosts take its place, and these are the trees.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hosts: Option<HostsTrees>,
    },
    /// To a host, with every [`FromController::Ping`] until the communicator is ready.
    Waiting {
        /// What its group waits for.
        awaited: Awaited,
        /// How long it still does.
        left_ms: u64,
    },
    /// To a host: connect to the switch; the communicator is ready.
    Plan(Plan),
    /// To a host, in place of [`FromController::GroupReady`]: all ranks are of one machine, and the communicator is
    /// ready without a switch; or another rank of its machine is on the wire for it, and the communicator is ready.
    SharedMemory(SharedMemoryPlan),
    /// To a host: another rank has left, after fewer collectives than any that left before. Who comes back is told of that one.
    Left {
        /// Which.
        rank: u32,
        /// How many collectives it has called: a later one can never end.
        collectives: u64,
    },
    /// To a host: the communicator is over.
    Abort {
        /// Why.
        reason: AbortReason,
    },
    /// To a host: all have left, nobody needs your queue pair any more. The controller closes the
    /// connection.
    Closed,
    /// Anyone: what you want cannot be. The controller closes the connection.
    Refused {
        /// Why.
        reason: Refusal,
    },
    /// Anyone: are you alive?
    Ping,
    /// To a switch: what have your ports counted?
    ReadCounters,
    /// Anyone: part of the proof that both ends have a token.
    Token {
        /// Its bytes.
        #[serde(with = "hex")]
        body: Vec<u8>,
    },
    /// Anyone who is known now: where all controllers are that share the state of this one. Where there are several,
    /// this follows [`FromController::Registered`], [`FromController::Plan`] and [`FromController::Resumed`]; and it comes
    /// again when they change.
    Controllers {
        /// Up to [`MAX_CONTROLLERS`](crate::controllers::MAX_CONTROLLERS).
        controllers: Vec<SocketAddr>,
    },
}

impl ToController {
    /// The highest term that a peer has obeyed, where it says that.
    pub const fn obeyed_term(&self) -> Option<u64> {
        match self {
            Self::Register { presence, .. } => Some(presence.term),
            Self::Resume(resume) => Some(resume.term),
            _ => None,
        }
    }
}

/// How much a switch can serve at a time.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SwitchLimits {
    /// Nodes of trees.
    pub communicators: usize,
    /// Bytes of their slots and queues.
    pub memory_bytes: u64,
    /// Their ports, each of which has a queue pair: a child, or the way up. A switch that does not say it has enough.
    #[serde(default = "SwitchLimits::enough")]
    pub queue_pairs: usize,
}

impl SwitchLimits {
    /// More than any controller asks for.
    pub const NONE: Self =
        Self { communicators: Self::enough(), memory_bytes: 1 << 52, queue_pairs: Self::enough() };

    const fn enough() -> usize {
        u32::MAX as usize
    }
}

/// What tells a group from all others, those of its name included, drawn when it is made.
///
/// It keeps jobs apart by chance: it is made from the 64 bits that a controller starts with and a count, and two
/// controllers hardly start with the same. It is no secret: who knows one can work out the others.
pub type GroupIdentity = [u64; 2];

/// A message of the controller, with the term of the controller that commands.
///
/// Who has obeyed a term obeys no lower one: its controller was replaced.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Commanded {
    /// The term: above the one that the peer has obeyed, and at least that of the controller.
    pub term: u64,
    /// What it says.
    #[serde(flatten)]
    pub message: FromController,
}

/// Which process a switch is, and what it has from before.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Presence {
    /// Drawn when the process starts.
    pub incarnation: u64,
    /// The highest term that it has obeyed; 0 for none.
    pub term: u64,
    /// How many nodes of trees it has: so many follow in [`ToController::Held`].
    pub held: u32,
}

/// A node of a tree that a switch has.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct HeldNode {
    /// The group that it was made for.
    pub group: GroupIdentity,
    /// The node's number.
    pub communicator: u64,
    /// How many children it has, hosts and switches.
    pub children: u32,
    /// Those that are switches.
    pub below: Vec<SwitchBelow>,
    /// Of which tree of its communicator it is.
    #[serde(default, skip_serializing_if = "is_first")]
    pub tree: u8,
}

/// A switch below a node.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SwitchBelow {
    /// The lowest rank below it.
    pub rank: u32,
    /// Its address.
    pub address: IpAddr,
}

/// Which rank of which communicator a host is that comes back.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Resume {
    /// The highest term that it has obeyed.
    pub term: u64,
    /// The group's name.
    pub group: String,
    /// The group itself.
    pub identity: GroupIdentity,
    /// The communicator's number.
    pub communicator: u64,
    /// How many ranks there are.
    pub world: u32,
    /// Which of them this is.
    pub rank: u32,
    /// The host's address on the data network.
    pub address: IpAddr,
    /// It knows of ranks that have left.
    pub departed: bool,
    /// Those of its further trees.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more_addresses: Vec<IpAddr>,
}

/// Which rank of which group a host is.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Hello {
    /// The group's name. Who gives the same name belongs together.
    pub group: String,
    /// How many ranks there are.
    pub world: u32,
    /// Which of them this is.
    pub rank: u32,
    /// The host's address on the data network.
    pub address: IpAddr,
    /// How long it is ready to wait for the others and for a switch.
    pub timeout_ms: u64,
    /// Its further addresses, each for a tree of its own: up to [`MAX_TREES`] with the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more_addresses: Vec<IpAddr>,
    /// How ranks of its machine find it; none of a rank that wants the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same_machine: Option<SameMachine>,
    /// What it asks of the communicator.
    #[serde(default, skip_serializing_if = "CommunicatorOptions::is_default")]
    pub options: CommunicatorOptions,
    /// Whether it takes the place of a switch for its group, should there be none.
    #[serde(default, skip_serializing_if = "FallbackOffer::is_off")]
    pub fallback: FallbackOffer,
    /// Of rank 0: where it takes the place of the controller, should that be lost together with a switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meeting: Option<Box<MeetingPoint>>,
    /// Switches that its group has lost before, which are not to serve it: up to
    /// [`MAX_AVOIDED`](super::MAX_AVOIDED).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub avoid: Vec<LostSwitch>,
}

/// What ranks need to know of each other to share memory.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SameMachine {
    /// Who says the same can share memory: up to [`MAX_HOST_BYTES`](super::MAX_HOST_BYTES).
    pub host: String,
    /// Where others get the memory, should this one give it: up to so many bytes, too.
    pub socket: String,
    /// Whether it wants no switch.
    pub required: bool,
}

/// How a rank joins the others of its machine.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SharedMemoryPlan {
    /// The communicator's number.
    pub communicator: u64,
    /// The group that it is made for.
    pub group: GroupIdentity,
    /// Where the lowest rank of the machine gives the memory.
    pub socket: String,
    /// Those of the machine, where there are several machines.
    #[serde(default, skip_serializing_if = "Ranks::is_empty", with = "fields::ranks")]
    pub ranks: Ranks,
    /// As of [`Plan`], where there are several machines: the lowest rank of the machine goes on for all of them.
    #[serde(default, skip_serializing_if = "Failover::is_off")]
    pub failover: Failover,
    /// As of [`Plan`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meeting: Option<Box<MeetingPoint>>,
    /// Why the ranks take the place of switches between the machines, if they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
}

/// A host's end of the plan.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Plan {
    /// The communicator's number.
    pub communicator: u64,
    /// The group that it is made for.
    pub group: GroupIdentity,
    /// The switch's name, for people.
    pub switch: String,
    /// The switch's address.
    pub address: IpAddr,
    /// The switch's queue pair for this rank.
    #[serde(with = "fields::qpn")]
    pub qpn: Qpn,
    /// The first packet sequence number that the switch sends.
    #[serde(with = "fields::psn")]
    pub psn: Psn,
    /// Payload bytes per packet.
    #[serde(with = "fields::mtu")]
    pub path_mtu: Mtu,
    /// Bytes that may be in flight to it, of packets and of what a receive buffer needs beside them; none where there is no
    /// limit, or whoever made it knows of none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receive_share: Option<u32>,
    /// The same of further trees.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more: Vec<PlannedTree>,
    /// Where some machine has several ranks: those of this host's, of which it is the lowest. It is on the wire for all of
    /// them, and gives them memory to share.
    #[serde(default, skip_serializing_if = "Ranks::is_empty", with = "fields::ranks")]
    pub ranks: Ranks,
    /// What becomes of the communicator when one of its switches is lost.
    #[serde(default, skip_serializing_if = "Failover::is_off")]
    pub failover: Failover,
    /// Which process the switch is.
    #[serde(default)]
    pub incarnation: u64,
    /// Where the ranks meet when a switch is lost and no controller is there, if they then go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meeting: Option<Box<MeetingPoint>>,
    /// Where a communicator goes on when a switch is lost and its trees have several levels: which processes their switches
    /// are, up to [`MAX_PROCESSES`] of them. Who says later that one is lost may know its address only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<LostSwitch>,
}

/// Switches of a [`Plan`] at most.
pub const MAX_PROCESSES: usize = 64;

/// A host's end of a further tree.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PlannedTree {
    /// The switch's name, for people.
    pub switch: String,
    /// The switch's address.
    pub address: IpAddr,
    /// The switch's queue pair for this rank.
    #[serde(with = "fields::qpn")]
    pub qpn: Qpn,
    /// The first packet sequence number that the switch sends.
    #[serde(with = "fields::psn")]
    pub psn: Psn,
    /// Which process the switch is.
    #[serde(default)]
    pub incarnation: u64,
    /// Bytes that may be in flight to it, of packets and of what a receive buffer needs beside them; none where there is no
    /// limit, or whoever made it knows of none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receive_share: Option<u32>,
}

/// A host's queue pair for a further tree.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct HostQueuePair {
    /// Its number.
    #[serde(with = "fields::qpn")]
    pub qpn: Qpn,
    /// The first packet sequence number that it sends.
    #[serde(with = "fields::psn")]
    pub psn: Psn,
    /// Bytes that may be in flight to it, of packets and of what a receive buffer needs beside them; none where there is no
    /// limit, or whoever made it knows of none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receive_share: Option<u32>,
}

/// Of one tree, nothing is said.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
const fn is_first(tree: &u8) -> bool {
    *tree == 0
}

/// A host or a node below, as the switch needs to know it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SwitchChild {
    /// The ranks below it, of a host its own: one, or those of its machine.
    #[serde(with = "fields::ranks")]
    pub ranks: Ranks,
    /// Whether it is a node of the tree, and not a host.
    pub is_switch: bool,
    /// Its address.
    pub address: IpAddr,
    /// Its queue pair.
    #[serde(with = "fields::qpn")]
    pub qpn: Qpn,
    /// The first packet sequence number that it sends.
    #[serde(with = "fields::psn")]
    pub psn: Psn,
    /// Bytes that may be in flight to it, of packets and of what a receive buffer needs beside them; none where there is no
    /// limit, or whoever made it knows of none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receive_share: Option<u32>,
}

/// The switch's end of the connection to a child.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SwitchEdge {
    /// The lowest rank below the child.
    pub rank: u32,
    /// The switch's queue pair for it.
    #[serde(with = "fields::qpn")]
    pub qpn: Qpn,
    /// The first packet sequence number that the switch sends.
    #[serde(with = "fields::psn")]
    pub psn: Psn,
    /// Bytes that may be in flight to it, of packets and of what a receive buffer needs beside them; none where there is no
    /// limit, or whoever made it knows of none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receive_share: Option<u32>,
}

/// A node's end of the connection to the node above.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SwitchUplink {
    /// Its queue pair.
    #[serde(with = "fields::qpn")]
    pub qpn: Qpn,
    /// The first packet sequence number that it sends.
    #[serde(with = "fields::psn")]
    pub psn: Psn,
    /// Bytes that may be in flight to it, of packets and of what a receive buffer needs beside them; none where there is no
    /// limit, or whoever made it knows of none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receive_share: Option<u32>,
}

/// Why a communicator ends by itself.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SwitchReport {
    /// A rank no longer answers on the data network.
    PeerLost {
        /// Which.
        rank: u32,
        /// How the connection ended.
        detail: String,
        /// The address of the switch that the rank is below, if that is who does not answer.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        switch: Option<IpAddr>,
    },
    /// The switch above no longer answers on the data network.
    ParentLost {
        /// Its address.
        address: IpAddr,
        /// How the connection ended.
        detail: String,
    },
    /// The ranks called different collectives.
    Mismatch {
        /// Who differs from most.
        rank: u32,
        /// In what.
        detail: String,
    },
    /// A rank broke the protocol.
    Violation {
        /// Which.
        rank: u32,
        /// How.
        detail: String,
    },
    /// A rank waits no longer.
    Overdue {
        /// The first of those for whom it has waited.
        rank: u32,
        /// For what, and for whom else.
        detail: String,
    },
}

#[cfg(test)]
mod tests;
