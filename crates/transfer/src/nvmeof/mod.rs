//! The transport `nvmeof`: segments that are files.

mod disk;
mod target;
mod flow;
mod sending;
mod initiator;
mod receiving;
mod mapped;
mod protocol;

/// As in `--protocol` and in descriptors.
pub(crate) const NAME: &str = millstream_metadata::NVMEOF;
