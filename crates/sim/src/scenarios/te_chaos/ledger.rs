//! The reference model: which bytes may be written where, and until when.
//!
//! No two transfers have a byte of target memory in common, ever, and every byte of a transfer is
//! known from its place. So each write is judged by itself, when it happens: it has the right bytes,
//! and the transfer that it is of may still write.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use millstream_roce::{
    AccessDenied, AccessKind, Destination, Instant, Memory, Piece, ProtectionDomainId, RemoteAccess,
};
use millstream_transfer_core::{End, Ended, Failure, Opcode};

use crate::Rng;

/// Bytes that all transfers take their content from.
const PATTERN: usize = 1 << 20;
/// Addresses from here on are of transfers; below is the pattern.
const FIRST_ADDRESS: u64 = 1 << 40;
/// Addresses between two transfers that nobody may write to.
const GAP: u64 = 4096;
/// For how long the ledger remembers a transfer that has ended: longer than any packet is late.
const MEMORY_S: u64 = 600;

pub(super) type Shared = Rc<RefCell<Ledger>>;

/// Who may still write.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    /// It is under way.
    Open,
    /// Nobody, and all of it must be there.
    Completed,
    /// Nobody.
    Ended,
    /// Anybody: the target's range is undefined, or who wrote it has crashed.
    Undefined,
}

/// A transfer.
#[derive(Debug)]
struct Entry {
    opcode: Opcode,
    user: u64,
    /// Whose memory is written, and in which of its lives.
    owner: (usize, u32),
    /// Who writes or reads.
    initiator: (usize, u32),
    span: u64,
    /// Bytes of all its pieces.
    length: u64,
    /// Where its content is in the pattern.
    pattern: usize,
    covered: Vec<u64>,
    covered_bytes: u64,
    state: State,
    /// The target's process has ended the registration of the memory: nobody may write any more.
    unregistered: bool,
    ended_at: Instant,
}

#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) now: Instant,
    pattern: Rc<[u8]>,
    next: u64,
    entries: BTreeMap<u64, Entry>,
    by_user: BTreeMap<u64, u64>,
    /// Ended ones, the first first.
    ended: std::collections::VecDeque<u64>,
    /// What must not be.
    pub(super) faults: Vec<String>,
    pub(super) writes_undefined: u64,
}

impl Ledger {
    pub(super) fn new(seed: u64) -> Self {
        let mut pattern = vec![0; PATTERN];
        Rng::fork(seed, 0x9a77).fill(&mut pattern);
        Self {
            now: Instant::ZERO,
            pattern: pattern.into(),
            next: FIRST_ADDRESS,
            entries: BTreeMap::new(),
            by_user: BTreeMap::new(),
            ended: std::collections::VecDeque::new(),
            faults: Vec::new(),
            writes_undefined: 0,
        }
    }

    /// Gives a transfer its memory; returns the address that it is written at, and that of its source.
    pub(super) fn open(
        &mut self,
        rng: &mut Rng,
        user: u64,
        opcode: Opcode,
        initiator: (usize, u32),
        target: (usize, u32),
        (span, length): (u64, u64),
    ) -> (u64, u64) {
        let address = self.next;
        self.next += span.next_multiple_of(GAP) + GAP;
        let pattern = rng.below(PATTERN as u64 - span) as usize;
        let owner = if opcode == Opcode::Write { target } else { initiator };
        self.entries.insert(
            address,
            Entry {
                opcode,
                user,
                owner,
                initiator,
                span,
                length,
                pattern,
                covered: vec![0; span.div_ceil(64) as usize],
                covered_bytes: 0,
                state: State::Open,
                unregistered: false,
                ended_at: Instant::ZERO,
            },
        );
        self.by_user.insert(user, address);
        // A WRITE's source has addresses of its own, so that who reads it is known.
        (address, if opcode == Opcode::Write { address } else { pattern as u64 })
    }

    /// The target's process ends the registration of what a WRITE that is under way writes; returns whether it is.
    pub(super) fn unregister(&mut self, user: u64) -> bool {
        let entry = self.by_user.get(&user).and_then(|address| self.entries.get_mut(address));
        let entry = entry.filter(|entry| entry.opcode == Opcode::Write);
        entry.map(|entry| entry.unregistered = true).is_some()
    }

    fn is_registered(&self, address: u64) -> bool {
        self.find(address).is_none_or(|(_, entry)| !entry.unregistered)
    }

    /// The engine says how a transfer ended.
    pub(super) fn end(&mut self, ended: &Ended) {
        let Some(address) = self.by_user.remove(&ended.user) else {
            return self.fault(format!("{ended:?} is of no transfer that is under way"));
        };
        let Some(entry) = self.entries.get_mut(&address) else { return };
        let (covered, length) = (entry.covered_bytes, entry.length);
        entry.ended_at = self.now;
        entry.state = match ended.end {
            End::Completed => State::Completed,
            _ if ended.target_undefined => State::Undefined,
            _ => State::Ended,
        };
        let (opcode, unregistered) = (entry.opcode, entry.unregistered);
        self.ended.push_back(address);
        if ended.end == End::Failed(Failure::Refused) && !unregistered {
            self.fault(format!("{ended:?}, but its memory is registered"));
        }
        if ended.end == End::Completed && covered < length {
            self.fault(format!("{ended:?}, but {covered} of {length} bytes are there"));
        }
        if ended.target_undefined && opcode == Opcode::Read {
            self.fault(format!("{ended:?}: a READ leaves the target as it was"));
        }
        if ended.transferred > covered {
            self.fault(format!("{ended:?}, but {covered} bytes are there"));
        }
    }

    /// Bytes of a transfer that are in place.
    pub(super) fn covered(&self, user: u64) -> Option<u64> {
        let address = self.by_user.get(&user)?;
        self.entries.get(address).map(|entry| entry.covered_bytes)
    }

    /// A process is no more: nobody knows what becomes of its transfers.
    pub(super) fn crash(&mut self, process: (usize, u32)) {
        let now = self.now;
        for (&address, entry) in &mut self.entries {
            if entry.initiator == process && entry.state == State::Open {
                (entry.state, entry.ended_at) = (State::Undefined, now);
                self.by_user.remove(&entry.user);
                self.ended.push_back(address);
            }
        }
    }

    /// Forgets what ended long ago.
    pub(super) fn forget(&mut self) {
        let now = self.now.nanos();
        while let Some(address) = self.ended.front()
            && let Some(entry) = self.entries.get(address)
            && now - entry.ended_at.nanos() > MEMORY_S * 1_000_000_000
        {
            self.entries.remove(address);
            self.ended.pop_front();
        }
    }

    fn fault(&mut self, what: String) {
        if self.faults.len() < 16 {
            self.faults.push(what);
        }
    }

    fn find(&self, address: u64) -> Option<(u64, &Entry)> {
        let (start, entry) = self.entries.range(..=address).next_back()?;
        (address - start < entry.span).then_some((*start, entry))
    }

    fn write(&mut self, owner: (usize, u32), address: u64, payload: &[u8]) {
        let Some((start, entry)) = self.find(address) else {
            return self.fault(format!("a write to {address:#x}, which is of no transfer"));
        };
        let from = (address - start) as usize;
        let (user, state, opcode) = (entry.user, entry.state, entry.opcode);
        let end = from + payload.len();
        if entry.owner != owner || end as u64 > entry.span {
            return self.fault(format!(
                "bytes {from} to {end} of transfer {user} are written in memory of {owner:?}"
            ));
        }
        if self.pattern[entry.pattern + from..entry.pattern + end] != *payload {
            return self.fault(format!("wrong bytes {from} to {end} of transfer {user}"));
        }
        match state {
            State::Open => {}
            State::Undefined if opcode == Opcode::Write => self.writes_undefined += 1,
            _ => {
                let what = format!("a late write of {opcode:?} {user}, which is {state:?}");
                return self.fault(what);
            }
        }
        let Some(entry) = self.entries.get_mut(&start) else { return };
        for byte in from..end {
            let (word, bit) = (&mut entry.covered[byte / 64], 1 << (byte % 64));
            entry.covered_bytes += u64::from(*word & bit == 0);
            *word |= bit;
        }
    }

    /// Where the source of a WRITE is in the pattern.
    fn source(&mut self, initiator: (usize, u32), piece: &Piece) -> Option<usize> {
        let (start, entry) = self.find(piece.address)?;
        let offset = piece.address - start;
        let fits = offset + u64::from(piece.length) <= entry.span;
        let (user, state, pattern) = (entry.user, entry.state, entry.pattern);
        if entry.initiator != initiator || !fits || state != State::Open {
            self.fault(format!("the source of transfer {user}, which is {state:?}, is read"));
        }
        Some(pattern + offset as usize)
    }
}

/// The memory of a process, as one of its NICs sees it.
#[derive(Debug)]
pub(super) struct ProcessMemory {
    /// Which process, and which of its lives.
    process: (usize, u32),
    pattern: Rc<[u8]>,
    ledger: Shared,
}

impl ProcessMemory {
    pub(super) fn new(process: (usize, u32), ledger: &Shared) -> Self {
        let pattern = Rc::clone(&ledger.borrow().pattern);
        Self { process, pattern, ledger: Rc::clone(ledger) }
    }
}

/// The key of what may be written in a life of a process.
pub(super) const fn sink_key(life: u32) -> u32 {
    2 * life + 1
}

/// The key of what may be read.
pub(super) const fn source_key(life: u32) -> u32 {
    2 * life
}

/// The key of the local memory of a request.
pub(super) const fn life_key(opcode: Opcode, life: u32) -> u32 {
    match opcode {
        Opcode::Write => source_key(life),
        Opcode::Read => sink_key(life),
    }
}

impl Memory for ProcessMemory {
    fn authorize(&mut self, access: &RemoteAccess) -> Result<(), AccessDenied> {
        let life = self.process.1;
        let end = access.address.saturating_add(access.length.into());
        let is_registered = || self.ledger.borrow().is_registered(access.address);
        let fine = match access.kind {
            AccessKind::Write => access.key == sink_key(life) && is_registered(),
            AccessKind::Read => access.key == source_key(life) && end <= PATTERN as u64,
            AccessKind::Atomic => false,
        };
        if fine { Ok(()) } else { Err(AccessDenied::Protection) }
    }

    fn write(&mut self, destination: &Destination, payload: &[u8]) -> Result<(), AccessDenied> {
        let (_, key, address, _) = destination.place();
        let mut ledger = self.ledger.borrow_mut();
        // It may be taken back in the middle of a message.
        if key != sink_key(self.process.1) || !ledger.is_registered(address) {
            return Err(AccessDenied::Protection);
        }
        ledger.write(self.process, address, payload);
        Ok(())
    }

    fn bytes(&self, piece: &Piece) -> Result<&[u8], AccessDenied> {
        let start = match piece.address {
            address if address < FIRST_ADDRESS => Some(address as usize),
            _ => self.ledger.borrow_mut().source(self.process, piece),
        };
        let bytes = start.and_then(|start| self.pattern.get(start..start + piece.length as usize));
        bytes.ok_or(AccessDenied::Protection)
    }

    fn check_local(
        &self,
        _domain: ProtectionDomainId,
        piece: &Piece,
        write: bool,
    ) -> Result<(), AccessDenied> {
        let life = self.process.1;
        let key = if write { sink_key(life) } else { source_key(life) };
        if piece.key == key { Ok(()) } else { Err(AccessDenied::Protection) }
    }
}
