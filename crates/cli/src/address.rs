//! Which local address a command's RDMA device gets, and which addresses host names have.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::Context;
use millstream_collective::Controllers;
use millstream_metadata::Resolver;
use millstream_net::address::{first_free_loopback, local_address_for};
use millstream_verbs::{Device, IbverbsConfig, Provider, SoftConfig};
use thiserror::Error;

use crate::failure::usage;

/// The UDP port of RoCEv2.
pub(crate) const ROCE_PORT: u16 = millstream_wire::ROCE_PORT;

/// How often another free loopback address is tried when a process takes the one just found.
pub(crate) const ATTEMPTS: usize = 16;

/// How long a host name may take to be looked up where no option says it.
pub(crate) const LOOKUP_TIME: Duration = Duration::from_secs(10);

/// In place of times that no clock has.
const YEARS: Duration = Duration::from_secs(1 << 30);

/// There is no loopback address left. Said of loopback only: elsewhere an address is not one of
/// many, and the device's error says what to do.
#[derive(Debug, Error)]
pub(crate) enum NoneFree {
    #[error(
        "UDP port {ROCE_PORT} is in use on all of 127.0.0.1 to 127.0.0.254: give another address \
         of 127.0.0.0/8 with --bind"
    )]
    Loopback,
    #[error("other processes keep taking the free addresses of 127.0.0.x: choose one with --bind")]
    Contended,
}

/// Whether [`towards`] chooses among many addresses for this peer.
pub(crate) fn is_one_of_many(peer: IpAddr) -> bool {
    peer.is_loopback() && peer.is_ipv4()
}

/// The address to use towards `peer`: on loopback the first that is free of 127.0.0.1 and up, so that a
/// capture tells processes apart, else the one that the routing table says, which processes share.
pub(crate) fn towards(peer: IpAddr) -> anyhow::Result<IpAddr> {
    if is_one_of_many(peer) {
        return Ok(first_free_loopback(ROCE_PORT).ok_or(NoneFree::Loopback)?.into());
    }
    local_address_for(peer).with_context(|| format!("no local address leads to {peer}"))
}

/// As [`towards`]; on loopback the first of the system's RDMA devices that works, when that provider
/// is asked for: none of them has a loopback address.
pub(crate) fn of_provider_towards(
    provider: Option<Provider>,
    ibverbs: &IbverbsConfig,
    peer: IpAddr,
) -> anyhow::Result<IpAddr> {
    if provider == Some(Provider::Ibverbs) && peer.is_loopback() {
        return Ok(Device::open_ibverbs(ibverbs)?.address());
    }
    towards(peer)
}

/// A host name has no address, or none that can be found out in time.
#[derive(Debug, Error)]
#[error("the name {host} does not resolve ({error}): {}", advice(error))]
pub(crate) struct LookupError {
    host: String,
    error: io::Error,
}

/// What to do about a name that does not resolve.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::TimedOut => {
            "is the name server up? (`getent hosts NAME` asks it; an address in place of the name \
             needs none)"
        }
        _ => "is it spelled right?",
    }
}

/// Until when a host is looked up that may take so long, from now on.
pub(crate) fn lookup_deadline(time: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(time).unwrap_or(now + YEARS)
}

/// The addresses of a host, one at least, with this port. The system's resolver has no deadline that is known.
pub(crate) fn look_up(
    host: &str,
    port: u16,
    deadline: Instant,
) -> Result<Vec<SocketAddr>, LookupError> {
    look_up_with(&Resolver::system(), host, port, deadline)
}

fn look_up_with(
    resolver: &Resolver,
    host: &str,
    port: u16,
    deadline: Instant,
) -> Result<Vec<SocketAddr>, LookupError> {
    let failed = |error: io::Error| LookupError { host: host.to_owned(), error };
    let found = resolver.resolve_until(host, deadline).map_err(failed)?;
    if found.is_empty() {
        return Err(failed(io::Error::new(io::ErrorKind::NotFound, "it has no address")));
    }
    let with_port = |mut address: SocketAddr| {
        address.set_port(port);
        address
    };
    Ok(found.iter().copied().map(with_port).collect())
}

/// The address of `HOST:PORT`.
fn resolve(text: &str, deadline: Instant) -> anyhow::Result<SocketAddr> {
    let place = text.rsplit_once(':');
    let place = place.and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    let Some((host, port)) = place else {
        return Err(usage(format!(
            "{text} is not the address of a controller: write HOST:PORT, with a port up to 65535"
        )));
    };
    // IPv6 addresses have brackets.
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let found = look_up(host, port, deadline);
    Ok(found.with_context(|| format!("cannot find the address of {text}"))?[0])
}

/// The addresses of controllers: `HOST:PORT[,HOST:PORT]`. To look their names up may take so long.
pub(crate) fn resolve_controllers(text: &str, time: Duration) -> anyhow::Result<Controllers> {
    let deadline = lookup_deadline(time);
    let addresses = text.split(',').map(|text| resolve(text, deadline));
    let addresses: Vec<SocketAddr> = addresses.collect::<Result<_, _>>()?;
    Controllers::new(addresses).map_err(|error| usage(format!("{text}: {error}")))
}

/// Opens a soft device on `bind`, or else on an address that leads to `peer`, configured as
/// `config` says for that address.
pub(crate) fn open_device(
    bind: Option<IpAddr>,
    peer: IpAddr,
    config: impl Fn(IpAddr) -> SoftConfig,
) -> anyhow::Result<Device> {
    for _ in 0..ATTEMPTS {
        let address = match bind {
            Some(address) => address,
            None => towards(peer)?,
        };
        match Device::open_soft(&config(address)) {
            Err(error) if error.is_in_use() && bind.is_none() && is_one_of_many(peer) => {}
            result => return Ok(result?),
        }
    }
    Err(NoneFree::Contended.into())
}

/// A soft device's name carries its address: `soft-127.0.0.2`.
pub(crate) fn of_device(name: &str) -> Option<IpAddr> {
    name.strip_prefix("soft-")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use super::*;

    #[test]
    fn names_have_addresses_with_the_port() {
        let resolver = Resolver::new(|_| Ok(vec![([127, 0, 0, 9], 0).into()]));
        let found = look_up_with(&resolver, "node", 7, lookup_deadline(Duration::MAX)).unwrap();
        assert_eq!(found, [SocketAddr::from(([127, 0, 0, 9], 7))]);
        let resolver = Resolver::new(|_| Ok(Vec::new()));
        let error = look_up_with(&resolver, "node", 7, lookup_deadline(LOOKUP_TIME)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the name node does not resolve (it has no address): is it spelled right?"
        );
    }

    #[test]
    fn a_resolver_that_does_not_answer_is_waited_for_until_the_deadline() {
        let (answer, answered) = mpsc::channel::<()>();
        let answered = Mutex::new(answered);
        let resolver = Resolver::new(move |_| {
            // Until the end of the test.
            let _ = answered.lock().unwrap().recv();
            Ok(Vec::new())
        });
        let deadline = lookup_deadline(Duration::from_millis(20));
        let error = look_up_with(&resolver, "node", 7, deadline).unwrap_err().to_string();
        assert!(error.contains("the name node does not resolve"), "{error}");
        assert!(error.contains("getent hosts"), "{error}");
        drop(answer);
    }

    #[test]
    fn addresses_of_controllers_are_no_names() {
        for text in ["127.0.0.1:5", "[::1]:5"] {
            let controllers = resolve_controllers(text, Duration::ZERO).unwrap();
            assert_eq!(controllers.first(), text.parse::<SocketAddr>().unwrap());
        }
    }
}
