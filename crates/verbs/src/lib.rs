//! The public RDMA API: devices, protection domains, memory regions, completion queues, queue
//! pairs, with the names and rules of verbs.
//!
//! Two providers do the work, behind the same types:
//! - `soft`: the RoCEv2 endpoint of `millstream_roce` over the sockets of `millstream_net`. It needs no RDMA hardware, and its packets are plain RoCEv2.
//!   Over UDP sockets it needs no privileges; over packet sockets ([`Driver::Packet`]) it needs
//!   CAP_NET_RAW, and checks the whole ICRC.
//! - `ibverbs`: the system's RDMA devices, real ones and the kernel's soft-RoCE, by libibverbs. The
//!   library is loaded when the first such device is asked for, so nothing needs it at build time.
//!
//! # Threads
//!
//! Devices of the system work by themselves. The work of a soft device is done by the threads that use
//! it, so that a small request costs no hand-off between threads:
//! - Who posts sends, unless another thread is at it. [`Device::postpone_sending`] sends once for
//!   several posts, and not with the caller's locks held.
//! - Who waits ([`CompletionQueue::wait`], [`Device::wait_event`], [`wait`]) receives, answers peers and
//!   sends, for all queues of the device. Of several one does, and the others are woken by it.
//! - Who polls in vain, or calls [`Device::progress`], does that once.
//! - When nobody has done so for a moment (50 us to 0.5 ms), the device's own thread does.
//!
//! Handlers of [`Device::create_completion_queue_with_handler`] run on the device's own thread only.
//! Those of [`Device::create_completion_queue_with_progress_handler`] run on threads that wait or poll,
//! too. In a handler, waiting for the same device makes no progress.
//!
//! A soft device may have several shards ([`SoftConfig::shards`]): all of this then holds for each of
//! them, and a completion queue concerns those that have queue pairs of it. Handlers are called for all
//! shards, by one thread at a time.
//!
//! ```no_run
//! use millstream_verbs::Device;
//! let device = Device::open("soft-127.0.0.2")?; // or "mlx5_0", "rxe0"
//! let domain = device.allocate_protection_domain();
//! let completions = device.create_completion_queue(256)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod choice;
mod completion_queue;
mod device;
mod ibverbs;
mod memory_region;
mod provider;
mod queue_pair;
mod receive_share;
mod shared_receive_queue;
mod soft;
mod waiting;

pub use choice::{DeviceChoice, DeviceConfig, DeviceError};
pub use completion_queue::{CompletionHandler, CompletionQueue};
pub use device::{Atomicity, Device, DeviceAttributes, OpenError, PortHandler};
pub use ibverbs::{IbverbsConfig, IbverbsError};
pub use memory_region::{GpuMemoryError, MemoryRegion, ProtectionDomain};
pub use provider::Provider;
pub use queue_pair::{QueuePair, QueuePairOptions};
pub use receive_share::ReceiveShare;
pub use shared_receive_queue::SharedReceiveQueue;
pub use soft::SoftConfig;
pub use waiting::wait;

pub use millstream_net::{Driver, DriverCounters, UnknownDriver, Waiters};
pub use millstream_roce::{
    ATOMIC_LENGTH, Access, AsyncEvent, Attribute, Completion, CompletionOperation,
    CompletionStatus, Counters, CreateError, DatagramDestination, GLOBAL_ROUTE_HEADER_LENGTH,
    IcrcCheck, MAX_INLINE, MAX_SCATTER_GATHER, ModifyError, Piece, PortAddress, PostError,
    QueuePairAttributes, QueuePairCapabilities, QueuePairState, ReceiveRequest, RegionError, SLOTS,
    SendOperation, SendRequest, SharedReceiveQueueId, Transport, encode_rnr_timer,
};
pub use millstream_wire::{Mtu, Psn, Qpn};
