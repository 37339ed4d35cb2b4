//! Trees of files as the kernel shows them in /sys, in folders that are removed.
//!
//! A machine is a text of a line for each thing that it has; `machines/` has some. `#` begins a
//! comment. `\n` and `\xff` mean these bytes, and `_` in a rate or a kind of GID is a space.
//!
//! ```text
//! node NUMBER [cpus=LIST] memory=KIB distances=NUMBERS
//! pci DOMAIN:BUS/BRIDGE/.../FUNCTION class=HEX id=VENDOR:DEVICE node=NUMBER|-1|none
//! rdma NAME at FUNCTION link=LAYER rate=RATE [gid=INDEX,KIND,GID[,INTERFACE]]...
//! net NAME [at FUNCTION] [mtu=..] [speed=..] [state=..] [lower=NAME]...
//! file PATH TEXT
//! link PATH TARGET
//! ```
//!
//! Functions are `bus:device.function` in the domain of their root bus, or have a domain before.

#![allow(dead_code, reason = "each test uses a part")]

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The machines, by the names of their files.
pub(crate) const MACHINES: [(&str, &str); 7] = [
    ("dgx-h100", include_str!("../machines/dgx-h100.txt")),
    ("dgx-a100-nps4", include_str!("../machines/dgx-a100-nps4.txt")),
    ("gb200", include_str!("../machines/gb200.txt")),
    ("mi300x", include_str!("../machines/mi300x.txt")),
    ("vm", include_str!("../machines/vm.txt")),
    ("desktop", include_str!("../machines/desktop.txt")),
    ("odd", include_str!("../machines/odd.txt")),
];

/// A tree that is removed with this value.
pub(crate) struct Tree(PathBuf);

impl Tree {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("millstream-topology-{}-{number}", std::process::id());
        let root = std::env::temp_dir().join(name);
        fs::create_dir(&root).unwrap();
        Self(root)
    }

    /// The tree of a machine of [`MACHINES`].
    pub(crate) fn of(machine: &str) -> Self {
        let machine = MACHINES.iter().find(|(name, _)| *name == machine);
        let (_, text) = machine.expect("the table has it");
        Self::of_text(text)
    }

    /// The tree of a machine that a text describes.
    pub(crate) fn of_text(text: &str) -> Self {
        let tree = Self::new();
        let mut folders = HashMap::new();
        fs::create_dir(tree.0.join("class")).unwrap();
        for line in text.lines().map(str::trim) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["node", number, ..] => tree.node(number, &Attributes(&words[2..])),
                ["pci", path, ..] => {
                    let (address, folder) = tree.pci_path(path, &Attributes(&words[2..]));
                    // Short names are those of the domain that has them first.
                    let (_, short) = address.split_once(':').unwrap();
                    folders.entry(short.to_owned()).or_insert_with(|| folder.clone());
                    folders.insert(address, folder);
                }
                ["rdma", name, "at", at, ..] => {
                    tree.rdma_device(name, &folders[at], &Attributes(&words[4..]));
                }
                ["net", name, "at", at, ..] => {
                    tree.interface(name, Some(&folders[at]), &Attributes(&words[4..]));
                }
                ["net", name, ..] => tree.interface(name, None, &Attributes(&words[2..])),
                ["file", path, ..] => {
                    tree.write(path, line.split_once(path).unwrap().1.trim_start());
                }
                ["link", path, target] => tree.link(path, target),
                _ => panic!("{line:?} says nothing of a machine"),
            }
        }
        tree
    }

    pub(crate) fn root(&self) -> &Path {
        &self.0
    }

    /// Writes a file, in whose text escapes mean bytes.
    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes_of(text)).unwrap();
    }

    /// A link from `path` to what the tree has at `target`, relative, as the kernel's are.
    pub(crate) fn link(&self, path: &str, target: &str) {
        let up = "../".repeat(path.matches('/').count());
        let at = self.0.join(path);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        symlink(format!("{up}{target}"), at).unwrap();
    }

    fn node(&self, number: &str, attributes: &Attributes<'_>) {
        let folder = format!("devices/system/node/node{number}");
        let memory = attributes.get("memory").unwrap();
        self.write(&format!("{folder}/cpulist"), attributes.get("cpus").unwrap_or(""));
        self.write(
            &format!("{folder}/meminfo"),
            &format!("Node {number} MemTotal:       {memory} kB\nNode {number} MemFree: 1 kB\n"),
        );
        let distances = attributes.get("distances").unwrap().replace(',', " ");
        self.write(&format!("{folder}/distance"), &format!("{distances}\n"));
    }

    /// All functions on a way. Returns the last one's address and folder.
    fn pci_path(&self, path: &str, attributes: &Attributes<'_>) -> (String, String) {
        let mut parts = path.split('/');
        let root = parts.next().unwrap();
        let (domain, _) = root.split_once(':').unwrap();
        let mut folder = format!("devices/pci{root}");
        let parts: Vec<String> = parts.map(|part| format!("{domain}:{part}")).collect();
        for (index, address) in parts.iter().enumerate() {
            folder = format!("{folder}/{address}");
            if index + 1 == parts.len() {
                let (vendor, device) = attributes.get("id").unwrap().split_once(':').unwrap();
                let class = attributes.get("class").unwrap();
                self.function(&folder, [class, vendor, device], attributes.get("node").unwrap());
            } else if !self.0.join(&folder).join("class").exists() {
                let node = attributes.get("node").unwrap();
                self.function(&folder, ["060400", "1000", "c030"], node);
            }
        }
        (parts.last().unwrap().clone(), folder)
    }

    fn function(&self, folder: &str, [class, vendor, device]: [&str; 3], numa_node: &str) {
        for (file, text) in [("class", class), ("vendor", vendor), ("device", device)] {
            self.write(&format!("{folder}/{file}"), &format!("0x{text}\n"));
        }
        if numa_node != "none" {
            self.write(&format!("{folder}/numa_node"), &format!("{numa_node}\n"));
        }
        let address = folder.rsplit('/').next().unwrap();
        self.link(&format!("bus/pci/devices/{address}"), folder);
    }

    fn rdma_device(&self, name: &str, pci: &str, attributes: &Attributes<'_>) {
        let folder = format!("{pci}/infiniband/{name}");
        let port = format!("{folder}/ports/1");
        self.write(&format!("{port}/state"), "4: ACTIVE\n");
        self.write(&format!("{port}/link_layer"), attributes.get("link").unwrap());
        self.write(&format!("{port}/rate"), &attributes.get("rate").unwrap().replace('_', " "));
        for gid in attributes.all("gid") {
            let parts: Vec<&str> = gid.split(',').collect();
            let (index, kind, gid) = (parts[0], parts[1].replace('_', " "), parts[2]);
            self.write(&format!("{port}/gids/{index}"), &format!("{gid}\n"));
            self.write(&format!("{port}/gid_attrs/types/{index}"), &format!("{kind}\n"));
            if let Some(interface) = parts.get(3) {
                self.write(&format!("{port}/gid_attrs/ndevs/{index}"), &format!("{interface}\n"));
            }
        }
        // An empty entry: all zeros, and no kind.
        self.write(&format!("{port}/gids/255"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
        self.link(&format!("{folder}/device"), pci);
        self.link(&format!("class/infiniband/{name}"), &folder);
    }

    fn interface(&self, name: &str, pci: Option<&str>, attributes: &Attributes<'_>) {
        let folder = match pci {
            Some(pci) => format!("{pci}/net/{name}"),
            None => format!("devices/virtual/net/{name}"),
        };
        for (file, key) in [("mtu", "mtu"), ("speed", "speed"), ("operstate", "state")] {
            if let Some(text) = attributes.get(key) {
                self.write(&format!("{folder}/{file}"), &format!("{text}\n"));
            }
        }
        if let Some(pci) = pci {
            self.link(&format!("{folder}/device"), pci);
        }
        for lower in attributes.all("lower") {
            self.link(&format!("{folder}/lower_{lower}"), &format!("class/net/{lower}"));
        }
        self.link(&format!("class/net/{name}"), &folder);
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// `key=value` each.
struct Attributes<'a>(&'a [&'a str]);

impl<'a> Attributes<'a> {
    fn all(&self, key: &str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter_map(move |word| {
            let (name, value) = word.split_once('=')?;
            (name == key).then_some(value)
        })
    }

    fn get(&self, key: &str) -> Option<&'a str> {
        self.all(key).next()
    }
}

/// The bytes that a text with escapes means.
fn bytes_of(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let (byte, after) = match (first, after) {
            (b'\\', [b'n', after @ ..]) => (b'\n', after),
            (b'\\', [b'x', high, low, after @ ..]) => {
                let digits = String::from_utf8(vec![*high, *low]).unwrap();
                (u8::from_str_radix(&digits, 16).unwrap(), after)
            }
            _ => (*first, after),
        };
        bytes.push(byte);
        rest = after;
    }
    bytes
}
