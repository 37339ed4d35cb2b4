//! The best way from a root down to each switch below it.

use core::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Aim, Demand, LinkIndex, SwitchIndex, Topology, is_lacking};

/// How good the way to a switch is: what its slowest link leaves, then hops, then the load of its switches. To
/// explain, how many switches are lacking on it, then hops. More is better.
type Worth = (u64, Reverse<u32>, Reverse<usize>);

/// The ways from one root.
pub(super) struct Paths {
    /// Of the switches that it leads to, how good the way is, and its last link; none to the root itself.
    known: Vec<Option<(Worth, Option<LinkIndex>)>>,
    cap: u64,
}

impl Paths {
    /// The ways down from a root over usable switches. No link is worth more than `cap`, so that hops decide
    /// where hosts' own links are slower anyway.
    pub(super) fn below(
        topology: &Topology,
        demand: &Demand<'_>,
        aim: Aim,
        usable: &[bool],
        root: SwitchIndex,
        cap: u64,
    ) -> Self {
        let cost = |switch: SwitchIndex| match aim {
            Aim::Plan => {
                let state = demand.switches.get(switch).copied().flatten();
                (1, state.map_or(0, |state| state.nodes))
            }
            Aim::Explain => (u32::from(is_lacking(demand, switch)), 1),
        };
        let mut known = vec![None; usable.len()];
        let start: Worth = (u64::MAX, Reverse(0), Reverse(cost(root).1));
        let mut heap = BinaryHeap::from([(start, Reverse(root), None)]);
        // As Dijkstra's algorithm: what comes out of the heap first goes on from the best way to the switch above.
        // No way to a switch has a better rate. To plan, one of the same rate may have fewer hops, over a worse
        // way to the switch above, whose rate a slow link below it does not need.
        while let Some((worth, Reverse(switch), link)) = heap.pop() {
            if known[switch].is_some() {
                continue;
            }
            known[switch] = Some((worth, link.map(|Reverse(link)| link)));
            let (rate, Reverse(hops), Reverse(loads)) = worth;
            for &link in &topology.switches[switch].below {
                let Some(lower) = topology.lower_switch(link).filter(|&lower| usable[lower]) else {
                    continue;
                };
                let rate = match aim {
                    Aim::Plan => rate.min(topology.rate_left(demand, link).min(cap)),
                    Aim::Explain => rate,
                };
                let (hop, load) = cost(lower);
                let worth = (rate, Reverse(hops + hop), Reverse(loads + load));
                heap.push((worth, Reverse(lower), Some(Reverse(link))));
            }
        }
        Self { known, cap }
    }

    /// The link up from a switch; none at the root.
    pub(super) fn up(&self, switch: SwitchIndex) -> Option<LinkIndex> {
        self.known[switch].and_then(|(_, link)| link)
    }

    /// The best of the links to a host.
    pub(super) fn to_host(
        &self,
        topology: &Topology,
        demand: &Demand<'_>,
        links: &[LinkIndex],
    ) -> Option<LinkIndex> {
        let worth = |&link: &LinkIndex| {
            let ((rate, hops, loads), _) = self.known[topology.links[link].upper]?;
            let rate = rate.min(topology.rate_left(demand, link).min(self.cap));
            Some(((rate, hops, loads), Reverse(link)))
        };
        let (_, Reverse(link)) = links.iter().filter_map(worth).max()?;
        Some(link)
    }
}
