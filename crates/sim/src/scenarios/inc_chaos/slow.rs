//! A machine whose acknowledgements are late: one of each queue pair leaves in so much time, and what it would have sent
//! meanwhile is kept back. Who merges them sends the newest then; who does not sends one after the other, so that packets may
//! take very long to be acknowledged, and no silence is ever long enough to end a connection.

use core::net::IpAddr;
use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use millstream_roce::{Instant, Transmit};
use millstream_wire::{NakCode, Opcode, Psn, Qpn, Syndrome};

use super::member::{CALL_LIMIT, PROBE_EVERY};
use super::world::{Group, Trouble, World, moment, one_in};
use crate::{Probability, Rng};

/// The longest time between two.
const LONGEST: Duration = Duration::from_secs(4);
const LONGEST_OF_PLAIN: Duration = Duration::from_millis(250);

/// A machine that is slow to acknowledge, and how slow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slow {
    pub(super) machine: usize,
    /// The time from one acknowledgement of a queue pair to its next.
    pub(super) every: Duration,
    /// What is kept back leaves as one.
    pub(super) merges: bool,
}

impl World {
    /// Makes a machine slow to acknowledge in some runs, and ends a communicator amid that in half of these. Drawn from numbers
    /// of its own, so that a seed of before is the same run where that changes nothing.
    pub(super) fn add_slow(&mut self, rng: &mut Rng) {
        // Who goes on when a switch is lost has a minute for all.
        if self.failover.is_some() || !one_in(rng, 5) {
            return;
        }
        // Up to what switches have where nobody says otherwise.
        self.timeout = rng.between(12, 17) as u8;
        let is_host = self.switches == 0 || !one_in(rng, 4);
        let machine = match is_host {
            true => rng.below(self.hosts as u64) as usize,
            false => self.hosts + rng.below(self.switches as u64) as usize,
        };
        let scale = Duration::from_micros(1 << rng.between(10, 22));
        let every = scale + scale.mul_f64(rng.below(100) as f64 / 100.0);
        // A plain host may send when its acknowledgement has come, and asks again and again until then.
        let is_plain = |group: &Group| group.plain.is_some() && group.uses(machine, self.hosts);
        let has_plain = self.groups.iter().any(is_plain);
        let longest = if has_plain { self.longest().min(LONGEST_OF_PLAIN) } else { self.longest() };
        let every = every.min(longest);
        if every > self.timeout() && !self.is_heavy {
            self.calm_down();
        }
        let merges = !is_host || has_plain || one_in(rng, 2);
        self.slow = Some(Slow { machine, every, merges });
        if !self.breaks && one_in(rng, 2) {
            self.end_one(rng, machine);
        }
    }

    /// So long can be between two acknowledgements, and no connection breaks. It ends after eight timeouts without progress:
    /// there are so many chances for an acknowledgement, or nothing happens to any.
    fn longest(&self) -> Duration {
        use Trouble::{Cut, Slow, Stand};
        let disturbs = |it: &Trouble| matches!(it, Cut { .. } | Stand { .. } | Slow { .. });
        let disturbed = self.troubles.iter().any(|(_, trouble)| disturbs(trouble));
        (self.timeout() * if disturbed { 1 } else { 7 }).min(LONGEST)
    }

    /// Every packet arrives, once and in order.
    const fn calm_down(&mut self) {
        let never = Probability::NEVER;
        (self.link.loss, self.link.corrupt, self.acknowledgement_loss) = (never, never, never);
        (self.link.duplicate, self.link.reorder, self.late) = (never, never, never);
    }

    /// Some node of a communicator of that machine is told to end it, and no other hears of that but from it.
    fn end_one(&mut self, rng: &mut Rng, machine: usize) {
        let of_machine = |&group: &usize| self.groups[group].uses(machine, self.hosts);
        let groups: Vec<usize> = (0..self.groups.len()).filter(of_machine).collect();
        if groups.is_empty() {
            return;
        }
        let group = groups[rng.below(groups.len() as u64) as usize];
        let family = self.groups[group].family;
        self.groups.iter_mut().filter(|it| it.family == family).for_each(|it| {
            (it.may_fail, it.is_excused) = (true, true);
        });
        let ended = &mut self.groups[group];
        ended.is_watched = ended.plain.is_some();
        let node = rng.below(ended.tree.nodes.len() as u64) as usize;
        let at = moment(rng) * rng.between(1, 64) as u32;
        self.troubles.push((at, Trouble::Abort { group, node }));
    }

    /// How long a call may take.
    pub(super) fn call_limit(&self) -> Duration {
        // Where acknowledgements are late, so is what waits for a place to be sent.
        CALL_LIMIT + self.slow.map_or(Duration::ZERO, |slow| slow.every * 100)
    }

    /// How often a rank asks whether its switch lives.
    pub(super) fn probe_every(&self) -> Duration {
        self.slow.map_or(PROBE_EVERY, |slow| slow.every.max(PROBE_EVERY))
    }

    /// Whether it is slow what a rank on this host is told, or what somebody else of its communicator is for that.
    pub(super) fn is_told_slowly(&self, group: &Group, host: usize) -> bool {
        self.slow.is_some_and(|Slow { machine, .. }| {
            let is_between = machine >= self.hosts || group.plain.is_some();
            machine == host || is_between && group.uses(machine, self.hosts)
        })
    }
}

/// What a slow machine keeps back.
#[derive(Debug)]
pub(super) struct KeptBack {
    every: Duration,
    merges: bool,
    /// By whom they are for.
    queues: BTreeMap<(IpAddr, Qpn), Queue>,
    /// How many were kept back.
    pub(super) count: u64,
}

#[derive(Debug, Default)]
struct Queue {
    kept: VecDeque<Transmit>,
    /// The latest that has left.
    left: Vec<u8>,
    /// When the next one may leave.
    next_at: Option<Instant>,
}

impl KeptBack {
    pub(super) const fn new(slow: &Slow) -> Self {
        let &Slow { every, merges, .. } = slow;
        Self { every, merges, queues: BTreeMap::new(), count: 0 }
    }

    /// Takes what is to be sent, if it is an acknowledgement; of both kinds.
    pub(super) fn takes(&mut self, now: Instant, transmit: &Transmit) -> bool {
        let headers = transmit.headers();
        if headers[0] != Opcode::RcAcknowledge as u8 {
            return false;
        }
        let to = (transmit.destination, Qpn::from_bytes([headers[5], headers[6], headers[7]]));
        let queue = self.queues.entry(to).or_default();
        if queue.kept.is_empty() && queue.next_at.is_none_or(|at| at <= now) {
            queue.next_at = Some(now + self.every);
            queue.left = headers.to_vec();
            return false;
        }
        self.count += 1;
        if self.merges {
            queue.kept.clear();
        }
        // What says nothing new is worth no time of its own.
        if queue.kept.len() == 1 && queue.kept[0].headers() == queue.left {
            queue.kept.clear();
        }
        let is_new = |last: &Transmit| acknowledges_more(last.headers(), headers);
        if queue.kept.back().is_none_or(is_new) {
            queue.kept.push_back(transmit.clone());
        }
        true
    }

    /// What may leave now.
    pub(super) fn due(&mut self, now: Instant) -> Option<Transmit> {
        let is_due =
            |queue: &&mut Queue| !queue.kept.is_empty() && queue.next_at.is_none_or(|at| at <= now);
        let queue = self.queues.values_mut().find(is_due)?;
        queue.next_at = Some(now + self.every);
        let transmit = queue.kept.pop_front()?;
        queue.left = transmit.headers().to_vec();
        Some(transmit)
    }

    pub(super) fn next_at(&self) -> Option<Instant> {
        let waiting = self.queues.values().filter(|queue| !queue.kept.is_empty());
        waiting.filter_map(|queue| queue.next_at).min()
    }
}

/// Whether an answer acknowledges more packets than one before, or ends the connection.
fn acknowledges_more(before: &[u8], after: &[u8]) -> bool {
    let psn = |headers: &[u8]| Psn::from_bytes([headers[9], headers[10], headers[11]]);
    // The first packet that is not acknowledged.
    let end = |headers: &[u8]| match Syndrome::from_byte(headers[12]) {
        Syndrome::Ack { .. } => psn(headers).add(1),
        _ => psn(headers),
    };
    let last = Syndrome::from_byte(after[12]);
    let ends = matches!(last, Syndrome::Nak(code) if code != NakCode::PsnSequenceError);
    ends || end(after).distance_from(end(before)) > 0
}

#[cfg(test)]
mod tests {
    use core::net::Ipv4Addr;

    use super::*;

    #[test]
    fn only_what_is_new_waits() {
        let answer = |psn: u32, syndrome: u8| {
            let mut headers = [0; 16];
            headers[9..12].copy_from_slice(&Psn::new(psn).to_bytes());
            headers[12] = syndrome;
            headers
        };
        for (before, after, is_new) in [
            ((5, 0x1f), (6, 0x1f), true),
            ((5, 0x1f), (5, 0x1f), false),
            ((0xff_ffff, 0x1f), (0, 0x1f), true),
            ((0, 0x1f), (0xff_ffff, 0x1f), false),
            // What is to be sent again was not acknowledged.
            ((5, 0x1f), (6, 0x60), false),
            ((5, 0x60), (5, 0x1f), true),
            ((5, 0x1f), (6, 0x2c), false),
            ((5, 0x1f), (5, 0x61), true),
        ] {
            let [one, other] = [before, after].map(|(psn, syndrome)| answer(psn, syndrome));
            assert_eq!(acknowledges_more(&one, &other), is_new, "{before:?} {after:?}");
        }
    }

    fn acknowledgement(qpn: u8, psn: u8) -> Transmit {
        let mut transmit = Transmit::new();
        let mut headers = [0; 16];
        headers[0] = Opcode::RcAcknowledge as u8;
        (headers[7], headers[11]) = (qpn, psn);
        transmit.set(Ipv4Addr::LOCALHOST.into(), &headers, &[], 0);
        transmit
    }

    /// What leaves at which millisecond, of one acknowledgement each millisecond and queue pair.
    fn leaves(merges: bool) -> Vec<(u64, u8, u8)> {
        let every = Duration::from_millis(3);
        let mut kept = KeptBack::new(&Slow { machine: 0, every, merges });
        let mut left = Vec::new();
        for time in 0..20 {
            let now = Instant::ZERO + Duration::from_millis(time);
            let note = |it: &Transmit| (time, it.headers()[7], it.headers()[11]);
            while let Some(transmit) = kept.due(now) {
                left.push(note(&transmit));
            }
            for qpn in [1, 2] {
                let transmit = acknowledgement(qpn, time as u8);
                // Twice, as of a packet that came twice.
                for _ in 0..2 {
                    if time < 6 && !kept.takes(now, &transmit) {
                        left.push(note(&transmit));
                    }
                }
            }
        }
        left.retain(|it| it.1 == 1);
        left
    }

    #[test]
    fn acknowledgements_are_merged_or_leave_one_by_one() {
        assert_eq!(leaves(true), [(0, 1, 0), (3, 1, 2), (6, 1, 5)]);
        let all = (0..6).map(|number| (3 * number, 1, number as u8));
        assert_eq!(leaves(false), all.collect::<Vec<_>>());
    }
}
