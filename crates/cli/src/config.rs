//! `config`: every setting, its value and where that came from.

use std::path::Path;

use clap::Args;
use millstream_transfer::{Origin, SettingState};
use serde::Serialize;

use crate::output::{self, escaped, line};
use crate::settings::SettingsArguments;

/// Arguments of `config`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) settings: SettingsArguments,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Print the reference of all settings in Markdown
    #[arg(long, hide = true, conflicts_with = "json")]
    reference: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    settings: Vec<Row<'a>>,
    /// Variables that change nothing, and why.
    notes: &'a [String],
}

#[derive(Serialize)]
struct Row<'a> {
    name: &'static str,
    /// Sizes in bytes, times in microseconds, as `unit` says.
    value: serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: Option<&'static str>,
    /// As it can be written in a file.
    text: String,
    origin: Place<'a>,
    /// The environment variables that have it.
    variables: &'static [&'static str],
}

/// Where a value came from.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Place<'a> {
    Default,
    File {
        #[serde(serialize_with = "output::path")]
        path: &'a Path,
        line: usize,
    },
    Variable {
        name: &'static str,
    },
    Argument,
}

/// Runs `config`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    if arguments.reference {
        return Ok(output::print(&millstream_transfer::reference())?);
    }
    let settings = arguments.settings.load()?;
    if arguments.json {
        let settings_rows = settings.states().map(Row::from).collect();
        return output::json(&Report { settings: settings_rows, notes: settings.notes() });
    }
    let states: Vec<SettingState<'_>> = settings.states().collect();
    let width = |text: fn(&SettingState<'_>) -> usize| states.iter().map(text).max().unwrap_or(0);
    let names = width(|state| state.key.len());
    let values = width(|state| value(state).chars().count());
    for state in &states {
        let (key, value, origin) = (state.key, value(state), origin(state.origin));
        line(&format!("{key:names$}  {value:values$}  {origin}"))?;
    }
    Ok(())
}

fn value(state: &SettingState<'_>) -> String {
    if state.value.is_empty() { "-".to_owned() } else { escaped(&state.value) }
}

fn origin(origin: &Origin) -> String {
    match origin {
        Origin::File { path, line } => format!("{}:{line}", escaped(path.as_os_str())),
        other => other.to_string(),
    }
}

impl<'a> From<SettingState<'a>> for Row<'a> {
    fn from(state: SettingState<'a>) -> Self {
        Self {
            name: state.key,
            value: state.json,
            unit: state.json_unit,
            text: state.value,
            origin: match state.origin {
                Origin::Default => Place::Default,
                Origin::File { path, line } => Place::File { path, line: *line },
                Origin::Variable(name) => Place::Variable { name },
                Origin::Argument => Place::Argument,
            },
            variables: state.variables,
        }
    }
}
