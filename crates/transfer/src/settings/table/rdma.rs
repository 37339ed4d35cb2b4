//! Settings of the transport rdma, whatever its devices.

use std::time::Duration;

use millstream_topology::PeerAffinity;
use millstream_verbs::{Mtu, Provider};

use super::{Scope, Setting};
use crate::settings::kind::{Kind, Unit};

/// As many as a descriptor has at most.
const MAX_DEVICES: usize = 256;

const HOUR: Duration = Duration::from_secs(3600);

const MTUS: [(&str, Mtu); 5] = [
    ("256", Mtu::B256),
    ("512", Mtu::B512),
    ("1024", Mtu::B1024),
    ("2048", Mtu::B2048),
    ("4096", Mtu::B4096),
];

pub(super) const ROWS: &[Setting] = &[
    Setting {
        key: "rdma.provider",
        variables: &[],
        kind: Kind::Word {
            words: &["auto", "soft", "ibverbs"],
            others: &[],
            read: |values| match values.rdma.provider {
                None => "auto",
                Some(Provider::Soft) => "soft",
                Some(Provider::Ibverbs) => "ibverbs",
            },
            write: |values, name| {
                values.rdma.provider = match name {
                    "soft" => Some(Provider::Soft),
                    "ibverbs" => Some(Provider::Ibverbs),
                    _ => None,
                };
            },
        },
        scope: Scope::Rdma,
        meaning: "Soft devices, or the system's. auto: the system's where it has one with the \
                  address, else a soft one. --protocol rdma:soft and rdma:ibverbs come first.",
    },
    Setting {
        key: "rdma.devices",
        variables: &["MC_TE_FILTERS"],
        kind: Kind::Devices {
            most: MAX_DEVICES,
            none: "those with the addresses of --bind",
            read: |values| values.rdma.devices.as_deref(),
            write: |values, devices| values.rdma.devices = devices,
        },
        scope: Scope::Rdma,
        meaning: "The RDMA devices that an engine has, by their names, such as mlx5_0,mlx5_1, whatever addresses it is \
                  told: those of them that work, at least one. all: those of the system. Does not count with \
                  rdma:soft. Python and C take all where they are told nothing (docs/topology.md).",
    },
    Setting {
        key: "rdma.queue_pairs_per_endpoint",
        variables: &["MC_NUM_QP_PER_EP"],
        kind: Kind::Number {
            least: 1,
            most: 16,
            read: |values| values.rdma.queue_pairs_per_endpoint as u64,
            write: |values, count| values.rdma.queue_pairs_per_endpoint = count as usize,
        },
        scope: Scope::Rdma,
        meaning: "Queue pairs between a local and a peer's NIC.",
    },
    Setting {
        key: "rdma.send_queue_depth",
        variables: &["MC_MAX_WR"],
        kind: Kind::Number {
            least: 1,
            most: 4096,
            read: |values| values.rdma.send_queue_depth as u64,
            write: |values, count| values.rdma.send_queue_depth = count as usize,
        },
        scope: Scope::Rdma,
        meaning: "Work requests that are under way on a queue pair at a time: one for each piece of a slice, which has up to 16 of them, and up to an eighth of this. A slice waits where there is no room for one of so many pieces.",
    },
    Setting {
        key: "rdma.retry_count",
        variables: &["MC_RETRY_CNT"],
        kind: Kind::Number {
            least: 0,
            most: 127,
            read: |values| values.rdma.retry_count.into(),
            write: |values, count| values.rdma.retry_count = count as u32,
        },
        scope: Scope::Rdma,
        meaning: "How often a slice is sent again after a connection broke under it, before its task \
                  fails. A connection that falls silent while others work costs none.",
    },
    Setting {
        key: "rdma.patience",
        variables: &[],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::ZERO,
            most: Duration::from_secs(24 * 3600),
            read: |values| values.rdma.patience,
            write: |values, time| values.rdma.patience = time,
        },
        scope: Scope::Rdma,
        meaning: "For how long a slice waits for a connection, or a WRITE for the peer's confirmation \
                  that nothing of a connection that broke can arrive any more, before its task fails: \
                  at least as long as one attempt to connect may take. put and get have --timeout for \
                  it.",
    },
    Setting {
        key: "rdma.max_pause",
        variables: &["MC_RDMA_RAIL_PAUSE_SECONDS"],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(10),
            most: HOUR,
            read: |values| values.rdma.max_pause,
            write: |values, time| values.rdma.max_pause = time,
        },
        scope: Scope::Rdma,
        meaning: "The longest pause of a pair of NICs, after 3 failures within 10 s. The first pause is 1 s, or this where \
                  it is shorter. It doubles each time that the pair fails again before it has completed anything.",
    },
    Setting {
        key: "rdma.acknowledge_timeout",
        variables: &[],
        kind: Kind::Number {
            least: 1,
            most: 31,
            read: |values| values.rdma.acknowledge_timeout.into(),
            write: |values, exponent| values.rdma.acknowledge_timeout = exponent as u8,
        },
        scope: Scope::Rdma,
        meaning: "The acknowledgement timeout of queue pairs as verbs code it: n is 4.096 us * 2^n. \
                  A peer counts as gone after 8 of them, or 7 with devices of the system: with 16, after 2.1 s.",
    },
    Setting {
        key: "rdma.max_endpoints",
        variables: &["MC_MAX_EP_PER_CTX"],
        kind: Kind::Number {
            least: 1,
            most: 4096,
            read: |values| values.rdma.max_endpoints as u64,
            write: |values, count| values.rdma.max_endpoints = count as usize,
        },
        scope: Scope::Rdma,
        meaning: "Peers' NICs that each device connects to. This times rdma.send_queue_depth times \
                  rdma.queue_pairs_per_endpoint is 2097152 at most.",
    },
    Setting {
        key: "rdma.max_accepted_queue_pairs",
        variables: &[],
        kind: Kind::Number {
            least: 1,
            most: 4096,
            read: |values| values.rdma.max_accepted_queue_pairs as u64,
            write: |values, count| values.rdma.max_accepted_queue_pairs = count as usize,
        },
        scope: Scope::Rdma,
        meaning: "Queue pairs of each device that are for peers who connect to this engine. For more, \
                  the connections go that were not used lately, the oldest first; their peers \
                  connect again when they need them.",
    },
    Setting {
        key: "rdma.keep_alive_interval",
        variables: &[],
        kind: Kind::Time {
            unit: Unit::Seconds,
            least: Duration::from_millis(10),
            most: HOUR,
            read: |values| values.rdma.keep_alive_interval,
            write: |values, time| values.rdma.keep_alive_interval = time,
        },
        scope: Scope::Rdma,
        meaning: "How often those are asked whether they are there.",
    },
    Setting {
        key: "rdma.path_round_robin",
        variables: &["MC_PATH_ROUNDROBIN"],
        kind: Kind::Flag {
            read: |values| values.rdma.path_round_robin,
            write: |values, in_turn| values.rdma.path_round_robin = in_turn,
        },
        scope: Scope::Rdma,
        meaning: "Of several pairs of NICs, tasks begin with each in turn; or else with any. A task \
                  with several slices uses as many pairs.",
    },
    Setting {
        key: "rdma.nic_pairs",
        variables: &["MC_NIC_PEER_AFFINITY"],
        kind: Kind::Pairs {
            read: |values| &values.rdma.peer_affinity,
            write: |values, pairs| {
                let affinity = &mut values.rdma.peer_affinity;
                match (&pairs, &*affinity) {
                    (PeerAffinity::Listed(rules), PeerAffinity::SameName) if rules.is_empty() => {}
                    (PeerAffinity::Listed(rules), _) if rules.is_empty() => {
                        *affinity = PeerAffinity::Any;
                    }
                    _ => *affinity = pairs,
                }
            },
        },
        scope: Scope::Rdma,
        meaning: "Which of a peer's NICs go with which of ours. A NIC that has some takes those first, of those \
                  that are near to the peer's memory.",
    },
    Setting {
        key: "rdma.same_name_first",
        variables: &["MC_ENABLE_DEST_DEVICE_AFFINITY"],
        kind: Kind::Flag {
            read: |values| values.rdma.peer_affinity == PeerAffinity::SameName,
            write: |values, same_name| {
                // Pairs that are listed come first.
                let affinity = &mut values.rdma.peer_affinity;
                match (same_name, &*affinity) {
                    (true, PeerAffinity::Any) => *affinity = PeerAffinity::SameName,
                    (false, PeerAffinity::SameName) => *affinity = PeerAffinity::Any,
                    _ => {}
                }
            },
        },
        scope: Scope::Rdma,
        meaning: "With each NIC goes the peer's NIC of the same name. Where rdma.nic_pairs says something, only \
                  that counts.",
    },
    Setting {
        key: "rdma.max_path_mtu",
        variables: &["MC_MTU"],
        kind: Kind::Word {
            words: &["256", "512", "1024", "2048", "4096"],
            others: &[],
            read: |values| {
                let row = MTUS.iter().find(|(_, mtu)| *mtu == values.rdma.max_path_mtu);
                row.map_or("4096", |(name, _)| name)
            },
            write: |values, name| {
                let row = MTUS.iter().find(|(known, _)| *known == name);
                values.rdma.max_path_mtu = row.map_or(Mtu::B4096, |(_, mtu)| *mtu);
            },
        },
        scope: Scope::Rdma,
        meaning: "The largest path MTU in bytes, where interfaces and peers would take larger ones.",
    },
    Setting {
        key: "rdma.partition_key_index",
        variables: &["MC_PKEY_INDEX"],
        kind: Kind::Number {
            least: 0,
            most: 65_535,
            read: |values| values.rdma.partition_key_index.into(),
            write: |values, index| values.rdma.partition_key_index = index as u16,
        },
        scope: Scope::Rdma,
        meaning: "Which of the device's partitions queue pairs are in. A soft device has one, with \
                  index 0, unless the program gives it more.",
    },
    Setting {
        key: "rdma.traffic_class",
        variables: &["MC_IB_TC"],
        kind: Kind::Index {
            most: 255,
            none: "0",
            read: |values| Some(values.rdma.soft.traffic_class),
            write: |values, class| {
                let class = class.unwrap_or(0);
                values.rdma.soft.traffic_class = class;
                values.rdma.ibverbs.traffic_class = class;
            },
        },
        scope: Scope::Rdma,
        meaning: "The traffic class of all packets: IPv6's byte of that name, IPv4's type of service. Networks choose a queue by \
                  its first six bits, the DSCP: 184 is DSCP 46. The last two are those of congestion marks (ECN): with 2 \
                  there the network may mark packets, as with soft.congestion_marks, which comes first.",
    },
    Setting {
        key: "rdma.service_level",
        variables: &["MC_IB_SL"],
        kind: Kind::Index {
            most: 15,
            none: "0",
            read: |values| Some(values.rdma.ibverbs.service_level),
            write: |values, level| values.rdma.ibverbs.service_level = level.unwrap_or(0),
        },
        scope: Scope::Ibverbs,
        meaning: "The service level of queue pairs: over Ethernet, adapters make of it the priority in a VLAN tag. Soft \
                  devices have none, as their packets have no such tag.",
    },
    Setting {
        key: "rdma.topology_file",
        variables: &["MC_CUSTOM_TOPO_JSON"],
        kind: Kind::File {
            none: "what the machine tells",
            read: |values| values.rdma.topology_file.as_deref(),
            write: |values, path| values.rdma.topology_file = path,
        },
        scope: Scope::Rdma,
        meaning: "Which NICs are near to which memory: a nic_priority_matrix as JSON. \
                  `millstream topology` shows it.",
    },
    Setting {
        key: "rdma.parallel_registration",
        variables: &["MC_ENABLE_PARALLEL_REG_MR"],
        kind: Kind::Word {
            words: &["auto", "off", "on"],
            others: &[("-1", "auto"), ("0", "off"), ("1", "on")],
            read: |values| match values.rdma.parallel_registration {
                None => "auto",
                Some(false) => "off",
                Some(true) => "on",
            },
            write: |values, word| {
                values.rdma.parallel_registration = match word {
                    "on" => Some(true),
                    "off" => Some(false),
                    _ => None,
                };
            },
        },
        scope: Scope::Rdma,
        meaning: "Memory is registered with all devices at once. auto: memory of 4 GiB and more is, with \
                  devices of the system, where there are four processors.",
    },
    Setting {
        key: "rdma.max_region_length",
        variables: &["MC_MAX_MR_SIZE"],
        kind: Kind::Size {
            least: 4 << 10,
            most: 1 << 50,
            read: |values| values.rdma.max_region_length,
            write: |values, bytes| values.rdma.max_region_length = bytes,
        },
        scope: Scope::Rdma,
        meaning: "Memory that is longer is registered as several regions of each device, and so is what is \
                  longer than a region of a device can be.",
    },
];
