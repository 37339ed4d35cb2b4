//! A way to memory, with memory at both ends.

use millstream_transfer::Buffer;

use super::super::peer::Peer;
use super::super::{allocate, open_own, start_peer};
use crate::engine::{self, Opened};
use crate::memory::MemoryKind;
use crate::reach::Reach;

/// All of them.
pub(super) const NAMES: [&str; 3] = ["local", "shm", "rdma:soft"];

pub(super) struct Lane {
    /// As in `--protocol`.
    pub(super) name: &'static str,
    pub(super) buffer: Buffer,
    pub(super) opened: Opened,
    _own: Option<Buffer>,
    _peer: Option<Peer>,
}

impl Lane {
    /// With so many bytes at each end.
    pub(super) fn open(reach: &Reach, name: &'static str, bytes: usize) -> anyhow::Result<Self> {
        let reach = Reach { protocol: name.to_owned(), ..reach.clone() };
        let (opened, own, peer) = match name {
            "local" => {
                let (opened, own) = open_own(&reach, bytes, MemoryKind::Host)?;
                (opened, Some(own), None)
            }
            _ => {
                let peer = start_peer(&reach, bytes as u64, MemoryKind::Host)?;
                (engine::open(&reach, &peer.segment)?, None, Some(peer))
            }
        };
        let buffer = allocate(&opened, bytes, MemoryKind::Host)?;
        Ok(Self { name, buffer, opened, _own: own, _peer: peer })
    }
}
