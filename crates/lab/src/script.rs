//! What `ip` and `tc` are told.

use std::fmt::Write as _;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::layout::{End, Host, Layout, PlacedLink};
use crate::routes::Route;
use crate::{Family, Link, Rate};

/// The number of the table of routes for what comes from the address of the first NIC; the next one's is one more.
const FIRST_TABLE: usize = 100;

/// The largest packet that segmentation offload makes, with headers: a bucket of tokens holds one.
const LARGEST_PACKET: u64 = 66 << 10;

/// How much of its time a link stores when it is busy.
const QUEUE_US: u64 = 20_000;

/// How a link is cut.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cut {
    /// The interface at the host's end is down: the host knows at once, and at the other end the
    /// carrier is gone.
    Down,
    /// Packets vanish in both directions, and nobody is told.
    Silent,
}

/// The script that makes switches and links, to be run where the switches are. The hosts' network
/// namespaces are those of these processes.
pub(crate) fn links(layout: &Layout, holders: &[u32]) -> String {
    let mut ip = String::new();
    for switch in &layout.switches {
        line(&mut ip, format_args!("link add {switch} type bridge mcast_snooping 0"));
        line(&mut ip, format_args!("link set {switch} addrgenmode none up"));
    }
    for PlacedLink { ends, link } in &layout.links {
        let [one, other] = ends.each_ref().map(|end| match end {
            End::Nic(host, _) => {
                format!("name {} mtu {} netns {}", layout.interface(end), link.mtu, holders[*host])
            }
            End::Port(..) => format!("name {} mtu {}", layout.interface(end), link.mtu),
        });
        line(&mut ip, format_args!("link add {one} type veth peer {other}"));
        if let End::Port(switch, port) = &ends[1] {
            let switch = &layout.switches[*switch];
            line(&mut ip, format_args!("link set {port} master {switch} addrgenmode none up"));
        }
    }
    let tc = queues(layout, |end| matches!(end, End::Port(..)));
    script("", &ip, &tc)
}

/// The script that makes a host out of its network namespace with links.
pub(crate) fn host(layout: &Layout, index: usize) -> String {
    // The default of new namespaces is this one's or the first one's. IPv6 addresses stay while the
    // interface is down, as IPv4's do.
    let settings = "\
for setting in ipv4/conf/all/rp_filter ipv4/conf/default/rp_filter ipv6/conf/all/disable_ipv6 \
ipv6/conf/default/disable_ipv6; do echo 0 >/proc/sys/net/$setting 2>/dev/null || true; done
for place in all default; do
echo 1 >/proc/sys/net/ipv6/conf/$place/keep_addr_on_down 2>/dev/null || true
done
";
    // Without these, it would pass nothing on, and nobody would be told.
    let passes_on = "\
echo 1 >/proc/sys/net/ipv4/ip_forward
if [ -e /proc/sys/net/ipv6/conf/all/forwarding ]; then echo 1 >/proc/sys/net/ipv6/conf/all/forwarding; fi
";
    let mut ip = String::new();
    line(&mut ip, format_args!("link set lo up"));
    let host = &layout.hosts[index];
    for nic in &host.nics {
        let name = &nic.name;
        line(&mut ip, format_args!("link set {name} addrgenmode none up"));
        for (address, family) in nic.addresses.iter().zip(&layout.links[nic.link].link.families) {
            let ends = match nic.peer {
                Some(peer) => format!("{address} peer {peer}"),
                None => address.to_string(),
            };
            let (prefix, nodad) = match (family, nic.peer) {
                (Family::Ipv4, None) => (24, ""),
                (Family::Ipv4, Some(_)) => (32, ""),
                // Nobody else can have it, and nobody has the time to find out.
                (Family::Ipv6, None) => (64, " nodad"),
                (Family::Ipv6, Some(_)) => (128, " nodad"),
            };
            line(&mut ip, format_args!("address add {ends}/{prefix} dev {name}{nodad}"));
        }
    }
    let tc = queues(layout, |end| matches!(end, End::Nic(host, _) if *host == index));
    let passes_on = if host.is_router { passes_on } else { "" };
    script(&format!("{settings}{passes_on}"), &ip, &tc)
        + &rules(host)
        + &routes(layout, index, |_| true)
}

/// Has what comes from some addresses looked up in tables of their own.
fn rules(host: &Host) -> String {
    let own = host.routes.iter().filter(|route| route.own_source);
    families(own, |route| {
        let (address, table) = (host.nics[route.nic].addresses[0], FIRST_TABLE + route.nic);
        format!("rule add from {address} lookup {table}")
    })
}

/// The ways of a host over the NICs that are wanted, of which each must be up. An interface that goes down loses them.
pub(crate) fn routes(layout: &Layout, number: usize, wanted: impl Fn(usize) -> bool) -> String {
    let host = &layout.hosts[number];
    // Of IPv6, the kernel forgets ways to other ends, and addresses of the link, from which it looks for neighbors of
    // what it passes on (RFC 4861, section 7.2.2).
    let mut peers = String::new();
    for (_, nic) in host.nics.iter().enumerate().filter(|(index, _)| wanted(*index)) {
        if let Some(peer @ IpAddr::V6(_)) = nic.peer {
            let (own, name) = (number + 1, &nic.name);
            line(&mut peers, format_args!("address replace fe80::{own:x}/64 dev {name} nodad"));
            line(&mut peers, format_args!("route replace {peer}/128 dev {name}"));
        }
    }
    batch("ip -6", &peers)
        + &families(host.routes.iter().filter(|route| wanted(route.nic)), |route| {
            let to = route.to.map_or_else(|| "default".to_owned(), |to| to.to_string());
            let (via, nic) = (route.via, &host.nics[route.nic].name);
            let table = match route.own_source {
                true => format!(" table {}", FIRST_TABLE + route.nic),
                false => String::new(),
            };
            format!("route replace {to} via {via} dev {nic} onlink{table}")
        })
}

/// A line for each of these routes, told to the `ip` of its family.
fn families<'a>(
    routes: impl Iterator<Item = &'a Route>,
    text: impl Fn(&Route) -> String,
) -> String {
    let mut lines = [String::new(), String::new()];
    for route in routes {
        line(&mut lines[usize::from(route.via.is_ipv6())], format_args!("{}", text(route)));
    }
    batch("ip", &lines[0]) + &batch("ip -6", &lines[1])
}

/// The script that brings one end of a link into a state.
pub(crate) fn change(interface: &str, is_nic: bool, link: &Link, cut: Option<Cut>) -> String {
    let mut ip = String::new();
    if is_nic {
        let state = if cut == Some(Cut::Down) { "down" } else { "up" };
        line(&mut ip, format_args!("link set {interface} {state}"));
    }
    let tc = match cut {
        Some(Cut::Silent) => format!("qdisc replace dev {interface} root blackhole\n"),
        _ => queue(interface, link),
    };
    script("", &ip, &tc)
}

impl Layout {
    /// The name of the interface at an end, in its own network namespace.
    pub(crate) fn interface<'a>(&'a self, end: &'a End) -> &'a str {
        match end {
            End::Nic(host, nic) => &self.hosts[*host].nics[*nic].name,
            End::Port(_, port) => port,
        }
    }
}

/// What `tc` is told about the ends that are wanted. A new interface needs no word for no limit.
fn queues(layout: &Layout, wanted: impl Fn(&End) -> bool) -> String {
    let limited = layout.links.iter().filter(|placed| needs_queue(&placed.link));
    let ends = limited.flat_map(|placed| placed.ends.iter().map(move |end| (end, &placed.link)));
    ends.filter(|(end, _)| wanted(end))
        .map(|(end, link)| queue(layout.interface(end), link))
        .collect()
}

fn needs_queue(link: &Link) -> bool {
    link.rate.is_some() || needs_netem(link)
}

fn needs_netem(link: &Link) -> bool {
    link.delay.is_some() || link.loss > 0.0
}

/// What gives an interface the rate, the delay and the loss of its link.
fn queue(interface: &str, link: &Link) -> String {
    let mut tc = String::new();
    let netem = |place: &str| {
        let delay = link.delay.as_ref().map(|delay| format!(" delay {delay}")).unwrap_or_default();
        let loss = if link.loss > 0.0 { format!(" loss {}%", link.loss) } else { String::new() };
        format!("qdisc replace dev {interface} {place} netem limit 100000{delay}{loss}")
    };
    match link.rate {
        Some(rate) => {
            let (burst, limit) = bucket(rate);
            line(
                &mut tc,
                format_args!(
                    "qdisc replace dev {interface} root handle 1: tbf rate {rate} \
                     burst {burst} limit {limit}"
                ),
            );
            if needs_netem(link) {
                line(&mut tc, format_args!("{}", netem("parent 1:1 handle 10:")));
            }
        }
        None if needs_netem(link) => line(&mut tc, format_args!("{}", netem("root handle 10:"))),
        None => line(&mut tc, format_args!("qdisc replace dev {interface} root noqueue")),
    }
    tc
}

/// Bytes that may pass at once, and bytes that wait.
fn bucket(rate: Rate) -> (u64, u64) {
    let burst = rate.bytes_in_us(1_000).max(LARGEST_PACKET);
    (burst, rate.bytes_in_us(QUEUE_US).max(4 * LARGEST_PACKET))
}

fn script(first: &str, ip: &str, tc: &str) -> String {
    let mut script = format!("set -e\n{first}");
    for (program, lines) in [("ip", ip), ("tc", tc)] {
        script += &batch(program, lines);
    }
    script
}

/// Tells a program these lines, if there are any.
fn batch(program: &str, lines: &str) -> String {
    match lines {
        "" => String::new(),
        lines => format!("{program} -batch - <<'END'\n{lines}END\n"),
    }
}

fn line(batch: &mut String, words: std::fmt::Arguments<'_>) {
    writeln!(batch, "{words}").expect("a string grows");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Plan;

    fn fast() -> Link {
        Link { rate: Some(Rate::from_mbit(200)), mtu: 9000, ..Link::default() }
    }

    #[test]
    fn links_end_in_the_namespaces_of_their_hosts() {
        let plan = Plan::new().hosts(["a", "b"]).switch("s");
        let plan = plan.links("a", "b", 1, &fast()).links("b", "s", 1, &Link::default());
        let layout = Layout::new(&plan).unwrap();
        assert_eq!(
            links(&layout, &[71, 72]),
            "set -e\nip -batch - <<'END'\n\
             link add s type bridge mcast_snooping 0\n\
             link set s addrgenmode none up\n\
             link add name eth0 mtu 9000 netns 71 type veth peer name eth0 mtu 9000 netns 72\n\
             link add name eth1 mtu 1500 netns 72 type veth peer name s-1 mtu 1500\n\
             link set s-1 master s addrgenmode none up\nEND\n"
        );
        let script = host(&layout, 1);
        assert!(script.contains("address add 10.77.1.2/24 dev eth0\n"), "{script}");
        assert!(script.contains("address add fd77:0:0:1::2/64 dev eth0 nodad\n"), "{script}");
        assert!(
            script.ends_with(
                "tc -batch - <<'END'\n\
                 qdisc replace dev eth0 root handle 1: tbf rate 200mbit burst 67584 limit 500000\n\
                 END\n"
            ),
            "{script}"
        );
    }

    #[test]
    fn a_cut_is_undone_by_the_link_as_it_was() {
        let tc = |link: &Link, cut| change("eth0", true, link, cut);
        assert_eq!(
            tc(&fast(), Some(Cut::Silent)),
            "set -e\nip -batch - <<'END'\nlink set eth0 up\nEND\n\
             tc -batch - <<'END'\nqdisc replace dev eth0 root blackhole\nEND\n"
        );
        assert!(tc(&fast(), Some(Cut::Down)).contains("link set eth0 down\n"));
        assert!(tc(&fast(), None).contains("tbf rate 200mbit"));
        assert!(tc(&Link::default(), None).contains("root noqueue"));
        assert!(!change("s-1", false, &fast(), Some(Cut::Down)).contains("link set"));
    }

    #[test]
    fn delay_and_loss_are_behind_the_rate() {
        let far = Link { delay: Some("5ms".into()), loss: 0.5, ..fast() };
        let lines = queue("eth0", &far);
        assert!(lines.contains("root handle 1: tbf"), "{lines}");
        let netem = "parent 1:1 handle 10: netem limit 100000 delay 5ms loss 0.5%\n";
        assert!(lines.ends_with(netem), "{lines}");
        let unlimited = Link { rate: None, ..far };
        assert!(queue("eth0", &unlimited).contains("root handle 10: netem"));
    }
}
