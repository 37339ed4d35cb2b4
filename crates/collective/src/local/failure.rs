//! Why a group is over: one rank says it in the shared memory, and all end with that.
//!
//! ```text
//!  0  state   4  kind   8  rank   12  bytes of the text   16  ranks, 4 x 4   32  text
//! ```
//!
//! In place of the ranks a switch that is lost has its address, an IPv4 address as one of IPv6 (RFC 4291, 2.5.5.2).
//!
//! The state goes from 0 to 1 by who may write, and to 2 when that is done. A rank that is killed in between leaves 1:
//! then each other one finds its own reason.

use std::net::IpAddr;
use std::sync::atomic::Ordering;

use millstream_inc::{Mismatch, NAMED_RANKS, Overdue};
use millstream_net::shared_memory::GroupMemory;

use crate::CollectiveError;

const MAX_TEXT: usize = 512;
/// Of the record.
pub(super) const FAILURE_BYTES: usize = 32 + MAX_TEXT;

const NONE: u32 = 0;
const WRITING: u32 = 1;
const WRITTEN: u32 = 2;

/// What a rank says.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Failure {
    PeerLost { rank: u32, detail: String },
    Mismatch { rank: u32, what: String },
    Overdue { ranks: Vec<u32>, what: String },
    SwitchLost { switch: IpAddr, detail: String },
}

impl Failure {
    /// The process of a rank has ended.
    pub(super) fn ended(rank: u32, pid: i32) -> Self {
        Self::PeerLost { rank, detail: format!("process {pid} of this machine has ended") }
    }

    /// What a rank says that is connected to switches for all of its host.
    pub(super) fn of_wire(error: &CollectiveError, rank: u32) -> Self {
        match error.clone() {
            CollectiveError::PeerLost { rank, detail } => Self::PeerLost { rank, detail },
            CollectiveError::Mismatch { rank, what } => Self::Mismatch { rank, what },
            CollectiveError::Overdue { ranks, what } => {
                Self::Overdue { ranks: ranks.into(), what: what + STANDS_FOR_HOST }
            }
            CollectiveError::SwitchLost { switch, detail, .. } => {
                Self::SwitchLost { switch, detail }
            }
            error @ CollectiveError::Timeout { .. } => {
                Self::Overdue { ranks: Vec::new(), what: error.to_string() }
            }
            error => Self::PeerLost { rank, detail: format!("it gave up: {error}") },
        }
    }
}

/// Switches know hosts by their lowest ranks.
const STANDS_FOR_HOST: &str = "; the lowest rank of a host stands for all ranks of that host";

impl From<Mismatch> for Failure {
    fn from(mismatch: Mismatch) -> Self {
        Self::Mismatch { rank: mismatch.rank, what: mismatch.to_string() }
    }
}

impl From<Overdue> for Failure {
    fn from(overdue: Overdue) -> Self {
        Self::Overdue { ranks: overdue.named().to_vec(), what: overdue.to_string() }
    }
}

impl From<Failure> for CollectiveError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::PeerLost { rank, detail } => Self::PeerLost { rank, detail },
            Failure::Mismatch { rank, what } => Self::Mismatch { rank, what },
            Failure::Overdue { ranks, what } => Self::Overdue { ranks: ranks.into(), what },
            Failure::SwitchLost { switch, detail } => {
                Self::SwitchLost { switch, detail, incarnation: None }
            }
        }
    }
}

/// Says why, at this place, unless another rank has.
pub(super) fn say(memory: &GroupMemory, at: usize, failure: &Failure) {
    let Some(state) = memory.word(at) else { return };
    let order = (Ordering::AcqRel, Ordering::Acquire);
    if state.compare_exchange(NONE, WRITING, order.0, order.1).is_err() {
        return;
    }
    let words;
    let (kind, rank, ranks, text) = match failure {
        Failure::PeerLost { rank, detail } => (0_u32, *rank, &[][..], detail),
        Failure::Mismatch { rank, what } => (1, *rank, &[][..], what),
        Failure::Overdue { ranks, what } => (2, 0, &ranks[..], what),
        Failure::SwitchLost { switch, detail } => {
            words = address_words(*switch);
            (3, 0, &words[..], detail)
        }
    };
    let text = &text[..text.floor_char_boundary(MAX_TEXT)];
    let mut record = [0; FAILURE_BYTES];
    let named = (0..NAMED_RANKS).map(|at| ranks.get(at).copied().unwrap_or(u32::MAX));
    let numbers = [0, kind, rank, text.len() as u32].into_iter().chain(named);
    for (bytes, number) in record.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
        *bytes = number.to_le_bytes();
    }
    record[32..32 + text.len()].copy_from_slice(text.as_bytes());
    memory.write(at + 4, &record[4..]);
    state.store(WRITTEN, Ordering::Release);
}

/// Nothing is said there any more. One rank alone speaks there.
pub(super) fn forget(memory: &GroupMemory, at: usize) {
    if let Some(state) = memory.word(at) {
        state.store(NONE, Ordering::Release);
    }
}

/// What a rank has said, if it has, and makes sense for a group of so many.
pub(super) fn heard(memory: &GroupMemory, at: usize, world: u32) -> Option<Failure> {
    let state = memory.word(at)?;
    if state.load(Ordering::Acquire) != WRITTEN {
        return None;
    }
    let mut record = [0; FAILURE_BYTES];
    memory.read(at, &mut record);
    let number = |at: usize| record.as_chunks::<4>().0[at];
    let number = |at: usize| u32::from_le_bytes(number(at));
    let (kind, rank) = (number(1), number(2));
    let text = record[32..].get(..number(3) as usize)?;
    let text = String::from_utf8_lossy(text).into_owned();
    match kind {
        0 if rank < world => Some(Failure::PeerLost { rank, detail: text }),
        1 if rank < world => Some(Failure::Mismatch { rank, what: text }),
        2 => {
            let ranks = (4..4 + NAMED_RANKS).map(number).filter(|&rank| rank < world);
            Some(Failure::Overdue { ranks: ranks.collect(), what: text })
        }
        3 => {
            let switch = address_of(std::array::from_fn(|at| number(4 + at)));
            Some(Failure::SwitchLost { switch, detail: text })
        }
        _ => None,
    }
}

fn address_words(address: IpAddr) -> [u32; NAMED_RANKS] {
    let bytes = match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    };
    let bytes = bytes.as_chunks::<4>().0;
    std::array::from_fn(|at| u32::from_le_bytes(bytes[at]))
}

fn address_of(words: [u32; NAMED_RANKS]) -> IpAddr {
    let mut bytes = [0; 16];
    for (bytes, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    IpAddr::from(bytes).to_canonical()
}

#[cfg(test)]
mod tests {
    use millstream_net::shared_memory::GroupOwner;

    use super::*;
    use crate::local::layout::FAILURE_AT;

    #[test]
    fn the_first_to_say_why_is_heard_and_nobody_else() {
        for failure in [
            Failure::PeerLost { rank: 3, detail: "gone".to_owned() },
            Failure::Mismatch { rank: 0, what: "é".repeat(400) },
            Failure::Overdue { ranks: vec![1, 2], what: "late".to_owned() },
            Failure::Overdue { ranks: vec![], what: String::new() },
            Failure::SwitchLost { switch: [10, 0, 0, 1].into(), detail: "silent".to_owned() },
            Failure::SwitchLost { switch: "fd00::5".parse().unwrap(), detail: String::new() },
        ] {
            let (_owner, memory) = GroupOwner::create(4096).unwrap();
            assert_eq!(heard(&memory, FAILURE_AT, 4), None);
            say(&memory, FAILURE_AT, &failure);
            say(&memory, FAILURE_AT, &Failure::PeerLost { rank: 1, detail: "later".to_owned() });
            let expected = match &failure {
                Failure::Mismatch { rank, .. } => {
                    Failure::Mismatch { rank: *rank, what: "é".repeat(256) }
                }
                other => other.clone(),
            };
            assert_eq!(heard(&memory, FAILURE_AT, 4), Some(expected));
        }
    }

    #[test]
    fn what_makes_no_sense_is_not_heard() {
        for (at, number) in [(1, 4), (2, 4), (3, MAX_TEXT as u32 + 1), (3, u32::MAX)] {
            let (_owner, memory) = GroupOwner::create(4096).unwrap();
            say(&memory, FAILURE_AT, &Failure::PeerLost { rank: 3, detail: "gone".to_owned() });
            memory.word(FAILURE_AT + 4 * at).unwrap().store(number, Ordering::Relaxed);
            assert_eq!(heard(&memory, FAILURE_AT, 4), None, "{at} {number}");
        }
    }
}
