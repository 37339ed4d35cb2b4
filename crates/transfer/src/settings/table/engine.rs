//! Settings of every engine, and of the command.

use std::time::Duration;

use super::{Scope, Setting};
use crate::Policy;
use crate::settings::kind::{Kind, Unit};

const HOUR: Duration = Duration::from_secs(3600);

pub(super) const ROWS: &[Setting] = &[
    Setting {
        key: "slice_size",
        variables: &["MC_SLICE_SIZE"],
        kind: Kind::Size {
            least: 1 << 10,
            most: 64 << 20,
            read: |values| values.engine.slice_length as u64,
            write: |values, bytes| values.engine.slice_length = bytes as usize,
        },
        scope: Scope::Engine,
        meaning: "A request is moved in slices of so many bytes.",
    },
    Setting {
        key: "fragment_ratio",
        variables: &["MC_FRAGMENT_RATIO"],
        kind: Kind::Number {
            least: 1,
            most: 1 << 20,
            read: |values| values.engine.fragment_ratio as u64,
            write: |values, ratio| values.engine.fragment_ratio = ratio as usize,
        },
        scope: Scope::Engine,
        meaning: "A rest of a request is merged into the slice before it when it has no more bytes \
                  than slice_size divided by this.",
    },
    Setting {
        key: "transfer.policy",
        variables: &["MC_USE_TENT", "MC_USE_TEV1"],
        kind: Kind::Word {
            words: &["classic", "tent"],
            others: &[
                ("1", "tent"),
                ("true", "tent"),
                ("on", "tent"),
                ("yes", "tent"),
                ("0", "classic"),
                ("false", "classic"),
                ("off", "classic"),
                ("no", "classic"),
            ],
            read: |values| values.engine.policy.name(),
            write: |values, name| {
                values.engine.policy = if name == "tent" { Policy::Tent } else { Policy::Classic };
            },
        },
        scope: Scope::Rdma,
        meaning: "Who chooses the pair of NICs of each slice. classic: those near to the memory first, by \
                  turns or at random. tent: the one by which the slice is expected to be finished \
                  first, by what each pair carries now. --policy comes first.",
    },
    Setting {
        key: "transfer.policy_file",
        variables: &["MC_TENT_CONF"],
        kind: Kind::File {
            none: "no classes and no limits",
            read: |values| values.policy_file.as_deref(),
            write: |values, path| values.policy_file = path,
        },
        scope: Scope::Engine,
        meaning: "Classes of requests by name, and what may be in flight: docs/policy-file.md. TOML, or JSON if \
                  its name ends in .json. MC_TENT_CONF with JSON, or with a file, of the original's form is ignored with \
                  a note.",
    },
    Setting {
        key: "log_level",
        variables: &["MC_LOG_LEVEL"],
        kind: Kind::Word {
            words: &["default", "off", "error", "warn", "info", "debug", "trace"],
            others: &[("warning", "warn")],
            read: |values| values.log_level,
            write: |values, level| values.log_level = level,
        },
        scope: Scope::Command,
        meaning: "What is logged, where neither -v nor MILLSTREAM_LOG nor RUST_LOG says so.",
    },
    Setting {
        key: "trace",
        variables: &["MC_TRACE"],
        kind: Kind::Flag {
            read: |values| values.trace,
            write: |values, trace| values.trace = trace,
        },
        scope: Scope::Command,
        meaning: "Log everything, as log_level = \"trace\" does.",
    },
    Setting {
        key: "metrics.listen",
        variables: &["MILLSTREAM_METRICS_LISTEN"],
        kind: Kind::Listen {
            none: "nowhere",
            read: |values| values.metrics_listen,
            write: |values, address| values.metrics_listen = address,
        },
        scope: Scope::Command,
        meaning: "Where `millstream node` serves metrics over HTTP, unless `--http` says so. Nobody is asked there \
                  who he is.",
    },
    Setting {
        key: "metadata.cluster",
        variables: &["MC_METADATA_CLUSTER_ID"],
        kind: Kind::Host {
            none: "no cluster in the keys",
            read: |values| Some(&*values.engine.metadata_cluster).filter(|name| !name.is_empty()),
            write: |values, name| values.engine.metadata_cluster = name.unwrap_or_default(),
        },
        scope: Scope::Engine,
        meaning: "The name of a cluster that shares a metadata server with others: it is in all keys.",
    },
    Setting {
        key: "metadata.ca_file",
        variables: &["MILLSTREAM_METADATA_CA_FILE"],
        kind: Kind::File {
            none: "those of the system",
            read: |values| values.engine.metadata_tls.authorities.as_deref(),
            write: |values, path| values.engine.metadata_tls.authorities = path,
        },
        scope: Scope::Engine,
        meaning: "Certificates (PEM) of the authorities that may vouch for a metadata server with TLS: `https://`, `etcds://`, `rediss://` and `memcacheds://`.",
    },
    Setting {
        key: "metadata.certificate_file",
        variables: &["MILLSTREAM_METADATA_CERTIFICATE_FILE"],
        kind: Kind::File {
            none: "no certificate",
            read: |values| values.engine.metadata_tls.certificate.as_deref(),
            write: |values, path| values.engine.metadata_tls.certificate = path,
        },
        scope: Scope::Engine,
        meaning: "The certificate (PEM) that is shown to a metadata server with TLS that asks for one.",
    },
    Setting {
        key: "metadata.key_file",
        variables: &["MILLSTREAM_METADATA_KEY_FILE"],
        kind: Kind::File {
            none: "no key",
            read: |values| values.engine.metadata_tls.key.as_deref(),
            write: |values, path| values.engine.metadata_tls.key = path,
        },
        scope: Scope::Engine,
        meaning: "The private key (PEM) of this certificate.",
    },
    Setting {
        key: "metadata.redis_user",
        variables: &["MC_REDIS_USERNAME"],
        kind: Kind::User {
            none: "the server's default user",
            read: |values| values.engine.redis.user.as_deref(),
            write: |values, name| values.engine.redis.user = name,
        },
        scope: Scope::Engine,
        meaning: "The user of a Redis metadata server, where its URI has none. MC_REDIS_PASSWORD has the password, \
                  where the URI has none; without a password there is no login.",
    },
    Setting {
        key: "metadata.redis_database",
        variables: &["MC_REDIS_DB_INDEX"],
        kind: Kind::Number {
            least: 0,
            most: 255,
            read: |values| values.engine.redis.database.unwrap_or(0).into(),
            write: |values, number| {
                // As the original has it: of 0 nothing is said.
                values.engine.redis.database = (number != 0).then_some(number as u32);
            },
        },
        scope: Scope::Engine,
        meaning: "The number of the database of a Redis metadata server, where its URI has none.",
    },
    Setting {
        key: "security.token_file",
        variables: &["MILLSTREAM_TOKEN_FILE"],
        kind: Kind::File {
            none: "no token",
            read: |values| values.token_file.as_deref(),
            write: |values, path| values.token_file = path,
        },
        scope: Scope::Engine,
        meaning: "A secret of 16 bytes or more that peers must have, too: all ports refuse those who have \
                  not. MILLSTREAM_TOKEN can have it in place of a file.",
    },
    Setting {
        key: "security.certificate_file",
        variables: &["MILLSTREAM_CERTIFICATE_FILE"],
        kind: Kind::File {
            none: "no TLS with peers",
            read: |values| values.peer_tls.certificate.as_deref(),
            write: |values, path| values.peer_tls.certificate = path,
        },
        scope: Scope::Engine,
        meaning: "This engine's certificate (PEM), with those that lead to its authority. It is for the host by which peers reach it. With it, all \
                  ports speak TLS, and refuse those who do not prove by a certificate who they are.",
    },
    Setting {
        key: "security.key_file",
        variables: &["MILLSTREAM_KEY_FILE"],
        kind: Kind::File {
            none: "no key",
            read: |values| values.peer_tls.key.as_deref(),
            write: |values, path| values.peer_tls.key = path,
        },
        scope: Scope::Engine,
        meaning: "The private key (PEM) of this certificate.",
    },
    Setting {
        key: "security.ca_file",
        variables: &["MILLSTREAM_CA_FILE"],
        kind: Kind::File {
            none: "no authorities",
            read: |values| values.peer_tls.authorities.as_deref(),
            write: |values, path| values.peer_tls.authorities = path,
        },
        scope: Scope::Engine,
        meaning: "Certificates (PEM) of the authorities that may vouch for peers.",
    },
    Setting {
        key: "handshake.host",
        variables: &["MC_RDMA_BIND_ADDRESS", "MC_TCP_BIND_ADDRESS"],
        kind: Kind::Host {
            none: "the address that it listens at",
            read: |values| values.engine.host.as_deref(),
            write: |values, host| values.engine.host = host,
        },
        scope: Scope::Engine,
        meaning: "The host in the name of the engine's segment, by which peers reach it.",
    },
    Setting {
        key: "handshake.first_port",
        variables: &["MC_MIN_RPC_PORT", "MC_MIN_PRC_PORT"],
        kind: Kind::Number {
            least: 0,
            most: 65_535,
            read: |values| values.first_port.into(),
            write: |values, port| values.first_port = port as u16,
        },
        scope: Scope::Engine,
        meaning: "An engine that is given no port listens at a free one from this to \
                  handshake.last_port. 0 for both: one that the system chooses.",
    },
    Setting {
        key: "handshake.last_port",
        variables: &["MC_MAX_RPC_PORT", "MC_MAX_PRC_PORT"],
        kind: Kind::Number {
            least: 0,
            most: 65_535,
            read: |values| values.last_port.into(),
            write: |values, port| values.last_port = port as u16,
        },
        scope: Scope::Engine,
        meaning: "The last of these ports.",
    },
    Setting {
        key: "handshake.default_port",
        variables: &["MC_HANDSHAKE_PORT"],
        kind: Kind::Number {
            least: 0,
            most: 65_535,
            read: |values| values.engine.default_port.unwrap_or(0).into(),
            write: |values, port| {
                values.engine.default_port = (port != 0).then_some(port as u16);
            },
        },
        scope: Scope::Engine,
        meaning: "The port of segments' names that have none. 0: such names are refused.",
    },
    Setting {
        key: "handshake.listen_backlog",
        variables: &["MC_HANDSHAKE_LISTEN_BACKLOG"],
        kind: Kind::Number {
            least: 1,
            most: 65_535,
            read: |values| values.engine.listen_backlog.into(),
            write: |values, count| values.engine.listen_backlog = count as u16,
        },
        scope: Scope::Engine,
        meaning: "Connections of peers that wait to be accepted. The kernel has a limit of its own, \
                  net.core.somaxconn.",
    },
    Setting {
        key: "handshake.connect_timeout",
        variables: &["MC_HANDSHAKE_CONNECT_TIMEOUT"],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(1),
            most: HOUR,
            read: |values| values.engine.client.connect_timeout,
            write: |values, time| values.engine.client.connect_timeout = time,
        },
        scope: Scope::Engine,
        meaning: "The longest wait for one address of a peer to accept a connection.",
    },
    Setting {
        key: "handshake.call_timeout",
        variables: &[],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(1),
            most: HOUR,
            read: |values| values.engine.client.call_timeout,
            write: |values, time| values.engine.client.call_timeout = time,
        },
        scope: Scope::Engine,
        meaning: "The longest that a question to a peer takes, connecting included.",
    },
    Setting {
        key: "handshake.max_length",
        variables: &["MC_HANDSHAKE_MAX_LENGTH"],
        kind: Kind::Size {
            least: 1 << 20,
            most: 128 << 20,
            read: |values| values.engine.client.frame_limit as u64,
            // Questions of peers are short, whatever descriptors may be.
            write: |values, bytes| values.engine.client.frame_limit = bytes as usize,
        },
        scope: Scope::Engine,
        meaning: "The longest answer that is accepted, and the longest descriptor that is published: \
                  65,536 buffers with a key each take some 8 MiB. Mooncake accepts 1 MiB unless it is \
                  told otherwise.",
    },
    Setting {
        key: "handshake.client_timeout",
        variables: &[],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(1),
            most: HOUR,
            read: |values| values.engine.server.client_timeout,
            write: |values, time| values.engine.server.client_timeout = time,
        },
        scope: Scope::Engine,
        meaning: "How long a peer may take to send its question, and again to take the answer.",
    },
    Setting {
        key: "handshake.max_connections",
        variables: &[],
        kind: Kind::Number {
            least: 1,
            most: 4096,
            read: |values| values.engine.server.max_connections as u64,
            write: |values, count| values.engine.server.max_connections = count as usize,
        },
        scope: Scope::Engine,
        meaning: "Peers that are answered at the same time, each by a thread.",
    },
];
