//! What a run consists of, drawn from its seed.

use core::time::Duration;

use millstream_inc::{DataType, Mode};
use millstream_wire::Mtu;

use super::super::call::{Shape, Sizes};
use super::super::world::one_in;
use crate::{LinkOptions, Probability, Rng};

/// What goes wrong, at a time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Trouble {
    /// The controller's process ends, and another one starts so much later.
    ControllerDies { down: Duration },
    /// The controller's process stands still.
    ControllerStands { length: Duration },
    /// The control connection of a machine breaks.
    Break { machine: usize },
    /// What a machine and the controller say to each other is late; after 8 s the connection breaks.
    ControlCut { machine: usize, length: Duration },
    /// The process of a rank is killed.
    RankDies { machine: usize },
    /// All processes of a job are killed.
    JobDies { job: usize },
    /// The process of a switch is killed, and another one starts so much later.
    SwitchDies { machine: usize, down: Duration },
    /// A rank's or a switch's process stands still.
    Stands { machine: usize, length: Duration },
    /// The links of a machine on the data network are cut.
    DataCut { machine: usize, length: Duration },
}

/// Some ranks that call collectives together. Who starts them starts them again until they have done all.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// The machine of each rank.
    pub(super) hosts: Vec<usize>,
    /// What each calls, and how long after the call before.
    pub(super) calls: Vec<(Shape, Duration)>,
    pub(super) starts: Duration,
    /// How long a rank waits for the others.
    pub(super) patience: Duration,
    /// The first time, this rank leaves after so many calls.
    pub(super) leaver: Option<(u32, usize)>,
    /// When one rank fails, the others are killed.
    pub(super) kills: bool,
}

/// A run.
#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) hosts: usize,
    pub(super) switches: usize,
    pub(super) link: LinkOptions,
    /// One way between a machine and the controller, at most.
    pub(super) latency: Duration,
    pub(super) fan_in: u32,
    pub(super) segment_bytes: u32,
    pub(super) window: u32,
    /// What each host can send to its switch.
    pub(super) path_mtus: Vec<Mtu>,
    pub(super) jobs: Vec<Job>,
    pub(super) troubles: Vec<(Duration, Trouble)>,
}

const MTUS: [Mtu; 3] = [Mtu::B256, Mtu::B512, Mtu::B1024];

/// Short times are as likely as long ones: from 16 ms to 16 s.
fn length(rng: &mut Rng) -> Duration {
    let scale = 1 << rng.between(14, 23);
    Duration::from_micros(scale + rng.below(scale))
}

impl World {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        let switches = rng.between(1, 4) as usize;
        let (segment_bytes, window) = (4096, rng.between(2, 6) as u32);
        let mut hosts = 0;
        let jobs: Vec<Job> = (0..rng.between(1, 3))
            .map(|_| Job::draw(rng, &mut hosts, segment_bytes, window))
            .collect();
        // One switch and a job wider than its fan-in: there is no tree.
        let fan_in = if switches == 1 { 6 } else { rng.between(2, 6) as u32 };
        let link = LinkOptions {
            loss: Probability::per_mille(rng.below(10) as u32),
            duplicate: Probability::per_mille(rng.below(20) as u32),
            reorder: Probability::per_mille(rng.below(50) as u32),
            reorder_delay: Duration::from_micros(50),
            ..LinkOptions::new(10_000_000_000, Duration::from_micros(rng.between(1, 50)))
        };
        let mut world = Self {
            hosts,
            switches,
            link,
            latency: Duration::from_micros(1 << rng.between(4, 16)),
            fan_in,
            segment_bytes,
            window,
            path_mtus: (0..hosts).map(|_| MTUS[rng.below(3) as usize]).collect(),
            jobs,
            troubles: Vec::new(),
        };
        for _ in 0..rng.below(7) {
            let at = Duration::from_millis(rng.below(20_000));
            let trouble = world.draw_trouble(rng);
            world.troubles.push((at, trouble));
            // Often something else about the same time.
            if one_in(rng, 2) {
                let at = at + Duration::from_millis(rng.below(4000));
                let trouble = world.draw_trouble(rng);
                world.troubles.push((at, trouble));
            }
        }
        world
    }

    fn draw_trouble(&self, rng: &mut Rng) -> Trouble {
        let host = rng.below(self.hosts as u64) as usize;
        let switch = self.hosts + rng.below(self.switches as u64) as usize;
        let machine = rng.below((self.hosts + self.switches) as u64) as usize;
        let long = length(rng);
        match rng.below(12) {
            0 | 1 => Trouble::ControllerDies { down: long / 2 },
            2 | 3 => Trouble::ControllerStands { length: long },
            4 => Trouble::Break { machine },
            5 | 6 => Trouble::ControlCut { machine, length: long },
            7 => Trouble::RankDies { machine: host },
            8 => Trouble::JobDies { job: rng.below(self.jobs.len() as u64) as usize },
            9 => Trouble::SwitchDies { machine: switch, down: long / 2 },
            10 => Trouble::Stands { machine, length: long / 2 },
            _ => Trouble::DataCut { machine, length: long / 2 },
        }
    }

    /// When the last trouble is over.
    pub(super) fn calm_from(&self) -> Duration {
        let end = |&(at, trouble): &(Duration, Trouble)| {
            at + match trouble {
                Trouble::ControllerDies { down: length }
                | Trouble::SwitchDies { down: length, .. }
                | Trouble::ControllerStands { length }
                | Trouble::ControlCut { length, .. }
                | Trouble::Stands { length, .. }
                | Trouble::DataCut { length, .. } => length,
                Trouble::Break { .. } | Trouble::RankDies { .. } | Trouble::JobDies { .. } => {
                    Duration::ZERO
                }
            }
        };
        self.troubles.iter().map(end).max().unwrap_or_default()
    }
}

impl Job {
    fn draw(rng: &mut Rng, hosts: &mut usize, segment_bytes: u32, window: u32) -> Self {
        let world = rng.between(1, 6) as u32;
        let sizes = Sizes { path_mtu: 1024, segment_bytes, window, world };
        let count = rng.between(1, 8);
        let call = |rng: &mut Rng, number: u64| {
            let modes: &[Mode] = &[Mode::Write, Mode::Send];
            let shape = loop {
                let shape = Shape::draw(rng, &sizes, modes);
                // What 16-bit floats are rounded to depends on the tree, which the controller plans.
                if !matches!(shape.data_type, DataType::Float16 | DataType::BFloat16) {
                    break shape;
                }
            };
            let pause = if one_in(rng, 3) { rng.below(4_000_000) } else { rng.below(2000) };
            (Shape { number, ..shape }, Duration::from_micros(pause))
        };
        let calls: Vec<_> = (0..count).map(|number| call(rng, number)).collect();
        let leaver =
            one_in(rng, 6).then(|| (rng.below(world.into()) as u32, rng.below(count) as usize));
        let first = *hosts;
        *hosts += world as usize;
        Self {
            hosts: (first..*hosts).collect(),
            calls,
            starts: Duration::from_millis(rng.below(6000)),
            patience: Duration::from_millis(rng.between(2000, 10_000)),
            leaver,
            kills: one_in(rng, 4),
        }
    }
}
