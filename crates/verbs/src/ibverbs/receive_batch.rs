//! Receive requests as the library takes them.

use std::cell::RefCell;
use std::ptr;

use millstream_roce::{Piece, ReceiveRequest};

use super::ffi;

/// The most requests handed to the device at a time.
pub(super) const LENGTH: usize = 256;

thread_local! {
    /// Kept for their allocation.
    static LISTS: RefCell<(Vec<ffi::Sge>, Vec<ffi::RecvWr>)> = const {
        RefCell::new((Vec::new(), Vec::new()))
    };
}

/// Has `post` post up to [`LENGTH`] requests, under the numbers that `number` gives them by their
/// index. The lists of pieces that they point to exist until then only.
pub(super) fn with<P: AsRef<[Piece]>, T>(
    batch: &[ReceiveRequest<P>],
    number: impl Fn(usize) -> u64,
    post: impl FnOnce(&mut [ffi::RecvWr]) -> T,
) -> T {
    let (mut pieces, mut native) = LISTS.take();
    pieces.clear();
    native.clear();
    native.extend(batch.iter().enumerate().map(|(index, request)| ffi::RecvWr {
        wr_id: number(index),
        next: ptr::null_mut(),
        sg_list: ptr::null_mut(),
        num_sge: gather(request.pieces.as_ref(), &mut pieces),
    }));
    let mut next = pieces.as_mut_ptr();
    for entry in &mut native {
        entry.sg_list = next;
        next = next.wrapping_add(entry.num_sge as usize);
    }
    let posted = post(&mut native);
    LISTS.set((pieces, native));
    posted
}

/// Appends the pieces that have bytes; returns how many. To some devices a length of 0 means 2^31.
pub(super) fn gather(pieces: &[Piece], list: &mut Vec<ffi::Sge>) -> i32 {
    let before = list.len();
    list.extend(pieces.iter().filter(|piece| piece.length > 0).map(|piece| ffi::Sge {
        addr: piece.address,
        length: piece.length,
        lkey: piece.key,
    }));
    (list.len() - before) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_without_bytes_are_left_out() {
        let piece = |key, length| Piece { key, address: 0x1000, length };
        let mut list = vec![ffi::Sge::default()];
        let count = gather(&[piece(1, 0), piece(2, 5), piece(3, 0), piece(4, 6)], &mut list);
        assert_eq!((count, list[1].lkey, list[2].lkey, list[2].length), (2, 2, 4, 6));
    }
}
