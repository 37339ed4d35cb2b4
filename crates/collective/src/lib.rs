//! The host side of in-network collectives: join a group, call AllReduce, Reduce, Broadcast, Barrier,
//! ReduceScatter or AllGather.
//!
//! A [`Communicator`] is one rank of a group. The controller finds a switch for the group, and
//! every rank has one reliable connection to it; what a rank sends is added up in the switch, and
//! the result comes back as RDMA WRITEs into the destination itself, without a copy. Ranks that are all of one machine
//! share memory in place of that, and send no packet; of several machines each sends once what its ranks have reduced
//! through memory that they share ([`Path`]). Where there is no switch, the ranks' own processes take
//! its place ([`JoinConfig::fallback`]), and when one is lost, calls under way go on over other trees
//! ([`Communicator::failovers`]).
//!
//! ```no_run
//! use std::net::SocketAddr;
//!
//! use millstream_collective::{Communicator, JoinConfig, ReduceOperation};
//! use millstream_verbs::{Device, SoftConfig};
//!
//! let device = Device::open_soft(&SoftConfig::new("127.0.0.2".parse()?))?;
//! let controller: SocketAddr = "127.0.0.1:52200".parse()?;
//! let config = JoinConfig::new(controller, "example", 4, 0, &device);
//! let mut communicator = Communicator::join(&config)?;
//! let mine = vec![1_i32; 1024];
//! let mut sum = vec![0; 1024];
//! communicator.all_reduce(&mine, &mut sum, ReduceOperation::Sum)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`Group`] makes several communicators. Below the calls on typed vectors are those on memory that is named by its
//! address ([`Communicator::start_raw`]): started, several at a time, and waited for by [`Handle`]s.
//!
//! # Threads
//!
//! The connection's work is done by the caller while it waits, else on the device's thread; in shared memory, on a thread
//! that is started for the first call that nobody waits for. One more
//! thread for each communicator listens to the controller, so that the death of a rank ends a call at
//! once.
//!
//! # When something goes wrong
//!
//! Every call ends with a result or an error that names who or what is to blame. After an error
//! (other than one about the arguments) the communicator is of no more use, and all ranks get one;
//! they may join again, under the same name.

mod call;
mod calls;
mod communicator;
mod control;
mod coordinator;
mod element;
mod engine;
mod error;
mod failover;
mod group;
mod hosted;
mod join;
mod joining;
mod line;
mod local;
mod memory;
mod path;
mod raw;
mod registrations;
mod tree;
mod watcher;

/// The longest that anybody waits, a century: a limit of `Duration::MAX` means none, and must not
/// overflow the clock.
const LONGEST: std::time::Duration = std::time::Duration::from_secs(100 * 365 * 24 * 3600);

pub use call::Call;
pub use communicator::Communicator;
pub use element::{BFloat16, Element, Float16};
pub use error::{CollectiveError, JoinError};
pub use failover::FailoverReport;
pub use group::Group;
pub use join::{JoinConfig, Waiting};
pub use memory::Buffer;
pub use path::{Path, Route};
pub use raw::{Handle, RawCall};
pub use registrations::RegistrationError;

pub use millstream_inc::controllers::{Controllers, ControllersError, MAX_CONTROLLERS};
pub use millstream_inc::protocol::{AbortReason, Awaited, DEFAULT_PORT, Refusal, TokenProblem};
pub use millstream_inc::{Collective, DataType, MAX_TREES, Mode, ReduceOperation, UnknownName};
pub use millstream_net::tls::{CallerFiles, CallerTls, TlsFilesError};
pub use millstream_net::token::{Token, TokenError, TokenFileError};
