//! The memory of a group as its ranks use it: barriers, calls and vectors.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use millstream_inc::{DESCRIPTOR_BYTES, Descriptor, Mismatch};
use millstream_net::shared_memory::{GroupMemory, MemberProcesses, futex};

use super::failure::{self, Failure};
use super::layout::{
    ARRIVALS_AT, ARRIVED, FAILURE_AT, FINISHED, LEFT, Layout, MAGIC, MAGIC_AT, PID, SLEEPERS_AT,
    STARTED, WORLD_AT,
};
use super::members::Members;
use crate::error::left_after;

/// Numbers of a descriptor, by which two are compared.
const NUMBERS: usize = DESCRIPTOR_BYTES / 8;
const _: () = assert!(DESCRIPTOR_BYTES.is_multiple_of(8));

/// What is not in the memory has this number. It never occurs: the memory is as long as the layout says.
static NOWHERE: AtomicU64 = AtomicU64::new(0);
static NOWHERE_SHORT: AtomicU32 = AtomicU32::new(0);

/// The memory of a group.
#[derive(Debug)]
pub(super) struct Area {
    pub(super) memory: GroupMemory,
    pub(super) layout: Layout,
    pub(super) members: Members,
    /// How many these are. Ranks are named by their places among them, and in what is said about them by their numbers.
    pub(super) world: u32,
}

impl Area {
    /// Memory that this process has made.
    pub(super) fn new(memory: GroupMemory, members: Members) -> Self {
        let area = Self::of(memory, members);
        area.long(WORLD_AT).store(area.world.into(), Ordering::Relaxed);
        area.long(MAGIC_AT).store(MAGIC, Ordering::Release);
        area
    }

    /// Memory that another process has made; what is strange about it, if something is.
    pub(super) fn adopt(memory: GroupMemory, members: Members) -> Result<Self, String> {
        let area = Self::of(memory, members);
        let world = area.world;
        let (magic, its) = (area.long(MAGIC_AT), area.long(WORLD_AT));
        match (magic.load(Ordering::Acquire), its.load(Ordering::Relaxed)) {
            (MAGIC, its) if its == u64::from(world) => Ok(area),
            (MAGIC, its) => Err(format!("it is for {its} ranks, not {world}")),
            _ => Err("it is of another version".to_owned()),
        }
    }

    fn of(memory: GroupMemory, members: Members) -> Self {
        let (layout, world) = (Layout::of(&members), members.count());
        Self { memory, layout, members, world }
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
        let arrivals = self.arrivals().fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        // After that: a process that ends in between is missed at the next barrier, and not at none.
        self.member(rank, ARRIVED).store(barrier, Ordering::Release);
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

    /// Says what a rank calls. Gives what is wrong with what others have said, if something is.
    ///
    /// Of two ranks at least one sees the other.
    pub(super) fn announce(&self, rank: u32, descriptor: &Descriptor) -> Option<Failure> {
        let number = descriptor.sequence + 1;
        let at = |rank| self.layout.call(rank, descriptor.sequence);
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
        let other = all().find(|&other| said(other) != own)?;
        let name = |place| self.members.rank(place);
        let described = all().filter_map(|rank| Some((name(rank), descriptor_of(said(rank))?)));
        let nonsense = || {
            let detail = "what it calls makes no sense".to_owned();
            Failure::PeerLost { rank: name(other), detail }
        };
        Some(Mismatch::among(described).map_or_else(nonsense, Failure::from))
    }

    /// Says why the group is over, unless that was said.
    pub(super) fn fail(&self, failure: &Failure) {
        failure::say(&self.memory, FAILURE_AT, failure);
        self.wake();
    }

    /// Why the group is over, if a rank has said so.
    pub(super) fn failure(&self) -> Option<Failure> {
        failure::heard(&self.memory, FAILURE_AT, self.members.world())
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
            let detail = left_after(collectives);
            return Some(Failure::PeerLost { rank: self.members.rank(rank), detail });
        }
        if !all {
            return None;
        }
        let rank = processes.ended(|rank| self.lacks(rank as u32, barrier))?;
        let pid = processes.pid(rank).unwrap_or_default();
        // It may have arrived before it ended, and after this was looked at.
        self.lacks(rank as u32, barrier)
            .then(|| Failure::ended(self.members.rank(rank as u32), pid))
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

#[cfg(test)]
mod tests {
    use millstream_inc::{Collective, DataType, Mode, ReduceOperation, Stripe};
    use millstream_net::shared_memory::GroupOwner;

    use super::*;

    fn area(world: u32) -> Area {
        let (_owner, memory) = GroupOwner::create(Layout::new(world).length()).unwrap();
        Area::new(memory, Members::all(world))
    }

    fn descriptor(sequence: u64, count: u64) -> Descriptor {
        Descriptor {
            sequence,
            collective: Collective::AllReduce,
            operation: ReduceOperation::Sum,
            data_type: DataType::Int8,
            root: 0,
            count,
            stripe: Stripe::WHOLE,
            mode: Mode::Write,
            destination_address: 0,
            destination_key: 0,
        }
    }

    #[test]
    fn barriers_are_passed_when_all_have_arrived_also_when_the_count_wraps() {
        let area = area(3);
        // Some arrivals before it wraps, all of whole barriers.
        let before = u64::from(u32::MAX / 3) - 1;
        area.arrivals().store(area.target(before), Ordering::Relaxed);
        for barrier in before + 1..before + 6 {
            for rank in 0..3 {
                assert!(!area.is_passed(barrier) && area.lacks(rank, barrier));
                area.arrive(rank, barrier);
            }
            assert!(area.is_passed(barrier) && !area.is_passed(barrier + 1));
        }
    }

    #[test]
    fn who_differs_is_seen_by_the_later_one_and_calls_of_before_are_not_compared() {
        let area = area(3);
        assert_eq!(area.announce(0, &descriptor(7, 5)), None);
        assert_eq!(area.announce(2, &descriptor(6, 4)), None);
        let failure = area.announce(1, &descriptor(7, 6)).unwrap();
        let what = "the ranks do not agree on collective 7: rank 1 has count 6 where rank 0 has 5";
        assert_eq!(failure, Failure::Mismatch { rank: 1, what: what.to_owned() });
        let place = area.layout.call(0, 7) + 8;
        area.long(place).store(u64::MAX, Ordering::Relaxed);
        area.long(area.layout.call(1, 7)).store(0, Ordering::Relaxed);
        let failure = area.announce(2, &descriptor(7, 5)).unwrap();
        assert!(matches!(failure, Failure::PeerLost { rank: 0, .. }), "{failure:?}");
    }

    #[test]
    fn who_has_left_is_missed_only_where_it_has_not_arrived() {
        let area = area(2);
        let own = millstream_net::shared_memory::own_process().unwrap();
        for rank in [0, 1] {
            area.introduce(rank, own);
        }
        let processes = MemberProcesses::open(area.processes()).unwrap();
        area.arrive(1, 1);
        area.finish(1, 1);
        area.leave(1);
        assert_eq!(area.left(1), Some(1));
        assert_eq!(area.lost(&processes, 1, true), None);
        let detail = "it left after 1 collectives".to_owned();
        let lost = Failure::PeerLost { rank: 1, detail };
        assert_eq!(area.lost(&processes, 2, false), Some(lost));
    }

    #[test]
    fn memory_of_another_kind_or_world_is_refused() {
        let length = Layout::new(2).length();
        let (_owner, memory) = GroupOwner::create(length).unwrap();
        assert!(Area::adopt(memory, Members::all(2)).unwrap_err().contains("another version"));
        let Area { memory, .. } = area(2);
        assert!(Area::adopt(memory, Members::all(3)).unwrap_err().contains("2 ranks, not 3"));
        let Area { memory, .. } = area(2);
        assert!(Area::adopt(memory, Members::all(2)).is_ok());
    }
}
