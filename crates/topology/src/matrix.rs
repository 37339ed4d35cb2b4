//! The priority matrix: for each location of memory, the NICs to prefer and those to fall back on.
//! Its JSON is that of Mooncake's `nic_priority_matrix`:
//! `{"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:0": [["mlx5_1"], ["mlx5_0"]]}`.

use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

use crate::DeviceFilter;
use crate::sysfs::{DEVICES_MAX, in_order};

/// Bytes of JSON: the largest matrix of thousands of names is shorter.
const TEXT_MAX: usize = 1 << 20;
/// NUMA nodes and GPUs.
const LOCATIONS_MAX: usize = 2 * DEVICES_MAX;
/// Bytes of a name. The kernel's have 63 at most (`IB_DEVICE_NAME_MAX`).
const NAME_MAX: usize = 255;

/// Which NICs are good for memory of which location.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PriorityMatrix {
    /// By location, `cpu:2` before `cpu:10`.
    entries: Vec<(String, Priorities)>,
}

/// The NICs of a location, by name.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Priorities {
    /// Those to use.
    pub preferred: Vec<String>,
    /// Those that can be used as well.
    pub available: Vec<String>,
}

/// Why a text is no priority matrix.
#[derive(Debug, Error)]
#[error("no priority matrix, such as {{\"cpu:0\": [[\"mlx5_0\"], [\"mlx5_1\"]]}}: {reason}")]
pub struct MatrixError {
    /// What is wrong, and where.
    pub reason: String,
}

/// Why a file has no priority matrix.
#[derive(Debug, Error)]
pub enum MatrixFileError {
    /// It could not be read.
    #[error("cannot read {path:?}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// What it holds is none.
    #[error("{path:?} has {source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: MatrixError,
    },
}

impl PriorityMatrix {
    /// Reads the JSON.
    pub fn parse(text: &str) -> Result<Self, MatrixError> {
        if text.len() > TEXT_MAX {
            let reason = format!("it has more than {TEXT_MAX} bytes");
            return Err(MatrixError { reason });
        }
        serde_json::from_str(text).map_err(|error| MatrixError { reason: error.to_string() })
    }

    /// Reads a file of JSON, such as the one that `MC_CUSTOM_TOPO_JSON` names.
    pub fn read(path: &Path) -> Result<Self, MatrixFileError> {
        let read = || {
            // A pipe would be waited for.
            if !fs::metadata(path)?.is_file() {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
            }
            let mut text = String::new();
            fs::File::open(path)?.take(TEXT_MAX as u64 + 1).read_to_string(&mut text)?;
            Ok(text)
        };
        let path = path.to_owned();
        match read() {
            Err(source) => Err(MatrixFileError::Read { path, source }),
            Ok(text) => {
                Self::parse(&text).map_err(|source| MatrixFileError::Parse { path, source })
            }
        }
    }

    /// Writes the JSON, on one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings in a map are JSON, and a string takes all")
    }

    /// The locations and their NICs, `cpu:2` before `cpu:10`.
    pub fn entries(&self) -> &[(String, Priorities)] {
        &self.entries
    }

    /// The NICs of a location.
    pub fn get(&self, location: &str) -> Option<&Priorities> {
        self.entries.iter().find(|(name, _)| name == location).map(|(_, priorities)| priorities)
    }

    /// Adds a location, or changes its NICs.
    pub fn insert(&mut self, location: String, priorities: Priorities) {
        let key = in_order(&location);
        match self.entries.binary_search_by_key(&key, |(name, _)| in_order(name)) {
            Ok(at) => self.entries[at].1 = priorities,
            Err(at) => self.entries.insert(at, (location, priorities)),
        }
    }

    /// The same without the NICs that a filter refuses. Locations stay.
    pub fn filtered(mut self, filter: &DeviceFilter) -> Self {
        for (_, Priorities { preferred, available }) in &mut self.entries {
            preferred.retain(|name| filter.allows(name));
            available.retain(|name| filter.allows(name));
        }
        self
    }
}

impl Serialize for PriorityMatrix {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.entries.len()))?;
        for (location, Priorities { preferred, available }) in &self.entries {
            map.serialize_entry(location, &(preferred, available))?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for PriorityMatrix {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MatrixVisitor)
    }
}

struct MatrixVisitor;

impl<'de> Visitor<'de> for MatrixVisitor {
    type Value = PriorityMatrix;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of locations")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PriorityMatrix, A::Error> {
        let mut entries = Vec::new();
        while let Some(Name(location)) = map.next_key()? {
            if entries.len() == LOCATIONS_MAX {
                let what = format!("there are more than {LOCATIONS_MAX} locations");
                return Err(A::Error::custom(what));
            }
            let PairOfLists { preferred, available } = map.next_value()?;
            entries.push((location, Priorities { preferred, available }));
        }
        entries.sort_by_cached_key(|(location, _)| in_order(location));
        match entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(pair) => Err(A::Error::custom(format!("location {:?} is there twice", pair[0].0))),
            None => Ok(PriorityMatrix { entries }),
        }
    }
}

/// What is said of a location: an array of exactly two.
struct PairOfLists {
    preferred: Vec<String>,
    available: Vec<String>,
}

impl<'de> Deserialize<'de> for PairOfLists {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairVisitor;

        impl<'de> Visitor<'de> for PairVisitor {
            type Value = PairOfLists;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of two lists of NICs, preferred and available")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<PairOfLists, A::Error> {
                let [preferred, available] = {
                    let mut list = |index| match pair.next_element()? {
                        Some(Names(names)) => Ok(names),
                        None => Err(A::Error::invalid_length(index, &self)),
                    };
                    [list(0)?, list(1)?]
                };
                match pair.next_element::<serde::de::IgnoredAny>()? {
                    None => Ok(PairOfLists { preferred, available }),
                    Some(_) => Err(A::Error::invalid_length(3, &self)),
                }
            }
        }

        deserializer.deserialize_seq(PairVisitor)
    }
}

/// A list of names of NICs.
struct Names(Vec<String>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NamesVisitor;

        impl<'de> Visitor<'de> for NamesVisitor {
            type Value = Names;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of names of NICs")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Names, A::Error> {
                let mut names = Vec::new();
                while let Some(Name(name)) = list.next_element()? {
                    if names.len() == DEVICES_MAX {
                        let what = format!("a list has more than {DEVICES_MAX} NICs");
                        return Err(A::Error::custom(what));
                    }
                    names.push(name);
                }
                Ok(Names(names))
            }
        }

        deserializer.deserialize_seq(NamesVisitor)
    }
}

/// The name of a NIC or of a location.
struct Name(String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;

        impl Visitor<'_> for NameVisitor {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a name of 1 to {NAME_MAX} bytes")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Name, E> {
                match name.len() {
                    1..=NAME_MAX => Ok(Name(name.to_owned())),
                    length => Err(E::invalid_length(length, &self)),
                }
            }
        }

        deserializer.deserialize_str(NameVisitor)
    }
}
