//! Descriptors of several protocols, as Mooncake's multi-protocol builds write them: `protocol` is an
//! array, and memory is in the list of buffers once for each protocol that reaches it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use serde::de::{Error, SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serializer};

use crate::{BufferDesc, MAX_BUFFERS};

/// Between protocols, in memory.
const SEPARATOR: char = ',';

/// The most protocols that a descriptor may name.
const MAX_PROTOCOLS: usize = 16;

/// Whether a protocol is one of these.
pub(crate) fn has(protocols: &str, name: &str) -> bool {
    protocols.split(SEPARATOR).any(|protocol| protocol == name)
}

/// Whether there is more than one.
pub(crate) fn are_several(protocols: &str) -> bool {
    protocols.contains(SEPARATOR)
}

/// Whether one of them has no name.
pub(crate) fn lacks_name(protocols: &str) -> bool {
    protocols.split(SEPARATOR).any(str::is_empty)
}

/// Reads one protocol, or an array of them.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    struct OneOrMore;

    impl<'de> Visitor<'de> for OneOrMore {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a protocol, or an array of protocols")
        }

        fn visit_unit<E: Error>(self) -> Result<String, E> {
            Ok(String::new())
        }

        fn visit_str<E: Error>(self, one: &str) -> Result<String, E> {
            match one.contains(SEPARATOR) {
                true => Err(E::custom("a protocol has no comma in its name")),
                false => Ok(one.to_owned()),
            }
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<String, A::Error> {
            let mut protocols: Vec<String> = Vec::new();
            while let Some(protocol) = array.next_element::<String>()? {
                if protocols.len() == MAX_PROTOCOLS {
                    return Err(A::Error::custom("there are too many protocols"));
                }
                protocols.push(Self.visit_str(&protocol)?);
            }
            Ok(protocols.join(","))
        }
    }

    deserializer.deserialize_any(OneOrMore)
}

/// Writes one protocol as a string, several as an array.
pub(crate) fn serialize<S: Serializer>(protocols: &str, serializer: S) -> Result<S::Ok, S::Error> {
    if !are_several(protocols) {
        return serializer.serialize_str(protocols);
    }
    let mut array = serializer.serialize_seq(None)?;
    protocols.split(SEPARATOR).try_for_each(|protocol| array.serialize_element(protocol))?;
    array.end()
}

/// Buffers of which one is made of those that are the same memory, with the keys of all its protocols. Buffers that have
/// no address, as those of CXL devices, are left out, and those that are too many are counted.
#[derive(Default)]
pub(crate) struct Merged {
    buffers: Vec<BufferDesc>,
    /// Where each is, by its address and length: nowhere, if it is one too many.
    places: HashMap<(u64, u64), usize>,
    left_out: usize,
}

impl Merged {
    /// The buffers, and how many more there are. Of the latter so many are told from each other as there may be buffers;
    /// each further one counts as often as it is listed.
    pub(crate) fn into_parts(self) -> (Vec<BufferDesc>, usize) {
        (self.buffers, self.left_out)
    }

    fn add(&mut self, buffer: BufferDesc) {
        if buffer.addr == 0 && buffer.protocol.is_some() {
            return;
        }
        let known = self.places.len();
        match self.places.entry((buffer.addr, buffer.length)) {
            Entry::Occupied(place) => {
                if let Some(same) = self.buffers.get_mut(*place.get()) {
                    merge_into(same, buffer);
                }
            }
            Entry::Vacant(place) if known < MAX_BUFFERS => {
                place.insert(self.buffers.len());
                self.buffers.push(buffer);
            }
            Entry::Vacant(place) => {
                self.left_out += 1;
                if known < 2 * MAX_BUFFERS {
                    place.insert(usize::MAX);
                }
            }
        }
    }
}

impl FromIterator<BufferDesc> for Merged {
    fn from_iter<I: IntoIterator<Item = BufferDesc>>(buffers: I) -> Self {
        let mut merged = Self::default();
        buffers.into_iter().for_each(|buffer| merged.add(buffer));
        merged
    }
}

impl<'de> Deserialize<'de> for Merged {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;

        impl<'de> Visitor<'de> for List {
            type Value = Merged;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a sequence")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merged, A::Error> {
                let mut merged = Merged::default();
                while let Some(buffer) = list.next_element()? {
                    merged.add(buffer);
                }
                Ok(merged)
            }
        }

        deserializer.deserialize_seq(List)
    }
}

fn merge_into(buffer: &mut BufferDesc, other: BufferDesc) {
    // The name of a buffer with keys is its location; TCP's is that of the segment.
    if buffer.rkey.is_empty() && !other.rkey.is_empty() {
        (buffer.name, buffer.rkey, buffer.lkey) = (other.name, other.rkey, other.lkey);
        buffer.part_of = buffer.part_of.or(other.part_of);
    }
    buffer.shm_key = buffer.shm_key.or(other.shm_key);
    if let (Some(protocols), Some(more)) = (&mut buffer.protocol, other.protocol) {
        for protocol in more.split(SEPARATOR) {
            if !has(protocols, protocol) && protocols.split(SEPARATOR).count() < MAX_PROTOCOLS {
                protocols.push(SEPARATOR);
                protocols.push_str(protocol);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SegmentDesc;

    const TWO: &str = r#"{"name":"a","protocol":["tcp","rdma"],"tcp_data_port":5,
        "devices":[{"name":"d","lid":0,"gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:7f:00:00:01"}],
        "buffers":[
            {"name":"a","protocol":"tcp","addr":4096,"length":10},
            {"name":"c","protocol":"cxl","offset":7,"length":10},
            {"name":"cpu:0","protocol":"rdma","addr":4096,"length":10,"rkey":[1],"lkey":[2]},
            {"name":"a","protocol":"tcp","addr":8192,"length":10}]}"#;

    #[test]
    fn memory_of_several_protocols_is_one_buffer() {
        let descriptor = SegmentDesc::from_json(TWO.as_bytes()).unwrap();
        assert!(descriptor.speaks("tcp") && descriptor.speaks("rdma"));
        assert!(!descriptor.speaks("shm") && !descriptor.speaks("tcp,rdma"));
        let [both, one] = &descriptor.buffers[..] else { panic!("{descriptor:?}") };
        assert_eq!((both.name.as_str(), both.addr), ("cpu:0", 4096));
        assert_eq!((&both.rkey[..], &both.lkey[..]), (&[1][..], &[2][..]));
        assert_eq!(both.protocol.as_deref(), Some("tcp,rdma"));
        assert_eq!((one.addr, one.protocol.as_deref()), (8192, Some("tcp")));
    }

    /// `count` pieces of memory, for each protocol once.
    fn listed(count: usize) -> Vec<BufferDesc> {
        let of = |protocol: &str, keys: &[u32]| BufferDesc {
            name: "n".to_owned(),
            protocol: Some(protocol.to_owned()),
            rkey: keys.to_vec(),
            lkey: keys.to_vec(),
            length: 1,
            ..BufferDesc::default()
        };
        let all = [of("tcp", &[]), of("rdma", &[1])];
        let at = |(one, address): (&BufferDesc, u64)| BufferDesc { addr: address, ..one.clone() };
        all.iter().flat_map(|one| (1..=count as u64).map(move |it| (one, it))).map(at).collect()
    }

    #[test]
    fn as_much_memory_of_several_protocols_as_of_one_is_kept() {
        let mut descriptor = SegmentDesc::from_json(TWO.as_bytes()).unwrap();
        let both =
            |it: &BufferDesc| it.protocol.as_deref() == Some("tcp,rdma") && it.rkey.len() == 1;
        for (count, left_out) in [(MAX_BUFFERS, 0), (MAX_BUFFERS + 3, 3)] {
            descriptor.buffers = listed(count);
            let read = SegmentDesc::from_json(&descriptor.to_json()).unwrap();
            assert_eq!((read.buffers.len(), read.buffers_left_out), (MAX_BUFFERS, left_out));
            assert!(read.buffers.iter().all(both), "{count}");
            assert_eq!(read.buffers[MAX_BUFFERS - 1].addr, MAX_BUFFERS as u64);
        }
    }

    #[test]
    fn a_buffer_has_no_more_protocols_than_a_descriptor() {
        let mut descriptor = SegmentDesc::from_json(TWO.as_bytes()).unwrap();
        let mut buffers = listed(1);
        for number in 0..100 {
            let protocol = Some(format!("tcp{SEPARATOR}{number}"));
            buffers.push(BufferDesc { protocol, ..buffers[0].clone() });
        }
        descriptor.buffers = buffers;
        let read = SegmentDesc::from_json(&descriptor.to_json()).unwrap();
        let [one] = &read.buffers[..] else { panic!("{} buffers", read.buffers.len()) };
        let protocols: Vec<_> = one.protocol.as_deref().unwrap().split(SEPARATOR).collect();
        assert_eq!((&protocols[..3], protocols.len()), (&["tcp", "rdma", "0"][..], MAX_PROTOCOLS));
    }

    #[test]
    fn several_protocols_are_written_as_an_array() {
        let descriptor = SegmentDesc::from_json(TWO.as_bytes()).unwrap();
        let text = String::from_utf8(descriptor.to_json()).unwrap();
        assert!(text.contains(r#""protocol":["tcp","rdma"]"#), "{text}");
        assert_eq!(SegmentDesc::from_json(text.as_bytes()).unwrap(), descriptor);
        let one = SegmentDesc::from_json(br#"{"name":"a","protocol":["tcp"]}"#).unwrap();
        assert!(String::from_utf8(one.to_json()).unwrap().contains(r#""protocol":"tcp""#));
    }

    #[test]
    fn protocols_that_are_none() {
        let many = format!("[{}\"x\"]", "\"x\",".repeat(16));
        for protocol in [r#""""#, "[]", r#"["tcp",""]"#, r#""a,b""#, "[1]", "{}", "null", &many] {
            let text = format!(r#"{{"name":"a","protocol":{protocol}}}"#);
            assert!(SegmentDesc::from_json(text.as_bytes()).is_err(), "{protocol}");
        }
    }
}
