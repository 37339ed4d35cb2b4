//! Names of engines and of their NICs.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use thiserror::Error;

/// The port of a name that has none (`MC_HANDSHAKE_PORT`).
pub const DEFAULT_HANDSHAKE_PORT: u16 = 12001;

/// Host names are at most 253 characters long (RFC 1035 2.3.4).
const MAX_HOST_LENGTH: usize = 253;

/// Where an engine answers: `host:port`, with brackets around an IPv6 address.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct HostPort {
    /// Host name or address, without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

/// What is wrong with a name.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum NameError {
    /// No host.
    #[error("{0:?} has no host: the form is host:port, or [address]:port for IPv6")]
    NoHost(String),
    /// No port.
    #[error("{0:?} has no port: the form is host:port, or [address]:port for IPv6")]
    NoPort(String),
    /// The port is no number from 1 to 65535.
    #[error("{0:?}: the port must be a number from 1 to 65535")]
    BadPort(String),
    /// Brackets that hold no IPv6 address or do not match.
    #[error("{0:?}: brackets must hold an IPv6 address, as in [::1]:12345")]
    BadBrackets(String),
    /// Characters that no host has, or too many of them.
    #[error("{0:?}: not a host name or address")]
    BadHost(String),
    /// No name of a segment that is a file.
    #[error("{0:?} is no name of a file: the form is nvmeof/host:port/file")]
    BadFileName(String),
    /// A NIC path without `@`, or with nothing on one side of it.
    #[error("{0:?} is not a NIC path: the form is server@nic")]
    BadNicPath(String),
}

impl HostPort {
    /// The name of an address and a port.
    pub fn from_address(address: IpAddr, port: u16) -> Self {
        Self { host: address.to_string(), port }
    }

    /// Parses a name that may leave the port out. A bare IPv6 address counts as a host.
    pub fn parse_with_default(text: &str, default_port: u16) -> Result<Self, NameError> {
        let bare_address = text.parse::<Ipv6Addr>().is_ok();
        let bracketed_only = text.starts_with('[') && text.ends_with(']');
        if bare_address {
            return Ok(Self { host: text.to_owned(), port: default_port });
        }
        if bracketed_only || !text.contains(':') {
            return format!("{text}:{default_port}").parse();
        }
        text.parse()
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl FromStr for HostPort {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        // Errors repeat the text: not more of it than fits a line.
        let excerpt = || text.chars().take(80).collect::<String>();
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, rest) =
                rest.split_once(']').ok_or_else(|| NameError::BadBrackets(excerpt()))?;
            // A scope (`%eth0`) is part of the address for the resolver, not for the parser.
            let address = host.split_once('%').map_or(host, |(address, _)| address);
            if address.parse::<Ipv6Addr>().is_err() {
                return Err(NameError::BadBrackets(excerpt()));
            }
            (host, rest.strip_prefix(':').ok_or_else(|| NameError::NoPort(excerpt()))?)
        } else {
            let (host, port) = text.rsplit_once(':').ok_or_else(|| NameError::NoPort(excerpt()))?;
            if host.contains(':') {
                return Err(NameError::BadBrackets(excerpt()));
            }
            (host, port)
        };
        if host.is_empty() {
            return Err(NameError::NoHost(excerpt()));
        }
        let allowed = |c: char| c.is_alphanumeric() || "-._:%".contains(c);
        if host.len() > MAX_HOST_LENGTH || !host.chars().all(allowed) {
            return Err(NameError::BadHost(excerpt()));
        }
        let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        match port.parse() {
            Ok(port) if digits && port != 0 => Ok(Self { host: host.to_owned(), port }),
            _ => Err(NameError::BadPort(excerpt())),
        }
    }
}

/// A NIC of a server: `server@nic`.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct NicPath {
    /// The server's name.
    pub server: String,
    /// The device's name there.
    pub nic: String,
}

impl fmt::Display for NicPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.server, self.nic)
    }
}

impl FromStr for NicPath {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        match text.rsplit_once('@') {
            Some((server, nic)) if !server.is_empty() && !nic.is_empty() => {
                Ok(Self { server: server.to_owned(), nic: nic.to_owned() })
            }
            _ => Err(NameError::BadNicPath(text.chars().take(80).collect())),
        }
    }
}

/// A segment that is a file of a server: `nvmeof/server/file`, as Mooncake's stores have it.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FileName {
    /// The server's name.
    pub server: HostPort,
    /// What the server calls the file.
    pub file: String,
}

impl FileName {
    /// What all of them begin with.
    pub const PREFIX: &str = "nvmeof/";

    /// Names of files have up to so many bytes.
    pub const MAX_LENGTH: usize = 255;

    /// A file of a server, if it can be called so: one line without slashes.
    pub fn new(server: HostPort, file: &str) -> Result<Self, NameError> {
        let fits = (1..=Self::MAX_LENGTH).contains(&file.len());
        if !fits || file.contains(|c: char| c == '/' || c.is_control()) {
            return Err(NameError::BadFileName(file.chars().take(80).collect()));
        }
        Ok(Self { server, file: file.to_owned() })
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}/{}", Self::PREFIX, self.server, self.file)
    }
}

impl FromStr for FileName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let parts = text.strip_prefix(Self::PREFIX).and_then(|rest| rest.split_once('/'));
        match parts {
            Some((server, file)) => Self::new(server.parse()?, file),
            None => Err(NameError::BadFileName(text.chars().take(80).collect())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for (text, host, port) in [
            ("127.0.0.1:15000", "127.0.0.1", 15000),
            ("node-a.example:1", "node-a.example", 1),
            ("[::1]:65535", "::1", 65535),
            ("[fe80::1%eth0]:12001", "fe80::1%eth0", 12001),
        ] {
            let name: HostPort = text.parse().unwrap();
            assert_eq!((name.host.as_str(), name.port), (host, port));
            assert_eq!(name.to_string(), text);
        }
    }

    #[test]
    fn bad_names_say_what_is_wrong() {
        let parse = |text: &str| text.parse::<HostPort>().unwrap_err();
        assert!(matches!(parse("node"), NameError::NoPort(_)));
        assert!(matches!(parse("[::1]"), NameError::NoPort(_)));
        assert!(matches!(parse(":80"), NameError::NoHost(_)));
        assert!(matches!(parse("::1:80"), NameError::BadBrackets(_)));
        assert!(matches!(parse("[node]:80"), NameError::BadBrackets(_)));
        assert!(matches!(parse("[::1:80"), NameError::BadBrackets(_)));
        assert!(matches!(parse("a b:80"), NameError::BadHost(_)));
        for text in ["node:", "node:0", "node:65536", "node:+1", "node:x", "node:-1"] {
            assert!(matches!(parse(text), NameError::BadPort(_)), "{text}");
        }
        assert!(matches!(parse(&format!("{}:1", "a".repeat(254))), NameError::BadHost(_)));
    }

    #[test]
    fn a_missing_port_has_a_default() {
        let parse = |text| HostPort::parse_with_default(text, DEFAULT_HANDSHAKE_PORT).unwrap();
        assert_eq!(parse("node").to_string(), "node:12001");
        assert_eq!(parse("node:5").to_string(), "node:5");
        assert_eq!(parse("::1").to_string(), "[::1]:12001");
        assert_eq!(parse("[::1]").to_string(), "[::1]:12001");
        assert_eq!(parse("[::1]:5").to_string(), "[::1]:5");
    }

    #[test]
    fn nic_paths() {
        let path: NicPath = "[::1]:5@soft-::1".parse().unwrap();
        assert_eq!((path.server.as_str(), path.nic.as_str()), ("[::1]:5", "soft-::1"));
        assert_eq!(path.to_string(), "[::1]:5@soft-::1");
        for text in ["", "a", "@a", "a@"] {
            assert!(text.parse::<NicPath>().is_err(), "{text}");
        }
    }

    #[test]
    fn files() {
        let name: FileName = "nvmeof/[::1]:5/a b.bin".parse().unwrap();
        assert_eq!((name.server.port, name.file.as_str()), (5, "a b.bin"));
        assert_eq!(name.to_string(), "nvmeof/[::1]:5/a b.bin");
        let long = format!("nvmeof/a:1/{}", "x".repeat(256));
        for text in
            ["", "a:1", "nvmeof/a:1", "nvmeof/a:1/", "nvmeof/a:1/b/c", "nvmeof/a:1/b\n", &long]
        {
            assert!(matches!(text.parse::<FileName>(), Err(NameError::BadFileName(_))), "{text}");
        }
        assert!(matches!("nvmeof/a/b".parse::<FileName>(), Err(NameError::NoPort(_))));
    }
}
