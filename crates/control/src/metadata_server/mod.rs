//! The metadata server as a daemon: values by keys over HTTP, as Mooncake's metadata server has them.

#![allow(dead_code, reason = "what serves the entries is still to come")]

mod log;
mod table;

/// What clients can make a metadata server hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a key.
    pub key_length: usize,
    /// Bytes of a value.
    pub value_length: usize,
    /// Keys.
    pub keys: usize,
    /// Bytes of all keys and values.
    pub bytes: usize,
    /// Connections at a time.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            key_length: 1024,
            value_length: 1 << 20,
            keys: 65_536,
            bytes: 1 << 30,
            connections: 512,
        }
    }
}
