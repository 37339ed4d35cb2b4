//! Frames: a length of four bytes, big-endian, then so many bytes of JSON.
//!
//! The JSON is an object with a `version` and a `type`. The version is looked at first, so that a
//! peer of another version hears that, and not that some field is missing.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The version of the protocol.
pub const VERSION: u32 = 11;

/// What is sent in frames.
pub trait Message: Serialize + DeserializeOwned {
    /// The longest JSON text of a frame: so many bytes, and no more than have arrived, does a peer
    /// make us keep.
    const MAX_FRAME_BYTES: usize;
}

const LENGTH_BYTES: usize = 4;

/// What is wrong with a frame. What follows it cannot be trusted, so the connection is over.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum FrameError {
    /// Longer than any message.
    #[error("{}: the peer does not speak this protocol", too_long(*length, *limit))]
    TooLong {
        /// How long, in bytes.
        length: usize,
        /// The most bytes of a frame.
        limit: usize,
    },
    /// Another version.
    #[error("the peer speaks version {0} of the protocol, and this is version {VERSION}")]
    Version(u32),
    /// Not a message.
    #[error("a frame that is not a message of this protocol: {0}")]
    Message(String),
}

/// Who begins with text tells what it speaks instead.
fn too_long(length: usize, limit: usize) -> String {
    let bytes = (length as u32).to_be_bytes();
    // A record of TLS (RFC 8446 5.1): an alert, or a handshake.
    if matches!(bytes, [0x15 | 0x16, 3, ..]) {
        return "TLS in place of the length of a frame, as one side has it set".to_owned();
    }
    if bytes.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
        return format!("\"{}\" in place of the length of a frame", bytes.escape_ascii());
    }
    format!("a frame of {length} bytes, and the limit is {limit}")
}

#[derive(Deserialize)]
struct VersionOnly {
    version: u32,
}

#[derive(Serialize)]
struct Versioned<'a, M> {
    version: u32,
    #[serde(flatten)]
    message: &'a M,
}

/// The frame of a message. The only error is [`FrameError::TooLong`], when a text in it is.
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; LENGTH_BYTES];
    serde_json::to_writer(&mut frame, &Versioned { version: VERSION, message })
        .map_err(|error| FrameError::Message(error.to_string()))?;
    let length = frame.len() - LENGTH_BYTES;
    check_length::<M>(length)?;
    frame[..LENGTH_BYTES].copy_from_slice(&(length as u32).to_be_bytes());
    Ok(frame)
}

/// Finds the frames in what arrives on a connection.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    /// Bytes of the buffer that were returned as messages.
    taken: usize,
}

impl FrameDecoder {
    /// One that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes that have arrived. Take all messages out before the next call: then it never
    /// holds more than a frame and what came with its end.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// Whether part of a frame is there, so that the connection must not end now.
    pub fn is_within_frame(&self) -> bool {
        self.taken < self.buffer.len()
    }

    /// The next message, or `None` until more bytes have arrived. After an error it stays at the
    /// broken frame.
    pub fn next_message<M: Message>(&mut self) -> Result<Option<M>, FrameError> {
        let rest = &self.buffer[self.taken..];
        let Some((length, rest)) = rest.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*length) as usize;
        check_length::<M>(length)?;
        let Some(json) = rest.get(..length) else { return Ok(None) };
        let message = parse(json)?;
        self.taken += LENGTH_BYTES + length;
        Ok(Some(message))
    }
}

fn check_length<M: Message>(length: usize) -> Result<(), FrameError> {
    let limit = M::MAX_FRAME_BYTES;
    if length > limit { Err(FrameError::TooLong { length, limit }) } else { Ok(()) }
}

fn parse<M: DeserializeOwned>(json: &[u8]) -> Result<M, FrameError> {
    let broken = |error: serde_json::Error| FrameError::Message(error.to_string());
    let VersionOnly { version } = serde_json::from_slice(json).map_err(broken)?;
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    serde_json::from_slice(json).map_err(broken)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::protocol::{FromController, ToController};

    fn frame(json: &str) -> Vec<u8> {
        let mut frame = (json.len() as u32).to_be_bytes().to_vec();
        frame.extend_from_slice(json.as_bytes());
        frame
    }

    fn decode(bytes: &[u8]) -> Result<Option<ToController>, FrameError> {
        let mut decoder = FrameDecoder::new();
        decoder.extend(bytes);
        decoder.next_message()
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let bytes = encode(&ToController::Leave { collectives: 7 }).unwrap();
        assert_eq!(bytes, frame(r#"{"version":11,"type":"leave","collectives":7}"#));
        assert_eq!(decode(&bytes), Ok(Some(ToController::Leave { collectives: 7 })));
        let bytes = encode(&ToController::Pong).unwrap();
        assert_eq!(bytes, frame(r#"{"version":11,"type":"pong"}"#));
        assert_eq!(decode(&bytes), Ok(Some(ToController::Pong)));
    }

    #[test]
    fn frames_come_whole_however_the_bytes_are_cut() {
        let messages: Vec<FromController> =
            (0..5).map(|rank| FromController::Left { rank, collectives: 1 << rank }).collect();
        let stream: Vec<u8> = messages.iter().flat_map(|m| encode(m).unwrap()).collect();
        for cut in 1..stream.len() {
            let mut decoder = FrameDecoder::new();
            let mut got = Vec::new();
            for part in stream.chunks(cut) {
                decoder.extend(part);
                while let Some(message) = decoder.next_message::<FromController>().unwrap() {
                    got.push(message);
                }
            }
            assert_eq!(got, messages);
            assert!(!decoder.is_within_frame());
        }
    }

    #[test]
    fn a_connection_that_ends_within_a_frame_is_told_from_one_that_ends_between_two() {
        let bytes = encode(&FromController::Registered).unwrap();
        for cut in 0..=bytes.len() {
            let mut decoder = FrameDecoder::new();
            decoder.extend(&bytes[..cut]);
            let whole = decoder.next_message::<FromController>().unwrap().is_some();
            assert_eq!(whole, cut == bytes.len());
            assert_eq!(decoder.is_within_frame(), cut > 0 && !whole, "{cut}");
        }
    }

    #[test]
    fn broken_frames_are_told_apart() {
        assert_eq!(decode(&frame("{}")[..5]), Ok(None));
        // What a web browser sends.
        assert_eq!(
            decode(b"GET / HTTP/1.1\r\n"),
            Err(FrameError::TooLong { length: 0x4745_5420, limit: 64 << 10 })
        );
        // What one side says where the other has no TLS.
        for tls in [b"\x16\x03\x01\x02\x00", b"\x15\x03\x03\x00\x02"] {
            let error = decode(tls).unwrap_err().to_string();
            assert!(error.starts_with("TLS in place of"), "{error}");
        }
        assert_eq!(decode(&frame(r#"{"version":12,"kind":"new"}"#)), Err(FrameError::Version(12)));
        for json in [
            "",
            "{",
            "[]",
            "null",
            r#"{"type":"pong"}"#,
            r#"{"version":11}"#,
            r#"{"version":11,"type":"none"}"#,
            r#"{"version":11,"type":"leave"}"#,
            r#"{"version":11,"type":"leave","collectives":-1}"#,
            r#"{"version":11,"type":"connect","qpn":16777216,"psn":0,"path_mtu":4096}"#,
            r#"{"version":11,"type":"connect","qpn":1,"psn":0,"path_mtu":4096}"#,
            r#"{"version":11,"type":"connect","qpn":17,"psn":16777216,"path_mtu":4096}"#,
            r#"{"version":11,"type":"connect","qpn":17,"psn":0,"path_mtu":1500}"#,
        ] {
            let result = decode(&frame(json));
            assert!(matches!(result, Err(FrameError::Message(_))), "{json}: {result:?}");
        }
        let deep = format!(r#"{{"version":11,"type":{}"#, "[".repeat((64 << 10) - 32));
        assert!(matches!(decode(&frame(&deep)), Err(FrameError::Message(_))));
    }

    #[test]
    fn too_long_a_text_is_not_sent() {
        let reason = "x".repeat(ToController::MAX_FRAME_BYTES);
        let result = encode(&ToController::Fail { reason, cause: None });
        assert!(matches!(result, Err(FrameError::TooLong { .. })));
    }

    #[test]
    fn each_direction_has_its_limit() {
        for length in [64 << 10, (64 << 10) + 1, 512 << 10, (512 << 10) + 1_u32] {
            let too_long = |limit| FrameError::TooLong { length: length as usize, limit };
            let mut decoder = FrameDecoder::new();
            decoder.extend(&length.to_be_bytes());
            let to = decoder.next_message::<ToController>();
            let from = decoder.next_message::<FromController>();
            assert_eq!(to, if length > 64 << 10 { Err(too_long(64 << 10)) } else { Ok(None) });
            assert_eq!(from, if length > 512 << 10 { Err(too_long(512 << 10)) } else { Ok(None) });
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_or_waited_for(bytes: Vec<u8>) {
            let _ = decode(&bytes);
            let json: String = String::from_utf8_lossy(&bytes).into();
            prop_assert!(decode(&frame(&json)).is_err());
        }
    }
}
