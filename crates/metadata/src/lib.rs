//! Segment descriptors, the peer-to-peer handshake, and the stores that hold them
