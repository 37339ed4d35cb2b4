//! Which transitions a queue pair can make, and the attributes that each takes (IBTA 10.3.1 and
//! 11.2.5.2).
//!
//! The rows are those of the kernel's `qp_state_table`, so that devices of the system refuse what
//! is refused here, and the send window, which only soft devices know, beside the other limits of
//! what is sent. Ports and alternate paths are not there: a device has one port and one path to
//! a peer. A partition key index that is not given is 0.

use crate::attributes::{Attribute, ModifyError, QueuePairAttributes, QueuePairState};
use crate::config::Transport;

/// The attributes that a transition requires and those that it also allows; `None` when there is
/// no such transition.
pub fn attributes_of_transition(
    transport: Transport,
    from: QueuePairState,
    to: QueuePairState,
) -> Option<(&'static [Attribute], &'static [Attribute])> {
    use QueuePairState as S;
    match (from, to) {
        (_, S::Reset | S::Error) => Some((&[], &[])),
        _ => match transport {
            Transport::ReliableConnection => of_connection(from, to),
            Transport::UnreliableDatagram => of_datagrams(from, to),
        },
    }
}

fn of_connection(
    from: QueuePairState,
    to: QueuePairState,
) -> Option<(&'static [Attribute], &'static [Attribute])> {
    use Attribute as A;
    use QueuePairState as S;
    match (from, to) {
        (S::Reset, S::Initialized) => Some((&[A::Access], &[A::PartitionKeyIndex])),
        (S::Initialized, S::Initialized) => Some((&[], &[A::Access, A::PartitionKeyIndex])),
        (S::Initialized, S::ReadyToReceive) => Some((
            &[
                A::RemoteAddress,
                A::PathMtu,
                A::DestinationQpn,
                A::ReceivePsn,
                A::ResponderResources,
                A::MinimumRnrTimer,
            ],
            &[A::Access, A::PartitionKeyIndex],
        )),
        (S::ReadyToReceive, S::ReadyToSend) => Some((
            &[A::SendPsn, A::Timeout, A::RetryCount, A::RnrRetry, A::InitiatorDepth],
            &[A::Access, A::MinimumRnrTimer, A::SendWindow],
        )),
        (S::ReadyToSend | S::SendQueueDrained, S::ReadyToSend) => {
            Some((&[], &[A::Access, A::MinimumRnrTimer, A::SendWindow]))
        }
        (S::ReadyToSend, S::SendQueueDrained) => Some((&[], &[])),
        (S::SendQueueDrained, S::SendQueueDrained) => Some((
            &[],
            &[
                A::Access,
                A::PartitionKeyIndex,
                A::RemoteAddress,
                A::ResponderResources,
                A::MinimumRnrTimer,
                A::Timeout,
                A::RetryCount,
                A::RnrRetry,
                A::InitiatorDepth,
                A::SendWindow,
            ],
        )),
        // A connection never is in SQE: an error of its send queue is an error of all of it.
        _ => None,
    }
}

fn of_datagrams(
    from: QueuePairState,
    to: QueuePairState,
) -> Option<(&'static [Attribute], &'static [Attribute])> {
    use Attribute as A;
    use QueuePairState as S;
    match (from, to) {
        (S::Reset, S::Initialized) => Some((&[A::QueueKey], &[A::PartitionKeyIndex])),
        (S::Initialized, S::Initialized | S::ReadyToReceive)
        | (S::SendQueueDrained, S::SendQueueDrained) => {
            Some((&[], &[A::QueueKey, A::PartitionKeyIndex]))
        }
        (S::ReadyToReceive, S::ReadyToSend) => Some((&[A::SendPsn], &[A::QueueKey])),
        (S::ReadyToSend | S::SendQueueDrained | S::SendQueueError, S::ReadyToSend) => {
            Some((&[], &[A::QueueKey]))
        }
        (S::ReadyToSend, S::SendQueueDrained) => Some((&[], &[])),
        _ => None,
    }
}

/// Whether the transition exists and these attributes are what it takes.
pub(crate) fn check_transition(
    transport: Transport,
    from: QueuePairState,
    to: QueuePairState,
    attributes: &QueuePairAttributes,
) -> Result<(), ModifyError> {
    let (required, optional) = attributes_of_transition(transport, from, to)
        .ok_or(ModifyError::InvalidTransition { from, to })?;
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
