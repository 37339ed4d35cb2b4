//! What tells groups apart.

use std::collections::HashSet;

use super::*;

/// The numbers of a group that was made after so many others by a controller with this seed.
fn identity(seed: u64, groups: u64) -> [u64; 2] {
    let mut controller = Controller::new(ControllerConfig::new(seed));
    controller.next_group = groups;
    controller.draw_identity()
}

#[test]
fn no_two_groups_have_a_number_in_common() {
    let seeds = [0, 1, 2, 7, u64::MAX, 1 << 63];
    let all: Vec<u64> =
        seeds.iter().flat_map(|&seed| (0..200).flat_map(move |it| identity(seed, it))).collect();
    let different: HashSet<u64> = all.iter().copied().collect();
    assert_eq!(different.len(), all.len());
}

/// Jobs are kept apart by chance, so a small difference of seeds or counts must change half of the bits.
#[test]
fn the_numbers_of_groups_look_random() {
    let count = 1000;
    let mut ones = [0_u32; 64];
    let mut changed = [0_u32; 2];
    for number in 0..count {
        let [low, high] = identity(7, number);
        for (bit, ones) in ones.iter_mut().enumerate() {
            *ones += (low >> bit & 1) as u32;
        }
        changed[0] += (low ^ identity(7, number + 1)[0]).count_ones();
        changed[1] += (high ^ identity(6, number)[1]).count_ones();
    }
    // The half, as far as a thousand throws of a coin are from it.
    assert!(ones.iter().all(|ones| (400..600).contains(ones)), "{ones:?}");
    assert!(changed.iter().all(|it| (31_500..32_500).contains(it)), "{changed:?}");
}
