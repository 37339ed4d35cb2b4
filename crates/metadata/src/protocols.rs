//! Descriptors of several protocols, as Mooncake's multi-protocol builds write them: `protocol` is an
//! array, and memory is in the list of buffers once for each protocol that reaches it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use serde::de::{Error, SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserializer, Serializer};

use crate::BufferDesc;

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

/// Makes one buffer of those that are the same memory, with the keys of all its protocols. Buffers that have
/// no address, as those of CXL devices, are left out.
pub(crate) fn merge(buffers: &mut Vec<BufferDesc>) {
    let mut places: HashMap<(u64, u64), usize> = HashMap::with_capacity(buffers.len());
    let mut merged: Vec<BufferDesc> = Vec::with_capacity(buffers.len());
    for buffer in buffers.drain(..) {
        if buffer.addr == 0 && buffer.protocol.is_some() {
            continue;
        }
        match places.entry((buffer.addr, buffer.length)) {
            Entry::Vacant(place) => {
                place.insert(merged.len());
                merged.push(buffer);
            }
            Entry::Occupied(place) => merge_into(&mut merged[*place.get()], buffer),
        }
    }
    *buffers = merged;
}

fn merge_into(buffer: &mut BufferDesc, other: BufferDesc) {
    // The name of a buffer with keys is its location; TCP's is that of the segment.
    if buffer.rkey.is_empty() && !other.rkey.is_empty() {
        (buffer.name, buffer.rkey, buffer.lkey) = (other.name, other.rkey, other.lkey);
        buffer.part_of = buffer.part_of.or(other.part_of);
    }
    buffer.shm_key = buffer.shm_key.or(other.shm_key);
    if let (Some(protocols), Some(more)) = (&mut buffer.protocol, other.protocol)
        && !has(protocols, &more)
    {
        protocols.push(SEPARATOR);
        protocols.push_str(&more);
    }
}

#[cfg(test)]
mod tests {
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
