//! A flow: all that is under way between this process and one peer.

mod fencing;
mod posting;
mod tasks;
#[cfg(test)]
mod tests;
mod timers;

use core::time::Duration;
use std::collections::VecDeque;

use self::tasks::{Queue, Slice, Task};
use crate::chain::Chain;
use crate::pieces::{Pieces, Slicing};
use crate::priority::{ByLevel, Shares};
use crate::slab::Slab;
use crate::wheel::Wheel;
use crate::{Config, Instant, Output, Policy, Rail, RailId, RailSpec, RailState};

/// Slices for which there is room from the start: as many as two rails usually hold.
const SLICES: usize = 512;

/// Outputs for which there is room from the start: as many tasks as end by the completions that a device
/// hands over at once.
const OUTPUTS: usize = 256;

/// A rate is known where something has completed for no longer ago.
const RECENT: Duration = Duration::from_secs(1);

/// Of a level that waits, a slice goes first after so many slices' lengths of higher ones.
const SHARE: u64 = 15;

/// The most rails of a flow.
pub const MAX_RAILS: usize = 1 << 12;

/// All that is under way between this process and one peer, and what is to be done next.
///
/// After each call, [`Flow::poll_output`] says what to do until it returns `None`, and then
/// [`Flow::poll_timeout`] when to call [`Flow::handle_timeout`]. Several inputs may be given before
/// outputs are polled. Time must not go backwards.
#[derive(Debug)]
pub struct Flow<P> {
    config: Config,
    slicing: Slicing,
    policy: P,
    /// Which start of the peer's process it is about.
    incarnation: u64,
    rails: Vec<Rail>,
    /// Changes with the state of any rail.
    version: u64,
    /// Changes when there may be more room.
    room: u64,
    /// The number of the last connection.
    epoch: u64,
    tasks: Slab<Task>,
    slices: Slab<Slice>,
    pieces: Pieces,
    queues: Vec<Queue>,
    /// By level: the queue whose turn it is. With one for all, queues of other levels would decide which of a
    /// level is found first.
    turns: ByLevel<usize>,
    /// By level: how many queues are not empty.
    waiting: ByLevel<usize>,
    shares: Shares,
    /// By level: when a slice was posted last.
    posted_at: ByLevel<Option<Instant>>,
    /// Tasks in their queues.
    task_chain: Chain,
    /// Slices of their tasks.
    siblings: Chain,
    /// Slices on their rails, or in their queues.
    slice_chain: Chain,
    deadlines: Wheel,
    /// No timer of a rail or queue is before this.
    timers: Option<Instant>,
    /// When the policy is to be asked again, if no room has come before.
    ask_at: Option<Instant>,
    /// When something was posted or has completed last.
    worked_at: Instant,
    /// For how long nothing was, though that is usual only for a short time.
    held_up: Duration,
    outputs: VecDeque<Output>,
}

impl<P: Policy> Flow<P> {
    /// A flow to a peer whose process has this incarnation. Its connections have epochs above `epoch`:
    /// more than all that this process has used with this peer before.
    ///
    /// # Panics
    /// When the slice length or the fragment ratio is out of range.
    pub fn new(config: Config, policy: P, incarnation: u64, epoch: u64) -> Self {
        assert!((1 << 10..=64 << 20).contains(&config.slice_length), "{}", config.slice_length);
        assert!(config.fragment_ratio > 0);
        Self {
            config,
            slicing: Slicing {
                slice_length: config.slice_length.into(),
                fragment_limit: (config.slice_length / config.fragment_ratio).into(),
                max_pieces: config.max_slice_pieces,
            },
            policy,
            incarnation,
            rails: Vec::new(),
            version: 0,
            room: 0,
            epoch,
            tasks: Slab::new(),
            slices: Slab::with_room(SLICES),
            pieces: Pieces::new(config.max_pieces),
            queues: Vec::new(),
            turns: ByLevel::default(),
            waiting: ByLevel::default(),
            shares: Shares::new(SHARE * u64::from(config.slice_length)),
            posted_at: ByLevel::default(),
            task_chain: Chain::default(),
            siblings: Chain::with_room(SLICES),
            slice_chain: Chain::with_room(SLICES),
            deadlines: Wheel::new(),
            timers: None,
            ask_at: None,
            worked_at: Instant::ZERO,
            held_up: Duration::ZERO,
            outputs: VecDeque::with_capacity(OUTPUTS),
        }
    }

    /// Adds a rail, which is not connected. `None` when there are [`MAX_RAILS`].
    pub fn add_rail(&mut self, spec: RailSpec) -> Option<RailId> {
        let index = self.rails.len();
        if index >= MAX_RAILS {
            return None;
        }
        self.rails.push(Rail::new(spec));
        self.changed();
        Some(RailId(index as u16))
    }

    /// Its rails, by number.
    pub fn rails(&self) -> &[Rail] {
        &self.rails
    }

    /// Which start of the peer's process it is about.
    pub const fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The number of the last connection that was asked for.
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Unfinished tasks.
    pub const fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Slices that are posted, wait for a fence, or are to be posted again.
    pub const fn slices(&self) -> usize {
        self.slices.len()
    }

    /// Whether nothing is kept for any task.
    pub fn is_idle(&self) -> bool {
        self.tasks.len() == 0
            && self.slices.len() == 0
            && self.pieces.used() == 0
            && self.rails.iter().all(|rail| rail.slices == 0 && rail.bytes == 0)
    }

    /// The most that its rails carry together until a time, in bytes per second: their recent peak rates. `None` where
    /// that is not known well: a rail was not full, or nothing has completed on it for a second; or one that has
    /// failed, or is being connected, may be up before that time.
    pub fn peak_rate(&self, now: Instant, until: Instant) -> Option<u64> {
        let mut sum: Option<u64> = None;
        let recent = |at: Instant| now.saturating_duration_since(at) < RECENT;
        for rail in &self.rails {
            match rail.state() {
                RailState::Up => {
                    // One that had always room may carry more than it was given.
                    let full = rail.full_at.is_some_and(recent);
                    let known = rail.measure.is_settled() && recent(rail.completed_at) && full;
                    let rate = rail.peak_rate().max(rail.present_rate()).filter(|_| known)?;
                    sum = Some(sum.unwrap_or(0).saturating_add(rate));
                }
                RailState::Connecting | RailState::Fencing => return None,
                // One that has failed is tried again; others are not needed.
                RailState::Down if rail.probing => return None,
                RailState::Paused(paused) if paused < until => return None,
                RailState::Down | RailState::Paused(_) => {}
            }
        }
        sum
    }

    /// What to do next.
    pub fn poll_output(&mut self, now: Instant) -> Option<Output> {
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        if let Some(post) = self.next_post(now) {
            return Some(Output::Post(post));
        }
        // What there was to connect.
        self.outputs.pop_front()
    }

    /// The state of a rail is another one.
    const fn changed(&mut self) {
        self.version += 1;
        self.room += 1;
    }
}
