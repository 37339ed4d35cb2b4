//! Asks a process for its status.

use std::time::{Duration, Instant};

use ureq::Agent;
use ureq::http::Uri;
use ureq::http::uri::Authority;

use crate::output::escaped;
use crate::status_pages::Status;

/// How long a process may take to answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The longest answer: some ten thousand rails.
const MOST_BYTES: u64 = 16 << 20;

/// A process that serves its status.
#[derive(Clone, Debug)]
pub(super) struct Target {
    name: String,
    uri: String,
    agent: Agent,
}

/// What a process has said.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) at: Instant,
    pub(super) status: Status,
}

impl Target {
    /// `HOST:PORT`, or a port of this machine.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let bad = || format!("{}: it is HOST:PORT, or a port of 127.0.0.1", escaped(text));
        let name = match text.parse::<u16>() {
            Ok(port) => format!("127.0.0.1:{port}"),
            Err(_) => text.to_owned(),
        };
        let uri = format!("http://{name}/status");
        let parsed: Uri = uri.parse().map_err(|_| bad())?;
        let plain = |authority: &&Authority| authority.as_str() == name && !name.contains('@');
        let authority = parsed.authority().filter(plain).ok_or_else(bad)?;
        authority.port_u16().filter(|_| !authority.host().is_empty()).ok_or_else(bad)?;
        let agent = Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .max_redirects(0)
            .proxy(None)
            .build()
            .into();
        Ok(Self { name, uri, agent })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Its status now; why it is not known, if so.
    pub(super) fn ask(&self) -> Result<Answer, String> {
        let failed = |what: &str| format!("{}: {what}", self.name);
        let mut response =
            self.agent.get(&self.uri).call().map_err(|error| failed(&error.to_string()))?;
        let body = response.body_mut().with_config().limit(MOST_BYTES).read_to_string();
        let body = body.map_err(|error| failed(&error.to_string()))?;
        let at = Instant::now();
        let status = serde_json::from_str(&body)
            .map_err(|error| failed(&format!("its answer is no status: {error}")))?;
        Ok(Answer { at, status })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_named_by_host_and_port() {
        for (text, name) in [
            ("9464", "127.0.0.1:9464"),
            ("a.example:1", "a.example:1"),
            ("[::1]:9464", "[::1]:9464"),
        ] {
            assert_eq!(Target::parse(text).unwrap().name(), name);
        }
        for text in [
            "",
            "a",
            ":1",
            "a:b",
            "a:65536",
            "70000",
            "a:1/x",
            "u@a:1",
            "http://a:1",
            "a b:1",
            "::1",
        ] {
            assert!(Target::parse(text).is_err(), "{text}");
        }
    }
}
