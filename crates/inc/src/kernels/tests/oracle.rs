//! The same computations, one element at a time, as plainly as they can be written. Elements and
//! accumulators are their bits in the low end of 64.

use crate::{DataType, ReduceOperation};

/// An accumulator combined with a payload's element.
pub(super) fn combine(
    data_type: DataType,
    operation: ReduceOperation,
    accumulator: u64,
    element: u64,
) -> u64 {
    let (a, b) = (integer(data_type, accumulator), integer(data_type, element));
    let result = match operation {
        ReduceOperation::Sum => a + b,
        ReduceOperation::Product => a.wrapping_mul(b),
        ReduceOperation::Minimum => a.min(b),
        ReduceOperation::Maximum => a.max(b),
        ReduceOperation::BitAnd => a & b,
        ReduceOperation::BitOr => a | b,
        ReduceOperation::BitXor => a ^ b,
        ReduceOperation::Average => unreachable!("no average has a kernel"),
    };
    wrapped(data_type, result)
}

fn bits(data_type: DataType) -> u32 {
    8 * data_type.size()
}

fn is_signed(data_type: DataType) -> bool {
    use DataType::{Int8, Int16, Int32, Int64};
    matches!(data_type, Int8 | Int16 | Int32 | Int64)
}

fn integer(data_type: DataType, element: u64) -> i128 {
    let element = i128::from(element);
    let half = 1 << (bits(data_type) - 1);
    if is_signed(data_type) && element >= half { element - 2 * half } else { element }
}

fn wrapped(data_type: DataType, result: i128) -> u64 {
    result.rem_euclid(1 << bits(data_type)) as u64
}
