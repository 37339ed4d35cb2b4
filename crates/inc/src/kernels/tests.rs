//! Every type and operation against the oracle, at every level of vector instructions that this
//! machine has.

mod oracle;

use core::num::NonZeroU32;

use fearless_simd::{Level, Simd};
use proptest::prelude::*;

use super::Kernel;
use super::float16::{from_bfloat16, from_binary16, narrow_bfloat16, narrow_binary16};
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
        DataType::Float16 => of_bits(15, 10),
        DataType::BFloat16 => of_bits(15, 7),
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
            let first: Vec<u64> =
                a.iter().map(|&element| oracle::first(data_type, element)).collect();
            let mut slot = vec![GUARD; a.len() * kernel.accumulator_size()];
            kernel.first(&mut slot, &bytes(&a, kernel.wire_size()));
            if kernel.accumulator_size() == kernel.wire_size() {
                assert_eq!(slot, bytes(&first, kernel.accumulator_size()), "{kernel:?}");
            }

            // Accumulators of 16-bit floats reach more values than elements do: combine twice.
            let combined = |accumulators: &[u64]| -> Vec<u64> {
                let each = accumulators.iter().zip(&b);
                each.map(|(&ours, &theirs)| oracle::combine(data_type, operation, ours, theirs))
                    .collect()
            };
            let mut wanted = combined(&first);
            let payload = bytes(&b, kernel.wire_size());
            kernel.combine(&mut slot, &payload);
            assert_eq!(slot, bytes(&wanted, kernel.accumulator_size()), "{kernel:?} {a:x?} {b:x?}");
            wanted = combined(&wanted);
            kernel.combine(&mut slot, &payload);
            assert_eq!(slot, bytes(&wanted, kernel.accumulator_size()), "{kernel:?} {a:x?} {b:x?}");

            for ranks in [None, Some(1), Some(2), Some(3), Some(255), Some(257), Some(65_536)] {
                let wanted: Vec<u64> = wanted
                    .iter()
                    .map(|&bits| oracle::finish(data_type, operation, bits, ranks))
                    .collect();
                let mut slot = slot.clone();
                let length = kernel.finish(&mut slot, ranks.and_then(NonZeroU32::new));
                assert_eq!(
                    slot[..length],
                    bytes(&wanted, kernel.wire_size()),
                    "{kernel:?} {ranks:?}"
                );
            }
        }
    }
}

#[test]
fn any_length_and_alignment_and_no_byte_around() {
    for kernel in kernels() {
        let (wire, accumulator) = (kernel.wire_size(), kernel.accumulator_size());
        let [a, b] = pairs(kernel.data_type).swap_remove(0);
        let (a, b) = (bytes(&a, wire), bytes(&b, wire));
        let mut first = vec![0; a.len() / wire * accumulator];
        kernel.first(&mut first, &a);
        let mut combined = first.clone();
        kernel.combine(&mut combined, &b);
        let mut finished = combined.clone();
        let ranks = NonZeroU32::new(3);
        assert_eq!(kernel.finish(&mut finished, ranks), a.len());

        for length in 0..=a.len() {
            let elements = length / wire;
            for alignment in 0..8 {
                let payload_at = (5 * alignment + length) % 8;
                let moved = |vector: &[u8]| [&[GUARD; 8][..payload_at], &vector[..length]].concat();
                let end = alignment + elements * accumulator;
                let mut slot = vec![GUARD; alignment + length / wire * accumulator + 16];
                kernel.first(&mut slot[alignment..], &moved(&a)[payload_at..]);
                assert_eq!(slot[alignment..end], first[..elements * accumulator], "{kernel:?}");
                kernel.combine(&mut slot[alignment..], &moved(&b)[payload_at..]);
                assert_eq!(slot[alignment..end], combined[..elements * accumulator], "{kernel:?}");
                let around = |slot: &[u8]| {
                    slot[..alignment].iter().chain(&slot[end..]).all(|&byte| byte == GUARD)
                };
                assert!(around(&slot), "{kernel:?} {length}");
                let filled = kernel.finish(&mut slot[alignment..end], ranks);
                assert_eq!(filled, elements * wire);
                assert_eq!(slot[alignment..][..filled], finished[..filled], "{kernel:?} {length}");
                assert!(around(&slot), "{kernel:?} {length}");
            }
        }
    }
}

#[test]
fn payloads_that_do_not_fit_are_combined_as_far_as_they_do() {
    for kernel in kernels() {
        let payload = vec![1; 3 * kernel.wire_size()];
        // A byte less than three accumulators.
        let size = kernel.accumulator_size();
        let mut slot = vec![GUARD; 3 * size - 1];
        kernel.first(&mut slot, &payload);
        kernel.combine(&mut slot, &payload);
        assert!(slot[2 * size..].iter().all(|&byte| byte == GUARD), "{kernel:?}");
        assert_eq!(kernel.finish(&mut slot, None), 2 * kernel.wire_size());
        kernel.first(&mut [], &payload);
        kernel.combine(&mut [], &payload);
        assert_eq!(kernel.finish(&mut [], NonZeroU32::new(2)), 0);
    }
}

#[test]
fn all_16_bit_floats_are_widened_exactly_and_come_back() {
    for bits in 0..=u16::MAX {
        for (data_type, widened) in
            [(DataType::Float16, from_binary16(bits)), (DataType::BFloat16, from_bfloat16(bits))]
        {
            let value = oracle::value_of_16_bits(data_type, bits);
            match value.is_nan() {
                true => assert!(widened.is_nan(), "{data_type} {bits:#x}"),
                false => {
                    assert_eq!(f64::from(widened).to_bits(), value.to_bits(), "{bits:#x}");
                    assert_eq!(oracle::narrowed(data_type, widened), bits);
                }
            }
        }
    }
}

fn narrowed(level: Level, data_type: DataType, numbers: &[f32]) -> Vec<u16> {
    let mut slot: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    match data_type {
        DataType::Float16 => narrow_binary16(level, &mut slot),
        _ => narrow_bfloat16(level, &mut slot),
    }
    let (elements, _) = slot.as_chunks();
    elements[..numbers.len()].iter().map(|&bytes| u16::from_le_bytes(bytes)).collect()
}

/// Each 16-bit float, what lies half way to the next one, and the numbers on both sides of these.
#[test]
fn numbers_next_to_every_tie_are_rounded_to_the_nearest() {
    for data_type in [DataType::Float16, DataType::BFloat16] {
        let value = |bits| oracle::value_of_16_bits(data_type, bits);
        let finite = (0..u16::MAX).filter(|&bits| value(bits).is_finite());
        let numbers: Vec<f32> = finite
            .flat_map(|bits| {
                let exact = value(bits);
                let next = match value(bits + 1) {
                    next if next.is_finite() => next,
                    // As if the exponent had more bits: beyond the largest one.
                    _ => exact + (exact - value(bits - 1)),
                };
                [exact, f64::midpoint(exact, next)]
            })
            .flat_map(|number| {
                let number = number as f32;
                [number.next_down(), number, number.next_up()]
            })
            .chain([f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN])
            .collect();
        let wanted: Vec<u16> =
            numbers.iter().map(|&number| oracle::narrowed(data_type, number)).collect();
        for level in levels() {
            assert_eq!(narrowed(level, data_type, &numbers), wanted, "{data_type} {level:?}");
        }
    }
}

/// Contributions whose elements are special ones or any bits.
fn contributions() -> impl Strategy<Value = (DataType, Vec<Vec<u64>>)> {
    let data_type = prop::sample::select(DataType::ALL);
    (data_type, 1..=6_usize, 1..=70_usize).prop_flat_map(|(data_type, ranks, elements)| {
        let element = prop_oneof![
            prop::sample::select(special_elements(data_type)),
            any::<u64>().prop_map(move |bits| masked(data_type, bits)),
        ];
        let rank = prop::collection::vec(element, elements);
        (Just(data_type), prop::collection::vec(rank, ranks))
    })
}

fn reduced(kernel: Kernel, ranks: &[Vec<u64>], root: bool) -> Vec<u8> {
    let mut slot = vec![GUARD; ranks[0].len() * kernel.accumulator_size()];
    for (number, rank) in ranks.iter().enumerate() {
        let payload = bytes(rank, kernel.wire_size());
        match number {
            0 => kernel.first(&mut slot, &payload),
            _ => kernel.combine(&mut slot, &payload),
        }
    }
    let count = NonZeroU32::new(ranks.len() as u32).filter(|_| root);
    let length = kernel.finish(&mut slot, count);
    slot.truncate(length);
    slot
}

proptest! {
    #[test]
    fn reductions_are_as_the_oracle_says((data_type, ranks) in contributions(), root: bool) {
        for kernel in kernels().into_iter().filter(|kernel| kernel.data_type == data_type) {
            // A lone contribution that needs no rounding goes on as it is, NaNs included; what
            // division or rounding makes of one is in the other tests.
            let operation = kernel.operation;
            let count = Some(ranks.len() as u32).filter(|_| root);
            let wanted: Vec<u64> = (0..ranks[0].len())
                .map(|at| {
                    let first = oracle::first(data_type, ranks[0][at]);
                    let combined = ranks[1..].iter().fold(first, |accumulator, rank| {
                        oracle::combine(data_type, operation, accumulator, rank[at])
                    });
                    oracle::finish(data_type, operation, combined, count)
                })
                .collect();
            let result = reduced(kernel, &ranks, root);
            prop_assert_eq!(result, bytes(&wanted, kernel.wire_size()), "{:?}", kernel);
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
            prop_assert_eq!(reduced(kernel, &ranks, true), reduced(kernel, &others, true));
        }
    }

    #[test]
    fn sums_are_divided_by_any_number_of_ranks(
        sums in prop::collection::vec(any::<u64>(), 1..40),
        ranks in prop_oneof![1..1000_u32, any::<u32>(), Just(u32::MAX)],
    ) {
        let divisor = NonZeroU32::new(ranks.max(1));
        let average = ReduceOperation::Average;
        for kernel in kernels().into_iter().filter(|kernel| kernel.operation == average) {
            let data_type = kernel.data_type;
            // As binary32, numbers of ranks beyond 2^24 are rounded.
            let is_float = Kernel::of(data_type, ReduceOperation::BitAnd).is_none();
            if is_float && ranks > 1 << 24 {
                continue;
            }
            let size = kernel.accumulator_size();
            let bits = u64::MAX >> (64 - 8 * size);
            let wanted: Vec<u64> = sums
                .iter()
                .map(|sum| oracle::finish(data_type, average, sum & bits, divisor.map(u32::from)))
                .collect();
            let mut slot = bytes(&sums, size);
            let length = kernel.finish(&mut slot, divisor);
            prop_assert_eq!(&slot[..length], bytes(&wanted, kernel.wire_size()), "{:?}", kernel);
        }
    }

    #[test]
    fn any_number_is_rounded_to_the_nearest(bits in prop::collection::vec(any::<u32>(), 1..200)) {
        let numbers: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        for data_type in [DataType::Float16, DataType::BFloat16] {
            let wanted: Vec<u16> =
                numbers.iter().map(|&number| oracle::narrowed(data_type, number)).collect();
            for level in levels() {
                prop_assert_eq!(narrowed(level, data_type, &numbers), &wanted[..]);
            }
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
        let mut bytes = reduced(kernel, &ranks, true);
        bytes.resize(8, 0);
        u64::from_le_bytes(bytes.try_into().unwrap())
    };
    let single = |number: f32| u64::from(number.to_bits());
    // Toward zero, and after the sum has wrapped: 100 + 100 is -56.
    assert_eq!(result(Int8, Average, &[0xfd, 0xfc]), 0xfd); // (-3 + -4) / 2 = -3
    assert_eq!(result(Int8, Average, &[100, 100]), 0xe4); // -56 / 2 = -28
    assert_eq!(result(UInt8, Average, &[1; 256]), 0); // 256 wraps to 0
    assert_eq!(result(UInt8, Average, &[255; 257]), 0); // 255 * 257 = 255 mod 256; 255 / 257
    assert_eq!(result(Int64, Average, &[1 << 62, 1 << 62]), 0xc000_0000_0000_0000);
    assert_eq!(result(UInt32, Sum, &[u32::MAX.into(), 2]), 1);
    assert_eq!(result(Int32, Maximum, &[0xffff_ffff, 0]), 0);
    assert_eq!(result(UInt32, Maximum, &[0xffff_ffff, 0]), 0xffff_ffff);
    // 2048 + 1 is 2048 when it is rounded each time; 2048 + 1 + 1 is 2050.
    assert_eq!(result(Float16, Sum, &[0x6800, 0x3c00, 0x3c00]), 0x6801);
    // 60000 * 4 overflows, its quarter does not.
    assert_eq!(result(Float16, Average, &[0x7b53; 4]), 0x7b53);
    assert_eq!(result(Float16, Sum, &[0x7b53; 2]), 0x7c00);
    assert_eq!(result(BFloat16, Sum, &[0x4380, 0x3f80, 0x3f80]), 0x4381); // 256 + 1 + 1 = 258
    assert_eq!(result(BFloat16, Average, &[0x7f7f; 2]), 0x7f80); // the sum is beyond a binary32
    assert_eq!(result(Float32, Minimum, &[single(0.0), single(-0.0)]), single(-0.0));
    assert_eq!(result(Float32, Maximum, &[single(-0.0), single(0.0)]), single(0.0));
    for operation in [Sum, Product, Minimum, Maximum, Average] {
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
            assert_eq!(kernel.is_some(), !(is_float && is_bitwise), "{operation} of {data_type}");
            let Some(kernel) = kernel else { continue };
            assert_eq!(kernel.wire_size(), data_type.size() as usize);
            let wide = matches!(data_type, Float16 | BFloat16);
            assert_eq!(kernel.accumulator_size(), kernel.wire_size() * if wide { 2 } else { 1 });
        }
    }
}
