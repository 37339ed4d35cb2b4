//! What all clients over HTTP have in common: limits, deadlines, and host names looked up by the threads
//! that the whole process has for it.

use std::time::{Duration, Instant};

use ureq::Agent;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

use super::connection::Dialect;
use super::securing::Stalled;
use super::tls::{self, Sessions};
use super::{KeyValueConfig, KeyValueErrorKind, TlsFiles, last_words};
use crate::client::deadline;
use crate::resolver;

/// Connections that are kept while nobody uses them.
const MAX_IDLE: usize = 4;
/// For so long: less than the interval at which entries are refreshed, after which servers may close.
const IDLE_LIMIT: Duration = Duration::from_secs(5);
/// As many addresses of a name as the HTTP client tries.
const MAX_ADDRESSES: usize = 16;

/// A client that asks whom it is told to: it follows no redirect and no proxy. With these files where it speaks TLS; what
/// is wrong with them is the error.
pub(super) fn agent(config: &KeyValueConfig, files: Option<&TlsFiles>) -> Result<Agent, String> {
    let builder = Agent::config_builder()
        .user_agent(concat!("millstream/", env!("CARGO_PKG_VERSION")))
        .http_status_as_error(false)
        .max_redirects(0)
        .proxy(None)
        .max_idle_connections(MAX_IDLE)
        .max_idle_age(IDLE_LIMIT)
        .max_idle_connections_per_host(MAX_IDLE)
        .timeout_connect(Some(config.connect_timeout))
        .timeout_global(Some(config.call_timeout));
    let sessions = files.map(Sessions::new).transpose()?;
    Ok(Agent::with_parts(builder.build(), last_words::connector(sessions), Names))
}

/// Why there is no whole reply of a server, asked over TLS or without.
pub(super) fn failure(error: ureq::Error, dialect: &Dialect, is_secure: bool) -> KeyValueErrorKind {
    let Dialect { what, plain, secure } = *dialect;
    if let Some(fault) = tls::fault(&error, plain) {
        return KeyValueErrorKind::Untrusted(fault);
    }
    match error {
        error if Stalled::is(&error) => KeyValueErrorKind::Unreachable(format!(
            "{Stalled}: has it stopped, or is it {what} without TLS ({plain})?"
        )),
        ureq::Error::Timeout(ureq::Timeout::Resolve) => KeyValueErrorKind::Unreachable(
            "its host name does not resolve in time: is the name server up?".to_owned(),
        ),
        ureq::Error::Timeout(ureq::Timeout::Connect) => KeyValueErrorKind::Unreachable(
            "no answer: is its machine up, and does a firewall let the connection through?"
                .to_owned(),
        ),
        ureq::Error::Timeout(_) => KeyValueErrorKind::Unreachable(format!(
            "it gave no whole reply in time: has it stopped, or is it something else than {what}?"
        )),
        ureq::Error::HostNotFound => KeyValueErrorKind::Unreachable(
            "its host name does not resolve: is it spelled right?".to_owned(),
        ),
        ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            KeyValueErrorKind::Unreachable(
                "connection refused: no process listens there".to_owned(),
            )
        }
        ureq::Error::Io(error) => {
            // So do those who do not understand what they are asked.
            let hint = match (is_secure, secure) {
                (true, _) => format!(", or does it speak no TLS ({plain})"),
                (false, Some(secure)) => format!(", or does it speak TLS ({secure})"),
                (false, None) => String::new(),
            };
            KeyValueErrorKind::Unreachable(format!(
                "the connection failed ({error}): has it ended{hint}?"
            ))
        }
        ureq::Error::ConnectionFailed => {
            KeyValueErrorKind::Unreachable("no connection to any of its addresses".to_owned())
        }
        ureq::Error::BodyExceedsLimit(limit) => {
            KeyValueErrorKind::Meaning(format!("it takes more than {limit} bytes: is it {what}?"))
        }
        error => KeyValueErrorKind::Meaning(format!("{error}: is it {what}?")),
    }
}

/// Asks the process's resolver, since the HTTP client's own starts a thread for each look-up.
#[derive(Debug)]
pub(super) struct Names;

impl Resolver for Names {
    fn resolve(
        &self,
        uri: &Uri,
        _config: &ureq::config::Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let host = uri.host().ok_or(ureq::Error::HostNotFound)?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        let port = uri.port_u16().unwrap_or(default);
        let until = deadline(*timeout.after);
        let addresses =
            resolver::Resolver::system().resolve_until(host, until).map_err(
                |_| match Instant::now() {
                    now if now >= until => ureq::Error::Timeout(ureq::Timeout::Resolve),
                    _ => ureq::Error::HostNotFound,
                },
            )?;
        let mut resolved = self.empty();
        for address in addresses.iter().take(MAX_ADDRESSES) {
            let mut address = *address;
            address.set_port(port);
            resolved.push(address);
        }
        match resolved.is_empty() {
            true => Err(ureq::Error::HostNotFound),
            false => Ok(resolved),
        }
    }
}
