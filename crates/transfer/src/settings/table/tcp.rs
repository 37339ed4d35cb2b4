//! Settings of the transport `tcp`.

use std::time::Duration;

use super::{Scope, Setting};
use crate::TcpConfig;
use crate::settings::kind::{Kind, Unit};
use crate::tcp::relay::MAX_RELAYS;

const HOUR: Duration = Duration::from_secs(3600);

pub(super) const ROWS: &[Setting] = &[
    Setting {
        key: "tcp.framing",
        variables: &["MC_TCP_PROTO"],
        kind: Kind::Word {
            words: &["best", "original", "v1"],
            others: &[("1", "v1"), ("2", "original")],
            read: |values| match (values.tcp.version_one, values.tcp.messages) {
                (true, _) => "v1",
                (false, true) => "best",
                (false, false) => "original",
            },
            write: |values, word| {
                values.tcp.version_one = word == "v1";
                values.tcp.messages = word == "best";
            },
        },
        scope: Scope::Tcp,
        meaning: "How requests are put on the wire: the best way that both ends have; the original's, \
                  version 2 where the peer has it; or its version 1, in which nothing acknowledges a WRITE.",
    },
    Setting {
        key: "tcp.checksums",
        variables: &[],
        kind: Kind::Flag {
            read: |values| values.tcp.checksums,
            write: |values, checksums| values.tcp.checksums = checksums,
        },
        scope: Scope::Tcp,
        meaning: "What is sent to and by peers of this kind has checksums, beside TCP's, and is sent again where they \
                  are wrong. It costs a copy at either end. The original has none.",
    },
    Setting {
        key: "tcp.confirm_writes",
        variables: &[],
        kind: Kind::Flag {
            read: |values| values.tcp.confirm_writes,
            write: |values, confirm| values.tcp.confirm_writes = confirm,
        },
        scope: Scope::Tcp,
        meaning: "A WRITE in version 1 of the original's framing counts once a READ behind it was answered. \
                  Peers that serve one request for a connection do not answer.",
    },
    Setting {
        key: "tcp.lanes",
        variables: &["MC_TCP_LANES_PER_PEER", "MC_TCP_MAX_CONNECTIONS_PER_PEER"],
        kind: Kind::Number {
            least: 1,
            most: 16,
            read: |values| values.tcp.lanes as u64,
            write: |values, lanes| values.tcp.lanes = lanes as usize,
        },
        scope: Scope::Tcp,
        meaning: "Connections to a peer, made when there is more to do than one takes.",
    },
    Setting {
        key: "tcp.max_connections",
        variables: &[],
        kind: Kind::Number {
            least: 1,
            most: 4096,
            read: |values| values.tcp.max_connections as u64,
            write: |values, count| values.tcp.max_connections = count as usize,
        },
        scope: Scope::Tcp,
        meaning: "Connections of peers that are served at the same time, each by a thread.",
    },
    Setting {
        key: "tcp.first_port",
        variables: &[],
        kind: Kind::Number {
            least: 0,
            most: 65_535,
            read: |values| values.first_data_port.into(),
            write: |values, port| values.first_data_port = port as u16,
        },
        scope: Scope::Tcp,
        meaning: "Requests for memory are taken at a free port from this to tcp.last_port. 0 for both: one \
                  that the system chooses.",
    },
    Setting {
        key: "tcp.last_port",
        variables: &[],
        kind: Kind::Number {
            least: 0,
            most: 65_535,
            read: |values| values.last_data_port.into(),
            write: |values, port| values.last_data_port = port as u16,
        },
        scope: Scope::Tcp,
        meaning: "The last of these ports.",
    },
    Setting {
        key: "tcp.connect_timeout",
        variables: &[],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(1),
            most: HOUR,
            read: |values| values.tcp.connect_timeout,
            write: |values, time| values.tcp.connect_timeout = time,
        },
        scope: Scope::Tcp,
        meaning: "How long a peer may take to accept a connection.",
    },
    Setting {
        key: "tcp.progress_timeout",
        variables: &["MC_TCP_PROGRESS_TIMEOUT_SEC"],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(1),
            most: HOUR,
            read: |values| values.tcp.progress_timeout,
            write: |values, time| values.tcp.progress_timeout = time,
        },
        scope: Scope::Tcp,
        meaning: "For how long nothing may move over a connection while something is under way on it.",
    },
    Setting {
        key: "tcp.status_timeout",
        variables: &["MC_TCP_STATUS_TIMEOUT_SEC"],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(1),
            most: HOUR,
            read: |values| values.tcp.status_timeout,
            write: |values, time| values.tcp.status_timeout = time,
        },
        scope: Scope::Tcp,
        meaning: "The same where the peer is an engine of Mooncake.",
    },
    Setting {
        key: "tcp.relay",
        variables: &[],
        kind: Kind::Flag {
            read: |values| values.is_relay,
            write: |values, is_relay| values.is_relay = is_relay,
        },
        scope: Scope::Tcp,
        meaning: "The engine is a relay: who may ask it reaches memory through it of all engines that it reaches \
                  (docs/relay.md). It asks no relays itself.",
    },
    Setting {
        key: "tcp.relay_connections",
        variables: &[],
        kind: Kind::Number {
            least: 1,
            most: 1024,
            read: |values| values.relay.max_connections as u64,
            write: |values, count| values.relay.max_connections = count as usize,
        },
        scope: Scope::Tcp,
        meaning: "Connections of a relay at the same time, beside others; for each it has 1 MiB of memory from the \
                  start.",
    },
    Setting {
        key: "tcp.relay_segments",
        variables: &[],
        kind: Kind::Number {
            least: 1,
            most: 65_536,
            read: |values| values.relay.max_segments as u64,
            write: |values, count| values.relay.max_segments = count as usize,
        },
        scope: Scope::Tcp,
        meaning: "Segments that a relay has ways to. Of those that nobody uses the oldest goes for another one.",
    },
    Setting {
        key: "tcp.relay_timeout",
        variables: &[],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(100),
            most: Duration::from_secs(10),
            read: |values| values.relay.timeout,
            write: |values, time| values.relay.timeout = time,
        },
        scope: Scope::Tcp,
        meaning: "How long a relay's transfers of up to 1 MiB may take.",
    },
    Setting {
        key: "tcp.relays",
        variables: &["MILLSTREAM_RELAYS"],
        kind: Kind::Peers {
            most: MAX_RELAYS,
            none: "none",
            read: |values| &values.relays,
            write: |values, relays| values.relays = relays,
        },
        scope: Scope::Tcp,
        meaning: "Relays that are asked, in this order, for ways to segments to which nothing else leads \
                  (docs/relay.md).",
    },
    Setting {
        key: "tcp.busy_poll",
        variables: &["MILLSTREAM_TCP_BUSY_POLL"],
        kind: Kind::Time {
            unit: Unit::Milliseconds,
            least: Duration::ZERO,
            most: Duration::from_millis(10),
            read: |values| values.tcp.busy_poll.unwrap_or(TcpConfig::BUSY_POLL),
            write: |values, time| values.tcp.busy_poll = Some(time),
        },
        scope: Scope::Tcp,
        meaning: "How long at most a thread that waits for an answer, or at a target for a request, looks at its \
                  connections before it sleeps. It does so where waits are short: lower latency of short requests one \
                  after the other, for busy processors. 0: it sleeps at once, as it does, unless this is set, where a control group \
                  gives the process, which may run on several processors, the time of one.",
    },
];
