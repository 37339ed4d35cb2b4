//! The small messages of the handshake protocol.

use serde::{Deserialize, Serialize};

/// A message for a peer's application: a request of type [`crate::FrameType::Notify`]. The reply
/// has the same form; an empty text in it means that the message was refused.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Notify {
    /// Who sends, or what about.
    #[serde(default)]
    pub name: String,
    /// The text.
    #[serde(default)]
    pub notify_msg: String,
}

/// The reply to a request of type [`crate::FrameType::Probe`], which has an empty object.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Probe {
    /// `success`.
    #[serde(default)]
    pub status: String,
    /// The name of the segment that is the engine's memory; Mooncake does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Which start of the engine answers; Mooncake does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<u64>,
}

/// What is asked for by a request of type [`crate::FrameType::Metadata`]. Mooncake's has a descriptor in
/// its place, which reads as the default: the segment that is the peer's memory.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct SegmentQuery {
    /// The peer's name for one of its files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_of_messages() {
        let notify = Notify { name: "a".to_owned(), notify_msg: "b".to_owned() };
        assert_eq!(serde_json::to_string(&notify).unwrap(), r#"{"name":"a","notify_msg":"b"}"#);
        let probe: Probe = serde_json::from_str(r#"{"status":"success","more":1}"#).unwrap();
        assert_eq!(probe.status, "success");
        assert_eq!(serde_json::from_str::<Probe>("{}").unwrap(), Probe::default());
        let query = SegmentQuery { file: Some("f".to_owned()) };
        assert_eq!(serde_json::to_string(&query).unwrap(), r#"{"file":"f"}"#);
        let memory = serde_json::from_str(r#"{"name":"a:1","protocol":"tcp"}"#).unwrap();
        assert_eq!(SegmentQuery { file: None }, memory);
    }
}
