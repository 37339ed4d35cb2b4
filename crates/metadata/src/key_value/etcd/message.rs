//! The JSON of etcd's gateway: fields of zero are left out, 64-bit integers are strings, and bytes are in
//! base64 (<https://protobuf.dev/programming-guides/json/>).

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize, Serializer};

/// The code of gRPC for what is not there.
pub(super) const NOT_FOUND: u32 = 5;

/// Bytes, as base64 text.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Base64(pub(super) Vec<u8>);

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64_STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        BASE64_STANDARD.decode(text).map(Self).map_err(|error| D::Error::custom(error.to_string()))
    }
}

/// A 64-bit integer, as text.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Int64(pub(super) i64);

impl Serialize for Int64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Int64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// JSON of protobuf may have either.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Text(String),
            Number(i64),
        }
        match Either::deserialize(deserializer)? {
            Either::Text(text) => text.parse().map(Self).map_err(D::Error::custom),
            Either::Number(number) => Ok(Self(number)),
        }
    }
}

#[derive(Serialize)]
pub(super) struct Authenticate<'a> {
    pub(super) name: &'a str,
    pub(super) password: &'a str,
}

#[derive(Deserialize)]
pub(super) struct Token {
    pub(super) token: String,
}

#[derive(Serialize)]
pub(super) struct Put {
    pub(super) key: Base64,
    pub(super) value: Base64,
    pub(super) lease: Int64,
}

/// Of one key: `range_end` is absent.
#[derive(Serialize)]
pub(super) struct Range {
    pub(super) key: Base64,
    pub(super) keys_only: bool,
}

/// Of the keys from one up to another, which is not among them.
#[derive(Serialize)]
pub(super) struct RangeOf {
    pub(super) key: Base64,
    pub(super) range_end: Base64,
    pub(super) limit: Int64,
}

/// A condition of a transaction.
#[derive(Serialize)]
pub(super) struct Compare {
    pub(super) key: Base64,
    pub(super) target: &'static str,
    pub(super) result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) create_revision: Option<Int64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<Base64>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::enum_variant_names, reason = "the names that the gateway knows")]
pub(super) enum RequestOperation {
    RequestRange(Range),
    RequestPut(Put),
    RequestDeleteRange(DeleteRange),
}

#[derive(Serialize)]
pub(super) struct Transaction {
    pub(super) compare: Vec<Compare>,
    pub(super) success: Vec<RequestOperation>,
    pub(super) failure: Vec<RequestOperation>,
}

#[derive(Deserialize)]
pub(super) struct TransactionReply {
    pub(super) header: Header,
    #[serde(default)]
    pub(super) succeeded: bool,
    #[serde(default)]
    pub(super) responses: Vec<ResponseOperation>,
}

#[derive(Deserialize)]
pub(super) struct Header {
    #[serde(default)]
    pub(super) revision: Int64,
}

/// The answer to an operation; nothing is known of those that are not ranges.
#[derive(Deserialize)]
pub(super) struct ResponseOperation {
    pub(super) response_range: Option<RangeReply>,
}

#[derive(Deserialize)]
pub(super) struct RangeReply {
    #[serde(default)]
    pub(super) kvs: Vec<Entry>,
}

#[derive(Deserialize)]
pub(super) struct Entry {
    pub(super) key: Base64,
    #[serde(default)]
    pub(super) value: Base64,
    #[serde(default)]
    pub(super) lease: Int64,
    #[serde(default)]
    pub(super) create_revision: Int64,
}

#[derive(Serialize)]
pub(super) struct DeleteRange {
    pub(super) key: Base64,
}

#[derive(Serialize)]
pub(super) struct LeaseGrant {
    #[serde(rename = "TTL")]
    pub(super) seconds: Int64,
}

#[derive(Deserialize)]
pub(super) struct Lease {
    #[serde(default, rename = "ID")]
    pub(super) id: Int64,
    /// Zero where there is no such lease any more.
    #[serde(default, rename = "TTL")]
    pub(super) seconds: Int64,
}

#[derive(Serialize)]
pub(super) struct LeaseKeepAlive {
    #[serde(rename = "ID")]
    pub(super) id: Int64,
}

/// The first reply of a stream.
#[derive(Deserialize)]
pub(super) struct StreamReply<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<GatewayError>,
}

/// A reply to something whose reply says nothing. It is an object with a header.
#[derive(Deserialize)]
pub(super) struct Done {
    #[expect(dead_code, reason = "only etcd's replies have one")]
    header: serde_json::Map<String, serde_json::Value>,
}

#[derive(Deserialize)]
pub(super) struct GatewayError {
    #[serde(default)]
    pub(super) code: u32,
    #[serde(default)]
    error: String,
    #[serde(default)]
    message: String,
}

impl GatewayError {
    pub(super) fn text(&self) -> &str {
        if self.message.is_empty() { &self.error } else { &self.message }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_as_etcd_documents_them() {
        let base64 = |text: &str| Base64(text.as_bytes().to_vec());
        let put = Put { key: base64("foo"), value: base64("bar"), lease: Int64(i64::MAX) };
        let json = r#"{"key":"Zm9v","value":"YmFy","lease":"9223372036854775807"}"#;
        assert_eq!(serde_json::to_string(&put).unwrap(), json);
        let grant = LeaseGrant { seconds: Int64(30) };
        assert_eq!(serde_json::to_string(&grant).unwrap(), r#"{"TTL":"30"}"#);
    }

    #[test]
    fn replies_leave_zeros_out_and_have_integers_of_both_kinds() {
        let range: RangeReply = serde_json::from_str(
            r#"{"header":{},"kvs":[{"key":"Zm9v","lease":"7"},{"key":"","value":"YmFy","lease":7}],"count":"1"}"#,
        )
        .unwrap();
        assert_eq!(range.kvs[0].key.0, b"foo");
        assert_eq!(range.kvs[0].value.0, b"");
        assert_eq!((range.kvs[0].lease, range.kvs[1].lease), (Int64(7), Int64(7)));
        let none: RangeReply = serde_json::from_str("{}").unwrap();
        assert!(none.kvs.is_empty());
        let gone: StreamReply<Lease> =
            serde_json::from_str("{\"result\":{\"header\":{},\"ID\":\"7\"}}\n").unwrap();
        assert_eq!(gone.result.unwrap().seconds, Int64(0));
    }

    #[test]
    fn what_is_no_integer_or_no_base64_is_refused() {
        for json in [r#""""#, r#""x""#, r#""9223372036854775808""#, "1.5", "null", "{}"] {
            assert!(serde_json::from_str::<Int64>(json).is_err(), "{json}");
        }
        for json in [r#""Zm9""#, r#""Zm9v\n""#, r#""*""#, "1"] {
            assert!(serde_json::from_str::<Base64>(json).is_err(), "{json}");
        }
        assert!(serde_json::from_str::<Done>("{}").is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_a_message_or_an_error(text in "\\PC*") {
            let _ = serde_json::from_str::<RangeReply>(&text);
            let _ = serde_json::from_str::<StreamReply<Lease>>(&text);
            let _ = serde_json::from_str::<GatewayError>(&text);
        }

        #[test]
        fn bytes_come_back_as_they_were(bytes: Vec<u8>, number: i64) {
            let text = serde_json::to_string(&Base64(bytes.clone())).unwrap();
            prop_assert_eq!(serde_json::from_str::<Base64>(&text).unwrap().0, bytes);
            let text = serde_json::to_string(&Int64(number)).unwrap();
            prop_assert_eq!(serde_json::from_str::<Int64>(&text).unwrap().0, number);
        }
    }
}
