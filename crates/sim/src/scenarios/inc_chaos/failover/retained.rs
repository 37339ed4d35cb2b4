//! What others may lack of a call whose end was told here, as the library keeps it
//! (`crates/collective/src/failover/retained.rs`).

use millstream_inc::CollectiveCall;
use millstream_inc::failover::{Lost, Side};

/// What is kept of the last call with a part on a tree.
#[derive(Debug, Default)]
pub(super) struct Retained {
    call: Option<(u64, CollectiveCall)>,
    /// Which vector, where in it, and the bytes there.
    pieces: Vec<(Side, u64, Vec<u8>)>,
}

impl Retained {
    /// Keeps what others may lack of a call that is over, if it has a part on this tree. `bytes` are those of a vector.
    pub(super) fn keep<'a>(
        &mut self,
        lost: &Lost,
        (sequence, call): (u64, &CollectiveCall),
        tree: u8,
        bytes: impl Fn(Side) -> &'a [u8],
    ) {
        if !lost.has_part(call, sequence, tree) {
            return;
        }
        self.call = Some((sequence, *call));
        self.pieces.clear();
        lost.kept(call, sequence, tree, |side, range| {
            let kept = bytes(side)[range.start as usize..range.end as usize].to_vec();
            self.pieces.push((side, range.start, kept));
        });
    }

    /// What it is of.
    pub(super) const fn call(&self) -> Option<(u64, CollectiveCall)> {
        self.call
    }

    /// Bytes of a vector, if all of them are here.
    pub(super) fn fetch(&self, side: Side, start: u64, length: usize) -> Option<Vec<u8>> {
        let mut found = vec![None; length];
        for (_, at, bytes) in self.pieces.iter().filter(|(of, ..)| *of == side) {
            for (address, &byte) in (*at..).zip(bytes) {
                let index = address.checked_sub(start).map(|index| index as usize);
                if let Some(place) = index.and_then(|index| found.get_mut(index)) {
                    *place = Some(byte);
                }
            }
        }
        found.into_iter().collect()
    }
}
