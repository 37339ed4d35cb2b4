//! Which test, and who does what in it.

use std::time::{Duration, Instant};

use millstream_verbs::{Access, Mtu};

use crate::rdma::pattern::Side;

/// What the requests of a test do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::rdma) enum Operation {
    Send,
    Write,
    Read,
    FetchAdd,
    CompareSwap,
}

/// A test.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Test {
    pub(super) operation: Operation,
    /// One message at a time, and how long each takes. Otherwise as many as can be.
    pub(super) latency: bool,
}

/// How long a test runs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Amount {
    /// So many messages of each queue pair.
    Iterations(u64),
    Duration(Duration),
}

impl Amount {
    /// Of a test that starts now: after how many messages it ends at the latest, and when.
    pub(super) fn limits(self, start: Instant) -> (u64, Option<Instant>) {
        match self {
            Self::Iterations(iterations) => (iterations, None),
            Self::Duration(duration) => (u64::MAX, start.checked_add(duration)),
        }
    }
}

/// All that a side has to know.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) test: Test,
    pub(super) side: Side,
    /// Bytes of a message; one test after the other.
    pub(super) sizes: Vec<u32>,
    pub(super) amount: Amount,
    pub(super) queue_pairs: usize,
    /// Requests that wait for their end at a time, on each queue pair.
    pub(super) send_depth: usize,
    /// Receives posted, on each queue pair.
    pub(super) receive_depth: usize,
    pub(super) mtu: Option<Mtu>,
    pub(super) verify: bool,
    pub(super) busy_poll: bool,
    /// The longest silence that is no failure, beside what a message takes.
    pub(super) timeout: Duration,
}

/// What is allowed with memory that a side of a test needs; `None` where it needs none.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Needs {
    /// Memory with bytes to be moved.
    pub(super) source: Option<Access>,
    /// Memory to move bytes into.
    pub(super) target: Option<Access>,
    /// What the other side may do.
    pub(super) remote: Access,
    pub(super) receives: bool,
}

impl Operation {
    pub(super) fn is_atomic(self) -> bool {
        matches!(self, Self::FetchAdd | Self::CompareSwap)
    }
}

impl Test {
    /// The command that runs it.
    pub(super) fn command(self) -> &'static str {
        match self.operation {
            Operation::Send => "send-bw",
            Operation::Write => "write-bw",
            Operation::Read => "read-bw",
            Operation::FetchAdd | Operation::CompareSwap => "atomic",
        }
    }

    /// What both sides call it.
    pub(super) fn name(self) -> String {
        let operation = match self.operation {
            Operation::Send => "send",
            Operation::Write => "write",
            Operation::Read => "read",
            Operation::FetchAdd => "fetch-add",
            Operation::CompareSwap => "compare-swap",
        };
        format!("{operation}-{}", if self.latency { "lat" } else { "bw" })
    }

    /// What perftest calls it, in its headline.
    pub(super) fn title(self) -> String {
        let operation = match self.operation {
            Operation::Send => "Send",
            // Nobody polls memory for a WRITE here: the immediate announces it.
            Operation::Write if self.latency => "RDMA_Write_imm",
            Operation::Write => "RDMA_Write",
            Operation::Read => "RDMA_Read",
            Operation::FetchAdd => "Atomic FETCH_AND_ADD",
            Operation::CompareSwap => "Atomic CMP_AND_SWAP",
        };
        format!("{operation} {} Test", if self.latency { "Latency" } else { "BW" })
    }

    /// Both sides send in turn, and half a round trip is called the latency.
    pub(super) fn is_ping_pong(self) -> bool {
        self.latency && matches!(self.operation, Operation::Send | Operation::Write)
    }

    /// Whether the server's processor learns of what the client posts.
    pub(super) fn server_sees(self) -> bool {
        self.needs(Side::Server).receives
    }

    pub(super) fn needs(self, side: Side) -> Needs {
        let requests = side == Side::Client || self.is_ping_pong();
        let responds = side == Side::Server || self.is_ping_pong();
        let mut needs = Needs::default();
        if requests {
            match self.operation {
                Operation::Send | Operation::Write => needs.source = Some(Access::empty()),
                Operation::Read | Operation::FetchAdd | Operation::CompareSwap => {
                    needs.target = Some(Access::LOCAL_WRITE);
                }
            }
        }
        if responds {
            match self.operation {
                Operation::Send => {
                    needs.target = Some(Access::LOCAL_WRITE);
                    needs.receives = true;
                }
                Operation::Write => {
                    needs.target = Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
                    needs.remote = Access::REMOTE_WRITE;
                    needs.receives = self.latency;
                }
                Operation::Read => {
                    needs.source = Some(Access::REMOTE_READ);
                    needs.remote = Access::REMOTE_READ;
                }
                Operation::FetchAdd | Operation::CompareSwap => {
                    needs.target = Some(Access::LOCAL_WRITE | Access::REMOTE_ATOMIC);
                    needs.remote = Access::REMOTE_ATOMIC;
                }
            }
        }
        needs
    }
}

impl Plan {
    /// The longest silence that is no failure: a slow link moves a megabyte in a second.
    pub(super) fn patience(&self, size: u32) -> Duration {
        self.timeout.saturating_add(Duration::from_micros(size.into()))
    }

    pub(super) fn largest(&self) -> u32 {
        self.sizes.iter().copied().max().unwrap_or(0)
    }
}
