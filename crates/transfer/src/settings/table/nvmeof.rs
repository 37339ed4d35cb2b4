//! Settings of the transport `nvmeof`.

use std::time::Duration;

use millstream_net::file_io::FileEngine;

use super::{Scope, Setting};
use crate::nvmeof::MAX_FOLDERS;
use crate::settings::kind::{Kind, Unit};

const HOUR: Duration = Duration::from_secs(3600);

pub(super) const ROWS: &[Setting] = &[
    Setting {
        key: "nvmeof.mapped_folders",
        variables: &[],
        kind: Kind::Folders {
            most: MAX_FOLDERS,
            none: "none",
            read: |values| &values.nvmeof.mapped_folders,
            write: |values, folders| values.nvmeof.mapped_folders = folders,
        },
        scope: Scope::Nvmeof,
        meaning: "Where files may lie that a segment says are mapped at this server, which opens them itself then. A file \
                  elsewhere is not opened: any path can be said.",
    },
    Setting {
        key: "nvmeof.server_name",
        variables: &[],
        kind: Kind::User {
            none: "the engine's own",
            read: |values| values.nvmeof.server_name.as_deref(),
            write: |values, name| values.nvmeof.server_name = name,
        },
        scope: Scope::Nvmeof,
        meaning: "The name of this server where segments say what is mapped at it.",
    },
    Setting {
        key: "nvmeof.first_port",
        variables: &[],
        kind: Kind::Number {
            least: 0,
            most: 65_535,
            read: |values| values.first_file_port.into(),
            write: |values, port| values.first_file_port = port as u16,
        },
        scope: Scope::Nvmeof,
        meaning: "Requests for files are taken at a free port from this to nvmeof.last_port. 0 for both: one \
                  that the system chooses.",
    },
    Setting {
        key: "nvmeof.last_port",
        variables: &[],
        kind: Kind::Number {
            least: 0,
            most: 65_535,
            read: |values| values.last_file_port.into(),
            write: |values, port| values.last_file_port = port as u16,
        },
        scope: Scope::Nvmeof,
        meaning: "The last of these ports.",
    },
    Setting {
        key: "nvmeof.max_connections",
        variables: &[],
        kind: Kind::Number {
            least: 1,
            most: 4096,
            read: |values| values.nvmeof.max_connections as u64,
            write: |values, count| values.nvmeof.max_connections = count as usize,
        },
        scope: Scope::Nvmeof,
        meaning: "Connections of peers that are served at the same time, each with up to 9 MiB of memory.",
    },
    Setting {
        key: "nvmeof.file_engine",
        variables: &[],
        kind: Kind::Word {
            words: &["best", "io_uring", "threads"],
            others: &[],
            read: |values| match values.nvmeof.file_engine {
                None => "best",
                Some(FileEngine::IoUring) => "io_uring",
                Some(FileEngine::Threads) => "threads",
            },
            write: |values, word| {
                values.nvmeof.file_engine = match word {
                    "io_uring" => Some(FileEngine::IoUring),
                    "threads" => Some(FileEngine::Threads),
                    _ => None,
                };
            },
        },
        scope: Scope::Nvmeof,
        meaning: "What reads and writes files: the best that the system lets the process use, or one of them, without which \
                  the transport is not installed.",
    },
    Setting {
        key: "nvmeof.direct",
        variables: &[],
        kind: Kind::Flag {
            read: |values| values.nvmeof.direct,
            write: |values, direct| values.nvmeof.direct = direct,
        },
        scope: Scope::Nvmeof,
        meaning: "I/O that is aligned goes around the page cache where the file lets it.",
    },
    Setting {
        key: "nvmeof.connect_timeout",
        variables: &[],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(1),
            most: HOUR,
            read: |values| values.nvmeof.connect_timeout,
            write: |values, time| values.nvmeof.connect_timeout = time,
        },
        scope: Scope::Nvmeof,
        meaning: "How long it may take to look up the host of a target and to connect to it, and how long again to prove \
                  to each other who they are.",
    },
    Setting {
        key: "nvmeof.silence",
        variables: &[],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_secs(1),
            most: HOUR,
            read: |values| values.nvmeof.silence,
            write: |values, time| values.nvmeof.silence = time,
        },
        scope: Scope::Nvmeof,
        meaning: "How long a target may say nothing while it is asked for something. It says twice a second that it is there.",
    },
    Setting {
        key: "nvmeof.io_timeout",
        variables: &[],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(1),
            most: HOUR,
            read: |values| values.nvmeof.io_timeout,
            write: |values, time| values.nvmeof.io_timeout = time,
        },
        scope: Scope::Nvmeof,
        meaning: "How long a device may take over a request, at a target or where a file is mapped.",
    },
];
