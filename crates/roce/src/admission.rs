//! Which queue pair a packet is for, and whether it may come in there.

use millstream_wire::{Mtu, Opcode, Operation, Packet};

use crate::config::Transport;
use crate::endpoint::Endpoint;
use crate::memory::Memory;
use crate::node::DatagramMeta;

impl<M: Memory> Endpoint<M> {
    /// The index of the queue pair that a packet is for; `None` when it is dropped and counted.
    pub(crate) fn admit(
        &mut self,
        meta: &DatagramMeta,
        datagram: &[u8],
        packet: &Packet<'_>,
    ) -> Option<usize> {
        let counters = &mut self.shared.counters;
        let is_datagram = packet.opcode.has_deth();
        if !packet.opcode.is_reliable_connection()
            && !is_datagram
            && packet.opcode != Opcode::CongestionNotification
        {
            counters.dropped_opcode += 1;
            return None;
        }
        let payload = packet.payload.len();
        let padded = payload + packet.padding.len();
        let bare = matches!(
            packet.opcode.operation(),
            Operation::Acknowledge | Operation::AtomicAcknowledge
        );
        if payload > Mtu::B4096.bytes() || !padded.is_multiple_of(4) || (bare && payload > 0) {
            counters.dropped_malformed += 1;
            return None;
        }
        let Some(index) = self.index(packet.bth.destination_qpn) else {
            self.shared.counters.dropped_qpn += 1;
            return None;
        };
        let counters = &mut self.shared.counters;
        let pair = self.queue_pairs[index].as_ref()?;
        let state = pair.state;
        if is_datagram != (pair.transport == Transport::UnreliableDatagram) {
            counters.dropped_opcode += 1;
            return None;
        }
        if !state.receives() || (packet.opcode.is_response() && !state.sends()) {
            counters.dropped_state += 1;
            return None;
        }
        // A datagram may come from anyone; multicast is not offered.
        let from_peer = is_datagram || pair.path.remote_address == meta.source;
        if !from_peer || meta.destination != self.shared.config.address {
            counters.dropped_source += 1;
            return None;
        }
        if !partition_keys_match(packet.bth.partition_key, pair.path.partition_key) {
            counters.dropped_partition_key += 1;
            return None;
        }
        if is_datagram && !pair.takes_queue_key(packet) {
            counters.dropped_queue_key += 1;
            return None;
        }
        if !self.solvers.icrc_matches(self.shared.config.icrc, meta, datagram, packet.icrc) {
            counters.dropped_icrc += 1;
            return None;
        }
        Some(index)
    }
}

/// Whether two members of partitions may talk: it is the same one, and one of them is a full member,
/// which the top bit says (IBTA 10.9.3).
const fn partition_keys_match(a: u16, b: u16) -> bool {
    const FULL: u16 = 0x8000;
    let partition = a & !FULL;
    partition != 0 && partition == b & !FULL && (a | b) & FULL != 0
}

#[cfg(test)]
mod tests {
    use super::partition_keys_match;

    #[test]
    fn full_members_talk_to_all_of_a_partition_and_limited_ones_not_to_each_other() {
        for (a, b, talk) in [
            (0xffff, 0xffff, true),
            (0xffff, 0x7fff, true),
            (0x7fff, 0xffff, true),
            (0x7fff, 0x7fff, false),
            (0x8001, 0x8001, true),
            (0x8001, 0x0001, true),
            (0x8001, 0x8002, false),
            (0x8001, 0xffff, false),
            // No partition has the number 0.
            (0x8000, 0x8000, false),
            (0x0000, 0x8000, false),
        ] {
            assert_eq!(partition_keys_match(a, b), talk, "{a:#x} {b:#x}");
        }
    }
}
