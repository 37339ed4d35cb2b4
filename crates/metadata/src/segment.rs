//! Segment descriptors: what a segment offers to its peers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use self::read::{null_is_default, one_or_none, priorities};
use crate::{Gid, limits, protocols};

mod read;
#[cfg(test)]
mod tests;

/// The most devices that a descriptor may list.
pub const MAX_DEVICES: usize = 256;

/// The most buffers that a descriptor may list.
pub const MAX_BUFFERS: usize = 65_536;

/// The protocol of segments that are files.
pub const NVMEOF: &str = "nvmeof";

/// So many characters of a name are told in errors.
const MAX_TOLD: usize = 80;

/// The most servers for which a descriptor says where they have mapped a file.
const MAX_MAPPED: usize = 4096;

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
}
