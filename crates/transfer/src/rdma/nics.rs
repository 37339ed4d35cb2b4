//! Which of the transport's devices are near to which memory.

use std::net::IpAddr;
use std::path::Path;

use millstream_topology::{
    Candidates, MatrixFileError, Nic, PeerAffinity, PriorityMatrix, Topology,
};
use millstream_transfer_core::{Affinity, Priority};
use millstream_verbs::{Device, Provider};

use crate::transport::{ANY_LOCATION, ANYWHERE};

/// The machine's own tree.
const SYSFS: &str = "/sys";

/// The matrix of these devices: from a file, or found out.
pub(super) fn matrix<'a>(
    devices: impl Iterator<Item = &'a Device>,
    file: Option<&Path>,
) -> Result<PriorityMatrix, MatrixFileError> {
    match file {
        Some(file) => PriorityMatrix::read(file),
        None => {
            // A container may hide all of it: then the machine has one node, to which all are near.
            let topology = Topology::read_places(SYSFS.as_ref()).unwrap_or_default();
            let addresses = millstream_net::address::local_addresses().unwrap_or_default();
            let nics: Vec<_> = devices.map(|device| nic(device, &topology, &addresses)).collect();
            Ok(topology.priority_matrix(&nics))
        }
    }
}

fn nic(device: &Device, topology: &Topology, addresses: &[(String, IpAddr)]) -> Nic {
    let name = device.name();
    let unknown = || Nic { name: name.to_owned(), pci: None, numa_node: None };
    match device.provider() {
        Provider::Soft => {
            let address = device.address();
            let interface = addresses.iter().find(|(_, known)| *known == address);
            interface.map_or_else(unknown, |(it, _)| topology.soft_nic(name, it))
        }
        Provider::Ibverbs => {
            topology.nics().into_iter().find(|nic| nic.name == name).unwrap_or_else(unknown)
        }
    }
}

/// A policy's number of a location.
pub(super) fn number(locations: &[String], name: &str) -> u16 {
    let place = locations.iter().position(|known| known == name);
    place.and_then(|place| u16::try_from(place).ok()).unwrap_or(ANYWHERE)
}

/// The locations of a matrix, and their NICs by their places in `names`, as a policy wants them. Names
/// that are not there are left out.
pub(super) fn priorities(
    matrix: &PriorityMatrix,
    names: &[String],
) -> (Box<[String]>, Vec<Priority>) {
    let resolved = matrix.resolve(names);
    let locations: Box<[String]> = matrix.entries().iter().map(|(name, _)| name.clone()).collect();
    let candidates = locations.iter().map(|location| resolved.candidates(location));
    let priorities = candidates.map(priority).collect();
    (locations, priorities)
}

/// Which of a peer's NICs are for each of ours, by its matrix and what goes together. Nothing where all pairs
/// are alike.
pub(super) fn affinity(
    affinity: &PeerAffinity,
    own: &[String],
    matrix: &PriorityMatrix,
    peer: &[String],
) -> Vec<Affinity> {
    if *affinity == PeerAffinity::Any {
        return Vec::new();
    }
    let resolved = matrix.resolve(peer);
    let of = |own: &String| {
        let of = |location| affinity.candidates(own, resolved.candidates(location), peer);
        let locations = matrix.entries().iter().map(|(location, _)| priority(&of(location)));
        Affinity { locations: locations.collect(), elsewhere: priority(&of(ANY_LOCATION)) }
    };
    own.iter().map(of).collect()
}

fn priority(candidates: &Candidates) -> Priority {
    let numbers = |list: &[usize]| list.iter().map(|&index| index as u16).collect();
    Priority {
        preferred: numbers(&candidates.preferred),
        available: numbers(&candidates.available),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_a_matrix_become_numbers() {
        let json =
            r#"{"cpu:0":[["b"],["a","gone"]],"cuda:0":[["gone"],[]],"cpu:1":[["a","b"],[]]}"#;
        let matrix = PriorityMatrix::parse(json).unwrap();
        let (locations, priorities) = self::priorities(&matrix, &["a".into(), "b".into()]);
        assert_eq!(*locations, ["cpu:0", "cpu:1", "cuda:0"]);
        let priority = |preferred: &[u16], available: &[u16]| Priority {
            preferred: preferred.to_vec(),
            available: available.to_vec(),
        };
        // Of what is left without any, all are.
        assert_eq!(
            priorities,
            [priority(&[1], &[0]), priority(&[0, 1], &[]), priority(&[0, 1], &[])]
        );
    }
    #[test]
    fn what_goes_with_each_nic_becomes_numbers() {
        let matrix = PriorityMatrix::parse(r#"{"cpu:0":[["c","d"],[]],"cpu:1":[["d"],["c"]]}"#);
        let (matrix, own, peer) =
            (matrix.unwrap(), ["a".to_owned(), "b".to_owned()], ["c".into(), "d".into()]);
        let rules = PeerAffinity::parse("a=d").unwrap();
        let found = affinity(&rules, &own, &matrix, &peer);
        let priority = |preferred: &[u16], available: &[u16]| Priority {
            preferred: preferred.to_vec(),
            available: available.to_vec(),
        };
        let own_pairs =
            Affinity { locations: vec![priority(&[1], &[0]); 2], elsewhere: priority(&[1], &[0]) };
        let all = priority(&[0, 1], &[]);
        let any = Affinity { locations: vec![all.clone(), priority(&[1], &[0])], elsewhere: all };
        assert_eq!(found, [own_pairs, any]);
        assert_eq!(affinity(&PeerAffinity::Any, &own, &matrix, &peer), []);
    }
}
