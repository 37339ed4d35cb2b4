//! The server's side until a client has come: strangers do not keep it from its client.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use millstream_metadata::{Acceptor, AcceptorConfig, Connection};
use millstream_net::address::local_address_for;

use super::exchange::{QueuePairAddress, Waiting};
use super::patience::Patience;
use crate::device::Chosen;
use crate::failure::sentence;
use crate::note::note;
use crate::retry;

/// Strangers and clients that are heard out at a time.
const CONNECTIONS_MAX: usize = 32;
/// How long one of them may keep silent when others wait for its place.
const SILENCE_ALLOWED: Duration = Duration::from_millis(500);
/// Clients that wait for their turn; more wait as long as they keep a place of those above.
const CLIENTS_MAX: usize = 16;
/// So many strangers are told one by one; after that, each time they have doubled.
const STRANGERS_TOLD: u64 = 8;

/// A server that listens.
pub(super) struct Server {
    // These two are dropped before the acceptor, whose threads then have nobody to tell.
    found: Receiver<Result<Waiting, Stranger>>,
    /// One for each that was found: there is room for so many.
    rooms: Receiver<()>,
    acceptor: Acceptor,
    /// Who waits for his turn.
    queue: VecDeque<Waiting>,
    /// Which device is opened depends on the client.
    opens_for_client: bool,
    patience: Patience,
    strangers: u64,
}

/// Someone who is no client, and why.
struct Stranger {
    peer: SocketAddr,
    why: String,
}

impl Server {
    /// Listens on the address that was chosen, or on all of them.
    pub(super) fn listen(chosen: &Chosen, port: u16, patience: Patience) -> anyhow::Result<Self> {
        let address = chosen.address();
        let bind = || match address {
            Some(address) => TcpListener::bind((address, port)),
            // Takes IPv4 too; a machine without IPv6 has to say so.
            None => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
                .or_else(|_| TcpListener::bind(("0.0.0.0", port))),
        };
        let listener = retry::until(patience.until(), retry::is_address_in_use, || {
            let place = address.map_or_else(String::new, |address| format!(" of {address}"));
            bind().with_context(|| {
                format!("cannot listen on TCP port {port}{place}: choose another with --port")
            })
        })?;
        let (sender, found) = channel();
        let (room, rooms) = sync_channel(CLIENTS_MAX);
        let timeout = patience.timeout;
        let hear = move |connection: &Connection| {
            let peer = connection.client();
            let heard = connection.stream().try_clone().map_err(|error| error.to_string());
            let heard = heard
                .and_then(|stream| {
                    Waiting::hear(stream, peer, timeout).map_err(|mistake| mistake.to_string())
                })
                .map_err(|why| Stranger { peer, why });
            let has_room = match &heard {
                // It has said what it had to, and waits for its turn.
                Ok(_) => {
                    connection.heard();
                    room.send(()).is_ok()
                }
                // Of that many, they are not all told.
                Err(_) => room.try_send(()).is_ok(),
            };
            if has_room {
                // From here on its connection is not for the acceptor to close.
                connection.release();
                let _ = sender.send(heard);
            }
        };
        let limits =
            AcceptorConfig { max_connections: CONNECTIONS_MAX, silence_allowed: SILENCE_ALLOWED };
        let acceptor = Acceptor::start(listener, limits, hear).context("cannot start a thread")?;
        note(&format!("waiting for a client at {}", acceptor.address()));
        Ok(Self {
            found,
            rooms,
            acceptor,
            queue: VecDeque::new(),
            opens_for_client: chosen.any_peer().is_none(),
            patience,
            strangers: 0,
        })
    }

    /// Waits for a client, as long as was asked for, and gives it the address that `connect` returns.
    ///
    /// `open` makes what is to be connected, for a client with this address; `connect` connects it.
    /// Where one of them fails because of the client, the next one is waited for.
    pub(super) fn serve<T>(
        mut self,
        mut open: impl FnMut(IpAddr) -> anyhow::Result<T>,
        mut connect: impl FnMut(&mut T, &QueuePairAddress) -> anyhow::Result<QueuePairAddress>,
    ) -> anyhow::Result<(T, QueuePairAddress, TcpStream)> {
        let wait = self.patience.wait;
        let until = wait.and_then(|wait| Instant::now().checked_add(wait));
        loop {
            let waiting = self.next(until)?;
            let (peer, theirs) = (waiting.peer, waiting.address);
            let address = match reachable(&theirs, self.opens_for_client) {
                Ok(address) => address,
                Err(error) => {
                    self.refuse(waiting, &error);
                    continue;
                }
            };
            let mut opened = match open(address) {
                Ok(opened) => opened,
                Err(error) if self.opens_for_client => {
                    self.refuse(waiting, &error);
                    continue;
                }
                // It would fail for any other too.
                Err(error) => {
                    waiting.refuse(&sentence(&error));
                    return Err(error.context(format!("client {peer} cannot be served")));
                }
            };
            let ours = match connect(&mut opened, &theirs) {
                Ok(ours) => ours,
                Err(error) => {
                    self.refuse(waiting, &error);
                    continue;
                }
            };
            self.gather();
            match waiting.answer(&ours, !self.queue.is_empty()) {
                Ok(stream) => return Ok((opened, theirs, stream)),
                Err(mistake) => self.tell(&Stranger { peer, why: mistake.to_string() }),
            }
        }
    }

    /// The next client; strangers are told meanwhile.
    fn next(&mut self, until: Option<Instant>) -> anyhow::Result<Waiting> {
        loop {
            if let Some(waiting) = self.queue.pop_front() {
                return Ok(waiting);
            }
            let found = match until {
                None => self.found.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(until) => {
                    self.found.recv_timeout(until.saturating_duration_since(Instant::now()))
                }
            };
            match found {
                Ok(heard) => self.enter(heard),
                Err(RecvTimeoutError::Timeout) => bail!(
                    "no client came to {} within the {:?} of --wait",
                    self.acceptor.address(),
                    self.patience.wait.unwrap_or_default()
                ),
                Err(RecvTimeoutError::Disconnected) => bail!("nobody listens any more"),
            }
        }
    }

    /// Enters those that were found already.
    fn gather(&mut self) {
        while self.queue.len() < CLIENTS_MAX
            && let Ok(heard) = self.found.try_recv()
        {
            self.enter(heard);
        }
    }

    fn enter(&mut self, heard: Result<Waiting, Stranger>) {
        // Its room is free for another.
        let _ = self.rooms.try_recv();
        match heard {
            Ok(waiting) => self.queue.push_back(waiting),
            Err(stranger) => self.tell(&stranger),
        }
    }

    fn refuse(&mut self, waiting: Waiting, error: &anyhow::Error) {
        let (peer, why) = (waiting.peer, sentence(error));
        waiting.refuse(&why);
        note(&format!("client {peer} is refused, and another one waited for: {why}"));
    }

    fn tell(&mut self, Stranger { peer, why }: &Stranger) {
        self.strangers += 1;
        let count = self.strangers;
        if count <= STRANGERS_TOLD {
            note(&format!("{peer} is no client ({why}); still waiting for one"));
        } else if count.is_power_of_two() {
            note(&format!(
                "{count} who have connected were no clients, the last one {peer} ({why})"
            ));
        }
    }
}

/// The client's address, if there is a way to it, from a soft device or from one of the system's.
fn reachable(client: &QueuePairAddress, soft: bool) -> anyhow::Result<IpAddr> {
    let at = client.port()?;
    // Some devices of RoCE say a LID, too: for a soft device the system's routes count.
    if at.is_infiniband() && !soft {
        // The system's routes are those of IP. Whether the device gets there shows when they are connected.
        return Ok(at.ip);
    }
    let address = at.ip;
    local_address_for(address).with_context(|| format!("there is no way to its GID, {at}"))?;
    Ok(address)
}

#[cfg(test)]
mod tests {
    use millstream_verbs::{PortAddress, Psn, Qpn};

    use super::*;

    #[test]
    fn a_client_of_infiniband_is_for_a_device_of_the_system() {
        let at = PortAddress { ip: "fe80::2:c903:a0:1".parse().unwrap(), lid: 7 };
        let client = QueuePairAddress::new(at, Qpn::new(17), Psn::new(0));
        assert_eq!(reachable(&client, false).unwrap(), at.ip);
        let error = reachable(&client, true).unwrap_err().to_string();
        assert!(error.contains("fe80::2:c903:a0:1 (InfiniBand, LID 0x0007)"), "{error}");
    }
}
