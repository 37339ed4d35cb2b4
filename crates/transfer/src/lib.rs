//! The transfer engine: moves bytes between the registered memories of many processes.
//!
//! An engine serves one *segment*: the memory that its process registered. It opens the segments
//! of its peers and reads and writes them in *batches*. A batch holds *tasks*, one for each
//! [`TransferRequest`]; a task is moved in *slices* of 64 KiB over the queue pairs between a local
//! and a remote NIC.
//!
//! ```no_run
//! use std::time::Duration;
//! use millstream_transfer::{Config, Opcode, RdmaConfig, TransferEngine, TransferRequest};
//!
//! let address = "127.0.0.1".parse()?;
//! let engine = TransferEngine::new(Config::new(address))?;
//! engine.install_rdma(RdmaConfig::new(&[address]))?;
//!
//! let buffer = engine.allocate_buffer(1 << 20, "*", false)?;
//! buffer.write(0, b"hello")?;
//! let segment = engine.open_segment("127.0.0.2:15001")?;
//! let request = TransferRequest {
//!     opcode: Opcode::Write,
//!     source: buffer.address(),
//!     target: segment.id(),
//!     target_offset: segment.address_of(0, 0, 5)?,
//!     length: 5,
//! };
//! engine.submit_and_wait(&[request], Duration::from_secs(10))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Results come as counters: the last slice of a task sets its state, the last task of a batch
//! wakes who waits. Nobody polls.

#![deny(unsafe_code)]

mod admission;
mod batch;
mod buffer;
mod calls;
mod config;
mod control_port;
mod copier;
mod counted;
mod departures;
mod engine;
mod error;
mod fail_over;
mod failure_reason;
mod file_map;
mod finished;
mod gate;
mod gpu;
mod keys;
mod listen;
mod local;
mod lookups;
mod memory;
mod metrics;
mod notify;
mod nvmeof;
mod opening;
mod path;
mod pieces;
mod placement;
mod policy_file;
mod publication;
mod question;
mod rdma;
mod regions;
mod registration;
mod request;
mod rpc;
mod segment;
mod settings;
mod shm;
mod slicing;
mod status;
mod submit;
mod task;
mod tcp;
mod terms;
mod transport;
mod withdrawal;
mod workers;

pub use batch::Batch;
pub use buffer::Buffer;
pub use config::{Config, Policy, RdmaConfig};
pub use engine::TransferEngine;
pub use error::{
    BatchError, BufferError, FileError, FreeError, InstallError, NewError, RegisterError,
    SegmentError, SubmitAndWaitError, SubmitError, SubmitNewError, TransferError,
};
pub use failure_reason::FailureReason;
pub use file_map::MapError;
pub use finished::Finished;
pub use metrics::{
    DeviceMetrics, Histogram, Metric, MetricKind, Metrics, RailMetrics, RailStatus, RequestCounts,
    Stages, TransportMetrics,
};
pub use millstream_net::file_io::{FileEngine, UnknownFileEngine};
pub use millstream_topology::PeerAffinity;
pub use millstream_transfer_core::PriorityLevel;
pub use notify::{Notification, NotifyError};
pub use nvmeof::{FileOptions, NvmeofConfig};
pub use path::PathReport;
pub use pieces::{Pieces, PiecesRequest, TransferPiece};
pub use policy_file::{
    AdmissionLimits, MemoryKind, PolicyClass, PolicyFile, PolicyFileError, PolicyRule, SegmentKind,
};
pub use request::{Opcode, TransferRequest};
pub use segment::{Segment, SegmentBuffer, SegmentId};
pub use settings::{
    FILE_VARIABLE, Origin, SettingState, Settings, SettingsError, Sources, listen_address,
    reference,
};
pub use status::{BatchStatus, TransferState, TransferStatus};
pub use submit::SubmitOptions;
pub use tcp::TcpConfig;
pub use tcp::relay::{RelayConfig, RelayLimits};
pub use transport::{ANY_LOCATION, Capabilities};
pub use withdrawal::Withdrawal;
