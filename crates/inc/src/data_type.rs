//! What is computed, in the codes that the wire carries.

use core::fmt;
use core::str::FromStr;

use thiserror::Error;

/// Declares an enum whose variants have a one-byte wire code and a short name.
macro_rules! coded {
    (
        $(#[$meta:meta])* $name:ident, $what:literal;
        $($(#[$variant_meta:meta])* $variant:ident = $code:literal, $text:literal;)+
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$variant_meta])* $variant = $code,)+
        }

        impl $name {
            /// All of them, in the order of their codes.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The code on the wire.
            pub const fn code(self) -> u8 {
                self as u8
            }

            /// The one with this code on the wire.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)+
                    _ => None,
                }
            }

            /// The name that command lines and messages use.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $name {
            type Err = UnknownName;

            fn from_str(name: &str) -> Result<Self, UnknownName> {
                Self::ALL.iter().copied().find(|item| item.name() == name).ok_or_else(|| {
                    UnknownName {
                        what: $what,
                        name: name.to_owned(),
                        known: &[$($text),+],
                    }
                })
            }
        }
    };
}

/// A name that is none of the known ones.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[error("there is no {what} {name:?}; known are {}", known.join(", "))]
pub struct UnknownName {
    /// What was looked for.
    pub what: &'static str,
    /// What was given.
    pub name: String,
    /// What could have been given.
    pub known: &'static [&'static str],
}

coded! {
    /// The type of the elements. Little-endian on the wire, as in the memory of every host.
    DataType, "data type";
    /// 8-bit two's complement.
    Int8 = 0, "int8";
    /// 8-bit unsigned.
    UInt8 = 1, "uint8";
    /// 16-bit two's complement.
    Int16 = 2, "int16";
    /// 16-bit unsigned.
    UInt16 = 3, "uint16";
    /// 32-bit two's complement.
    Int32 = 4, "int32";
    /// 32-bit unsigned.
    UInt32 = 5, "uint32";
    /// 64-bit two's complement.
    Int64 = 6, "int64";
    /// 64-bit unsigned.
    UInt64 = 7, "uint64";
    /// IEEE 754 binary16.
    Float16 = 8, "fp16";
    /// The upper half of a binary32.
    BFloat16 = 9, "bf16";
    /// IEEE 754 binary32.
    Float32 = 10, "fp32";
    /// IEEE 754 binary64.
    Float64 = 11, "fp64";
}

coded! {
    /// How elements are combined.
    ReduceOperation, "operation";
    /// Addition; integers wrap.
    Sum = 0, "sum";
    /// Multiplication; integers wrap.
    Product = 1, "prod";
    /// The smaller; a NaN wins.
    Minimum = 2, "min";
    /// The larger; a NaN wins.
    Maximum = 3, "max";
    /// The sum divided by the number of ranks.
    Average = 4, "avg";
    /// Bitwise and; integers only.
    BitAnd = 5, "band";
    /// Bitwise or; integers only.
    BitOr = 6, "bor";
    /// Bitwise exclusive or; integers only.
    BitXor = 7, "bxor";
}

coded! {
    /// What happens to the data.
    Collective, "collective";
    /// Every rank gets the reduction of all.
    AllReduce = 0, "allreduce";
    /// The root gets the reduction of all.
    Reduce = 1, "reduce";
    /// Every rank gets what the root has.
    Broadcast = 2, "broadcast";
    /// Nobody goes on before all have come.
    Barrier = 3, "barrier";
    /// Every rank gets its part of the reduction of all.
    ReduceScatter = 4, "reducescatter";
    /// Every rank gets what every rank has.
    AllGather = 5, "allgather";
}

impl DataType {
    /// Bytes of one element.
    pub const fn size(self) -> u32 {
        match self {
            Self::Int8 | Self::UInt8 => 1,
            Self::Int16 | Self::UInt16 | Self::Float16 | Self::BFloat16 => 2,
            Self::Int32 | Self::UInt32 | Self::Float32 => 4,
            Self::Int64 | Self::UInt64 | Self::Float64 => 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_are_those_of_one_variant() {
        for &data_type in DataType::ALL {
            assert_eq!(DataType::from_code(data_type.code()), Some(data_type));
            assert_eq!(data_type.name().parse(), Ok(data_type));
        }
        for &operation in ReduceOperation::ALL {
            assert_eq!(ReduceOperation::from_code(operation.code()), Some(operation));
            assert_eq!(operation.name().parse(), Ok(operation));
        }
        for &collective in Collective::ALL {
            assert_eq!(Collective::from_code(collective.code()), Some(collective));
            assert_eq!(collective.name().parse(), Ok(collective));
        }
        assert_eq!(DataType::from_code(12), None);
        assert_eq!(ReduceOperation::from_code(8), None);
        assert_eq!(Collective::from_code(6), None);
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = "int33".parse::<DataType>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "there is no data type \"int33\"; known are int8, uint8, int16, uint16, int32, \
             uint32, int64, uint64, fp16, bf16, fp32, fp64"
        );
    }
}
