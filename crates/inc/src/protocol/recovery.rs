//! What is said for the case that a switch is lost: where the ranks meet if no controller is there either, and which
//! switches they have lost.

use core::fmt;
use core::net::{IpAddr, SocketAddr};

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::token::hex;

/// Bytes of a [`Secret`].
pub const SECRET_BYTES: usize = 32;

/// The most switches that a rank says it has lost.
pub const MAX_AVOIDED: usize = 16;

/// What the ranks of one communicator know and nobody else. It is not shown.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct Secret(pub [u8; SECRET_BYTES]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        hex::serialize(&self.0, to)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let bytes = hex::deserialize(from)?.try_into();
        let bytes = bytes.map_err(|_| D::Error::custom("a secret has 32 bytes"))?;
        Ok(Self(bytes))
    }
}

/// Where rank 0 takes the place of the controller when a switch is lost and no controller is there.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct MeetingPoint {
    /// Where it listens, on the data network.
    pub address: SocketAddr,
    /// What both sides prove there that they know.
    pub secret: Secret,
}

/// A switch that ranks do not reach.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct LostSwitch {
    /// Its address.
    pub address: IpAddr,
    /// Which process it was; none of one that the rank was not connected to. Another process there is another switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<u64>,
}

impl LostSwitch {
    /// Whether it is this process.
    pub fn is(&self, address: IpAddr, incarnation: u64) -> bool {
        self.address == address && self.incarnation.is_none_or(|known| known == incarnation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meeting_point_is_laid_out_as_documented_and_its_secret_is_not_shown() {
        let address = "10.0.0.1:4000".parse().unwrap();
        let point = MeetingPoint { address, secret: Secret([0xa5; SECRET_BYTES]) };
        let text = serde_json::to_string(&point).unwrap();
        let secret = "a5".repeat(SECRET_BYTES);
        assert_eq!(text, format!(r#"{{"address":"10.0.0.1:4000","secret":"{secret}"}}"#));
        assert_eq!(serde_json::from_str::<MeetingPoint>(&text).unwrap(), point);
        let shown = format!("{point:?}");
        assert!(!shown.contains("165") && !shown.contains("a5"), "{shown}");
        for length in [0, SECRET_BYTES - 1, SECRET_BYTES + 1, 5000] {
            let text = format!("\"{}\"", "a5".repeat(length));
            assert!(serde_json::from_str::<Secret>(&text).is_err(), "{length}");
        }
    }

    #[test]
    fn another_process_at_the_address_is_another_switch() {
        let address = IpAddr::from([10, 0, 0, 1]);
        let lost = |incarnation| LostSwitch { address, incarnation };
        assert!(lost(Some(7)).is(address, 7) && !lost(Some(7)).is(address, 8));
        assert!(lost(None).is(address, 8) && !lost(None).is([10, 0, 0, 2].into(), 8));
    }
}
