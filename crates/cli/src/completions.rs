//! `completions`: what completes commands and options in a shell.

use clap::{Args, Command, ValueEnum};
use clap_complete::generate;
use clap_complete::shells::{Bash, Fish, Zsh};

use crate::output;

/// Arguments of `completions`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shell {
    /// For ~/.local/share/bash-completion/completions/millstream
    Bash,
    /// For _millstream in a folder of $fpath
    Zsh,
    /// For ~/.config/fish/completions/millstream.fish
    Fish,
}

/// Runs `completions`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut command = without_hidden(&crate::command());
    let mut text = Vec::new();
    match arguments.shell {
        Shell::Bash => generate(Bash, &mut command, "millstream", &mut text),
        Shell::Zsh => generate(Zsh, &mut command, "millstream", &mut text),
        Shell::Fish => generate(Fish, &mut command, "millstream", &mut text),
    }
    Ok(output::print(&String::from_utf8(text)?)?)
}

/// The same command as far as completions go, but for the subcommands that help does not show.
fn without_hidden(command: &Command) -> Command {
    Command::new("millstream")
        .version(env!("CARGO_PKG_VERSION"))
        .args(command.get_arguments().cloned())
        .subcommands(command.get_subcommands().filter(|it| !it.is_hide_set()).cloned())
}
