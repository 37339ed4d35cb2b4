//! From a topology file to hosts, links and daemons.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use millstream_control::topology_file::{ControllerPlace, LabSettings, TopologyFile};
use millstream_inc::topology::{Link, LinkRate, Lower, Topology, TopologySwitch};
use millstream_lab::{Family, ParseRateError, Plan, Rate};
use thiserror::Error;

/// The bridge over which all machines reach the controller, and the name of the controller's own machine.
const MANAGEMENT: &str = "mgmt";
pub(super) const CONTROLLER: &str = "controller";

/// No machine has links of its own that are faster: more is no limit.
const FASTEST: u64 = 1_000_000_000_000;

/// What a file describes.
#[derive(Debug)]
pub(super) struct Network {
    /// The machine of the controller is the first.
    pub(super) plan: Plan,
    pub(super) controller: String,
    pub(super) switches: Vec<Switch>,
    /// What people should know.
    pub(super) warnings: Vec<String>,
}

/// A switch that is to be started.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Switch {
    pub(super) machine: String,
    /// The name that it registers with, where the file has one.
    pub(super) name: Option<String>,
    pub(super) bind: IpAddr,
}

/// Why a topology cannot be built on one machine, and what to do.
#[derive(Debug, Eq, Error, PartialEq)]
pub(super) enum NetworkError {
    #[error("{0} does not leave a machine: give the ends of links addresses such as 10.0.0.1")]
    Address(IpAddr),
    #[error(
        "{0} is of the network 10.77.0.0/24, by which a lab reaches its controller: use another address"
    )]
    Management(IpAddr),
    #[error("the link from {my_ip} to {peer_ip} is too slow for a lab: {source}")]
    Rate { my_ip: IpAddr, peer_ip: IpAddr, source: ParseRateError },
}

impl Network {
    /// Reads a file.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let TopologyFile { topology, warnings, lab } = TopologyFile::read(path)?;
        let network = Self::new(&topology, &lab, warnings);
        network.map_err(|error| {
            anyhow::Error::new(error).context(format!("topology {}", path.display()))
        })
    }

    fn new(
        topology: &Topology,
        lab: &LabSettings,
        warnings: Vec<String>,
    ) -> Result<Self, NetworkError> {
        let switch = |switch: &TopologySwitch| format!("switch{}", switch.id);
        let controller = match lab.controller {
            ControllerPlace::Machine => CONTROLLER.to_owned(),
            ControllerPlace::Host(id) => format!("host{id}"),
            ControllerPlace::Switch(id) => format!("switch{id}"),
        };
        let hosts: BTreeSet<u64> = topology.links().iter().filter_map(host).collect();
        let machines = topology.switches().iter().map(switch);
        let machines = machines.chain(hosts.into_iter().map(|id| format!("host{id}")));
        let mut machines: Vec<String> = machines.filter(|name| *name != controller).collect();
        machines.insert(0, controller.clone());

        let mut plan = Plan::new().hosts(machines.iter().cloned()).switch(MANAGEMENT);
        for name in topology.switches().iter().map(switch) {
            plan = plan.router(&name);
        }
        for link in topology.links() {
            let lower = match link.lower {
                Lower::Host(id) => format!("host{id}"),
                Lower::Switch(index) => switch(&topology.switches()[index]),
            };
            let upper = switch(&topology.switches()[link.upper]);
            let ends = [(&*upper, link.upper_address), (&*lower, link.lower_address)];
            ends.iter().try_for_each(|&(_, address)| check(address))?;
            plan = plan.routed_link(ends, &in_lab(link, lab)?);
        }
        let management = millstream_lab::Link {
            families: vec![Family::Ipv4],
            ..millstream_lab::Link::default()
        };
        for machine in &machines {
            plan = plan.links(machine, MANAGEMENT, 1, &management);
        }
        let serves = serving_addresses(topology);
        let switches = topology.switches().iter().enumerate();
        let switches = switches.filter_map(|(index, it)| {
            Some(Switch { machine: switch(it), name: it.name.clone(), bind: *serves.get(&index)? })
        });
        Ok(Self { plan, controller, switches: switches.collect(), warnings })
    }
}

fn host(link: &Link) -> Option<u64> {
    match link.lower {
        Lower::Host(id) => Some(id),
        Lower::Switch(_) => None,
    }
}

/// Where each switch serves: at its first address.
fn serving_addresses(topology: &Topology) -> BTreeMap<usize, IpAddr> {
    let switches = topology.switches().iter().enumerate();
    switches.filter_map(|(index, it)| Some((index, *it.addresses.first()?))).collect()
}

fn check(address: IpAddr) -> Result<(), NetworkError> {
    let stays = match address {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local(),
    };
    match address {
        _ if stays => Err(NetworkError::Address(address)),
        IpAddr::V4(v4) if v4.octets()[..3] == [10, 77, 0] => Err(NetworkError::Management(address)),
        _ => Ok(()),
    }
}

/// A link with what the settings say of it.
fn in_lab(link: &Link, lab: &LabSettings) -> Result<millstream_lab::Link, NetworkError> {
    let usual = millstream_lab::Link::default();
    let limit = link.rate.or(lab.rate).map(LinkRate::bits_per_s).filter(|&rate| rate <= FASTEST);
    let rate = limit.map(|bits| format!("{bits}bit").parse::<Rate>()).transpose();
    let rate = rate.map_err(|source| {
        let (my_ip, peer_ip) = (link.upper_address, link.lower_address);
        NetworkError::Rate { my_ip, peer_ip, source }
    })?;
    Ok(millstream_lab::Link { rate, mtu: lab.mtu.unwrap_or(usual.mtu), ..usual })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Result<Network, NetworkError> {
        let file = TopologyFile::parse(Path::new("t.yaml"), text).unwrap();
        Network::new(&file.topology, &file.lab, file.warnings)
    }

    const FILE: &str = "
        switches:
          - {id: 7, name: top, connections: [{up: false, my_ip: 10.1.0.7, peer_ip: 10.1.0.9}]}
          - {id: 9, connections: [{up: false, host_id: 3, my_ip: 10.1.0.9, peer_ip: 10.0.0.3, rate: 2gbit},
                                  {up: false, host_id: 1, my_ip: 10.1.0.9, peer_ip: 10.0.0.1}]}
        lab: {rate: 100mbit, mtu: 9000}
";

    #[test]
    fn a_file_is_machines_links_and_switches() {
        let network = network(FILE).unwrap();
        let bind = |address: &str| address.parse().unwrap();
        assert_eq!(
            network.switches,
            [
                Switch {
                    machine: "switch7".to_owned(),
                    name: Some("top".to_owned()),
                    bind: bind("10.1.0.7")
                },
                Switch { machine: "switch9".to_owned(), name: None, bind: bind("10.1.0.9") },
            ]
        );
        let layout = millstream_lab::Layout::new(&network.plan).unwrap();
        let names: Vec<&str> = layout.hosts.iter().map(|host| &*host.name).collect();
        assert_eq!(names, ["controller", "switch7", "switch9", "host1", "host3"]);
        // Links of the file come first, and the controller is always at one address.
        assert_eq!(layout.hosts[0].addresses(), [bind("10.77.0.1")]);
        assert_eq!(layout.hosts[2].addresses()[..3], [bind("10.1.0.9"); 3]);
        assert_eq!(layout.hosts[3].nics[0].peer, Some(bind("10.1.0.9")));
    }

    #[test]
    fn a_controller_can_be_at_a_host() {
        let network = network(&FILE.replace("mtu: 9000", "controller: host3")).unwrap();
        let layout = millstream_lab::Layout::new(&network.plan).unwrap();
        let names: Vec<&str> = layout.hosts.iter().map(|host| &*host.name).collect();
        assert_eq!(
            (&*network.controller, names),
            ("host3", vec!["host3", "switch7", "switch9", "host1"])
        );
    }

    #[test]
    fn what_cannot_be_on_one_machine_is_refused() {
        for (address, words) in [
            ("127.0.0.9", "127.0.0.9 does not leave a machine"),
            ("169.254.0.1", "169.254.0.1 does not leave"),
            ("10.77.0.9", "10.77.0.9 is of the network 10.77.0.0/24"),
        ] {
            let error = network(&FILE.replace("10.1.0.9", address)).unwrap_err().to_string();
            assert!(error.starts_with(words), "{error}");
        }
        let error = network(&FILE.replace("2gbit", "1kbit")).unwrap_err().to_string();
        assert!(error.contains("10.1.0.9 to 10.0.0.3") && error.contains("8kbit"), "{error}");
        // More than a machine can do is no limit.
        network(&FILE.replace("2gbit", "400tbit")).unwrap();
    }
}
