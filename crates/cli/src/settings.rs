//! Settings of transfer engines as commands take them: a file, the environment, arguments.

use std::path::PathBuf;
use std::sync::OnceLock;

use clap::Args;
use millstream_transfer::{Policy, Settings, Sources};

use crate::failure::usage;
use crate::note;

/// Where settings come from besides the environment.
#[derive(Args, Clone, Debug)]
pub(crate) struct SettingsArguments {
    /// Read settings from this TOML file [default: the one that MILLSTREAM_CONFIG names]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Give a setting this value, whatever files and the environment say; `millstream config` lists
    /// all
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// Who chooses the pair of NICs of each slice of rdma: classic, those near to the memory by turns,
    /// or tent, where it is expected to be finished first [default: what transfer.policy is]
    #[arg(long, value_name = "POLICY", value_parser = policy)]
    policy: Option<Policy>,
    #[arg(skip)]
    loaded: OnceLock<Box<Settings>>,
}

impl SettingsArguments {
    /// The settings, which are taken once. What there is to note of them is said then.
    pub(crate) fn load(&self) -> anyhow::Result<&Settings> {
        if let Some(settings) = self.loaded.get() {
            return Ok(settings);
        }
        let mut sources = Sources::of_process();
        sources.file = self.config.clone().or(sources.file);
        sources.arguments.clone_from(&self.set);
        let policy = self.policy.iter().map(|policy| format!("transfer.policy={}", policy.name()));
        sources.arguments.extend(policy);
        let settings = match Settings::load(&sources) {
            Ok(settings) => settings,
            Err(error) => {
                sources.arguments.clear();
                // The command line is wrong when without it all is well.
                return Err(match Settings::load(&sources) {
                    Ok(_) => usage(format!("--set: {error}")),
                    Err(_) => error.into(),
                });
            }
        };
        settings.notes().iter().for_each(|text| note::note(text));
        Ok(self.loaded.get_or_init(|| Box::new(settings)))
    }

    /// The same, with one more setting on the command line.
    pub(crate) fn with(&self, setting: String) -> Self {
        let mut more = Self { loaded: OnceLock::new(), ..self.clone() };
        more.set.push(setting);
        more
    }

    /// The same as arguments of a command that is started.
    pub(crate) fn arguments(&self) -> Vec<std::ffi::OsString> {
        let config = self.config.iter().flat_map(|path| ["--config".into(), path.into()]);
        let set = self.set.iter().flat_map(|text| ["--set".into(), text.into()]);
        let policy = self.policy.iter().flat_map(|text| ["--policy".into(), text.name().into()]);
        config.chain(set).chain(policy).collect()
    }
}

/// Reads a value of `--policy`.
fn policy(name: &str) -> Result<Policy, String> {
    let policies = [Policy::Classic, Policy::Tent];
    let found = policies.into_iter().find(|policy| policy.name() == name);
    found.ok_or_else(|| "it is classic or tent".to_owned())
}
