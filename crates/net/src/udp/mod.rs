//! A UDP socket that speaks as RoCEv2 needs.
//!
//! The ICRC covers the IPv4 identification, which a program neither sets nor sees. It is known all
//! the same if the socket is never connected and always sets don't-fragment: Linux then sends
//! identification 0, and numbers the segments of a segmented message (UDP_SEGMENT) 0, 1, 2, ...
//! (`ip_select_ident_segs` and `inet_gso_segment` in the kernel; seen on veth with 6.18).
//! A batch to send therefore computes each ICRC after it has grouped the datagrams.

mod receive;
mod send;
mod socket;

pub use crate::batch::{MAX_MESSAGE_LENGTH, MAX_SEGMENTS};
pub use crate::socket::SocketConfig;
pub use receive::ReceiveBatch;
pub use socket::UdpSocket;
