//! Every type and operation against the oracle, at every level of vector instructions that this
//! machine has.

mod oracle;

use fearless_simd::{Level, Simd};
use proptest::prelude::*;

use super::Kernel;
use crate::{DataType, ReduceOperation};

/// What surrounds vectors, and must stay.
const GUARD: u8 = 0xa5;
/// The longest vector of these tests.
const LONGEST: usize = 300;

fn levels() -> Vec<Level> {
    let best = Level::new();
    let mut levels = vec![best, Level::baseline()];
    #[cfg(target_arch = "x86_64")]
    {
        levels.extend(best.as_sse4_2().map(|token| token.level()));
        levels.extend(best.as_avx2().map(|token| token.level()));
    }
    levels
}

/// The types that there are kernels for.
fn computed() -> Vec<DataType> {
    let all = DataType::ALL.iter().copied();
    all.filter(|&data_type| Kernel::of(data_type, ReduceOperation::Sum).is_some()).collect()
}

fn kernels() -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for level in levels() {
        for &data_type in DataType::ALL {
            let all = ReduceOperation::ALL.iter();
            kernels
                .extend(all.filter_map(|&operation| Kernel::at_level(data_type, operation, level)));
        }
    }
    kernels
}

fn bytes(elements: &[u64], size: usize) -> Vec<u8> {
    elements.iter().flat_map(|element| element.to_le_bytes().into_iter().take(size)).collect()
}

fn masked(data_type: DataType, bits: u64) -> u64 {
    bits & u64::MAX >> (64 - 8 * data_type.size())
}

/// Where a type's arithmetic is special, and the numbers next to it.
fn special_elements(data_type: DataType) -> Vec<u64> {
    let of_bits = |sign: u32, fraction: u32| {
        let (smallest_normal, infinity) =
            (1 << fraction, ((1 << (sign - fraction)) - 1) << fraction);
        // One, in the middle of the exponents.
        let one = (infinity >> 1) & infinity;
        let magnitudes = [
            0,
            1,
            smallest_normal - 1,
            smallest_normal,
            one,
            one + 1,
            infinity - 1,
            infinity,
            infinity + 1,
            infinity + (smallest_normal >> 1),
            infinity + smallest_normal - 1,
        ];
        magnitudes.iter().flat_map(|&bits| [bits, bits | 1 << sign]).collect()
    };
    match data_type {
        DataType::Float32 => of_bits(31, 23),
        DataType::Float64 => of_bits(63, 52),
        _ => {
            let lowest = 1 << (8 * data_type.size() - 1);
            [0, 1, 2, lowest - 1, lowest, lowest + 1, u64::MAX - 1, u64::MAX]
                .map(|bits| masked(data_type, bits))
                .into()
        }
    }
}

/// Every pair of special elements, and then others, in vectors of [`LONGEST`] bytes.
fn pairs(data_type: DataType) -> Vec<[Vec<u64>; 2]> {
    let special = special_elements(data_type);
    let mut all: Vec<[u64; 2]> =
        special.iter().flat_map(|&a| special.iter().map(move |&b| [a, b])).collect();
    // Weyl's sequence, by an odd multiplier: all bits change, and no element is like its neighbours.
    let other = |number: u64| masked(data_type, number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7);
    all.extend((1..=LONGEST as u64).map(|number| [other(number), other(number + 1000)]));
    all.chunks(LONGEST / data_type.size() as usize)
        .map(|chunk| [0, 1].map(|side| chunk.iter().map(|pair| pair[side]).collect()))
        .collect()
}

#[test]
fn every_pair_of_special_elements_is_as_the_oracle_says() {
    for kernel in kernels() {
        let (data_type, operation) = (kernel.data_type, kernel.operation);
        for [a, b] in pairs(data_type) {
            let mut slot = vec![GUARD; bytes(&a, kernel.size()).len()];
            kernel.first(&mut slot, &bytes(&a, kernel.size()));
            assert_eq!(slot, bytes(&a, kernel.size()), "{kernel:?}");
            let each = a.iter().zip(&b);
            let wanted: Vec<u64> = each
                .map(|(&ours, &theirs)| oracle::combine(data_type, operation, ours, theirs))
                .collect();
            kernel.combine(&mut slot, &bytes(&b, kernel.size()));
            assert_eq!(slot, bytes(&wanted, kernel.size()), "{kernel:?} {a:x?} {b:x?}");
        }
    }
}

#[test]
fn any_length_and_alignment_and_no_byte_around() {
    for kernel in kernels() {
        let [a, b] = pairs(kernel.data_type).swap_remove(0);
        let (a, b) = (bytes(&a, kernel.size()), bytes(&b, kernel.size()));
        let mut combined = a.clone();
        kernel.combine(&mut combined, &b);

        for length in 0..=a.len() {
            let whole = length - length % kernel.size();
            for alignment in 0..8 {
                let payload_at = (5 * alignment + length) % 8;
                let moved = |vector: &[u8]| [&[GUARD; 8][..payload_at], &vector[..length]].concat();
                let end = alignment + whole;
                let mut slot = vec![GUARD; end + 16];
                kernel.first(&mut slot[alignment..], &moved(&a)[payload_at..]);
                assert_eq!(slot[alignment..end], a[..whole], "{kernel:?}");
                kernel.combine(&mut slot[alignment..], &moved(&b)[payload_at..]);
                assert_eq!(slot[alignment..end], combined[..whole], "{kernel:?}");
                let mut around = slot[..alignment].iter().chain(&slot[end..]);
                assert!(around.all(|&byte| byte == GUARD), "{kernel:?} {length}");
            }
        }
    }
}

#[test]
fn payloads_that_do_not_fit_are_combined_as_far_as_they_do() {
    for kernel in kernels() {
        let payload = vec![1; 3 * kernel.size()];
        // A byte less than three accumulators.
        let size = kernel.size();
        let mut slot = vec![GUARD; 3 * size - 1];
        kernel.first(&mut slot, &payload);
        kernel.combine(&mut slot, &payload);
        assert!(slot[2 * size..].iter().all(|&byte| byte == GUARD), "{kernel:?}");
        kernel.first(&mut [], &payload);
        kernel.combine(&mut [], &payload);
    }
}

/// Contributions whose elements are special ones or any bits.
fn contributions() -> impl Strategy<Value = (DataType, Vec<Vec<u64>>)> {
    let data_type = prop::sample::select(computed());
    (data_type, 1..=6_usize, 1..=70_usize).prop_flat_map(|(data_type, ranks, elements)| {
        let element = prop_oneof![
            prop::sample::select(special_elements(data_type)),
            any::<u64>().prop_map(move |bits| masked(data_type, bits)),
        ];
        let rank = prop::collection::vec(element, elements);
        (Just(data_type), prop::collection::vec(rank, ranks))
    })
}

fn reduced(kernel: Kernel, ranks: &[Vec<u64>]) -> Vec<u8> {
    let mut slot = vec![GUARD; ranks[0].len() * kernel.size()];
    for (number, rank) in ranks.iter().enumerate() {
        let payload = bytes(rank, kernel.size());
        match number {
            0 => kernel.first(&mut slot, &payload),
            _ => kernel.combine(&mut slot, &payload),
        }
    }
    slot
}

proptest! {
    #[test]
    fn reductions_are_as_the_oracle_says((data_type, ranks) in contributions()) {
        for kernel in kernels().into_iter().filter(|kernel| kernel.data_type == data_type) {
            let operation = kernel.operation;
            let wanted: Vec<u64> = (0..ranks[0].len())
                .map(|at| {
                    let first = ranks[0][at];
                    ranks[1..].iter().fold(first, |accumulator, rank| {
                        oracle::combine(data_type, operation, accumulator, rank[at])
                    })
                })
                .collect();
            let result = reduced(kernel, &ranks);
            prop_assert_eq!(result, bytes(&wanted, kernel.size()), "{:?}", kernel);
        }
    }

    #[test]
    fn minima_and_maxima_do_not_depend_on_the_order(
        (data_type, ranks) in contributions(), by in 0..6_usize,
    ) {
        let mut others = ranks.clone();
        others.rotate_left(by % ranks.len());
        others[1..].reverse();
        for operation in [ReduceOperation::Minimum, ReduceOperation::Maximum] {
            let kernel = Kernel::of(data_type, operation).unwrap();
            prop_assert_eq!(reduced(kernel, &ranks), reduced(kernel, &others));
        }
    }
}

/// By hand: the result of every rank's single element.
#[test]
fn results_that_are_known() {
    use DataType::*;
    use ReduceOperation::*;
    let result = |data_type, operation, ranks: &[u64]| {
        let ranks: Vec<Vec<u64>> = ranks.iter().map(|&element| vec![element]).collect();
        let kernel = Kernel::of(data_type, operation).unwrap();
        let mut bytes = reduced(kernel, &ranks);
        bytes.resize(8, 0);
        u64::from_le_bytes(bytes.try_into().unwrap())
    };
    let single = |number: f32| u64::from(number.to_bits());
    assert_eq!(result(UInt32, Sum, &[u32::MAX.into(), 2]), 1);
    assert_eq!(result(Int32, Maximum, &[0xffff_ffff, 0]), 0);
    assert_eq!(result(UInt32, Maximum, &[0xffff_ffff, 0]), 0xffff_ffff);
    assert_eq!(result(Float32, Minimum, &[single(0.0), single(-0.0)]), single(-0.0));
    assert_eq!(result(Float32, Maximum, &[single(-0.0), single(0.0)]), single(0.0));
    for operation in [Sum, Product, Minimum, Maximum] {
        // A signalling NaN, a quiet negative one with a payload.
        for nan in [0x7f80_0001, 0xffc1_2345] {
            assert_eq!(result(Float32, operation, &[single(1.0), nan]), 0x7fc0_0000);
            assert_eq!(result(Float32, operation, &[nan, single(1.0)]), 0x7fc0_0000);
        }
    }
    assert_eq!(
        result(Float32, Sum, &[single(f32::INFINITY), single(f32::NEG_INFINITY)]),
        0x7fc0_0000
    );
}

#[test]
fn floats_have_no_bitwise_operations_and_integers_have_all() {
    for &data_type in DataType::ALL {
        for &operation in ReduceOperation::ALL {
            use DataType::{BFloat16, Float16, Float32, Float64};
            use ReduceOperation::{BitAnd, BitOr, BitXor};
            let is_float = matches!(data_type, Float16 | BFloat16 | Float32 | Float64);
            let is_bitwise = matches!(operation, BitAnd | BitOr | BitXor);
            let kernel = Kernel::of(data_type, operation);
            let none = (is_float && is_bitwise)
                || operation == ReduceOperation::Average
                || matches!(data_type, Float16 | BFloat16);
            assert_eq!(kernel.is_some(), !none, "{operation} of {data_type}");
        }
    }
}
