//! Requests to the JSON gateway of etcd, to one endpoint after the other until one answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::Agent;

use super::super::agent::{agent, failure};
use super::super::connection::{Dialect, excerpt};
use super::super::{KeyValueConfig, KeyValueErrorKind, TlsFiles};
use super::login::Login;
use super::message::{GatewayError, NOT_FOUND, Token};
use crate::HostPort;
use crate::client::deadline;

/// The longest reply: one value of the longest in base64, and what is around it.
const MAX_REPLY: u64 = 2 << 20;
const DIALECT: Dialect =
    Dialect { what: "an etcd server", plain: "etcd://", secure: Some("etcds://") };

/// The endpoints of an etcd.
pub(super) struct Gateway {
    agent: Agent,
    is_secure: bool,
    login: Option<Login>,
    endpoints: Vec<HostPort>,
    /// The one that answered last.
    preferred: AtomicUsize,
    config: KeyValueConfig,
}

/// Why etcd did not do it.
#[derive(Debug)]
pub(super) enum EtcdError {
    /// There is no such lease (any more).
    NoLease,
    /// It asks for a token, or for another one than it was shown.
    NoToken(KeyValueErrorKind),
    Other(KeyValueErrorKind),
}

impl From<EtcdError> for KeyValueErrorKind {
    fn from(error: EtcdError) -> Self {
        match error {
            EtcdError::NoLease => {
                Self::Unreachable("the lease that it gave is gone again: try again".to_owned())
            }
            EtcdError::NoToken(kind) | EtcdError::Other(kind) => kind,
        }
    }
}

/// What an endpoint did with a request.
enum Answer {
    Reply(Vec<u8>),
    /// No other endpoint would say anything else.
    Refused(EtcdError),
    /// Another endpoint may do it.
    Failed(KeyValueErrorKind),
}

impl Gateway {
    /// With files, it speaks TLS; what is wrong with them is the error.
    pub(super) fn new(
        endpoints: Vec<HostPort>,
        config: KeyValueConfig,
        login: Option<Login>,
        files: Option<&TlsFiles>,
    ) -> Result<Self, String> {
        let agent = agent(&config, files)?;
        let is_secure = files.is_some();
        Ok(Self { agent, is_secure, login, endpoints, preferred: AtomicUsize::new(0), config })
    }

    /// Posts a request, with a token where there is a user. A token ends, so a refused one is asked for anew, once.
    pub(super) fn call<R: DeserializeOwned>(
        &self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<R, EtcdError> {
        let until = deadline(self.config.call_timeout);
        let Some(login) = &self.login else { return self.post(path, request, None, until) };
        let known = login.token();
        let token = known.clone().map_or_else(|| self.authenticate(login, until), Ok)?;
        let mut result = self.post(path, request, Some(&token), until);
        if let (Err(EtcdError::NoToken(_)), Some(old)) = (&result, known) {
            login.forget(&old);
            let token = self.authenticate(login, until)?;
            result = self.post(path, request, Some(&token), until);
        }
        result.map_err(|error| match error {
            // A member may not have heard of it yet.
            EtcdError::NoToken(_) => EtcdError::Other(KeyValueErrorKind::Unreachable(
                "it does not take the token that it has just given: try again".to_owned(),
            )),
            error => error,
        })
    }

    /// A token for the user.
    fn authenticate(&self, login: &Login, until: Instant) -> Result<Arc<str>, EtcdError> {
        let reply: Result<Token, _> = self.post("auth/authenticate", &login.request(), None, until);
        let token = match reply {
            Ok(Token { token })
                if !token.is_empty() && token.bytes().all(|it| it > b' ' && it < 127) =>
            {
                token
            }
            Ok(_) => {
                let text = format!("a token that is none: is it {}?", DIALECT.what);
                return Err(EtcdError::Other(KeyValueErrorKind::Meaning(text)));
            }
            Err(EtcdError::Other(KeyValueErrorKind::Refused { status, message })) => {
                let message = login.hide(&message);
                return Err(EtcdError::Other(KeyValueErrorKind::Refused { status, message }));
            }
            Err(error) => return Err(error),
        };
        let token: Arc<str> = token.into();
        login.keep(Arc::clone(&token));
        Ok(token)
    }

    /// Posts a request, and again to the next endpoint if one fails. Each gets an equal part of the time
    /// that is left. Requests can be repeated: they say what should be, not what should change.
    fn post<R: DeserializeOwned>(
        &self,
        path: &str,
        request: &impl Serialize,
        token: Option<&str>,
        until: Instant,
    ) -> Result<R, EtcdError> {
        let meaningless = |error: serde_json::Error| {
            KeyValueErrorKind::Meaning(format!("{error}: is it {}?", DIALECT.what))
        };
        let body =
            serde_json::to_vec(request).map_err(|error| EtcdError::Other(meaningless(error)))?;
        let first = self.preferred.load(Ordering::Relaxed);
        let count = self.endpoints.len();
        let mut failures = Vec::new();
        for step in 0..count {
            let index = (first + step) % count;
            let endpoint = &self.endpoints[index];
            let kind = match self.ask(endpoint, (path, &body, token), until, count - step) {
                Answer::Refused(error) => return Err(error),
                Answer::Failed(kind) => kind,
                Answer::Reply(reply) => match serde_json::from_slice(&reply) {
                    Ok(reply) => {
                        self.preferred.store(index, Ordering::Relaxed);
                        return Ok(reply);
                    }
                    Err(error) => meaningless(error),
                },
            };
            tracing::debug!(%endpoint, path, %kind, "etcd endpoint failed");
            failures.push((endpoint, kind));
        }
        Err(EtcdError::Other(together(failures)))
    }

    fn ask(
        &self,
        endpoint: &HostPort,
        (path, body, token): (&str, &[u8], Option<&str>),
        until: Instant,
        endpoints_left: usize,
    ) -> Answer {
        let left = until.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(endpoints_left).unwrap_or(u32::MAX);
        if share.is_zero() {
            return Answer::Failed(KeyValueErrorKind::Unreachable("no time was left".to_owned()));
        }
        let scheme = if self.is_secure { "https" } else { "http" };
        let mut request = self
            .agent
            .post(format!("{scheme}://{endpoint}/v3/{path}"))
            .config()
            .timeout_global(Some(share))
            .timeout_connect(Some(share.min(self.config.connect_timeout)))
            .build()
            .content_type("application/json");
        if let Some(token) = token {
            request = request.header("Authorization", token);
        }
        let reply = request.send(body).and_then(|mut response| {
            let body = response.body_mut().with_config().limit(MAX_REPLY).read_to_vec()?;
            Ok((response.status().as_u16(), body))
        });
        match reply {
            Ok((200, body)) => Answer::Reply(body),
            Ok((status, body)) => refusal(status, &body),
            Err(error) => Answer::Failed(failure(error, &DIALECT, self.is_secure)),
        }
    }
}

/// What a status that is no success means.
fn refusal(status: u16, body: &[u8]) -> Answer {
    let error = serde_json::from_slice::<GatewayError>(body).ok();
    let said = match &error {
        Some(error) => excerpt(error.text().as_bytes()),
        None => excerpt(body),
    };
    if error.is_some_and(|error| error.code == NOT_FOUND && said.contains("lease not found")) {
        return Answer::Refused(EtcdError::NoLease);
    }
    let asks = ["user name is empty", "invalid auth token", "revision of auth store is old"];
    let asks = asks.iter().any(|text| said.contains(text));
    let advice = if said.contains("request is too large") {
        "it takes no requests of that length: start it with a larger --max-request-bytes"
    } else if asks {
        "it asks for a user and a password: etcd://USER:PASSWORD@HOST:PORT"
    } else if said.contains("authentication failed") {
        "the password is wrong, or the user"
    } else if said.contains("authentication is not enabled") {
        "it has no passwords: leave the user and the password out"
    } else if said.contains("permission denied") {
        "its user may not do that: grant its role the keys that begin with mooncake/ (of a controller: with the prefix of --state)"
    } else if said.contains("database space exceeded") {
        "its database is full: compact it, and `etcdctl alarm disarm`"
    } else if status == 404 {
        "it knows no such request: is it etcd 3.4 or later?"
    } else {
        ""
    };
    let message = match (advice, said.as_str()) {
        ("", "") => "and it does not say why".to_owned(),
        ("", said) => said.to_owned(),
        (advice, "") => advice.to_owned(),
        (advice, said) => format!("{advice} ({said})"),
    };
    let kind = KeyValueErrorKind::Refused { status: Some(status), message };
    match status {
        _ if asks => Answer::Refused(EtcdError::NoToken(kind)),
        400..=499 if status != 404 && status != 408 => Answer::Refused(EtcdError::Other(kind)),
        _ => Answer::Failed(kind),
    }
}

/// One error of the errors of all endpoints: of the kind of the first that may pass.
fn together(mut failures: Vec<(&HostPort, KeyValueErrorKind)>) -> KeyValueErrorKind {
    if failures.len() == 1
        && let Some((_, kind)) = failures.pop()
    {
        return kind;
    }
    let texts: Vec<String> =
        failures.iter().map(|(endpoint, kind)| format!("{endpoint}: {kind}")).collect();
    let text = format!("none of its endpoints did it: {}", texts.join("; "));
    let of = |is: fn(&KeyValueErrorKind) -> bool| failures.iter().any(|(_, kind)| is(kind));
    if of(|kind| {
        matches!(kind, KeyValueErrorKind::Unreachable(_) | KeyValueErrorKind::Refused { .. })
    }) {
        KeyValueErrorKind::Unreachable(text)
    } else if of(|kind| matches!(kind, KeyValueErrorKind::Untrusted(_))) {
        KeyValueErrorKind::Untrusted(text)
    } else {
        KeyValueErrorKind::Meaning(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, body: &str) -> (bool, String) {
        match refusal(status, body.as_bytes()) {
            Answer::Reply(_) => panic!("a reply"),
            Answer::Refused(error) => (true, KeyValueErrorKind::from(error).to_string()),
            Answer::Failed(kind) => (false, kind.to_string()),
        }
    }

    #[test]
    fn statuses_say_what_to_do_and_whether_another_endpoint_is_tried() {
        let cases = [
            (400, r#"{"error":"etcdserver: request is too large","code":3}"#, true, "larger --max"),
            (400, r#"{"error":"etcdserver: user name is empty","code":3}"#, true, "a password"),
            (401, r#"{"error":"etcdserver: invalid auth token","code":16}"#, true, "a password"),
            (403, r#"{"error":"etcdserver: permission denied","code":7}"#, true, "grant its role"),
            (404, r#"{"error":"etcdserver: requested lease not found","code":5}"#, true, "lease"),
            (404, "404 page not found\n", false, "is it etcd 3.4 or later? (404 page not found)"),
            (429, r#"{"message":"etcdserver: mvcc: database space exceeded"}"#, true, "compact"),
            (500, "", false, "status 500, and it does not say why"),
            (503, r#"{"error":"etcdserver: no leader","code":14}"#, false, "no leader"),
            (302, "<html>", false, "status 302, <html>"),
        ];
        for (status, body, is_final, text) in cases {
            let (was_final, said) = refused(status, body);
            assert_eq!(was_final, is_final, "{status} {body}: {said}");
            assert!(said.contains(text), "{status} {body}: {said}");
        }
    }

    #[test]
    fn errors_of_several_endpoints_name_each() {
        let hosts: Vec<HostPort> = ["a:1", "b:2"].map(|host| host.parse().unwrap()).into();
        let meaning = |text: &str| KeyValueErrorKind::Meaning(text.to_owned());
        let down = KeyValueErrorKind::Unreachable("down".to_owned());
        let both = together(vec![(&hosts[0], meaning("lies")), (&hosts[1], down)]);
        assert!(matches!(&both, KeyValueErrorKind::Unreachable(_)));
        let text = both.to_string();
        assert!(text.contains("a:1: its reply makes no sense: lies; b:2: down"), "{text}");
        let others = KeyValueErrorKind::Untrusted("of another name".to_owned());
        let neither = together(vec![(&hosts[0], meaning("x")), (&hosts[1], others)]);
        assert!(matches!(neither, KeyValueErrorKind::Untrusted(_)));
        let lies = together(vec![(&hosts[0], meaning("x")), (&hosts[1], meaning("y"))]);
        assert!(matches!(lies, KeyValueErrorKind::Meaning(_)));
    }
}
