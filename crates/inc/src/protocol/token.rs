//! Why a peer is turned away for its token.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What is wrong with the token of a peer, or with its proof.
#[derive(Clone, Debug, Deserialize, Eq, Error, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TokenProblem {
    /// It has proved none.
    #[error(
        "the controller takes only those who have a token, and none is set here: see --token-file and \
         INCCL_TOKEN_FILE"
    )]
    Needed,
    /// It has one that the controller does not know.
    #[error("the token that is set here is none of the controller's tokens")]
    Unknown,
    /// It has one, and the controller has none.
    #[error(
        "a token is set here, and the controller has none: start it with --tokens FILE, or set none here"
    )]
    NoneHere,
    /// It has one for something else.
    #[error("token {name:?} is for {meant_for}, and {asked} need one for them")]
    OtherKind {
        /// The token's name.
        name: String,
        /// Whom it is for.
        meant_for: String,
        /// What the peer is.
        asked: String,
    },
    /// It comes back to a group that was made with another token.
    #[error("the group was made by who has another token")]
    OtherGroup,
    /// It was called at another address than it has.
    #[error(
        "the controller was called at an address that is not its own: with a token, call it directly, without a \
         proxy or a translation of addresses"
    )]
    OtherAddress,
    /// It proves it in another way, or not at all.
    #[error("the proof of a token is malformed: are the versions the same?")]
    NoProof,
}

/// Bytes in JSON: a text of hexadecimal digits.
pub(super) mod hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        bytes: &[u8],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        let text: String = digits.filter_map(|digit| char::from_digit(digit.into(), 16)).collect();
        to.serialize_str(&text)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        let wrong = || D::Error::custom("pairs of hexadecimal digits were awaited");
        if text.len() % 2 != 0 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        let pairs = text.as_bytes().chunks_exact(2);
        let byte = |pair| u8::from_str_radix(core::str::from_utf8(pair).ok()?, 16).ok();
        pairs.map(byte).collect::<Option<_>>().ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use crate::protocol::{FrameDecoder, ToController, encode};

    #[test]
    fn messages_of_a_proof_are_texts_of_digits() {
        let message = ToController::Token { body: vec![0, 0x4f, 0xff] };
        let bytes = encode(&message).unwrap();
        assert!(bytes.ends_with(br#""type":"token","body":"004fff"}"#));
        let mut decoder = FrameDecoder::new();
        decoder.extend(&bytes);
        assert_eq!(decoder.next_message(), Ok(Some(message)));
        for body in ["0", "0g", "+1", "\u{e9}"] {
            let json = format!(r#"{{"version":11,"type":"token","body":"{body}"}}"#);
            let mut decoder = FrameDecoder::new();
            decoder.extend(&(json.len() as u32).to_be_bytes());
            decoder.extend(json.as_bytes());
            assert!(decoder.next_message::<ToController>().is_err(), "{body}");
        }
    }
}
