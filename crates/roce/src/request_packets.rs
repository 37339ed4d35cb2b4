//! Requests on the wire: the opcode and the headers of each of their packets (IBTA 9.2, 9.4).

use millstream_wire::{AtomicEth, ExtendedHeaders, Ieth, ImmDt, Opcode, Reth};

use crate::work::SendOperation;

/// Which part of a request a packet is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Bytes of the request.
    pub(crate) length: u64,
    /// Bytes before this packet.
    pub(crate) offset: u64,
    /// Packet sequence numbers that it takes: those of a READ's answers.
    pub(crate) packets: u64,
    /// It is the last.
    pub(crate) ends: bool,
    /// Of a WRITE, each packet is a message.
    pub(crate) split: bool,
}

/// Opcode and headers of the packet that starts `offset` bytes into a request.
pub(crate) fn packet_of(
    operation: &SendOperation,
    Part { length: whole, offset, packets, ends, split }: Part,
    mtu: u64,
) -> (Opcode, ExtendedHeaders) {
    let starts = offset == 0;
    let mut extended = ExtendedHeaders::default();
    let reth = |virtual_address: u64, remote_key, dma_length: u64| {
        Some(Reth { virtual_address, remote_key, dma_length: dma_length as u32 })
    };
    let immediate = |immediate: Option<u32>| immediate.filter(|_| ends).map(ImmDt);
    let opcode = match *operation {
        SendOperation::Send { immediate: value } => {
            extended.immediate = immediate(value);
            match (starts, ends, value.is_some()) {
                (true, true, false) => Opcode::RcSendOnly,
                (true, true, true) => Opcode::RcSendOnlyWithImmediate,
                (true, false, _) => Opcode::RcSendFirst,
                (false, false, _) => Opcode::RcSendMiddle,
                (false, true, false) => Opcode::RcSendLast,
                (false, true, true) => Opcode::RcSendLastWithImmediate,
            }
        }
        SendOperation::SendInvalidate { remote_key } => {
            extended.invalidate = ends.then_some(Ieth(remote_key));
            match (starts, ends) {
                (true, true) => Opcode::RcSendOnlyWithInvalidate,
                (true, false) => Opcode::RcSendFirst,
                (false, false) => Opcode::RcSendMiddle,
                (false, true) => Opcode::RcSendLastWithInvalidate,
            }
        }
        SendOperation::Write { remote_address, remote_key, immediate: value } => {
            extended.immediate = immediate(value);
            if split {
                let length = (whole - offset).min(mtu);
                extended.reth = reth(remote_address.wrapping_add(offset), remote_key, length);
                return (Opcode::RcWriteOnly, extended);
            }
            if starts {
                extended.reth = reth(remote_address, remote_key, whole);
            }
            match (starts, ends, value.is_some()) {
                (true, true, false) => Opcode::RcWriteOnly,
                (true, true, true) => Opcode::RcWriteOnlyWithImmediate,
                (true, false, _) => Opcode::RcWriteFirst,
                (false, false, _) => Opcode::RcWriteMiddle,
                (false, true, false) => Opcode::RcWriteLast,
                (false, true, true) => Opcode::RcWriteLastWithImmediate,
            }
        }
        SendOperation::Read { remote_address, remote_key } => {
            let length = (whole - offset).min(packets * mtu);
            extended.reth = reth(remote_address.wrapping_add(offset), remote_key, length);
            Opcode::RcReadRequest
        }
        SendOperation::CompareSwap { remote_address, remote_key, compare, swap } => {
            let virtual_address = remote_address;
            extended.atomic =
                Some(AtomicEth { virtual_address, remote_key, swap_or_add: swap, compare });
            Opcode::RcCompareSwap
        }
        SendOperation::FetchAdd { remote_address, remote_key, add } => {
            let virtual_address = remote_address;
            extended.atomic =
                Some(AtomicEth { virtual_address, remote_key, swap_or_add: add, compare: 0 });
            Opcode::RcFetchAdd
        }
    };
    (opcode, extended)
}
