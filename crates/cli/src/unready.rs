//! The part of the contract that this version does not do. The arguments are parsed, so that a
//! wrong one is told from a right one, and the answer is exit status 2.

use std::net::SocketAddr;

use clap::Args;

use crate::failure::not_yet;

/// Arguments of `metadata-server`.
#[derive(Args, Debug)]
pub(crate) struct MetadataServer {
    /// Where to listen
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
}

impl MetadataServer {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        let place = self.listen.map_or_else(String::new, |listen| format!(" on {listen}"));
        Err(not_yet(&format!(
            "this version cannot serve metadata{place}; nodes find each other with --metadata p2p"
        )))
    }
}
