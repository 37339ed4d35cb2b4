//! The control port: where an engine answers its peers, at the address of its name and, if that is one of its NICs', at
//! those of all. Fences are asked for there, so it has to be reached when one NIC is cut off.
//!
//! At the other NICs it has ports of their own, which the descriptor names: that of the name may be another engine's
//! there, or may become one's.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};

use millstream_metadata::{Gate, Handler, HostPort, Server, ServerConfig};

use crate::listen::listen;

/// Where peers can call an engine back without looking up a name, if they reach it by this one and it listens there. Who
/// listens everywhere and has the name of a host says so: peers take the address that its calls come from.
pub(crate) fn without_name(reached_at: &HostPort, listening: SocketAddr) -> SocketAddr {
    match reached_at.host.parse() {
        Ok(address) => SocketAddr::new(address, reached_at.port),
        Err(_) if listening.ip().is_unspecified() => {
            SocketAddr::new(listening.ip(), reached_at.port)
        }
        Err(_) => listening,
    }
}

/// The servers of an engine, all with one handler. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct ControlPort {
    address: SocketAddr,
    config: ServerConfig,
    ports: Option<RangeInclusive<u16>>,
    backlog: u16,
    servers: Mutex<Vec<Server>>,
}

impl ControlPort {
    /// Answers at a socket that listens. Others are looked for among these `ports`, if there are any.
    pub(crate) fn new(
        listener: TcpListener,
        config: ServerConfig,
        (ports, backlog): (Option<RangeInclusive<u16>>, u16),
        gate: Option<Gate>,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let server = Server::guarded(listener, config, gate, handler)?;
        Ok(Self { address, config, ports, backlog, servers: Mutex::new(vec![server]) })
    }

    /// Where it was begun to listen.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers at these addresses of NICs, too, if its own is one of them: who is to be asked at another network, or on
    /// this machine only, stays so. Where it cannot listen, peers have the others. Returns where it answers at NICs.
    pub(crate) fn listen_also(
        &self,
        nics: &[IpAddr],
        gate: impl Fn() -> Option<Gate>,
        handler: &Arc<dyn Handler>,
    ) -> Vec<SocketAddr> {
        let own = self.address;
        if own.ip().is_unspecified() {
            let heard = nics.iter().filter(|nic| nic.is_ipv4() == own.is_ipv4());
            return heard.map(|&nic| SocketAddr::new(nic, own.port())).collect();
        }
        if !nics.contains(&own.ip()) {
            return Vec::new();
        }
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        for &nic in nics {
            if servers.iter().any(|server| server.address().ip() == nic) {
                continue;
            }
            let at = SocketAddr::new(nic, 0);
            let server = listen(at, self.ports.as_ref(), self.backlog).and_then(|listener| {
                Server::guarded(listener, self.config, gate(), Arc::clone(handler))
            });
            match server {
                Ok(server) => servers.push(server),
                Err(error) => {
                    tracing::warn!(%nic, %error, "peers cannot ask here, should other NICs be cut off");
                }
            }
        }
        servers.iter().map(Server::address).collect()
    }

    /// Answers only where it was begun to.
    pub(crate) fn listen_there_only(&self) {
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        let others = servers.split_off(1);
        drop(servers);
        // Each waits for what it is answering.
        drop(others);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_called_back_is_called_at_an_address() {
        for (reached_at, listening, expected) in [
            ("192.0.2.1:7000", "192.0.2.1:7000", "192.0.2.1:7000"),
            // As where ports and addresses are translated.
            ("192.0.2.1:7000", "10.0.0.1:8000", "192.0.2.1:7000"),
            ("192.0.2.1:7000", "0.0.0.0:8000", "192.0.2.1:7000"),
            ("[2001:db8::1]:7000", "[::]:8000", "[2001:db8::1]:7000"),
            ("host:7000", "10.0.0.1:8000", "10.0.0.1:8000"),
            ("host:7000", "0.0.0.0:8000", "0.0.0.0:7000"),
            ("host:7000", "[::]:8000", "[::]:7000"),
        ] {
            let called = without_name(&reached_at.parse().unwrap(), listening.parse().unwrap());
            assert_eq!(called, expected.parse().unwrap(), "{reached_at} {listening}");
        }
    }
}
