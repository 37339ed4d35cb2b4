//! `demo`: the main job end to end.

use clap::Args;

use crate::failure::not_yet;
use crate::units;

/// Arguments of `demo`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Bytes of the file that is copied
    #[arg(long, value_name = "SIZE", value_parser = units::size, default_value = "256MiB", hide = true)]
    file_size: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `demo`.
pub(crate) fn run(_arguments: &Arguments) -> anyhow::Result<()> {
    Err(not_yet("this version has no demo"))
}
