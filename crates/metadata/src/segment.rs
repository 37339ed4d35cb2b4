//! Segment descriptors: what a segment offers to its peers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU64;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

use crate::limits::{self, AtMost};
use crate::protocols::Merged;
use crate::{Gid, protocols};

/// The most devices that a descriptor may list.
pub const MAX_DEVICES: usize = 256;

/// The most buffers that a descriptor may list.
pub const MAX_BUFFERS: usize = 65_536;

/// The longest name of a device, in bytes.
const MAX_DEVICE_NAME: usize = 255;

/// The longest name of a socket in the abstract namespace (unix(7)), without the zero in front.
const MAX_SOCKET: usize = 107;

/// The protocol of segments that are files.
pub const NVMEOF: &str = "nvmeof";

/// The longest path of a file, as Linux has it.
const MAX_PATH: usize = 4095;

/// So many characters of a name are told in errors.
const MAX_TOLD: usize = 80;

/// The most servers for which a descriptor says where they have mapped a file.
const MAX_MAPPED: usize = 4096;

/// The most locations of [`PriorityMatrix`] that are read: as many as a matrix may have.
const MAX_LOCATIONS: usize = 2048;

/// What is wrong with a file of which a descriptor says no length, and with those after it.
const NO_LENGTH: &str = "has no length, so that nothing has a place after it";
const NO_PLACE: &str = "comes after a file without a length, so that its offset is not known";

/// So much is read of what may not be longer than the limit: with one more it shows that it is.
const DEVICES_READ: usize = MAX_DEVICES + 1;
const BUFFERS_READ: usize = MAX_BUFFERS + 1;
const MAPPED_READ: usize = MAX_MAPPED + 1;

/// For each location (`cpu:0`, `cuda:1`) the names of the preferred devices and of those that
/// also work.
pub type PriorityMatrix = BTreeMap<String, (Vec<String>, Vec<String>)>;

/// A segment's descriptor, in the JSON of Mooncake: `mooncake/ram/<name>` in a store, and the reply
/// to a metadata request.
///
/// Readers ignore keys that they do not know and take missing ones as empty; what is there must
/// hold together ([`SegmentDesc::from_json`]). A buffer that does not is marked ([`BufferDesc::fault`]), and the others
/// are used.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct SegmentDesc {
    /// The segment's name. Peer to peer it is where its process answers: `host:port`.
    #[serde(default, deserialize_with = "null_is_default")]
    pub name: String,
    /// How its buffers are reached: `rdma`; with commas between several, which are an array in JSON.
    #[serde(default, with = "protocols")]
    pub protocol: String,
    /// Its RDMA devices.
    #[serde(default, deserialize_with = "limits::list::<_, _, DEVICES_READ>")]
    pub devices: Vec<DeviceDesc>,
    /// Its memory.
    #[serde(default, deserialize_with = "limits::list::<_, _, BUFFERS_READ>")]
    pub buffers: Vec<BufferDesc>,
    /// How many more buffers the text has that was read. They are left out: there may be [`MAX_BUFFERS`].
    #[serde(skip)]
    pub buffers_left_out: usize,
    /// Which devices are near to which memory.
    #[serde(default, deserialize_with = "priorities")]
    pub priority_matrix: PriorityMatrix,
    /// How processes on its host share its memory; Mooncake does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shm: Option<SharedMemoryDesc>,
    /// Where its process reads and writes files for others; Mooncake does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_target: Option<FileTargetDesc>,
    /// The host of its TCP data port, for whom the segment's name does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp_data_host: Option<String>,
    /// Where its process takes requests over TCP for its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp_data_port: Option<u16>,
    /// The framing of Mooncake that is understood there: 1, or 2, which acknowledges WRITEs. Without, 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp_proto_version: Option<u32>,
    /// The version of the framing with numbered messages that is understood there too; Mooncake does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp_message_version: Option<u32>,
    /// In place of [`SegmentDesc::tcp_data_port`], where callers must prove first that they have its token; Mooncake
    /// does not say, and finds no port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp_token_port: Option<u16>,
    /// The same, where those only are served who prove by a certificate who they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp_tls_port: Option<u16>,
    /// Where its process answers besides, at the addresses of its devices: for who is cut off from the one that its
    /// name leads to. Mooncake does not say.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "limits::list::<_, _, DEVICES_READ>"
    )]
    pub control_addresses: Vec<SocketAddr>,
    /// Which start of its process this is, as in the handshake; Mooncake does not say. Addresses
    /// and keys mean nothing to another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<u64>,
    /// When it was written, for people.
    #[serde(default, deserialize_with = "null_is_default")]
    pub timestamp: String,
}

/// Where a segment's process lets others at its memory.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct SharedMemoryDesc {
    /// The kernel's random number of the start of the machine.
    pub boot_id: String,
    /// The inode of the process's PID namespace.
    pub pid_namespace: u64,
    /// The inode of its network namespace.
    pub network_namespace: u64,
    /// The name of its socket in the abstract namespace, without the zero in front.
    pub socket: String,
}

/// Where a process reads and writes files for others.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct FileTargetDesc {
    /// Its host name or address, for whom the segment's name does not tell.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Whether callers must prove there that they have its token.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub token: bool,
    /// Whether TLS is spoken there, and callers must prove by a certificate who they are.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls: bool,
}

/// A device of a segment.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct DeviceDesc {
    /// Its name, unique in the segment.
    #[serde(default)]
    pub name: String,
    /// Its local identifier in an InfiniBand subnet; 0 for RoCE.
    #[serde(default)]
    pub lid: u16,
    /// Its global identifier: for RoCEv2, its IP address.
    pub gid: Gid,
}

/// A buffer of a segment.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct BufferDesc {
    /// The location of its memory: `cpu:0`.
    #[serde(default)]
    pub name: String,
    /// Virtual address of its first byte, in its process.
    #[serde(default)]
    pub addr: u64,
    /// Bytes.
    #[serde(default)]
    pub length: u64,
    /// Where the segment has several protocols, those that reach it, as the segment's.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "one_or_none")]
    pub protocol: Option<String>,
    /// Its remote keys, one for each device; none when it is for local use only.
    #[serde(default, deserialize_with = "limits::list::<_, _, DEVICES_READ>")]
    pub rkey: Vec<u32>,
    /// Its local keys, one for each device.
    #[serde(default, deserialize_with = "limits::list::<_, _, DEVICES_READ>")]
    pub lkey: Vec<u32>,
    /// Its key for processes on the same host ([`SegmentDesc::shm`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shm_key: Option<u64>,
    /// Of what it is a part, where devices have that as several regions; Mooncake does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<WholeDesc>,
    /// Where its process has the file, for people. `addr` is the offset of its first byte in the segment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_path: Option<String>,
    /// Where other servers have mapped the file: paths by the names of these.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "limits::map::<_, _, MAPPED_READ>"
    )]
    pub local_path_map: BTreeMap<String, String>,
    /// Who knows this may ask the segment's process to read and write the file ([`FileKey`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_key: Option<FileKey>,
    /// Whether the file is offered for reading only, also to servers that have mapped it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub file_read_only: bool,
    /// What is wrong with it, if anything: then it is not used. Found when a descriptor is read, and no part of its text.
    #[serde(skip)]
    pub fault: Option<&'static str>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// A piece of memory that is longer than a region of a device can be. It is a buffer for each region, or
/// more; requests may go across them.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct WholeDesc {
    /// Virtual address of its first byte.
    pub addr: u64,
    /// Bytes of each region but the last.
    pub region_length: NonZeroU64,
}

/// What opens a file at the process that has it: 32 hexadecimal digits, drawn for each registration.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct FileKey(pub u128);

impl From<FileKey> for String {
    fn from(key: FileKey) -> Self {
        format!("{:032x}", key.0)
    }
}

impl TryFrom<String> for FileKey {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let key = u128::from_str_radix(&text, 16).ok().filter(|_| digits);
        key.map(Self).ok_or("a file's key has 32 hexadecimal digits")
    }
}

impl BufferDesc {
    /// Whether all of `length` bytes from `address` on lie in the buffer.
    pub fn contains(&self, address: u64, length: u64) -> bool {
        address
            .checked_sub(self.addr)
            .is_some_and(|offset| offset.checked_add(length).is_some_and(|end| end <= self.length))
    }

    /// What is wrong with it in a segment of this protocol, with so many devices.
    fn find_fault(&self, protocol: &str, devices: usize) -> Option<&'static str> {
        if self.name.is_empty() {
            Some("has no name")
        } else if let Some(what) = self.file_fault(protocol) {
            Some(what)
        } else if self.addr == 0 && protocol != NVMEOF {
            Some("has address 0")
        } else if self.length == 0 {
            Some("is empty")
        } else if self.addr.checked_add(self.length).is_none() {
            Some("exceeds the address space")
        } else if !self.rkey.is_empty() && self.rkey.len() != devices {
            Some("has not one remote key for each device")
        } else if !self.rkey.is_empty() && self.rkey.len() != self.lkey.len() {
            Some("has not as many local as remote keys")
        } else {
            None
        }
    }

    /// What is wrong with it as a file, if anything.
    fn file_fault(&self, protocol: &str) -> Option<&'static str> {
        let is_path = |path: &String| (1..=MAX_PATH).contains(&path.len()) && !path.contains('\0');
        if protocol != NVMEOF {
            return self.file_path.is_some().then_some("is a file, which the protocol has not");
        }
        if !self.file_path.as_ref().is_some_and(is_path) {
            return Some("has no path of a file");
        }
        if self.local_path_map.len() > MAX_MAPPED || !self.local_path_map.values().all(is_path) {
            return Some("is mapped to what is no path, or at too many servers");
        }
        None
    }
}

/// Why a descriptor was refused.
#[derive(Debug, Error)]
pub enum DescriptorError {
    /// Not JSON, or not of this shape.
    #[error("the segment descriptor is not valid JSON of that form: {0}")]
    Json(#[from] serde_json::Error),
    /// It has no name, or something else than one of its buffers makes no sense.
    #[error("the segment descriptor of {segment:?} is corrupt: {what}")]
    Corrupt {
        /// The name in the descriptor.
        segment: String,
        /// What is wrong.
        what: String,
    },
}

impl SegmentDesc {
    /// Parses and validates a descriptor. Of buffers that make no sense, [`BufferDesc::fault`] says what is wrong; those
    /// beyond [`MAX_BUFFERS`] are left out.
    pub fn from_json(text: &[u8]) -> Result<Self, DescriptorError> {
        let mut descriptor: Self = serde_json::from_slice(text)?;
        if let Some(what) = descriptor.fault() {
            let segment = descriptor.name.chars().take(MAX_TOLD).collect();
            return Err(DescriptorError::Corrupt { segment, what });
        }
        descriptor.place_files(text)?;
        descriptor.limit_buffers(text)?;
        descriptor.mark_buffers();
        Ok(descriptor)
    }

    /// The JSON text.
    pub fn to_json(&self) -> Vec<u8> {
        // Strings, numbers, lists and maps with string keys: nothing that JSON cannot hold.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Whether this is one of its protocols.
    pub fn speaks(&self, protocol: &str) -> bool {
        protocols::has(&self.protocol, protocol)
    }

    /// The buffer that holds `length` bytes from `address` on.
    pub fn buffer_with(&self, address: u64, length: u64) -> Option<&BufferDesc> {
        let holds = |it: &&BufferDesc| it.fault.is_none() && it.contains(address, length);
        self.buffers.iter().find(holds)
    }

    /// Which buffer cannot be used and why, if so with the one of this index.
    pub fn unusable(&self, index: usize) -> Option<String> {
        let buffer = self.buffers.get(index)?;
        let what = buffer.fault?;
        let name: String = buffer.name.chars().take(MAX_TOLD).collect();
        let (length, address) = (buffer.length, buffer.addr);
        Some(format!(
            "buffer {index} ({name:?}, {length} bytes at {address:#x}) cannot be used, since it {what}"
        ))
    }

    /// The same of a buffer that would hold the byte at this address.
    pub fn unusable_at(&self, address: u64) -> Option<String> {
        let holds = |it: &BufferDesc| {
            let offset = address.checked_sub(it.addr).filter(|_| it.fault.is_some());
            let unbounded = it.fault == Some(NO_LENGTH);
            offset.is_some_and(|offset| offset == 0 || offset < it.length || unbounded)
        };
        self.unusable(self.buffers.iter().position(holds)?)
    }

    /// Makes one buffer of those that are the same memory, if there are several protocols, and leaves out those that are
    /// too many. If the text has more than were read of it, it is looked at once more.
    fn limit_buffers(&mut self, text: &[u8]) -> Result<(), serde_json::Error> {
        let too_many = self.buffers.len() > MAX_BUFFERS;
        if protocols::are_several(&self.protocol) {
            let read = std::mem::take(&mut self.buffers);
            let merged = if too_many {
                drop(read);
                serde_json::from_slice::<Listed<Merged>>(text)?.buffers
            } else {
                read.into_iter().collect()
            };
            (self.buffers, self.buffers_left_out) = merged.into_parts();
        } else if too_many {
            self.buffers.truncate(MAX_BUFFERS);
            self.buffers.shrink_to_fit();
            // Nothing is kept of them.
            let all = serde_json::from_slice::<Listed<Vec<IgnoredAny>>>(text)?.buffers;
            self.buffers_left_out = all.len() - MAX_BUFFERS;
        }
        Ok(())
    }

    /// Says of each buffer what is wrong with it.
    fn mark_buffers(&mut self) {
        for buffer in &mut self.buffers {
            let found = || buffer.find_fault(&self.protocol, self.devices.len());
            buffer.fault = buffer.fault.or_else(found);
        }
    }

    /// The files of a segment follow each other: Mooncake says no more than their lengths. Where one is missing, nobody
    /// knows the offsets of what comes after it.
    fn place_files(&mut self, text: &[u8]) -> Result<(), serde_json::Error> {
        if self.protocol != NVMEOF {
            return Ok(());
        }
        // A length that is said to be 0 moves nothing.
        let unknown = match self.buffers.iter().any(|it| it.length == 0) {
            true => first_without_length(text)?,
            false => None,
        };
        let mut next = 0_u64;
        for (index, buffer) in self.buffers.iter_mut().enumerate() {
            buffer.fault = unknown
                .filter(|&unknown| unknown <= index)
                .map(|unknown| if unknown == index { NO_LENGTH } else { NO_PLACE });
            if buffer.name.is_empty() {
                buffer.name = buffer.file_path.clone().unwrap_or_default();
            }
            buffer.addr = next;
            // Too long ones are found to exceed the address space.
            next = next.saturating_add(buffer.length);
        }
        Ok(())
    }

    /// What does not hold together, if anything, but for its buffers.
    fn fault(&self) -> Option<String> {
        if self.name.is_empty() {
            return Some("it has no name".to_owned());
        }
        if protocols::lacks_name(&self.protocol) {
            return Some("it names no protocol".to_owned());
        }
        if self.devices.len() > MAX_DEVICES {
            return Some(format!("it has more than {MAX_DEVICES} devices"));
        }
        if self.control_addresses.len() > MAX_DEVICES {
            return Some(format!("it has more than {MAX_DEVICES} addresses where it answers"));
        }
        if let Some(index) = self.devices.iter().position(|device| device.name.is_empty()) {
            return Some(format!("device {index} has no name"));
        }
        let is_long = |device: &DeviceDesc| device.name.len() > MAX_DEVICE_NAME;
        if let Some(index) = self.devices.iter().position(is_long) {
            let length = self.devices[index].name.len();
            return Some(format!(
                "the name of device {index} has {length} bytes, more than {MAX_DEVICE_NAME}"
            ));
        }
        if let Some(shm) = &self.shm
            && (shm.socket.is_empty() || shm.socket.len() > MAX_SOCKET || shm.socket.contains('\0'))
        {
            return Some("the name of its socket for shared memory is none".to_owned());
        }
        None
    }
}

/// What a descriptor lists as its buffers.
#[derive(Deserialize)]
struct Listed<T> {
    buffers: T,
}

/// The first buffer of which a text says no length.
fn first_without_length(text: &[u8]) -> Result<Option<usize>, serde_json::Error> {
    #[derive(Deserialize)]
    struct Length {
        length: Option<IgnoredAny>,
    }

    type Lengths = AtMost<Length, BUFFERS_READ>;
    let AtMost(lengths) = serde_json::from_slice::<Listed<Lengths>>(text)?.buffers;
    Ok(lengths.iter().position(|it| it.length.is_none()))
}

/// Reads a matrix as long as one that makes sense.
fn priorities<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PriorityMatrix, D::Error> {
    type Names = AtMost<String, MAX_DEVICES>;
    let read = limits::map::<_, (Names, Names), MAX_LOCATIONS>(deserializer)?;
    let names = |(preferred, others): (Names, Names)| (preferred.0, others.0);
    Ok(read.into_iter().map(|(location, it)| (location, names(it))).collect())
}

/// The protocols of a buffer, if it says them.
mod one_or_none {
    use serde::{Deserializer, Serializer};

    use crate::protocols;

    pub(super) fn serialize<S: Serializer>(
        it: &Option<String>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        protocols::serialize(it.as_deref().unwrap_or_default(), serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<String>, D::Error> {
        Ok(Some(protocols::deserialize(deserializer)?).filter(|it| !it.is_empty()))
    }
}

/// Peers write `null` for what they have not set.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> SegmentDesc {
        SegmentDesc {
            name: "127.0.0.1:15001".to_owned(),
            protocol: "rdma".to_owned(),
            devices: vec![DeviceDesc {
                name: "soft-127.0.0.1".to_owned(),
                lid: 0,
                gid: Gid::from_address("127.0.0.1".parse().unwrap()),
            }],
            buffers: vec![BufferDesc {
                name: "cpu:0".to_owned(),
                addr: 94_274_042_963_760,
                length: 65_536,
                rkey: vec![257],
                lkey: vec![257],
                ..BufferDesc::default()
            }],
            buffers_left_out: 0,
            priority_matrix: [(
                "cpu:0".to_owned(),
                (vec!["soft-127.0.0.1".to_owned()], Vec::new()),
            )]
            .into(),
            shm: None,
            file_target: None,
            tcp_data_host: None,
            tcp_data_port: None,
            tcp_proto_version: None,
            tcp_message_version: None,
            tcp_token_port: None,
            tcp_tls_port: None,
            control_addresses: Vec::new(),
            incarnation: None,
            timestamp: "2026-11-21 01:49:20.352931".to_owned(),
        }
    }

    const EXAMPLE: &str = r#"{"name":"127.0.0.1:15001","protocol":"rdma","devices":[{"name":"soft-127.0.0.1","lid":0,"gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:7f:00:00:01"}],"buffers":[{"name":"cpu:0","addr":94274042963760,"length":65536,"rkey":[257],"lkey":[257]}],"priority_matrix":{"cpu:0":[["soft-127.0.0.1"],[]]},"timestamp":"2026-11-21 01:49:20.352931"}"#;

    #[test]
    fn json_both_ways() {
        assert_eq!(String::from_utf8(example().to_json()).unwrap(), EXAMPLE);
        assert_eq!(SegmentDesc::from_json(EXAMPLE.as_bytes()).unwrap(), example());
    }

    #[test]
    fn the_addresses_where_it_answers_are_text_and_not_too_many() {
        let mut descriptor = example();
        descriptor.control_addresses =
            ["192.0.2.2:7001", "[2001:db8::2]:7001"].map(|it| it.parse().unwrap()).into();
        let text = descriptor.to_json();
        assert_eq!(SegmentDesc::from_json(&text).unwrap(), descriptor);
        let text = String::from_utf8(text).unwrap();
        let expected = r#""control_addresses":["192.0.2.2:7001","[2001:db8::2]:7001"]"#;
        assert!(text.contains(expected), "{text}");
        let absent = text.replace(expected, r#""control_addresses":null"#);
        assert_eq!(SegmentDesc::from_json(absent.as_bytes()).unwrap().control_addresses, []);
        descriptor.control_addresses = vec![descriptor.control_addresses[0]; MAX_DEVICES + 1];
        let error = SegmentDesc::from_json(&descriptor.to_json()).unwrap_err().to_string();
        assert!(error.contains("more than 256 addresses where it answers"), "{error}");
    }

    #[test]
    fn shared_memory_has_keys_of_its_own() {
        let mut descriptor = example();
        descriptor.buffers[0].shm_key = Some(u64::MAX);
        descriptor.shm = Some(SharedMemoryDesc {
            boot_id: "b".to_owned(),
            pid_namespace: 1,
            network_namespace: 2,
            socket: "s".to_owned(),
        });
        assert_eq!(SegmentDesc::from_json(&descriptor.to_json()).unwrap(), descriptor);
        for socket in [String::new(), "a\0b".to_owned(), "x".repeat(108)] {
            descriptor.shm.as_mut().unwrap().socket = socket;
            let error = SegmentDesc::from_json(&descriptor.to_json()).unwrap_err().to_string();
            assert!(error.contains("socket for shared memory"), "{error}");
        }
    }

    /// As an engine of Mooncake 0.3.13 says it, word for word.
    const TCP: &str = r#"{"buffers":[{"addr":94274042963760,"length":65536,"name":"nodeA:12345"}],"name":"nodeA:12345","protocol":"tcp","rdma_server_name":"","tcp_data_host":"192.0.2.2","tcp_data_port":15270,"tcp_proto_version":2,"timestamp":"2026-11-21 01:49:20.352931"}"#;

    #[test]
    fn a_tcp_data_port() {
        let descriptor = SegmentDesc::from_json(TCP.as_bytes()).unwrap();
        assert_eq!(descriptor.tcp_data_host.as_deref(), Some("192.0.2.2"));
        assert_eq!(
            (descriptor.tcp_data_port, descriptor.tcp_proto_version),
            (Some(15270), Some(2))
        );
        assert_eq!(descriptor.tcp_message_version, None);
        let ours = SegmentDesc { tcp_message_version: Some(1), ..descriptor };
        let text = String::from_utf8(ours.to_json()).unwrap();
        assert!(text.contains(r#""tcp_message_version":1"#), "{text}");
        assert_eq!(SegmentDesc::from_json(text.as_bytes()).unwrap(), ours);
    }

    /// As Mooncake's stores have it: no addresses, no names, no keys.
    const FILES: &str = r#"{"name":"nvmeof/a:1/f","protocol":"nvmeof","buffers":[{"length":4096,"file_path":"/data/f","local_path_map":{"b:2":"/mnt/f"}},{"length":100,"file_path":"/data/g","local_path_map":null}]}"#;

    #[test]
    fn files_follow_each_other() {
        let descriptor = SegmentDesc::from_json(FILES.as_bytes()).unwrap();
        let [first, second] = &descriptor.buffers[..] else { panic!("{descriptor:?}") };
        assert_eq!((first.addr, first.length, first.name.as_str()), (0, 4096, "/data/f"));
        assert_eq!((second.addr, second.length), (4096, 100));
        assert_eq!(first.local_path_map["b:2"], "/mnt/f");
        let again = SegmentDesc::from_json(&descriptor.to_json()).unwrap();
        assert_eq!(again, descriptor);
    }

    #[test]
    fn a_file_has_a_key_and_a_target() {
        let mut descriptor = SegmentDesc::from_json(FILES.as_bytes()).unwrap();
        descriptor.buffers[0].file_key = Some(FileKey(7));
        let place = FileTargetDesc { host: "a".to_owned(), port: 9, ..Default::default() };
        descriptor.file_target = Some(place.clone());
        let text = String::from_utf8(descriptor.to_json()).unwrap();
        assert!(text.contains(r#""file_target":{"host":"a","port":9}"#), "{text}");
        assert!(text.contains(r#""file_key":"00000000000000000000000000000007""#), "{text}");
        assert_eq!(SegmentDesc::from_json(text.as_bytes()).unwrap(), descriptor);
        let guarded = FileTargetDesc { token: true, tls: true, ..place };
        let guarded = SegmentDesc { file_target: Some(guarded), ..descriptor };
        assert_eq!(SegmentDesc::from_json(&guarded.to_json()).unwrap(), guarded);
        for key in ["", "7", "+0000000000000000000000000000007"] {
            let text = text.replace("00000000000000000000000000000007", key);
            assert!(SegmentDesc::from_json(text.as_bytes()).is_err(), "{key}");
        }
    }

    #[test]
    fn files_that_are_none() {
        for (from, to, what) in [
            (r#""file_path":"/data/g""#, r#""file_path":"""#, "1: has no name"),
            (r#""file_path":"/data/f""#, r#""name":"x""#, "0: has no path of a file"),
            ("/mnt/f", r"a\u0000b", "0: is mapped to what is no path, or at too many servers"),
            ("4096", "0", "0: is empty"),
            ("4096", "18446744073709551615", "1: exceeds the address space"),
            (r#""nvmeof","#, r#""tcp","#, "0: is a file, which the protocol has not"),
        ] {
            let text = FILES.replace(from, to);
            let text = text.replace(
                r#""protocol":"tcp","buffers":[{"#,
                r#""protocol":"tcp","buffers":[{"name":"n","#,
            );
            let descriptor = SegmentDesc::from_json(text.as_bytes()).unwrap();
            let (buffer, what) = what.split_once(": ").unwrap();
            assert_eq!(descriptor.buffers[buffer.parse::<usize>().unwrap()].fault, Some(what));
        }
    }

    /// Who goes by offsets in the segment would get another file than the one that its process means.
    #[test]
    fn after_a_file_without_a_length_no_offset_is_known() {
        let said = |lengths: &[Option<u64>]| {
            let length = |it: &Option<u64>| it.map(|it| format!(r#""length":{it},"#));
            let file = |it: &Option<u64>| {
                format!(r#"{{{}"file_path":"/f"}}"#, length(it).unwrap_or_default())
            };
            let files: Vec<_> = lengths.iter().map(file).collect();
            let files = files.join(",");
            let text = format!(r#"{{"name":"a","protocol":"nvmeof","buffers":[{files}]}}"#);
            SegmentDesc::from_json(text.as_bytes()).unwrap()
        };
        let descriptor = said(&[Some(100), None, Some(10), None]);
        let faults: Vec<_> = descriptor.buffers.iter().map(|it| it.fault).collect();
        assert_eq!(faults, [None, Some(NO_LENGTH), Some(NO_PLACE), Some(NO_PLACE)]);
        assert_eq!(descriptor.buffer_with(0, 100), Some(&descriptor.buffers[0]));
        assert_eq!(descriptor.unusable_at(99), None);
        for offset in [100, 105, 1 << 40] {
            assert_eq!(descriptor.buffer_with(offset, 1), None);
            let told = descriptor.unusable_at(offset).unwrap();
            assert!(told.starts_with("buffer 1 (") && told.ends_with(NO_LENGTH), "{told}");
        }
        // One that says that it is empty is bad, too, and moves none of the others.
        let descriptor = said(&[Some(100), Some(0), Some(10)]);
        let faults: Vec<_> = descriptor.buffers.iter().map(|it| it.fault).collect();
        assert_eq!(faults, [None, Some("is empty"), None]);
        assert_eq!(descriptor.buffer_with(105, 1), Some(&descriptor.buffers[2]));
    }

    #[test]
    fn a_descriptor_of_another_protocol_with_unknown_keys() {
        // As the Mooncake wheel 0.3.13.post1 writes it.
        let text = r#"{"buffers":[{"addr":94274042963760,"length":65536,"name":"nodeA:12345"}],"name":"nodeA:12345","protocol":"tcp","rdma_server_name":"","tcp_data_host":"192.0.2.2","tcp_data_port":15270,"tcp_proto_version":2,"timestamp":"2026-11-21 01:49:20.352931"}
"#;
        let descriptor = SegmentDesc::from_json(text.as_bytes()).unwrap();
        assert_eq!(descriptor.protocol, "tcp");
        assert_eq!(descriptor.devices, []);
        assert!(descriptor.buffers[0].rkey.is_empty());
    }

    #[test]
    fn missing_and_null_are_empty() {
        let text = br#"{"name":"a:1","protocol":"rdma","devices":null,"priority_matrix":null}"#;
        let descriptor = SegmentDesc::from_json(text).unwrap();
        assert_eq!((descriptor.devices.len(), descriptor.buffers.len()), (0, 0));
    }

    #[test]
    fn faults_are_named() {
        type Change = fn(&mut SegmentDesc);
        let refused = |change: Change| {
            let mut descriptor = example();
            change(&mut descriptor);
            SegmentDesc::from_json(&descriptor.to_json()).unwrap_err().to_string()
        };
        let cases: [(Change, &str); 5] = [
            (|d| d.name.clear(), "it has no name"),
            (|d| d.protocol.clear(), "it names no protocol"),
            (|d| d.devices[0].name.clear(), "device 0 has no name"),
            (
                |d| d.devices[0].name = "n".repeat(256),
                "the name of device 0 has 256 bytes, more than 255",
            ),
            (
                |d| d.devices = vec![d.devices[0].clone(); MAX_DEVICES + 1],
                "it has more than 256 devices",
            ),
        ];
        for (change, what) in cases {
            let error = refused(change);
            assert!(error.ends_with(what), "{error}");
        }
    }

    #[test]
    fn one_bad_buffer_leaves_the_others_usable() {
        type Change = fn(&mut BufferDesc);
        let cases: [(Change, &str); 7] = [
            (|it| it.name.clear(), "has no name"),
            (|it| it.addr = 0, "has address 0"),
            (|it| it.length = 0, "is empty"),
            (|it| it.length = u64::MAX, "exceeds the address space"),
            (|it| it.rkey.push(1), "has not one remote key for each device"),
            (|it| it.lkey.push(1), "has not as many local as remote keys"),
            (|it| it.file_path = Some("f".to_owned()), "is a file, which the protocol has not"),
        ];
        for (change, what) in cases {
            let mut written = example();
            let good = written.buffers[0].clone();
            let mut bad = BufferDesc { addr: 0x1000, length: 0x100, ..good.clone() };
            change(&mut bad);
            written.buffers = vec![good.clone(), bad.clone(), BufferDesc { addr: 1 << 20, ..good }];
            let read = SegmentDesc::from_json(&written.to_json()).unwrap();
            assert_eq!(read.buffers[1].fault, Some(what));
            assert_eq!(BufferDesc { fault: None, ..read.buffers[1].clone() }, bad);
            assert_eq!([&read.buffers[0], &read.buffers[2]], [0, 2].map(|it| &written.buffers[it]));
            // It is in its place, as nobody may take the next one for it, and is not used.
            assert_eq!(read.buffer_with(bad.addr, 1), None);
            let told = read.unusable(1).unwrap();
            assert!(told.starts_with("buffer 1 (") && told.ends_with(what), "{told}");
            assert_eq!(read.unusable_at(bad.addr), Some(told));
            assert_eq!((read.unusable(0), read.unusable(3)), (None, None));
            // The text says it to the next reader as it was said.
            assert_eq!(read.to_json(), written.to_json());
        }
    }

    #[test]
    fn buffers_beyond_the_limit_are_left_out_and_counted() {
        let mut descriptor = example();
        let one = BufferDesc { name: "c".to_owned(), addr: 1, length: 1, ..BufferDesc::default() };
        descriptor.buffers = vec![one; MAX_BUFFERS];
        let read =
            |descriptor: &SegmentDesc| SegmentDesc::from_json(&descriptor.to_json()).unwrap();
        assert_eq!(read(&descriptor), descriptor);
        descriptor.buffers.extend_from_within(..3);
        let read = read(&descriptor);
        assert_eq!((read.buffers.len(), read.buffers_left_out), (MAX_BUFFERS, 3));
        assert!(read.buffers.iter().all(|it| it.fault.is_none()));
    }

    #[test]
    fn texts_that_are_no_descriptor() {
        for text in ["", "[]", "{}", "nonsense", r#"{"name":1}"#, r#"{"name":"a","protocol":{}}"#] {
            assert!(SegmentDesc::from_json(text.as_bytes()).is_err(), "{text}");
        }
        let deep = "[".repeat(100_000);
        assert!(SegmentDesc::from_json(deep.as_bytes()).is_err());
        let gid = EXAMPLE.replace("ff:ff", "ff");
        assert!(SegmentDesc::from_json(gid.as_bytes()).unwrap_err().to_string().contains("GID"));
    }

    #[test]
    fn buffers_are_found_by_range() {
        let mut descriptor = example();
        descriptor.buffers[0].addr = 0x1000;
        descriptor.buffers[0].length = 0x100;
        for (address, length, found) in [
            (0x1000, 0x100, true),
            (0x10ff, 1, true),
            (0x1100, 0, true),
            (0x1100, 1, false),
            (0xfff, 1, false),
            (0x1001, 0x100, false),
            (0x1001, u64::MAX, false),
        ] {
            assert_eq!(descriptor.buffer_with(address, length).is_some(), found, "{address:#x}");
        }
    }
}
