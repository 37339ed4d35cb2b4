//! What an endpoint counts.

/// Counters of an endpoint. Dropped packets change nothing else.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Counters {
    pub packets_sent: u64,
    pub packets_received: u64,
    /// Payload bytes in packets sent, retransmissions included.
    pub payload_bytes_sent: u64,
    /// Payload bytes in packets accepted in order.
    pub payload_bytes_received: u64,
    /// Dropped: truncated, wrong version, wrong pad, or a length that the opcode does not allow.
    pub dropped_malformed: u64,
    /// Dropped: the invariant CRC does not match.
    pub dropped_icrc: u64,
    /// Dropped: an opcode that this endpoint does not know, or of another service.
    pub dropped_opcode: u64,
    /// Dropped: no queue pair has this number.
    pub dropped_qpn: u64,
    /// Dropped: the queue pair is connected to another address.
    pub dropped_source: u64,
    /// Dropped: wrong partition key.
    pub dropped_partition_key: u64,
    /// Dropped: a datagram with another queue key than that of its queue pair.
    pub dropped_queue_key: u64,
    /// Dropped: a datagram for which no receive request was posted that it fits into.
    pub dropped_no_receive: u64,
    /// Dropped: the queue pair is not in a state that receives.
    pub dropped_state: u64,
    /// Dropped: responses that match nothing outstanding.
    pub dropped_response: u64,
    /// Requests that had been executed before.
    pub duplicates: u64,
    /// Requests ahead of the expected one: something was lost, or overtaken.
    pub out_of_sequence: u64,
    /// Packets that came before their turn, and were kept until it came: requests, which are counted above too,
    /// and answers behind those of a READ or an atomic operation.
    pub reordered: u64,
    pub acks_sent: u64,
    pub naks_sent: u64,
    pub rnr_naks_sent: u64,
    /// Those that were acted on: not what waited behind data until all was sent again.
    pub naks_received: u64,
    /// As above.
    pub rnr_naks_received: u64,
    /// Times that a requester went back: after a NAK, a timeout or a lost READ response.
    pub retransmissions: u64,
    /// Of those, timeouts.
    pub timeouts: u64,
    /// Events that were lost because nobody took those before them.
    pub events_lost: u64,
    /// Congestion notifications that arrived.
    pub congestion_notifications: u64,
    /// And that were sent.
    pub congestion_notifications_sent: u64,
}

impl Counters {
    /// Packets that were dropped, for whatever reason.
    pub const fn dropped(&self) -> u64 {
        self.dropped_malformed
            + self.dropped_icrc
            + self.dropped_opcode
            + self.dropped_qpn
            + self.dropped_source
            + self.dropped_partition_key
            + self.dropped_queue_key
            + self.dropped_no_receive
            + self.dropped_state
            + self.dropped_response
    }

    /// What two endpoints have counted together.
    pub const fn plus(self, other: Self) -> Self {
        Self {
            packets_sent: self.packets_sent + other.packets_sent,
            packets_received: self.packets_received + other.packets_received,
            payload_bytes_sent: self.payload_bytes_sent + other.payload_bytes_sent,
            payload_bytes_received: self.payload_bytes_received + other.payload_bytes_received,
            dropped_malformed: self.dropped_malformed + other.dropped_malformed,
            dropped_icrc: self.dropped_icrc + other.dropped_icrc,
            dropped_opcode: self.dropped_opcode + other.dropped_opcode,
            dropped_qpn: self.dropped_qpn + other.dropped_qpn,
            dropped_source: self.dropped_source + other.dropped_source,
            dropped_partition_key: self.dropped_partition_key + other.dropped_partition_key,
            dropped_queue_key: self.dropped_queue_key + other.dropped_queue_key,
            dropped_no_receive: self.dropped_no_receive + other.dropped_no_receive,
            dropped_state: self.dropped_state + other.dropped_state,
            dropped_response: self.dropped_response + other.dropped_response,
            duplicates: self.duplicates + other.duplicates,
            out_of_sequence: self.out_of_sequence + other.out_of_sequence,
            reordered: self.reordered + other.reordered,
            acks_sent: self.acks_sent + other.acks_sent,
            naks_sent: self.naks_sent + other.naks_sent,
            rnr_naks_sent: self.rnr_naks_sent + other.rnr_naks_sent,
            naks_received: self.naks_received + other.naks_received,
            rnr_naks_received: self.rnr_naks_received + other.rnr_naks_received,
            retransmissions: self.retransmissions + other.retransmissions,
            timeouts: self.timeouts + other.timeouts,
            events_lost: self.events_lost + other.events_lost,
            congestion_notifications: self.congestion_notifications
                + other.congestion_notifications,
            congestion_notifications_sent: self.congestion_notifications_sent
                + other.congestion_notifications_sent,
        }
    }
}

/// What one queue pair has counted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct QueuePairCounters {
    /// Packets that it has sent, acknowledgements and congestion notifications among them.
    pub packets_sent: u64,
    /// Packets that came for it and were let in, the same among them.
    pub packets_received: u64,
    /// Payload bytes in packets sent, retransmissions included.
    pub payload_bytes_sent: u64,
    /// Payload bytes in packets accepted in order.
    pub payload_bytes_received: u64,
    /// Times that its requester went back.
    pub retransmissions: u64,
}

impl QueuePairCounters {
    /// Adds what the endpoint has counted since `before`, all of it for this queue pair. Packets that
    /// came are counted where it is known whose they are.
    pub(crate) const fn add_since(&mut self, before: &Baseline, now: &Counters) {
        self.payload_bytes_sent += now.payload_bytes_sent - before.payload_bytes_sent;
        self.payload_bytes_received += now.payload_bytes_received - before.payload_bytes_received;
        self.retransmissions += now.retransmissions - before.retransmissions;
    }
}

/// What an endpoint had counted before a queue pair did something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Baseline {
    payload_bytes_sent: u64,
    payload_bytes_received: u64,
    retransmissions: u64,
}

impl Baseline {
    pub(crate) const fn of(counters: &Counters) -> Self {
        Self {
            payload_bytes_sent: counters.payload_bytes_sent,
            payload_bytes_received: counters.payload_bytes_received,
            retransmissions: counters.retransmissions,
        }
    }
}
