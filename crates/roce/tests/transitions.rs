//! Every transition of both services, with every attribute present and missing, against the
//! kernel's table (`qp_state_table`) written down here by itself.

mod common;

use millstream_roce::{
    Access, Attribute, ModifyError, QueuePairAttributes, QueuePairState as State, Transport,
    attributes_of_transition,
};
use millstream_wire::{Mtu, Psn, Qpn};

/// One row: from, to, required attributes, optional ones. Letters as in [`LETTERS`].
type Row = (&'static str, &'static str, &'static str, &'static str);

const LETTERS: [(char, Attribute); 15] = [
    ('a', Attribute::Access),
    ('v', Attribute::RemoteAddress),
    ('m', Attribute::PathMtu),
    ('q', Attribute::DestinationQpn),
    ('r', Attribute::ReceivePsn),
    ('d', Attribute::ResponderResources),
    ('n', Attribute::MinimumRnrTimer),
    ('s', Attribute::SendPsn),
    ('t', Attribute::Timeout),
    ('c', Attribute::RetryCount),
    ('w', Attribute::RnrRetry),
    ('i', Attribute::InitiatorDepth),
    ('p', Attribute::PartitionKeyIndex),
    ('k', Attribute::QueueKey),
    // Not in the kernel's table.
    ('l', Attribute::SendWindow),
];

/// What is not here, or in [`EVERYWHERE`], is refused.
const CONNECTION: [Row; 9] = [
    ("RESET", "INIT", "a", "p"),
    ("INIT", "INIT", "", "ap"),
    ("INIT", "RTR", "vmqrdn", "ap"),
    ("RTR", "RTS", "stcwi", "anl"),
    ("RTS", "RTS", "", "anl"),
    ("RTS", "SQD", "", ""),
    ("SQD", "RTS", "", "anl"),
    ("SQD", "SQD", "", "apvdntcwil"),
    ("ERR", "RESET", "", ""),
];

const DATAGRAM: [Row; 9] = [
    ("RESET", "INIT", "k", "p"),
    ("INIT", "INIT", "", "pk"),
    ("INIT", "RTR", "", "pk"),
    ("RTR", "RTS", "s", "k"),
    ("RTS", "RTS", "", "k"),
    ("RTS", "SQD", "", ""),
    ("SQD", "RTS", "", "k"),
    ("SQD", "SQD", "", "pk"),
    ("SQE", "RTS", "", "k"),
];

/// From every state, without attributes.
const EVERYWHERE: [&str; 2] = ["RESET", "ERR"];

fn row(transport: Transport, from: State, to: State) -> Option<(Vec<Attribute>, Vec<Attribute>)> {
    let table = match transport {
        Transport::ReliableConnection => CONNECTION,
        Transport::UnreliableDatagram => DATAGRAM,
    };
    if EVERYWHERE.contains(&to.to_string().as_str()) {
        return Some((vec![], vec![]));
    }
    let spell = |letters: &str| -> Vec<Attribute> {
        LETTERS.iter().filter(|(letter, _)| letters.contains(*letter)).map(|(_, a)| *a).collect()
    };
    table
        .iter()
        .find(|(f, t, ..)| (*f, *t) == (from.to_string().as_str(), to.to_string().as_str()))
        .map(|(_, _, required, optional)| (spell(required), spell(optional)))
}

fn set(attributes: &mut QueuePairAttributes, attribute: Attribute) {
    let a = attributes;
    match attribute {
        Attribute::Access => a.access = Some(Access::REMOTE_READ),
        Attribute::RemoteAddress => a.remote_address = Some([10, 0, 0, 2].into()),
        Attribute::PathMtu => a.path_mtu = Some(Mtu::B512),
        Attribute::DestinationQpn => a.destination_qpn = Some(Qpn::new(77)),
        Attribute::ReceivePsn => a.receive_psn = Some(Psn::new(5)),
        Attribute::ResponderResources => a.responder_resources = Some(3),
        Attribute::MinimumRnrTimer => a.minimum_rnr_timer = Some(12),
        Attribute::SendPsn => a.send_psn = Some(Psn::new(6)),
        Attribute::Timeout => a.timeout = Some(14),
        Attribute::RetryCount => a.retry_count = Some(7),
        Attribute::RnrRetry => a.rnr_retry = Some(7),
        Attribute::InitiatorDepth => a.initiator_depth = Some(3),
        Attribute::PartitionKeyIndex => a.partition_key_index = Some(0),
        Attribute::QueueKey => a.queue_key = Some(0x1111),
        Attribute::SendWindow => a.send_window_bytes = Some(1 << 16),
    }
}

fn with(to: State, list: &[Attribute]) -> QueuePairAttributes {
    let mut attributes = QueuePairAttributes { state: Some(to), ..Default::default() };
    list.iter().for_each(|&attribute| set(&mut attributes, attribute));
    attributes
}

/// What a device at 10.0.0.1 says to it.
fn check(
    transport: Transport,
    from: State,
    attributes: &QueuePairAttributes,
) -> Result<State, ModifyError> {
    attributes.check(transport, from, core::net::IpAddr::from([10, 0, 0, 1]).into())
}

const TRANSPORTS: [Transport; 2] = [Transport::ReliableConnection, Transport::UnreliableDatagram];

fn every_pair() -> impl Iterator<Item = (Transport, State, State)> {
    TRANSPORTS.into_iter().flat_map(|transport| {
        State::ALL
            .into_iter()
            .flat_map(move |from| State::ALL.into_iter().map(move |to| (transport, from, to)))
    })
}

#[test]
fn every_pair_of_states_with_every_attribute() {
    let (mut possible, mut cases) = (0, 0);
    for (transport, from, to) in every_pair() {
        let what = format!("{transport:?} {from} {to}");
        let Some((required, optional)) = row(transport, from, to) else {
            // Whatever else is given.
            let everything = LETTERS.map(|(_, attribute)| attribute);
            for attributes in [with(to, &[]), with(to, &everything)] {
                let refused = check(transport, from, &attributes);
                assert_eq!(refused, Err(ModifyError::InvalidTransition { from, to }), "{what}");
            }
            assert_eq!(attributes_of_transition(transport, from, to), None, "{what}");
            continue;
        };
        possible += 1;
        assert_eq!(check(transport, from, &with(to, &required)), Ok(to), "{what}");
        let both: Vec<_> = required.iter().chain(&optional).copied().collect();
        assert_eq!(check(transport, from, &with(to, &both)), Ok(to), "{what}");
        for (_, attribute) in LETTERS {
            cases += 1;
            let what = format!("{what} {attribute:?}");
            let without: Vec<_> = required.iter().copied().filter(|a| *a != attribute).collect();
            let more: Vec<_> = required.iter().copied().chain([attribute]).collect();
            if required.contains(&attribute) {
                let missing = vec![attribute];
                let refused = check(transport, from, &with(to, &without));
                assert_eq!(refused, Err(ModifyError::Missing { from, to, missing }), "{what}");
            } else if optional.contains(&attribute) {
                assert_eq!(check(transport, from, &with(to, &more)), Ok(to), "{what}");
            } else {
                let refused = vec![attribute];
                let found = check(transport, from, &with(to, &more));
                assert_eq!(found, Err(ModifyError::NotAllowed { from, to, refused }), "{what}");
            }
        }
    }
    // 7 states that each lead to RESET and ERR, and the rows but one, which says so once more.
    assert_eq!(possible, 2 * 14 + 8 + 9);
    assert_eq!(cases, possible * LETTERS.len());
}

#[test]
fn without_a_state_it_stays_where_it_is() {
    for (transport, from, _) in every_pair() {
        let attributes = QueuePairAttributes::default();
        let stays = row(transport, from, from).is_some();
        let invalid = Err(ModifyError::InvalidTransition { from, to: from });
        let expected = if stays { Ok(from) } else { invalid };
        assert_eq!(check(transport, from, &attributes), expected, "{transport:?} {from}");
    }
}

/// A queue pair does what the table says: brought to each state that it can be brought to, it makes
/// each possible step and refuses all others without a change.
#[test]
fn a_queue_pair_follows_the_table() {
    use common::{Options, Pair};
    use millstream_roce::Instant;

    let steps = [State::Initialized, State::ReadyToReceive, State::ReadyToSend];
    let transport = Transport::ReliableConnection;
    let required = |from, to| row(transport, from, to).unwrap().0;
    for (from, to) in State::ALL.into_iter().flat_map(|f| State::ALL.map(move |t| (f, t))) {
        let mut pair = Pair::with(Options::default());
        let host = &mut pair.hosts[0];
        let (endpoint, qpn) = (&mut host.endpoint, host.qpn);
        let mut go = |attributes: &QueuePairAttributes| {
            let result = endpoint.modify_queue_pair(Instant::ZERO, qpn, attributes);
            (result, endpoint.queue_pair_state(qpn).unwrap())
        };
        assert_eq!(go(&with(State::Reset, &[])).1, State::Reset);
        let mut at = State::Reset;
        for step in steps {
            if at != from && !matches!(from, State::Error | State::SendQueueError) {
                assert_eq!(go(&with(step, &required(at, step))), (Ok(()), step));
                at = step;
            }
        }
        match from {
            State::SendQueueError => continue,
            State::Error | State::SendQueueDrained => {
                assert_eq!(go(&with(from, &[])), (Ok(()), from));
            }
            _ => assert_eq!(at, from),
        }
        match row(transport, from, to) {
            Some((required, _)) => assert_eq!(go(&with(to, &required)), (Ok(()), to)),
            None => {
                let refused = Err(ModifyError::InvalidTransition { from, to });
                assert_eq!(go(&with(to, &[])), (refused, from));
            }
        }
    }
}
