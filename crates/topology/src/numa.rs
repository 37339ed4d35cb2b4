//! NUMA nodes: `devices/system/node`.

use std::path::Path;

use crate::sysfs::{DEVICES_MAX, names, text};

/// A NUMA node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NumaNode {
    /// Its number.
    pub number: u32,
    /// Its processors as the kernel lists them: `0-15,32-47`. None in a node of memory only.
    pub processors: Option<String>,
    /// Bytes.
    pub memory: Option<u64>,
    /// To each node, in the order of their numbers; 10 is to itself.
    pub distances: Vec<u32>,
}

pub(crate) fn read(root: &Path) -> Vec<NumaNode> {
    let folder = root.join("devices/system/node");
    let node = |name: String| {
        let number = name.strip_prefix("node")?.parse().ok()?;
        let folder = folder.join(&name);
        let distances = text(&folder.join("distance")).unwrap_or_default();
        Some(NumaNode {
            number,
            processors: text(&folder.join("cpulist")),
            memory: text(&folder.join("meminfo")).and_then(|text| memory(&text)),
            distances: distances.split_whitespace().map_while(|it| it.parse().ok()).collect(),
        })
    };
    let mut nodes: Vec<NumaNode> =
        names(&folder, DEVICES_MAX).into_iter().filter_map(node).collect();
    // The kernel writes no `node01` beside `node1`.
    nodes.sort_by_key(|node| node.number);
    nodes.dedup_by_key(|node| node.number);
    nodes
}

/// `Node 0 MemTotal:       24651708 kB`
fn memory(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(3)?.parse().ok()?;
    kib.checked_mul(1024)
}
