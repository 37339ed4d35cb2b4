//! What a command shows over HTTP. Of an engine that is `/metrics` for Prometheus, and `/status`, which `top` reads.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use millstream_control::metadata_server::ServerTls;
use millstream_control::status_server::{Page, Pages, StatusServer};
use millstream_net::token::Token;
use millstream_transfer::{Metrics, Settings, TransferEngine, listen_address};
use serde::{Deserialize, Serialize};

/// The setting that says where.
const SETTING: &str = "metrics.listen";

/// What `/status` has.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Status {
    /// Of the command.
    pub(crate) version: String,
    pub(crate) process: u32,
    #[serde(flatten)]
    pub(crate) metrics: Metrics,
}

/// Reads a value of `--http`.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    listen_address(text).ok_or_else(|| "it is ADDRESS:PORT, or a port of 127.0.0.1".to_owned())
}

/// Arguments of a node that is started here, which serves no metrics: `metrics.listen` comes to it by the
/// environment or a file, too, and another node may be there.
pub(crate) const NOWHERE: [&str; 2] = ["--set", "metrics.listen="];

/// Where `--http` or else the setting says, and who of them it was.
pub(crate) fn place(http: Option<SocketAddr>, settings: &Settings) -> Option<(SocketAddr, String)> {
    if let Some(listen) = http {
        return Some((listen, "--http".to_owned()));
    }
    let listen = settings.metrics_listen()?;
    let origin = settings.states().find(|state| state.key == SETTING)?.origin.clone();
    Some((listen, format!("{SETTING} ({origin})")))
}

/// Serves them until the result is dropped. An error begins with `asked_by`.
pub(crate) fn serve(
    engine: &Arc<TransferEngine>,
    listen: SocketAddr,
    asked_by: String,
) -> anyhow::Result<StatusServer> {
    let engine = Arc::clone(engine);
    start(listen, Arc::new(move |path: &str| page(&engine, path)), &asked_by)
}

/// Serves these pages until the result is dropped. An error begins with `asked_by`.
pub(crate) fn start(
    listen: SocketAddr,
    pages: Arc<Pages>,
    asked_by: &str,
) -> anyhow::Result<StatusServer> {
    start_for(listen, pages, Vec::new(), None, asked_by)
}

/// The same, for those who show one of these tokens, if there are any; over TLS, if that is set.
pub(crate) fn start_for(
    listen: SocketAddr,
    pages: Arc<Pages>,
    readers: Vec<Token>,
    tls: Option<&ServerTls>,
    asked_by: &str,
) -> anyhow::Result<StatusServer> {
    StatusServer::start_for(listen, pages, readers, tls).with_context(|| asked_by.to_owned())
}

fn page(engine: &TransferEngine, path: &str) -> Option<Page> {
    match path {
        "/metrics" => Some(Page {
            content_type: "text/plain; version=0.0.4; charset=utf-8",
            text: engine.metrics().to_prometheus(),
        }),
        "/status" => Some(Page {
            content_type: "application/json",
            text: serde_json::to_string(&Status::of(engine)).ok()? + "\n",
        }),
        "/" => Some(Page {
            content_type: "text/plain; charset=utf-8",
            text: "/metrics for Prometheus\n/status as JSON\n".to_owned(),
        }),
        _ => None,
    }
}

impl Status {
    fn of(engine: &TransferEngine) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            process: std::process::id(),
            metrics: engine.metrics(),
        }
    }
}
