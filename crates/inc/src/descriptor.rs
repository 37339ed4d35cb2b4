//! The descriptor: the message that opens every collective.
//!
//! ```text
//!  0  magic "MSIC"      4  version   5  collective   6  operation   7  data type
//!  8  flags, 4 bytes   12  root, 4 bytes
//! 16  sequence, 8 bytes
//! 24  count, 8 bytes
//! 32  address of the destination, 8 bytes
//! 40  its key, 4 bytes 44  tree     45  trees        46  0, 2 bytes
//! ```
//!
//! Where the whole vector of the call, all parts of it, fits a packet of the path MTU behind this, the sender's
//! part of it follows, and nothing else is sent; the result comes with the answer. A host sends its source, if it
//! has one. A switch sends the whole vector if a source is below it, of which only what is of ranks below it counts.
//!
//! Flag 1: SEND mode. The destination is the rank's own, of no meaning in SEND mode and where the rank
//! gets no result; it is not compared.
//!
//! Where a call is divided among several trees, this one has a stripe of the vector, or of each part of it
//! ([`Stripe`]); count and destination are of all. Otherwise tree and number of trees are 0. The sequence counts the
//! communicator's calls on all trees, so there are gaps on one of several.
//!
//! With tree 0 of 255 there is nothing of the vector on any tree ([`Stripe::NONE`]): the ranks agree on the call, which
//! hosts with several ranks then do in parts, each a call of its own.
//!
//! All fields are little-endian, as the elements are. The switch compares the descriptors of all
//! ranks before it answers anyone, so ranks that disagree on what they compute learn it.

use thiserror::Error;

use crate::{Collective, DataType, Mode, ReduceOperation, Stripe};

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 48;

const MAGIC: [u8; 4] = *b"MSIC";
const VERSION: u8 = 3;

const SEND_MODE: u32 = 1;

/// The most bytes that one collective may reduce. Keeps every sum of positions within 64 bits.
pub const MAX_COLLECTIVE_BYTES: u64 = 1 << 48;

/// What one rank is about to compute.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Descriptor {
    /// The number of this collective on its communicator, from 0.
    pub sequence: u64,
    /// What happens to the data.
    pub collective: Collective,
    /// How elements are combined.
    pub operation: ReduceOperation,
    /// What the elements are.
    pub data_type: DataType,
    /// The rank that is special, where one is; otherwise 0.
    pub root: u32,
    /// How many elements.
    pub count: u64,
    /// Which of them are on this tree.
    pub stripe: Stripe,
    /// How the vectors travel.
    pub mode: Mode,
    /// Where the sender wants its result.
    pub destination_address: u64,
    /// The remote key of that.
    pub destination_key: u32,
}

/// Why bytes are not a descriptor.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum DescriptorError {
    /// Too short or too long.
    #[error("a descriptor has {DESCRIPTOR_BYTES} bytes, not {0}")]
    Length(usize),
    /// It does not start as one.
    #[error("the message does not start with the magic number of a descriptor")]
    Magic,
    /// Made by another version of the protocol.
    #[error("the descriptor is of version {0}, this switch speaks version {VERSION}")]
    Version(u8),
    /// A collective that this version does not know.
    #[error("there is no collective of code {0}")]
    Collective(u8),
    /// An operation that this version does not know.
    #[error("there is no operation of code {0}")]
    Operation(u8),
    /// A data type that this version does not know.
    #[error("there is no data type of code {0}")]
    DataType(u8),
    /// A flag that this version does not know.
    #[error("the descriptor has unknown flags {0:#x}")]
    Flags(u32),
    /// A stripe that cannot be.
    #[error("the descriptor is of tree {0} of {1}")]
    Stripe(u8, u8),
    /// More than can be reduced at once.
    #[error("a collective cannot have {0} elements: more than {MAX_COLLECTIVE_BYTES} bytes")]
    Count(u64),
}

/// A field in which descriptors of two ranks can differ.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
#[allow(missing_docs, reason = "the fields of Descriptor")]
pub enum Field {
    Collective = 1,
    Operation = 2,
    DataType = 3,
    Root = 4,
    Count = 5,
    Mode = 6,
    Sequence = 7,
    Stripe = 8,
}

impl Field {
    pub(crate) const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Collective,
            2 => Self::Operation,
            3 => Self::DataType,
            4 => Self::Root,
            5 => Self::Count,
            6 => Self::Mode,
            7 => Self::Sequence,
            8 => Self::Stripe,
            _ => return None,
        })
    }

    /// How messages call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Collective => "collective",
            Self::Operation => "operation",
            Self::DataType => "data type",
            Self::Root => "root",
            Self::Count => "count",
            Self::Mode => "mode",
            Self::Sequence => "number",
            Self::Stripe => "stripe",
        }
    }

    /// A value of this field as messages print it.
    pub(crate) fn value(self, value: u64) -> String {
        let code = u8::try_from(value).ok();
        let name = match self {
            Self::Collective => code.and_then(Collective::from_code).map(Collective::name),
            Self::Operation => code.and_then(ReduceOperation::from_code).map(ReduceOperation::name),
            Self::DataType => code.and_then(DataType::from_code).map(DataType::name),
            Self::Mode => Some(if value == 0 { "WRITE" } else { "SEND" }),
            Self::Stripe => return format!("{} of {}", value & 0xff, value >> 8),
            Self::Root | Self::Count | Self::Sequence => None,
        };
        name.map_or_else(|| value.to_string(), str::to_owned)
    }
}

impl Descriptor {
    /// Bytes of one rank's vector; `None` when they are more than [`MAX_COLLECTIVE_BYTES`].
    pub fn bytes(&self) -> Option<u64> {
        let bytes = self.count.checked_mul(self.data_type.size().into())?;
        (bytes <= MAX_COLLECTIVE_BYTES).then_some(bytes)
    }

    /// Bytes of all ranks' parts together; `None` when they are more than [`MAX_COLLECTIVE_BYTES`].
    pub fn total_bytes(&self, world: u32) -> Option<u64> {
        let parts = match self.collective {
            Collective::ReduceScatter | Collective::AllGather => world,
            _ => 1,
        };
        let bytes = self.bytes()?.checked_mul(parts.into())?;
        (bytes <= MAX_COLLECTIVE_BYTES).then_some(bytes)
    }

    const fn flags(&self) -> u32 {
        match self.mode {
            Mode::Write => 0,
            Mode::Send => SEND_MODE,
        }
    }

    /// The message.
    pub fn to_bytes(&self) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.collective.code();
        bytes[6] = self.operation.code();
        bytes[7] = self.data_type.code();
        bytes[8..12].copy_from_slice(&self.flags().to_le_bytes());
        bytes[12..16].copy_from_slice(&self.root.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.count.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.destination_address.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.destination_key.to_le_bytes());
        if self.stripe != Stripe::WHOLE {
            bytes[44..46].copy_from_slice(&[self.stripe.tree(), self.stripe.trees()]);
        }
        bytes
    }

    /// Reads the message.
    pub fn parse(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let bytes: &[u8; DESCRIPTOR_BYTES] =
            bytes.try_into().map_err(|_| DescriptorError::Length(bytes.len()))?;
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let double = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if bytes[..4] != MAGIC {
            return Err(DescriptorError::Magic);
        }
        if bytes[4] != VERSION {
            return Err(DescriptorError::Version(bytes[4]));
        }
        let flags = word(8);
        if flags & !SEND_MODE != 0 || bytes[46..] != [0, 0] {
            return Err(DescriptorError::Flags(flags));
        }
        let stripe = match (bytes[44], bytes[45]) {
            (0, 0) => Some(Stripe::WHOLE),
            (0, u8::MAX) => Some(Stripe::NONE),
            // There is one way to write each.
            (tree, trees) => Stripe::new(tree, trees).filter(|_| trees > 1),
        };
        let stripe = stripe.ok_or(DescriptorError::Stripe(bytes[44], bytes[45]))?;
        let descriptor = Self {
            sequence: double(16),
            collective: Collective::from_code(bytes[5])
                .ok_or(DescriptorError::Collective(bytes[5]))?,
            operation: ReduceOperation::from_code(bytes[6])
                .ok_or(DescriptorError::Operation(bytes[6]))?,
            data_type: DataType::from_code(bytes[7]).ok_or(DescriptorError::DataType(bytes[7]))?,
            root: word(12),
            count: double(24),
            stripe,
            mode: if flags & SEND_MODE == 0 { Mode::Write } else { Mode::Send },
            destination_address: double(32),
            destination_key: word(40),
        };
        descriptor.bytes().ok_or(DescriptorError::Count(descriptor.count))?;
        Ok(descriptor)
    }

    /// The first field in which `other` differs, with the value here and the value there.
    pub fn difference(&self, other: &Self) -> Option<(Field, u64, u64)> {
        let fields = |descriptor: &Self| {
            let stripe = descriptor.stripe;
            [
                (Field::Collective, u64::from(descriptor.collective.code())),
                (Field::Operation, descriptor.operation.code().into()),
                (Field::DataType, descriptor.data_type.code().into()),
                (Field::Root, descriptor.root.into()),
                (Field::Count, descriptor.count),
                (Field::Mode, descriptor.flags().into()),
                (Field::Sequence, descriptor.sequence),
                (Field::Stripe, u64::from(stripe.trees()) << 8 | u64::from(stripe.tree())),
            ]
        };
        let pairs = fields(self).into_iter().zip(fields(other));
        pairs
            .map(|((field, ours), (_, theirs))| (field, ours, theirs))
            .find(|(_, ours, theirs)| ours != theirs)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EXAMPLE: Descriptor = Descriptor {
        sequence: 0x0102_0304_0506_0708,
        collective: Collective::AllReduce,
        operation: ReduceOperation::Maximum,
        data_type: DataType::Int64,
        root: 7,
        count: 1000,
        stripe: Stripe::WHOLE,
        mode: Mode::Send,
        destination_address: 0x1112_1314_1516_1718,
        destination_key: 0x2122_2324,
    };

    fn any_descriptor() -> impl Strategy<Value = Descriptor> {
        let collective = proptest::sample::select(Collective::ALL);
        let operation = proptest::sample::select(ReduceOperation::ALL);
        let data_type = proptest::sample::select(DataType::ALL);
        let count = 0..=MAX_COLLECTIVE_BYTES / 8;
        (any::<u64>(), collective, operation, data_type, any::<u32>(), count).prop_map(
            |(sequence, collective, operation, data_type, root, count)| Descriptor {
                sequence,
                collective,
                operation,
                data_type,
                root,
                count,
                stripe: Stripe::new(root as u8 % 3, 1 + 3 * (root as u8 % 2))
                    .unwrap_or(Stripe::WHOLE),
                mode: if root % 2 == 0 { Mode::Write } else { Mode::Send },
                destination_address: sequence.rotate_left(7),
                destination_key: root.rotate_left(3),
            },
        )
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let mut wanted = *b"MSIC\x03\x00\x03\x06\x01\0\0\0\x07\0\0\0\
            \x08\x07\x06\x05\x04\x03\x02\x01\xe8\x03\0\0\0\0\0\0\
            \x18\x17\x16\x15\x14\x13\x12\x11\x24\x23\x22\x21\0\0\0\0";
        assert_eq!(EXAMPLE.to_bytes(), wanted);
        assert_eq!(Descriptor::parse(&wanted), Ok(EXAMPLE));

        for (at, value, error) in [
            (0, b'X', DescriptorError::Magic),
            (4, 2, DescriptorError::Version(2)),
            (5, 6, DescriptorError::Collective(6)),
            (6, 8, DescriptorError::Operation(8)),
            (7, 12, DescriptorError::DataType(12)),
            (11, 0x80, DescriptorError::Flags(0x8000_0001)),
            (44, 1, DescriptorError::Stripe(1, 0)),
            (45, 1, DescriptorError::Stripe(0, 1)),
            (45, 9, DescriptorError::Stripe(0, 9)),
            (46, 1, DescriptorError::Flags(1)),
            (31, 1, DescriptorError::Count(1 << 56 | 1000)),
        ] {
            let kept = core::mem::replace(&mut wanted[at], value);
            assert_eq!(Descriptor::parse(&wanted), Err(error));
            wanted[at] = kept;
        }
        wanted[44..46].copy_from_slice(&[2, 3]);
        let striped = Descriptor { stripe: Stripe::new(2, 3).unwrap(), ..EXAMPLE };
        assert_eq!(striped.to_bytes(), wanted);
        assert_eq!(Descriptor::parse(&wanted), Ok(striped));
        wanted[44..46].copy_from_slice(&[0, 255]);
        let none = Descriptor { stripe: Stripe::NONE, ..EXAMPLE };
        assert_eq!((none.to_bytes(), Descriptor::parse(&wanted)), (wanted, Ok(none)));
        wanted[44] = 1;
        assert_eq!(Descriptor::parse(&wanted), Err(DescriptorError::Stripe(1, 255)));
        assert_eq!(Descriptor::parse(&wanted[..47]), Err(DescriptorError::Length(47)));
        assert_eq!(Descriptor::parse(&[0; 49]), Err(DescriptorError::Length(49)));
    }

    #[test]
    fn the_first_difference_is_named() {
        assert_eq!(EXAMPLE.difference(&EXAMPLE), None);
        let same = Descriptor { destination_address: 0, destination_key: 0, ..EXAMPLE };
        assert_eq!(EXAMPLE.difference(&same), None);
        let other = Descriptor { data_type: DataType::Float64, count: 999, ..EXAMPLE };
        assert_eq!(EXAMPLE.difference(&other), Some((Field::DataType, 6, 11)));
        let other = Descriptor { count: 999, ..EXAMPLE };
        assert_eq!(EXAMPLE.difference(&other), Some((Field::Count, 1000, 999)));
    }

    #[test]
    fn every_field_that_differs_is_named_and_has_a_code_of_its_own() {
        for (other, field, name, values, code) in [
            (
                Descriptor { collective: Collective::Reduce, ..EXAMPLE },
                Field::Collective,
                "collective",
                (EXAMPLE.collective.code().into(), Collective::Reduce.code().into()),
                1,
            ),
            (
                Descriptor { operation: ReduceOperation::Sum, ..EXAMPLE },
                Field::Operation,
                "operation",
                (3, 0),
                2,
            ),
            (
                Descriptor { data_type: DataType::Float64, ..EXAMPLE },
                Field::DataType,
                "data type",
                (6, 11),
                3,
            ),
            (Descriptor { root: 8, ..EXAMPLE }, Field::Root, "root", (7, 8), 4),
            (Descriptor { count: 999, ..EXAMPLE }, Field::Count, "count", (1000, 999), 5),
            (Descriptor { mode: Mode::Write, ..EXAMPLE }, Field::Mode, "mode", (1, 0), 6),
            (
                Descriptor { sequence: 9, ..EXAMPLE },
                Field::Sequence,
                "number",
                (EXAMPLE.sequence, 9),
                7,
            ),
            (
                Descriptor { stripe: Stripe::new(1, 2).unwrap(), ..EXAMPLE },
                Field::Stripe,
                "stripe",
                (0x100, 0x201),
                8,
            ),
        ] {
            assert_eq!(EXAMPLE.difference(&other), Some((field, values.0, values.1)));
            assert_eq!((field.name(), field as u8), (name, code));
            assert_eq!(Field::from_code(code), Some(field));
        }
        assert_eq!((Field::from_code(0), Field::from_code(9)), (None, None));
    }

    proptest! {
        #[test]
        fn round_trip(descriptor in any_descriptor()) {
            prop_assert_eq!(Descriptor::parse(&descriptor.to_bytes()), Ok(descriptor));
        }

        #[test]
        fn what_parses_is_what_would_be_emitted(bytes in any::<[u8; DESCRIPTOR_BYTES]>()) {
            let mut bytes = bytes;
            bytes[..5].copy_from_slice(b"MSIC\x03");
            if let Ok(descriptor) = Descriptor::parse(&bytes) {
                prop_assert_eq!(descriptor.to_bytes(), bytes);
            }
        }

        #[test]
        fn garbage_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            prop_assert!(Descriptor::parse(&bytes).is_err());
        }
    }
}
