//! A node of our own to measure against.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::Context;

use crate::cluster::text;
use crate::memory::MemoryKind;
use crate::process::Child;
use crate::reach::Reach;
use crate::status_pages;

/// For the node to allocate its memory and serve it.
const READY: Duration = Duration::from_secs(60);

/// A child process that serves memory. Dropped, it ends.
pub(super) struct Peer {
    child: Child,
    /// The name by which its segment is opened.
    pub(super) segment: String,
}

impl Peer {
    /// Starts a node that is reached as `reach` says, on an address that it finds, with so many
    /// bytes of memory of this kind.
    pub(super) fn start(reach: &Reach, bytes: u64, memory: MemoryKind) -> anyhow::Result<Self> {
        let buffer = bytes.to_string();
        // Another bench may be at the same metadata server.
        let name = format!("--name=bench-{}", std::process::id());
        let mut arguments = ["node", &name, "--buffer", &buffer].map(OsString::from).to_vec();
        if memory != MemoryKind::Host {
            arguments.push(format!("--memory={memory}").into());
        }
        let reached = ["--metadata", &reach.metadata, "--protocol", &reach.protocol];
        arguments.extend(reached.map(OsString::from));
        if reach.no_segmentation_offload {
            arguments.push("--no-segmentation-offload".into());
        }
        arguments.extend(reach.settings.arguments());
        arguments.extend(status_pages::NOWHERE.map(OsString::from));
        let start = || {
            let mut child = Child::start("the peer", arguments)?;
            let ready = child.ready(READY)?;
            anyhow::Ok(Self { segment: text(&ready, "segment")?.to_owned(), child })
        };
        start().context("cannot start a node to measure against (--segment names another)")
    }

    /// Why it is no more, if it has ended or ends within this time.
    pub(super) fn check(&mut self, within: Duration) -> anyhow::Result<()> {
        self.child.check(within).with_context(|| format!("segment {}", self.segment))
    }
}
