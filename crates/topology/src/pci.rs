//! Where a device is on PCI Express.

use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;

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
        let root = root?;
        (!functions.is_empty()).then_some(Self { root, functions })
    }

    /// The device itself.
    pub fn address(&self) -> PciAddress {
        self.functions[self.functions.len() - 1]
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
        PciPath { root: root.to_owned(), functions }
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
