//! `millstream allreduce` on every host of a topology, or on this machine.

use std::fmt::Write;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use millstream_lab::{Handle, Rate};
use serde_json::Value;

use super::super::bench::Process;
use super::super::{folder, labs};
use super::{Calls, Figure};
use crate::process;

const NAME: &str = "bench-collectives";

/// How hosts and switches are connected.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Shape {
    /// All hosts at one switch, with so many NICs each.
    OneLevel { nics: usize },
    /// Half of the hosts at each of two switches, and a root above.
    TwoLevels,
}

/// The addresses of a rank. The third number is a host's NIC, the last its place.
fn addresses(shape: Shape, rank: usize) -> Vec<String> {
    let nics = match shape {
        Shape::OneLevel { nics } => nics,
        Shape::TwoLevels => 1,
    };
    (0..nics).map(|nic| format!("10.2.{nic}.{}", rank + 1)).collect()
}

/// The topology as the controller reads it.
fn topology(shape: Shape, world: usize, rate: Rate) -> String {
    let mut text = "switches:\n  - id: 0\n    root: true\n    connections:\n".to_owned();
    let child = |switch: usize, rank: usize, peers: &[String]| {
        let mut lines = String::new();
        for (nic, peer) in peers.iter().enumerate() {
            let own = if switch == 0 { nic } else { switch };
            writeln!(
                lines,
                "      - {{up: false, host_id: {rank}, my_ip: 10.1.{own}.1, peer_ip: {peer}}}"
            )
            .expect("a string takes everything");
        }
        lines
    };
    match shape {
        Shape::OneLevel { .. } => {
            text.extend((0..world).map(|rank| child(0, rank, &addresses(shape, rank))));
        }
        Shape::TwoLevels => {
            for leaf in [1, 2] {
                text +=
                    &format!("      - {{up: false, my_ip: 10.1.0.1, peer_ip: 10.1.{leaf}.1}}\n");
            }
            for leaf in [1, 2] {
                text += &format!(
                    "  - id: {leaf}\n    connections:\n      - {{up: true, my_ip: 10.1.{leaf}.1, peer_ip: 10.1.0.1}}\n"
                );
                let half = world / 2;
                let ranks = (leaf - 1) * half..if leaf == 1 { half } else { world };
                text.extend(ranks.map(|rank| child(leaf, rank, &addresses(shape, rank))));
            }
        }
    }
    text + &format!("lab:\n  rate: {rate}\n")
}

/// A lab that ends with this value.
struct Network(Handle);

impl Network {
    fn up(program: &Path, text: &str) -> Result<Self> {
        std::fs::create_dir_all(folder()).context("cannot make the folder of labs")?;
        let file = folder().join(format!("{NAME}.yaml"));
        std::fs::write(&file, text).context("cannot write the topology")?;
        // Of a run that was interrupted: it is a process of its own that has it.
        if labs().read(NAME).is_ok() {
            labs().end(NAME)?;
        }
        let mut command = Command::new(program);
        command.args(["lab", "up", "--name", NAME, "--directory"]).arg(folder());
        process::output(command.arg(file))?;
        Ok(Self(labs().read(NAME)?.lab))
    }

    fn allreduce(
        &self,
        program: &Path,
        shape: Shape,
        world: usize,
        calls: &Calls,
    ) -> Result<Vec<Figure>> {
        let rank = |rank| {
            let mut command = self.0.command(&format!("host{rank}"), program)?;
            allreduce(&mut command, "10.77.0.1:52200", world, rank, calls);
            for address in addresses(shape, rank) {
                command.args(["--bind", &address]);
            }
            command.args(["--path", "switch", "--fallback", "off"]);
            Ok(command)
        };
        all(world, rank)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Err(error) = labs().end(NAME) {
            eprintln!("xtask: {error}");
        }
    }
}

/// Ranks at the hosts of a lab of their own.
pub(super) fn over_links(
    program: &Path,
    shape: Shape,
    world: usize,
    rate: Rate,
    calls: &Calls,
) -> Result<Vec<Figure>> {
    let network = Network::up(program, &topology(shape, world, rate))?;
    network.allreduce(program, shape, world, calls)
}

/// Two hosts at a switch, and how many bytes one of them writes to the other in a microsecond over the same links.
pub(super) fn beside_write_bw(
    program: &Path,
    rate: Rate,
    calls: &Calls,
) -> Result<(Vec<Figure>, f64)> {
    let shape = Shape::OneLevel { nics: 1 };
    let network = Network::up(program, &topology(shape, 2, rate))?;
    let figures = network.allreduce(program, shape, 2, calls)?;
    let at = |rank: usize| -> Result<Command> {
        let mut command = network.0.command(&format!("host{rank}"), program)?;
        command.args(["rdma", "write-bw", "--json", "--wait", "10s", "-D", "3s"]);
        command.args(["--bind", &addresses(shape, rank)[0]]);
        Ok(command)
    };
    let mut server = at(1)?;
    server.stdin(Stdio::null()).stdout(Stdio::null());
    let _server = Process(server.spawn().context("cannot start the server of write-bw")?);
    let mut client = at(0)?;
    client.arg(&addresses(shape, 1)[0]);
    let said = process::output(&mut client)?;
    let said: Value = serde_json::from_str(said.trim()).context("JSON of write-bw")?;
    let gigabytes = said["results"][0]["gb_per_s"].as_f64().context("no gb_per_s of write-bw")?;
    Ok((figures, gigabytes * 1e3))
}

/// Ranks on this machine, with a controller and a switch that they use unless `path` is `shared-memory`.
pub(super) fn here(program: &Path, path: &str, world: usize, calls: &Calls) -> Result<Vec<Figure>> {
    let mut controller = Command::new(program);
    controller.args(["controller", "--listen", "127.0.0.1:0"]).stdout(Stdio::piped());
    let mut controller = Process(controller.spawn().context("cannot start a controller")?);
    let listen = listens(&mut controller.0)?;
    let mut switch = Command::new(program);
    switch.args(["switch", "--controller", &listen, "--bind", "127.0.0.9"]).stdout(Stdio::null());
    let _switch = Process(switch.spawn().context("cannot start a switch")?);
    let rank = |rank: usize| {
        let mut command = Command::new(program);
        allreduce(&mut command, &listen, world, rank, calls);
        command.args(["--bind", &format!("127.0.1.{}", rank + 1)]);
        command.args(["--path", path, "--fallback", "off"]);
        Ok(command)
    };
    all(world, rank)
}

/// Where a controller says that it listens.
fn listens(controller: &mut Child) -> Result<String> {
    let mut line = String::new();
    let stdout = controller.stdout.take().expect("it is piped");
    BufReader::new(stdout).read_line(&mut line).context("cannot hear from the controller")?;
    let ready = line.strip_prefix("ready ").context("the controller is not ready")?;
    let ready: Value = serde_json::from_str(ready).context("the controller's ready line")?;
    Ok(ready["listen"].as_str().context("no `listen` in the controller's ready line")?.to_owned())
}

fn allreduce(command: &mut Command, controller: &str, world: usize, rank: usize, calls: &Calls) {
    let sizes: Vec<String> = calls.sizes.iter().map(ToString::to_string).collect();
    command.args(["allreduce", "--json", "--controller", controller, "--timeout", "60s"]);
    command.args(["--world", &world.to_string(), "--rank", &rank.to_string()]);
    command.args(["--size", &sizes.join(","), "--iters", &calls.count.to_string()]);
    command.args(["--warmup-iters", &calls.warm_up.to_string()]);
}

/// Runs all ranks, and takes for each size the greatest of what they say.
fn all(world: usize, command: impl Fn(usize) -> Result<Command>) -> Result<Vec<Figure>> {
    let start = |rank| {
        let mut command = command(rank)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        Ok(Process(command.spawn().with_context(|| format!("cannot start rank {rank}"))?))
    };
    let mut ranks = (0..world).map(start).collect::<Result<Vec<Process>>>()?;
    let mut greatest: Vec<Figure> = Vec::new();
    for (rank, process) in ranks.iter_mut().enumerate() {
        let stdout = process.0.stdout.take().expect("it is piped");
        let said = BufReader::new(stdout).lines().map(|line| figure(&line?));
        let said: Vec<Figure> = said.collect::<Result<_>>()?;
        let status = process.0.wait().with_context(|| format!("cannot wait for rank {rank}"))?;
        if !status.success() {
            bail!("rank {rank} ended with {status}");
        }
        if greatest.is_empty() {
            greatest.clone_from(&said);
        }
        for (greatest, figure) in greatest.iter_mut().zip(said) {
            greatest.mean_us = greatest.mean_us.max(figure.mean_us);
            greatest.p50_us = greatest.p50_us.max(figure.p50_us);
        }
    }
    Ok(greatest)
}

/// A line of `allreduce --json`.
fn figure(line: &str) -> Result<Figure> {
    let value: Value = serde_json::from_str(line).context("JSON of allreduce")?;
    let latency = |field: &str| {
        value["latency_us"][field]
            .as_f64()
            .with_context(|| format!("no latency_us.{field}: {line}"))
    };
    let bytes = value["bytes"].as_u64().with_context(|| format!("no bytes: {line}"))?;
    Ok(Figure { bytes, mean_us: latency("mean")?, p50_us: latency("p50")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_child_s_place_for_each_nic() {
        let rate = Rate::from_mbit(100);
        for (shape, world, children, links) in [
            (Shape::OneLevel { nics: 1 }, 4, 4, 4),
            (Shape::OneLevel { nics: 2 }, 4, 8, 8),
            (Shape::TwoLevels, 5, 5, 9),
        ] {
            let text = topology(shape, world, rate);
            assert_eq!(text.matches("host_id").count(), children, "{text}");
            assert_eq!(text.matches("peer_ip").count(), links, "{text}");
            for address in (0..world).flat_map(|rank| addresses(shape, rank)) {
                assert!(text.contains(&format!("peer_ip: {address}}}")), "{address}: {text}");
            }
        }
    }

    #[test]
    fn a_rank_s_line_is_read() {
        let line = r#"{"bytes":8,"latency_us":{"mean":12.5,"p50":11.0}}"#;
        assert_eq!(figure(line).unwrap(), Figure { bytes: 8, mean_us: 12.5, p50_us: 11.0 });
        assert!(figure(r#"{"bytes":8}"#).is_err());
    }
}
