//! `doctor`: what of this machine or container stands in the way, and the line that changes it.
//!
//! Facts are gathered first (`facts`), and each check is a function of them. Nothing needs a privilege
//! or waits for anything.

mod check;
mod facts;
mod machine;
mod network;
mod process;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use serde::Serialize;

use self::check::{Check, State};
use self::facts::Facts;
use crate::output::{self, line};

/// Arguments of `doctor`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Look at the files of a machine below this folder, and try nothing
    #[arg(long, value_name = "FOLDER", hide = true)]
    root: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    /// That of the worst.
    state: State,
    checks: Vec<Check>,
}

/// Runs `doctor`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let facts = match &arguments.root {
        Some(root) => Facts::read(root),
        None => Facts::of_this_machine(),
    };
    let checks = checks(&facts);
    let blocked = checks.iter().filter(|check| check.state == State::Blocked).count();
    let state = checks.iter().map(|check| check.state).max().unwrap_or(State::Ok);
    if arguments.json {
        output::json(&Report { state, checks })?;
    } else {
        checks.iter().flat_map(lines).try_for_each(|text| line(&text))?;
    }
    if blocked > 0 {
        bail!("{blocked} of these stand in the way");
    }
    Ok(())
}

fn checks(facts: &Facts) -> Vec<Check> {
    let parts = [network::checks(facts), machine::checks(facts), process::checks(facts)];
    parts.into_iter().flatten().collect()
}

fn lines(check: &Check) -> Vec<String> {
    let Check { name, state, found, cost, remedy } = check;
    let mut lines = vec![format!("{:8}  {name}: {found}", state.name())];
    lines.extend(cost.iter().map(|cost| format!("          costs: {cost}")));
    lines.extend(remedy.iter().map(|remedy| format!("          try: {remedy}")));
    lines
}
