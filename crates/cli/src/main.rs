//! The `millstream` command.
//!
//! What it prints with `--json`, its exit statuses and the `ready` lines of its daemons are a
//! contract, which docs/command-line.md has.

mod address;
mod allreduce;
mod bench;
mod bind;
mod closed;
mod cluster;
mod collective;
mod completions;
mod config;
mod control_proofs;
mod controller;
mod copy;
mod daemon;
mod demo;
mod device;
mod doctor;
mod engine;
mod escape;
mod failure;
mod lab;
mod log;
mod manual;
mod mapped;
mod memory;
mod metadata_server;
mod node;
mod note;
mod output;
mod paths;
mod process;
mod rdma;
mod reach;
mod retry;
mod settings;
mod sim;
mod status_pages;
mod step;
mod switch;
mod top;
mod topology;
mod units;

use std::process::ExitCode;

use crate::settings::SettingsArguments;
use clap::error::ErrorKind;
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};

/// Moves bytes between the memories of many machines, and computes on them on the way.
#[derive(Debug, Parser)]
#[command(name = "millstream", version, max_term_width = 100, subcommand_required = true)]
struct Arguments {
    /// Log to stderr what is tried; twice, in more detail
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
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
    /// Take part in a collective as one host
    Collective(collective::Arguments),
    /// Build the network of a topology file on this machine, with its controller and switches
    Lab(lab::Arguments),
    /// Serve segment descriptors over HTTP
    MetadataServer(metadata_server::Arguments),
    /// Show what nodes and other processes move, live
    Top(top::Arguments),
    /// Show NICs, NUMA nodes, GPUs and their distances
    Topology(topology::Arguments),
    /// Show every setting and where it came from
    Config(config::Arguments),
    /// Say what of this machine stands in the way, and the line that changes it
    Doctor(doctor::Arguments),
    /// Run a scenario in the seeded network simulator
    Sim(sim::Arguments),
    /// Talk RDMA to one peer
    #[command(subcommand)]
    Rdma(rdma::Command),
    /// Print what completes commands and options in a shell
    Completions(completions::Arguments),
    /// Write the manual pages into a folder
    #[command(hide = true)]
    Manual(manual::Arguments),
}

fn main() -> ExitCode {
    let outcome = match parse() {
        Ok(arguments) => {
            // What is wrong with settings is told by the command.
            let settings = arguments.command.settings().and_then(|it| it.load().ok());
            let level = settings.and_then(|settings| settings.log_level());
            log::start(arguments.verbose, level, arguments.command.is_daemon());
            let outcome = run(&arguments.command);
            log::finish();
            outcome
        }
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                output::help(&error).map_err(Into::into)
            }
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                // To stderr. There is nowhere else to say that it does not take it.
                let _ = error.print();
                return ExitCode::from(failure::USAGE);
            }
            _ => {
                if failure::stdout_is_for_bytes(std::env::args_os().skip(1)) {
                    output::give_stdout_away();
                }
                let sentence = failure::clap_sentence(&error);
                Err(failure::usage(format!("{sentence}; --help lists what there is")))
            }
        },
    };
    // Another thread cleans up then, which the end of this one would cut short.
    process::step_back_when_told_to_stop();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error),
    }
}

fn parse() -> Result<Arguments, clap::Error> {
    let mut command = command();
    let mut matches = command.try_get_matches_from_mut(std::env::args_os())?;
    Arguments::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// The whole command line.
fn command() -> clap::Command {
    fn with_negative_values(command: clap::Command) -> clap::Command {
        // So that `--offset -1` is a value that is refused, and no option that there is not.
        let command = command.mut_args(|argument| {
            let has_values = argument.get_action().takes_values() && !argument.is_positional();
            argument.allow_negative_numbers(has_values)
        });
        command.mut_subcommands(with_negative_values)
    }
    with_negative_values(Arguments::command()).after_help(failure::exit_statuses())
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
        Command::Collective(arguments) => collective::run(arguments),
        Command::Lab(arguments) => lab::run(arguments),
        Command::MetadataServer(arguments) => metadata_server::run(arguments),
        Command::Top(arguments) => top::run(arguments),
        Command::Topology(arguments) => topology::run(arguments),
        Command::Config(arguments) => config::run(arguments),
        Command::Doctor(arguments) => doctor::run(arguments),
        Command::Sim(arguments) => sim::run(arguments),
        Command::Rdma(command) => rdma::run(command),
        Command::Completions(arguments) => completions::run(arguments),
        Command::Manual(arguments) => manual::run(arguments),
    }
}

impl Command {
    /// What settings it has, if it has any.
    const fn settings(&self) -> Option<&SettingsArguments> {
        match self {
            Self::Node(arguments) => Some(&arguments.settings),
            Self::Put(arguments) => Some(arguments.settings()),
            Self::Get(arguments) => Some(arguments.settings()),
            Self::Bench(command) => command.settings(),
            Self::Config(arguments) => Some(&arguments.settings),
            _ => None,
        }
    }

    /// Whether it serves until it is told to stop.
    const fn is_daemon(&self) -> bool {
        matches!(
            self,
            Self::Node(_) | Self::Controller(_) | Self::Switch(_) | Self::MetadataServer(_)
        )
    }
}
