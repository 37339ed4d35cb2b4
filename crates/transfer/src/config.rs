//! What an engine is made with.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use crate::PolicyFile;
use millstream_metadata::{
    ClientConfig, KeyValueStoreConfig, P2P_HANDSHAKE, RedisLogin, ServerConfig, TlsFiles,
    without_password,
};
use millstream_topology::PeerAffinity;
use millstream_verbs::{IbverbsConfig, Mtu, Provider, SoftConfig};

/// The longest descriptor: 65,536 buffers with the keys of 16 devices take some 30 MB.
const MAX_DESCRIPTOR: usize = 64 << 20;

/// Who chooses the pair of NICs of each slice.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Policy {
    /// NICs near to the memory first, by turns or at random.
    #[default]
    Classic,
    /// Where the slice is expected to be finished first, by what each pair carries now.
    Tent,
}

impl Policy {
    /// As in settings and in what commands print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Classic => "classic",
            Self::Tent => "tent",
        }
    }
}

/// What an engine is made with.
#[derive(Clone)]
pub struct Config {
    /// Where it answers metadata requests and handshakes. Port 0: a free one of `ports`.
    pub listen: SocketAddr,
    /// Among which ports to look for a free one, where `listen` has none. Without, the system chooses.
    pub ports: Option<RangeInclusive<u16>>,
    /// Connections that wait to be accepted, before more are refused or come later.
    pub listen_backlog: u16,
    /// The host by which peers reach it, which is in the segment's name where that is `host:port`. The
    /// address of `listen` unless given; needed when that is unspecified (`0.0.0.0`).
    pub host: Option<String>,
    /// Where segments are found, as [`millstream_metadata::open_store`] has it: `P2PHANDSHAKE`, where a
    /// segment's name says where its process answers, or the URI of a metadata server.
    pub metadata: String,
    /// The segment's name at a metadata server. Without, it is `host:port` there, too.
    pub segment_name: Option<String>,
    /// Which of several clusters that share a metadata server it belongs to. Mostly empty.
    pub metadata_cluster: String,
    /// What TLS towards an `https://`, `etcds://`, `rediss://` or `memcacheds://` metadata server is made with.
    pub metadata_tls: TlsFiles,
    /// Who it is towards a Redis metadata server, where the URI does not say so.
    pub redis: RedisLogin,
    /// The port of segments' names that have none. Without, they are refused.
    pub default_port: Option<u16>,
    /// How it asks peers. With a token, it is asked of whoever calls too, at all ports.
    pub client: ClientConfig,
    /// How it answers them.
    pub server: ServerConfig,
    /// Bytes in a slice: 1 KiB to 64 MiB.
    pub slice_length: usize,
    /// A rest of up to `slice_length` divided by this is merged into the last slice: from 1.
    pub fragment_ratio: usize,
    /// Who chooses the pair of NICs of each slice of the transport `rdma`.
    pub policy: Policy,
    /// Classes of requests, and what may be in flight.
    pub policy_file: PolicyFile,
}

impl Config {
    /// The defaults, answering at a free port of this address.
    ///
    /// The deadlines towards peers are short, so that a dead peer is known within 5 s.
    pub fn new(listen: IpAddr) -> Self {
        Self {
            listen: SocketAddr::new(listen, 0),
            ports: None,
            listen_backlog: 128,
            host: None,
            metadata: P2P_HANDSHAKE.to_owned(),
            segment_name: None,
            metadata_cluster: String::new(),
            metadata_tls: TlsFiles::default(),
            redis: RedisLogin::default(),
            default_port: None,
            client: ClientConfig {
                connect_timeout: Duration::from_secs(2),
                call_timeout: Duration::from_millis(2500),
                frame_limit: MAX_DESCRIPTOR,
                token: None,
                tls: None,
            },
            server: ServerConfig::default(),
            slice_length: 64 << 10,
            fragment_ratio: 4,
            policy: Policy::Classic,
            policy_file: PolicyFile::default(),
        }
    }

    /// What its store is opened with.
    pub fn store(&self) -> KeyValueStoreConfig {
        KeyValueStoreConfig {
            cluster: self.metadata_cluster.clone(),
            client: self.client.clone(),
            tls: self.metadata_tls.clone(),
            redis: self.redis.clone(),
            ..KeyValueStoreConfig::default()
        }
    }
}

/// Without the password that the URI of a metadata server may have.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("listen", &self.listen)
            .field("ports", &self.ports)
            .field("host", &self.host)
            .field("metadata", &without_password(&self.metadata))
            .field("segment_name", &self.segment_name)
            .field("metadata_cluster", &self.metadata_cluster)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

/// What the transport `rdma` is installed with.
#[derive(Clone, Debug)]
pub struct RdmaConfig {
    /// The local addresses: a device for each.
    pub addresses: Vec<IpAddr>,
    /// The devices with these names in place of those with `addresses`, or without a name all devices of the system:
    /// those of them that work, at least one. `soft-ADDRESS` is the name of a soft one. Does not count where
    /// `provider` is soft.
    pub devices: Option<Vec<String>>,
    /// What does the work: soft devices, or the system's RDMA devices with these addresses. With
    /// `None`, the system's where it has one with the address, else a soft one.
    pub provider: Option<Provider>,
    /// What soft devices are opened with, but for the address.
    pub soft: SoftConfig,
    /// What devices of the system are opened with, but for name and address.
    pub ibverbs: IbverbsConfig,
    /// Whether memory is registered with all devices at once. With `None`, memory of 4 GiB and more is, with
    /// devices of the system, where there are four processors.
    pub parallel_registration: Option<bool>,
    /// Memory that is longer is registered as several regions of each device; so is what is longer than the
    /// device can. From 4 KiB; pages that are not whole do not count.
    pub max_region_length: u64,
    /// The largest path MTU used, where interfaces and peers would take larger ones.
    pub max_path_mtu: Mtu,
    /// Which of their device's partitions the queue pairs are in.
    pub partition_key_index: u16,
    /// A file with the matrix of which NICs are near to which memory, as JSON. Without, it is found out.
    pub topology_file: Option<PathBuf>,
    /// Which of a peer's NICs go with which of ours: slices take those pairs first.
    pub peer_affinity: PeerAffinity,
    /// Whether slices take equally good pairs of NICs in turn, or at random.
    pub path_round_robin: bool,
    /// Queue pairs between two NICs: 1 to 16.
    pub queue_pairs_per_endpoint: usize,
    /// Work requests outstanding on a queue pair: 1 to 4096. A slice has one for each of its pieces: up to
    /// 16, up to an eighth of this, and one at least. It waits where there is no room for one of so many.
    pub send_queue_depth: usize,
    /// How often a slice is sent again after a connection broke under it, before its task fails. One
    /// that falls silent while others work costs none.
    pub retry_count: u32,
    /// For how long a slice waits for a connection before its task fails: at least as long as one
    /// attempt to connect may take, by [`Config::client`]. A peer whose process is gone, so that its host
    /// refuses the connection, is not waited for. As long a WRITE whose connection broke waits for the
    /// peer's confirmation that nothing of it can arrive any more, and at least 2 s.
    pub patience: Duration,
    /// The longest pause of a pair of NICs that failed 3 times within 10 s. The first is 1 s, or this where it is
    /// shorter. It doubles each time that the pair fails again before it has completed anything.
    pub max_pause: Duration,
    /// The acknowledgement timeout of queue pairs as verbs code it: 4.096 us * 2^n, 1 to 31. A peer
    /// counts as gone after 8 of them, or 7 with devices of the system: with 16, after 2.1 s. A busy machine
    /// may well let a process wait for a second.
    pub acknowledge_timeout: u8,
    /// The most peer NICs that each local device connects to. Fewer where the device's completion
    /// queues do not hold `send_queue_depth` completions for each queue pair.
    pub max_endpoints: usize,
    /// The most queue pairs of each device that are for peers who connect to it: 1 to 4096. Fewer
    /// where the device has fewer, or the engine may need them itself.
    pub max_accepted_queue_pairs: usize,
    /// How often those are asked whether they are there. One that was killed is forgotten after two
    /// such times and 8 acknowledgement timeouts, each twice as long as `acknowledge_timeout`.
    pub keep_alive_interval: Duration,
}

impl RdmaConfig {
    /// Those of `devices`, if they count.
    pub(crate) fn named_devices(&self) -> Option<&[String]> {
        self.devices.as_deref().filter(|_| self.provider != Some(Provider::Soft))
    }

    /// The defaults, with devices on these addresses.
    pub fn new(addresses: &[IpAddr]) -> Self {
        Self {
            addresses: addresses.to_vec(),
            devices: None,
            provider: None,
            soft: SoftConfig::new(Ipv4Addr::LOCALHOST.into()),
            ibverbs: IbverbsConfig::default(),
            parallel_registration: None,
            max_region_length: 1 << 40,
            max_path_mtu: Mtu::B4096,
            partition_key_index: 0,
            topology_file: None,
            peer_affinity: PeerAffinity::Any,
            path_round_robin: true,
            queue_pairs_per_endpoint: 1,
            send_queue_depth: 256,
            retry_count: 1,
            patience: Duration::ZERO,
            max_pause: Duration::from_secs(30),
            acknowledge_timeout: 16,
            max_endpoints: 1024,
            max_accepted_queue_pairs: 2048,
            keep_alive_interval: Duration::from_secs(2),
        }
    }
}
