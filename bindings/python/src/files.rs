//! Files that an engine of Python offers, and the transport for files where it is left until one is named.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use millstream_transfer::{FileOptions, NvmeofConfig, TransferEngine};

use crate::failure::Failure;

/// With `auto`: the transport for files, which listens at a port and has threads, is installed once a file is named.
pub(crate) struct OnDemand(Option<Mutex<NvmeofConfig>>);

impl OnDemand {
    /// What it is installed with, if it is at all.
    pub(crate) fn new(config: Option<NvmeofConfig>) -> Self {
        Self(config.map(Mutex::new))
    }

    /// A file was named: installs the transport, unless it is there or was not asked for. May take a moment.
    pub(crate) fn install(&self, engine: &TransferEngine) -> Result<(), Failure> {
        let Some(config) = &self.0 else { return Ok(()) };
        // One thread installs it, and the others wait for that.
        let config = config.lock().unwrap_or_else(PoisonError::into_inner);
        if engine.transports().iter().any(|(name, _)| *name == "nvmeof") {
            return Ok(());
        }
        Ok(engine.install_nvmeof(config.clone())?)
    }
}

/// How a file is offered that is at these paths where servers are called so.
pub(crate) fn options(
    name: Option<String>,
    length: Option<u64>,
    writable: bool,
    local_path_map: BTreeMap<String, PathBuf>,
) -> Result<FileOptions, Failure> {
    let mut options = FileOptions { name, length, writable, ..FileOptions::default() };
    for (server, path) in local_path_map {
        let refuse = |why: String| Failure::argument(format!("local_path_map: {why}"));
        let text = path.to_str().ok_or_else(|| refuse(format!("{path:?} is no UTF-8")))?;
        options.map(&server, text).map_err(|error| refuse(error.to_string()))?;
    }
    Ok(options)
}
