//! The clients of etcd, Redis and memcached against the real servers, and against servers that lie.
//!
//! Each test starts servers of its own, on ports of its own, and ends them.

#[cfg(feature = "tls")]
#[path = "../common/certificates.rs"]
mod certificates;
mod contract;
mod daemon;
mod etcd;
mod fake;
mod lies;
mod memcached;
mod redis;
mod stores;
#[cfg(feature = "tls")]
mod tls;

use std::time::{Duration, Instant};

use millstream_metadata::KeyValueConfig;

/// For anything that will happen, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(60);

/// A client that waits as long as a busy machine may take. No entry ends within a test.
fn patient() -> KeyValueConfig {
    KeyValueConfig {
        connect_timeout: Duration::from_secs(20),
        call_timeout: Duration::from_secs(20),
        time_to_live: Duration::from_secs(600),
    }
}

/// As [`patient`], with entries that end soon: etcd has no leases below 2 s.
fn short_lived() -> KeyValueConfig {
    KeyValueConfig { time_to_live: Duration::from_secs(3), ..patient() }
}

/// Asks again and again, for as long as something may take that nobody tells of.
fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
