//! Where a device is on PCI Express.

use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;

use crate::Crossing;

/// `domain:bus:device.function`.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl FromStr for PciAddress {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let number = |text: &str, digits: std::ops::RangeInclusive<usize>| {
            // from_str_radix would take a sign.
            let hexadecimal = text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let fits = hexadecimal && digits.contains(&text.len());
            if fits { u32::from_str_radix(text, 16).map_err(|_| ()) } else { Err(()) }
        };
        let (domain, rest) = text.split_once(':').ok_or(())?;
        let (bus, rest) = rest.split_once(':').ok_or(())?;
        let (device, function) = rest.split_once('.').ok_or(())?;
        // The domains of virtual machines and of some controllers have more than four digits.
        Ok(Self {
            domain: number(domain, 4..=8)?,
            bus: number(bus, 2..=2)? as u8,
            device: number(device, 2..=2)? as u8,
            function: number(function, 1..=1)? as u8,
        })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// The way from the root of PCI Express to a device: its root bus, then bridges, then itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PciPath {
    /// Such as `pci0000:3a`.
    root: String,
    /// Never empty.
    functions: Vec<PciAddress>,
}

impl PciPath {
    /// The way from a root bus, such as `pci0000:3a`, through these bridges to the last function.
    /// `None` when there is no function.
    pub fn new(root: &str, functions: Vec<PciAddress>) -> Option<Self> {
        (!functions.is_empty()).then(|| Self { root: root.to_owned(), functions })
    }

    /// The way to the device that a folder, or a link to one, is of; `None` when it is of none.
    pub(crate) fn of(folder: &Path) -> Option<Self> {
        let path = fs::canonicalize(folder).ok()?;
        let mut root = None;
        let mut functions = Vec::new();
        for name in path.components().filter_map(|component| component.as_os_str().to_str()) {
            if let Ok(address) = name.parse() {
                functions.push(address);
            } else if functions.is_empty() && name.starts_with("pci") && name.contains(':') {
                root = Some(name.to_owned());
            }
        }
        Self::new(&root?, functions)
    }

    /// The device itself.
    pub fn address(&self) -> PciAddress {
        self.functions[self.functions.len() - 1]
    }

    /// The host bridge with its root bus, such as `pci0000:3a`.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// The bridges on the way, from the root, and the device itself as the last.
    pub fn functions(&self) -> &[PciAddress] {
        &self.functions
    }

    /// What is crossed between two devices below one host bridge; `None` when they are not.
    pub(crate) fn crossing(&self, other: &Self) -> Option<Crossing> {
        let hops = self.hops(other)?;
        // Of two root ports, no bridge is common.
        let below_one_port = self.functions[0] == other.functions[0];
        // Through one switch the way is: device, downstream port, upstream port, downstream port,
        // device. Where devices share a port or a bus, it is shorter.
        Some(match (below_one_port, hops) {
            (true, 0..=4) => Crossing::Pix,
            (true, _) => Crossing::Pxb,
            (false, _) => Crossing::Phb,
        })
    }

    /// Links between two devices: 0 to itself, 2 below the same bridge. `None` when there is no
    /// way but through the processor, from one root to another.
    pub fn hops(&self, other: &Self) -> Option<usize> {
        if self.root != other.root {
            return None;
        }
        let pairs = self.functions.iter().zip(&other.functions);
        let common = pairs.take_while(|(one, other)| one == other).count();
        Some(self.functions.len() + other.functions.len() - 2 * common)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(root: &str, functions: &[&str]) -> PciPath {
        let functions = functions.iter().map(|text| text.parse().unwrap()).collect();
        PciPath::new(root, functions).unwrap()
    }

    #[test]
    fn addresses_are_read_and_written() {
        for text in ["0000:3b:00.0", "10000:e1:1f.7"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), text);
        }
        for text in ["", "3b:00.0", "0000:3b:00", "0000:3b:00.0x", "0000:+b:00.0", "pci0000:3a"] {
            text.parse::<PciAddress>().unwrap_err();
        }
    }

    #[test]
    fn what_is_crossed_is_what_is_not_common() {
        let port = "0000:3a:00.0";
        let gpu = path("pci0000:3a", &[port, "0000:3b:00.0", "0000:3c:00.0", "0000:3d:00.0"]);
        let cousin = ["0000:3b:00.0", "0000:3c:01.0", "0000:3e:00.0", "0000:3f:00.0"];
        for (other, expected) in [
            (gpu.clone(), Some(Crossing::Pix)),
            // Behind another downstream port of the same switch.
            (
                path("pci0000:3a", &[port, "0000:3b:00.0", "0000:3c:01.0", "0000:3e:00.0"]),
                Some(Crossing::Pix),
            ),
            // Behind a second switch below the first.
            (
                path("pci0000:3a", &[&[port][..], &cousin, &["0000:40:00.0"]].concat()),
                Some(Crossing::Pxb),
            ),
            // At another root port, and integrated in the root complex.
            (path("pci0000:3a", &["0000:3a:01.0", "0000:5d:00.0"]), Some(Crossing::Phb)),
            (path("pci0000:3a", &["0000:3a:1f.0"]), Some(Crossing::Phb)),
            (path("pci0001:3a", &[port, "0000:3b:00.0"]), None),
        ] {
            assert_eq!(gpu.crossing(&other), expected, "{other:?}");
            assert_eq!(other.crossing(&gpu), expected, "{other:?}");
        }
        // Two functions of a NIC in a slot of a root port.
        let [first, second] =
            ["0000:3b:00.0", "0000:3b:00.1"].map(|function| path("pci0000:3a", &[port, function]));
        assert_eq!(first.crossing(&second), Some(Crossing::Pix));
        // Two functions at a root bus have no root port: they cross the host bridge.
        let [first, second] =
            ["0000:00:02.0", "0000:00:03.0"].map(|function| path("pci0000:00", &[function]));
        assert_eq!(first.crossing(&second), Some(Crossing::Phb));
    }

    #[test]
    fn hops_count_links() {
        let nic = path("pci0000:3a", &["0000:3a:00.0", "0000:3b:00.0", "0000:3c:00.0"]);
        let same_bridge = path("pci0000:3a", &["0000:3a:00.0", "0000:3b:00.0", "0000:3c:01.0"]);
        let other_port = path("pci0000:3a", &["0000:3a:02.0", "0000:5d:00.0"]);
        let other_root = path("pci0000:80", &["0000:80:00.0"]);
        assert_eq!(nic.hops(&nic), Some(0));
        assert_eq!(nic.hops(&same_bridge), Some(2));
        assert_eq!(nic.hops(&other_port), Some(5));
        assert_eq!(other_port.hops(&nic), Some(5));
        assert_eq!(nic.hops(&other_root), None);
    }
}
