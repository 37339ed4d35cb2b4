//! What is missing of the calls of a communicator whose switch is lost, and how it is made up for over other trees.
//!
//! Every rank says how far it has come on each of the lost trees ([`Report`]). A tree does its calls in their order, and the
//! results of a call come in the order of segments, so that is the number of a call and of segments. From the reports of
//! all, each rank works out the same list ([`Lost::repairs`]):
//!
//! - A segment that all have who are to get it is left alone.
//! - One that some have is broadcast by one of these: nothing is computed twice, so sums of floats are the same
//!   everywhere.
//! - One that nobody has is computed anew from the sources of all ranks.
//!
//! Calls that some rank has not started are no part of this: they are done as if they had just been started.
//!
//! A rank whose caller has been told the end of a call keeps what others may still lack of it ([`Lost::kept`]). That is
//! little: an answer to segment `s` of a tree means that all ranks have contributed to it, which they may only with all
//! answers up to `s - window`; and that all ranks have begun the call, which they do when the one before it is over there.
//!
//! A host with several ranks has one of them on the trees, which says the same for all of them. Its vectors are laid out as
//! the whole one ([`crate::HostWorker::of_ranks`]).

mod succession;

use core::ops::Range;

use millstream_wire::Mtu;
use thiserror::Error;

use crate::layout::{Cut, Layout, Who};
use crate::ranks::Ranks;
use crate::stripe::MAX_TREES;
use crate::{Collective, CollectiveCall, Descriptor, Stripe};

pub use succession::{Failure, Next, Patience, Place, Succession};

/// Bytes of a [`Report`].
pub const REPORT_BYTES: usize = 32 + 16 * MAX_TREES;

const MAGIC: [u8; 4] = *b"MSFO";
const VERSION: u32 = 1;

/// No call was overwritten.
const NONE: u64 = u64::MAX;

/// More calls than this between the slowest rank and the fastest cannot be: a rank starts so many at most before the first of
/// them is over.
const MAX_BEHIND: u64 = 1 << 16;

/// How far a rank has come on a tree.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Position {
    /// The first call that may have a part on the tree which is not over here. What comes before is over.
    pub sequence: u64,
    /// Of the part of that one, segments whose answer has come; 1 of a delivered vector without segments.
    pub results: u64,
}

/// What a rank says of the lost trees, when nothing can arrive from them any more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Report {
    /// The lost communicator's number.
    pub communicator: u64,
    /// How many calls this rank has started on it.
    pub started: u64,
    /// A call whose source its result may have overwritten, and of which there is no copy.
    pub overwritten: Option<u64>,
    /// Of each tree.
    pub positions: [Position; MAX_TREES],
}

/// Why a communicator cannot go on.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum FailoverError {
    /// A rank has said nothing that makes sense.
    #[error("rank {rank} has sent no report of this version: versions differ, or there is a bug")]
    Report {
        /// Which.
        rank: u32,
    },
    /// A rank says what another communicator was at.
    #[error("rank {rank} reports communicator {found}, and this is {expected}")]
    Communicator {
        /// Which.
        rank: u32,
        /// What it reports.
        found: u64,
        /// What it should.
        expected: u64,
    },
    /// Ranks are further apart than they can be.
    #[error("rank {rank} is further behind than a rank can be: there is a bug")]
    Behind {
        /// Which.
        rank: u32,
    },
    /// The source of a call is gone.
    #[error(
        "rank {rank} keeps no copy of what results overwrite, as its settings say, and has called collective {sequence} in \
         place, or for all ranks of its host"
    )]
    Overwritten {
        /// Which.
        rank: u32,
        /// Which call.
        sequence: u64,
    },
}

impl Report {
    /// As it is sent, little-endian.
    pub fn to_bytes(&self) -> [u8; REPORT_BYTES] {
        let mut bytes = [0; REPORT_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        let fields = [self.communicator, self.started, self.overwritten.unwrap_or(NONE)];
        let positions = self.positions.iter().flat_map(|it| [it.sequence, it.results]);
        let places = bytes[8..].chunks_exact_mut(8);
        for (place, field) in places.zip(fields.into_iter().chain(positions)) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// What a rank has sent.
    pub fn parse(bytes: &[u8; REPORT_BYTES]) -> Option<Self> {
        let (head, fields) = bytes.split_at(8);
        if head[..4] != MAGIC || head[4..] != VERSION.to_le_bytes() {
            return None;
        }
        let mut fields = fields.chunks_exact(8).map(|field| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(field);
            u64::from_le_bytes(bytes)
        });
        let mut next = || fields.next().unwrap_or_default();
        let (communicator, started, overwritten) = (next(), next(), next());
        let overwritten = Some(overwritten).filter(|&sequence| sequence != NONE);
        let positions = [(); MAX_TREES].map(|()| Position { sequence: next(), results: next() });
        Some(Self { communicator, started, overwritten, positions })
    }
}

/// Which vector of a rank.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    /// What it contributes.
    Source,
    /// What it gets.
    Destination,
}

/// A part of a vector that is made up for, by a collective over the new trees: an AllReduce, Reduce or Broadcast of
/// elements of the lost call's type, combined by its operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Repair {
    /// The lost call.
    pub sequence: u64,
    /// What all ranks call.
    pub collective: Collective,
    /// Its root; 0 where it has none.
    pub root: u32,
    /// How many elements.
    pub count: u64,
    /// Where this rank has its elements, if it contributes any: the vector and bytes from its start.
    pub read: Option<(Side, u64)>,
    /// Where this rank wants the result, if it lacks it: bytes from the start of its destination.
    pub write: Option<u64>,
}

/// Trees that are lost, as one rank knows them.
#[derive(Clone, Debug)]
pub struct Lost {
    /// The communicator's number.
    pub communicator: u64,
    /// Which rank this is: the lowest of its host, where that has several.
    pub rank: u32,
    /// The ranks of a host that has several. Of a rank that is there for itself, it or none.
    pub ranks: Ranks,
    /// How many there are.
    pub world: u32,
    /// How many trees there are.
    pub trees: u8,
    /// Bytes of a segment. Not 0.
    pub segment_bytes: u32,
    /// Segments that a rank may be ahead of its last result.
    pub window: u32,
    /// Payload bytes per packet.
    pub path_mtu: Mtu,
}

/// What a tree has of a call: parts, each of so many pieces, whose results come in this order. A vector that travels with
/// the descriptor has one piece for each part, which come together.
struct Share {
    layout: Layout,
    parts: u64,
    pieces: u64,
    is_small: bool,
}

/// The first call that some rank has not started: from there on, calls are done anew.
pub fn first_to_repeat(reports: &[Report]) -> u64 {
    reports.iter().map(|report| report.started).min().unwrap_or_default()
}

impl Lost {
    fn share(&self, call: &CollectiveCall, sequence: u64, tree: u8) -> Option<Share> {
        let stripe = Stripe::of(call, self.world, sequence, tree, self.trees)?;
        let &CollectiveCall { collective, operation, data_type, root, count, mode, .. } = call;
        let descriptor = Descriptor {
            sequence,
            collective,
            operation,
            data_type,
            root,
            count,
            stripe,
            mode,
            destination_address: 0,
            destination_key: 0,
        };
        let cut = Cut::new(self.world, self.segment_bytes, self.path_mtu);
        let layout = Layout::new(&descriptor, &cut, 0);
        let (parts, is_small) = (layout.parts(), layout.small_bytes() > 0);
        let pieces = if is_small { 1 } else { layout.end().checked_div(parts).unwrap_or_default() };
        (pieces > 0).then_some(Share { layout, parts, pieces, is_small })
    }

    /// Whether a call has something on a tree, be it no bytes.
    pub const fn has_part(&self, call: &CollectiveCall, sequence: u64, tree: u8) -> bool {
        Stripe::of(call, self.world, sequence, tree, self.trees).is_some()
    }

    /// What the caller of a call that is over must be able to give the others, after its vectors have been given back: for
    /// each tree that the call had a part on, until a later call with a part there is over. `keep` is called with the
    /// vector and which of its bytes.
    pub fn kept(
        &self,
        call: &CollectiveCall,
        sequence: u64,
        tree: u8,
        mut keep: impl FnMut(Side, Range<u64>),
    ) {
        let Some(share) = self.share(call, sequence, tree) else { return };
        let end = share.parts * share.pieces;
        let first = if share.is_small { 0 } else { end.saturating_sub(self.window.into()) };
        for piece in first..end {
            let (whole, place) = share.range(piece..piece + 1);
            let length = whole.end - whole.start;
            match place {
                (_, Who::All) => keep(Side::Destination, whole),
                // What one gets is of all.
                (_, target) if !self.is_among(target) => {
                    let start = self.in_source(&share, whole.start, piece);
                    keep(Side::Source, start..start + length);
                }
                (_, Who::One(_)) => {}
            }
        }
    }

    /// What all ranks do, in this order, to finish the calls before [`first_to_repeat`]. `reports` has one of each rank, and
    /// `call_of` knows the calls whose vectors are still here, or kept. Of any other nobody lacks anything.
    pub fn repairs(
        &self,
        reports: &[Report],
        call_of: impl Fn(u64) -> Option<CollectiveCall>,
    ) -> Result<Vec<Repair>, FailoverError> {
        self.check(reports)?;
        let trees = usize::from(self.trees);
        let positions = reports.iter().flat_map(|report| &report.positions[..trees]);
        let lowest = positions.map(|position| position.sequence).min().unwrap_or_default();
        let mut repairs = Vec::new();
        for sequence in lowest..first_to_repeat(reports) {
            let Some(call) = call_of(sequence) else { continue };
            for tree in 0..self.trees {
                let Some(share) = self.share(&call, sequence, tree) else { continue };
                let all = share.parts * share.pieces;
                let done: Vec<u64> = reports
                    .iter()
                    .map(|report| match report.positions[usize::from(tree)] {
                        position if position.sequence > sequence => all,
                        Position { sequence: at, results } if at == sequence => {
                            match share.is_small {
                                true if results > 0 => all,
                                true => 0,
                                false => results.min(all),
                            }
                        }
                        _ => 0,
                    })
                    .collect();
                self.repair(&call, sequence, &share, &done, &mut repairs);
            }
        }
        Ok(repairs)
    }

    fn check(&self, reports: &[Report]) -> Result<(), FailoverError> {
        let expected = self.communicator;
        let first = first_to_repeat(reports);
        for (report, rank) in reports.iter().zip(0..) {
            let found = report.communicator;
            if found != expected {
                return Err(FailoverError::Communicator { rank, found, expected });
            }
            if let Some(sequence) = report.overwritten {
                return Err(FailoverError::Overwritten { rank, sequence });
            }
            let positions = &report.positions[..usize::from(self.trees)];
            let is_behind = |it: &Position| first.saturating_sub(it.sequence) > MAX_BEHIND;
            if positions.iter().any(is_behind) {
                return Err(FailoverError::Behind { rank });
            }
        }
        Ok(())
    }

    /// What is missing of a tree's share of a call, of which each rank has so many pieces.
    fn repair(
        &self,
        call: &CollectiveCall,
        sequence: u64,
        share: &Share,
        done: &[u64],
        repairs: &mut Vec<Repair>,
    ) {
        let lowest = done.iter().copied().min().unwrap_or_default();
        let highest = done.iter().copied().max().unwrap_or_default();
        let owner = done.iter().position(|&it| it == highest).unwrap_or_default() as u32;
        let size = u64::from(call.data_type.size());
        let own = done.get(self.rank as usize).copied().unwrap_or_default();
        for part in 0..share.parts {
            let (first, end) = (part * share.pieces, (part + 1) * share.pieces);
            let clip = |piece: u64| piece.clamp(first, end);
            let (_, (_, targets)) = share.range(first..end);
            let (spread, anew) = match targets {
                Who::All => (clip(lowest)..clip(highest), clip(highest)..end),
                Who::One(target) => {
                    let has = done.get(target as usize).copied().unwrap_or_default();
                    (first..first, clip(has)..end)
                }
            };
            if !spread.is_empty() {
                let (whole, _) = share.range(spread.clone());
                let lacks = own < spread.end;
                repairs.push(Repair {
                    sequence,
                    collective: Collective::Broadcast,
                    root: owner,
                    count: (whole.end - whole.start) / size,
                    read: self.has(owner).then_some((Side::Destination, whole.start)),
                    write: lacks.then_some(whole.start),
                });
            }
            if !anew.is_empty() {
                let (whole, (sources, targets)) = share.range(anew);
                let (collective, root) = match (sources, targets) {
                    (Who::All, Who::All) => (Collective::AllReduce, 0),
                    (Who::All, Who::One(target)) => (Collective::Reduce, target),
                    (Who::One(source), _) => (Collective::Broadcast, source),
                };
                let source = self.in_source(share, whole.start, first);
                repairs.push(Repair {
                    sequence,
                    collective,
                    root,
                    count: (whole.end - whole.start) / size,
                    read: self.is_among(sources).then_some((Side::Source, source)),
                    write: self
                        .is_among(targets)
                        .then(|| self.in_target(share, whole.start, first)),
                });
            }
        }
    }

    fn is_host(&self) -> bool {
        self.ranks.len() > 1
    }

    /// Whether this is there for a rank.
    fn has(&self, rank: u32) -> bool {
        if self.is_host() { self.ranks.contains(rank) } else { rank == self.rank }
    }

    /// Whether this is there for some of these.
    fn is_among(&self, who: Who) -> bool {
        if self.is_host() { who.among(&self.ranks) } else { who.is(self.rank) }
    }

    /// Where its source has what lies there in the whole vector, in the part of this piece.
    fn in_source(&self, share: &Share, whole: u64, piece: u64) -> u64 {
        match self.is_host() {
            true => whole,
            false => share.layout.in_source(whole, piece / share.pieces),
        }
    }

    /// The same of its destination.
    fn in_target(&self, share: &Share, whole: u64, piece: u64) -> u64 {
        match self.is_host() {
            true => whole,
            false => share.layout.in_target(whole, piece / share.pieces),
        }
    }
}

impl Share {
    /// Where pieces of one part lie in the whole vector, who contributes to them and who gets them.
    fn range(&self, pieces: Range<u64>) -> (Range<u64>, (Who, Who)) {
        let part = pieces.start / self.pieces;
        let within = pieces.start - part * self.pieces..pieces.end - part * self.pieces;
        self.layout.pieces(part, within, self.is_small)
    }
}

#[cfg(test)]
mod tests;
