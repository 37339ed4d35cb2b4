//! Where memory is that a command allocates: `--memory`.

use std::fmt;
use std::str::FromStr;

use millstream_transfer::{Buffer, RegisterError, TransferEngine};
use serde::Serialize;

/// The host's memory, or a GPU's.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum MemoryKind {
    #[default]
    Host,
    Gpu(u32),
}

impl MemoryKind {
    /// Allocates so many zeros there, and registers them.
    pub(crate) fn allocate(
        self,
        engine: &TransferEngine,
        length: usize,
        remote: bool,
    ) -> Result<Buffer, RegisterError> {
        match self {
            Self::Host => engine.allocate_buffer(length, "*", remote),
            Self::Gpu(ordinal) => engine.allocate_gpu_buffer(length, ordinal, remote),
        }
    }
}

impl FromStr for MemoryKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let gpu = || text.strip_prefix("cuda:")?.parse().ok().map(Self::Gpu);
        match text {
            "host" => Ok(Self::Host),
            _ => gpu().ok_or_else(|| format!("{text:?} is no kind of memory: host, or cuda:0")),
        }
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Gpu(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl Serialize for MemoryKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_written_as_they_are_read() {
        for text in ["host", "cuda:0", "cuda:15"] {
            assert_eq!(text.parse::<MemoryKind>().unwrap().to_string(), text);
        }
        for text in ["", "gpu", "cuda", "cuda:", "cuda:x", "cuda:-1", "CUDA:0", "cpu:0"] {
            assert!(text.parse::<MemoryKind>().unwrap_err().contains("cuda:0"), "{text}");
        }
    }
}
