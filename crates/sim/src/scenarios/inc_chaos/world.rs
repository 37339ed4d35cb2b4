//! What a run consists of, drawn from its seed.

use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;

use millstream_inc::{Mode, Stripe};
use millstream_wire::Mtu;

use super::call::{Shape, Sizes};
use super::failover;
use super::mismatch::Absence;
use super::plain::Plain;
use super::several;
use super::slow::Slow;
use super::tree::Tree;
use crate::{LinkOptions, Probability, Rng};

/// A member that does not keep to the protocol. What it contributes is right all the same, so that
/// whoever gets a result gets the right one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Rudeness {
    /// Its window is larger.
    Window,
    /// Its segments are shorter or longer.
    SegmentBytes,
    /// It takes itself for another rank.
    Rank,
    /// It posts something past its worker.
    Post(Post),
}

/// What a rude member posts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Post {
    /// A SEND that is longer than any.
    LongSend,
    /// A SEND of nothing.
    EmptySend,
    /// Its descriptor again.
    Repeat,
    /// A WRITE that is longer than a segment.
    LongWrite,
    /// A WRITE with immediate data.
    Immediate,
    /// A SEND with immediate data that says that it has nothing.
    Credit,
}

const POSTS: [Post; 6] =
    [Post::LongSend, Post::EmptySend, Post::Repeat, Post::LongWrite, Post::Immediate, Post::Credit];

/// What goes wrong, at a time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Trouble {
    /// The links of a machine are cut for a while.
    Cut {
        machine: usize,
        length: Duration,
    },
    /// It neither takes nor sends anything for a while.
    Stand {
        machine: usize,
        length: Duration,
    },
    /// It is gone.
    Death {
        machine: usize,
    },
    /// Its links are slow from now on.
    Slow {
        machine: usize,
    },
    /// An outsider sends something.
    Forge,
    Rude {
        group: usize,
        rank: u32,
        post: Post,
    },
    /// A node of a communicator is told to end it.
    Abort {
        group: usize,
        node: usize,
    },
}

/// A communicator, or one tree of several that it has.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// The communicator: groups that have the same number are its trees.
    pub(super) family: usize,
    pub(super) tree: Tree,
    pub(super) sizes: Sizes,
    pub(super) path_mtu: Mtu,
    /// The machine of each rank.
    pub(super) hosts: Vec<usize>,
    /// Hosts that have one connection for several ranks: which, in order.
    pub(super) several: Vec<Vec<u32>>,
    pub(super) calls: Vec<Shape>,
    /// Its hosts send no descriptors, and each call is a message of theirs.
    pub(super) plain: Option<Plain>,
    /// The call and the rank that differs there from all others, and in what.
    pub(super) mismatch: Option<(usize, u32, Shape)>,
    /// Ranks that call much later, or not at all.
    pub(super) absences: Vec<Absence>,
    pub(super) rude: Option<(u32, Rudeness)>,
    /// Something happens that its connections or its calls need not survive.
    pub(super) may_fail: bool,
    /// And that is something else than what its ranks do.
    pub(super) is_excused: bool,
    /// Whoever watches over it ends it when it has failed for one. If not, its switches and hosts must come to
    /// an end by themselves.
    pub(super) is_watched: bool,
}

/// A run.
#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) hosts: usize,
    pub(super) switches: usize,
    pub(super) link: LinkOptions,
    pub(super) acknowledgement_loss: Probability,
    /// Packets that are much later than others.
    pub(super) late: Probability,
    /// Of all connections: 4.096 us * 2^n.
    pub(super) timeout: u8,
    pub(super) groups: Vec<Group>,
    pub(super) troubles: Vec<(Duration, Trouble)>,
    /// A communicator that goes on when a switch is lost.
    pub(super) failover: Option<failover::Group>,
    /// A machine that is slow to acknowledge.
    pub(super) slow: Option<Slow>,
    /// Some trouble need not be survived.
    pub(super) breaks: bool,
    /// And that is that so many packets are lost.
    pub(super) is_heavy: bool,
    /// How long it takes whoever watches over a communicator to end it.
    pub(super) watch: Duration,
}

/// A machine: hosts come first, then switches, then the outsider.
pub(super) fn address(machine: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, (machine / 250) as u8, (machine % 250) as u8 + 1).into()
}

pub(super) fn one_in(rng: &mut Rng, count: u64) -> bool {
    rng.below(count) == 0
}

/// Short times are as likely as long ones.
pub(super) fn moment(rng: &mut Rng) -> Duration {
    let scale = 1 << rng.between(12, 25);
    Duration::from_nanos(scale + rng.below(scale))
}

impl World {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        let hosts = rng.between(1, 10) as usize;
        let switches = rng.between(1, 5) as usize;
        // One in four runs has trouble that need not be survived; the others only what must be.
        let breaks = one_in(rng, 4);
        let disturbed = one_in(rng, 3);
        let timeout = rng.between(12, 14) as u8;
        let heavy = breaks && one_in(rng, 3);
        let (link, acknowledgement_loss) = draw_link(rng, heavy, disturbed);
        let late = if one_in(rng, 3) { Probability::per_mille(10) } else { Probability::NEVER };
        let count = if one_in(rng, 3) { rng.between(2, 3) } else { 1 };
        let draw = |family| Group::draw(rng, family as usize, hosts, switches);
        let groups = (0..count).map(draw).collect();
        let mut world = Self {
            hosts,
            switches,
            link,
            acknowledgement_loss,
            late,
            timeout,
            groups,
            troubles: Vec::new(),
            failover: None,
            slow: None,
            breaks,
            is_heavy: heavy,
            watch: moment(rng) * 20,
        };
        if heavy {
            // Patience may be at an end.
            world.groups.iter_mut().for_each(|group| group.may_fail = true);
        }
        world.draw_troubles(rng, breaks, disturbed);
        world
    }

    /// Makes trees of some communicators one of two or three: each call is divided, or on one of them. Drawn from numbers
    /// of its own, so that a seed of before is the same run but for that.
    pub(super) fn add_trees(&mut self, rng: &mut Rng) {
        for index in 0..self.groups.len() {
            if one_in(rng, 3) {
                let trees = rng.between(2, 3) as u8;
                let more = self.groups[index].split(rng, trees, self.switches);
                self.groups.extend(more);
            }
        }
        // What breaks one tree ends the others.
        let uses = |group: &Group, trouble: &Trouble| match *trouble {
            Trouble::Cut { machine, .. }
            | Trouble::Stand { machine, .. }
            | Trouble::Death { machine } => group.uses(machine, self.hosts),
            _ => false,
        };
        let broken = |group: &Group| {
            let fails = self.groups.iter().any(|it| it.family == group.family && it.may_fail);
            let hits = |it: &Group| self.troubles.iter().any(|(_, trouble)| uses(it, trouble));
            let hit = self.groups.iter().any(|it| it.family == group.family && hits(it));
            fails || hit && self.breaks
        };
        let broken: Vec<bool> = self.groups.iter().map(broken).collect();
        self.groups.iter_mut().zip(broken).for_each(|(group, broken)| group.may_fail = broken);
    }

    /// Whether hosts take the place of switches at some time.
    pub(super) fn has_own_switches(&self) -> bool {
        self.failover.as_ref().is_some_and(failover::Group::is_hosted)
    }

    /// The machine that is a host's own switch. They come behind the outsider.
    pub(super) const fn own_switch(&self, host: usize) -> usize {
        self.hosts + self.switches + 1 + host
    }

    /// The time that a connection waits for an answer before it asks again.
    pub(super) const fn timeout(&self) -> Duration {
        Duration::from_nanos(4096 << self.timeout)
    }

    fn draw_troubles(&mut self, rng: &mut Rng, breaks: bool, disturbed: bool) {
        let machines = self.hosts + self.switches;
        let machine = |rng: &mut Rng| rng.below(machines as u64) as usize;
        if disturbed {
            for _ in 0..rng.between(1, 3) {
                // Much shorter than anyone is patient.
                let length = self.timeout().mul_f64(rng.below(100) as f64 / 100.0);
                let machine = machine(rng);
                let trouble = match rng.below(3) {
                    0 => Trouble::Cut { machine, length },
                    1 => Trouble::Slow { machine },
                    _ => Trouble::Stand { machine, length },
                };
                self.troubles.push((moment(rng), trouble));
            }
        }
        if one_in(rng, 2) {
            for _ in 0..1 << rng.below(8) {
                self.troubles.push((moment(rng), Trouble::Forge));
            }
        }
        if !breaks {
            return;
        }
        match rng.below(5) {
            0 => self.break_machine(rng, |machine, _| Trouble::Death { machine }),
            1 => self.break_machine(rng, |machine, length| Trouble::Cut { machine, length }),
            2 => self.break_machine(rng, |machine, length| Trouble::Stand { machine, length }),
            3 => {
                let group = rng.below(self.groups.len() as u64) as usize;
                self.groups[group].differ(rng);
            }
            _ => {
                let group = rng.below(self.groups.len() as u64) as usize;
                let at = moment(rng);
                let post = self.groups[group].misbehave(rng);
                self.troubles
                    .extend(post.map(|(rank, post)| (at, Trouble::Rude { group, rank, post })));
            }
        }
    }

    /// Something happens to a machine for longer than anyone is patient.
    fn break_machine(&mut self, rng: &mut Rng, trouble: impl Fn(usize, Duration) -> Trouble) {
        let machine = rng.below((self.hosts + self.switches) as u64) as usize;
        let length = self.timeout() * rng.between(2, 40) as u32;
        self.troubles.push((moment(rng), trouble(machine, length)));
        for group in &mut self.groups {
            group.may_fail |= group.uses(machine, self.hosts);
        }
    }
}

/// What all links are like, and how likely acknowledgements are lost beside.
fn draw_link(rng: &mut Rng, heavy: bool, disturbed: bool) -> (LinkOptions, Probability) {
    let rate = [100_000_000, 1_000_000_000, 10_000_000_000][rng.below(3) as usize];
    let calm = LinkOptions {
        jitter: Duration::from_nanos(rng.below(5000)),
        reorder_delay: Duration::from_micros(rng.between(1, 200)),
        ..LinkOptions::new(rate, Duration::from_nanos(rng.between(500, 20_000)))
    };
    if one_in(rng, 4) && !heavy {
        return (calm, Probability::NEVER);
    }
    // Where a cut takes some of the attempts, the rest must do.
    let most = if heavy {
        200
    } else if disturbed {
        3
    } else {
        20
    };
    let mut share = |most: u64| Probability::per_mille(rng.below(most + 1) as u32);
    let link = LinkOptions {
        loss: share(most),
        corrupt: share(most / 2),
        duplicate: share(200),
        reorder: share(200),
        ..calm
    };
    (link, share(2 * most))
}

impl Group {
    fn draw(rng: &mut Rng, family: usize, hosts: usize, switches: usize) -> Self {
        let world = rng.between(1, 12) as u32;
        let tree = Tree::draw(rng, world, switches);
        let path_mtu = [Mtu::B256, Mtu::B512, Mtu::B1024][rng.below(3) as usize];
        let sizes = Sizes {
            path_mtu: path_mtu.bytes() as u32,
            segment_bytes: path_mtu.bytes() as u32 * rng.between(1, 4) as u32,
            window: rng.between(1, 8) as u32,
            world,
        };
        let modes: &[Mode] = match rng.below(4) {
            0 => &[Mode::Write],
            1 => &[Mode::Send],
            _ => &[Mode::Write, Mode::Send],
        };
        let calls = (0..rng.between(1, 6)).map(|number| {
            let shape = Shape::draw(rng, &sizes, modes);
            Shape { number, ..shape }
        });
        let calls: Vec<Shape> = calls.collect();
        let hosts = (0..world).map(|_| rng.below(hosts as u64) as usize).collect();
        Self {
            family,
            tree,
            sizes,
            path_mtu,
            hosts,
            several: Vec::new(),
            calls,
            plain: None,
            mismatch: None,
            absences: Vec::new(),
            rude: None,
            may_fail: false,
            is_excused: false,
            is_watched: true,
        }
    }

    /// The ranks of each host that has a connection for them, by the lowest.
    pub(super) fn members(&self) -> Vec<Vec<u32>> {
        several::members(self.sizes.world, &self.several)
    }

    /// The ranks of the host whose lowest rank this is.
    pub(super) fn ranks_with(&self, rank: u32) -> Vec<u32> {
        let all = self.several.iter().find(|ranks| ranks[0] == rank);
        all.cloned().unwrap_or_else(|| vec![rank])
    }

    /// Becomes the first of so many trees; the others.
    fn split(&mut self, rng: &mut Rng, trees: u8, switches: usize) -> Vec<Self> {
        let mut divided: Vec<bool> = self.calls.iter().map(|_| one_in(rng, 2)).collect();
        if let Some((call, ..)) = self.mismatch {
            // Ranks differ on the first tree.
            divided[call] = true;
        }
        let differs = self.mismatch.map(|(.., other)| other.number);
        let calls = |tree: u8| {
            let part = |(shape, &divided): (&Shape, &bool)| {
                let agreement = shape.stripe.is_none();
                let turn = match shape.number {
                    number if agreement && differs == Some(number) => tree == 0,
                    number => number % u64::from(trees) == u64::from(tree),
                };
                let divided = divided && !agreement;
                let stripe = if divided { Stripe::new(tree, trees) } else { Some(shape.stripe) };
                let stripe = stripe.filter(|_| divided || turn)?;
                Some(Shape { stripe, ..*shape })
            };
            self.calls.iter().zip(&divided).filter_map(part).collect::<Vec<_>>()
        };
        let mut more = Vec::new();
        for tree in 1..trees {
            let (calls, shape) = (calls(tree), self.draw_tree(rng, switches));
            let (mismatch, rude, is_watched) = (None, None, true);
            more.push(Self { tree: shape, calls, mismatch, rude, is_watched, ..self.clone() });
        }
        self.calls = calls(0);
        if let Some((call, _, other)) = &mut self.mismatch {
            if !other.stripe.is_none() {
                other.stripe = Stripe::new(0, trees).unwrap_or(other.stripe);
            }
            *call = self.calls.iter().position(|it| it.number == other.number).unwrap_or_default();
        }
        more
    }

    /// Whether a machine is one of its hosts or switches.
    pub(super) fn uses(&self, machine: usize, hosts: usize) -> bool {
        self.hosts.contains(&machine)
            || self.tree.nodes.iter().any(|node| node.switch + hosts == machine)
    }

    /// Whether the results of a rank need not be right, because it knows its rank, the segments or the window
    /// wrong, or because some rank sends bytes that are none of its vector.
    pub(super) fn is_confused(&self, rank: u32) -> bool {
        use Rudeness::{Rank, SegmentBytes, Window};
        match self.rude {
            Some((rude, SegmentBytes | Rank | Window)) => rude == rank,
            Some((_, Rudeness::Post(post))) => post == Post::LongSend,
            None => false,
        }
    }

    /// Whether all of its ranks keep the protocol.
    pub(super) const fn breaks_nothing(&self) -> bool {
        let is_kept = match &self.plain {
            Some(plain) => plain.breaks_nothing(),
            None => true,
        };
        self.rude.is_none() && is_kept
    }

    /// Whether some rank may wait for what is not to come.
    pub(super) const fn may_wait(&self) -> bool {
        matches!(self.rude, Some((_, Rudeness::SegmentBytes | Rudeness::Rank)))
    }

    /// Whether a rank posts something past its worker.
    pub(super) fn posts(&self, rank: u32) -> bool {
        matches!(self.rude, Some((rude, Rudeness::Post(_))) if rude == rank)
    }

    /// One rank breaks the protocol; perhaps by what it posts past its worker.
    fn misbehave(&mut self, rng: &mut Rng) -> Option<(u32, Post)> {
        self.may_fail = true;
        let rank = rng.below(self.sizes.world.into()) as u32;
        let rudeness = match rng.below(6) {
            0 | 1 => Rudeness::Window,
            2 => Rudeness::SegmentBytes,
            3 => Rudeness::Rank,
            _ => Rudeness::Post(POSTS[rng.below(POSTS.len() as u64) as usize]),
        };
        self.rude = Some((rank, rudeness));
        if let Rudeness::Post(post) = rudeness { Some((rank, post)) } else { None }
    }
}
