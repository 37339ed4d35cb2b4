//! `switch`: a switch whose memory adds.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use clap::Args;
use millstream_control::status_server::StatusServer;
use millstream_control::switch::{self, RunError, SwitchConfig};
use millstream_control::switch_pages::SwitchView;
use millstream_net::Driver;
use serde::Serialize;

use crate::control_proofs::Proofs;
use crate::daemon::{ReadyLine, open_many_files};
use crate::{address, bind, controller, status_pages};

/// How often another address is tried when a process takes the one just found.
const ATTEMPTS: usize = 8;

/// Arguments of `switch`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The controller's HOST:PORT, several with commas between if they share their state
    #[arg(long, value_name = "ADDR,...", default_value = controller::DEFAULT)]
    controller: String,
    /// The switch's name [default: switch- and its address]
    #[arg(long, value_name = "S")]
    name: Option<String>,
    /// Local address [default: one that leads to the controller]
    #[arg(long, value_name = "IP")]
    bind: Option<IpAddr>,
    /// How it sends: udp, which needs no privileges, or packet, which needs CAP_NET_RAW and checks
    /// the whole invariant CRC
    #[arg(long, value_name = "DRIVER", default_value_t)]
    driver: Driver,
    /// How many threads serve it: groups, and the trees of a group over several NICs, are divided among them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    shards: u8,
    /// Serve metrics over HTTP at this address, or this port of 127.0.0.1: /metrics for Prometheus, /status as
    /// JSON; nobody is asked there who he is
    #[arg(long, value_name = "ADDR", value_parser = status_pages::address)]
    http: Option<SocketAddr>,
    #[command(flatten)]
    proofs: Proofs,
    /// Send every packet as its own datagram, as captures want it
    #[arg(long)]
    no_segmentation_offload: bool,
}

/// The `ready` line.
#[derive(Serialize)]
struct Ready<'a> {
    name: &'a str,
    controller: SocketAddr,
    /// Its address on the data network.
    address: IpAddr,
    /// Where metrics are.
    #[serde(skip_serializing_if = "Option::is_none")]
    http: Option<SocketAddr>,
}

/// Runs `switch`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments {
        controller,
        name,
        bind: bind_address,
        driver,
        shards,
        http,
        proofs,
        no_segmentation_offload,
    } = arguments;
    open_many_files();
    millstream_net::give_back_large_blocks();
    let (token, tls) = (proofs.token()?, proofs.tls(controller)?);
    bind::check(bind_address.as_slice())?;
    let controllers = address::resolve_controllers(controller, address::LOOKUP_TIME)?;
    let controller = controllers.first();
    let segmentation_offload = !no_segmentation_offload;
    let mut attempt = 1;
    loop {
        let address = bind_address.map_or_else(|| address::towards(controller.ip()), Ok)?;
        let name = name.clone().unwrap_or_else(|| format!("switch-{address}"));
        let line = ReadyLine::default();
        let view = Arc::new(SwitchView::new(name.as_str()));
        let serve = |listen| status_pages::start(listen, Arc::clone(&view).pages(), "--http");
        let pages = http.map(serve).transpose()?;
        let http = pages.as_ref().map(StatusServer::address);
        let ready = |address| line.print(&Ready { name: &name, controller, address, http });
        let config = SwitchConfig {
            driver: *driver,
            shards: usize::from(*shards),
            segmentation_offload,
            view: http.map(|_| view),
            token,
            tls: tls.clone(),
            ..SwitchConfig::new(controllers.clone(), name.as_str(), address)
        };
        match switch::run(config, ready, line.shutdown()) {
            // It was free a moment ago.
            Err(RunError::Open(error))
                if error.is_in_use() && bind_address.is_none() && attempt < ATTEMPTS =>
            {
                attempt += 1;
            }
            ended => {
                ended?;
                return line.outcome();
            }
        }
    }
}
