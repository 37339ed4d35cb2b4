//! What a switch says about the ports of a node.

use serde::{Deserialize, Serialize};

/// What a port has counted since its node was made.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct PortCounters {
    /// The lowest rank below the child at the port; none of the port to the node above.
    pub rank: Option<u32>,
    /// Packets that the switch has sent, acknowledgements among them.
    pub packets_sent: u64,
    /// Packets that it has received.
    pub packets_received: u64,
    /// Payload bytes that it has sent, those of repetitions among them.
    pub payload_bytes_sent: u64,
    /// Payload bytes that it has received in order.
    pub payload_bytes_received: u64,
    /// How often it went back to send again.
    pub retransmissions: u64,
}
