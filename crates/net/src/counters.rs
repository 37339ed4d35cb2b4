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
