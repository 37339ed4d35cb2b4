//! Where the values of all settings are.

use std::net::SocketAddr;
use std::path::PathBuf;

use millstream_metadata::{HostPort, TlsFiles};

use crate::{Config, NvmeofConfig, RdmaConfig, RelayLimits, TcpConfig};

/// The values of all settings, in the types that they act in.
#[derive(Clone, Debug)]
pub(super) struct Values {
    /// But for the address.
    pub(super) engine: Config,
    /// But for the addresses.
    pub(super) rdma: RdmaConfig,
    /// Where the classes of requests are.
    pub(super) policy_file: Option<PathBuf>,
    /// Where the token is.
    pub(super) token_file: Option<PathBuf>,
    /// What TLS with peers is made with.
    pub(super) peer_tls: TlsFiles,
    /// The first and last port to listen at. 0: the system chooses.
    pub(super) first_port: u16,
    pub(super) last_port: u16,
    /// But for the ports.
    pub(super) tcp: TcpConfig,
    /// The first and last port for data. 0: the system chooses.
    pub(super) first_data_port: u16,
    pub(super) last_data_port: u16,
    /// But for the ports.
    pub(super) nvmeof: NvmeofConfig,
    /// The first and last port for files. 0: the system chooses.
    pub(super) first_file_port: u16,
    pub(super) last_file_port: u16,
    /// Whether engines are relays, and how far.
    pub(super) is_relay: bool,
    pub(super) relay: RelayLimits,
    /// Who is asked for ways to segments to which nothing else leads.
    pub(super) relays: Vec<HostPort>,
    /// What the command logs; empty: as if nothing was said.
    pub(super) log_level: &'static str,
    /// Log everything.
    pub(super) trace: bool,
    /// Where a node says what it does.
    pub(super) metrics_listen: Option<SocketAddr>,
}

impl Default for Values {
    fn default() -> Self {
        let nowhere = std::net::Ipv4Addr::LOCALHOST.into();
        Self {
            engine: Config::new(nowhere),
            rdma: RdmaConfig::new(&[]),
            policy_file: None,
            token_file: None,
            peer_tls: TlsFiles::default(),
            first_port: 0,
            last_port: 0,
            tcp: TcpConfig::default(),
            first_data_port: 0,
            last_data_port: 0,
            nvmeof: NvmeofConfig::default(),
            first_file_port: 0,
            last_file_port: 0,
            is_relay: false,
            relay: RelayLimits::default(),
            relays: Vec::new(),
            log_level: "default",
            trace: false,
            metrics_listen: None,
        }
    }
}
