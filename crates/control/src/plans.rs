//! Files that say where communicators are: one for each, in the form of a topology file.
//!
//! A thread writes them, since a disk may take long. What it has not begun to write when the communicator is
//! over is not written.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use millstream_inc::controller::{EdgeEnd, Placement, PlacementChange};

/// The port of RoCEv2.
const PORT: u16 = 4791;

const PREFIX: &str = "communicator-";
const SUFFIX: &str = ".yaml";
/// Of a file that is being written.
const UNFINISHED: &str = ".yaml.new";

/// A directory with a file for each communicator. Dropping it writes what is still to be written.
pub(crate) struct Plans {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By communicator: what its file should become.
    pending: BTreeMap<u64, PlacementChange>,
    closed: bool,
}

impl Plans {
    /// Makes the directory if it is not there, and removes the files of an earlier run.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            if entry.file_name().to_str().is_some_and(is_ours) {
                fs::remove_file(entry.path())?;
            }
        }
        let shared = Arc::new(Shared::default());
        let (theirs, directory) = (Arc::clone(&shared), directory.to_owned());
        let thread = thread::Builder::new()
            .name("plans".to_owned())
            .spawn(move || theirs.work(&directory))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Has a file written or removed.
    pub(crate) fn change(&self, change: PlacementChange) {
        let communicator = match &change {
            PlacementChange::Ready(placement) => placement.communicator,
            PlacementChange::Over { communicator } => *communicator,
        };
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = matches!(change, PlacementChange::Over { .. });
        let unwritten = matches!(state.pending.get(&communicator), Some(PlacementChange::Ready(_)));
        if is_over && unwritten {
            state.pending.remove(&communicator);
        } else {
            state.pending.insert(communicator, change);
        }
        drop(state);
        self.shared.changed.notify_one();
    }
}

impl Drop for Plans {
    fn drop(&mut self) {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It has said what went wrong.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// The next change; `None` at the end.
    fn next(&self) -> Option<(u64, PlacementChange)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(next) = state.pending.pop_first() {
                return Some(next);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self, directory: &Path) {
        while let Some((communicator, change)) = self.next() {
            let path = directory.join(format!("{PREFIX}{communicator}{SUFFIX}"));
            let done = match change {
                PlacementChange::Ready(placement) => write(&path, &text(&placement)),
                PlacementChange::Over { .. } => match fs::remove_file(&path) {
                    // It could not be written.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                    done => done,
                },
            };
            if let Err(error) = done {
                tracing::warn!(?path, %error, "the file of a plan cannot be written or removed");
            }
        }
    }
}

/// Whether a file of this name is one of ours.
fn is_ours(name: &str) -> bool {
    let number = name
        .strip_prefix(PREFIX)
        .and_then(|rest| rest.strip_suffix(UNFINISHED).or_else(|| rest.strip_suffix(SUFFIX)));
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// Writes a file that nobody sees half of.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let unfinished: PathBuf = path.with_extension(&UNFINISHED[1..]);
    let mut file = File::create(&unfinished)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| fs::rename(&unfinished, path));
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    written
}

/// A placement as YAML.
fn text(placement: &Placement) -> String {
    let Placement { group, communicator, path_mtu, nodes } = placement;
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "# Where a communicator is, as the controller has placed it.\n\
         group: {}\ncommunicator: {communicator}\npath_mtu: {}\nswitches:\n",
        quoted(group),
        path_mtu.bytes()
    );
    let several = nodes.last().is_some_and(|node| node.tree > 0);
    for (index, node) in nodes.iter().enumerate() {
        let first = index == 0 || nodes[index - 1].tree != node.tree;
        if several && first {
            let _ = writeln!(text, "  # Tree {}, from its root on.", node.tree);
        }
        let _ = write!(
            text,
            "  - id: {}\n    name: {}\n    root: {}\n    communicator: {}\n    connections:\n",
            node.id,
            quoted(&node.name),
            // A topology has one root at most.
            first && !several,
            node.communicator
        );
        for edge in &node.edges {
            let _ = writeln!(text, "      - up: {}", edge.up);
            if let Some((host_id, rank)) = edge.host {
                let _ = write!(text, "        host_id: {host_id}\n        rank: {rank}\n");
            }
            end(&mut text, "my", &edge.my);
            end(&mut text, "peer", &edge.peer);
        }
    }
    text
}

fn end(text: &mut String, whose: &str, end: &EdgeEnd) {
    let &EdgeEnd { ip, mac, qpn } = end;
    let ip: IpAddr = ip;
    let _ = writeln!(text, "        {whose}_ip: \"{ip}\"");
    if let Some(mac) = mac {
        let _ = writeln!(text, "        {whose}_mac: \"{mac}\"");
    }
    let _ = write!(text, "        {whose}_port: {PORT}\n        {whose}_qp: {}\n", qpn.value());
}

/// A name, which has no control characters, in YAML.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use millstream_inc::controller::{PlacedEdge, PlacedNode};
    use millstream_inc::topology::MacAddress;
    use millstream_wire::{Mtu, Qpn};

    use super::*;
    use crate::topology_file::TopologyFile;

    fn edge_end(last: u8, qpn: u32, mac: Option<MacAddress>) -> EdgeEnd {
        EdgeEnd { ip: IpAddr::from([10, 0, 0, last]), mac, qpn: Qpn::new(qpn) }
    }

    /// Two switches and two hosts.
    fn placement(communicator: u64) -> Placement {
        let edge = |up, host, my, peer| PlacedEdge { up, host, my, peer };
        let (root, leaf) = (edge_end(1, 17, None), edge_end(2, 18, None));
        let mac = Some(MacAddress([0, 0x11, 0x22, 0x33, 0x44, 0x66]));
        let host = |rank: u32| {
            let end = edge_end(10 + rank as u8, 500 + rank, mac);
            edge(false, Some((u64::from(rank) + 7, rank)), edge_end(2, 20 + rank, None), end)
        };
        let node = |id, name: &str, edges| {
            let name = name.to_owned();
            PlacedNode { id, name, tree: 0, communicator: communicator + id, edges }
        };
        let nodes = vec![
            node(0, "s0", vec![edge(false, None, root, leaf)]),
            node(1, "s\"1\\", vec![edge(true, None, leaf, root), host(0), host(1)]),
        ];
        Placement { group: "a: [b".to_owned(), communicator, path_mtu: Mtu::B1024, nodes }
    }

    #[test]
    fn a_plan_is_written_as_a_topology_is() {
        let text = text(&placement(1 << 40));
        for part in [
            "group: \"a: [b\"\ncommunicator: 1099511627776\npath_mtu: 1024\n",
            "  - id: 0\n    name: \"s0\"\n    root: true\n    communicator: 1099511627776\n",
            "    name: \"s\\\"1\\\\\"\n    root: false\n",
            "      - up: true\n        my_ip: \"10.0.0.2\"\n        my_port: 4791\n        my_qp: 18\n",
            "      - up: false\n        host_id: 8\n        rank: 1\n        my_ip: \"10.0.0.2\"\n",
            "        peer_ip: \"10.0.0.11\"\n        peer_mac: \"00:11:22:33:44:66\"\n        peer_port: 4791\n        peer_qp: 501\n",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        let read = TopologyFile::parse(Path::new("plan"), &text).unwrap().topology;
        assert_eq!((read.switches().len(), read.links().len()), (2, 3));
        assert_eq!(read.switches()[1].name.as_deref(), Some("s\"1\\"));
    }

    #[test]
    fn files_are_there_as_long_as_communicators() {
        let directory =
            std::env::temp_dir().join(format!("millstream-plans-{}", std::process::id()));
        let names = || {
            let entries = fs::read_dir(&directory).unwrap();
            let mut names: Vec<String> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let plans = Plans::open(&directory.join("deeper")).unwrap();
        drop(plans);
        assert_eq!(names(), ["deeper"]);
        for name in
            ["communicator-7.yaml", "communicator-8.yaml.new", "communicator-x.yaml", "mine.yaml"]
        {
            fs::write(directory.join(name), "").unwrap();
        }
        let plans = Plans::open(&directory).unwrap();
        assert_eq!(names(), ["communicator-x.yaml", "deeper", "mine.yaml"]);
        for communicator in [1, 2, 3] {
            plans.change(PlacementChange::Ready(placement(communicator)));
        }
        plans.change(PlacementChange::Over { communicator: 2 });
        plans.change(PlacementChange::Over { communicator: 9 });
        drop(plans);
        let ours: Vec<String> = names().into_iter().filter(|name| is_ours(name)).collect();
        assert_eq!(ours, ["communicator-1.yaml", "communicator-3.yaml"]);
        let written = fs::read_to_string(directory.join("communicator-3.yaml")).unwrap();
        assert_eq!(written, text(&placement(3)));
        fs::remove_dir_all(&directory).unwrap();
    }
}
