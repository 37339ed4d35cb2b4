//! What two engines tell each other to connect queue pairs.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Gid;

/// One side of a connection handshake: a request of type [`crate::FrameType::Connection`], and the
/// reply to it.
///
/// The keys from `start_psn` on are Millstream's: other peers ignore them and do not send them.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct HandShakeDesc {
    /// Free text, unused.
    #[serde(default)]
    pub payload: String,
    /// The sender's NIC: `server@nic`.
    #[serde(default)]
    pub local_nic_path: String,
    /// The local identifier of the sender's port; 0 for RoCE.
    #[serde(default)]
    pub local_lid: u16,
    /// The global identifier of the sender's port. Old peers leave it out: then the one in their
    /// segment descriptor holds.
    #[serde(default, serialize_with = "gid_to_text", deserialize_with = "gid_from_text")]
    pub local_gid: Option<Gid>,
    /// The receiver's NIC: `server@nic`.
    #[serde(default)]
    pub peer_nic_path: String,
    /// The sender's queue pair numbers. The n-th of one side connects to the n-th of the other.
    #[serde(default)]
    pub qp_num: Vec<u32>,
    /// In a reply: why the request is refused. Empty when it is not.
    #[serde(default)]
    pub reply_msg: String,
    /// The first packet sequence number that each of the sender's queue pairs will send. Without
    /// it they start at 0.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub start_psn: Vec<u32>,
    /// The largest path MTU, in bytes of payload, that the sender's interface carries. The smaller
    /// of both sides holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_mtu: Option<u32>,
    /// In a reply: how many bytes the queue pairs of the request may have in flight together to the
    /// sender's device, with 352 bytes for each packet beside its payload. Without it there is no
    /// limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receive_share: Option<u64>,
    /// A random number that the sender's engine drew when it started: tells a restarted peer from
    /// one that was away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incarnation: Option<u64>,
    /// In a request: which start of the receiver's engine it is for. Another one refuses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_incarnation: Option<u64>,
    /// In a request: the sender's number of the rail, which is a pair of NICs. Of each rail of an
    /// incarnation there is one connection at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rail: Option<u16>,
    /// In a request: the number of the connection, which rises over all connections of the sender's
    /// engine to the receiver. A connection with a higher number takes the place of the one before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// In a reply that refuses: only connections with higher numbers than this are accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch_floor: Option<u64>,
    /// In a request: where the sender's engine answers. An unspecified address, as `0.0.0.0`, is that of the
    /// connection by which the request comes ([`HandShakeDesc::received_from`]). Anybody can say anything here; what is
    /// no address counts as none.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "address_if_it_is_one"
    )]
    pub control_address: Option<SocketAddr>,
    /// The request does not connect. It asks to end the connections of `rail` up to `epoch`, and to
    /// reply once nothing that was sent over them can change memory any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fence: bool,
    /// The reply to a fence: nothing of the rail's connections up to this one can arrive any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fenced: Option<u64>,
    /// The sender's engine, of this `incarnation`, closes: its memory is not there any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub closing: bool,
    /// The sender, of this `incarnation`, has closed the connection of the receiver's `rail` with the number
    /// `epoch`, to make room for others. It serves the receiver still.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evicted: bool,
    /// The sender is done with these connections: `qp_num` names its queue pairs, and the receiver
    /// may destroy those that it connected to them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disconnect: bool,
    /// The request does not connect. It asks to end the connection for data over TCP that has this number, in 32
    /// hexadecimal digits, and to reply once nothing that was sent over it can change memory any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<String>,
    /// The reply to that: nothing of the connection can arrive any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stream_fenced: bool,
    /// The request does not connect. It asks the receiver, as a relay, for a way to the segment of this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
    /// The reply to that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relayed: Option<RelayedDesc>,
}

/// A way to a segment through a relay.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct RelayedDesc {
    /// What a connection for data over TCP names in the place of the relay's incarnation: then it is for that
    /// segment.
    pub number: u64,
    /// The relay's own segment.
    pub name: String,
    /// Its port for data over TCP.
    pub port: u16,
    /// The JSON text of the segment's descriptor, as the relay has it.
    pub descriptor: String,
}

fn address_if_it_is_one<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<SocketAddr>, D::Error> {
    let said = serde_json::Value::deserialize(deserializer)?;
    Ok(said.as_str().and_then(|text| text.parse().ok()))
}

impl HandShakeDesc {
    /// A reply that refuses.
    pub fn refusal(reason: impl Into<String>) -> Self {
        Self { reply_msg: reason.into(), ..Self::default() }
    }

    /// Takes note of the address that a request has come from, for a sender that answers there.
    pub fn received_from(&mut self, client: IpAddr) {
        if let Some(at) = &mut self.control_address
            && at.ip().to_canonical().is_unspecified()
        {
            // A socket for both families shows the addresses of IPv4 as those of IPv6.
            at.set_ip(client.to_canonical());
        }
    }

    /// Parses the JSON text of one.
    pub fn from_json(text: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(text)
    }

    /// The JSON text.
    pub fn to_json(&self) -> Vec<u8> {
        // Strings, numbers and lists: nothing that JSON cannot hold.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

fn gid_to_text<S: Serializer>(gid: &Option<Gid>, serializer: S) -> Result<S::Ok, S::Error> {
    match gid {
        Some(gid) => serializer.collect_str(gid),
        None => serializer.serialize_str(""),
    }
}

fn gid_from_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Gid>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.is_empty() {
        Ok(None)
    } else {
        text.parse().map(Some).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_of_a_plain_one_has_the_common_keys_only() {
        let handshake = HandShakeDesc {
            local_nic_path: "127.0.0.1:15001@soft-127.0.0.1".to_owned(),
            local_gid: Some(Gid::from_address("127.0.0.1".parse().unwrap())),
            peer_nic_path: "127.0.0.2:15002@mlx5_0".to_owned(),
            qp_num: vec![17, 18],
            ..HandShakeDesc::default()
        };
        let text = r#"{"payload":"","local_nic_path":"127.0.0.1:15001@soft-127.0.0.1","local_lid":0,"local_gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:7f:00:00:01","peer_nic_path":"127.0.0.2:15002@mlx5_0","qp_num":[17,18],"reply_msg":""}"#;
        assert_eq!(String::from_utf8(handshake.to_json()).unwrap(), text);
        assert_eq!(HandShakeDesc::from_json(text.as_bytes()).unwrap(), handshake);
    }

    #[test]
    fn own_keys_round_trip() {
        let handshake = HandShakeDesc {
            start_psn: vec![0xff_ffff],
            path_mtu: Some(4096),
            receive_share: Some(1 << 20),
            incarnation: Some(u64::MAX),
            peer_incarnation: Some(7),
            rail: Some(u16::MAX),
            epoch: Some(u64::MAX),
            epoch_floor: Some(1),
            control_address: Some("[2001:db8::2]:7001".parse().unwrap()),
            fence: true,
            fenced: Some(2),
            closing: true,
            evicted: true,
            disconnect: true,
            stream: Some("0123456789abcdef0123456789abcdef".to_owned()),
            stream_fenced: true,
            relay: Some("10.0.0.1:15001".to_owned()),
            relayed: Some(RelayedDesc {
                number: u64::MAX,
                name: "10.0.0.2:15001".to_owned(),
                port: 15002,
                descriptor: "{}".to_owned(),
            }),
            ..HandShakeDesc::default()
        };
        assert_eq!(HandShakeDesc::from_json(&handshake.to_json()).unwrap(), handshake);
    }

    #[test]
    fn who_answers_everywhere_answers_where_its_requests_come_from() {
        for (said, client, expected) in [
            ("192.0.2.1:7001", "198.51.100.1", "192.0.2.1:7001"),
            ("0.0.0.0:7001", "198.51.100.1", "198.51.100.1:7001"),
            ("[::]:7001", "2001:db8::1", "[2001:db8::1]:7001"),
            ("[::]:7001", "::ffff:198.51.100.1", "198.51.100.1:7001"),
            ("[::ffff:0.0.0.0]:7001", "198.51.100.1", "198.51.100.1:7001"),
        ] {
            let control_address = Some(said.parse().unwrap());
            let mut handshake = HandShakeDesc { control_address, ..HandShakeDesc::default() };
            handshake.received_from(client.parse().unwrap());
            assert_eq!(handshake.control_address, Some(expected.parse().unwrap()), "{said}");
        }
        let mut handshake = HandShakeDesc::default();
        handshake.received_from("198.51.100.1".parse().unwrap());
        assert_eq!(handshake, HandShakeDesc::default());
        // It is a courtesy: nobody is refused for it.
        for text in [r#""localhost:7001""#, r#""192.0.2.1""#, r#""192.0.2.1:70000""#, "null", "7"] {
            let text = format!(r#"{{"control_address":{text}}}"#);
            let handshake = HandShakeDesc::from_json(text.as_bytes()).unwrap();
            assert_eq!(handshake, HandShakeDesc::default(), "{text}");
        }
    }

    #[test]
    fn peers_add_and_leave_out_keys() {
        let text = br#"{"ready_ack":true,"qp_num":[1],"efa_addr":"x"}"#;
        let handshake = HandShakeDesc::from_json(text).unwrap();
        assert_eq!(handshake, HandShakeDesc { qp_num: vec![1], ..HandShakeDesc::default() });
        // What a peer without RDMA answers.
        let empty = br#"{"local_gid":"","local_lid":0,"local_nic_path":"","payload":"","peer_nic_path":"","qp_num":[],"reply_msg":""}"#;
        assert_eq!(HandShakeDesc::from_json(empty).unwrap(), HandShakeDesc::default());
        assert!(HandShakeDesc::from_json(br#"{"local_gid":"nonsense"}"#).is_err());
    }
}
