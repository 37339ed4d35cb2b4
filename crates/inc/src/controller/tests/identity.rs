//! What tells groups apart.

use std::collections::HashSet;

use super::*;
use crate::mix::{STEP, mix};

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

/// As it was made before, from one number by functions that have inverses: one identity told all of them.
#[test]
fn no_identity_tells_the_next() {
    let unmix = |mixed: u64| {
        let mut z = mixed ^ mixed >> 31 ^ mixed >> 62;
        z = z.wrapping_mul(0x3196_42b2_d24d_8ec3);
        z = z ^ z >> 27 ^ z >> 54;
        z = z.wrapping_mul(0x96de_1b17_3f11_9089);
        (z ^ z >> 30 ^ z >> 60).wrapping_sub(STEP)
    };
    assert_eq!(unmix(mix(4711)), 4711);
    for groups in 0..16 {
        let seed = unmix(identity(7, groups)[0]) ^ mix(2 * groups);
        assert_ne!(mix(seed ^ mix(2 * (groups + 1))), identity(7, groups + 1)[0]);
    }
}

#[test]
fn communicators_are_numbered_by_the_run_and_counted() {
    let [a, b] = [1, 2].map(|seed| Controller::new(ControllerConfig::new(seed)).next_communicator);
    // Programs that read JSON numbers as floats have 53 bits.
    assert!(a != b && a % (1 << 32) == 0 && b % (1 << 32) == 0 && a.max(b) < 1 << 53);
}

#[test]
fn what_numbers_are_made_from_is_not_shown() {
    let config = ControllerConfig::new(0x1234_5678_9abc_def0);
    assert!(format!("{config:?}").contains("IdentitySecret(..)"));
}
