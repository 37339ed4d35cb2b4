//! The opcode table: names, and which extended headers each opcode carries (IBTA table 38).

use crate::ParseError;

macro_rules! opcodes {
    ($($name:ident = $value:literal, $operation:ident $position:ident
        $([$($header:ident)*])?;)*) => {
        /// A BTH opcode whose headers we know: all of RC, the UC and UD ones of the same shape,
        /// and the congestion notification packet.
        #[allow(missing_docs, reason = "the names are the specification's own")]
        #[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
        #[repr(u8)]
        pub enum Opcode { $($name = $value,)* }

        impl Opcode {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The opcode of this byte.
            pub const fn from_byte(byte: u8) -> Result<Self, ParseError> {
                match byte {
                    $($value => Ok(Self::$name),)*
                    _ => Err(ParseError::UnknownOpcode(byte)),
                }
            }

            /// What the packet is part of.
            pub const fn operation(self) -> Operation {
                match self { $(Self::$name => Operation::$operation,)* }
            }

            /// Where the packet stands in its message.
            pub const fn position(self) -> Position {
                match self { $(Self::$name => Position::$position,)* }
            }

            const fn headers(self) -> u16 {
                match self { $(Self::$name => 0 $($(| header::$header)*)?,)* }
            }
        }
    };
}

mod header {
    pub(super) const RETH: u16 = 1;
    pub(super) const AETH: u16 = 2;
    pub(super) const IMMDT: u16 = 4;
    pub(super) const ATOMIC: u16 = 8;
    pub(super) const ATOMICACK: u16 = 16;
    pub(super) const IETH: u16 = 32;
    pub(super) const DETH: u16 = 64;
    pub(super) const CNP: u16 = 128;
}

opcodes! {
    RcSendFirst = 0x00, Send First;
    RcSendMiddle = 0x01, Send Middle;
    RcSendLast = 0x02, Send Last;
    RcSendLastWithImmediate = 0x03, Send Last [IMMDT];
    RcSendOnly = 0x04, Send Only;
    RcSendOnlyWithImmediate = 0x05, Send Only [IMMDT];
    RcWriteFirst = 0x06, Write First [RETH];
    RcWriteMiddle = 0x07, Write Middle;
    RcWriteLast = 0x08, Write Last;
    RcWriteLastWithImmediate = 0x09, Write Last [IMMDT];
    RcWriteOnly = 0x0a, Write Only [RETH];
    RcWriteOnlyWithImmediate = 0x0b, Write Only [RETH IMMDT];
    RcReadRequest = 0x0c, ReadRequest Only [RETH];
    RcReadResponseFirst = 0x0d, ReadResponse First [AETH];
    RcReadResponseMiddle = 0x0e, ReadResponse Middle;
    RcReadResponseLast = 0x0f, ReadResponse Last [AETH];
    RcReadResponseOnly = 0x10, ReadResponse Only [AETH];
    RcAcknowledge = 0x11, Acknowledge Only [AETH];
    RcAtomicAcknowledge = 0x12, AtomicAcknowledge Only [AETH ATOMICACK];
    RcCompareSwap = 0x13, CompareSwap Only [ATOMIC];
    RcFetchAdd = 0x14, FetchAdd Only [ATOMIC];
    RcSendLastWithInvalidate = 0x16, Send Last [IETH];
    RcSendOnlyWithInvalidate = 0x17, Send Only [IETH];
    UcSendFirst = 0x20, Send First;
    UcSendMiddle = 0x21, Send Middle;
    UcSendLast = 0x22, Send Last;
    UcSendLastWithImmediate = 0x23, Send Last [IMMDT];
    UcSendOnly = 0x24, Send Only;
    UcSendOnlyWithImmediate = 0x25, Send Only [IMMDT];
    UcWriteFirst = 0x26, Write First [RETH];
    UcWriteMiddle = 0x27, Write Middle;
    UcWriteLast = 0x28, Write Last;
    UcWriteLastWithImmediate = 0x29, Write Last [IMMDT];
    UcWriteOnly = 0x2a, Write Only [RETH];
    UcWriteOnlyWithImmediate = 0x2b, Write Only [RETH IMMDT];
    UdSendOnly = 0x64, Send Only [DETH];
    UdSendOnlyWithImmediate = 0x65, Send Only [DETH IMMDT];
    CongestionNotification = 0x81, CongestionNotification Only [CNP];
}

/// What a packet is part of, whatever the service.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Operation {
    /// A SEND message.
    Send,
    /// An RDMA WRITE message.
    Write,
    /// An RDMA READ request.
    ReadRequest,
    /// The data that answers a READ request.
    ReadResponse,
    /// An acknowledgement, positive or negative.
    Acknowledge,
    /// The answer to an atomic operation.
    AtomicAcknowledge,
    /// An atomic compare-and-swap request.
    CompareSwap,
    /// An atomic fetch-and-add request.
    FetchAdd,
    /// A RoCEv2 congestion notification packet (RoCEv2 annex A17.9.3).
    CongestionNotification,
}

/// Where a packet stands in its message.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Position {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The message is this one packet.
    Only,
}

impl Position {
    /// Whether a message starts here.
    pub const fn starts(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether a message ends here.
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

impl Opcode {
    /// Whether the packet belongs to the reliable-connection service.
    pub const fn is_reliable_connection(self) -> bool {
        (self as u8) < 0x20
    }

    /// Whether the packet answers a request, and so goes to the requester half of a queue pair.
    pub const fn is_response(self) -> bool {
        matches!(
            self.operation(),
            Operation::ReadResponse | Operation::Acknowledge | Operation::AtomicAcknowledge
        )
    }

    /// Whether an RDMA header follows.
    pub const fn has_reth(self) -> bool {
        self.headers() & header::RETH != 0
    }

    /// Whether an acknowledge header follows.
    pub const fn has_aeth(self) -> bool {
        self.headers() & header::AETH != 0
    }

    /// Whether immediate data follows.
    pub const fn has_immediate(self) -> bool {
        self.headers() & header::IMMDT != 0
    }

    /// Whether an atomic request header follows.
    pub const fn has_atomic(self) -> bool {
        self.headers() & header::ATOMIC != 0
    }

    /// Whether an atomic response header follows.
    pub const fn has_atomic_ack(self) -> bool {
        self.headers() & header::ATOMICACK != 0
    }

    /// Whether a key to invalidate follows.
    pub const fn has_invalidate(self) -> bool {
        self.headers() & header::IETH != 0
    }

    /// Whether a datagram header follows.
    pub const fn has_deth(self) -> bool {
        self.headers() & header::DETH != 0
    }

    /// Whether the 16 reserved bytes of a congestion notification follow.
    pub const fn has_notification(self) -> bool {
        self.headers() & header::CNP != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bth, ExtendedHeaders, MAX_HEADER_LENGTH};

    /// Bytes of extended headers by opcode, written down from the specification's table apart
    /// from the table above.
    const LENGTHS: [(u8, usize); 38] = [
        // RC SEND and WRITE: ImmDt is 4 bytes, RETH 16, IETH 4.
        (0x00, 0),
        (0x01, 0),
        (0x02, 0),
        (0x03, 4),
        (0x04, 0),
        (0x05, 4),
        (0x06, 16),
        (0x07, 0),
        (0x08, 0),
        (0x09, 4),
        (0x0a, 16),
        (0x0b, 20),
        (0x16, 4),
        (0x17, 4),
        // RC READ and its responses: AETH is 4 bytes, and the middle has none.
        (0x0c, 16),
        (0x0d, 4),
        (0x0e, 0),
        (0x0f, 4),
        (0x10, 4),
        (0x11, 4),
        // RC atomics.
        (0x12, 12),
        (0x13, 28),
        (0x14, 28),
        // UC is RC's SEND and WRITE again.
        (0x20, 0),
        (0x21, 0),
        (0x22, 0),
        (0x23, 4),
        (0x24, 0),
        (0x25, 4),
        (0x26, 16),
        (0x27, 0),
        (0x28, 0),
        (0x29, 4),
        (0x2a, 16),
        (0x2b, 20),
        // UD: DETH is 8 bytes.
        (0x64, 8),
        (0x65, 12),
        // Congestion notification.
        (0x81, 16),
    ];

    #[test]
    fn every_opcode_has_the_headers_of_the_specification() {
        let zeros = [0; MAX_HEADER_LENGTH - Bth::LENGTH];
        for byte in 0..=u8::MAX {
            let length = LENGTHS.iter().find(|(opcode, _)| *opcode == byte).map(|(_, n)| *n);
            let parsed = Opcode::from_byte(byte)
                .and_then(|opcode| ExtendedHeaders::parse(opcode, &zeros))
                .map(|(_, length)| length);
            assert_eq!(parsed, length.ok_or(ParseError::UnknownOpcode(byte)));
        }
    }

    #[test]
    fn position_and_service_follow_from_the_byte() {
        for &opcode in Opcode::ALL {
            assert_eq!(opcode.is_reliable_connection(), (opcode as u8) >> 5 == 0, "{opcode:?}");
            // The specification numbers the operations alike in every service.
            let (operation, position) = match opcode as u8 & 0x1f {
                _ if opcode == Opcode::CongestionNotification => continue,
                0x00 => (Operation::Send, Position::First),
                0x01 => (Operation::Send, Position::Middle),
                0x02 | 0x03 | 0x16 => (Operation::Send, Position::Last),
                0x04 | 0x05 | 0x17 => (Operation::Send, Position::Only),
                0x06 => (Operation::Write, Position::First),
                0x07 => (Operation::Write, Position::Middle),
                0x08 | 0x09 => (Operation::Write, Position::Last),
                0x0a | 0x0b => (Operation::Write, Position::Only),
                0x0c => (Operation::ReadRequest, Position::Only),
                0x0d => (Operation::ReadResponse, Position::First),
                0x0e => (Operation::ReadResponse, Position::Middle),
                0x0f => (Operation::ReadResponse, Position::Last),
                0x10 => (Operation::ReadResponse, Position::Only),
                0x11 => (Operation::Acknowledge, Position::Only),
                0x12 => (Operation::AtomicAcknowledge, Position::Only),
                0x13 => (Operation::CompareSwap, Position::Only),
                0x14 => (Operation::FetchAdd, Position::Only),
                _ => panic!("{opcode:?} is in no table"),
            };
            assert_eq!((opcode.operation(), opcode.position()), (operation, position));
            let place = (position.starts(), position.ends());
            match position {
                Position::First => assert_eq!(place, (true, false)),
                Position::Middle => assert_eq!(place, (false, false)),
                Position::Last => assert_eq!(place, (false, true)),
                Position::Only => assert_eq!(place, (true, true)),
            }
            assert_eq!(opcode.is_response(), matches!(opcode as u8, 0x0d..=0x12), "{opcode:?}");
        }
    }
}
