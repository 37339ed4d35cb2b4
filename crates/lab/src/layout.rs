//! A plan with everything in its place: NICs, their addresses, and what is at the other end.
//!
//! Each link between hosts, and each switch, is a subnet. The NICs of subnet `n` have the addresses
//! `10.77.n.1` and `fd77:0:0:n::1`, `.2` and `::2`, and so on. Routed links have addresses of their own.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::plan::{EVERY_HOST, RoutedLink};
use crate::routes::{self, Route};
use crate::{Family, LabError, Link, Plan, PlanError};

/// More than a test needs, and few enough that the numbers of subnets and NICs fit an address.
const MAX_HOSTS: usize = 250;
const MAX_SUBNETS: usize = 250;
const MAX_LINKS: usize = 1024;

/// The longest name of a switch: an interface's has 15 bytes, and a port of a switch is named after it.
const MAX_NAME: usize = 8;

/// The longest name of a host.
const MAX_HOST_NAME: usize = 32;

/// Hosts and links with everything in its place.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Layout {
    /// The hosts, in the plan's order.
    pub hosts: Vec<Host>,
    pub(crate) switches: Vec<String>,
    pub(crate) links: Vec<PlacedLink>,
}

/// A host.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its NICs, in the order of the plan's links, those of routed links first.
    pub nics: Vec<Nic>,
    /// Whether it passes on what is for others.
    pub(crate) is_router: bool,
    pub(crate) routes: Vec<Route>,
}

/// A network interface of a host.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Nic {
    /// `eth0` and on.
    pub name: String,
    /// One of each family of the link.
    pub addresses: Vec<IpAddr>,
    /// The address at the other end, where the link is routed.
    pub peer: Option<IpAddr>,
    /// The number of its link in the lab.
    pub link: usize,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct PlacedLink {
    pub(crate) ends: [End; 2],
    pub(crate) link: Link,
}

/// Where a link ends.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) enum End {
    /// Index of the host, index of its NIC.
    Nic(usize, usize),
    /// Index of the switch, name of the port.
    Port(usize, String),
}

impl Host {
    /// The first address of each NIC: IPv4 where its link has it.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.nics.iter().filter_map(|nic| nic.addresses.first().copied()).collect()
    }
}

impl Layout {
    /// Gives everything in a plan its place.
    pub fn new(plan: &Plan) -> Result<Self, PlanError> {
        check_names(plan)?;
        let host = |name: &String| Host {
            name: name.clone(),
            nics: Vec::new(),
            is_router: plan.routers.contains(name),
            routes: Vec::new(),
        };
        let hosts = plan.hosts.iter().map(host).collect();
        let mut layout = Self { hosts, switches: plan.switches.clone(), links: Vec::new() };
        for link in &plan.routed {
            layout.add_routed(link)?;
        }
        routes::add(&mut layout);
        let mut used = vec![0; plan.switches.len()];
        let mut subnets = plan.switches.len();
        for links in &plan.links {
            check_link(&links.link, &links.between)?;
            for [one, other] in expand(plan, &links.between) {
                for _ in 0..links.count {
                    layout.add(&one, &other, &links.link, &mut used, &mut subnets)?;
                }
            }
        }
        Ok(layout)
    }

    /// A host by its name.
    pub fn host(&self, name: &str) -> Result<&Host, LabError> {
        let found = self.hosts.iter().find(|host| host.name == name);
        found.ok_or_else(|| LabError::Unknown(format!("host {name}")))
    }

    fn add(
        &mut self,
        one: &str,
        other: &str,
        link: &Link,
        used: &mut [usize],
        subnets: &mut usize,
    ) -> Result<(), PlanError> {
        let host = |name: &str| self.hosts.iter().position(|host| host.name == name);
        let switch = |name: &str| self.switches.iter().position(|switch| switch == name);
        let number = self.links.len();
        limit("links", number + 1, MAX_LINKS)?;
        let ends = match (host(one), host(other)) {
            (Some(one), Some(other)) if one != other => {
                let subnet = *subnets;
                *subnets += 1;
                limit("subnets", *subnets, MAX_SUBNETS)?;
                [self.add_nic(one, link, subnet, 1), self.add_nic(other, link, subnet, 2)]
            }
            (Some(host), None) | (None, Some(host)) => {
                let name = if self.hosts[host].name == one { other } else { one };
                let Some(switch) = switch(name) else {
                    return Err(PlanError::UnknownEnd(name.to_owned()));
                };
                let is_there = |placed: &PlacedLink| {
                    matches!(&placed.ends,
                    [End::Nic(at, _), End::Port(to, _)] if (*at, *to) == (host, switch))
                };
                if self.links.iter().any(is_there) {
                    let (host, switch) = (self.hosts[host].name.clone(), name.to_owned());
                    return Err(PlanError::Twice { host, switch });
                }
                used[switch] += 1;
                let port = format!("{name}-{}", used[switch]);
                [self.add_nic(host, link, switch, used[switch]), End::Port(switch, port)]
            }
            _ => {
                let nowhere = |name: &&str| host(name).is_none() && switch(name).is_none();
                return Err(match [one, other].into_iter().find(nowhere) {
                    Some(name) => PlanError::UnknownEnd(name.to_owned()),
                    None => PlanError::Ends(one.to_owned(), other.to_owned()),
                });
            }
        };
        self.links.push(PlacedLink { ends, link: link.clone() });
        Ok(())
    }

    /// Adds a link with an address at each end.
    fn add_routed(&mut self, routed: &RoutedLink) -> Result<(), PlanError> {
        let [one, other] = &routed.between;
        check_link(&routed.link, &[one.0.clone(), other.0.clone()])?;
        let number = self.links.len();
        limit("links", number + 1, MAX_LINKS)?;
        if one.1.is_ipv4() != other.1.is_ipv4() {
            return Err(PlanError::Families(one.1, other.1));
        }
        let mut places = [0; 2];
        for (place, (name, _)) in places.iter_mut().zip([one, other]) {
            let found = self.hosts.iter().position(|host| host.name == *name);
            *place = found.ok_or_else(|| PlanError::UnknownEnd(name.clone()))?;
        }
        if places[0] == places[1] {
            return Err(PlanError::Ends(one.0.clone(), other.0.clone()));
        }
        let mut end = |host: usize, address: IpAddr, peer: IpAddr| {
            let nics = &mut self.hosts[host].nics;
            let (name, addresses) = (format!("eth{}", nics.len()), vec![address]);
            nics.push(Nic { name, addresses, peer: Some(peer), link: number });
            End::Nic(host, nics.len() - 1)
        };
        let ends = [end(places[0], one.1, other.1), end(places[1], other.1, one.1)];
        let families = vec![if one.1.is_ipv4() { Family::Ipv4 } else { Family::Ipv6 }];
        let link = Link { families, ..routed.link.clone() };
        self.links.push(PlacedLink { ends, link });
        Ok(())
    }

    /// Adds a NIC with the address of this number in this subnet. Both fit: there are limits.
    fn add_nic(&mut self, host: usize, link: &Link, subnet: usize, number: usize) -> End {
        let (subnet, number) = (subnet as u8, number as u8);
        let address = |family: &Family| -> IpAddr {
            match family {
                Family::Ipv4 => Ipv4Addr::new(10, 77, subnet, number).into(),
                Family::Ipv6 => {
                    Ipv6Addr::new(0xfd77, 0, 0, subnet.into(), 0, 0, 0, number.into()).into()
                }
            }
        };
        let number = self.links.len();
        let nics = &mut self.hosts[host].nics;
        let addresses = link.families.iter().map(address).collect();
        nics.push(Nic { name: format!("eth{}", nics.len()), addresses, peer: None, link: number });
        End::Nic(host, nics.len() - 1)
    }
}

/// The pairs that a link's ends mean.
fn expand(plan: &Plan, between: &[String; 2]) -> Vec<[String; 2]> {
    match between {
        [every, other] | [other, every] if every == EVERY_HOST => {
            plan.hosts.iter().map(|host| [host.clone(), other.clone()]).collect()
        }
        ends => vec![ends.clone()],
    }
}

fn check_names(plan: &Plan) -> Result<(), PlanError> {
    if plan.hosts.is_empty() {
        return Err(PlanError::NoHosts);
    }
    limit("hosts", plan.hosts.len(), MAX_HOSTS)?;
    limit("switches", plan.switches.len(), MAX_SUBNETS)?;
    let names: Vec<&String> = plan.hosts.iter().chain(&plan.switches).collect();
    for (index, name) in names.iter().enumerate() {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let longest = if index < plan.hosts.len() { MAX_HOST_NAME } else { MAX_NAME };
        let fits = name.len() <= longest && name.chars().all(plain);
        if !fits || !name.starts_with(|c: char| c.is_ascii_alphabetic()) || *name == "lo" {
            return Err(PlanError::Name((*name).clone()));
        }
        // A switch's ports are called after it, with a number.
        if index >= plan.hosts.len() && name.contains('-') {
            return Err(PlanError::Name((*name).clone()));
        }
        if names[..index].contains(name) {
            return Err(PlanError::Duplicate((*name).clone()));
        }
    }
    match plan.routers.iter().find(|router| !plan.hosts.contains(router)) {
        Some(router) => Err(PlanError::UnknownRouter(router.clone())),
        None => Ok(()),
    }
}

fn check_link(link: &Link, [one, other]: &[String; 2]) -> Result<(), PlanError> {
    // IPv6 asks for 1280 (RFC 8200, section 5).
    if !(1280..=65_535).contains(&link.mtu) {
        return Err(PlanError::Mtu(link.mtu));
    }
    if link.families.is_empty() {
        return Err(PlanError::NoFamily(one.clone(), other.clone()));
    }
    if !(0.0..=100.0).contains(&link.loss) {
        return Err(PlanError::Loss(link.loss));
    }
    if let Some(delay) = &link.delay {
        let number = delay.strip_suffix("ms").or_else(|| delay.strip_suffix("us"));
        if number.is_none_or(|number| number.parse::<u32>().is_err()) {
            return Err(PlanError::Delay(delay.clone()));
        }
    }
    Ok(())
}

fn limit(what: &'static str, count: usize, max: usize) -> Result<(), PlanError> {
    if count <= max { Ok(()) } else { Err(PlanError::TooMany { what, count, max }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(nic: &Nic) -> Vec<String> {
        nic.addresses.iter().map(IpAddr::to_string).collect()
    }

    #[test]
    fn links_between_hosts_are_subnets_of_two() {
        let plan = Plan::new().hosts(["a", "b"]).links("b", "a", 2, &Link::default());
        let layout = Layout::new(&plan).unwrap();
        let [a, b] = &layout.hosts[..] else { panic!() };
        assert_eq!(texts(&a.nics[1]), ["10.77.1.2", "fd77:0:0:1::2"]);
        assert_eq!(texts(&b.nics[0]), ["10.77.0.1", "fd77::1"]);
        assert_eq!((a.nics[1].name.as_str(), a.nics[1].link), ("eth1", 1));
        assert_eq!(a.addresses(), ["10.77.0.2", "10.77.1.2"].map(|a| a.parse::<IpAddr>().unwrap()));
    }

    #[test]
    fn a_switch_is_a_subnet_of_all() {
        let link = Link { families: vec![Family::Ipv4], ..Link::default() };
        let plan = Plan::new().hosts(["a", "b", "c"]).switch("s");
        let plan = plan.links("*", "s", 1, &link).links("a", "b", 1, &link);
        let layout = Layout::new(&plan).unwrap();
        let first: Vec<_> = layout.hosts.iter().map(|host| texts(&host.nics[0])).collect();
        assert_eq!(first, [["10.77.0.1"], ["10.77.0.2"], ["10.77.0.3"]]);
        assert_eq!(layout.links[2].ends, [End::Nic(2, 0), End::Port(0, "s-3".to_owned())]);
        assert_eq!(texts(&layout.hosts[1].nics[1]), ["10.77.1.2"]);
    }

    #[test]
    fn bad_plans_are_refused() {
        let hosts = || Plan::new().hosts(["a", "b"]).switch("s");
        let with = |link: Link| hosts().links("a", "b", 1, &link);
        let usual = Link::default();
        let routed = |one, at: &str, other, to: &str| {
            let ends = [(one, at.parse().unwrap()), (other, to.parse().unwrap())];
            hosts().routed_link(ends, &usual)
        };
        let many: Vec<String> = (0..251).map(|host| format!("h{host}")).collect();
        for (plan, words) in [
            (Plan::new(), "no hosts"),
            (Plan::new().hosts(["a b"]), "\"a b\""),
            (Plan::new().hosts(["-a"]), "\"-a\""),
            (Plan::new().hosts(["a$(x)"]), "a$(x)"),
            (Plan::new().hosts(["a".repeat(33)]), "aaa"),
            (Plan::new().hosts(["a"]).switch("waytoolong"), "waytoolong"),
            (Plan::new().hosts(["a", "a"]), "two of the name a"),
            (Plan::new().hosts(["a"]).switch("a"), "two of the name a"),
            (Plan::new().hosts(many), "251 hosts, more than 250"),
            (hosts().links("a", "c", 1, &usual), "ends at c"),
            (hosts().links("c", "s", 1, &usual), "ends at c"),
            (hosts().links("a", "a", 1, &usual), "between a and a"),
            (hosts().links("s", "s", 1, &usual), "between s and s"),
            (hosts().links("*", "s", 2, &usual), "a is linked to s twice"),
            (hosts().links("a", "b", 251, &usual), "251 subnets, more than 250"),
            (with(Link { mtu: 1279, ..usual.clone() }), "MTU of 1279"),
            (with(Link { mtu: 65_536, ..usual.clone() }), "MTU of 65536"),
            (with(Link { families: Vec::new(), ..usual.clone() }), "no family"),
            (with(Link { loss: f64::NAN, ..usual.clone() }), "loss of NaN"),
            (with(Link { delay: Some("1ms;reboot".into()), ..usual.clone() }), "delay of"),
            (hosts().router("c"), "c is to be a router"),
            (routed("a", "10.0.0.1", "c", "10.0.0.2"), "ends at c"),
            (routed("a", "10.0.0.1", "s", "10.0.0.2"), "ends at s"),
            (routed("a", "10.0.0.1", "a", "10.0.0.2"), "between a and a"),
            (routed("a", "10.0.0.1", "b", "fd00::2"), "10.0.0.1 and fd00::2"),
        ] {
            let error = Layout::new(&plan).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
