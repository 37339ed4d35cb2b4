//! One side of a conformance run: our stack and another, message by message.
//!
//! `cargo xtask interop` runs this program twice: in a guest on the Linux kernel's soft-RoCE
//! (`join`, by libibverbs), and outside on our own (`lead`). It prints a line for each case, of
//! words separated by tabs: the leader's role, the case, how it ended, milliseconds, the reason.
//!
//! `--rows` names a file with the cases to run, in the words of `list`: a role, a tab, a name.
//!
//! ```text
//! interop_peer list DRIVER
//! interop_peer lead LISTEN_ADDRESS [--driver DRIVER] [--relay SOCKET] [--rows FILE]
//! interop_peer join LEADER_ADDRESS [--device NAME]
//! ```

mod peer;

use std::env;
use std::fs;
use std::io::Write;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use millstream_verbs::{Device, Driver, IbverbsConfig, IcrcCheck, SoftConfig};

use peer::Outcome;

/// Of the control connection.
const PORT: u16 = 18516;
/// A leader that was just started may not listen yet.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    match run(&env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("interop_peer: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<()> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["list", driver] => {
            let driver: Driver = driver.parse()?;
            for entry in peer::entries().iter().filter(|entry| entry.runs_with(driver, true)) {
                println!("{}\t{}", entry.role, entry.name);
            }
            Ok(())
        }
        ["lead", address, options @ ..] => lead(address.parse()?, options),
        ["join", leader, options @ ..] => join(leader.parse()?, options),
        _ => bail!("usage: interop_peer list DRIVER | lead ADDRESS | join ADDRESS"),
    }
}

fn lead(address: IpAddr, options: &[&str]) -> Result<()> {
    let (mut driver, mut relay, mut rows) = (Driver::Udp, None, None);
    for option in options.chunks(2) {
        match option {
            ["--driver", name] => driver = name.parse()?,
            ["--relay", path] => relay = Some(Path::new(*path)),
            ["--rows", path] => rows = Some(fs::read_to_string(path)?),
            other => bail!("lead has no option {other:?}"),
        }
    }
    let mut config = SoftConfig { driver, ..SoftConfig::new(address) };
    if driver == Driver::Packet {
        // It sees what the ICRC covers.
        config.icrc = IcrcCheck::Exact;
    }
    let device = Device::open_soft(&config)?;
    let listener = TcpListener::bind((address, PORT)).context("cannot listen")?;
    let (stream, _) = listener.accept()?;
    let wanted = |name: &str, role| {
        let row = format!("{role}\t{name}");
        rows.as_ref().is_none_or(|rows| rows.lines().any(|line| line == row))
    };
    peer::lead(&device, stream, relay, wanted, |report| {
        let (word, reason) = match &report.outcome {
            Outcome::Passed => ("passed", ""),
            Outcome::Failed(reason) => ("failed", reason.as_str()),
            Outcome::Skipped(reason) => ("skipped", reason.as_str()),
        };
        let reason = reason.replace(['\t', '\n'], " ");
        let time = report.time.as_millis();
        println!("{}\t{}\t{word}\t{time}\t{reason}", report.role, report.name);
        // Whoever reads it may wait for each line; if nobody does, the run ends all the same.
        let _ = std::io::stdout().flush();
    })
}

fn join(leader: IpAddr, options: &[&str]) -> Result<()> {
    let mut config = IbverbsConfig::default();
    for option in options.chunks(2) {
        match option {
            ["--device", name] => config.name = Some((*name).to_owned()),
            other => bail!("join has no option {other:?}"),
        }
    }
    let device = Device::open_ibverbs(&config)?;
    let start = Instant::now();
    let stream = loop {
        match TcpStream::connect((leader, PORT)) {
            Ok(stream) => break stream,
            Err(error) if start.elapsed() > CONNECT_LIMIT => {
                return Err(error).with_context(|| format!("cannot reach {leader}:{PORT}"));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    peer::follow(&device, stream)
}
