//! How near rails are to memory, and which of them use each NIC once: what all policies need.

use crate::{Instant, RailId, RailState, Rails, SliceInfo};

/// The NICs of a location.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Priority {
    /// Taken first.
    pub preferred: Vec<u16>,
    /// Taken when no preferred one can be.
    pub available: Vec<u16>,
}

/// The peer's NICs for slices over one of ours, where not all pairs are alike: where each NIC has a network
/// of its own, say.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Affinity {
    /// By the peer's locations.
    pub locations: Vec<Priority>,
    /// For memory that is at none of them.
    pub elsewhere: Priority,
}

/// The NICs of all locations, at both ends.
#[derive(Debug)]
pub(crate) struct Nearness {
    local: Vec<Priority>,
    peer: Vec<Priority>,
    /// By our NICs. Without, `peer` holds for each of them.
    affinity: Vec<Affinity>,
}

impl Nearness {
    pub(crate) const fn new(local: Vec<Priority>, peer: Vec<Priority>) -> Self {
        Self { local, peer, affinity: Vec::new() }
    }

    pub(crate) fn with_affinity(self, affinity: Vec<Affinity>) -> Self {
        Self { affinity, ..self }
    }

    /// The rails of a pair of locations: those that are preferred at both ends, at one, and at none. Each
    /// tier is in order of transports, and within one of NICs as they were added.
    pub(crate) fn tiers(&self, slice: &SliceInfo, rails: &Rails<'_>) -> [Vec<RailId>; 3] {
        let rank = |list: Option<&Priority>, nic: u16| {
            let Some(list) = list else { return Some(1) };
            let available = || list.available.contains(&nic).then_some(1);
            if list.preferred.contains(&nic) { Some(0) } else { available() }
        };
        let (here, there) = (usize::from(slice.local_location), usize::from(slice.peer_location));
        let peer_list = |own: u16| match self.affinity.get(usize::from(own)) {
            Some(affinity) => Some(affinity.locations.get(there).unwrap_or(&affinity.elsewhere)),
            None => self.peer.get(there),
        };
        let mut tiers: [Vec<RailId>; 3] = Default::default();
        for (index, rail) in rails.all.iter().enumerate() {
            let spec = rail.spec();
            let local = rank(self.local.get(here), spec.local_nic);
            let peer = rank(peer_list(spec.local_nic), spec.peer_nic);
            if let (Some(local), Some(peer)) = (local, peer) {
                tiers[local + peer].push(RailId(index as u16));
            }
        }
        for tier in &mut tiers {
            tier.sort_by_key(|rail| rails.all[usize::from(rail.0)].spec().transport);
        }
        tiers
    }
}

/// Whether a rail is connected or will be.
pub(crate) fn is_busy(rails: &Rails<'_>, id: RailId) -> bool {
    matches!(rails.rail(id).state(), RailState::Up | RailState::Connecting)
}

/// The one to connect of these rails, so that each of their NICs, at both ends, has one that is connected or
/// will be.
pub(crate) fn to_connect(
    now: Instant,
    rails: &Rails<'_>,
    of: impl Iterator<Item = RailId> + Clone,
) -> Option<RailId> {
    let busy = |id: &RailId| is_busy(rails, *id);
    // How many of its two NICs have none.
    let alone = |id: RailId| {
        let spec = rails.rail(id).spec();
        let others = || of.clone().filter(busy).map(|other| rails.rail(other).spec());
        usize::from(others().all(|other| other.local_nic != spec.local_nic))
            + usize::from(others().all(|other| other.peer_nic != spec.peer_nic))
    };
    let may_connect = |id: &RailId| rails.rail(*id).may_connect(now);
    let mut wanted = [2, 1].into_iter();
    wanted.find_map(|wanted| of.clone().filter(may_connect).find(|&id| alone(id) == wanted))
}

/// Adds those of these rails that use a NIC which no other one of them uses. Those that took the place of
/// one that had failed are not used beside it: a link that two of them have is the slowest then.
pub(crate) fn each_nic_once(
    rails: &Rails<'_>,
    of: impl Iterator<Item = RailId> + Clone,
    used: &mut Vec<RailId>,
) {
    for wanted in [2, 1] {
        for id in of.clone() {
            let spec = rails.rail(id).spec();
            let others = || used.iter().map(|used| rails.rail(*used).spec());
            let alone = usize::from(others().all(|other| other.local_nic != spec.local_nic))
                + usize::from(others().all(|other| other.peer_nic != spec.peer_nic));
            if alone >= wanted {
                used.push(id);
            }
        }
    }
}
