//! Base Transport Header (IBTA 9.2): the first 12 bytes of every packet.

use crate::error::prefix;
use crate::{DEFAULT_PARTITION_KEY, ParseError, Psn, Qpn};

/// Base Transport Header. All of its bits are kept, so that a packet re-emits byte for byte.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Bth {
    /// The opcode byte: service in the top three bits, operation below. See [`crate::Opcode`].
    pub opcode: u8,
    /// The responder should raise an event when it completes this message.
    pub solicited_event: bool,
    /// Path migration state; real hardware sets it ("migrated").
    pub migration_request: bool,
    /// Bytes of padding after the payload: 0 to 3.
    pub pad_count: u8,
    /// Transport header version: 0.
    pub version: u8,
    /// The partition that the packet belongs to.
    pub partition_key: u16,
    /// Forward explicit congestion notification (RoCEv2 uses the IP header's bits instead).
    pub fecn: bool,
    /// Backward explicit congestion notification.
    pub becn: bool,
    /// Six reserved bits beside the two above; not covered by the ICRC.
    pub reserved6: u8,
    /// The queue pair that the packet is for.
    pub destination_qpn: Qpn,
    /// The sender wants an acknowledgement of this packet.
    pub acknowledge_request: bool,
    /// Seven reserved bits.
    pub reserved7: u8,
    /// The packet's sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Bytes of the header.
    pub const LENGTH: usize = 12;

    /// A header with the default partition key and everything optional off.
    pub const fn new(opcode: u8, destination_qpn: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited_event: false,
            migration_request: false,
            pad_count: 0,
            version: 0,
            partition_key: DEFAULT_PARTITION_KEY,
            fecn: false,
            becn: false,
            reserved6: 0,
            destination_qpn,
            acknowledge_request: false,
            reserved7: 0,
            psn,
        }
    }

    /// Reads the header from the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        let [opcode, flags, p0, p1, ecn, q0, q1, q2, ack, s0, s1, s2] = *prefix::<12>(bytes)?;
        Ok(Self {
            opcode,
            solicited_event: flags & 0x80 != 0,
            migration_request: flags & 0x40 != 0,
            pad_count: (flags >> 4) & 3,
            version: flags & 0x0f,
            partition_key: u16::from_be_bytes([p0, p1]),
            fecn: ecn & 0x80 != 0,
            becn: ecn & 0x40 != 0,
            reserved6: ecn & 0x3f,
            destination_qpn: Qpn::from_bytes([q0, q1, q2]),
            acknowledge_request: ack & 0x80 != 0,
            reserved7: ack & 0x7f,
            psn: Psn::from_bytes([s0, s1, s2]),
        })
    }

    /// The header's bytes.
    pub fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let [p0, p1] = self.partition_key.to_be_bytes();
        let [q0, q1, q2] = self.destination_qpn.to_bytes();
        let [s0, s1, s2] = self.psn.to_bytes();
        let bit = |on: bool, shift: u8| u8::from(on) << shift;
        [
            self.opcode,
            bit(self.solicited_event, 7)
                | bit(self.migration_request, 6)
                | (self.pad_count & 3) << 4
                | (self.version & 0x0f),
            p0,
            p1,
            bit(self.fecn, 7) | bit(self.becn, 6) | (self.reserved6 & 0x3f),
            q0,
            q1,
            q2,
            bit(self.acknowledge_request, 7) | (self.reserved7 & 0x7f),
            s0,
            s1,
            s2,
        ]
    }
}
