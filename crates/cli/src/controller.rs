//! `controller`: groups, communicators and their trees.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use millstream_control::api::ControllerView;
use millstream_control::controller::{self, ControllerConfig, FanIn};
use millstream_control::metadata_server::ServerTls;
use millstream_control::state::{StateLocation, TlsFiles};
use millstream_control::status_server::StatusServer;
use millstream_control::tokens::Tokens;
use millstream_control::topology_file::TopologyFile;
use serde::Serialize;

use crate::daemon::{ReadyLine, open_many_files};
use crate::note::note;
use crate::status_pages;

/// Where hosts and switches look for one unless told otherwise.
pub(crate) const DEFAULT: &str = "127.0.0.1:52200";

/// What `--fan-in` can be.
pub(crate) const FAN_IN: RangeInclusive<i64> = FanIn::MIN.get() as i64..=FanIn::MAX.get() as i64;

/// Arguments of `controller`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Where to listen
    #[arg(long, value_name = "ADDR", default_value_t = ControllerConfig::DEFAULT_LISTEN)]
    listen: SocketAddr,
    /// Children that a switch has in a tree at most, hosts and switches: groups of more hosts get trees
    /// of switches
    #[arg(long, value_name = "F", default_value_t = FanIn::MAX.get(), value_parser = clap::value_parser!(u32).range(FAN_IN))]
    fan_in: u32,
    /// Ranks that are connected at a time at most, of all groups: a group of more is refused
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_ranks: u32,
    /// The network in YAML: switches, and who is connected to them. Trees are planned on it, and who is not in it
    /// is refused
    #[arg(long, value_name = "FILE.yaml")]
    topology: Option<PathBuf>,
    /// Directory for a file of each communicator: its tree with the queue pairs, in the form of a topology. Files
    /// of an earlier run are removed
    #[arg(long, value_name = "DIR")]
    plans: Option<PathBuf>,
    /// Tokens of hosts, switches and readers in TOML, and how much each may have. Those who have none are refused
    #[arg(long, value_name = "FILE.toml")]
    tokens: Option<PathBuf>,
    /// Speak TLS with hosts and switches, with this certificate and those that lead to its authority, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Admit hosts and switches only that have a certificate of one of these authorities, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Serve a page, an API and metrics over HTTP at this address, or this port of 127.0.0.1: / for people,
    /// /openapi.json says what there is, /metrics for Prometheus; who reads shows a token of --tokens that is for
    /// readers, where there is one, and nothing can be changed
    #[arg(long, value_name = "ADDR", value_parser = status_pages::address)]
    http: Option<SocketAddr>,
    /// The certificate of the page, in PEM, with those that lead to its authority: then --http is https
    #[arg(long, value_name = "FILE", requires_all = ["http", "http_tls_key"])]
    http_tls_certificate: Option<PathBuf>,
    /// The private key of --http-tls-certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "http_tls_certificate")]
    http_tls_key: Option<PathBuf>,
    /// Keep what the next controller should know: in file:PATH, or in etcd://HOST:PORT,.../PREFIX (etcds:// over TLS),
    /// which several controllers share, of whom one leads [default: in memory only]
    #[arg(long, value_name = "URI")]
    state: Option<StateLocation>,
    /// Authorities that may vouch for an etcd with TLS, in PEM [default: those of the system]
    #[arg(long, value_name = "FILE", requires = "state")]
    state_ca_file: Option<PathBuf>,
    /// The certificate that is shown to an etcd with TLS that asks for one, in PEM
    #[arg(long, value_name = "FILE", requires_all = ["state", "state_key_file"])]
    state_certificate_file: Option<PathBuf>,
    /// The private key of --state-certificate-file, in PEM
    #[arg(long, value_name = "FILE", requires = "state_certificate_file")]
    state_key_file: Option<PathBuf>,
    /// Where hosts, switches and the other controllers find this one, with etcd [default: where it listens]
    #[arg(long, value_name = "ADDR", requires = "state")]
    advertise: Option<SocketAddr>,
}

/// The `ready` line.
#[derive(Serialize)]
struct Ready {
    /// Where hosts and switches find it.
    listen: SocketAddr,
    /// Where the page is.
    #[serde(skip_serializing_if = "Option::is_none")]
    http: Option<SocketAddr>,
}

/// Runs `controller`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    open_many_files();
    let line = ReadyLine::default();
    let mut config = ControllerConfig::new(arguments.listen);
    config.rules.fan_in = FanIn::new(arguments.fan_in).unwrap_or(FanIn::MAX);
    config.rules.max_ranks = arguments.max_ranks as usize;
    config.plans.clone_from(&arguments.plans);
    config.state.clone_from(&arguments.state);
    config.state_tls = TlsFiles {
        authorities: arguments.state_ca_file.clone(),
        certificate: arguments.state_certificate_file.clone(),
        key: arguments.state_key_file.clone(),
    };
    config.advertise = arguments.advertise;
    if let Some(path) = &arguments.topology {
        let file = TopologyFile::read(path)?;
        for warning in file.warnings {
            note(&warning);
        }
        config.rules.topology = Some(Arc::new(file.topology));
    }
    config.tokens = arguments.tokens.as_deref().map(Tokens::read).transpose()?;
    config.tls =
        arguments.tls_cert.clone().zip(arguments.tls_key.clone()).map(|(certificate, key)| {
            ServerTls { certificate, key, client_authorities: arguments.tls_client_ca.clone() }
        });
    let readers = config.tokens.as_ref().map_or(&[][..], Tokens::readers);
    let view = Arc::new(ControllerView::new(config.rules.topology.clone()));
    let page_tls = arguments.http_tls_certificate.clone().zip(arguments.http_tls_key.clone());
    let page_tls =
        page_tls.map(|(certificate, key)| ServerTls { certificate, key, client_authorities: None });
    let serve = |listen| {
        let (pages, readers) = (Arc::clone(&view).pages(), readers.to_vec());
        status_pages::start_for(listen, pages, readers, page_tls.as_ref(), "--http")
    };
    let pages = arguments.http.map(serve).transpose()?;
    config.view = pages.is_some().then_some(view);
    let http = pages.as_ref().map(StatusServer::address);
    let ready = |listen| line.print(&Ready { listen, http });
    controller::run(config, ready, line.shutdown())?;
    line.outcome()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_is_found_where_it_listens() {
        let default: SocketAddr = DEFAULT.parse().unwrap();
        assert_eq!(default.port(), ControllerConfig::DEFAULT_LISTEN.port());
    }
}
