//! Topology files: the network of switches and hosts in YAML.
//!
//! The YAML is read event by event into the entries of a [`Topology`], without aliases, so that a file makes us
//! keep no more than its switches and connections. Everything that is wrong is an error that says where.

mod entries;
mod error;
mod events;
mod lab;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use millstream_inc::topology::Topology;

use entries::Network;
pub use error::{FileProblem, TopologyFileError};
pub use lab::{ControllerPlace, LabSettings};

/// The most bytes of a file.
pub const MAX_BYTES: u64 = 32 << 20;

/// A topology, and what of its file is not used.
#[derive(Clone, Debug)]
pub struct TopologyFile {
    /// The network.
    pub topology: Topology,
    /// What people should know, a sentence each.
    pub warnings: Vec<String>,
    /// How it is built on one machine.
    pub lab: LabSettings,
}

impl TopologyFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, TopologyFileError> {
        let failed = |problem| TopologyFileError {
            file: path.to_owned(),
            line: None,
            place: String::new(),
            problem: Box::new(problem),
        };
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
            .map_err(|error| failed(FileProblem::Io(error)))?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(failed(FileProblem::TooLarge));
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let valid = error.utf8_error().valid_up_to();
            let line = 1 + error.as_bytes()[..valid].iter().filter(|&&byte| byte == b'\n').count();
            TopologyFileError { line: Some(line), ..failed(FileProblem::NotUtf8) }
        })?;
        Self::parse(path, &text)
    }

    /// Reads the text of a file. `path` is named in errors.
    pub fn parse(path: &Path, text: &str) -> Result<Self, TopologyFileError> {
        let Network { entries, lines, queue_pairs, lab } = entries::read(path, text)?;
        let topology = Topology::new(&entries).map_err(|error| {
            let of = error.switch.and_then(|switch| lines.get(switch));
            let line = of.map(|(line, connections)| {
                error.connection.and_then(|number| connections.get(number)).unwrap_or(line)
            });
            let switch = error.switch.and_then(|switch| entries.get(switch));
            let mut place =
                switch.map(|switch| format!("switch {}", switch.id)).unwrap_or_default();
            if let Some(number) = error.connection {
                place += &format!(", connection {}", number + 1);
            }
            let (file, line) = (path.to_owned(), line.copied());
            let problem = Box::new(FileProblem::Topology(error.problem));
            TopologyFileError { file, line, place, problem }
        })?;
        lab.check(&topology).map_err(|(line, problem)| {
            let (file, place, problem) = (path.to_owned(), "lab".to_owned(), Box::new(problem));
            TopologyFileError { file, line, place, problem }
        })?;
        let mut warnings = Vec::new();
        if queue_pairs {
            warnings.push(
                "the queue pair numbers of the topology are not used: each communicator gets queue pairs of its own"
                    .to_owned(),
            );
        }
        Ok(Self { topology, warnings, lab: lab.settings })
    }
}
