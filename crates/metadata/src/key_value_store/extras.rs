//! Fields that others have added to an entry of ours. They survive when it is written again.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

/// What tells engines of one name apart.
const INCARNATION: &str = "incarnation";

/// The fields of a JSON object, by name, with the text of their values.
pub(super) type Fields = BTreeMap<String, Box<RawValue>>;

/// The fields of an entry as it is now that it did not have as it was written. None where it is no object.
pub(super) fn added(now: &[u8], written: &[u8]) -> Fields {
    let Ok(mut now) = serde_json::from_slice::<Fields>(now) else { return Fields::new() };
    let written = serde_json::from_slice::<Fields>(written).unwrap_or_default();
    now.retain(|name, _| !written.contains_key(name));
    now
}

/// Whether an entry as it is now has all that was written, however it is formatted.
pub(super) fn holds(now: &[u8], written: &[u8]) -> bool {
    let (now, written) = (values(now), values(written));
    written.iter().all(|(name, value)| now.get(name) == Some(value))
}

/// Whether both are of one engine.
pub(super) fn same_engine(now: &[u8], written: &[u8]) -> bool {
    let (now, written) = (values(now), values(written));
    now.get(INCARNATION) == written.get(INCARNATION)
}

fn values(text: &[u8]) -> serde_json::Map<String, serde_json::Value> {
    serde_json::from_slice(text).unwrap_or_default()
}

/// An object with these fields added, unless it has them or they do not fit.
pub(super) fn with(text: &[u8], extras: &Fields, limit: usize) -> Vec<u8> {
    let mut merged = text.to_vec();
    if extras.is_empty() {
        return merged;
    }
    let Ok(own) = serde_json::from_slice::<Fields>(text) else { return merged };
    if own.is_empty() || merged.pop() != Some(b'}') {
        return text.to_vec();
    }
    for (name, value) in extras.iter().filter(|(name, _)| !own.contains_key(*name)) {
        let name = serde_json::to_string(name).unwrap_or_default();
        merged.extend_from_slice(format!(",{name}:{value}").as_bytes());
    }
    merged.push(b'}');
    if merged.len() > limit {
        tracing::warn!("what others have added to an entry is lost: it does not fit any more");
        return text.to_vec();
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_have_added_is_kept_as_it_is() {
        let written = br#"{"a":1,"b":[2]}"#;
        let now = br#"{"a":7,"x\"y":{"z":[1, 2.50]},"c":18446744073709551615}"#;
        let extras = added(now, written);
        let merged = String::from_utf8(with(br#"{"a":3,"c":4}"#, &extras, 100)).unwrap();
        assert_eq!(merged, r#"{"a":3,"c":4,"x\"y":{"z":[1, 2.50]}}"#);
        // It does not fit.
        assert_eq!(with(b"{\"a\":3}", &extras, 20), b"{\"a\":3}");
    }

    #[test]
    fn what_another_has_put_there_is_not_ours() {
        let written = br#"{"incarnation":5,"a":[1,2]}"#;
        for (now, ours, same) in [
            (&br#"{ "a": [1, 2], "incarnation": 5, "more": 1 }"#[..], true, true),
            (br#"{"incarnation":5,"a":[1]}"#, false, true),
            (br#"{"incarnation":6,"a":[1,2]}"#, false, false),
            (b"garbage", false, false),
        ] {
            assert_eq!((holds(now, written), same_engine(now, written)), (ours, same));
        }
    }

    #[test]
    fn what_is_no_object_adds_nothing() {
        for text in ["", "null", "[1]", "garbage", "{\"a\":"] {
            assert!(added(text.as_bytes(), b"{}").is_empty(), "{text}");
        }
        let extras = added(b"{\"a\":1}", b"{}");
        assert_eq!(with(b"{}", &extras, 100), b"{}", "we write no empty objects");
        assert_eq!(with(b"[]", &extras, 100), b"[]");
    }
}
