//! What vectors are made of.

mod sixteen;

pub use sixteen::{BFloat16, Float16};

use millstream_inc::DataType;

/// A type that the switch can compute with. On the wire elements are little-endian, as they are
/// in the memory of the machines that this runs on.
pub trait Element: Copy + Default + Send + Sync + sealed::Sealed + 'static {
    /// How the protocol calls it.
    const DATA_TYPE: DataType;
}

mod sealed {
    /// Elements are plain numbers: any bytes are one, so a switch can write what it likes.
    pub trait Sealed {}
}

macro_rules! elements {
    ($($element:ty = $data_type:ident,)+) => {$(
        impl sealed::Sealed for $element {}

        impl Element for $element {
            const DATA_TYPE: DataType = DataType::$data_type;
        }
    )+};
}

#[cfg(target_endian = "little")]
elements! {
    i8 = Int8,
    u8 = UInt8,
    i16 = Int16,
    u16 = UInt16,
    i32 = Int32,
    u32 = UInt32,
    i64 = Int64,
    u64 = UInt64,
    Float16 = Float16,
    BFloat16 = BFloat16,
    f32 = Float32,
    f64 = Float64,
}
