//! Keys of segments, and the JSON of addresses, as Mooncake has them.

use serde::{Deserialize, Serialize};

use crate::{FileName, HostPort, RpcMeta, StoreError};

/// The longest name: some servers have keys of 250 bytes, and `mooncake/rpc_meta/` is in front.
const MAX_NAME: usize = 200;

/// Keys of one cluster.
#[derive(Clone, Debug)]
pub(super) struct Names {
    prefix: String,
}

/// The JSON of `rpc_meta`.
#[derive(Debug, Deserialize, Serialize)]
struct Address {
    ip_or_host_name: String,
    rpc_port: u16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    incarnation: Option<u64>,
}

impl Names {
    pub(super) fn new(cluster: &str) -> Self {
        let separator = if cluster.is_empty() || cluster.ends_with('/') { "" } else { "/" };
        Self { prefix: format!("mooncake/{cluster}{separator}") }
    }

    /// The key of a descriptor. A name with a slash is a path already, as those of files.
    pub(super) fn segment(&self, name: &str) -> Result<String, StoreError> {
        check(name)?;
        let folder = if name.contains('/') { "" } else { "ram/" };
        Ok(format!("{}{folder}{name}", self.prefix))
    }

    /// The key of the address at which a segment's engine answers.
    pub(super) fn address(&self, name: &str) -> Result<String, StoreError> {
        check(name)?;
        Ok(format!("{}rpc_meta/{name}", self.prefix))
    }
}

/// What an engine with an address of its own can be called.
pub(super) fn check_own(name: &str) -> Result<(), StoreError> {
    check(name)?;
    if name.contains("rpc_meta") {
        // Servers refuse to write over such a key, as over an address.
        return Err(bad(name, "servers take a name with rpc_meta in it for an address"));
    }
    match name.contains('/') && !name.starts_with(FileName::PREFIX) {
        true => Err(bad(name, "only the names of files have slashes")),
        false => Ok(()),
    }
}

fn check(name: &str) -> Result<(), StoreError> {
    if name.is_empty() {
        return Err(bad(name, "it is empty"));
    }
    if name.len() > MAX_NAME {
        return Err(bad(name, "it is longer than 200 bytes"));
    }
    if name.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(bad(name, "it has a space or a control character"));
    }
    Ok(())
}

fn bad(name: &str, what: &'static str) -> StoreError {
    StoreError::BadName { name: name.chars().take(80).collect(), what }
}

/// The JSON text of an address.
pub(super) fn write_address(meta: &RpcMeta) -> Vec<u8> {
    let RpcMeta { address: HostPort { host, port }, incarnation } = meta.clone();
    let address = Address { ip_or_host_name: host, rpc_port: port, incarnation };
    serde_json::to_vec(&address).unwrap_or_default()
}

/// Reads it. What is wrong with it is the error.
pub(super) fn read_address(text: &[u8]) -> Result<RpcMeta, String> {
    let Address { ip_or_host_name: host, rpc_port: port, incarnation } =
        serde_json::from_slice(text).map_err(|error| error.to_string())?;
    // IPv6 addresses may be in brackets.
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host);
    let address = HostPort { host: host.to_owned(), port };
    let address = address.to_string().parse::<HostPort>().map_err(|error| error.to_string())?;
    Ok(RpcMeta { address, incarnation })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_are_the_originals() {
        let names = Names::new("");
        assert_eq!(names.segment("nodeA:12345").unwrap(), "mooncake/ram/nodeA:12345");
        assert_eq!(names.address("nodeA:12345").unwrap(), "mooncake/rpc_meta/nodeA:12345");
        assert_eq!(names.segment("nvmeof/a:1/f").unwrap(), "mooncake/nvmeof/a:1/f");
        for cluster in ["blue", "blue/"] {
            let names = Names::new(cluster);
            assert_eq!(names.segment("a").unwrap(), "mooncake/blue/ram/a");
            assert_eq!(names.address("a").unwrap(), "mooncake/blue/rpc_meta/a");
        }
    }

    #[test]
    fn names_that_are_none() {
        for name in ["", "a b", "a\n", &"x".repeat(201)] {
            assert!(matches!(check_own(name), Err(StoreError::BadName { .. })), "{name:?}");
            assert!(Names::new("").segment(name).is_err(), "{name:?}");
        }
        assert!(check_own("rpc_meta/a").is_err());
        check_own("nvmeof/a:1/f").unwrap();
        check_own("node-a").unwrap();
    }

    #[test]
    fn addresses_are_the_originals() {
        let text = br#"{"ip_or_host_name":"192.0.2.2","rpc_port":15831}"#;
        let meta = read_address(text).unwrap();
        assert_eq!(meta.address.to_string(), "192.0.2.2:15831");
        assert_eq!(write_address(&meta), text);
        for host in ["::1", "[::1]"] {
            let text = format!(r#"{{"ip_or_host_name":"{host}","rpc_port":1,"more":[]}}"#);
            assert_eq!(read_address(text.as_bytes()).unwrap().address.to_string(), "[::1]:1");
        }
        let meta = RpcMeta { incarnation: Some(u64::MAX), ..meta };
        assert_eq!(read_address(&write_address(&meta)).unwrap(), meta);
    }

    #[test]
    fn addresses_that_are_none() {
        for text in [
            "",
            "null",
            "{}",
            r#"{"ip_or_host_name":"a"}"#,
            r#"{"ip_or_host_name":"","rpc_port":1}"#,
            r#"{"ip_or_host_name":"a b","rpc_port":1}"#,
            r#"{"ip_or_host_name":"a","rpc_port":0}"#,
            r#"{"ip_or_host_name":"a","rpc_port":65536}"#,
            r#"{"ip_or_host_name":"a","rpc_port":-1}"#,
        ] {
            assert!(read_address(text.as_bytes()).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_address_or_an_error(text: Vec<u8>) {
            let _ = read_address(&text);
        }
    }
}
