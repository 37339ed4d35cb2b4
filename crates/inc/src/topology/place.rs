//! Trees on a network: which of the switches above a group's hosts are its tree, and which is the root.
//!
//! Every switch that is above all hosts could be the root. Below each of them the path to each switch is chosen
//! by itself, by the rate that it leaves a tree, then by hops, then by the switches' load: one tree for each root.
//! Of these, the one wins whose slowest link leaves most, then the one of fewest levels, of fewest nodes, of least
//! load.

mod build;
mod paths;
#[cfg(test)]
mod tests;

use core::cmp::Reverse;
use core::net::IpAddr;
use std::collections::BTreeMap;

use millstream_wire::Mtu;
use thiserror::Error;

use super::{LinkIndex, Lower, SwitchIndex, Topology};
use crate::plan::{FanIn, MAX_DEPTH, SwitchId, Tree, TreeError};
use crate::spec::{node_bytes, node_queue_pairs};
use paths::Paths;

/// A switch of the network that is there, and what it can still take.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SwitchState {
    /// Its number at the controller.
    pub switch: SwitchId,
    /// How many nodes of trees it serves.
    pub nodes: usize,
    /// How many more it can.
    pub free_nodes: usize,
    /// How many bytes of slots and queues it has left.
    pub free_bytes: u64,
    /// How many queue pairs: a node has one for each child, and one for the way up.
    pub free_queue_pairs: usize,
}

/// What is to be placed, and what is there.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// The address of each rank.
    pub hosts: &'a [IpAddr],
    /// The switches of the network that may be taken, by their index.
    pub switches: &'a [Option<SwitchState>],
    /// How many trees use each link.
    pub users: &'a [u32],
    /// How many children a node may have, on any switch.
    pub fan_in: FanIn,
    /// Bytes of a segment.
    pub segment_bytes: u32,
    /// Segments in a window.
    pub window: u32,
}

/// A tree, and the links between its nodes and to its hosts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Placed {
    /// The tree.
    pub tree: Tree,
    /// The links, in order.
    pub links: Vec<LinkIndex>,
}

/// Why there is no tree.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum PlaceError {
    /// A host that the network does not have.
    #[error("rank {rank} is at {address}, and the network has no host there")]
    UnknownHost {
        /// Whose address it is.
        rank: u32,
        /// The address.
        address: IpAddr,
    },
    /// No switch is above all hosts.
    #[error("no switch is above all hosts of the group")]
    Apart,
    /// The tree would be too deep.
    #[error("the tree would have more than {MAX_DEPTH} levels of switches")]
    Depth,
    /// Switches that are needed are not there.
    #[error("switches are not there")]
    Missing(Vec<SwitchIndex>),
    /// A switch that is needed has no room.
    #[error("a switch has no room")]
    Full {
        /// Which.
        switch: SwitchIndex,
        /// How many nodes it would get.
        nodes: usize,
        /// How many bytes they would take.
        bytes: u64,
        /// How many queue pairs they would have.
        queue_pairs: usize,
    },
    /// What was planned is no tree: a defect of the planner.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// The ranks at an address, and the links to it.
struct Attachment<'a> {
    ranks: Vec<u32>,
    links: &'a [LinkIndex],
}

/// What a switch contributes to a tree.
#[derive(Clone, Debug, Default)]
struct Share {
    ranks: Vec<u32>,
    switches: Vec<SwitchIndex>,
    nodes: usize,
    bytes: u64,
    queue_pairs: usize,
}

/// A tree that could be.
struct Draft {
    root: SwitchIndex,
    /// By switch, for those that are part of it.
    shares: BTreeMap<SwitchIndex, Share>,
    links: Vec<LinkIndex>,
    /// What the slowest link leaves; to explain, less the more switches are lacking.
    rate: u64,
    depth: u32,
    nodes: usize,
    load: usize,
}

impl Draft {
    /// Less is better.
    fn cost(&self) -> impl Ord + use<> {
        (Reverse(self.rate), self.depth, self.nodes, self.load, self.root)
    }
}

/// How many switches without room are left out, one after the other, before a group is told of the first.
const MAX_FULL: usize = 16;

/// What a tree is looked for.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Aim {
    /// To be made: only of switches that are there and have room.
    Plan,
    /// To say what is missing: of all switches, as few as possible of which are not there or have no room.
    Explain,
}

/// Why a switch is not the root of a tree.
enum Unfit {
    /// It is not above all hosts, or one below it is a better root.
    Elsewhere,
    Depth,
}

impl Topology {
    /// The best tree for these hosts. The same demand gives the same tree.
    pub fn place(&self, demand: &Demand<'_>) -> Result<Placed, PlaceError> {
        let attachments = self.attachments(demand.hosts)?;
        let all = 0..self.switches.len();
        let usable: Vec<bool> = all.map(|switch| !is_lacking(demand, switch)).collect();
        if let Ok(draft) = self.best(demand, &attachments, Aim::Plan, &usable) {
            return self.build(demand, &draft);
        }
        let state = |switch: SwitchIndex| demand.switches.get(switch).copied().flatten();
        let mut usable = vec![true; self.switches.len()];
        let mut first_full = None;
        // A switch that has no room is left out, since one that is only not there may do as well.
        for _ in 0..MAX_FULL {
            let draft = match self.best(demand, &attachments, Aim::Explain, &usable) {
                Ok(draft) => draft,
                Err(unfit) => {
                    return Err(first_full.unwrap_or(match unfit {
                        Unfit::Elsewhere => PlaceError::Apart,
                        Unfit::Depth => PlaceError::Depth,
                    }));
                }
            };
            let switches = draft.shares.keys().copied();
            let missing: Vec<_> = switches.filter(|&switch| state(switch).is_none()).collect();
            if !missing.is_empty() {
                return Err(PlaceError::Missing(missing));
            }
            let lacks = |&(&switch, share): &(&SwitchIndex, &Share)| {
                state(switch).is_some_and(|state| !has_room(&state, share))
            };
            let Some((&switch, share)) = draft.shares.iter().find(lacks) else {
                // The search by rate has missed it, since it goes around switches without room one at a time.
                return self.build(demand, &draft);
            };
            usable[switch] = false;
            let Share { nodes, bytes, queue_pairs, .. } = *share;
            first_full.get_or_insert(PlaceError::Full { switch, nodes, bytes, queue_pairs });
        }
        Err(first_full.unwrap_or(PlaceError::Apart))
    }

    fn attachments(&self, hosts: &[IpAddr]) -> Result<Vec<Attachment<'_>>, PlaceError> {
        let mut by_address: BTreeMap<IpAddr, Attachment<'_>> = BTreeMap::new();
        for (&address, rank) in hosts.iter().zip(0..) {
            let links = self.attachments.get(&address);
            let links = links.ok_or(PlaceError::UnknownHost { rank, address })?;
            let of = by_address.entry(address);
            of.or_insert(Attachment { ranks: Vec::new(), links }).ranks.push(rank);
        }
        // Ranks of one address stay beside each other, where a switch has several nodes.
        let mut attachments: Vec<_> = by_address.into_values().collect();
        attachments.sort_unstable_by_key(|attachment| attachment.ranks.first().copied());
        Ok(attachments)
    }

    /// What a link leaves a tree of what it carries.
    fn rate_left(&self, demand: &Demand<'_>, link: LinkIndex) -> u64 {
        let rate = self.links[link].rate.unwrap_or(self.default_rate).bits_per_s();
        let users = demand.users.get(link).copied().unwrap_or_default();
        rate / (u64::from(users) + 1)
    }

    /// The best of all roots, of usable switches.
    fn best(
        &self,
        demand: &Demand<'_>,
        attachments: &[Attachment<'_>],
        aim: Aim,
        usable: &[bool],
    ) -> Result<Draft, Unfit> {
        let state = |switch: SwitchIndex| demand.switches.get(switch).copied().flatten();
        let mut best: Result<Draft, Unfit> = Err(Unfit::Elsewhere);
        for root in (0..usable.len()).filter(|&root| usable[root]) {
            // Without those that turn out to have no room.
            let mut usable = usable.to_vec();
            let draft = loop {
                let draft = match self.draft(demand, attachments, aim, &usable, root) {
                    Ok(draft) => draft,
                    unfit => break unfit,
                };
                let full = draft.shares.iter().find(|&(&switch, share)| {
                    aim == Aim::Plan && state(switch).is_none_or(|state| !has_room(&state, share))
                });
                match full {
                    None => break Ok(draft),
                    Some((&switch, _)) if switch == root => break Err(Unfit::Elsewhere),
                    Some((&switch, _)) => usable[switch] = false,
                }
            };
            best = match (best, draft) {
                (Ok(best), Ok(draft)) if best.cost() <= draft.cost() => Ok(best),
                (_, Ok(draft)) => Ok(draft),
                (Err(Unfit::Elsewhere), Err(unfit)) => Err(unfit),
                (best, Err(_)) => best,
            };
        }
        best
    }

    /// The tree of this root.
    fn draft(
        &self,
        demand: &Demand<'_>,
        attachments: &[Attachment<'_>],
        aim: Aim,
        usable: &[bool],
        root: SwitchIndex,
    ) -> Result<Draft, Unfit> {
        let paths = Paths::below(self, demand, aim, usable, root, self.cap(demand, attachments));
        let mut shares: BTreeMap<SwitchIndex, Share> = BTreeMap::new();
        let mut links = Vec::new();
        for attachment in attachments {
            let link = paths.to_host(self, demand, attachment.links).ok_or(Unfit::Elsewhere)?;
            links.push(link);
            let leaf = self.links[link].upper;
            let is_new = !shares.contains_key(&leaf);
            shares.entry(leaf).or_default().ranks.extend(&attachment.ranks);
            if is_new {
                self.connect(&paths, leaf, &mut shares, &mut links);
            }
        }
        links.sort_unstable();
        let rate = match aim {
            Aim::Plan => links.iter().map(|&link| self.rate_left(demand, link)).min(),
            Aim::Explain => {
                let lacking = shares.keys().filter(|&&switch| is_lacking(demand, switch)).count();
                Some(u64::MAX - lacking as u64)
            }
        };
        let rate = rate.unwrap_or_default();
        if shares.get(&root).is_some_and(|share| share.ranks.is_empty() && share.switches.len() < 2)
        {
            // The one below is a better root.
            return Err(Unfit::Elsewhere);
        }
        let mut depth = 0;
        let mut next = vec![(root, 0)];
        while let Some((switch, above)) = next.pop() {
            let fan_in = self.fan_in(demand, switch);
            let Some(share) = shares.get_mut(&switch) else { continue };
            share.switches.sort_unstable();
            let children = share.ranks.len() + share.switches.len();
            let levels = build::levels(children, fan_in).ok_or(Unfit::Depth)?;
            let below = above + levels.len() as u32;
            if below > MAX_DEPTH {
                return Err(Unfit::Depth);
            }
            depth = depth.max(below);
            share.nodes = levels.iter().sum();
            (share.bytes, share.queue_pairs) = (0, 0);
            for (&nodes, &children) in levels.iter().zip([children].iter().chain(&levels)) {
                let most = children.div_ceil(nodes);
                let bytes = node_bytes(most, true, demand.segment_bytes, demand.window, Mtu::B4096);
                share.bytes += nodes as u64 * bytes;
                share.queue_pairs += nodes * node_queue_pairs(most);
            }
            next.extend(share.switches.iter().map(|&below_it| (below_it, below)));
        }
        let nodes = shares.values().map(|share| share.nodes).sum();
        let states = shares.keys().filter_map(|&switch| demand.switches.get(switch)?.as_ref());
        let load = states.map(|state| state.nodes).sum();
        Ok(Draft { root, shares, links, rate, depth, nodes, load })
    }

    /// Adds the way from a switch up to what is part of the tree already.
    fn connect(
        &self,
        paths: &Paths,
        from: SwitchIndex,
        shares: &mut BTreeMap<SwitchIndex, Share>,
        links: &mut Vec<LinkIndex>,
    ) {
        let mut lower = from;
        while let Some(link) = paths.up(lower) {
            let upper = self.links[link].upper;
            links.push(link);
            let is_new = !shares.contains_key(&upper);
            shares.entry(upper).or_default().switches.push(lower);
            if !is_new {
                return;
            }
            lower = upper;
        }
    }

    /// No tree for these hosts gets more than this.
    fn cap(&self, demand: &Demand<'_>, attachments: &[Attachment<'_>]) -> u64 {
        let fastest = |attachment: &Attachment<'_>| {
            attachment.links.iter().map(|&link| self.rate_left(demand, link)).max().unwrap_or(0)
        };
        attachments.iter().map(fastest).min().unwrap_or(0)
    }

    fn fan_in(&self, demand: &Demand<'_>, switch: SwitchIndex) -> FanIn {
        match self.switches[switch].fan_in {
            Some(own) if own.get() < demand.fan_in.get() => own,
            _ => demand.fan_in,
        }
    }

    /// The switch at the lower end of a link.
    fn lower_switch(&self, link: LinkIndex) -> Option<SwitchIndex> {
        match self.links[link].lower {
            Lower::Switch(switch) => Some(switch),
            Lower::Host(_) => None,
        }
    }
}

/// Whether a switch is not there, or can take nothing more.
fn is_lacking(demand: &Demand<'_>, switch: SwitchIndex) -> bool {
    demand.switches.get(switch).copied().flatten().is_none_or(|state| state.free_nodes == 0)
}

fn has_room(state: &SwitchState, share: &Share) -> bool {
    share.nodes <= state.free_nodes
        && share.bytes <= state.free_bytes
        && share.queue_pairs <= state.free_queue_pairs
}
