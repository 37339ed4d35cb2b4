//! Which part of a call each tree of a communicator has.
//!
//! A communicator whose ranks have several NICs has a tree for each. The vector of a long call is divided: each tree
//! has a stripe of it, or of each rank's part where there are parts. All ranks divide alike, so an element is on the
//! same tree everywhere, and the order of float additions is that of its tree. A short call is on one tree, by
//! turns.

use core::ops::Range;

use crate::{Collective, CollectiveCall};

/// A communicator has so many trees at most.
pub const MAX_TREES: usize = 8;

/// A vector with fewer bytes than this for each tree is not divided. More than fit a packet with the descriptor: a
/// stripe has segments, or no element.
const MIN_STRIPE_BYTES: u64 = 16 << 10;

/// The part of a vector that is on one of several trees.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Stripe {
    tree: u8,
    trees: u8,
}

impl Stripe {
    /// All of it.
    pub const WHOLE: Self = Self { tree: 0, trees: 1 };

    /// None of it: the ranks agree on the call, and nothing else happens. The vector follows in calls of its parts.
    pub const NONE: Self = Self { tree: 0, trees: u8::MAX };

    /// That of one of so many trees; `None` when they are more than [`MAX_TREES`] or there is no such tree.
    pub const fn new(tree: u8, trees: u8) -> Option<Self> {
        match tree < trees && trees as usize <= MAX_TREES {
            true => Some(Self { tree, trees }),
            false => None,
        }
    }

    /// Which tree has it, from 0.
    pub const fn tree(self) -> u8 {
        self.tree
    }

    /// Of how many.
    pub const fn trees(self) -> u8 {
        self.trees
    }

    /// Whether it is [`Stripe::NONE`].
    pub const fn is_none(self) -> bool {
        self.trees == Self::NONE.trees
    }

    /// Which of so many elements are in it. There are at most 2^48, which eight times fits.
    pub const fn elements(self, count: u64) -> Range<u64> {
        if self.is_none() {
            return 0..0;
        }
        let (tree, trees) = (self.tree as u64, self.trees as u64);
        count * tree / trees..count * (tree + 1) / trees
    }

    /// The part that one of so many trees has of a call, the `number`th of its communicator; `None` when it has none.
    pub const fn of(
        call: &CollectiveCall,
        world: u32,
        number: u64,
        tree: u8,
        trees: u8,
    ) -> Option<Self> {
        if call.stripe.is_none() {
            return if number % trees as u64 == tree as u64 { Some(Self::NONE) } else { None };
        }
        let parts = match call.collective {
            Collective::ReduceScatter | Collective::AllGather => world as u64,
            Collective::Barrier => 0,
            _ => 1,
        };
        let elements = call.count.saturating_mul(parts);
        let bytes = elements.saturating_mul(call.data_type.size() as u64);
        if trees > 1 && bytes >= MIN_STRIPE_BYTES * trees as u64 {
            return Self::new(tree, trees);
        }
        match number % trees as u64 == tree as u64 {
            true => Some(Self::WHOLE),
            false => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataType, Mode, ReduceOperation};

    fn call(collective: Collective, count: u64) -> CollectiveCall {
        CollectiveCall {
            collective,
            data_type: DataType::Int32,
            operation: ReduceOperation::Sum,
            root: 0,
            count,
            stripe: Stripe::WHOLE,
            mode: Mode::Write,
            source_key: 0,
            source_address: 0,
            destination_key: 0,
            destination_address: 0,
        }
    }

    #[test]
    fn stripes_are_all_of_a_vector_and_no_element_is_in_two() {
        for trees in 1..=MAX_TREES as u8 {
            for count in [0, 1, 2, 7, 8, 9, 1000, 1 << 48] {
                let mut next = 0;
                for tree in 0..trees {
                    let range = Stripe::new(tree, trees).unwrap().elements(count);
                    assert_eq!(range.start, next, "{tree} of {trees}, {count}");
                    assert!(range.end - range.start <= count / u64::from(trees) + 1);
                    next = range.end;
                }
                assert_eq!(next, count);
            }
        }
        assert_eq!(Stripe::new(0, 1), Some(Stripe::WHOLE));
        for (tree, trees) in [(0, 0), (1, 1), (3, 2), (0, 9)] {
            assert_eq!(Stripe::new(tree, trees), None);
        }
    }

    #[test]
    fn long_calls_are_on_all_trees_and_short_ones_on_one_by_turns() {
        let trees_of = |call: &CollectiveCall, number, trees: u8| -> Vec<u8> {
            let of = |tree: &u8| Stripe::of(call, 4, number, *tree, trees).is_some();
            (0..trees).filter(of).collect()
        };
        let short = call(Collective::AllReduce, 8191);
        let long = call(Collective::AllReduce, 8192);
        for number in 0..6 {
            assert_eq!(trees_of(&short, number, 2), [(number % 2) as u8]);
            assert_eq!(trees_of(&long, number, 2), [0, 1]);
            assert_eq!(trees_of(&long, number, 3), [(number % 3) as u8]);
            assert_eq!(trees_of(&long, number, 1), [0]);
            assert_eq!(Stripe::of(&long, 4, number, 0, 1), Some(Stripe::WHOLE));
        }
        // Parts of four ranks.
        assert_eq!(trees_of(&call(Collective::AllGather, 2048), 0, 2), [0, 1]);
        assert_eq!(trees_of(&call(Collective::AllGather, 2047), 1, 2), [1]);
        assert_eq!(trees_of(&call(Collective::Barrier, u64::MAX), 1, 2), [1]);
        assert_eq!(trees_of(&call(Collective::ReduceScatter, u64::MAX), 1, 2), [0, 1]);
        let agreement = CollectiveCall { stripe: Stripe::NONE, ..long };
        for number in 0..6 {
            assert_eq!(trees_of(&agreement, number, 3), [(number % 3) as u8]);
        }
        assert_eq!(Stripe::of(&agreement, 4, 5, 1, 2), Some(Stripe::NONE));
        assert_eq!(Stripe::NONE.elements(1 << 48), 0..0);
    }
}
