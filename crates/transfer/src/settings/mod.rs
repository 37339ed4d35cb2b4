//! The settings of engines, from four places: defaults, a TOML file, the environment (`MC_` variables,
//! those of the original transfer engine) and arguments. The later of these comes first.
//!
//! There is one table of them (`table`), which says for each where it is read from, what it can be
//! and where in [`Config`] and [`RdmaConfig`] it belongs. Programs change these as they like.

mod environment;
mod error;
mod file;
mod kind;
mod reference;
mod table;
#[cfg(test)]
mod tests;
mod values;

use std::env;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use millstream_metadata::{PeerTls, Secret, TlsFiles, Token};

use self::environment::REDIS_PASSWORD;
pub(crate) use self::environment::nearest;
pub(crate) use self::file::read_file;
pub(crate) use self::kind::{size_of_text, time_of_text};
use self::table::{Setting, settings};
use self::values::Values;
use crate::rdma::MAX_COMPLETIONS;
use crate::{Config, NvmeofConfig, Policy, PolicyFile, RdmaConfig, RelayConfig, TcpConfig};

pub use self::error::SettingsError;
pub use self::kind::listen_address;
pub use self::reference::reference;

/// The variable that names the file.
pub const FILE_VARIABLE: &str = "MILLSTREAM_CONFIG";

/// The variable that can have the token itself.
const TOKEN_VARIABLE: &str = "MILLSTREAM_TOKEN";

/// Where settings are taken from.
#[derive(Clone, Default)]
pub struct Sources {
    /// A TOML file.
    pub file: Option<PathBuf>,
    /// Variables of the environment. Those that no setting has are left alone.
    pub variables: Vec<(String, String)>,
    /// Settings and values, `NAME=VALUE`. They come before the others.
    pub arguments: Vec<String>,
}

/// Values of variables may be secrets.
impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, arguments, .. } = self;
        f.debug_struct("Sources")
            .field("file", file)
            .field("arguments", arguments)
            .finish_non_exhaustive()
    }
}

impl Sources {
    /// What this process was started with: its environment, and the file that `MILLSTREAM_CONFIG`
    /// names.
    pub fn of_process() -> Self {
        let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        Self {
            file: env::var_os(FILE_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from),
            variables: env::vars_os().map(|(name, value)| (text(name), text(value))).collect(),
            arguments: Vec::new(),
        }
    }
}

/// Where a value came from.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Origin {
    /// Nobody said otherwise.
    Default,
    /// A file.
    File {
        /// Which.
        path: Arc<Path>,
        /// Where in it, from 1.
        line: usize,
    },
    /// A variable of the environment.
    Variable(&'static str),
    /// An argument.
    Argument,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Variable(name) => f.write_str(name),
            Self::Argument => f.write_str("argument"),
        }
    }
}

/// A setting as it is.
#[derive(Clone, Debug)]
pub struct SettingState<'a> {
    /// Its name.
    pub key: &'static str,
    /// The environment variables that have it.
    pub variables: &'static [&'static str],
    /// Its value, as it can be written in a file, but for a string's quotation marks.
    pub value: String,
    /// Its value as JSON: sizes in bytes, times in microseconds, none as null.
    pub json: serde_json::Value,
    /// `bytes` or `us`, if it is one of these.
    pub json_unit: Option<&'static str>,
    /// Where it came from.
    pub origin: &'a Origin,
}

/// All settings, each with a value.
#[derive(Clone, Debug)]
pub struct Settings {
    values: Values,
    /// In the order of the table.
    origins: Vec<Origin>,
    notes: Vec<String>,
}

impl Settings {
    /// Takes settings from these sources.
    pub fn load(sources: &Sources) -> Result<Self, SettingsError> {
        let origins = settings().map(|_| Origin::Default).collect();
        let mut loaded = Self { values: Values::default(), origins, notes: Vec::new() };
        if let Some(path) = &sources.file {
            loaded.take_file(path)?;
        }
        loaded.take_variables(&sources.variables)?;
        for argument in &sources.arguments {
            let (name, value) = argument
                .split_once('=')
                .ok_or_else(|| SettingsError::Argument(argument.clone()))?;
            loaded.take("", name.trim(), value, &Origin::Argument)?;
        }
        loaded.check()?;
        loaded.read_token(&sources.variables)?;
        loaded.read_redis_password(&sources.variables)?;
        loaded.read_certificate()?;
        loaded.read_policy_file()?;
        Ok(loaded)
    }

    /// What an engine is made with that listens at this address.
    pub fn engine(&self, listen: IpAddr) -> Config {
        let Values { engine, first_port, last_port, .. } = &self.values;
        let ports = (*first_port != 0).then_some(*first_port..=*last_port);
        Config { ports, listen: (listen, 0).into(), ..engine.clone() }
    }

    /// What the transport `rdma` is installed with that has devices on these addresses.
    pub fn rdma(&self, addresses: &[IpAddr]) -> RdmaConfig {
        RdmaConfig { addresses: addresses.to_vec(), ..self.values.rdma.clone() }
    }

    /// What the transport `tcp` is installed with.
    pub fn tcp(&self) -> TcpConfig {
        let Values { tcp, first_data_port, last_data_port, is_relay, relay, .. } = &self.values;
        let ports = (*first_data_port != 0).then_some(*first_data_port..=*last_data_port);
        TcpConfig { ports, relay: is_relay.then(|| relay.clone()), ..tcp.clone() }
    }

    /// What the transport `nvmeof` is installed with.
    pub fn nvmeof(&self) -> NvmeofConfig {
        let Values { nvmeof, first_file_port, last_file_port, .. } = &self.values;
        let ports = (*first_file_port != 0).then_some(*first_file_port..=*last_file_port);
        NvmeofConfig { ports, ..nvmeof.clone() }
    }

    /// What the transport `relay` is installed with, if relays are named.
    pub fn relay(&self) -> Option<RelayConfig> {
        let Values { tcp, relays, .. } = &self.values;
        let names = relays.iter().map(ToString::to_string).collect();
        let connect_timeout = tcp.connect_timeout;
        let config = RelayConfig { relays: names, connect_timeout, ..RelayConfig::new(&[]) };
        (!relays.is_empty()).then_some(config)
    }

    /// The port of segments' names that have none, if they may have none.
    pub fn default_port(&self) -> Option<u16> {
        self.values.engine.default_port
    }

    /// What is to be logged, if anything is said of it: `off`, `error`, `warn`, `info`, `debug` or
    /// `trace`.
    pub fn log_level(&self) -> Option<&'static str> {
        let Values { log_level, trace, .. } = &self.values;
        if *trace { Some("trace") } else { Some(*log_level).filter(|level| *level != "default") }
    }

    /// Where a node is to serve its metrics, if anywhere.
    pub fn metrics_listen(&self) -> Option<SocketAddr> {
        self.values.metrics_listen
    }

    /// What the user should know of the sources: variables that change nothing, and why.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// All settings as they are, in the order of the table.
    pub fn states(&self) -> impl Iterator<Item = SettingState<'_>> {
        settings().zip(&self.origins).map(|(setting, origin)| SettingState {
            key: setting.key,
            variables: setting.variables,
            value: setting.kind.show(&self.values),
            json: setting.kind.json(&self.values),
            json_unit: setting.kind.json_unit(),
            origin,
        })
    }

    fn take_file(&mut self, path: &Path) -> Result<(), SettingsError> {
        let text = file::read(path)?;
        let path: Arc<Path> = path.into();
        for entry in file::entries(&path, &text)? {
            let origin = Origin::File { path: Arc::clone(&path), line: entry.line };
            self.take(&format!("{origin}: "), &entry.key, &entry.value, &origin)?;
        }
        Ok(())
    }

    fn take_variables(&mut self, variables: &[(String, String)]) -> Result<(), SettingsError> {
        // A variable that is empty is as good as none.
        let given = || variables.iter().filter(|(_, value)| !value.is_empty());
        for (index, setting) in settings().enumerate() {
            let mut taken: Option<&str> = None;
            for variable in setting.variables {
                let Some((_, value)) = given().find(|(name, _)| name == variable) else { continue };
                if let Some(why) = environment::of_original(setting.key, value) {
                    self.notes.push(format!("{variable} is ignored: {why}"));
                    continue;
                }
                if let Some(taken) = taken {
                    self.notes.push(format!("{variable} is ignored: {taken} is set, too"));
                    continue;
                }
                taken = Some(variable);
                self.set(index, setting, value, Origin::Variable(variable)).ok_or_else(|| {
                    let range = setting.kind.range();
                    let (name, value) = ((*variable).to_owned(), excerpt(value));
                    let (place, key) = (String::new(), setting.key);
                    SettingsError::Value { place, name, value, key, range }
                })?;
            }
        }
        let ours = |name: &str| settings().any(|setting| setting.variables.contains(&name));
        let mut others: Vec<&str> = given().map(|(name, _)| name.as_str()).collect();
        others.retain(|name| environment::concerns_us(name) && !ours(name));
        others.sort_unstable();
        self.notes.extend(others.into_iter().map(environment::note));
        Ok(())
    }

    /// Takes a value that was given with the setting's own name.
    fn take(
        &mut self,
        place: &str,
        key: &str,
        value: &str,
        origin: &Origin,
    ) -> Result<(), SettingsError> {
        let place = || place.to_owned();
        let found = settings().enumerate().find(|(_, setting)| setting.key == key);
        let (index, setting) = found.ok_or_else(|| SettingsError::Unknown {
            place: place(),
            key: excerpt(key),
            nearest: nearest(key, settings().map(|setting| setting.key)),
        })?;
        self.set(index, setting, value, origin.clone()).ok_or_else(|| SettingsError::Value {
            place: place(),
            name: key.to_owned(),
            value: excerpt(value),
            key: setting.key,
            range: setting.kind.range(),
        })
    }

    /// `None`, when the setting cannot have this value.
    fn set(&mut self, index: usize, setting: &Setting, value: &str, origin: Origin) -> Option<()> {
        setting.kind.set(&mut self.values, value)?;
        self.origins[index] = origin;
        Some(())
    }

    /// Reads the token. It has no setting of its own, which others could see.
    fn read_token(&mut self, variables: &[(String, String)]) -> Result<(), SettingsError> {
        let given = variables.iter().find(|(name, _)| name == TOKEN_VARIABLE);
        let given = given.map(|(_, text)| text);
        // An empty one is no token, and not none: who meant to have one is told.
        if given.is_some_and(|text| text.contains(char::REPLACEMENT_CHARACTER)) {
            let what = format!("{TOKEN_VARIABLE} is no text: a token of any bytes is for a file");
            return Err(SettingsError::Together(what));
        }
        let token = match (given, &self.values.token_file) {
            (Some(_), Some(_)) => {
                let file = self.name_all(&["security.token_file"]);
                let what = format!("{TOKEN_VARIABLE} and {file}: there is one token");
                return Err(SettingsError::Together(what));
            }
            (Some(text), None) => Token::new(text.as_bytes())?,
            (None, Some(path)) => {
                if is_readable_by_all(path) {
                    self.notes.push(format!("{}: all users can read the token", path.display()));
                }
                Token::from_file(path)?
            }
            (None, None) => return Ok(()),
        };
        self.values.engine.client.token = Some(token);
        Ok(())
    }

    /// Reads the password of a Redis metadata server. It has no setting of its own either.
    fn read_redis_password(&mut self, variables: &[(String, String)]) -> Result<(), SettingsError> {
        let given =
            variables.iter().find(|(name, text)| name == REDIS_PASSWORD && !text.is_empty());
        let Some((_, text)) = given else { return Ok(()) };
        if text.contains(char::REPLACEMENT_CHARACTER) {
            let what = format!("{REDIS_PASSWORD} is no text (UTF-8)");
            return Err(SettingsError::Together(what));
        }
        self.values.engine.redis.password = Some(Secret::new(text.clone()));
        Ok(())
    }

    /// Reads what TLS with peers is made with.
    fn read_certificate(&mut self) -> Result<(), SettingsError> {
        let files = &self.values.peer_tls;
        if *files == TlsFiles::default() {
            return Ok(());
        }
        let tls = PeerTls::from_files(files).map_err(|what| {
            let keys = ["security.certificate_file", "security.key_file", "security.ca_file"];
            SettingsError::Together(format!("{}: {what}", self.name_all(&keys)))
        })?;
        if let Some(key) = files.key.as_deref().filter(|path| is_readable_by_all(path)) {
            self.notes.push(format!("{}: all users can read the private key", key.display()));
        }
        self.values.engine.client.tls = Some(tls);
        Ok(())
    }

    /// Reads the classes of requests.
    fn read_policy_file(&mut self) -> Result<(), SettingsError> {
        let Some(path) = &self.values.policy_file else { return Ok(()) };
        self.values.engine.policy_file = PolicyFile::load(path)?;
        if self.values.engine.policy == Policy::Classic {
            let what =
                "priorities of the policy file have an effect with transfer.policy = tent only";
            self.notes.push(format!("{}: {what}", path.display()));
        }
        Ok(())
    }

    /// What holds for several settings together.
    fn check(&self) -> Result<(), SettingsError> {
        let Values { first_port, last_port, first_data_port, last_data_port, rdma, .. } =
            &self.values;
        let Values { first_file_port, last_file_port, .. } = &self.values;
        for (first, last, names) in [
            (first_port, last_port, ["handshake.first_port", "handshake.last_port"]),
            (first_data_port, last_data_port, ["tcp.first_port", "tcp.last_port"]),
            (first_file_port, last_file_port, ["nvmeof.first_port", "nvmeof.last_port"]),
        ] {
            if first > last || (*first == 0) != (*last == 0) {
                let ports = self.name_all(&names);
                let what = "the first must not be above the last, and neither is 0 alone";
                return Err(SettingsError::Together(format!("{ports}: {what}")));
            }
        }
        let completions =
            rdma.max_endpoints * rdma.queue_pairs_per_endpoint * rdma.send_queue_depth;
        if completions > MAX_COMPLETIONS {
            let names =
                ["rdma.max_endpoints", "rdma.queue_pairs_per_endpoint", "rdma.send_queue_depth"];
            let what = format!("multiplied, they are more than {MAX_COMPLETIONS}");
            return Err(SettingsError::Together(format!("{}: {what}", self.name_all(&names))));
        }
        Ok(())
    }

    /// Settings with their values and where these came from.
    fn name_all(&self, keys: &[&str]) -> String {
        let named = self.states().filter(|state| keys.contains(&state.key));
        let named = named.map(|it| format!("{} = {} ({})", it.key, it.value, it.origin));
        named.collect::<Vec<_>>().join(", ")
    }
}

/// Whether everybody on this host may read a file.
fn is_readable_by_all(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.permissions().mode() & 0o004 != 0)
}

/// Not more of a text than fits a line.
fn excerpt(text: &str) -> String {
    let mut excerpt: String = text.chars().take(80).collect();
    if excerpt.len() < text.len() {
        excerpt.push_str("...");
    }
    excerpt
}
