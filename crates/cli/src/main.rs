//! The `millstream` command.
//!
//! What it prints with `--json`, its exit statuses (0 done, 1 failed, 2 usage) and the `ready`
//! lines of its daemons are a contract. Logs go to stderr; `MILLSTREAM_LOG` chooses them
//! (`MILLSTREAM_LOG=debug`, `MILLSTREAM_LOG=millstream_transfer=trace`).

mod address;
mod allreduce;
mod bench;
mod bind;
mod cluster;
mod controller;
mod copy;
mod demo;
mod engine;
mod failure;
mod node;
mod note;
mod output;
mod process;
mod rdma;
mod reach;
mod retry;
mod sim;
mod step;
mod switch;
mod topology;
mod units;
mod unready;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Moves bytes between the memories of many machines, and computes on them on the way.
#[derive(Debug, Parser)]
#[command(name = "millstream", version, max_term_width = 100)]
#[command(disable_help_subcommand = true, subcommand_required = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Do the main job end to end on this machine, as real processes
    Demo(demo::Arguments),
    /// Serve a segment of memory until SIGTERM
    Node(node::Arguments),
    /// Copy a file into a segment
    Put(copy::put::Arguments),
    /// Copy a part of a segment into a file
    Get(copy::get::Arguments),
    /// Measure
    #[command(subcommand)]
    Bench(bench::Command),
    /// Run the controller of groups and communicators
    Controller(controller::Arguments),
    /// Run a switch whose memory adds
    Switch(switch::Arguments),
    /// Take part in an AllReduce as one host
    Allreduce(allreduce::Arguments),
    /// Serve segment descriptors over HTTP
    MetadataServer(unready::MetadataServer),
    /// Show NICs, NUMA nodes, GPUs and their distances
    Topology(topology::Arguments),
    /// Show every setting and where it came from
    Config(unready::Config),
    /// Run a scenario in the seeded network simulator
    Sim(sim::Arguments),
    /// Talk RDMA to one peer
    #[command(subcommand)]
    Rdma(rdma::Command),
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error)
            if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) =>
        {
            // To stdout; a closed stdout is not an error.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            return ExitCode::from(2);
        }
        Err(error) => {
            let sentence = failure::clap_sentence(&error);
            eprintln!("millstream: {sentence}; --help lists what there is");
            return ExitCode::from(2);
        }
    };
    start_logging(&arguments.command);
    match run(&arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            process::step_back_when_told_to_stop();
            output::complain(&format!("millstream: {}", failure::sentence(&error)));
            ExitCode::from(failure::exit_status(&error))
        }
    }
}

fn run(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Demo(arguments) => demo::run(arguments),
        Command::Node(arguments) => node::run(arguments),
        Command::Put(arguments) => copy::put::run(arguments),
        Command::Get(arguments) => copy::get::run(arguments),
        Command::Bench(command) => bench::run(command),
        Command::Controller(arguments) => controller::run(arguments),
        Command::Switch(arguments) => switch::run(arguments),
        Command::Allreduce(arguments) => allreduce::run(arguments),
        Command::MetadataServer(arguments) => arguments.run(),
        Command::Topology(arguments) => topology::run(arguments),
        Command::Config(arguments) => arguments.run(),
        Command::Sim(arguments) => sim::run(arguments),
        Command::Rdma(command) => rdma::run(command),
    }
}

/// Logs go to stderr, as `MILLSTREAM_LOG` says. Without it, daemons show warnings, and other
/// commands only what they fail of, which they say themselves.
fn start_logging(command: &Command) {
    let daemon = matches!(command, Command::Node(_) | Command::Controller(_) | Command::Switch(_));
    let default = || EnvFilter::new(if daemon { "warn" } else { "error" });
    let (filter, complaint) = match std::env::var("MILLSTREAM_LOG") {
        Err(_) => (default(), None),
        Ok(text) => match text.parse() {
            Ok(filter) => (filter, None),
            Err(error) => (default(), Some(error)),
        },
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    if let Some(error) = complaint {
        tracing::error!("MILLSTREAM_LOG is not understood, and has no effect: {error}");
    }
}
