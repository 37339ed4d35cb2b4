//! The memory of a group as its ranks use it: barriers, calls and vectors.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use millstream_inc::{DESCRIPTOR_BYTES, Descriptor, Mismatch};
use millstream_net::shared_memory::{GroupMemory, MemberProcesses, futex};

use super::failure::{self, Failure};
use super::layout::{
    ARRIVALS_AT, ARRIVED, FINISHED, LEFT, Layout, MAGIC, MAGIC_AT, PID, SLEEPERS_AT, STARTED,
    WORLD_AT,
};

/// Numbers of a descriptor, by which two are compared.
const NUMBERS: usize = DESCRIPTOR_BYTES / 8;

/// What is not in the memory has this number. It never occurs: the memory is as long as the layout says.
static NOWHERE: AtomicU64 = AtomicU64::new(0);
static NOWHERE_SHORT: AtomicU32 = AtomicU32::new(0);

/// The memory of a group.
#[derive(Debug)]
pub(super) struct Area {
    pub(super) memory: GroupMemory,
    pub(super) layout: Layout,
    pub(super) world: u32,
}

impl Area {
    /// Memory that this process has made.
    pub(super) fn new(memory: GroupMemory, world: u32) -> Self {
        let area = Self { memory, layout: Layout::new(world), world };
        area.long(WORLD_AT).store(world.into(), Ordering::Relaxed);
        area.long(MAGIC_AT).store(MAGIC, Ordering::Release);
        area
    }

    /// Memory that another process has made; what is strange about it, if something is.
    pub(super) fn adopt(memory: GroupMemory, world: u32) -> Result<Self, String> {
        let area = Self { memory, layout: Layout::new(world), world };
        let (magic, its) = (area.long(MAGIC_AT), area.long(WORLD_AT));
        match (magic.load(Ordering::Acquire), its.load(Ordering::Relaxed)) {
            (MAGIC, its) if its == u64::from(world) => Ok(area),
            (MAGIC, its) => Err(format!("it is for {its} ranks, not {world}")),
            _ => Err("it is of another version".to_owned()),
        }
    }

    pub(super) fn long(&self, offset: usize) -> &AtomicU64 {
        self.memory.long(offset).unwrap_or(&NOWHERE)
    }

    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        self.memory.word(offset).unwrap_or(&NOWHERE_SHORT)
    }

    fn member(&self, rank: u32, field: usize) -> &AtomicU64 {
        self.long(self.layout.member(rank) + field)
    }

    /// Says which process a rank is.
    pub(super) fn introduce(&self, rank: u32, (pid, started): (i32, u64)) {
        self.member(rank, STARTED).store(started, Ordering::Relaxed);
        self.member(rank, PID).store(pid as u64, Ordering::Relaxed);
    }

    /// Which processes the ranks are, once all have said so.
    pub(super) fn processes(&self) -> impl Iterator<Item = (i32, u64)> + '_ {
        (0..self.world).map(|rank| {
            let pid = i32::try_from(self.member(rank, PID).load(Ordering::Relaxed));
            (pid.unwrap_or(0), self.member(rank, STARTED).load(Ordering::Relaxed))
        })
    }

    /// How often ranks have arrived.
    pub(super) fn arrivals(&self) -> &AtomicU32 {
        self.word(ARRIVALS_AT)
    }

    pub(super) fn sleepers(&self) -> &AtomicU32 {
        self.word(SLEEPERS_AT)
    }

    /// How many arrivals make this barrier.
    pub(super) const fn target(&self, barrier: u64) -> u32 {
        (barrier as u32).wrapping_mul(self.world)
    }

    /// Whether all have arrived at this barrier, at which this rank has.
    pub(super) fn is_passed(&self, barrier: u64) -> bool {
        // Nobody is a whole barrier ahead of this rank, so the difference is small.
        let ahead = self.arrivals().load(Ordering::SeqCst).wrapping_sub(self.target(barrier));
        (ahead as i32) >= 0
    }

    /// A rank arrives at its next barrier. What it has written before is seen by all who pass.
    pub(super) fn arrive(&self, rank: u32, barrier: u64) {
        self.member(rank, ARRIVED).store(barrier, Ordering::Release);
        let arrivals = self.arrivals().fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        if arrivals == self.target(barrier) && self.sleepers().load(Ordering::SeqCst) > 0 {
            futex::wake_all(self.arrivals());
        }
    }

    /// Wakes all who wait, to look again.
    pub(super) fn wake(&self) {
        futex::wake_all(self.arrivals());
    }

    /// Whether a rank has not arrived at a barrier.
    pub(super) fn lacks(&self, rank: u32, barrier: u64) -> bool {
        self.member(rank, ARRIVED).load(Ordering::Acquire) < barrier
    }

    /// A rank has done so many collectives.
    pub(super) fn finish(&self, rank: u32, collectives: u64) {
        self.member(rank, FINISHED).store(collectives, Ordering::Release);
    }

    /// A rank calls no more.
    pub(super) fn leave(&self, rank: u32) {
        let finished = self.member(rank, FINISHED).load(Ordering::Relaxed);
        self.member(rank, LEFT).store(finished + 1, Ordering::SeqCst);
        self.wake();
    }

    /// After how many collectives a rank has left, if it has.
    pub(super) fn left(&self, rank: u32) -> Option<u64> {
        self.member(rank, LEFT).load(Ordering::Acquire).checked_sub(1)
    }

    /// Says what a rank calls. Gives the difference to what others have said, if there is one.
    ///
    /// Of two ranks at least one sees the other.
    pub(super) fn announce(&self, rank: u32, descriptor: &Descriptor) -> Option<Mismatch> {
        let (at, number) =
            (|rank| self.layout.call(rank, descriptor.sequence), descriptor.sequence + 1);
        let own = numbers(descriptor);
        for (index, &number) in own.iter().enumerate() {
            self.long(at(rank) + 8 + 8 * index).store(number, Ordering::Relaxed);
        }
        self.long(at(rank)).store(number, Ordering::SeqCst);
        let announced = |&other: &u32| self.long(at(other)).load(Ordering::SeqCst) == number;
        let said = |rank: u32| {
            let number = |index| self.long(at(rank) + 8 + 8 * index).load(Ordering::Relaxed);
            std::array::from_fn::<u64, NUMBERS, _>(number)
        };
        let all = || (0..self.world).filter(announced);
        if all().all(|other| said(other) == own) {
            return None;
        }
        let described = all().filter_map(|rank| Some((rank, descriptor_of(said(rank))?)));
        Mismatch::among(described)
    }

    /// Says why the group is over, unless that was said.
    pub(super) fn fail(&self, failure: &Failure) {
        failure::say(&self.memory, failure);
        self.wake();
    }

    /// Why the group is over, if a rank has said so.
    pub(super) fn failure(&self) -> Option<Failure> {
        failure::heard(&self.memory, self.world)
    }

    /// A rank that has not arrived at a barrier and cannot any more, and why.
    /// Processes are looked at if `all`.
    pub(super) fn lost(
        &self,
        processes: &MemberProcesses,
        barrier: u64,
        all: bool,
    ) -> Option<Failure> {
        let left = |rank: u32| Some((rank, self.left(rank)?)).filter(|_| self.lacks(rank, barrier));
        if let Some((rank, collectives)) = (0..self.world).find_map(left) {
            let detail = format!("it left after {collectives} collectives");
            return Some(Failure::PeerLost { rank, detail });
        }
        if !all {
            return None;
        }
        let rank = processes.ended(|rank| self.lacks(rank as u32, barrier))?;
        let pid = processes.pid(rank).unwrap_or_default();
        // It may have arrived before it ended, and after this was looked at.
        self.lacks(rank as u32, barrier).then(|| Failure::PeerLost {
            rank: rank as u32,
            detail: format!("process {pid} of this machine has ended"),
        })
    }
}

fn numbers(descriptor: &Descriptor) -> [u64; NUMBERS] {
    let bytes = descriptor.to_bytes();
    let bytes = bytes.as_chunks::<8>().0;
    std::array::from_fn(|index| u64::from_le_bytes(bytes[index]))
}

/// `None` for what is none.
fn descriptor_of(numbers: [u64; NUMBERS]) -> Option<Descriptor> {
    let mut bytes = [0; DESCRIPTOR_BYTES];
    for (bytes, number) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(numbers) {
        *bytes = number.to_le_bytes();
    }
    Descriptor::parse(&bytes).ok()
}
