//! What a flow has its caller do, and tells it.

use crate::{Opcode, Piece, RailId, SliceId, TaskId};

/// Something to do or to know.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Output {
    /// Post a slice.
    Post(Post),
    /// Connect a rail. Answer with [`crate::Flow::rail_up`], [`crate::Flow::rail_down`] or
    /// [`crate::Flow::rail_refused`]. The peer is told the epoch, and ends connections of this rail with
    /// lower ones before it accepts this.
    Connect {
        /// Which.
        rail: RailId,
        /// The number of the connection.
        epoch: u64,
    },
    /// Do something over a connection that changes nothing and that the peer's NIC answers, as a WRITE of no
    /// bytes, and answer with [`crate::Flow::rail_tested`]; or with [`crate::Flow::rail_down`] if it fails.
    Test {
        /// Which.
        rail: RailId,
        /// The number of the connection.
        epoch: u64,
    },
    /// End all local access of a connection at once: reset its queue pairs, and wait until nothing
    /// reads or writes for them. Then call [`crate::Flow::rail_aborted`]. What has completed by then
    /// may be told before.
    Abort {
        /// Which.
        rail: RailId,
        /// The number of the connection.
        epoch: u64,
    },
    /// Ask the peer, over any way, to confirm that nothing of this connection can arrive any more.
    /// Answer with [`crate::Flow::fence_confirmed`] or [`crate::Flow::fence_refused`]. It comes again
    /// until there is an answer.
    Fence {
        /// Which.
        rail: RailId,
        /// The number of the connection.
        epoch: u64,
    },
    /// A task is over. Nothing touches its local memory any more, and its name is not known any more.
    Ended(Ended),
}

/// A slice to post on a rail.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Post {
    /// Where.
    pub rail: RailId,
    /// The number of the rail's connection.
    pub epoch: u64,
    /// Its name. [`crate::Flow::completed`] wants it.
    pub slice: SliceId,
    /// The caller's number of its task.
    pub user: u64,
    /// Which way.
    pub opcode: Opcode,
    /// Its first piece. All of them are [`crate::Flow::pieces`].
    pub first: Piece,
    /// How many pieces it has, each a request of its own.
    pub pieces: u32,
    /// Bytes in all pieces.
    pub length: u32,
}

/// How a task ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ended {
    /// Which.
    pub task: TaskId,
    /// The caller's number of it.
    pub user: u64,
    /// How.
    pub end: End,
    /// WRITEs may still change the target's range: the peer has not confirmed that none can.
    pub target_undefined: bool,
    /// At least so many bytes have arrived.
    pub transferred: u64,
}

/// How a task can end.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum End {
    /// All of it was done: at the peer, for WRITEs.
    Completed,
    /// The caller did not want it any more.
    Canceled,
    /// Its deadline passed.
    Timeout,
    /// It cannot be done.
    Failed(Failure),
}

/// Why a task failed.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Failure {
    /// The peer, or this side, does not allow access to the memory.
    Refused,
    /// A slice has failed as often as it may.
    Attempts,
    /// There was no rail for too long.
    NoRail,
    /// A rail broke, and the peer did not confirm in time that nothing on it can arrive any more. So
    /// it could not be tried again.
    NotFenced,
    /// The peer's process is another one now.
    PeerRestarted,
    /// The peer's process is gone, or has closed.
    PeerGone,
    /// This side closes.
    ShutDown,
}

/// Bytes that have arrived.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Moved {
    /// The caller's number of their task.
    pub user: u64,
    /// How many.
    pub length: u32,
}

/// How a slice ended.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum SliceResult {
    /// Done: at the peer, for a WRITE.
    Done,
    /// The rail did not do it.
    Broken,
    /// It was not done since another slice failed.
    Flushed,
    /// Memory may not be used so: another rail would not do it either.
    Refused,
}

/// How a task stands that is not over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Progress {
    /// Nothing of it has been posted yet.
    pub waiting: bool,
    /// At least so many bytes have arrived.
    pub transferred: u64,
    /// Bytes in all.
    pub length: u64,
}
