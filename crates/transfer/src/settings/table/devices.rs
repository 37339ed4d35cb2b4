//! Settings of devices: of the system's, and of soft ones.

use std::time::Duration;

use millstream_net::Polling;
use millstream_verbs::Driver;

use super::{Scope, Setting};
use crate::settings::kind::{Kind, Unit};

pub(super) const ROWS: &[Setting] = &[
    Setting {
        key: "ibverbs.port",
        variables: &["MC_IB_PORT"],
        kind: Kind::Number {
            least: 1,
            most: 255,
            read: |values| values.rdma.ibverbs.port.into(),
            write: |values, port| values.rdma.ibverbs.port = port as u8,
        },
        scope: Scope::Ibverbs,
        meaning: "The port of the device.",
    },
    Setting {
        key: "ibverbs.gid_index",
        variables: &["MC_GID_INDEX", "NCCL_IB_GID_INDEX"],
        kind: Kind::Index {
            most: 255,
            none: "the best of RoCE v2",
            read: |values| values.rdma.ibverbs.gid_index,
            write: |values, index| values.rdma.ibverbs.gid_index = index,
        },
        scope: Scope::Ibverbs,
        meaning: "The entry of the port's GID table. `millstream topology` lists them.",
    },
    Setting {
        key: "ibverbs.relaxed_ordering",
        variables: &["MC_IB_PCI_RELAXED_ORDERING"],
        kind: Kind::Word {
            words: &["off", "auto"],
            others: &[
                ("0", "off"),
                ("1", "auto"),
                ("2", "auto"),
                ("on", "auto"),
                ("true", "auto"),
                ("false", "off"),
            ],
            read: |values| if values.rdma.ibverbs.relaxed_ordering { "auto" } else { "off" },
            write: |values, word| values.rdma.ibverbs.relaxed_ordering = word == "auto",
        },
        scope: Scope::Ibverbs,
        meaning: "Writes to memory may overtake each other on their way through PCI Express, where \
                  the device can.",
    },
    Setting {
        key: "soft.driver",
        variables: &[],
        kind: Kind::Word {
            words: &["udp", "packet"],
            others: &[],
            read: |values| values.rdma.soft.driver.name(),
            write: |values, name| {
                values.rdma.soft.driver = name.parse().unwrap_or(Driver::Udp);
            },
        },
        scope: Scope::Soft,
        meaning: "The kind of socket. packet needs CAP_NET_RAW and an Ethernet interface.",
    },
    Setting {
        key: "soft.segmentation_offload",
        variables: &[],
        kind: Kind::Flag {
            read: |values| values.rdma.soft.segmentation_offload,
            write: |values, used| values.rdma.soft.segmentation_offload = used,
        },
        scope: Scope::Soft,
        meaning: "The kernel cuts what is sent and joins what is received, where it can. \
                  --no-segmentation-offload comes first.",
    },
    Setting {
        key: "soft.busy_poll",
        variables: &[],
        kind: Kind::Time {
            unit: Unit::Milliseconds,
            least: Duration::ZERO,
            most: Duration::from_secs(1),
            read: |values| values.rdma.soft.busy_poll.unwrap_or(Polling::LONGEST_YIELDING),
            write: |values, time| values.rdma.soft.busy_poll = Some(time),
        },
        scope: Scope::Soft,
        meaning: "How long at most a thread looks for work before it sleeps. It does so where waits are short: lower \
                  latency for busy processors. Unless this is set, it offers the processor to other threads at each look. 0: it \
                  sleeps at once, as it does, unless this is set, where a control group gives the process, which may run on \
                  several processors, the time of one.",
    },
    Setting {
        key: "soft.socket_buffer",
        variables: &[],
        kind: Kind::Size {
            least: 4 << 10,
            most: 1 << 30,
            read: |values| values.rdma.soft.buffer_length as u64,
            write: |values, bytes| values.rdma.soft.buffer_length = bytes as usize,
        },
        scope: Scope::Soft,
        meaning: "What the kernel is asked for as receive and as send buffer. An unprivileged \
                  process gets net.core.rmem_max and net.core.wmem_max at most.",
    },
    Setting {
        key: "soft.max_window",
        variables: &[],
        kind: Kind::Number {
            least: 1,
            most: 4096,
            read: |values| values.rdma.soft.max_window.into(),
            write: |values, packets| values.rdma.soft.max_window = packets as u32,
        },
        scope: Scope::Soft,
        meaning: "Packets of 4096 bytes in flight on a queue pair, at most.",
    },
    Setting {
        key: "soft.congestion_marks",
        variables: &[],
        kind: Kind::Flag {
            read: |values| values.rdma.soft.congestion_marks,
            write: |values, marks| values.rdma.soft.congestion_marks = marks,
        },
        scope: Scope::Soft,
        meaning: "Let the network mark packets when it is congested (ECN), in place of dropping \
                  them.",
    },
];
