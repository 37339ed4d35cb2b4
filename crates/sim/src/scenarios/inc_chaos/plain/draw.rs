//! What a communicator of plain hosts does, and what its ranks do wrong.

use millstream_inc::{Collective, DataType, Mode, ReduceOperation, Stripe};
use millstream_wire::Mtu;

use super::super::call::{Shape, Sizes};
use super::super::tree::{Tree, TreeNode};
use super::super::world::{Group, Trouble, World, one_in};
use crate::Rng;

/// What hosts without descriptors do differently.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Plain {
    /// Messages that a host sends before the first of them is answered. Where they are more than a window, the switch has no
    /// receive for some of them.
    pub(super) lead: usize,
    /// They acknowledge at once, as adapters do.
    pub(in super::super) is_prompt: bool,
    /// The rank that sends something else in place of one of its messages, and of which.
    pub(super) breach: Option<(u32, usize, Breach)>,
}

impl Plain {
    /// Whether no rank sends what such hosts do not.
    pub(in super::super) const fn breaks_nothing(&self) -> bool {
        self.breach.is_none()
    }
}

/// What no plain host sends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Breach {
    /// A message without a vector.
    Empty,
    /// One that ends amid an element.
    Uneven,
    /// One that is longer than a segment.
    Long,
    /// A WRITE.
    Write,
    /// A WRITE of nothing with immediate data.
    WriteImmediate,
    /// A message with immediate data.
    Immediate(u32),
    /// What hosts with descriptors say without a vector: this immediate data.
    Note(u32),
}

/// Of what hosts with descriptors say to a switch, and a switch to another: a credit, that somebody waits no longer, who is
/// awaited, what somebody has called; of the first numbers.
const NOTES: [u32; 6] = [3 << 30, 3 << 30 | 1, 0xa000_0000, 0xb000_0000, 0x8000_0001, 0x8000_0000];

impl Breach {
    fn draw(rng: &mut Rng) -> Self {
        let note = NOTES[rng.below(NOTES.len() as u64) as usize];
        match rng.below(8) {
            0 => Self::Empty,
            1 => Self::Uneven,
            2 => Self::Long,
            3 => Self::Write,
            4 => Self::WriteImmediate,
            5 => Self::Immediate(note),
            _ => Self::Note(note),
        }
    }
}

impl World {
    /// Adds a communicator of plain hosts to some runs. Drawn from numbers of its own, so that a seed of before is the same run
    /// where that changes nothing.
    pub(in super::super) fn add_plain(&mut self, rng: &mut Rng) {
        if !one_in(rng, 3) {
            return;
        }
        let family = self.groups.iter().map(|group| group.family + 1).max().unwrap_or(0);
        let mut group = Group::draw_plain(rng, family, self.hosts, self.switches);
        let hits = |trouble: &Trouble| match *trouble {
            Trouble::Cut { machine, .. }
            | Trouble::Stand { machine, .. }
            | Trouble::Death { machine } => group.uses(machine, self.hosts),
            _ => false,
        };
        let hit = self.troubles.iter().any(|(_, trouble)| hits(trouble));
        group.may_fail = self.is_heavy || self.breaks && hit;
        group.is_excused = group.may_fail;
        match rng.below(6) {
            0 => group.differ_in_length(rng),
            1 => group.break_rules(rng),
            _ => {}
        }
        self.groups.push(group);
    }
}

impl Group {
    fn draw_plain(rng: &mut Rng, family: usize, hosts: usize, switches: usize) -> Self {
        let world = rng.between(1, 12) as u32;
        let path_mtu = [Mtu::B256, Mtu::B512, Mtu::B1024][rng.below(3) as usize];
        let sizes = Sizes {
            path_mtu: path_mtu.bytes() as u32,
            segment_bytes: path_mtu.bytes() as u32 * rng.between(1, 4) as u32,
            window: rng.between(1, 8) as u32,
            world,
        };
        let switch = rng.below(switches as u64) as usize;
        let node = TreeNode { switch, parent: None, ranks: (0..world).collect() };
        let calls = (0..rng.between(1, 12)).map(|number| Shape {
            collective: Collective::AllReduce,
            data_type: DataType::Int32,
            operation: ReduceOperation::Sum,
            root: 0,
            count: draw_length(rng, &sizes),
            mode: Mode::Send,
            stripe: Stripe::WHOLE,
            number,
        });
        let calls = calls.collect();
        let plain = Plain {
            lead: rng.between(1, 2 + 2 * u64::from(sizes.window)) as usize,
            is_prompt: one_in(rng, 2),
            breach: None,
        };
        Self {
            family,
            tree: Tree { nodes: vec![node] },
            sizes,
            path_mtu,
            hosts: (0..world).map(|_| rng.below(hosts as u64) as usize).collect(),
            several: Vec::new(),
            calls,
            plain: Some(plain),
            mismatch: None,
            absences: Vec::new(),
            rude: None,
            may_fail: false,
            is_excused: false,
            is_watched: true,
        }
    }

    /// One rank sends a message of another length. In half of the runs others do not send theirs.
    fn differ_in_length(&mut self, rng: &mut Rng) {
        let call = rng.below(self.calls.len() as u64) as usize;
        let rank = rng.below(self.sizes.world.into()) as u32;
        let other = Shape { count: draw_length(rng, &self.sizes), ..self.calls[call] };
        if self.sizes.world == 1 || other == self.calls[call] {
            return;
        }
        self.mismatch = Some((call, rank, other));
        self.may_fail = true;
        if one_in(rng, 2) {
            self.draw_absences(rng, call);
        }
    }

    /// One rank sends what no plain host sends.
    fn break_rules(&mut self, rng: &mut Rng) {
        let rank = rng.below(self.sizes.world.into()) as u32;
        let call = rng.below(self.calls.len() as u64) as usize;
        if let Some(plain) = &mut self.plain {
            plain.breach = Some((rank, call, Breach::draw(rng)));
            self.may_fail = true;
        }
    }
}

/// Elements of a message: one, a few, about as many as fill packets or a segment, or any number.
fn draw_length(rng: &mut Rng, sizes: &Sizes) -> u64 {
    let most = u64::from(sizes.segment_bytes) / 4;
    let packet = u64::from(sizes.path_mtu) / 4;
    let count = match rng.below(6) {
        0 => 1,
        1 => rng.below(16),
        2 => rng.between(1, 4) * packet + rng.below(3) - 1,
        3 => most - rng.below(2),
        _ => rng.between(1, most),
    };
    count.clamp(1, most)
}
