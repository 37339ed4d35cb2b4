//! How long a metadata server is waited for.

use std::time::Duration;

use super::TIME_TO_LIVE;

/// Most bytes of a value, whatever more a server would keep: as much as a frame of the handshake has.
pub(super) const VALUE_LIMIT: usize = 1 << 20;

/// Times of a client of a metadata server.
#[derive(Clone, Copy, Debug)]
pub struct KeyValueConfig {
    /// The longest wait for one address of the server to accept a connection.
    pub connect_timeout: Duration,
    /// The longest that a whole call takes, to however many endpoints.
    pub call_timeout: Duration,
    /// How long an entry lives after it was put or refreshed; in whole seconds.
    pub time_to_live: Duration,
}

impl Default for KeyValueConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_millis(1500),
            call_timeout: Duration::from_secs(3),
            time_to_live: TIME_TO_LIVE,
        }
    }
}

impl KeyValueConfig {
    /// Seconds that an entry lives, as servers count them. Memcached takes more than 30 days for a date.
    pub(super) const fn seconds(&self) -> u64 {
        const MOST: u64 = 30 * 24 * 3600;
        let seconds = self.time_to_live.as_secs();
        if seconds == 0 {
            1
        } else if seconds > MOST {
            MOST
        } else {
            seconds
        }
    }
}
