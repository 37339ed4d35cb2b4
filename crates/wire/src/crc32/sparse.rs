//! CRC-32 without tables or special instructions.
//!
//! A message is a polynomial, its first bit the highest power, and its CRC the remainder after
//! division by the generator. Any multiple of the generator may be added to it. One has five terms
//! only: x^300 + x^155 + x^117 + x^89 + 1. So a bit is removed by adding it 145, 183, 211 and 300
//! bits further on; as all of these are more than two words, whole words are removed at a time. What
//! is left in the end are the last few words, for the ordinary division.
//!
//! The idea is of K. Russell, "Chorba: A novel CRC32 implementation" (arXiv:2412.16398).

/// Words that a removed word is added to begin here and end at 5: see the module.
const REACH: usize = 5;
const WORD: usize = size_of::<u64>();
/// Words removed in a turn: then each variable has the same part again.
const BLOCK: usize = REACH * WORD;
/// With fewer bytes the ordinary way is as fast.
const WORTH_IT: usize = 4 * BLOCK;

/// The CRC-32 of what had the CRC-32 `before`, followed by `bytes`.
pub(super) fn update(before: u32, bytes: &[u8]) -> u32 {
    if bytes.len() < WORTH_IT {
        return super::library(before, bytes);
    }
    // The rest must have room for what is added behind the last word that is removed.
    let removed = (bytes.len() - BLOCK) / BLOCK * BLOCK;
    let (blocks, rest) = bytes.split_at(removed);
    let (blocks, _none) = blocks.as_chunks::<BLOCK>();
    // What is to be added to the next five words. The first bits of a message are inverted.
    let [mut a, mut b, mut c, mut d, mut e] = [u64::from(!before), 0, 0, 0, 0];
    for block in blocks {
        let (words, _none) = block.as_chunks::<WORD>();
        let [v, w, x, y, z] = [words[0], words[1], words[2], words[3], words[4]];
        a = remove(v, a, &mut c, &mut d, &mut e);
        b = remove(w, b, &mut d, &mut e, &mut a);
        c = remove(x, c, &mut e, &mut a, &mut b);
        d = remove(y, d, &mut a, &mut b, &mut c);
        e = remove(z, e, &mut b, &mut c, &mut d);
    }
    let mut last = [0; 2 * BLOCK];
    let last = &mut last[..rest.len()];
    last.copy_from_slice(rest);
    let (words, _) = last.as_chunks_mut::<WORD>();
    for (word, added) in words.iter_mut().zip([a, b, c, d, e]) {
        *word = (u64::from_le_bytes(*word) ^ added).to_le_bytes();
    }
    // Nothing is before them any more: a register of zeros, which is the CRC of all ones.
    super::library(u32::MAX, last)
}

/// Removes a word, to which `added` was to be added: adds it to those 2, 3 and 4 words further on,
/// and returns what is to be added to the fifth. Bit 0 is the first of a word.
#[inline(always)]
fn remove(
    word: [u8; WORD],
    added: u64,
    second: &mut u64,
    third: &mut u64,
    fourth: &mut u64,
) -> u64 {
    let word = u64::from_le_bytes(word) ^ added;
    // By 145 = 2 * 64 + 17, 183 = 2 * 64 + 55, 211 = 3 * 64 + 19 and 300 = 4 * 64 + 44 bits.
    *second ^= word << 17 ^ word << 55;
    *third ^= word >> 47 ^ word >> 9 ^ word << 19;
    *fourth ^= word >> 45 ^ word << 44;
    word >> 20
}
