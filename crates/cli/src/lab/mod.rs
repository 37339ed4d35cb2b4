//! `lab`: the network of a topology file as namespaces and links on this machine, with its controller and its switches.
//!
//! A lab belongs to a process in the background. The other commands find it by a record in its folder, which is gone when
//! the lab is.

mod hold;
mod network;
mod status;

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use millstream_lab::{LabError, Labs};

use crate::failure::sentence;
use crate::note::note;
use network::Network;
use status::Status;

/// Arguments of `lab`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make the network of a topology file: a network namespace for each host and switch, links of their rates, the
    /// controller and the switches; it stays until it is told to go
    Up(UpArguments),
    /// Show machines, links, and what runs
    Status(StatusArguments),
    /// Run a program at a machine
    Exec(ExecArguments),
    /// End a lab and all that runs in it
    Down(WhichLab),
}

/// Which of several labs.
#[derive(Args, Debug)]
struct WhichLab {
    /// Which of several labs
    #[arg(long, value_name = "NAME", default_value = "lab")]
    name: String,
    /// Where labs are noted [default: /run for root, else $XDG_RUNTIME_DIR]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
}

#[derive(Args, Debug)]
struct UpArguments {
    #[command(flatten)]
    which: WhichLab,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Be the process that holds it
    #[arg(long, hide = true, conflicts_with = "json")]
    hold: bool,
    /// The network, as the controller reads it
    #[arg(value_name = "FILE.yaml")]
    file: PathBuf,
}

#[derive(Args, Debug)]
struct StatusArguments {
    #[command(flatten)]
    which: WhichLab,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct ExecArguments {
    #[command(flatten)]
    which: WhichLab,
    /// The machine: host0, switch0, controller
    #[arg(value_name = "HOST")]
    host: String,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs `lab`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    match &arguments.command {
        Command::Up(arguments) if arguments.hold => {
            let UpArguments { which, file, .. } = arguments;
            match hold::hold(&which.labs()?, &which.name, file)? {}
        }
        Command::Up(arguments) => up(arguments),
        Command::Status(StatusArguments { which, json }) => which.status(*json),
        Command::Exec(arguments) => exec(arguments),
        Command::Down(which) => which.end(),
    }
}

impl WhichLab {
    fn directory(&self) -> anyhow::Result<PathBuf> {
        if let Some(directory) = &self.directory {
            return Ok(directory.clone());
        }
        let user = std::fs::metadata("/proc/self").context("cannot read /proc/self")?.uid();
        let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
        match own {
            _ if user == 0 => Ok(PathBuf::from("/run")),
            Some(own) => Ok(PathBuf::from(own)),
            None => bail!("XDG_RUNTIME_DIR is not set: say by --directory where labs are noted"),
        }
    }

    fn labs(&self) -> anyhow::Result<Labs> {
        Ok(Labs::new(self.directory()?))
    }

    fn status(&self, json: bool) -> anyhow::Result<()> {
        Status::new(&self.name, &self.labs()?.read(&self.name)?)?.print(json)
    }

    fn end(&self) -> anyhow::Result<()> {
        Ok(self.labs()?.end(&self.name)?)
    }
}

/// Starts a process that holds the lab, and waits until all of it is ready.
fn up(arguments: &UpArguments) -> anyhow::Result<()> {
    let UpArguments { which, json, file, .. } = arguments;
    // What is wrong with the file is told here.
    Network::read(file)?.warnings.iter().for_each(|warning| note(warning));
    let mut holder = holder(which, file)?;
    let mut holder = holder.spawn().context("cannot start a process that holds the lab")?;
    let mut line = String::new();
    let stdout = holder.stdout.take().context("the lab's holder has no stdout")?;
    let stderr = holder.stderr.take().context("the lab's holder has no stderr")?;
    // It says what its daemons say, and must not wait for who does not listen.
    let complaint = std::thread::spawn(move || last_complaint(stderr));
    BufReader::new(stdout).read_line(&mut line).context("cannot hear from the lab's holder")?;
    if !line.starts_with("ready ") {
        let last = complaint.join().unwrap_or_default();
        holder.wait().context("cannot wait for the lab's holder")?;
        bail!("{}", last.unwrap_or_else(|| "the process that holds the lab has ended".to_owned()));
    }
    which.status(*json).inspect_err(|_| {
        // Who is told that it failed does not look for a lab that is up.
        let ended = which.labs().map(|labs| labs.end(&which.name));
        // Somebody else may have ended it.
        let error = match ended {
            Ok(Ok(()) | Err(LabError::NoLab { .. })) => return,
            Ok(Err(error)) => error.into(),
            Err(error) => error,
        };
        note(&format!("lab {} stays: {}", which.name, sentence(&error)));
    })
}

/// Reads to the end what a process says; its last complaint.
fn last_complaint(stderr: impl Read) -> Option<String> {
    let mut last = None;
    for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
        if let Some(complaint) = line.strip_prefix(b"millstream: ") {
            last = Some(String::from_utf8_lossy(complaint).into_owned());
        }
    }
    last
}

fn holder(which: &WhichLab, file: &Path) -> anyhow::Result<std::process::Command> {
    let program = std::env::current_exe().context("cannot find our own executable")?;
    let mut holder = std::process::Command::new(program);
    holder.args(["lab", "up", "--hold", "--name", &which.name, "--directory"]);
    holder.arg(which.directory()?).arg("--").arg(file);
    // Not ended with this command by a terminal.
    holder.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(holder)
}

/// Becomes the program, at a machine.
fn exec(arguments: &ExecArguments) -> anyhow::Result<()> {
    let ExecArguments { which, host, command } = arguments;
    let record = which.labs()?.read(&which.name)?;
    let (program, words) = command.split_first().context("no command")?;
    let mut command = record.lab.command(host, program)?;
    let error = command.args(words).stdin(Stdio::inherit()).exec();
    Err(error).context("cannot start nsenter (util-linux)")
}
