//! What controller, switches and hosts say to each other over TCP.
//!
//! Every message is a frame ([`FrameDecoder`], [`encode`]): a length and a JSON object that says
//! its version and type. Whoever connects speaks first and says what it is:
//!
//! ```text
//! switch                 controller                 host
//!   | Register ------------> |                        |
//!   | <---------- Registered |                        |
//!   |                        | <---------------- Join |   until the group is complete
//!   |                        | GroupReady ----------> |
//!   |                        | <------------- Connect |   its queue pair and path MTU
//!   | <-- CreateCommunicator |                        |   from the leaves of the tree up
//!   | CommunicatorCreated -> |                        |
//!   | <------- ConnectParent |                        |   unless it is the root
//!   | ParentConnected -----> |                        |
//!   |                        | Plan ----------------> |   its leaf's queue pair
//!   :                        :                        :
//!   |                        | <--------------- Leave |
//!   |                        | Left ----------------> |   to the other ranks
//!   | <-- DestroyCommunicator|                        |   when all have left, to each node
//!   | CommunicatorDestroyed >|                        |
//!   |                        | Closed --------------> |
//! ```
//!
//! Hosts with several addresses may have a tree for each: one `GroupReady`, `Connect` and `Plan` is for all of them, and
//! the nodes of each are made as above.
//! Where all ranks of a group are of one machine and none wants the switch ([`Hello::same_machine`]), a
//! [`FromController::SharedMemory`] takes the place of all between `Join` and `Leave`. Where they are of several machines,
//! and some machine has several of them, the lowest of each machine goes through all of this, and its `Plan` says for
//! whom; to the others that goes in place of the `Plan`.
//! Where there is no switch, hosts that offered it ([`Hello::fallback`]) run switches for their own group: `GroupReady`
//! says which ([`HostsTrees`]), and those are asked for nodes, and answer, over their own connections.
//! Where there are switches, the plan says what hosts do when one is lost ([`Plan::failover`]): they join again, by a name of
//! their own.
//!
//! The controller sends [`FromController::Ping`] to everyone, who answers
//! [`ToController::Pong`]; who does not is taken for dead. Hosts whose group is being made are told
//! at the same time what it waits for ([`FromController::Waiting`]). A switch that is asked what its ports
//! have counted ([`FromController::ReadCounters`]) answers with a [`ToController::Counters`] for each node.
//!
//! Where the controller has tokens, a connection begins with a proof on both sides that its peer has one: messages of
//! [`ToController::Token`] and [`FromController::Token`], whose bytes are those of `millstream_net::token`. The peer
//! obeys nothing before that, not even a term.
//!
//! A connection that breaks ends no communicator. Each side connects again and says what it has: a switch
//! [`ToController::Register`] with its incarnation, and its nodes ([`ToController::Held`]), before it is
//! [`FromController::Registered`]; a host [`ToController::Resume`], answered by [`FromController::Resumed`]. Both say
//! the highest term that they have obeyed. The controller, which may be another process than before, says one above to
//! them with each of its messages ([`Commanded`]): who has obeyed a higher one closes the connection. To others it says
//! its own, whatever term somebody says that he has obeyed.
//!
//! Of several controllers one leads. The others answer the first message of a peer with [`Refusal::NotLeader`], which
//! is no command and has the term that the peer has said. The one that leads says where all are, and again when that
//! changes ([`FromController::Controllers`]).

mod awaited;
mod counters;
mod fallback;
pub(crate) mod fields;
mod frame;
mod message;
mod rank_list;
mod recovery;
mod refusal;
mod term;
#[cfg(test)]
mod tests;
mod token;

pub use awaited::Awaited;
pub use counters::PortCounters;
pub use fallback::{Failover, FallbackOffer, HostsTrees};
pub use frame::{FrameDecoder, FrameError, Message, VERSION, encode};
pub use message::{
    Commanded, FromController, GroupIdentity, HeldNode, Hello, HostQueuePair, MAX_PROCESSES, Plan,
    PlannedTree, Presence, Resume, SameMachine, SharedMemoryPlan, SwitchBelow, SwitchChild,
    SwitchEdge, SwitchLimits, SwitchReport, SwitchUplink, ToController,
};
pub use rank_list::RankList;
pub use recovery::{LostSwitch, MAX_AVOIDED, MeetingPoint, SECRET_BYTES, Secret};
pub use refusal::{AbortReason, Refusal};
pub use term::{ObeyedTerm, TermError};
pub use token::TokenProblem;

/// The port that a controller listens on unless told otherwise.
pub const DEFAULT_PORT: u16 = 52200;

/// The longest name of a group or a switch, in bytes. It has one at least and no control characters, and is neither
/// `.` nor `..`, which paths cannot have.
pub const MAX_NAME_BYTES: usize = 128;

/// The longest name of a host that shares memory, and of its socket, in bytes.
pub const MAX_HOST_BYTES: usize = 128;

/// The most ranks that share memory.
pub const MAX_SHARED_MEMORY_WORLD: u32 = 256;

/// The most nodes in one [`ToController::Held`].
pub const MAX_HELD_AT_ONCE: usize = 8;

/// The most nodes that a controller takes from one switch that comes back.
pub const MAX_HELD: u32 = 4096;

/// The highest term. JSON numbers are 64-bit floats for some programs.
pub const MAX_TERM: u64 = 1 << 53;

/// The longest explanation that is sent along, in bytes; longer ones are cut.
pub const MAX_TEXT_BYTES: usize = 1024;

/// Cuts an explanation to what is sent.
pub fn shortened(text: impl Into<String>) -> String {
    let mut text = text.into();
    text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
    text
}
