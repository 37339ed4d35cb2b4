//! Who asks the kernel for the ways to peers, on a thread of its own.
//!
//! The kernel answers questions about routes and neighbours at once, but not without its locks, and
//! nobody's packets are to wait for those. An address that it does not know yet it finds out
//! itself, if somebody sends something there: an empty datagram. Its answer, and every later change,
//! is heard of by notices.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{io, mem};

use socket2::Socket;

use super::interface::Interface;
use super::netlink::{Neighbour, Netlink, Notices};
use super::table::{Answer, CAPACITY, Found, Table, Way};
use crate::ends_between_forks;
use crate::wake::Wake;

/// However much changes, known peers are not asked for again sooner than this.
const QUIET: Duration = Duration::from_millis(20);

/// Ways to peers, for whoever sends.
pub(super) struct Resolver {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    table: Mutex<Table>,
    /// Something was learnt about a peer.
    answered: Condvar,
    wake: Wake,
    stop: AtomicBool,
}

impl Resolver {
    /// `socket` is a UDP socket bound to `source`, by way of which the kernel is made to look for
    /// neighbours: it sends empty datagrams to `port`.
    pub(super) fn start(source: IpAddr, port: u16, socket: Socket) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            table: Mutex::new(Table::new(CAPACITY)),
            answered: Condvar::new(),
            wake: Wake::new()?,
            stop: AtomicBool::new(false),
        });
        let asker = Asker {
            shared: Arc::clone(&shared),
            netlink: Netlink::open()?,
            notices: Notices::open()?,
            source,
            port,
            socket,
            warned: false,
        };
        let builder = thread::Builder::new().name("neighbours".to_owned());
        let thread = builder.spawn(ends_between_forks(move || asker.run()))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The way to a peer, if it is known. If not, it will be asked for.
    pub(super) fn look_up(&self, peer: IpAddr) -> Option<Way> {
        let Found { way, ask } = self.shared.table().look_up(peer);
        if ask {
            self.shared.wake.request();
        }
        way
    }

    /// Waits as [`Resolver::wait_for`] does, if nobody has asked for this peer yet: who follows does
    /// not wait for one that may not be there.
    pub(super) fn introduce(&self, peer: IpAddr, patience: Duration) {
        if !self.shared.table().knows(peer) {
            self.wait_for(peer, patience);
        }
    }

    /// Waits until the way to a peer is known, or `patience` has passed; whether it is.
    pub(super) fn wait_for(&self, peer: IpAddr, patience: Duration) -> bool {
        let end = crate::now() + patience;
        let mut table = self.shared.table();
        loop {
            let Found { way, ask } = table.look_up(peer);
            if way.is_some() {
                return true;
            }
            if ask {
                // Writes an event, which waits for nobody.
                self.shared.wake.request();
            }
            let left = end.saturating_duration_since(crate::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.shared.answered.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Resolver {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake.request();
        if let Some(thread) = self.thread.take() {
            // Nothing is left to do for one that panicked.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Asker {
    shared: Arc<Shared>,
    netlink: Netlink,
    notices: Notices,
    source: IpAddr,
    port: u16,
    socket: Socket,
    /// It was said once that no way leads to somebody. Counters say how often.
    warned: bool,
}

impl Asker {
    fn run(mut self) {
        let mut peers = Vec::new();
        let mut asked_all = None;
        let mut doubt = false;
        loop {
            // First, so that whoever asks for the end afterwards finds this thread asleep or keeps
            // it from sleeping.
            self.shared.wake.take();
            if self.shared.stop.load(Ordering::SeqCst) {
                return;
            }
            doubt |= self.notices.take();
            let now = crate::now();
            let quiet_until = asked_all.map(|asked| asked + QUIET);
            if doubt && quiet_until.is_none_or(|until| until <= now) {
                self.shared.table().doubt();
                asked_all = Some(now);
                doubt = false;
            }
            self.shared.table().due(now, &mut peers);
            for peer in mem::take(&mut peers) {
                let answer = self.resolve(peer);
                self.shared.table().answer(peer, answer, crate::now());
                self.shared.answered.notify_all();
            }
            let next = self.shared.table().next_due();
            let next = next.into_iter().chain(quiet_until.filter(|_| doubt)).min();
            let timeout = next.map(|next| next.saturating_duration_since(crate::now()));
            if let Err(error) = self.shared.wake.sleep([self.notices.as_fd()], timeout, || false) {
                // It cannot, but if it did, this must not spin.
                tracing::warn!(%error, "looking for neighbours: cannot sleep");
                thread::sleep(QUIET);
            }
        }
    }

    /// Asks for the way to a peer.
    fn resolve(&mut self, peer: IpAddr) -> Answer {
        self.ask(peer).unwrap_or_else(|error| {
            if is_passing(&error) {
                return Answer::Failed;
            }
            if !mem::replace(&mut self.warned, true) {
                let address = self.source;
                tracing::warn!(%address, %peer, %error, "no way leads to a peer");
            }
            Answer::Nowhere
        })
    }

    fn ask(&mut self, peer: IpAddr) -> io::Result<Answer> {
        let route = self.netlink.route(self.source, peer)?;
        let interface = Interface::query(&self.socket, route.interface)?;
        if !interface.has_ethernet_headers() {
            return Err(io::Error::other(format!(
                "interface {} has no Ethernet headers (type {}): use the udp driver",
                route.interface, interface.kind
            )));
        }
        let neighbour = match route.next_hop {
            // Nobody asks for addresses on the loopback interface: it has none.
            None => Neighbour::Confirmed([0; 6]),
            Some(next_hop) => self.neighbour(route.interface, next_hop, peer)?,
        };
        Ok(match neighbour {
            Neighbour::Confirmed(link_destination) | Neighbour::Stale(link_destination) => {
                Answer::Way(Way {
                    interface: route.interface,
                    link_destination,
                    link_source: interface.link_address,
                    mtu: route.mtu.map_or(interface.mtu, |mtu| mtu.min(interface.mtu)),
                })
            }
            Neighbour::Unknown => Answer::Unsure,
            Neighbour::Failed => Answer::Nowhere,
        })
    }

    /// A neighbour on the way to `peer`. If its link address is not sure, the kernel is made to look.
    fn neighbour(
        &mut self,
        interface: u32,
        address: IpAddr,
        peer: IpAddr,
    ) -> io::Result<Neighbour> {
        let before = self.netlink.neighbour(interface, address)?;
        if let Neighbour::Confirmed(_) = before {
            return Ok(before);
        }
        self.provoke(peer);
        // A neighbour that is near, or that needs no asking, is known by now. Of others, a notice
        // will come.
        let after = self.netlink.neighbour(interface, address)?;
        // One that gave no answer is asked again, but it is as far away as before.
        let silent = (before, after) == (Neighbour::Failed, Neighbour::Unknown);
        Ok(if silent { Neighbour::Failed } else { after })
    }

    /// Sends an empty datagram, which no RoCE device takes for anything.
    fn provoke(&self, peer: IpAddr) {
        // What the kernel says of it does not matter: the neighbour table will tell.
        let _ = self.socket.send_to(&[], &SocketAddr::new(peer, self.port).into());
    }
}

/// Whether an error is about the asking, and not an answer: the kernel has no memory or no time.
fn is_passing(error: &io::Error) -> bool {
    let kind = error.kind();
    matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
        || matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::ENOMEM | libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::mpsc;

    use socket2::{Domain, Type};

    use super::*;

    #[test]
    fn what_the_kernel_has_no_time_for_is_no_answer() {
        for code in [libc::EAGAIN, libc::EINTR, libc::ENOBUFS, libc::ENOMEM, libc::EBUSY] {
            assert!(is_passing(&io::Error::from_raw_os_error(code)), "{code}");
        }
        for code in [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EINVAL, libc::ENODEV] {
            assert!(!is_passing(&io::Error::from_raw_os_error(code)), "{code}");
        }
        assert!(!is_passing(&io::Error::other("an interface without Ethernet headers")));
    }

    /// Whatever the thread is about to do when it is asked to end, it does.
    #[test]
    fn a_resolver_ends_at_once() {
        /// So many find the thread between two of its instructions, whichever two.
        const ATTEMPTS: u32 = 3000;
        let (done, is_done) = mpsc::channel();
        thread::spawn(move || {
            for attempt in 0..ATTEMPTS {
                let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
                let resolver = Resolver::start(Ipv4Addr::LOCALHOST.into(), 4791, socket).unwrap();
                for _ in 0..attempt % 300 * 10 {
                    std::hint::spin_loop();
                }
                drop(resolver);
            }
            // Nobody listens any more when the test has failed.
            let _ = done.send(());
        });
        is_done.recv_timeout(Duration::from_secs(60)).expect("a resolver that was dropped hangs");
    }
}
