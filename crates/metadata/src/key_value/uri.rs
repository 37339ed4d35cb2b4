//! URIs of metadata servers: `scheme://[[user]:password@]host[:port][,host[:port]][/path]`.

use std::fmt;

use thiserror::Error;

use crate::HostPort;

/// Most endpoints of one server.
const MAX_HOSTS: usize = 16;

/// A URI that names no metadata server.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("metadata server {uri}: {reason}")]
pub struct UriError {
    /// The URI, without user and password.
    pub uri: String,
    /// What is wrong with it, and what it should be.
    pub reason: String,
}

/// A text that is not shown.
#[derive(Clone, Eq, PartialEq)]
pub struct Secret(String);

impl Secret {
    /// Shows as `***` from now on.
    pub const fn new(text: String) -> Self {
        Self(text)
    }

    pub(super) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The parts of a URI.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct ServerUri {
    scheme: &'static str,
    pub(super) user: Option<String>,
    pub(super) password: Option<Secret>,
    /// At least one.
    pub(super) hosts: Vec<HostPort>,
    /// What follows the slash after the hosts, if anything does.
    pub(super) path: Option<String>,
}

impl ServerUri {
    /// Takes a URI of this scheme apart. Hosts may leave this port out.
    pub(super) fn parse(uri: &str, scheme: &'static str, port: u16) -> Result<Self, UriError> {
        let Some(rest) = uri.strip_prefix(scheme).and_then(|rest| rest.strip_prefix("://")) else {
            // What is before an at sign may be a password.
            let shown = match uri.rsplit_once('@') {
                Some((_, place)) => excerpt(&format!("...@{place}")),
                None => excerpt(uri),
            };
            let reason = format!("it does not begin with {scheme}://");
            return Err(UriError { uri: shown, reason });
        };
        // Passwords may have slashes and at signs that nobody has encoded; what follows them has not.
        let (login, place) = match rest.rsplit_once('@') {
            Some((login, place)) => (Some(login), place),
            None => (None, rest),
        };
        let shown = excerpt(&format!("{scheme}://{place}"));
        let error = |reason: String| UriError { uri: shown.clone(), reason };
        let (user, password) = match login {
            None => (None, None),
            Some(login) => {
                let (user, password) = login.split_once(':').unwrap_or((login, ""));
                let decoded = |text: &str, of: &str| {
                    decode(text).ok_or_else(|| {
                        error(format!(
                            "its {of} has a '%' that is no encoded character: write %25 for one"
                        ))
                    })
                };
                (Some(decoded(user, "user")?), Some(decoded(password, "password")?))
            }
        };
        let (hosts, path) = match place.split_once('/') {
            Some((hosts, path)) => (hosts, Some(path).filter(|path| !path.is_empty())),
            None => (place, None),
        };
        let hosts: Vec<HostPort> = hosts
            .split(',')
            .take(MAX_HOSTS + 1)
            .map(|host| HostPort::parse_with_default(host, port))
            .collect::<Result<_, _>>()
            .map_err(|reason| error(reason.to_string()))?;
        if hosts.len() > MAX_HOSTS {
            return Err(error(format!("it names more than {MAX_HOSTS} servers")));
        }
        Ok(Self {
            scheme,
            user: user.filter(|user| !user.is_empty()),
            password: password.filter(|password| !password.is_empty()).map(Secret),
            hosts,
            path: path.map(str::to_owned),
        })
    }

    /// The one host of a server that has no others.
    pub(super) fn host(&self) -> Result<&HostPort, UriError> {
        match self.hosts.as_slice() {
            [host] => Ok(host),
            _ => Err(self.error("it names more than one server, of which only etcd knows")),
        }
    }

    /// An error of this URI.
    pub(super) fn error(&self, reason: impl Into<String>) -> UriError {
        UriError { uri: self.to_string(), reason: reason.into() }
    }

    /// Refuses what only a server with passwords and databases has.
    pub(super) fn plain(&self) -> Result<(), UriError> {
        if self.user.is_some() || self.password.is_some() {
            return Err(self.error(format!(
                "{} is asked without user and password: leave them out",
                self.scheme
            )));
        }
        self.without_path()
    }

    /// Refuses what only a server with databases has.
    pub(super) fn without_path(&self) -> Result<(), UriError> {
        match &self.path {
            None => Ok(()),
            Some(_) => Err(self.error("nothing can follow the port: leave it out")),
        }
    }
}

/// As users write it, without user and password.
impl fmt::Display for ServerUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.scheme)?;
        for (index, host) in self.hosts.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{host}")?;
        }
        match &self.path {
            Some(path) => write!(f, "/{path}"),
            None => Ok(()),
        }
    }
}

/// Not more than fits a line.
fn excerpt(text: &str) -> String {
    text.chars().take(120).collect()
}

/// Characters in place of their `%` codes (RFC 3986 2.1).
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (digits, after) = rest.split_first_chunk::<2>()?;
        rest = after;
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let code = digit(digits[0])? * 16 + digit(digits[1])?;
        bytes.push(u8::try_from(code).ok()?);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(uri: &str) -> Result<ServerUri, UriError> {
        ServerUri::parse(uri, "redis", 6379)
    }

    #[test]
    fn parts_and_what_is_shown() {
        let cases = [
            ("redis://a", "redis://a:6379", None, None),
            ("redis://a:1/", "redis://a:1", None, None),
            ("redis://a:1/3", "redis://a:1/3", None, None),
            ("redis://:pass@a:1", "redis://a:1", None, Some("pass")),
            ("redis://user:pass@a:1/3", "redis://a:1/3", Some("user"), Some("pass")),
            ("redis://:p%40s%2Fs%25@a", "redis://a:6379", None, Some("p@s/s%")),
            ("redis://:p@s/s@[::1]:1/0", "redis://[::1]:1/0", None, Some("p@s/s")),
            ("redis://:a:b@h", "redis://h:6379", None, Some("a:b")),
            ("redis://a,b:2", "redis://a:6379,b:2", None, None),
        ];
        for (uri, shown, user, password) in cases {
            let parts = parse(uri).unwrap_or_else(|error| panic!("{uri}: {error}"));
            assert_eq!(parts.to_string(), shown, "{uri}");
            assert_eq!(parts.user.as_deref(), user, "{uri}");
            assert_eq!(parts.password.as_ref().map(Secret::expose), password, "{uri}");
            // What is shown is a URI again, of the same place.
            assert_eq!(parse(shown).unwrap().hosts, parts.hosts, "{uri}");
        }
    }

    #[test]
    fn no_error_and_no_debug_text_has_the_password() {
        let wrong = [
            "redis://:secret@",
            "redis://:secret@a:0",
            "redis://:secret@a:b",
            "redis://secret:secret@a b",
            "redis://:secret%zz@a",
            "redis://:sec/secret@a:x",
            "other://:secret@a",
            "secret@a",
            ":secret@redis://a",
        ];
        for uri in wrong {
            let error = parse(uri).unwrap_err().to_string();
            assert!(!error.contains("sec"), "{uri}: {error}");
        }
        let parts = parse("redis://u:secret@a").unwrap();
        assert!(!format!("{parts:?} {parts}").contains("secret"));
        assert!(!parts.plain().unwrap_err().to_string().contains("secret"));
    }

    #[test]
    fn reasons_say_what_is_wrong() {
        let cases = [
            ("http://a:1", "does not begin with redis://"),
            ("redis://", "has no host"),
            ("redis://a:0", "port must be a number from 1 to 65535"),
            ("redis://:%@a", "password has a '%'"),
            (&format!("redis://{}", ["a"; 17].join(",")), "more than 16 servers"),
        ];
        for (uri, reason) in cases {
            let error = parse(uri).unwrap_err();
            assert!(error.reason.contains(reason), "{uri}: {error}");
        }
        assert!(parse("redis://a,b").unwrap().host().is_err());
        assert!(parse("redis://a/1").unwrap().plain().is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_a_uri_or_an_error(text in "\\PC*") {
            let _ = parse(&text);
            let _ = parse(&format!("redis://{text}"));
        }

        #[test]
        fn a_password_that_is_encoded_comes_back(password in "\\PC{1,20}") {
            let encoded: String = password.bytes().map(|byte| format!("%{byte:02x}")).collect();
            let decoded = parse(&format!("redis://:{encoded}@a")).unwrap().password.unwrap();
            prop_assert_eq!(decoded.expose(), password);
        }
    }
}
