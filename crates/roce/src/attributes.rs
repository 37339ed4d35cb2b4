//! Queue pair states, attributes, and which attribute each transition needs (IBTA 10.3, 11.2.4).

use core::fmt;
use core::net::IpAddr;

use millstream_wire::{Mtu, Psn, Qpn};
use thiserror::Error;

use crate::Access;

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
    /// Broken or closed: outstanding requests were flushed, new ones are at once.
    Error,
}

impl fmt::Display for QueuePairState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reset => "RESET",
            Self::Initialized => "INIT",
            Self::ReadyToReceive => "RTR",
            Self::ReadyToSend => "RTS",
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
        ]
        .into_iter()
        .filter_map(|(given, attribute)| given.then_some(attribute))
    }

    /// Whether a queue pair in state `from` on a device at `local` takes them; returns the state
    /// that it goes to. Every provider asks this first, so that all of them refuse alike.
    pub fn check(
        &self,
        from: QueuePairState,
        local: IpAddr,
    ) -> Result<QueuePairState, ModifyError> {
        let to = self.state.unwrap_or(from);
        check_transition(from, to, self)?;
        check_ranges(local, self)?;
        Ok(to)
    }
}

/// The attributes that a transition requires and those that it also allows; `None` when there is
/// no such transition. The rows are those of RC in the kernel's `qp_state_table`; port and
/// partition key index are fixed here.
pub fn attributes_of_transition(
    from: QueuePairState,
    to: QueuePairState,
) -> Option<(&'static [Attribute], &'static [Attribute])> {
    use Attribute as A;
    use QueuePairState as S;
    match (from, to) {
        (_, S::Reset | S::Error) => Some((&[], &[])),
        (S::Reset, S::Initialized) => Some((&[A::Access], &[])),
        (S::Initialized, S::Initialized) => Some((&[], &[A::Access])),
        (S::Initialized, S::ReadyToReceive) => Some((
            &[
                A::RemoteAddress,
                A::PathMtu,
                A::DestinationQpn,
                A::ReceivePsn,
                A::ResponderResources,
                A::MinimumRnrTimer,
            ],
            &[A::Access],
        )),
        (S::ReadyToReceive, S::ReadyToSend) => Some((
            &[A::SendPsn, A::Timeout, A::RetryCount, A::RnrRetry, A::InitiatorDepth],
            &[A::Access, A::MinimumRnrTimer],
        )),
        (S::ReadyToSend, S::ReadyToSend) => Some((&[], &[A::Access, A::MinimumRnrTimer])),
        _ => None,
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
    /// A device of the system refused; an [`crate::Endpoint`] never does.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*code))]
    System {
        /// The call.
        call: &'static str,
        /// Its error number.
        code: i32,
    },
}

/// Whether the transition exists and these attributes are what it takes.
fn check_transition(
    from: QueuePairState,
    to: QueuePairState,
    attributes: &QueuePairAttributes,
) -> Result<(), ModifyError> {
    let (required, optional) =
        attributes_of_transition(from, to).ok_or(ModifyError::InvalidTransition { from, to })?;
    let given: Vec<Attribute> = attributes.given().collect();
    let missing: Vec<Attribute> =
        required.iter().copied().filter(|attribute| !given.contains(attribute)).collect();
    if !missing.is_empty() {
        return Err(ModifyError::Missing { from, to, missing });
    }
    let allowed =
        |attribute: &Attribute| required.contains(attribute) || optional.contains(attribute);
    let refused: Vec<Attribute> =
        given.iter().copied().filter(|attribute| !allowed(attribute)).collect();
    if refused.is_empty() { Ok(()) } else { Err(ModifyError::NotAllowed { from, to, refused }) }
}

/// Whether the values of the attributes are possible.
fn check_ranges(local: IpAddr, attributes: &QueuePairAttributes) -> Result<(), ModifyError> {
    if let Some(remote) = attributes.remote_address
        && remote.is_ipv4() != local.is_ipv4()
    {
        return Err(ModifyError::AddressFamily { local, remote });
    }
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
