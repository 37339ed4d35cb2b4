//! Batches of datagrams on their way out, whatever the socket.

mod datagram;
mod group;
mod send;
#[cfg(test)]
mod trains;

pub use group::{MAX_MESSAGE_LENGTH, MAX_SEGMENTS};
pub(crate) use send::{Head, Refusal, SendBatch, Sender};
