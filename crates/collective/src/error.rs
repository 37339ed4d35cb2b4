//! What can go wrong, for callers to match on.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use millstream_inc::protocol::{AbortReason, FrameError, Refusal};
use millstream_inc::{
    Abort, Collective, DataType, HostConfigError, MAX_TREES, ReduceOperation, StartError,
};
use millstream_net::OpenError;
use millstream_net::token::TokenError;
use millstream_verbs::{CompletionStatus, CreateError, ModifyError, RegionError};
use thiserror::Error;

/// Why a group could not be joined.
#[derive(Debug, Error)]
pub enum JoinError {
    /// The controller cannot be reached.
    #[error(
        "cannot reach the controller at {controller}: {source}: start one there with \
         `millstream controller`"
    )]
    Unreachable {
        /// Where it should be.
        controller: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The controller says no: ranks are missing, there is no switch, and so on.
    #[error("{0}")]
    Refused(Refusal),
    /// The connection to the controller broke.
    #[error(
        "the controller at {controller} was lost while the group was made ({source}): has it ended, \
         or is it something else than a controller?"
    )]
    Lost {
        /// The controller.
        controller: SocketAddr,
        /// How.
        source: io::Error,
    },
    /// The controller does not answer.
    #[error(
        "the controller at {controller} did not make the group within {limit:?}, nor say why: has it \
         stopped, or is it something else than a controller?"
    )]
    Timeout {
        /// The controller.
        controller: SocketAddr,
        /// How long we waited.
        limit: Duration,
    },
    /// What answers is no controller, or one of another version.
    #[error(
        "what listens at {controller} is no controller of this version, or broke the protocol: \
         {detail}"
    )]
    Protocol {
        /// The controller.
        controller: SocketAddr,
        /// How.
        detail: String,
    },
    /// There are more devices than there can be trees.
    #[error("{count} devices are too many: a communicator has up to {MAX_TREES} trees")]
    TooManyDevices {
        /// How many.
        count: usize,
    },
    /// Switches are programs on IP networks.
    #[error(
        "{device} has a port of InfiniBand, at which no switch can be reached: collectives need an Ethernet port, \
         or a soft device on an IP address"
    )]
    InfiniBand {
        /// The device.
        device: String,
    },
    /// TLS with the controller has failed.
    #[error("TLS with the controller at {controller} failed: {reason}")]
    Tls {
        /// Where it listens.
        controller: SocketAddr,
        /// Why.
        reason: String,
    },
    /// What answers does not prove that it has the token.
    #[error(
        "what listens at {controller} does not prove that it has the token that is set here: is it the controller \
         that is meant?"
    )]
    Token {
        /// Where it listens.
        controller: SocketAddr,
        /// What is wrong with its proof.
        source: TokenError,
    },
    /// There is no way to the switch that RoCE could use.
    #[error("no path to the switch at {switch}: {source}")]
    Path {
        /// The switch.
        switch: IpAddr,
        /// Why not.
        source: io::Error,
    },
    /// The controller's plan makes no sense.
    #[error(transparent)]
    Plan(#[from] HostConfigError),
    /// The device has no queue left.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// The device has no region left.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The queue pair could not be connected.
    #[error(transparent)]
    Modify(#[from] ModifyError),
    /// The group was complete, and failed before its first communicator was asked for.
    #[error("the group has failed: {0}")]
    Agreement(CollectiveError),
    /// The ranks are of one machine, and do not come to share memory.
    #[error(
        "the ranks of this machine cannot share memory: {what}: {source}; over a switch they need not"
    )]
    SharedMemory {
        /// What did not work.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// There is no switch, and this rank, which the others need in the place of one, cannot run one.
    #[error("cannot take the place of a switch: {source}")]
    Fallback {
        /// Why not.
        source: OpenError,
    },
    /// The system has no thread left.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

impl JoinError {
    pub(crate) fn frame(controller: SocketAddr, error: &FrameError) -> Self {
        Self::Protocol { controller, detail: error.to_string() }
    }
}

/// Why a collective has no result.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum CollectiveError {
    /// The ranks called different collectives. All ranks get this.
    #[error("{what}")]
    Mismatch {
        /// Who differs from most others.
        rank: u32,
        /// In what.
        what: String,
    },
    /// A rank is gone: its process has ended, its machine or network stands still, or it has left
    /// before this collective.
    #[error("rank {rank} is lost: {detail}")]
    PeerLost {
        /// Which.
        rank: u32,
        /// How that is known.
        detail: String,
    },
    /// A switch is gone.
    #[error("the switch at {switch} {} lost: {detail}", whose_loss(detail))]
    SwitchLost {
        /// Its address, or that of the living one which has told of it, where no more is known.
        switch: IpAddr,
        /// How that is known.
        detail: String,
        /// Which process it was, by the number that it has drawn, if the controller has said that.
        incarnation: Option<u64>,
    },
    /// The collective did not end in time.
    #[error(
        "collective {sequence} did not end within {limit:?}: {results} of {segments} segments have \
         their result; some rank has not called it, or is slow"
    )]
    Timeout {
        /// Its number.
        sequence: u64,
        /// Segments that have their result.
        results: u64,
        /// Segments there are.
        segments: u64,
        /// How long we waited.
        limit: Duration,
    },
    /// The collective did not end before the deadline of some rank, and the switch knows whom it waits for. All
    /// ranks get this, from the switch or, with the first of these only, from the controller. Who was called in SEND
    /// mode and waits no longer itself gets [`CollectiveError::Timeout`].
    #[error("{what}")]
    Overdue {
        /// Ranks that have not called it, or not sent what is due: the first of them. What is under way counts as
        /// not sent, so a deadline that is too short for a long vector blames those that send it.
        ranks: Box<[u32]>,
        /// The collective, and how many they are.
        what: String,
    },
    /// The controller ended the communicator.
    #[error("the controller ended the communicator: {0}")]
    Controller(String),
    /// A rank, the switch or the controller broke the protocol: versions differ, or there is a
    /// bug.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// The device failed, or did not carry out what this rank has asked of it.
    #[error("{0}")]
    Device(String),
    /// Memory could not be registered. The communicator is as good as before.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The lengths of source and destination do not fit each other. The communicator is as good as
    /// before.
    #[error(
        "the source has {source_length} elements and the destination {destination_length}: for \
         {collective} of {world} ranks {}", length_rule(*collective, *world)
    )]
    Lengths {
        /// What was called.
        collective: Collective,
        /// How many ranks there are.
        world: u32,
        /// Of the source.
        source_length: usize,
        /// Of the destination.
        destination_length: usize,
    },
    /// A vector does not have a part for each rank. The communicator is as good as before.
    #[error(
        "the vector has {length} elements: for {collective} in place it must have a part for each of \
         the {world} ranks, all of one length"
    )]
    Parts {
        /// What was called.
        collective: Collective,
        /// How many ranks there are.
        world: u32,
        /// Of the vector.
        length: usize,
    },
    /// There is no such rank. The communicator is as good as before.
    #[error("the root {root} is no rank: with {world} ranks, they are 0 to {}", world - 1)]
    Root {
        /// What was asked for.
        root: u32,
        /// How many ranks there are.
        world: u32,
    },
    /// The switch cannot compute this. The communicator is as good as before.
    #[error("{collective} with {operation} of {data_type} is not supported")]
    Unsupported {
        /// What was asked for.
        collective: Collective,
        /// What was asked for.
        operation: ReduceOperation,
        /// What was asked for.
        data_type: DataType,
    },
    /// Longer than a collective can be. The communicator is as good as before.
    #[error("{count} elements of {data_type} are more than a collective can have")]
    TooLong {
        /// What was asked for.
        count: u64,
        /// What was asked for.
        data_type: DataType,
    },
    /// A collective was started and not waited for. The communicator is as good as before.
    #[error("the communicator is busy with collective {0}: wait for it first")]
    Busy(u64),
    /// This rank has canceled a collective, and with it the communicator.
    #[error("collective {sequence} was canceled by this rank")]
    Canceled {
        /// Its number.
        sequence: u64,
    },
    /// This rank has dropped the communicator before the collective was over.
    #[error("the communicator was closed during a collective")]
    Closed,
    /// There is no memory where some is needed. The communicator is as good as before.
    #[error("the {what} is null")]
    Null {
        /// Source or destination.
        what: &'static str,
    },
    /// Source and destination overlap as they may not. The communicator is as good as before.
    #[error(
        "source and destination overlap: they can be the same memory, where they have one length, or the \
         shorter one this rank's part of the longer one"
    )]
    Overlap,
    /// As many collectives were started and are not over as can be. The communicator is as good as before.
    #[error("{limit} collectives were started and are not over: wait for one first")]
    TooMany {
        /// How many can be.
        limit: usize,
    },
    /// There is nothing to wait for, of this element type at least.
    #[error("no collective with a buffer of this type was started")]
    NotStarted,
    /// The buffer is registered with another communicator's memory. Nothing was done with it.
    #[error("the buffer was allocated by another communicator")]
    ForeignBuffer,
}

/// Whether the switch that is named is the lost one, in words, by what is said of the loss.
fn whose_loss(detail: &str) -> &'static str {
    if Abort::tells_of_other_switch(detail) { "says that another one is" } else { "is" }
}

/// How lengths must fit, in words.
fn length_rule(collective: Collective, world: u32) -> String {
    match collective {
        Collective::AllReduce | Collective::Reduce | Collective::Broadcast => {
            "they must have as many".to_owned()
        }
        Collective::Barrier => "both must be empty".to_owned(),
        Collective::ReduceScatter => {
            format!("the source must have {world} times as many as the destination")
        }
        Collective::AllGather => {
            format!("the destination must have {world} times as many as the source")
        }
    }
}

const LEFT: &str = "it left after ";

/// What is told of a rank that has left.
pub(crate) fn left_after(collectives: u64) -> String {
    format!("{LEFT}{collectives} collectives")
}

impl CollectiveError {
    /// What the controller says.
    pub(crate) fn from_controller(reason: AbortReason) -> Self {
        match reason {
            AbortReason::PeerLost { rank, detail } => Self::PeerLost { rank, detail },
            AbortReason::Mismatch { rank, detail } => Self::Mismatch { rank, what: detail },
            AbortReason::Overdue { rank, detail } => {
                Self::Overdue { ranks: [rank].into(), what: detail }
            }
            AbortReason::Violation { rank, detail } => {
                Self::Protocol(format!("rank {rank} broke the protocol: {detail}"))
            }
            AbortReason::SwitchLost { address: switch, detail, incarnation, .. } => {
                Self::SwitchLost { switch, detail, incarnation }
            }
        }
    }

    /// What the connection to the switch says.
    pub(crate) fn from_switch(error: millstream_inc::CollectiveError, switch: IpAddr) -> Self {
        use millstream_inc::CollectiveError as E;
        match error {
            E::Aborted(Abort::Mismatch(mismatch)) => {
                Self::Mismatch { rank: mismatch.rank, what: mismatch.to_string() }
            }
            E::Aborted(Abort::PeerLost { rank }) => {
                let detail = "it no longer answers the switch".to_owned();
                Self::PeerLost { rank, detail }
            }
            E::Aborted(Abort::Overdue(overdue)) => {
                Self::Overdue { ranks: overdue.named().into(), what: overdue.to_string() }
            }
            E::Aborted(abort @ Abort::Violation { .. }) => Self::Protocol(abort.to_string()),
            E::Aborted(abort @ (Abort::ParentLost | Abort::SwitchBelowLost { .. })) => {
                Self::SwitchLost { switch, detail: abort.to_string(), incarnation: None }
            }
            E::Aborted(Abort::Requested { code }) => Self::Controller(format!(
                "no rank has come back to it after it was restarted (code {code})"
            )),
            E::Transport(CompletionStatus::RetryExceeded | CompletionStatus::Flushed) => {
                let detail = "it does not answer".to_owned();
                Self::SwitchLost { switch, detail, incarnation: None }
            }
            // No peer says this: it is of a request of this rank.
            E::Transport(status @ CompletionStatus::LocalProtection) => Self::Device(format!(
                "this rank's device did not carry out a request of its connection to the switch at {switch}: {status}"
            )),
            // Of a receive: what is sent is never too long.
            E::Transport(status @ CompletionStatus::LocalLength) => Self::Protocol(format!(
                "the switch at {switch} sent a longer message than was awaited: {status}"
            )),
            E::Transport(status) => {
                Self::Protocol(format!("the switch at {switch} refused what was sent: {status}"))
            }
            E::Protocol(_) | E::TimedOut { .. } => Self::Protocol(error.to_string()),
        }
    }

    /// A rank has left in order, after so many collectives, and is missed in a later one.
    pub(crate) fn left(rank: u32, collectives: u64) -> Self {
        Self::PeerLost { rank, detail: left_after(collectives) }
    }

    /// Whether it is that.
    pub(crate) fn is_of_one_that_left(&self) -> bool {
        matches!(self, Self::PeerLost { detail, .. } if detail.starts_with(LEFT))
    }

    /// Whether a switch, which is not lost, has told that another one of its tree is.
    pub(crate) fn is_loss_further_up(&self) -> bool {
        // Why the ranks do not go on may follow.
        matches!(self, Self::SwitchLost { detail, .. } if Abort::tells_of_other_switch(detail))
    }

    /// With the tree that it is of, where there are several.
    pub(crate) fn on_tree(mut self, name: Option<&str>) -> Self {
        if let (Self::SwitchLost { detail, .. } | Self::Device(detail), Some(name)) =
            (&mut self, name)
        {
            *detail = format!("{name}: {detail}");
        }
        self
    }

    /// Why a collective was not started.
    pub(crate) fn from_start(error: StartError, switch: IpAddr) -> Self {
        match error {
            StartError::Busy(sequence) => Self::Busy(sequence),
            StartError::Failed(error) => Self::from_switch(error, switch),
            StartError::Unsupported { collective, operation, data_type } => {
                Self::Unsupported { collective, operation, data_type }
            }
            StartError::Root { root, world } => Self::Root { root, world },
            StartError::TooLong { count, data_type } => Self::TooLong { count, data_type },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_connection_that_breaks_says_whose_fault_it_is() {
        use CollectiveError as E;
        use CompletionStatus as Status;
        let switch = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
        let of = |status| {
            let error = millstream_inc::CollectiveError::Transport(status);
            E::from_switch(error, switch)
        };
        let E::Device(detail) = of(Status::LocalProtection) else {
            panic!("a device of this rank")
        };
        let start = "this rank's device did not carry out a request of its connection";
        assert!(detail.starts_with(start), "{detail}");
        assert!(detail.ends_with(&Status::LocalProtection.to_string()), "{detail}");
        let E::Protocol(detail) = of(Status::LocalLength) else { panic!("the switch's fault") };
        assert!(detail.contains("sent a longer message than was awaited"), "{detail}");
        for status in [Status::RetryExceeded, Status::Flushed] {
            let error = of(status);
            let lost = matches!(&error, E::SwitchLost { switch: it, .. } if *it == switch);
            assert!(lost, "{error:?}");
        }
        for status in [Status::RemoteAccess, Status::RemoteInvalidRequest] {
            let detail = format!("the switch at 10.0.0.1 refused what was sent: {status}");
            assert_eq!(of(status), E::Protocol(detail));
        }
    }
}
