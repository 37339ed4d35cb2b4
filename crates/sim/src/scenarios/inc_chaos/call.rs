//! Collectives that a run draws, and the memory of each rank for them.

use core::ops::Range;

use millstream_inc::{
    Collective, CollectiveCall, DESCRIPTOR_BYTES, DataType, Kernel, Mode, ReduceOperation, Stripe,
};

use super::reference;
use super::tree::Tree;
use crate::Rng;

/// What lengths matter to a communicator.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) path_mtu: u32,
    pub(super) segment_bytes: u32,
    pub(super) window: u32,
    pub(super) world: u32,
}

/// A collective as its ranks call it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Shape {
    pub(super) collective: Collective,
    pub(super) data_type: DataType,
    pub(super) operation: ReduceOperation,
    pub(super) root: u32,
    pub(super) count: u64,
    pub(super) mode: Mode,
    /// What of it is on this tree.
    pub(super) stripe: Stripe,
    /// Its number among those of all trees.
    pub(super) number: u64,
}

/// The memory of a host for one call: guards, the source and the destination.
#[derive(Clone, Debug)]
pub(super) struct Arena {
    /// What is called. Key and addresses of what the rank has are those of the arena, once it is registered.
    pub(super) request: CollectiveCall,
    pub(super) number: u64,
    pub(super) bytes: Vec<u8>,
    /// Where the source is; empty where there is none.
    pub(super) source: Range<usize>,
    pub(super) destination: Range<usize>,
    /// What is in it afterwards. None of a call that cannot succeed.
    pub(super) expected: Option<Vec<u8>>,
}

/// Bytes of all parts together at most.
const MOST_BYTES: u64 = 12 << 10;

fn pick<T: Copy>(rng: &mut Rng, all: &[T]) -> T {
    all[rng.below(all.len() as u64) as usize]
}

impl Shape {
    pub(super) fn draw(rng: &mut Rng, sizes: &Sizes, modes: &[Mode]) -> Self {
        let mut shape = Self {
            collective: pick(rng, Collective::ALL),
            data_type: pick(rng, DataType::ALL),
            operation: pick(rng, ReduceOperation::ALL),
            root: rng.below(sizes.world.into()) as u32,
            count: 0,
            mode: pick(rng, modes),
            stripe: Stripe::WHOLE,
            number: 0,
        };
        while shape.reduces() && Kernel::of(shape.data_type, shape.operation).is_none() {
            shape.operation = pick(rng, ReduceOperation::ALL);
        }
        shape.count = shape.draw_count(rng, sizes);
        shape
    }

    pub(super) const fn reduces(&self) -> bool {
        use Collective as C;
        matches!(self.collective, C::AllReduce | C::Reduce | C::ReduceScatter)
    }

    /// Whether each switch rounds, so that it shows which tree a result is from.
    pub(super) const fn rounds(&self) -> bool {
        use ReduceOperation as Op;
        let short = matches!(self.data_type, DataType::Float16 | DataType::BFloat16);
        let adds = matches!(self.operation, Op::Sum | Op::Average | Op::Product);
        self.reduces() && short && adds
    }

    /// None, one, a few, about as many as fit a packet behind the descriptor, or as fill packets, segments or
    /// windows.
    pub(super) fn draw_count(&self, rng: &mut Rng, sizes: &Sizes) -> u64 {
        let size = u64::from(self.data_type.size());
        let segment = u64::from(sizes.segment_bytes);
        let window = segment * u64::from(sizes.window);
        let unit = pick(rng, &[sizes.path_mtu.into(), segment, window, 2 * window]);
        let border = (rng.between(1, 3) * unit / size + rng.below(3)).saturating_sub(1);
        let small = Self::small_bytes(sizes) / size / self.parts(sizes.world);
        let count = match rng.below(10) {
            0 => 0,
            1 => 1,
            2 => rng.below(64),
            3 => rng.below(MOST_BYTES / size),
            4 => rng.below(small + 1),
            5 => small + rng.below(2),
            _ => border,
        };
        count.min(MOST_BYTES / size / self.parts(sizes.world))
    }

    const fn small_bytes(sizes: &Sizes) -> u64 {
        sizes.path_mtu as u64 - DESCRIPTOR_BYTES as u64
    }

    /// Whether the vector, which is not empty, goes with the descriptor.
    pub(super) const fn is_small(&self, sizes: &Sizes) -> bool {
        let bytes = self.part_bytes() as u64 * self.parts(sizes.world);
        let barrier = matches!(self.collective, Collective::Barrier);
        !barrier && self.stripe.trees() == 1 && bytes > 0 && bytes <= Self::small_bytes(sizes)
    }

    pub(super) const fn parts(&self, world: u32) -> u64 {
        match self.collective {
            Collective::ReduceScatter | Collective::AllGather => world as u64,
            _ => 1,
        }
    }

    pub(super) const fn part_bytes(&self) -> usize {
        self.count as usize * self.data_type.size() as usize
    }

    /// Bytes of the source and destination of a host with these ranks; `None` where it has none.
    fn lengths(&self, ranks: &[u32], world: u32) -> (Option<usize>, Option<usize>) {
        let part = self.part_bytes();
        let all = part * world as usize;
        // What several have is laid out as the whole vector.
        let own = if ranks.len() > 1 { all } else { part };
        let at_root = ranks.contains(&self.root).then_some(part);
        match self.collective {
            Collective::AllReduce => (Some(part), Some(part)),
            Collective::Reduce => (Some(part), at_root),
            Collective::Broadcast => (at_root, Some(part)),
            Collective::Barrier => (None, None),
            Collective::ReduceScatter => (Some(all), Some(own)),
            Collective::AllGather => (Some(own), Some(all)),
        }
    }

    /// Other than it is in one respect, or `None` when that cannot be called.
    pub(super) fn changed(&self, rng: &mut Rng, sizes: &Sizes) -> Option<Self> {
        let mut other = *self;
        match rng.below(6) {
            0 => other.collective = pick(rng, Collective::ALL),
            1 => other.data_type = pick(rng, DataType::ALL),
            2 => other.operation = pick(rng, ReduceOperation::ALL),
            3 => other.root = rng.below(sizes.world.into()) as u32,
            4 => other.count = other.draw_count(rng, sizes),
            _ => other.mode = if self.mode == Mode::Write { Mode::Send } else { Mode::Write },
        }
        let limit = MOST_BYTES / u64::from(other.data_type.size()) / other.parts(sizes.world);
        other.count = other.count.min(limit);
        let kernel = Kernel::of(other.data_type, other.operation);
        (other != *self && (!other.reduces() || kernel.is_some())).then_some(other)
    }

    /// The memory of all hosts, each of which has these ranks.
    pub(super) fn arenas(
        &self,
        rng: &mut Rng,
        tree: &Tree,
        sizes: &Sizes,
        hosts: &[Vec<u32>],
    ) -> Vec<Arena> {
        let (world, in_place) = (sizes.world, rng.below(3) == 0);
        let mut arenas: Vec<Arena> =
            hosts.iter().map(|ranks| self.arena(rng, ranks, world, in_place)).collect();
        let whole = self.whole(&arenas, hosts, tree, world);
        let part = self.part_bytes();
        for (ranks, arena) in hosts.iter().zip(&mut arenas) {
            let length = arena.destination.len();
            let scatter = self.collective == Collective::ReduceScatter;
            let several = ranks.len() > 1;
            let own = if scatter && !several { ranks[0] as usize * part } else { 0 };
            let mut expected = arena.bytes.clone();
            let target = &mut expected[arena.destination.clone()];
            let result = &whole[own..own + length];
            let all = !scatter || !several;
            let gets =
                |range: &Range<usize>| all || ranks.contains(&((range.start / part.max(1)) as u32));
            for range in self.on_tree(length).filter(gets) {
                target[range.clone()].copy_from_slice(&result[range]);
            }
            arena.expected = Some(expected);
        }
        arenas
    }

    /// The result of all together, computed along a tree. What the ranks of a host have combined counts as one vector.
    pub(super) fn whole(
        &self,
        arenas: &[Arena],
        hosts: &[Vec<u32>],
        tree: &Tree,
        world: u32,
    ) -> Vec<u8> {
        let source = |arena: &Arena| arena.bytes[arena.source.clone()].to_vec();
        // By lowest rank.
        let mut sources = vec![Vec::new(); world as usize];
        for (ranks, arena) in hosts.iter().zip(arenas) {
            sources[ranks[0] as usize] = source(arena);
        }
        let of = |rank: u32| {
            let holds = |(ranks, _): &(&Vec<u32>, &Arena)| ranks.contains(&rank);
            let (ranks, arena) = hosts.iter().zip(arenas).find(holds).expect("it has a host");
            (ranks, source(arena))
        };
        match self.collective {
            Collective::Barrier => Vec::new(),
            Collective::Broadcast => of(self.root).1,
            Collective::AllGather => {
                let part = self.part_bytes();
                let part_of = |rank: u32| match of(rank) {
                    (ranks, whole) if ranks.len() > 1 => {
                        whole[rank as usize * part..][..part].to_vec()
                    }
                    (_, own) => own,
                };
                (0..world).flat_map(part_of).collect()
            }
            _ => reference::reduce(tree, self.data_type, self.operation, &sources),
        }
    }

    /// Which bytes of a result of so many are computed on this tree.
    fn on_tree(&self, length: usize) -> impl Iterator<Item = Range<usize>> {
        let size = self.data_type.size() as usize;
        // Not by the stripe alone: an agreement that had bytes would be expected to have them.
        let elements = if self.stripe.is_none() { 0..0 } else { self.stripe.elements(self.count) };
        let (start, end) = (elements.start as usize * size, elements.end as usize * size);
        let parts = (0..length).step_by(self.part_bytes().max(1));
        parts.map(move |part| part + start..part + end)
    }

    /// The memory of a host with these ranks whose call has no result.
    pub(super) fn arena(&self, rng: &mut Rng, ranks: &[u32], world: u32, in_place: bool) -> Arena {
        let (source, destination) = self.lengths(ranks, world);
        let guard = |rng: &mut Rng| 8 + rng.below(24) as usize;
        let (source_bytes, target_bytes) = (source.unwrap_or(0), destination.unwrap_or(0));
        let start = guard(rng);
        let (from, to, end) = if in_place && source.is_some() && destination.is_some() {
            // The shorter one is the rank's own part of the longer one.
            let own = ranks[0] as usize * self.part_bytes();
            let from = start + if source_bytes < target_bytes { own } else { 0 };
            let to = start + if target_bytes < source_bytes { own } else { 0 };
            (from, to, start + source_bytes.max(target_bytes))
        } else {
            let to = start + source_bytes + guard(rng);
            (start, to, to + target_bytes)
        };
        let mut bytes = vec![0; end + guard(rng)];
        rng.fill(&mut bytes);
        let part = from..from + source_bytes;
        if self.reduces() {
            reference::draw(rng, self.data_type, self.operation, &mut bytes[part.clone()]);
        }
        // Keys and addresses of what a rank does not have mean nothing.
        let nothing = rng.bits();
        let request = CollectiveCall {
            collective: self.collective,
            data_type: self.data_type,
            operation: self.operation,
            root: self.root,
            count: self.count,
            stripe: self.stripe,
            mode: self.mode,
            source_key: nothing as u32,
            source_address: source.map_or(nothing >> 20, |_| from as u64),
            destination_key: (nothing >> 32) as u32,
            destination_address: destination.map_or(nothing >> 24, |_| to as u64),
        };
        let mut arena = Arena {
            request,
            number: self.number,
            bytes,
            source: part,
            destination: to..to + target_bytes,
            expected: None,
        };
        if source.is_none() {
            arena.source = 0..0;
        }
        if destination.is_none() {
            arena.destination = 0..0;
        }
        arena
    }
}

impl Arena {
    /// It has this key and address.
    pub(super) fn registered(&mut self, shape: &Shape, ranks: &[u32], world: u32, at: (u32, u64)) {
        let (source, destination) = shape.lengths(ranks, world);
        let (key, address) = at;
        if source.is_some() {
            self.request.source_key = key;
            self.request.source_address += address;
        }
        if destination.is_some() {
            self.request.destination_key = key;
            self.request.destination_address += address;
        }
    }

    /// Whether its result comes to where its source is.
    pub(super) fn is_in_place(&self) -> bool {
        self.source.start < self.destination.end && self.destination.start < self.source.end
    }
}
