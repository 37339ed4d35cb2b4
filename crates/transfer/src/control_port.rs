//! The control port: where an engine answers its peers, at the address of its name and, if that is one of its NICs', at
//! those of all. Fences are asked for there, so it has to be reached when one NIC is cut off.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};

use millstream_metadata::{Gate, Handler, Server, ServerConfig};

use crate::listen::listen_at;

/// The servers of an engine, all with one port and one handler. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct ControlPort {
    address: SocketAddr,
    config: ServerConfig,
    backlog: u16,
    servers: Mutex<Vec<Server>>,
}

impl ControlPort {
    /// Answers at a socket that listens.
    pub(crate) fn new(
        listener: TcpListener,
        config: ServerConfig,
        backlog: u16,
        gate: Option<Gate>,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let server = Server::guarded(listener, config, gate, handler)?;
        Ok(Self { address, config, backlog, servers: Mutex::new(vec![server]) })
    }

    /// Where it was begun to listen.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers at these addresses of NICs, too, by the same port, if its own is one of them: who is to be asked at
    /// another network, or on this machine only, stays so. Where the port is taken, peers have the others.
    pub(crate) fn listen_also(
        &self,
        addresses: &[IpAddr],
        gate: impl Fn() -> Option<Gate>,
        handler: &Arc<dyn Handler>,
    ) {
        if !addresses.contains(&self.address.ip()) {
            return;
        }
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        for &address in addresses {
            let at = SocketAddr::new(address, self.address.port());
            if servers.iter().any(|server| server.address() == at) {
                continue;
            }
            let server = listen_at(at, self.backlog).and_then(|listener| {
                Server::guarded(listener, self.config, gate(), Arc::clone(handler))
            });
            match server {
                Ok(server) => servers.push(server),
                Err(error) => {
                    tracing::warn!(%at, %error, "peers cannot ask here, should other NICs be cut off");
                }
            }
        }
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
