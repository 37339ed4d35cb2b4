//! `manual`: the manual pages of all commands, which packaging/man has. `cargo xtask man` calls it.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::failure::EXIT_STATUSES;
use crate::output::escaped;

/// What is in the environment and in which way it matters.
const ENVIRONMENT: [(&str, &str); 9] = [
    (
        "MILLSTREAM_LOG",
        "What is logged to stderr, where no -v is given: error, warn, info, debug, trace, or \
         levels of parts, such as millstream_transfer=trace. Processes that it starts have it, \
         too.",
    ),
    ("RUST_LOG", "The same, where MILLSTREAM_LOG is not set."),
    ("NO_COLOR", "When it is set and not empty, help has no colours. Nothing else has any."),
    ("TMPDIR", "Where temporary files are kept, instead of /tmp."),
    (
        "MILLSTREAM_CONFIG",
        "A TOML file of settings of node, put, get, bench transfer and config, where --config names \
         no other.",
    ),
    (
        "MC_*",
        "Settings of the same commands, by the names that they have in the original transfer \
         engine. millstream config and docs/reference/configuration.md list them.",
    ),
    ("MC_GID_INDEX", "Entry of the GID table that devices of the system use, in rdma too."),
    ("MC_CUSTOM_TOPO_JSON", "File with the priority matrix that topology shows."),
    (
        "MC_TE_FILTERS",
        "Names of NICs with commas between: those that topology has in the priority matrix, and the setting rdma.devices.",
    ),
];

/// Arguments of `manual`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// The folder
    folder: PathBuf,
}

/// Runs `manual`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    // No page has the subcommand help, of which there is one for each of the others.
    let mut command = crate::command().disable_help_subcommand(true).after_help("");
    command.build();
    write_pages(&command, &arguments.folder)
}

/// Writes the page of a command, and those of its subcommands.
fn write_pages(command: &clap::Command, folder: &Path) -> anyhow::Result<()> {
    let path = folder.join(file_name(command));
    std::fs::write(&path, page(command)?)
        .with_context(|| format!("cannot write {}", escaped(&path)))?;
    visible(command).try_for_each(|subcommand| write_pages(subcommand, folder))
}

fn page(command: &clap::Command) -> anyhow::Result<Vec<u8>> {
    let mut page = Vec::new();
    let man = Man::new(command.clone())
        .title(name(command))
        .source(concat!("millstream ", env!("CARGO_PKG_VERSION")))
        .manual("Millstream");
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if visible(command).next().is_some() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    for (status, meaning) in EXIT_STATUSES {
        roff.control("TP", []).text([bold(status.to_string())]).text([roman(meaning)]);
    }
    roff.control("SH", ["ENVIRONMENT"]);
    for (variable, meaning) in ENVIRONMENT {
        roff.control("TP", []).text([bold(variable)]).text([roman(meaning)]);
    }
    roff.to_writer(&mut page)?;
    if command.get_version().is_some() {
        man.render_version_section(&mut page)?;
    }
    Ok(page)
}

/// `millstream-bench-transfer`.
fn name(command: &clap::Command) -> String {
    command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned()
}

fn file_name(command: &clap::Command) -> String {
    format!("{}.1", name(command))
}

fn visible(command: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documents_have_the_same_variables() {
        let document = include_str!("../../../docs/command-line.md");
        let (_, table) = document.split_once("\n## Environment\n").unwrap();
        for (variable, _) in ENVIRONMENT {
            assert!(table.contains(&format!("`{variable}`")), "{variable}");
        }
    }
}
