//! `allreduce`: one host of an AllReduce.

use clap::Args;
use millstream_collective::Collective;

use crate::collective::{Participation, take_part};

/// Arguments of `allreduce`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    participation: Participation,
}

/// Runs `allreduce`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    take_part(Collective::AllReduce, 0, false, &arguments.participation)
}
