//! Transfers: drawn, submitted, canceled; and the last ones, which must succeed.

use core::time::Duration;

use millstream_roce::Instant;
use millstream_transfer_core::{
    Borders, End, Ended, Failure, Opcode, Piece, PriorityLevel, Ranges, Request, SubmitError,
};

use super::director::{Director, Event, Network, Phase, core_time};
use super::process::{Peer, Transfer, incarnation};
use super::world::{PROCESSES, duration, pick};

/// From one burst of transfers to the next, on average half of this.
const BURST_INTERVAL: Duration = Duration::from_millis(1400);
/// Whatever is submitted without a deadline is over in this time.
const LONGEST: Duration = Duration::from_secs(120);
/// A task that is to end does so in the time of a fence, and what a tick and quiescing take.
const END: Duration = Duration::from_millis(2010);

/// Memory is taken back in this time after its transfer was submitted.
const UNREGISTER: Duration = Duration::from_millis(200);

/// What an event may be late by.
const TICK: Duration = Duration::from_millis(10);

/// What a transfer is to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) opcode: Opcode,
    /// Pieces, and the bytes of each, and from the start of one to the next.
    pub(super) count: u32,
    pub(super) piece: u64,
    pub(super) stride: u64,
    /// They are told one by one.
    pub(super) listed: bool,
    pub(super) deadline: Option<Instant>,
    pub(super) cancel: Option<Duration>,
    pub(super) locations: [u16; 2],
    /// There is no rail for these locations.
    pub(super) nowhere: bool,
    pub(super) priority: PriorityLevel,
    pub(super) seed: u64,
    /// It is of a flood.
    pub(super) flood: bool,
}

impl Director {
    /// Some transfers at once.
    pub(super) fn burst(&mut self, network: &mut Network<'_>) {
        let own = self.rng.below(PROCESSES as u64) as usize;
        let mut peer = self.draw_peer(own);
        for _ in 0..self.rng.between(1, 15) {
            if self.rng.below(4) == 0 {
                peer = self.draw_peer(own);
            }
            if self.made < self.world.transfers && self.processes[own].up {
                self.made += 1;
                self.submit(network, own, peer);
            }
        }
        if self.world.tent && self.rng.below(12) == 0 && self.processes[own].up {
            self.flood(network, own, peer);
        }
        if self.made < self.world.transfers {
            // Trouble comes when there is something to trouble.
            if self.rng.below(3) == 0 {
                let delay = duration(&mut self.rng, Duration::from_millis(20));
                self.plan(network, delay, Event::Trouble);
            }
            let pause = self.rng.below(BURST_INTERVAL.as_nanos() as u64);
            self.plan(network, Duration::from_nanos(pause), Event::Burst);
        }
        self.ledger.borrow_mut().forget();
    }

    fn draw_peer(&mut self, own: usize) -> usize {
        (own + self.rng.between(1, PROCESSES as u64 - 1) as usize) % PROCESSES
    }

    fn submit(&mut self, network: &mut Network<'_>, own: usize, peer: usize) {
        let wish = self.draw(network);
        self.start(network, own, peer, &wish);
    }

    /// What the next transfer is to be.
    fn draw(&mut self, network: &Network<'_>) -> Wish {
        let rng = &mut self.rng;
        let opcode = if rng.below(3) == 0 { Opcode::Read } else { Opcode::Write };
        let (count, piece) = match rng.below(8) {
            0 => (rng.between(2, 40) as u32, rng.between(1, 3000)),
            1 => (1, rng.between(1, 200)),
            2 => (1, rng.between(1, 200_000)),
            _ => (1, rng.between(1, 30_000)),
        };
        let gap = *pick(rng, &[0, 0, 100]);
        let listed = rng.below(2) == 0;
        let deadline = *pick(rng, &[None, None, Some(50), Some(1000), Some(5000)]);
        let deadline =
            deadline.map(|millis| network.now() + Duration::from_micros(rng.below(1000 * millis)));
        let cancel = (rng.below(8) == 0).then(|| duration(rng, Duration::from_millis(500)));
        let mut locations = [rng.below(2), rng.below(2)].map(|location| location as u16);
        let nowhere = rng.below(50) == 0 && self.phase != Phase::Last;
        if nowhere {
            locations[rng.below(2) as usize] = 2;
        }
        let priority = match self.world.tent {
            true => *pick(rng, &PriorityLevel::ALL),
            false => PriorityLevel::Normal,
        };
        let (stride, seed, flood) = (piece + gap, rng.bits(), false);
        Wish {
            opcode,
            count,
            piece,
            stride,
            listed,
            deadline,
            cancel,
            locations,
            nowhere,
            priority,
            seed,
            flood,
        }
    }

    /// Submits a transfer.
    pub(super) fn start(
        &mut self,
        network: &mut Network<'_>,
        own: usize,
        peer: usize,
        wish: &Wish,
    ) {
        let &Wish { opcode, count, piece, stride, deadline, locations, priority, seed, .. } = wish;
        let last = self.phase == Phase::Last;
        // A process that meets a peer for the first time looks up its present life.
        let life = self.processes[peer].life;
        let own_life = self.processes[own].life;
        let world = &self.world;
        let found = self.processes[own]
            .peers
            .entry(peer)
            .or_insert_with(|| Peer::new(world, own, peer, life, seed));
        if found.flow.incarnation() == 0 {
            found.known = found.known.max(incarnation(peer, life));
            found.flow.peer_restarted(core_time(network.now()), found.known);
        }
        let (_, peer_life) = super::process::life_of(found.flow.incarnation());
        let user = self.made;
        let span = stride * u64::from(count - 1) + piece;
        let (sink, source) = self.ledger.borrow_mut().open(
            &mut self.rng,
            user,
            opcode,
            (own, own_life),
            (peer, peer_life),
            (span, piece * u64::from(count)),
        );
        let (local, remote) = if opcode == Opcode::Write { (source, sink) } else { (sink, source) };
        let at = |index: u64| Piece {
            local: local + index * stride,
            remote: remote + index * stride,
            length: piece,
        };
        let mut list: Vec<Piece> = (0..count.into()).map(at).collect();
        if seed.is_multiple_of(3) {
            list.reverse();
        }
        let ranges = match count {
            1 => Ranges::Contiguous(at(0)),
            _ if wish.listed => Ranges::List(&list),
            _ => {
                Ranges::Strided { first: at(0), count, local_stride: stride, remote_stride: stride }
            }
        };
        let request = Request {
            opcode,
            ranges,
            deadline: deadline.map(core_time),
            priority,
            incarnation: found.flow.incarnation(),
            local_location: locations[0],
            peer_location: locations[1],
            local_borders: Borders::NONE,
            peer_borders: Borders::NONE,
            user,
        };
        let submitted: Result<_, SubmitError> = found.flow.submit(&request);
        let task = match submitted {
            Ok(task) => task,
            Err(error) => return network.violate(format!("{request:?}: {error}")),
        };
        network.note(|| format!("submit from {own} to {peer}: {request:?}"));
        self.tally.one("transfers");
        let mut limit = deadline.map_or(network.after(LONGEST), |deadline| deadline + END);
        if wish.nowhere {
            self.tally.one("transfers for which there is no rail");
            limit = limit.min(network.after(self.world.config.patience + TICK));
        }
        let submitted = network.now();
        let (initiator, target, length) = (own, peer, piece * u64::from(count));
        let transfer = Transfer {
            initiator,
            target,
            task,
            priority,
            submitted,
            length,
            posted: 0,
            limit,
            last,
            flood: wish.flood,
        };
        self.transfers.insert(user, transfer);
        let delay = limit.saturating_duration_since(network.now());
        self.plan(network, delay, Event::Limit { user });
        if let Some(delay) = wish.cancel.filter(|_| !last) {
            self.plan(network, delay, Event::Cancel { user });
        }
        if let Some(rng) = self.unregister.as_mut().filter(|_| !last)
            && rng.below(8) == 0
        {
            let delay = duration(rng, UNREGISTER);
            self.plan(network, delay, Event::Unregister { user });
        }
        self.pump(network, own, peer);
    }

    pub(super) fn cancel(&mut self, network: &mut Network<'_>, user: u64) {
        let limit = network.after(END);
        let Some(transfer) = self.transfers.get_mut(&user) else { return };
        transfer.limit = transfer.limit.min(limit);
        let (own, peer, task) = (transfer.initiator, transfer.target, transfer.task);
        let now = core_time(network.now());
        network.note(|| format!("cancel {user}"));
        if let Some(found) = self.processes[own].peers.get_mut(&peer) {
            let transferred = found.flow.progress(task).map(|progress| progress.transferred);
            let covered = self.ledger.borrow().covered(user);
            if transferred > covered {
                network.violate(format!("{transferred:?} bytes of {user}, but {covered:?}"));
            }
            found.flow.cancel(now, task);
        }
        self.plan(network, END, Event::Limit { user });
        self.pump(network, own, peer);
    }

    /// Goes on to the next phase when the present one is over.
    pub(super) fn go_on(&mut self, network: &mut Network<'_>) {
        match self.phase {
            Phase::Traffic if self.made >= self.world.transfers && self.troubles == 0 => {
                self.outages.borrow_mut().over = true;
                let mut link = self.world.link;
                link.loss = crate::Probability::NEVER;
                for index in 0..self.world.nics.iter().map(|&count| usize::from(count)).sum() {
                    network.set_link(crate::LinkId(index), link);
                }
                self.phase = Phase::Calm;
                for peer in self.processes.iter_mut().flat_map(|own| own.peers.values_mut()) {
                    peer.links.values_mut().for_each(|link| link.mute = false);
                }
                self.go_on(network);
            }
            Phase::Calm if self.transfers.is_empty() => {
                self.phase = Phase::Last;
                for own in 0..PROCESSES {
                    let peer = (own + 1) % PROCESSES;
                    let known = self.processes[own].peers.keys().copied();
                    let peers: Vec<usize> = known.chain([peer]).collect();
                    for peer in peers {
                        if self.last.insert((own, peer)) {
                            let event = Event::LastTransfer { own, peer, tries: 0 };
                            self.plan(network, Duration::ZERO, event);
                        }
                    }
                }
            }
            Phase::Last if self.last.is_empty() => self.phase = Phase::Done,
            _ => {}
        }
    }

    pub(super) fn last_transfer(
        &mut self,
        network: &mut Network<'_>,
        own: usize,
        peer: usize,
        tries: u32,
    ) {
        if tries > 60 {
            return network.violate(format!("no transfer from {own} to {peer} after all trouble"));
        }
        if self.last.contains(&(own, peer)) {
            let under_way = |t: &Transfer| (t.initiator, t.target) == (own, peer);
            if !self.transfers.values().any(under_way) {
                self.made += 1;
                self.submit(network, own, peer);
            }
            let event = Event::LastTransfer { own, peer, tries: tries + 1 };
            self.plan(network, Duration::from_secs(2), event);
        }
    }

    pub(super) fn last_ended(
        &mut self,
        network: &mut Network<'_>,
        transfer: &Transfer,
        ended: &Ended,
    ) {
        match ended.end {
            End::Completed => {
                self.last.remove(&(transfer.initiator, transfer.target));
            }
            // A rail may still pause, and packets of before may still be lost in queues.
            End::Timeout
            | End::Failed(Failure::NoRail | Failure::PeerRestarted | Failure::PeerGone) => {}
            // That a peer is another one may not be noticed yet: each rail to the one before fails.
            End::Failed(Failure::Attempts) if self.takes_peer_for_another(transfer) => {}
            _ => network.violate(format!("after all trouble {transfer:?}: {ended:?}")),
        }
    }

    /// Whether the initiator of a transfer has not noticed yet that its target was started again.
    fn takes_peer_for_another(&self, transfer: &Transfer) -> bool {
        let present = incarnation(transfer.target, self.processes[transfer.target].life);
        let found = self.processes[transfer.initiator].peers.get(&transfer.target);
        found.is_some_and(|found| found.flow.incarnation() != present)
    }
}
