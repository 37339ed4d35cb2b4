//! The public RDMA API: devices, protection domains, memory regions, completion queues, queue
//! pairs, with the names and rules of verbs.
//!
//! Two providers do the work, behind the same types:
//! - `soft`: the RoCEv2 endpoint of `millstream_roce` over the sockets of `millstream_net`, with one
//!   progress thread for each device. It needs no RDMA hardware, and its packets are plain RoCEv2.
//!   Over UDP sockets it needs no privileges; over packet sockets ([`Driver::Packet`]) it needs
//!   CAP_NET_RAW, and checks the whole ICRC.
//! - `ibverbs`: the system's RDMA devices, real ones and the kernel's soft-RoCE, by libibverbs. The
//!   library is loaded when the first such device is asked for, so nothing needs it at build time.
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
pub use device::{Atomicity, Device, DeviceAttributes, OpenError};
pub use ibverbs::{IbverbsConfig, IbverbsError};
pub use memory_region::{MemoryRegion, ProtectionDomain};
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
    IcrcCheck, MAX_INLINE, MAX_SCATTER_GATHER, ModifyError, Piece, PostError, QueuePairAttributes,
    QueuePairCapabilities, QueuePairState, ReceiveRequest, RegionError, SendOperation, SendRequest,
    SharedReceiveQueueId, Transport, encode_rnr_timer,
};
pub use millstream_wire::{Mtu, Psn, Qpn};
