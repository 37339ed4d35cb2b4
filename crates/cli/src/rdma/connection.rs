//! How queue pairs of these commands are connected.

use std::time::SystemTime;

use anyhow::Context;
use millstream_verbs::{
    Access, Device, Mtu, PortAddress, Psn, Qpn, QueuePair, QueuePairAttributes, QueuePairState,
};

use crate::failure::usage;

/// With 67 ms for an acknowledgement, a silent peer is given up after half a second. Not the 7 of libibverbs' examples: the
/// kernel's soft-RoCE takes that for "for ever".
const RETRIES: u8 = 6;
/// A peer that has posted no receive is waited for without end, so whoever waits has a limit.
const RECEIVER_NOT_READY_RETRIES: u8 = 7;
/// 0.64 ms between tries to send to a peer that has posted no receive.
const RECEIVER_NOT_READY_TIMER: u8 = 12;

/// The key of datagrams, as in libibverbs' examples.
pub(super) const QUEUE_KEY: u32 = 0x1111_1111;

/// The peer's side of a connection, and how the way there is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remote {
    pub(super) at: PortAddress,
    pub(super) qpn: Qpn,
    /// The first packet sequence number that it sends.
    pub(super) psn: Psn,
    pub(super) path_mtu: Mtu,
    /// READs and atomic operations at a time, either way.
    pub(super) reads: u8,
    /// For an acknowledgement: 4.096 us * 2^n.
    pub(super) timeout: u8,
}

/// Lets a new queue pair take receive requests.
pub(super) fn initialize(pair: &QueuePair, access: Access) -> anyhow::Result<()> {
    pair.modify(&QueuePairAttributes {
        state: Some(QueuePairState::Initialized),
        access: Some(access),
        ..Default::default()
    })
    .context("cannot initialize a queue pair")
}

/// Lets a new queue pair for datagrams take receive requests.
pub(super) fn initialize_datagrams(pair: &QueuePair) -> anyhow::Result<()> {
    pair.modify(&QueuePairAttributes {
        state: Some(QueuePairState::Initialized),
        queue_key: Some(QUEUE_KEY),
        ..Default::default()
    })
    .context("cannot initialize a queue pair")
}

/// Lets a queue pair for datagrams receive and send.
pub(super) fn start_datagrams(pair: &QueuePair, psn: Psn) -> anyhow::Result<()> {
    let state = |state| QueuePairAttributes { state: Some(state), ..Default::default() };
    pair.modify(&state(QueuePairState::ReadyToReceive))
        .and_then(|()| {
            let send = state(QueuePairState::ReadyToSend);
            pair.modify(&QueuePairAttributes { send_psn: Some(psn), ..send })
        })
        .context("cannot let a queue pair send")
}

/// Connects a queue pair that was initialized. `psn` is the first packet sequence number that we
/// send.
pub(super) fn connect(pair: &QueuePair, remote: &Remote, psn: Psn) -> anyhow::Result<()> {
    let attributes = QueuePairAttributes {
        state: Some(QueuePairState::ReadyToReceive),
        remote_address: Some(remote.at.ip),
        remote_lid: remote.at.lid,
        path_mtu: Some(remote.path_mtu),
        destination_qpn: Some(remote.qpn),
        receive_psn: Some(remote.psn),
        responder_resources: Some(remote.reads),
        minimum_rnr_timer: Some(RECEIVER_NOT_READY_TIMER),
        ..Default::default()
    };
    let connected = pair.modify(&attributes).and_then(|()| {
        pair.modify(&QueuePairAttributes {
            state: Some(QueuePairState::ReadyToSend),
            send_psn: Some(psn),
            timeout: Some(remote.timeout),
            retry_count: Some(RETRIES),
            rnr_retry: Some(RECEIVER_NOT_READY_RETRIES),
            initiator_depth: Some(remote.reads),
            ..Default::default()
        })
    });
    connected.with_context(|| {
        let (local, address, qpn) = (pair.number().value(), remote.at, remote.qpn.value());
        format!("cannot connect queue pair {local:#08x} to {qpn:#08x} of {address}")
    })
}

/// The path MTU that `bytes` is.
pub(super) fn path_mtu(bytes: usize) -> anyhow::Result<Mtu> {
    Mtu::from_bytes(bytes)
        .ok_or_else(|| usage(format!("--mtu {bytes}: it is 256, 512, 1024, 2048 or 4096")))
}

/// The largest path MTU to `peer`, if the device can be connected to it.
pub(super) fn largest_path_mtu(device: &Device, peer: PortAddress) -> anyhow::Result<Mtu> {
    device.port_address().check_peer(&peer)?;
    device.path_mtu(peer.ip).with_context(|| format!("there is no way to {peer}"))
}

/// Refuses a path MTU that the way to `peer` cannot carry.
pub(super) fn check_path_mtu(
    device: &Device,
    peer: PortAddress,
    wanted: Mtu,
) -> anyhow::Result<()> {
    let largest = largest_path_mtu(device, peer)?;
    if wanted > largest {
        return Err(usage(format!(
            "--mtu {wanted}: packets to {peer} hold at most {largest} bytes, as the interface's \
             MTU is"
        )));
    }
    Ok(())
}

/// A number that nobody can guess from the last one.
pub(super) fn initial_psn() -> Psn {
    use std::hash::{BuildHasher, RandomState};
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // RandomState takes its keys from the operating system.
    Psn::new(RandomState::new().hash_one(time) as u32)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use millstream_verbs::SoftConfig;

    use super::*;

    #[test]
    fn there_is_no_way_to_a_port_of_another_family() {
        let address: IpAddr = [127, 96, std::process::id() as u8, 1].into();
        let device = Device::open_soft(&SoftConfig::new(address)).unwrap();
        assert!(largest_path_mtu(&device, address.into()).is_ok());
        let peer = PortAddress { ip: "fe80::7".parse().unwrap(), lid: 7 };
        let error = largest_path_mtu(&device, peer).unwrap_err().to_string();
        let expected = format!(
            "the peer's address fe80::7 is not of the same family as the device's {address}"
        );
        assert_eq!(error, expected);
    }
}
