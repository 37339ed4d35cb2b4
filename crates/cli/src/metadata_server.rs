//! `metadata-server`: segment descriptors and addresses over HTTP.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use millstream_control::metadata_server::{self, MetadataServerConfig, ServerTls};
use serde::Serialize;

use crate::daemon::{ReadyLine, open_many_files};

/// Arguments of `metadata-server`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Where to listen
    #[arg(long, value_name = "ADDR", default_value_t = MetadataServerConfig::DEFAULT_LISTEN)]
    listen: SocketAddr,
    /// Keep entries in this folder, where they survive a crash [default: in memory]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Speak TLS (https://), with this certificate and those that lead to its authority, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Admit clients only that have a certificate of one of these authorities, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
}

/// The `ready` line.
#[derive(Serialize)]
struct Ready {
    /// Where nodes find it.
    listen: SocketAddr,
    /// What they are given as --metadata.
    metadata: String,
}

/// Runs `metadata-server`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    open_many_files();
    let line = ReadyLine::default();
    let scheme = if arguments.tls_cert.is_some() { "https" } else { "http" };
    let ready = |listen: SocketAddr| {
        let metadata = format!("{scheme}://{listen}/metadata");
        line.print(&Ready { listen, metadata });
    };
    let config = MetadataServerConfig {
        data_dir: arguments.data_dir.clone(),
        tls: arguments.tls_cert.clone().zip(arguments.tls_key.clone()).map(|(certificate, key)| {
            ServerTls { certificate, key, client_authorities: arguments.tls_client_ca.clone() }
        }),
        ..MetadataServerConfig::new(arguments.listen)
    };
    metadata_server::run(config, ready, line.shutdown())?;
    line.outcome()
}
