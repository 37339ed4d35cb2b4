//! Hosts that have one connection for several ranks, and do long calls in chunks.
//!
//! What the ranks of a host do in the memory that they share is not simulated: what they have combined is drawn as one
//! vector, laid out as the whole one, and the result of all of them is looked at in one place.

use millstream_inc::{Collective, Stripe};

use super::call::Shape;
use super::tree::Tree;
use super::world::{Group, World, one_in};
use crate::Rng;

impl World {
    /// Puts ranks of some communicators together on hosts. Drawn from numbers of its own, so that a seed of before is
    /// the same run where that changes nothing.
    pub(super) fn share_hosts(&mut self, rng: &mut Rng) {
        for group in &mut self.groups {
            if one_in(rng, 4) {
                group.share_hosts(rng, self.switches);
            }
        }
    }
}

impl Group {
    fn share_hosts(&mut self, rng: &mut Rng, switches: usize) {
        let world = u64::from(self.sizes.world);
        // Two hosts can differ in what they call.
        let least = if self.mismatch.is_some() { 2 } else { 1 };
        // One that breaks the protocol does so as one rank.
        if world <= least || self.rude.is_some() {
            return;
        }
        let hosts = rng.between(least, world - 1);
        self.several = draw_hosts(rng, self.sizes.world, hosts);
        for ranks in &self.several {
            let machine = self.hosts[ranks[0] as usize];
            ranks.iter().for_each(|&rank| self.hosts[rank as usize] = machine);
        }
        self.cut_calls(rng);
        self.tree = self.draw_tree(rng, switches);
    }

    /// A tree for its hosts.
    pub(super) fn draw_tree(&self, rng: &mut Rng, switches: usize) -> Tree {
        Tree::of(rng, self.members().iter().map(|ranks| ranks[0]).collect(), switches)
    }

    /// Some calls become an agreement on the whole call, and calls of chunks of it.
    fn cut_calls(&mut self, rng: &mut Rng) {
        let mut calls: Vec<Shape> = Vec::new();
        let mut mismatch = None;
        for (index, shape) in self.calls.iter().enumerate() {
            let first = calls.len();
            cut_call(rng, shape, &mut calls);
            if let Some((at, rank, other)) = self.mismatch
                && at == index
            {
                // The host of that rank.
                let has = |ranks: &&Vec<u32>| ranks.contains(&rank);
                let rank = self.several.iter().find(has).map_or(rank, |ranks| ranks[0]);
                let Shape { stripe, number, .. } = calls[first];
                mismatch = Some((first, rank, Shape { stripe, number, ..other }));
            }
        }
        (self.calls, self.mismatch) = (calls, mismatch);
    }
}

/// Adds a call to others: as it is, or an agreement on it and calls of chunks of it.
pub(super) fn cut_call(rng: &mut Rng, shape: &Shape, calls: &mut Vec<Shape>) {
    let chunks = if one_in(rng, 2) { rng.between(2, 4) } else { 1 };
    let whole = chunks == 1 || shape.count < chunks || shape.collective == Collective::Barrier;
    let stripe = if whole { shape.stripe } else { Stripe::NONE };
    calls.push(Shape { stripe, number: calls.len() as u64, ..*shape });
    if whole {
        return;
    }
    let mut left = shape.count;
    for chunk in (1..=chunks).rev() {
        let count = left.div_ceil(chunk);
        left -= count;
        calls.push(Shape { count, number: calls.len() as u64, ..*shape });
    }
}

/// The ranks of each host, by the lowest, where these have several.
pub(super) fn members(world: u32, several: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let of = |rank: u32| match several.iter().find(|ranks| ranks.contains(&rank)) {
        Some(ranks) => (ranks[0] == rank).then(|| ranks.clone()),
        None => Some(vec![rank]),
    };
    (0..world).filter_map(of).collect()
}

/// All ranks on so many hosts: those with several.
pub(super) fn draw_hosts(rng: &mut Rng, world: u32, hosts: u64) -> Vec<Vec<u32>> {
    let mut of_host = vec![Vec::new(); hosts as usize];
    // No host is without a rank.
    let mut places: Vec<u64> = (0..hosts).collect();
    places.extend((hosts..world.into()).map(|_| rng.below(hosts)));
    for rank in 0..world {
        let place = places.swap_remove(rng.below(places.len() as u64) as usize);
        of_host[place as usize].push(rank);
    }
    of_host.retain(|ranks: &Vec<u32>| ranks.len() > 1);
    of_host
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_on_one_host_and_some_host_has_several() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let world = rng.between(2, 12) as u32;
            let hosts = rng.between(1, u64::from(world) - 1);
            let several = draw_hosts(&mut rng, world, hosts);
            let mut all = several.concat();
            let together = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), together, "{several:?}");
            assert!(several.iter().all(|ranks| ranks.is_sorted() && ranks.len() > 1));
            assert_eq!(together - several.len(), (u64::from(world) - hosts) as usize);
            let members = members(world, &several);
            assert_eq!(members.len() as u64, hosts, "{members:?}");
            assert!(members.is_sorted_by_key(|ranks| ranks[0]));
            let mut all = members.concat();
            all.sort_unstable();
            assert_eq!(all, (0..world).collect::<Vec<_>>());
        }
    }
}
