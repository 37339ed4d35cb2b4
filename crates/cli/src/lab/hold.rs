//! The process in the background that holds a lab, and starts what runs in it.

use std::convert::Infallible;
use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use millstream_collective::DEFAULT_PORT;
use millstream_lab::{Handle, Lab, Labs, Process};
use serde::Serialize;

use super::network::{CONTROLLER, Network, Switch};
use crate::output;
use crate::process::{self, Child};

/// How long a daemon may take to be ready, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Serialize)]
struct Ready {}

/// Builds a lab, starts its controller and then its switches, says that all of them are ready, and stays until it is told
/// to stop. What was made goes away if anything fails, since it belongs to this process.
pub(super) fn hold(labs: &Labs, name: &str, file: &Path) -> anyhow::Result<Infallible> {
    process::clean_up_when_told_to_stop()?;
    let network = Network::read(file)?;
    let folder = labs.new_folder(name)?;
    let lab = Lab::up_in(&network.plan, folder)?;
    // Dropped before the lab.
    let daemons = start(&lab, &network, file)?;
    let processes = daemons.iter().map(|(name, daemon)| Process::new(name, daemon.id()));
    labs.write(name, &lab, processes.collect())?;
    output::ready(&Ready {})?;
    loop {
        std::thread::park();
    }
}

/// Where hosts and switches find the controller: the first machine's address on the network of all.
pub(super) fn controller_address(lab: &Handle) -> Option<SocketAddr> {
    let nic = lab.layout().hosts.first()?.nics.iter().find(|nic| nic.peer.is_none())?;
    Some(SocketAddr::new(*nic.addresses.first()?, DEFAULT_PORT))
}

/// The controller, and when it is ready, the switches.
fn start(lab: &Handle, network: &Network, file: &Path) -> anyhow::Result<Vec<(String, Child)>> {
    let address = controller_address(lab).context("the lab has no network for its controller")?;
    let address = address.to_string();
    let mut command = at(lab, &network.controller)?;
    command.args(["controller", "--listen", &address, "--topology"]).arg(file);
    let mut daemons = vec![daemon(lab, CONTROLLER, command)?];
    ready(&mut daemons, 0)?;
    for Switch { machine, name, bind } in &network.switches {
        let mut command = at(lab, machine)?;
        command.args(["switch", "--controller", &address, "--bind", &bind.to_string()]);
        if let Some(name) = name {
            command.arg("--name").arg(name);
        }
        daemons.push(daemon(lab, machine, command)?);
    }
    for number in 1..daemons.len() {
        ready(&mut daemons, number)?;
    }
    Ok(daemons)
}

fn at(lab: &Handle, machine: &str) -> anyhow::Result<std::process::Command> {
    let program = std::env::current_exe().context("cannot find our own executable")?;
    Ok(lab.command(machine, program)?)
}

fn daemon(
    lab: &Handle,
    name: &str,
    command: std::process::Command,
) -> anyhow::Result<(String, Child)> {
    let path = lab.folder().join(format!("{name}.log"));
    let file =
        File::create(&path).with_context(|| format!("cannot make {}", output::escaped(&path)))?;
    Ok((name.to_owned(), Child::start_command(name.to_owned(), command, Some(file))?))
}

/// Waits until a daemon is ready. If it does not come to that, another one that has ended may be why.
fn ready(daemons: &mut [(String, Child)], number: usize) -> anyhow::Result<()> {
    let Err(error) = daemons[number].1.ready(PATIENCE) else { return Ok(()) };
    for (other, (_, daemon)) in daemons.iter_mut().enumerate() {
        if other != number {
            daemon.check(Duration::ZERO)?;
        }
    }
    bail!(error)
}
