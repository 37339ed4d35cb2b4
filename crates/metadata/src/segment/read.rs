//! How a text becomes a descriptor: what of it is refused, and which buffers are marked as of no use.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use super::{
    BUFFERS_READ, BufferDesc, DescriptorError, DeviceDesc, MAX_BUFFERS, MAX_DEVICES, MAX_MAPPED,
    MAX_TOLD, NO_LENGTH, NO_PLACE, NVMEOF, PriorityMatrix, SegmentDesc,
};
use crate::limits::{self, AtMost};
use crate::protocols::{self, Merged};

/// The longest name of a device, in bytes.
const MAX_DEVICE_NAME: usize = 255;

/// The longest name of a socket in the abstract namespace (unix(7)), without the zero in front.
const MAX_SOCKET: usize = 107;

/// The longest path of a file, as Linux has it.
const MAX_PATH: usize = 4095;

/// The most locations of [`PriorityMatrix`] that are read: as many as a matrix may have.
const MAX_LOCATIONS: usize = 2048;

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

impl BufferDesc {
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
pub(super) fn priorities<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<PriorityMatrix, D::Error> {
    type Names = AtMost<String, MAX_DEVICES>;
    let read = limits::map::<_, (Names, Names), MAX_LOCATIONS>(deserializer)?;
    let names = |(preferred, others): (Names, Names)| (preferred.0, others.0);
    Ok(read.into_iter().map(|(location, it)| (location, names(it))).collect())
}

/// The protocols of a buffer, if it says them.
pub(super) mod one_or_none {
    use serde::{Deserializer, Serializer};

    use crate::protocols;

    pub(in crate::segment) fn serialize<S: Serializer>(
        it: &Option<String>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        protocols::serialize(it.as_deref().unwrap_or_default(), serializer)
    }

    pub(in crate::segment) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<String>, D::Error> {
        Ok(Some(protocols::deserialize(deserializer)?).filter(|it| !it.is_empty()))
    }
}

/// Peers write `null` for what they have not set.
pub(super) fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
