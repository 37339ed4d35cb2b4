//! What endpoints and queue pairs are made with.

use core::net::IpAddr;
use core::time::Duration;

use millstream_wire::DEFAULT_PARTITION_KEY;

use crate::{
    CompletionQueueId, IcrcCheck, ProtectionDomainId, QueuePairNumbers, SharedReceiveQueueId,
};

/// What an endpoint is made with.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// The device's address: only packets to it are for us, and all are sent from it.
    pub address: IpAddr,
    /// The partitions that the device is in (IBTA 10.9.1). A queue pair names one by its index.
    /// The top bit of a key is set for full members; limited members hear full members
    /// only. The key whose other bits are 0 is no partition.
    pub partition_keys: Vec<u16>,
    /// Seeds queue pair numbers, if it has all of them.
    pub seed: u64,
    /// The queue pair numbers that it may use.
    pub queue_pair_numbers: QueuePairNumbers,
    /// How the ICRC of arriving packets is checked.
    pub icrc: IcrcCheck,
    /// At most so many queue pairs (up to 4096).
    pub max_queue_pairs: usize,
    /// At most so many completion queues.
    pub max_completion_queues: usize,
    /// At most so many shared receive queues.
    pub max_shared_receive_queues: usize,
    /// At most so many work requests in each queue of a queue pair.
    pub max_work_requests: usize,
    /// At most so many bytes in a message: 2^30, half of what InfiniBand allows, so that the
    /// packets of a message at the smallest path MTU stay within a quarter of the number circle.
    pub max_message_length: u32,
    /// At most so many bytes in a datagram: what one packet holds, 4096, or less where the link
    /// takes no such packets.
    pub max_datagram_length: u32,
    /// At most so many packets of 4096 bytes in flight on a queue pair: what a receiver's socket
    /// buffer holds. Smaller path MTUs are allowed up to four times as many. At least 1.
    pub max_window: u32,
    /// How long packets that came before their turn wait for those that they have overtaken, before
    /// these are taken for lost: requests, and answers behind data. 64 of all queue pairs can, up to
    /// 64 ahead of their turn. With no time none waits; longer than the 100 ms that they are kept is of no use.
    pub reordering: Duration,
}

impl EndpointConfig {
    /// The defaults for a device with this address.
    pub fn new(address: IpAddr, seed: u64) -> Self {
        Self {
            address,
            partition_keys: vec![DEFAULT_PARTITION_KEY],
            seed,
            queue_pair_numbers: QueuePairNumbers::All,
            icrc: IcrcCheck::AnyIdentification,
            max_queue_pairs: 4096,
            max_completion_queues: 4096,
            max_shared_receive_queues: 1024,
            max_work_requests: 16_384,
            max_message_length: 1 << 30,
            max_datagram_length: 4096,
            max_window: 256,
            reordering: Duration::from_micros(100),
        }
    }
}

impl EndpointConfig {
    /// The entry of the table of partition keys.
    pub(crate) fn partition_key(&self, index: u16) -> Option<u16> {
        self.partition_keys.get(usize::from(index)).copied()
    }
}

/// The service of a queue pair (IBTA 9.7, 9.8.3).
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Transport {
    /// RC: one peer, everything once and in order.
    #[default]
    ReliableConnection,
    /// UD: messages of one packet to and from any queue pair, which may be lost.
    UnreliableDatagram,
}

/// How much a queue pair can hold.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct QueuePairCapabilities {
    /// Send requests that are not complete.
    pub max_send_requests: usize,
    /// Receive requests that are not consumed.
    pub max_receive_requests: usize,
    /// Bytes that a send request can bring with it, up to [`crate::MAX_INLINE`].
    pub max_inline: usize,
}

impl QueuePairCapabilities {
    /// Two queues of these lengths, and nothing else.
    pub const fn new(max_send_requests: usize, max_receive_requests: usize) -> Self {
        Self { max_send_requests, max_receive_requests, max_inline: 0 }
    }
}

/// What a queue pair is made with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct QueuePairConfig {
    /// Its protection domain: only regions of the same one can be used through it.
    pub domain: ProtectionDomainId,
    /// The service that it offers.
    pub transport: Transport,
    /// Where send requests complete.
    pub send_completions: CompletionQueueId,
    /// Where receive requests complete.
    pub receive_completions: CompletionQueueId,
    /// How much it can hold.
    pub capabilities: QueuePairCapabilities,
    /// Where receive requests come from, when not from a queue of its own. Then
    /// `max_receive_requests` says nothing.
    pub shared_receive_queue: Option<SharedReceiveQueueId>,
    /// Whether a WRITE without immediate data may go out as several messages, where that lets the
    /// kernel send more packets at a time: one for each packet, so that all of them are equally
    /// long. To the application it is one request, with one completion. To the peer each message has
    /// a range of its own: where the range of the whole is wrong, its beginning may be written
    /// before the rest is refused. So this is for applications that know the peer's ranges.
    /// Reliable connections only.
    pub split_writes: bool,
    /// How long the acknowledgement of a SEND of one packet may wait for a request to the same peer, to
    /// leave with it as one message to the kernel (IBTA 9.7.5.1.1 lets a responder coalesce); no time by
    /// default. For protocols in which a message is answered by a message. The peer is taken to wait as
    /// long: silence is asked about so much later. A queue pair that goes to the error state because the
    /// application wants it acknowledges first; one that is reset or destroyed at once does not.
    pub acknowledgement_delay: Duration,
}

impl QueuePairConfig {
    /// A reliable connection that completes everything into one queue.
    pub const fn new(
        domain: ProtectionDomainId,
        completions: CompletionQueueId,
        capabilities: QueuePairCapabilities,
    ) -> Self {
        Self {
            domain,
            transport: Transport::ReliableConnection,
            send_completions: completions,
            receive_completions: completions,
            capabilities,
            shared_receive_queue: None,
            split_writes: false,
            acknowledgement_delay: Duration::ZERO,
        }
    }
}
