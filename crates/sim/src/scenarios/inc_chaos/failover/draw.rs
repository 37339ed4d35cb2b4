//! A communicator that goes on when a switch is lost, and what it loses.

use core::time::Duration;

use millstream_inc::{DataType, Mode, ReduceOperation};
use millstream_wire::Mtu;

use super::super::call::{Shape, Sizes};
use super::super::several::{cut_call, draw_hosts, members};
use super::super::tree::Tree;
use super::super::world::{Trouble, World, moment, one_in};
use crate::Rng;

/// A vector of so many bytes for each tree is divided among them.
const DIVIDED_BYTES: u64 = 16 << 10;

/// A communicator that goes on.
#[derive(Clone, Debug)]
pub(in super::super) struct Group {
    /// The machine of each rank.
    pub(super) hosts: Vec<usize>,
    /// The ranks of each host that has a connection to a tree, by the lowest: of one that has several, the lowest is there
    /// for all.
    pub(super) members: Vec<Vec<u32>>,
    pub(super) calls: Vec<Shape>,
    /// One set of trees after the other.
    pub(super) lines: Vec<Line>,
    /// What happens to each of the first sets of trees.
    pub(super) losses: Vec<Loss>,
    /// It is a host that dies, and the ranks do not go on.
    pub(super) loses_host: bool,
    /// Ranks keep copies of what results overwrite.
    pub(super) keeps_overwritten: bool,
    /// Bytes that are made up for at a time.
    pub(super) chunk: usize,
}

/// What happens to a switch, or a host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loss {
    /// How long after the ranks were connected.
    pub(super) at: Duration,
    pub(super) trouble: Trouble,
    /// A host is cut off for a moment before, and so behind the others.
    pub(super) before: Option<(Duration, Trouble)>,
}

/// A set of trees.
#[derive(Clone, Debug)]
pub(super) struct Line {
    /// Their switches are counted from the first machine behind the hosts.
    pub(super) trees: Vec<Tree>,
    pub(super) sizes: Sizes,
    pub(super) path_mtu: Mtu,
    /// The switches are the ranks' own.
    pub(super) is_hosted: bool,
}

impl World {
    /// Adds a communicator that goes on to some runs in which nothing else happens that need not be survived; in half of
    /// these, its hosts have several ranks. Drawn from numbers of its own, and what has hosts with several ranks from others,
    /// so that a seed of before is the same run where that changes nothing.
    pub(in super::super) fn add_failover(&mut self, rng: &mut Rng, of_several: &mut Rng) {
        if self.breaks || !one_in(rng, 3) {
            return;
        }
        let group = match one_in(of_several, 2) {
            true => Group::draw_several(of_several, self),
            false => Group::draw(rng, self),
        };
        for loss in &group.losses {
            let (Trouble::Death { machine }
            | Trouble::Stand { machine, .. }
            | Trouble::Cut { machine, .. }) = loss.trouble
            else {
                continue;
            };
            // Other communicators on that machine do not go on.
            let uses: Vec<bool> = self
                .groups
                .iter()
                .map(|it| {
                    let mut trees = self.groups.iter().filter(|other| other.family == it.family);
                    trees.any(|other| other.uses(machine, self.hosts))
                })
                .collect();
            for (it, _) in self.groups.iter_mut().zip(uses).filter(|(_, uses)| *uses) {
                (it.may_fail, it.is_excused) = (true, true);
            }
        }
        self.failover = Some(group);
    }
}

impl Group {
    fn draw(rng: &mut Rng, world: &World) -> Self {
        let ranks = rng.between(1, 6) as u32;
        let hosts = draw_machines(rng, ranks, world);
        Self::of(rng, world, hosts, members(ranks, &[]))
    }

    /// Some of its hosts have several ranks, and do long calls in chunks.
    fn draw_several(rng: &mut Rng, world: &World) -> Self {
        let ranks = rng.between(2, 8) as u32;
        let count = rng.between(1, u64::from(ranks) - 1);
        let several = draw_hosts(rng, ranks, count);
        let mut hosts = draw_machines(rng, ranks, world);
        for ranks in &several {
            let machine = hosts[ranks[0] as usize];
            ranks.iter().for_each(|&rank| hosts[rank as usize] = machine);
        }
        let group = Self::of(rng, world, hosts, members(ranks, &several));
        let mut calls = Vec::new();
        group.calls.iter().for_each(|shape| cut_call(rng, shape, &mut calls));
        Self { calls, ..group }
    }

    fn of(rng: &mut Rng, world: &World, hosts: Vec<usize>, members: Vec<Vec<u32>>) -> Self {
        let ranks = hosts.len() as u32;
        let loses_host = one_in(rng, 8);
        let most = match rng.below(4) {
            _ if loses_host => 0,
            0 => 2,
            _ => 1,
        };
        let mut free: Vec<usize> = (0..world.switches).collect();
        let mut lines = vec![Line::draw(rng, &members, &free, false)];
        let mut losses = Vec::new();
        while losses.len() < most && lines.last().is_some_and(|line| !line.is_hosted) {
            let line = &lines[lines.len() - 1];
            let lost = line.draw_switch(rng);
            losses.push(Loss::draw(rng, world, &hosts, world.hosts + lost));
            free.retain(|&switch| switch != lost);
            let is_hosted = free.is_empty() || one_in(rng, 3);
            // Behind the switches is the outsider.
            let own = hosts.iter().map(|host| world.switches + 1 + host).collect();
            let places: Vec<usize> = if is_hosted { own } else { free.clone() };
            lines.push(Line::draw(rng, &members, &places, is_hosted));
        }
        if loses_host {
            let machine = hosts[rng.below(ranks.into()) as usize];
            let (at, trouble) = (moment(rng), Trouble::Death { machine });
            losses.push(Loss { at, trouble, before: None });
        }
        let calls = draw_calls(rng, &lines[0]);
        Self {
            hosts,
            members,
            calls,
            lines,
            losses,
            loses_host,
            keeps_overwritten: !one_in(rng, 8),
            chunk: [64, 256, 1024, 4096][rng.below(4) as usize],
        }
    }

    /// Memory regions of a machine for each of its connections: vectors, two that parts of them are made up for in, and one
    /// for each tree.
    pub(in super::super) fn regions_on(&self, machine: usize) -> usize {
        let connections = self.connections().filter(|&(.., host)| host == machine).count();
        let trees: usize = self.lines.iter().map(|line| line.trees.len()).sum();
        connections * (self.calls.len() + 2 + trees)
    }

    /// The ranks that each connection is for, and its machine.
    pub(super) fn connections(&self) -> impl Iterator<Item = (&[u32], usize)> {
        self.members.iter().map(|ranks| (&ranks[..], self.hosts[ranks[0] as usize]))
    }

    /// The ranks of the host whose lowest rank this is.
    pub(super) fn ranks_with(&self, rank: u32) -> &[u32] {
        let all = self.members.iter().find(|ranks| ranks[0] == rank);
        all.map_or(&[], |ranks| ranks)
    }

    /// Whether some host has several ranks.
    pub(super) fn has_several(&self) -> bool {
        self.members.len() < self.hosts.len()
    }

    /// Whether a host takes the place of a switch at some time.
    pub(in super::super) fn is_hosted(&self) -> bool {
        self.lines.iter().any(|line| line.is_hosted)
    }

    /// Whether some rank is on a host.
    pub(in super::super) fn is_on(&self, machine: usize) -> bool {
        self.hosts.contains(&machine)
    }
}

impl Line {
    /// Trees on some of these switches.
    fn draw(rng: &mut Rng, members: &[Vec<u32>], places: &[usize], is_hosted: bool) -> Self {
        let path_mtu = [Mtu::B256, Mtu::B512, Mtu::B1024][rng.below(3) as usize];
        let sizes = Sizes {
            path_mtu: path_mtu.bytes() as u32,
            segment_bytes: path_mtu.bytes() as u32 * rng.between(1, 4) as u32,
            window: rng.between(1, 8) as u32,
            world: members.iter().map(|ranks| ranks.len() as u32).sum(),
        };
        let lowest = || members.iter().map(|ranks| ranks[0]).collect();
        let mut trees: Vec<Tree> =
            (0..rng.between(1, 3)).map(|_| Tree::of(rng, lowest(), places.len())).collect();
        for node in trees.iter_mut().flat_map(|tree| &mut tree.nodes) {
            node.switch = places[node.switch];
        }
        Self { trees, sizes, path_mtu, is_hosted }
    }

    fn draw_switch(&self, rng: &mut Rng) -> usize {
        let tree = &self.trees[rng.below(self.trees.len() as u64) as usize];
        tree.nodes[rng.below(tree.nodes.len() as u64) as usize].switch
    }
}

impl Loss {
    /// A switch dies, or is away for longer or shorter than its neighbours are patient.
    fn draw(rng: &mut Rng, world: &World, hosts: &[usize], machine: usize) -> Self {
        let length = world.timeout() * rng.between(2, 80) as u32;
        let trouble = match rng.below(3) {
            0 => Trouble::Death { machine },
            1 => Trouble::Cut { machine, length },
            _ => Trouble::Stand { machine, length },
        };
        let at = moment(rng);
        if one_in(rng, 2) {
            return Self { at, trouble, before: None };
        }
        let machine = hosts[rng.below(hosts.len() as u64) as usize];
        let length = Duration::from_nanos(1 << rng.between(14, 23));
        let before = Some((at, Trouble::Cut { machine, length }));
        Self { at: at + length.mul_f64(rng.below(100) as f64 / 100.0), trouble, before }
    }
}

/// The machine of each rank.
fn draw_machines(rng: &mut Rng, ranks: u32, world: &World) -> Vec<usize> {
    (0..ranks).map(|_| rng.below(world.hosts as u64) as usize).collect()
}

fn draw_calls(rng: &mut Rng, line: &Line) -> Vec<Shape> {
    let modes: &[Mode] = match rng.below(4) {
        0 => &[Mode::Write],
        1 => &[Mode::Send],
        _ => &[Mode::Write, Mode::Send],
    };
    let (sizes, trees) = (&line.sizes, line.trees.len() as u64);
    let count = rng.between(1, 8);
    let call = |number: u64| {
        let mut shape = Shape { number, ..Shape::draw(rng, sizes, modes) };
        // What 16-bit floats are rounded to shows which tree a result is from.
        if one_in(rng, 2) {
            shape.data_type = [DataType::Float16, DataType::BFloat16][rng.below(2) as usize];
            use ReduceOperation::{Average, Product, Sum};
            shape.operation = [Sum, Average, Product][rng.below(3) as usize];
            shape.count = shape.draw_count(rng, sizes);
        }
        if trees > 1 && one_in(rng, 4) {
            let bytes = DIVIDED_BYTES * trees / shape.parts(sizes.world);
            shape.count = bytes.div_ceil(shape.data_type.size().into()) + rng.below(64);
        }
        shape
    };
    (0..count).map(call).collect()
}
