//! Several devices on one address, of one process or of many.
//!
//! The queue pair numbers of an address are divided into [`SLOTS`] slots, and each device that shares the
//! address has one. There is one UDP socket for each slot; the kernel chooses by the destination's queue
//! pair number to which of them a datagram goes ([`steering`]). The first process makes all sockets and
//! passes their descriptors to those that come later ([`admission`]), so that no daemon is needed, and
//! no privilege. All keep all of them open: a socket that closed would change the places of others.
//! Who has which slot is in a file that they share, too ([`table`]).
//!
//! What the kernel coalesced (UDP_GRO) may be for several slots, and goes to that of its first datagram:
//! the others are handed over ([`hand_over`]).
//!
//! docs/shared-address.md says what becomes of each kind of datagram.

mod admission;
pub(crate) mod descriptors;
mod hand_over;
mod steering;
mod steward;
mod table;

#[cfg(not(millstream_loom))]
pub(crate) use steering::steer;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use millstream_roce::{QueuePairNumbers, SLOTS};
use socket2::Socket;

use crate::socket::OpenError;
use admission::{Answer, Welcome};
pub(crate) use hand_over::{HandOver, Run};
use steward::Steward;
use table::{Record, Table};

/// How long to try to be admitted. Those that make the sockets take some milliseconds.
const PATIENCE: Duration = Duration::from_secs(4);

/// Between attempts while another process makes the sockets, or ends. Nothing tells when it has.
const PAUSE: Duration = Duration::from_millis(5);

/// The sockets of an address, and what belongs to them.
struct Group {
    /// One for each slot.
    sockets: Vec<Socket>,
    /// The file that all share, to pass on.
    file: OwnedFd,
    /// The same, opened by this device.
    table: Table,
    listener: Socket,
}

/// A device's place among those that share its address. The slot is given back when it is dropped.
pub(crate) struct Membership {
    group: Arc<Group>,
    slot: usize,
    generation: u64,
    key: table::Key,
    steward: Option<Steward>,
}

impl Membership {
    /// Finds those who have the address, or makes its sockets, and claims a slot.
    pub(crate) fn claim(local: SocketAddr) -> Result<Self, OpenError> {
        let address = local.ip();
        let failed = |operation| move |source| OpenError::System { address, operation, source };
        if local.port() == 0 {
            // Nobody would find it.
            return Err(failed("sharing any port")(io::ErrorKind::InvalidInput.into()));
        }
        let group = Arc::new(enter(local)?);
        let key = group.table.key().map_err(failed("reading the table of slots"))?;
        let claimed = group.claim().map_err(failed("claiming a slot"))?;
        let Some((slot, generation)) = claimed else {
            return Err(OpenError::NoSlotFree { address, port: local.port() });
        };
        let mut member = Self { group, slot, generation, key, steward: None };
        member.steward =
            Some(Steward::start(&member.group, slot).map_err(failed("starting a thread"))?);
        Ok(member)
    }

    /// The queue pair numbers that its device may use.
    pub(crate) const fn numbers(&self) -> QueuePairNumbers {
        let [a, b, c, d, e, f, g, h, ..] = self.key;
        QueuePairNumbers::Slot {
            slot: self.slot as u8,
            generation: self.generation,
            key: u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
        }
    }

    /// The socket of its slot, which takes nothing until [`Membership::open`].
    pub(crate) fn socket(&self) -> io::Result<Socket> {
        self.group.sockets[self.slot].try_clone()
    }

    /// Lets datagrams come.
    pub(crate) fn open(&self) -> io::Result<()> {
        steering::take_all(&self.group.sockets[self.slot])
    }

    pub(crate) fn hand_over(&self, local: SocketAddr) -> HandOver {
        HandOver::new(self.key, self.slot, local)
    }
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slot, generation, .. } = self;
        f.debug_struct("Membership").field("slot", slot).field("generation", generation).finish()
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        drop(self.steward.take());
        // If this fails, another one does it when it sees that the lock has gone.
        let _ = self.group.give_back(self.slot);
    }
}

/// Enters the group of an address, or founds it.
fn enter(local: SocketAddr) -> Result<Group, OpenError> {
    let address = local.ip();
    let failed = |operation| move |source| OpenError::System { address, operation, source };
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(listener) = admission::reserve(local).map_err(failed("bind(AF_UNIX)"))? {
            // If this process ends before it listens, the name is free again.
            let sockets = steering::make(local)?;
            let table = Table::create().map_err(failed("memfd_create"))?;
            let group = Group::new(sockets, table, listener).map_err(failed("/proc/self/fd"))?;
            admission::listen(&group.listener).map_err(failed("listen(AF_UNIX)"))?;
            return Ok(group);
        }
        if let Answer::Welcome(Welcome { sockets, table, listener }) =
            admission::ask(local, deadline)?
        {
            return Group::new(sockets, table, listener).map_err(failed("/proc/self/fd"));
        }
        if Instant::now() >= deadline {
            return Err(OpenError::NotAdmitted { address, port: local.port() });
        }
        thread::sleep(PAUSE);
    }
}

impl Group {
    fn new(sockets: Vec<Socket>, file: OwnedFd, listener: Socket) -> io::Result<Self> {
        let table = Table::open(file.as_fd())?;
        Ok(Self { sockets, file, table, listener })
    }

    /// Claims the slot that has been free for the longest time; returns how many had it before, too.
    fn claim(&self) -> io::Result<Option<(usize, u64)>> {
        // Who was killed gave nothing back.
        self.clear(None)?;
        // A slot that is just being cleared looks as if somebody had it.
        for _ in 0..3 {
            let mut slots = Vec::with_capacity(SLOTS);
            for slot in 0..SLOTS {
                slots.push((self.table.record(slot)?.since, slot));
            }
            slots.sort_unstable();
            for (_, slot) in slots {
                if !self.table.lock(slot)? {
                    continue;
                }
                let generation = self.table.record(slot)?.generation;
                let record = Record {
                    generation: generation.wrapping_add(1),
                    since: table::now(),
                    claimed: true,
                };
                self.table.write(slot, record)?;
                steering::silence(&self.sockets[slot])?;
                return Ok(Some((slot, generation)));
            }
            thread::sleep(PAUSE);
        }
        Ok(None)
    }

    /// Ends the use of a slot, by who has its lock.
    fn give_back(&self, slot: usize) -> io::Result<()> {
        steering::silence(&self.sockets[slot])?;
        let generation = self.table.record(slot)?.generation;
        let record = Record { generation, since: table::now(), claimed: false };
        self.table.write(slot, record)?;
        self.table.unlock(slot)
    }

    /// Gives back what those had who have ended without doing it; returns whether there are others. The
    /// caller's own slot is not looked at, as nobody excludes himself.
    fn clear(&self, own: Option<usize>) -> io::Result<bool> {
        let mut others = false;
        for slot in (0..SLOTS).filter(|&slot| Some(slot) != own) {
            if !self.table.record(slot)?.claimed {
                continue;
            }
            if !self.table.lock(slot)? {
                others = true;
            } else if self.table.record(slot)?.claimed {
                self.give_back(slot)?;
            } else {
                self.table.unlock(slot)?;
            }
        }
        Ok(others)
    }
}
