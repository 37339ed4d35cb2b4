//! The provider `soft`: the endpoint of `millstream_roce` over the sockets of `millstream_net`.

mod completion_queue;
mod deliverer;
mod device;
mod host_memory;
mod memory_region;
mod queue_pair;
mod shards;
mod shared_receive_queue;
mod staging;

pub use device::SoftConfig;

pub(crate) use completion_queue::CompletionQueue;
pub(crate) use deliverer::HandlerThreads;
pub(crate) use device::Device;
pub(crate) use memory_region::{MemoryRegion, ProtectionDomain};
pub(crate) use queue_pair::QueuePair;
pub(crate) use shared_receive_queue::SharedReceiveQueue;
