//! What a driver has done.

/// What has been done for one device since it started, by its own thread and by those that post or
/// wait. Nothing here is an error by itself: a
/// datagram that could not be sent is like one lost on the way, and the transport sends it again.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct DriverCounters {
    /// Rounds in which the node was asked for something.
    pub rounds: u64,
    /// Times its own thread or one that waited for it went to sleep.
    pub sleeps: u64,
    /// Times another thread had to wake one of these.
    pub wakes: u64,
    /// System calls that received.
    pub receive_calls: u64,
    /// Messages received; one holds many datagrams where the kernel coalesces (UDP_GRO).
    pub received_messages: u64,
    /// Datagrams received.
    pub received_datagrams: u64,
    /// Bytes in them.
    pub received_bytes: u64,
    /// Messages dropped because they were longer than any that can be sent to us.
    pub truncated_messages: u64,
    /// Frames dropped because their headers contradict themselves, have a wrong checksum, or are
    /// those of a fragment. Packet sockets only; a UDP socket does not see them.
    pub refused_frames: u64,
    /// Datagrams for other devices of the address, that the kernel had coalesced with ours, handed over
    /// to them.
    pub handed_over_datagrams: u64,
    /// Such datagrams that were lost, because the kernel did not take them at once.
    pub lost_hand_overs: u64,
    /// Datagrams of ours that other devices of the address handed over.
    pub taken_over_datagrams: u64,
    /// Datagrams that the kernel dropped because our receive buffer was full, as a 32-bit count
    /// that arrives with the next datagram. A coalesced run counts once.
    pub overflowed_messages: u64,
    /// Errors that the socket reported while receiving (ICMP errors and the like).
    pub receive_errors: u64,
    /// System calls that sent.
    pub send_calls: u64,
    /// Messages sent; one holds many datagrams where the kernel segments (UDP_SEGMENT).
    pub sent_messages: u64,
    /// Datagrams sent.
    pub sent_datagrams: u64,
    /// Bytes in them.
    pub sent_bytes: u64,
    /// Times the send buffer was full and a thread waited for room.
    pub send_waits: u64,
    /// Datagrams dropped because the kernel refused them: no route, no buffers, no permission.
    pub unsent_datagrams: u64,
    /// Datagrams dropped because the way to their peer was not known: its link address is being
    /// asked for, nobody answers, or no route leads there. Packet sockets only; with a UDP socket
    /// the kernel waits for the answer.
    pub unresolved_datagrams: u64,
    /// Datagrams dropped because they exceed the MTU of the path, which is never fragmented. Not
    /// zero: choose a smaller path MTU for the queue pair.
    pub too_long_datagrams: u64,
    /// Datagrams not sent because their memory was deregistered first.
    pub withdrawn_datagrams: u64,
    /// Segmented messages that the kernel refused and that were sent one datagram at a time.
    pub segmentation_refusals: u64,
}

impl DriverCounters {
    /// What two drivers have done together.
    pub const fn plus(self, other: Self) -> Self {
        Self {
            rounds: self.rounds + other.rounds,
            sleeps: self.sleeps + other.sleeps,
            wakes: self.wakes + other.wakes,
            receive_calls: self.receive_calls + other.receive_calls,
            received_messages: self.received_messages + other.received_messages,
            received_datagrams: self.received_datagrams + other.received_datagrams,
            received_bytes: self.received_bytes + other.received_bytes,
            truncated_messages: self.truncated_messages + other.truncated_messages,
            refused_frames: self.refused_frames + other.refused_frames,
            handed_over_datagrams: self.handed_over_datagrams + other.handed_over_datagrams,
            lost_hand_overs: self.lost_hand_overs + other.lost_hand_overs,
            taken_over_datagrams: self.taken_over_datagrams + other.taken_over_datagrams,
            overflowed_messages: self.overflowed_messages + other.overflowed_messages,
            receive_errors: self.receive_errors + other.receive_errors,
            send_calls: self.send_calls + other.send_calls,
            sent_messages: self.sent_messages + other.sent_messages,
            sent_datagrams: self.sent_datagrams + other.sent_datagrams,
            sent_bytes: self.sent_bytes + other.sent_bytes,
            send_waits: self.send_waits + other.send_waits,
            unsent_datagrams: self.unsent_datagrams + other.unsent_datagrams,
            unresolved_datagrams: self.unresolved_datagrams + other.unresolved_datagrams,
            too_long_datagrams: self.too_long_datagrams + other.too_long_datagrams,
            withdrawn_datagrams: self.withdrawn_datagrams + other.withdrawn_datagrams,
            segmentation_refusals: self.segmentation_refusals + other.segmentation_refusals,
        }
    }
}
