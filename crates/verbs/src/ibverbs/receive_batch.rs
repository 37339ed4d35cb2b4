//! Receive requests as the library takes them.

use millstream_roce::{Piece, ReceiveRequest};

use super::ffi;
use crate::MAX_SCATTER_GATHER;

/// Requests handed to the device at a time.
pub(super) const LENGTH: usize = 16;

/// Has `post` post up to [`LENGTH`] requests, under the numbers that `number` gives them by their
/// index. The lists of pieces that they point to exist until then only.
pub(super) fn with<P: AsRef<[Piece]>, T>(
    batch: &[ReceiveRequest<P>],
    number: impl Fn(usize) -> u64,
    post: impl FnOnce(&mut [ffi::RecvWr]) -> T,
) -> T {
    let mut pieces = [[ffi::Sge::default(); MAX_SCATTER_GATHER]; LENGTH];
    let mut native = [EMPTY; LENGTH];
    let native = &mut native[..batch.len()];
    for (index, (request, entry)) in batch.iter().zip(&mut *native).enumerate() {
        let list = &mut pieces[index];
        entry.num_sge = gather(request.pieces.as_ref(), list);
        entry.wr_id = number(index);
        entry.sg_list = list.as_mut_ptr();
    }
    post(native)
}

const EMPTY: ffi::RecvWr =
    ffi::RecvWr { wr_id: 0, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge: 0 };

/// Copies the pieces that have bytes; returns how many. To some devices a length of 0 means 2^31.
pub(super) fn gather(pieces: &[Piece], list: &mut [ffi::Sge; MAX_SCATTER_GATHER]) -> i32 {
    let mut count = 0;
    for (piece, entry) in pieces.iter().filter(|piece| piece.length > 0).zip(list) {
        *entry = ffi::Sge { addr: piece.address, length: piece.length, lkey: piece.key };
        count += 1;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_without_bytes_are_left_out() {
        let piece = |key, length| Piece { key, address: 0x1000, length };
        let mut list = [ffi::Sge::default(); MAX_SCATTER_GATHER];
        let count = gather(&[piece(1, 0), piece(2, 5), piece(3, 0), piece(4, 6)], &mut list);
        assert_eq!((count, list[0].lkey, list[1].lkey, list[1].length), (2, 2, 4, 6));
    }
}
