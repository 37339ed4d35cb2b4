//! The kernels: one vector of elements combined into another.
//!
//! The loops are written over fixed-size arrays of bytes, so that no alignment is needed and the
//! compiler turns each into vector instructions of the target.

use crate::{DataType, ReduceOperation};

/// Combines the elements of the second vector into those of the first. Elements are
/// little-endian and need not be aligned. Vectors of different lengths are combined as far as both
/// reach, and so are only whole elements.
pub type Kernel = fn(&mut [u8], &[u8]);

/// The kernel for this type and operation; `None` when it is not supported.
///
/// Integers wrap. `Minimum` and `Maximum` of floats return a NaN when there is one among the
/// operands; of zeros with different signs the one that came first is kept.
pub const fn kernel(data_type: DataType, operation: ReduceOperation) -> Option<Kernel> {
    match data_type {
        DataType::Int8 => int8::kernel(operation),
        DataType::UInt8 => uint8::kernel(operation),
        DataType::Int16 => int16::kernel(operation),
        DataType::UInt16 => uint16::kernel(operation),
        DataType::Int32 => int32::kernel(operation),
        DataType::UInt32 => uint32::kernel(operation),
        DataType::Int64 => int64::kernel(operation),
        DataType::UInt64 => uint64::kernel(operation),
        // These accumulate in 32 bits, which needs slots wider than what arrives.
        DataType::Float16 | DataType::BFloat16 => None,
        DataType::Float32 => float32::kernel(operation),
        DataType::Float64 => float64::kernel(operation),
    }
}

/// Whether a switch can compute this.
pub const fn supported(data_type: DataType, operation: ReduceOperation) -> bool {
    kernel(data_type, operation).is_some()
}

fn combine<const SIZE: usize>(
    accumulator: &mut [u8],
    incoming: &[u8],
    operation: impl Fn([u8; SIZE], [u8; SIZE]) -> [u8; SIZE],
) {
    let (accumulator, _) = accumulator.as_chunks_mut::<SIZE>();
    let (incoming, _) = incoming.as_chunks::<SIZE>();
    for (ours, theirs) in accumulator.iter_mut().zip(incoming) {
        *ours = operation(*ours, *theirs);
    }
}

/// One function: `$name` applies `$operation` to elements of type `$element`.
macro_rules! function {
    ($element:ty, $name:ident, $operation:expr) => {
        fn $name(accumulator: &mut [u8], incoming: &[u8]) {
            let operation: fn($element, $element) -> $element = $operation;
            combine(accumulator, incoming, |ours, theirs| {
                operation(<$element>::from_le_bytes(ours), <$element>::from_le_bytes(theirs))
                    .to_le_bytes()
            });
        }
    };
}

macro_rules! integers {
    ($($module:ident $element:ty;)+) => {$(
        mod $module {
            use super::{Kernel, ReduceOperation, combine};

            function!($element, sum, |a, b| a.wrapping_add(b));
            function!($element, product, |a, b| a.wrapping_mul(b));
            function!($element, minimum, |a, b| a.min(b));
            function!($element, maximum, |a, b| a.max(b));
            function!($element, bit_and, |a, b| a & b);
            function!($element, bit_or, |a, b| a | b);
            function!($element, bit_xor, |a, b| a ^ b);

            pub(super) const fn kernel(operation: ReduceOperation) -> Option<Kernel> {
                Some(match operation {
                    ReduceOperation::Sum => sum,
                    ReduceOperation::Product => product,
                    ReduceOperation::Minimum => minimum,
                    ReduceOperation::Maximum => maximum,
                    ReduceOperation::BitAnd => bit_and,
                    ReduceOperation::BitOr => bit_or,
                    ReduceOperation::BitXor => bit_xor,
                    // Needs the number of ranks and a last step when all have come.
                    ReduceOperation::Average => return None,
                })
            }
        }
    )+};
}

macro_rules! floats {
    ($($module:ident $element:ty;)+) => {$(
        mod $module {
            use super::{Kernel, ReduceOperation, combine};

            function!($element, sum, |a, b| a + b);
            function!($element, product, |a, b| a * b);
            // False for a NaN in `a`, which is kept; one in `b` is taken.
            function!($element, minimum, |a, b| if b < a || b.is_nan() { b } else { a });
            function!($element, maximum, |a, b| if b > a || b.is_nan() { b } else { a });

            pub(super) const fn kernel(operation: ReduceOperation) -> Option<Kernel> {
                Some(match operation {
                    ReduceOperation::Sum => sum,
                    ReduceOperation::Product => product,
                    ReduceOperation::Minimum => minimum,
                    ReduceOperation::Maximum => maximum,
                    ReduceOperation::Average
                    | ReduceOperation::BitAnd
                    | ReduceOperation::BitOr
                    | ReduceOperation::BitXor => return None,
                })
            }
        }
    )+};
}

integers! {
    int8 i8;
    uint8 u8;
    int16 i16;
    uint16 u16;
    int32 i32;
    uint32 u32;
    int64 i64;
    uint64 u64;
}

floats! {
    float32 f32;
    float64 f64;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn combined(data_type: DataType, operation: ReduceOperation, a: &[u8], b: &[u8]) -> Vec<u8> {
        let mut accumulator = a.to_vec();
        kernel(data_type, operation).unwrap()(&mut accumulator, b);
        accumulator
    }

    /// The result of every operation on one pair of elements.
    macro_rules! check {
        ($data_type:ident $element:ty: $a:expr, $b:expr => $($operation:ident $result:expr),+) => {
            $(
                let (a, b): ($element, $element) = ($a, $b);
                let wanted: $element = $result;
                // Behind one byte, so that nothing is aligned; and as many as fill vectors.
                let vector = |element: $element| {
                    let mut bytes = vec![0];
                    (0..67).for_each(|_| bytes.extend_from_slice(&element.to_le_bytes()));
                    bytes
                };
                let mut accumulator = vector(a);
                let combine =
                    kernel(DataType::$data_type, ReduceOperation::$operation).unwrap();
                combine(&mut accumulator[1..], &vector(b)[1..]);
                assert_eq!(
                    accumulator,
                    vector(wanted),
                    "{} {a} {b}",
                    stringify!($data_type $operation)
                );
            )+
        };
    }

    #[test]
    fn every_operation_on_every_type() {
        check!(Int8 i8: 100, 100 => Sum -56, Product 16, Minimum 100);
        check!(UInt8 u8: 200, 100 => Sum 44, Product 32, Minimum 100, Maximum 200);
        check!(Int16 i16: -3, 5 => Sum 2, Product -15, Minimum -3, Maximum 5);
        check!(UInt16 u16: 0xffff, 2 => Sum 1, Product 0xfffe, Minimum 2, Maximum 0xffff);
        check!(Int32 i32: i32::MAX, 1 => Sum i32::MIN, Product i32::MAX, Minimum 1);
        check!(Int32 i32: 0b1100, 0b1010 => BitAnd 0b1000, BitOr 0b1110, BitXor 0b0110);
        check!(UInt32 u32: u32::MAX, 1 => Sum 0, Product u32::MAX, Minimum 1, Maximum u32::MAX);
        check!(Int64 i64: i64::MIN, -1 => Sum i64::MAX, Product i64::MIN, Minimum i64::MIN);
        check!(UInt64 u64: 1 << 63, 1 << 63 => Sum 0, BitXor 0, BitOr 1 << 63);
        check!(Float32 f32: 1.5, -2.0 => Sum -0.5, Product -3.0, Minimum -2.0, Maximum 1.5);
        check!(Float64 f64: 1.5, -2.0 => Sum -0.5, Product -3.0, Minimum -2.0, Maximum 1.5);
    }

    #[test]
    fn a_nan_wins_whichever_side_it_is_on() {
        let nan = f32::NAN.to_le_bytes();
        let one = 1.0_f32.to_le_bytes();
        for operation in [ReduceOperation::Minimum, ReduceOperation::Maximum] {
            for (a, b) in [(nan, one), (one, nan)] {
                let result = combined(DataType::Float32, operation, &a, &b);
                assert!(f32::from_le_bytes(result.try_into().unwrap()).is_nan());
            }
        }
    }

    #[test]
    fn what_has_no_kernel_is_not_supported() {
        assert!(supported(DataType::Int32, ReduceOperation::Sum));
        assert!(!supported(DataType::Float32, ReduceOperation::BitAnd));
        assert!(!supported(DataType::Float16, ReduceOperation::Sum));
        assert!(!supported(DataType::Int32, ReduceOperation::Average));
    }

    #[test]
    fn only_whole_elements_that_both_have() {
        let sum = |a: &[u8], b: &[u8]| combined(DataType::Int32, ReduceOperation::Sum, a, b);
        assert_eq!(sum(&[1, 0, 0, 0, 9, 9], &[2, 0, 0, 0, 9, 9]), [3, 0, 0, 0, 9, 9]);
        assert_eq!(sum(&[1; 8], &[1; 4]), [2, 2, 2, 2, 1, 1, 1, 1]);
        assert_eq!(sum(&[], &[]), [0_u8; 0]);
    }
}
