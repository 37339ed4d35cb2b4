//! Lists and maps that others write: of one that is too long, no more is kept than may be, so that no text takes many
//! times its own length of memory.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Reads a list, or `null` as an empty one. Of a longer one the first elements; what follows need only be JSON.
pub(crate) fn list<'de, D, T, const MOST: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let read = Option::<AtMost<T, MOST>>::deserialize(deserializer)?;
    Ok(read.map(|AtMost(elements)| elements).unwrap_or_default())
}

/// The same of a map.
pub(crate) fn map<'de, D, T, const MOST: usize>(
    deserializer: D,
) -> Result<BTreeMap<String, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let read = Option::<MapAtMost<T, MOST>>::deserialize(deserializer)?;
    Ok(read.map(|MapAtMost(entries)| entries).unwrap_or_default())
}

/// The first elements of a list.
pub(crate) struct AtMost<T, const MOST: usize>(pub(crate) Vec<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for AtMost<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(First::<Self>(PhantomData))
    }
}

/// The first entries of a map.
struct MapAtMost<T, const MOST: usize>(BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for MapAtMost<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(First::<Self>(PhantomData))
    }
}

struct First<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for First<AtMost<T, MOST>> {
    type Value = AtMost<T, MOST>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a sequence")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut elements = Vec::new();
        while elements.len() < MOST {
            let Some(element) = list.next_element()? else { return Ok(AtMost(elements)) };
            elements.push(element);
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(AtMost(elements))
    }
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for First<MapAtMost<T, MOST>> {
    type Value = MapAtMost<T, MOST>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = BTreeMap::new();
        while entries.len() < MOST {
            let Some((key, value)) = map.next_entry()? else { return Ok(MapAtMost(entries)) };
            entries.insert(key, value);
        }
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(MapAtMost(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, Eq, PartialEq)]
    struct Both {
        #[serde(default, deserialize_with = "list::<_, _, 2>")]
        list: Vec<u8>,
        #[serde(default, deserialize_with = "map::<_, _, 2>")]
        map: BTreeMap<String, u8>,
    }

    #[test]
    fn what_is_too_much_is_not_kept_and_may_be_anything() {
        let read = |text: &str| serde_json::from_str::<Both>(text).map_err(|it| it.to_string());
        let both = |list: &[u8], map: &[(&str, u8)]| {
            let map = map.iter().map(|&(key, value)| (key.to_owned(), value)).collect();
            Ok(Both { list: list.to_vec(), map })
        };
        assert_eq!(read("{}"), both(&[], &[]));
        assert_eq!(read(r#"{"list":null,"map":null}"#), both(&[], &[]));
        assert_eq!(read(r#"{"list":[1],"map":{"a":1}}"#), both(&[1], &[("a", 1)]));
        let text = r#"{"list":[1,2,[{}],"x"],"map":{"b":1,"a":2,"c":[3],"":{}}}"#;
        assert_eq!(read(text), both(&[1, 2], &[("a", 2), ("b", 1)]));
        // Of an entry that is there twice the last one counts, as in other maps.
        assert_eq!(read(r#"{"map":{"a":1,"a":2,"b":3}}"#), both(&[], &[("a", 2), ("b", 3)]));
        for text in [r#"{"list":[1,2,}"#, r#"{"list":["x"]}"#, r#"{"map":[]}"#, r#"{"list":{}}"#] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
