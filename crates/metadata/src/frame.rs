//! Frames of the handshake protocol: `u64` little-endian length, type byte, JSON text.
//!
//! The length counts the type byte and the text. Peers from before the type byte send the text
//! alone; they are recognised by a first byte that is no type (JSON starts with `{`).

use thiserror::Error;

/// The longest frame accepted unless configured otherwise (`MC_HANDSHAKE_MAX_LENGTH`).
pub const DEFAULT_FRAME_LIMIT: usize = 1 << 20;

const LENGTH_BYTES: usize = 8;

/// The type of [`FrameType::Token`]: far from those that Mooncake may still need, and nothing that JSON begins with.
const TOKEN: u8 = b'T';

/// What a frame asks for; a reply has the type of its request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FrameType {
    /// Connect queue pairs: a [`crate::HandShakeDesc`] each way.
    Connection,
    /// Send me your segment descriptor.
    Metadata,
    /// A message for the application.
    Notify,
    /// Are you alive?
    Probe,
    /// A part of the proof that both sides have a token ([`crate::Token`]); Mooncake has none.
    Token,
    /// A frame without a type byte: what [`FrameType::Connection`] was before there were types.
    OldProtocol,
}

impl FrameType {
    fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Connection,
            1 => Self::Metadata,
            2 => Self::Notify,
            3 => Self::Probe,
            TOKEN => Self::Token,
            _ => Self::OldProtocol,
        }
    }

    fn byte(self) -> Option<u8> {
        match self {
            Self::Connection => Some(0),
            Self::Metadata => Some(1),
            Self::Notify => Some(2),
            Self::Probe => Some(3),
            Self::Token => Some(TOKEN),
            Self::OldProtocol => None,
        }
    }
}

/// One request or reply.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Frame {
    /// What it asks for or answers.
    pub frame_type: FrameType,
    /// JSON text, not yet looked at.
    pub body: Vec<u8>,
}

/// What is wrong with a frame. Nothing after it can be understood, so the connection is over.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum FrameError {
    /// The length is 0: there is not even a type.
    #[error("a frame of 0 bytes")]
    Empty,
    /// The length is more than this side accepts.
    #[error("{}", too_long(*length, *limit))]
    TooLong {
        /// What the frame claims.
        length: u64,
        /// What is accepted.
        limit: usize,
    },
}

/// Who begins with text does not speak this protocol, and the text tells what instead.
fn too_long(length: u64, limit: usize) -> String {
    let bytes = length.to_le_bytes();
    if bytes.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ') {
        return format!(
            "\"{}\" in place of the length of a frame: another protocol than Millstream's",
            bytes.escape_ascii()
        );
    }
    format!("a frame of {length} bytes, more than the {limit} that are accepted")
}

impl Frame {
    /// A frame of this type and text.
    pub fn new(frame_type: FrameType, body: impl Into<Vec<u8>>) -> Self {
        Self { frame_type, body: body.into() }
    }

    /// The bytes that go on the wire. A frame of the old protocol must start with a byte that is
    /// no type, as every JSON text does.
    pub fn encode(&self) -> Vec<u8> {
        let kind = self.frame_type.byte();
        let length = self.body.len() + usize::from(kind.is_some());
        let mut bytes = Vec::with_capacity(LENGTH_BYTES + length);
        bytes.extend_from_slice(&(length as u64).to_le_bytes());
        bytes.extend(kind);
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// Puts a frame together from bytes as they arrive. Holds no more than has arrived, whatever
/// length the frame claims.
#[derive(Debug)]
pub struct FrameDecoder {
    limit: usize,
    buffer: Vec<u8>,
}

impl FrameDecoder {
    /// A decoder that refuses frames longer than `limit`.
    pub const fn new(limit: usize) -> Self {
        Self { limit, buffer: Vec::new() }
    }

    /// Takes bytes up to the end of the current frame and returns how many it took; the rest
    /// belongs to the next frame. Once [`FrameDecoder::take`] would give a frame it takes none.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<usize, FrameError> {
        let mut taken = 0;
        loop {
            let missing = self.missing()?;
            let count = missing.min(bytes.len());
            if count == 0 {
                return Ok(taken);
            }
            self.buffer.extend_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            taken += count;
        }
    }

    /// The frame, once all of it has arrived. The decoder is then ready for the next.
    pub fn take(&mut self) -> Option<Frame> {
        if self.buffer.len() < LENGTH_BYTES || self.missing() != Ok(0) {
            return None;
        }
        let mut body = std::mem::take(&mut self.buffer);
        let frame_type = FrameType::from_byte(body[LENGTH_BYTES]);
        body.drain(..LENGTH_BYTES + usize::from(frame_type.byte().is_some()));
        Some(Frame { frame_type, body })
    }

    /// How many bytes may be read for this frame, so that nothing is taken of what follows it.
    pub fn wants(&self) -> Result<usize, FrameError> {
        self.missing()
    }

    /// Bytes still missing from the length, or once that is there, from the frame.
    fn missing(&self) -> Result<usize, FrameError> {
        let Some((length, rest)) = self.buffer.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(LENGTH_BYTES - self.buffer.len());
        };
        let length = u64::from_le_bytes(*length);
        if length == 0 {
            return Err(FrameError::Empty);
        }
        match usize::try_from(length) {
            Ok(bytes) if bytes <= self.limit => Ok(bytes - rest.len()),
            _ => Err(FrameError::TooLong { length, limit: self.limit }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode_all(decoder: &mut FrameDecoder, mut bytes: &[u8]) -> Vec<Frame> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let taken = decoder.push(bytes).unwrap();
            bytes = &bytes[taken..];
            frames.extend(decoder.take());
        }
        frames
    }

    #[test]
    fn bytes_on_the_wire() {
        let frame = Frame::new(FrameType::Probe, "{}\n");
        assert_eq!(frame.encode(), b"\x04\0\0\0\0\0\0\0\x03{}\n");
        let old = Frame::new(FrameType::OldProtocol, "{}");
        assert_eq!(old.encode(), b"\x02\0\0\0\0\0\0\0{}");
        let mut decoder = FrameDecoder::new(16);
        assert_eq!(decode_all(&mut decoder, &old.encode()), [old]);
    }

    #[test]
    fn what_speaks_another_protocol_is_quoted() {
        let mut decoder = FrameDecoder::new(16);
        let error = decoder.push(b"HTTP/1.1 400 Bad Request").unwrap_err().to_string();
        assert!(error.starts_with("\"HTTP/1.1\" in place of the length"), "{error}");
        let mut decoder = FrameDecoder::new(16);
        let error = decoder.push(&17_u64.to_le_bytes()).unwrap_err().to_string();
        assert_eq!(error, "a frame of 17 bytes, more than the 16 that are accepted");
    }

    #[test]
    fn an_empty_body_is_a_frame() {
        let frame = Frame::new(FrameType::Metadata, "");
        let mut decoder = FrameDecoder::new(1);
        assert_eq!(decode_all(&mut decoder, &frame.encode()), [frame]);
    }

    #[test]
    fn lengths_are_limited() {
        let mut decoder = FrameDecoder::new(4);
        assert_eq!(decoder.push(&0u64.to_le_bytes()), Err(FrameError::Empty));
        let mut decoder = FrameDecoder::new(4);
        assert_eq!(
            decoder.push(&5u64.to_le_bytes()),
            Err(FrameError::TooLong { length: 5, limit: 4 })
        );
        let mut decoder = FrameDecoder::new(4);
        assert_eq!(
            decoder.push(&u64::MAX.to_le_bytes()),
            Err(FrameError::TooLong { length: u64::MAX, limit: 4 })
        );
        let mut decoder = FrameDecoder::new(4);
        assert_eq!(decoder.push(&4u64.to_le_bytes()), Ok(8));
    }

    #[test]
    fn a_claimed_length_allocates_nothing() {
        let mut decoder = FrameDecoder::new(1 << 30);
        decoder.push(&(1u64 << 30).to_le_bytes()).unwrap();
        assert!(decoder.buffer.capacity() < 64);
        assert_eq!(decoder.take(), None);
    }

    fn frames() -> impl Strategy<Value = Frame> {
        let kinds = prop_oneof![
            Just(FrameType::Connection),
            Just(FrameType::Metadata),
            Just(FrameType::Notify),
            Just(FrameType::Probe),
            Just(FrameType::Token),
            Just(FrameType::OldProtocol),
        ];
        (kinds, proptest::collection::vec(any::<u8>(), 0..40)).prop_map(|(kind, mut body)| {
            if kind == FrameType::OldProtocol {
                body.insert(0, b'{');
            }
            Frame::new(kind, body)
        })
    }

    proptest! {
        #[test]
        fn frames_survive_any_fragmentation(
            frames in proptest::collection::vec(frames(), 1..6),
            cuts in proptest::collection::vec(1..17usize, 1..40),
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
            let mut decoder = FrameDecoder::new(64);
            let mut decoded = Vec::new();
            let mut rest = &bytes[..];
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                decoded.extend(decode_all(&mut decoder, now));
                rest = later;
            }
            prop_assert_eq!(decoded, frames);
            prop_assert!(decoder.buffer.is_empty());
        }

        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = FrameDecoder::new(64);
            let mut rest = &bytes[..];
            while let Ok(taken) = decoder.push(rest) {
                rest = &rest[taken..];
                if decoder.take().is_none() || rest.is_empty() {
                    break;
                }
            }
            prop_assert!(decoder.buffer.len() <= 8 + 64);
        }
    }
}
