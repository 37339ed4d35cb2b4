//! Queue pair states and attributes (IBTA 10.3, 11.2.5.2).

use core::fmt;
use core::net::IpAddr;

use millstream_wire::{Mtu, Psn, Qpn};
use thiserror::Error;

use crate::transitions::check_transition;
use crate::{Access, PortAddress, Transport};

/// The state of a queue pair.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum QueuePairState {
    /// Just made, or reset.
    #[default]
    Reset,
    /// Receive requests may be posted; nothing is processed.
    Initialized,
    /// Receives.
    ReadyToReceive,
    /// Receives and sends.
    ReadyToSend,
    /// Receives, and begins to send no request: those that it had begun are finished, the rest
    /// wait for [`QueuePairState::ReadyToSend`]. An event says when the last one is done.
    SendQueueDrained,
    /// Receives; its send queue is broken: a request failed, and all after it are flushed.
    /// Unreliable datagrams only: a connection that fails is in [`QueuePairState::Error`].
    SendQueueError,
    /// Broken or closed: outstanding requests were flushed, new ones are at once.
    Error,
}

impl QueuePairState {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Reset,
        Self::Initialized,
        Self::ReadyToReceive,
        Self::ReadyToSend,
        Self::SendQueueDrained,
        Self::SendQueueError,
        Self::Error,
    ];

    /// Whether requests that arrive are executed.
    pub const fn receives(self) -> bool {
        matches!(self, Self::ReadyToReceive) || self.sends() || matches!(self, Self::SendQueueError)
    }

    /// Whether requests of its own are under way.
    pub(crate) const fn sends(self) -> bool {
        matches!(self, Self::ReadyToSend | Self::SendQueueDrained)
    }

    /// Whether send requests may be posted; in the last two they are flushed.
    pub const fn takes_sends(self) -> bool {
        self.sends() || matches!(self, Self::SendQueueError | Self::Error)
    }
}

impl fmt::Display for QueuePairState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reset => "RESET",
            Self::Initialized => "INIT",
            Self::ReadyToReceive => "RTR",
            Self::ReadyToSend => "RTS",
            Self::SendQueueDrained => "SQD",
            Self::SendQueueError => "SQE",
            Self::Error => "ERR",
        })
    }
}

/// Attributes to change; `None` leaves one as it is. Names as in `ibv_qp_attr`, in full words.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct QueuePairAttributes {
    /// The state to go to.
    pub state: Option<QueuePairState>,
    /// What remotes may do through this queue pair.
    pub access: Option<Access>,
    /// The peer's address.
    pub remote_address: Option<IpAddr>,
    /// The LID that belongs to that address ([`PortAddress::lid`]); 0, as it is in RoCE, without one.
    pub remote_lid: u16,
    /// Payload bytes per packet.
    pub path_mtu: Option<Mtu>,
    /// The peer's queue pair.
    pub destination_qpn: Option<Qpn>,
    /// The first packet sequence number that the peer will send.
    pub receive_psn: Option<Psn>,
    /// How many READs of the peer are executed at a time (`max_dest_rd_atomic`).
    pub responder_resources: Option<u8>,
    /// How long the peer is asked to wait when no receive is posted: a code of
    /// [`crate::RNR_TIMERS`].
    pub minimum_rnr_timer: Option<u8>,
    /// The first packet sequence number that we send.
    pub send_psn: Option<Psn>,
    /// Acknowledgement timeout: 4.096 us * 2^n, n from 1 to 31; 0 = wait for ever.
    pub timeout: Option<u8>,
    /// How many timeouts in a row are survived, 0 to 7.
    pub retry_count: Option<u8>,
    /// How many RNR NAKs in a row are survived, 0 to 6; 7 = any number.
    pub rnr_retry: Option<u8>,
    /// How many READs are outstanding at a time (`max_rd_atomic`).
    pub initiator_depth: Option<u8>,
    /// Which entry of the device's table of partition keys packets carry, and arriving ones must
    /// match. 0 when it was never given.
    pub partition_key_index: Option<u16>,
    /// What datagrams to this queue pair must carry. Unreliable datagrams only.
    pub queue_key: Option<u32>,
    /// At most so many bytes of SENDs and WRITEs in flight, with what a receive buffer needs beside
    /// them: what the peer has granted ([`crate::Endpoint::grant_receive_share`]). One packet may
    /// always go. Devices of the system, which know no such thing, do not look at it.
    pub send_window_bytes: Option<u32>,
}

/// The name of an attribute, for errors and the transition table.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[allow(missing_docs, reason = "the fields of QueuePairAttributes")]
pub enum Attribute {
    Access,
    RemoteAddress,
    PathMtu,
    DestinationQpn,
    ReceivePsn,
    ResponderResources,
    MinimumRnrTimer,
    SendPsn,
    Timeout,
    RetryCount,
    RnrRetry,
    InitiatorDepth,
    PartitionKeyIndex,
    QueueKey,
    SendWindow,
}

impl QueuePairAttributes {
    /// The attributes, other than the state, that are given.
    pub fn given(&self) -> impl Iterator<Item = Attribute> {
        use Attribute as A;
        [
            (self.access.is_some(), A::Access),
            (self.remote_address.is_some(), A::RemoteAddress),
            (self.path_mtu.is_some(), A::PathMtu),
            (self.destination_qpn.is_some(), A::DestinationQpn),
            (self.receive_psn.is_some(), A::ReceivePsn),
            (self.responder_resources.is_some(), A::ResponderResources),
            (self.minimum_rnr_timer.is_some(), A::MinimumRnrTimer),
            (self.send_psn.is_some(), A::SendPsn),
            (self.timeout.is_some(), A::Timeout),
            (self.retry_count.is_some(), A::RetryCount),
            (self.rnr_retry.is_some(), A::RnrRetry),
            (self.initiator_depth.is_some(), A::InitiatorDepth),
            (self.partition_key_index.is_some(), A::PartitionKeyIndex),
            (self.queue_key.is_some(), A::QueueKey),
            (self.send_window_bytes.is_some(), A::SendWindow),
        ]
        .into_iter()
        .filter_map(|(given, attribute)| given.then_some(attribute))
    }

    /// The peer's port, if it is given.
    pub fn remote_port(&self) -> Option<PortAddress> {
        self.remote_address.map(|ip| PortAddress { ip, lid: self.remote_lid })
    }

    /// Whether a queue pair of this transport in state `from` on a device at `local` takes them;
    /// returns the state that it goes to. Every provider asks this first, so that all of them
    /// refuse alike.
    pub fn check(
        &self,
        transport: Transport,
        from: QueuePairState,
        local: PortAddress,
    ) -> Result<QueuePairState, ModifyError> {
        let to = self.state.unwrap_or(from);
        check_transition(transport, from, to, self)?;
        self.remote_port().map_or(Ok(()), |remote| local.check_peer(&remote))?;
        check_ranges(self)?;
        Ok(to)
    }
}

/// Why a queue pair could not be modified. Nothing was changed.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum ModifyError {
    /// There is no such queue pair.
    #[error("there is no queue pair {0}")]
    Unknown(Qpn),
    /// The state machine has no such transition.
    #[error("a queue pair cannot go from {from} to {to}")]
    InvalidTransition {
        /// The state it is in.
        from: QueuePairState,
        /// The state asked for.
        to: QueuePairState,
    },
    /// The transition needs attributes that were not given.
    #[error("the transition from {from} to {to} also needs {missing:?}")]
    Missing {
        /// The state it is in.
        from: QueuePairState,
        /// The state asked for.
        to: QueuePairState,
        /// What to add.
        missing: Vec<Attribute>,
    },
    /// The transition does not take attributes that were given.
    #[error("the transition from {from} to {to} does not take {refused:?}")]
    NotAllowed {
        /// The state it is in.
        from: QueuePairState,
        /// The state asked for.
        to: QueuePairState,
        /// What to leave out.
        refused: Vec<Attribute>,
    },
    /// An attribute is out of range.
    #[error("{attribute:?} = {value} is out of range: {range}")]
    OutOfRange {
        /// Which.
        attribute: Attribute,
        /// What was given.
        value: u64,
        /// What is allowed.
        range: &'static str,
    },
    /// In SQD nothing but RESET and ERR is possible before the last request is done (IBTA
    /// 10.3.1.5).
    #[error(
        "queue pair {0} still finishes requests: wait for the event that its send queue is drained"
    )]
    Draining(Qpn),
    /// The device no longer works.
    #[error("the device no longer works")]
    DeviceFailed,
    /// The peer's address is of another family than the device's.
    #[error("the peer's address {remote} is not of the same family as the device's {local}")]
    AddressFamily {
        /// The device's address.
        local: IpAddr,
        /// The address given.
        remote: IpAddr,
    },
    /// The port here is of InfiniBand, and the peer's is not.
    #[error(
        "{local} and {remote} are ports of different kinds, InfiniBand and Ethernet (which has no LID): \
         no packet gets from one to the other"
    )]
    LinkLayer {
        /// The device's port.
        local: PortAddress,
        /// The peer's.
        remote: PortAddress,
    },
    /// The peer's port is of InfiniBand, and its LID is not that of a port.
    #[error("the LID of {} is said to be {:#06x}: that of a port is 0x0001 to 0xbfff", remote.ip, remote.lid)]
    RemoteLid {
        /// The peer's port.
        remote: PortAddress,
    },
    /// A device of the system refused; an [`crate::Endpoint`] never does.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*code))]
    System {
        /// The call.
        call: &'static str,
        /// Its error number.
        code: i32,
    },
}

/// Whether the values of the attributes are possible.
fn check_ranges(attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
    for (attribute, value, limit, range) in [
        (Attribute::MinimumRnrTimer, attributes.minimum_rnr_timer, 31, "0 to 31"),
        (Attribute::Timeout, attributes.timeout, 31, "0 to 31"),
        (Attribute::RetryCount, attributes.retry_count, 7, "0 to 7"),
        (Attribute::RnrRetry, attributes.rnr_retry, 7, "0 to 7"),
        (Attribute::InitiatorDepth, attributes.initiator_depth, 128, "0 to 128"),
        (Attribute::ResponderResources, attributes.responder_resources, 128, "0 to 128"),
    ] {
        if let Some(value) = value.filter(|&value| value > limit) {
            return Err(ModifyError::OutOfRange { attribute, value: value.into(), range });
        }
    }
    Ok(())
}
