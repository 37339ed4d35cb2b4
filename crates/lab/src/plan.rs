//! What a lab consists of, as a person writes it.

use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{PlanError, Rate};

/// Stands for every host as an end of a link.
pub(crate) const EVERY_HOST: &str = "*";

/// Hosts, switches and links.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub(crate) hosts: Vec<String>,
    #[serde(default)]
    pub(crate) switches: Vec<String>,
    #[serde(default, rename = "link")]
    pub(crate) links: Vec<Links>,
    /// Links without a subnet, whose NICs come first.
    #[serde(skip)]
    pub(crate) routed: Vec<RoutedLink>,
    /// Hosts that pass on what is for others.
    #[serde(skip)]
    pub(crate) routers: Vec<String>,
}

/// A link whose ends have these addresses, and no subnet.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RoutedLink {
    pub(crate) between: [(String, IpAddr); 2],
    pub(crate) link: Link,
}

/// Links of one kind.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(from = "LinksInFile")]
pub(crate) struct Links {
    pub(crate) between: [String; 2],
    pub(crate) count: usize,
    pub(crate) link: Link,
}

/// The same, flat: serde's `flatten` would let unknown fields pass.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinksInFile {
    between: [String; 2],
    #[serde(default = "one")]
    count: usize,
    rate: Option<Rate>,
    mtu: Option<u32>,
    families: Option<Vec<Family>>,
    delay: Option<String>,
    #[serde(default)]
    loss: f64,
}

/// What holds for a link, in each of its directions.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Link {
    /// How fast it is; without one, as fast as the machine is.
    pub rate: Option<Rate>,
    /// The largest IP packet: 1280 to 65535.
    pub mtu: u32,
    /// The families of which its ends have addresses.
    pub families: Vec<Family>,
    /// How long a packet takes, such as `5ms`. Needs the kernel's netem, as `loss` does.
    pub delay: Option<String>,
    /// How many packets in a hundred are lost.
    pub loss: f64,
}

/// A family of addresses.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// 32 bits.
    Ipv4,
    /// 128 bits.
    Ipv6,
}

fn one() -> usize {
    1
}

impl From<LinksInFile> for Links {
    fn from(file: LinksInFile) -> Self {
        let LinksInFile { between, count, rate, mtu, families, delay, loss } = file;
        let usual = Link::default();
        let (mtu, families) = (mtu.unwrap_or(usual.mtu), families.unwrap_or(usual.families));
        Self { between, count, link: Link { rate, mtu, families, delay, loss } }
    }
}

impl Default for Link {
    fn default() -> Self {
        let families = vec![Family::Ipv4, Family::Ipv6];
        Self { rate: None, mtu: 1500, families, delay: None, loss: 0.0 }
    }
}

impl Plan {
    /// Nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds hosts.
    #[must_use]
    pub fn hosts<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.hosts.extend(names.into_iter().map(Into::into));
        self
    }

    /// Adds a switch: a bridge without addresses of its own.
    #[must_use]
    pub fn switch(mut self, name: &str) -> Self {
        self.switches.push(name.to_owned());
        self
    }

    /// Adds so many links between two hosts, or a host and a switch. `*` is every host.
    #[must_use]
    pub fn links(mut self, one: &str, other: &str, count: usize, link: &Link) -> Self {
        let between = [one, other].map(str::to_owned);
        self.links.push(Links { between, count, link: link.clone() });
        self
    }

    /// Adds a link whose ends have an address each, both of one family, in place of those of a subnet. A host may have
    /// one address on several such links. Who is at its other end is reached over it, and others over the hosts that
    /// [pass on](Self::router) what is for them, by the ways of the fewest links. The NICs of these links come before
    /// all others.
    #[must_use]
    pub fn routed_link(mut self, between: [(&str, IpAddr); 2], link: &Link) -> Self {
        let between = between.map(|(host, address)| (host.to_owned(), address));
        self.routed.push(RoutedLink { between, link: link.clone() });
        self
    }

    /// Has a host pass on what is for others, as a router does.
    #[must_use]
    pub fn router(mut self, host: &str) -> Self {
        self.routers.push(host.to_owned());
        self
    }
}

impl FromStr for Plan {
    type Err = PlanError;

    /// Reads TOML; what it says is checked when it is built.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        toml::from_str(text).map_err(|error| PlanError::Syntax(Box::new(error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_and_the_builder_say_the_same() {
        let file = r#"
            hosts = ["a", "b"]
            switches = ["s"]
            [[link]]
            between = ["a", "b"]
            count = 2
            rate = "200mbit"
            mtu = 9000
            families = ["ipv6"]
            [[link]]
            between = ["*", "s"]
            delay = "5ms"
            loss = 0.5
        "#;
        let fast = Link {
            rate: Some(Rate::from_mbit(200)),
            mtu: 9000,
            families: vec![Family::Ipv6],
            ..Link::default()
        };
        let far = Link { delay: Some("5ms".to_owned()), loss: 0.5, ..Link::default() };
        let plan = Plan::new().hosts(["a", "b"]).switch("s");
        let plan = plan.links("a", "b", 2, &fast).links("*", "s", 1, &far);
        assert_eq!(file.parse::<Plan>().unwrap(), plan);
    }

    #[test]
    fn errors_name_the_place() {
        for (file, words) in [
            ("hosts = 3", "hosts = 3"),
            ("hosts = []\nfoo = 1", "foo"),
            ("hosts = [\"a\"]\n[[link]]\nbetween = [\"a\"]", "between"),
            ("hosts = [\"a\"]\n[[link]]\nbetween = [\"a\", \"b\"]\nrat = 3", "rat"),
            ("hosts = [\"a\"]\n[[link]]\nbetween = [\"a\", \"b\"]\nrate = \"3\"", "is no rate"),
            ("hosts = [\"a\"]\n[[link]]\nbetween = [\"a\", \"b\"]\nfamilies = [\"ipx\"]", "ipx"),
        ] {
            let error = file.parse::<Plan>().unwrap_err().to_string();
            assert!(error.contains(words), "{file}\n{error}");
        }
    }
}
