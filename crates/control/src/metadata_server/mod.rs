//! The metadata server as a daemon: values by keys over HTTP, as Mooncake's metadata server has them.

#![allow(dead_code, reason = "what serves the entries is still to come")]

mod log;
