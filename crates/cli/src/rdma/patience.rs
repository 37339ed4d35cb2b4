//! For how long a command of `rdma` waits for what.

use std::time::{Duration, Instant};

use clap::Args;

use crate::units;

/// Centuries: the longest that can be asked for.
const FOR_EVER: Duration = Duration::from_nanos(u64::MAX);

/// The options that say how long to wait.
#[derive(Args, Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Fail when the other side does nothing for so long; 0s waits for ever
    #[arg(long, value_name = "D", default_value = "30s", value_parser = timeout)]
    pub(super) timeout: Duration,
    /// Wait up to so long for an address that is in use, a client for its server, and a server for
    /// its client [default: 0s, and a server waits for its client without end]
    #[arg(long, value_name = "D", value_parser = units::duration)]
    pub(super) wait: Option<Duration>,
    /// Wait 4.096 us * 2^N for an acknowledgement, seven times, before the peer is lost: with 14 half a second in all,
    /// with 18 seven
    #[arg(short = 'u', long, value_name = "N", default_value_t = 14, value_parser = clap::value_parser!(u8).range(1..=31))]
    pub(super) qp_timeout: u8,
}

impl Patience {
    /// Until when to wait for an address or a server, from now on.
    pub(super) fn until(&self) -> Instant {
        let now = Instant::now();
        now.checked_add(self.wait.unwrap_or_default()).unwrap_or(now)
    }
}

/// The value of `--timeout`.
fn timeout(text: &str) -> Result<Duration, String> {
    let timeout = units::duration(text)?;
    Ok(if timeout.is_zero() { FOR_EVER } else { timeout })
}
