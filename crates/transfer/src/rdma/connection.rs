//! Queue pairs and the states they go through until they are connected.

use std::hash::{BuildHasher, RandomState};

use millstream_verbs::{
    Access, Mtu, PortAddress, Provider, Psn, Qpn, QueuePair, QueuePairAttributes,
    QueuePairCapabilities, QueuePairOptions, QueuePairState, encode_rnr_timer,
};

use super::device::LocalDevice;
use crate::{FailureReason, RdmaConfig};

/// READs that a queue pair has outstanding, and executes for its peer, at a time. What Mooncake
/// uses: both sides must agree and do not tell each other.
const READS: u8 = 16;

/// The most retransmissions in a row that there may be.
pub(super) const MAX_RETRIES: u8 = 7;

/// Retransmissions in a row before a peer counts as gone: the most there is, or one less with devices of
/// the system, as the kernel's soft-RoCE takes the most for "for ever" (`rxe_completer` in `rxe_comp.c`).
const fn retry_count(provider: Provider) -> u8 {
    match provider {
        Provider::Soft => MAX_RETRIES,
        Provider::Ibverbs => MAX_RETRIES - 1,
    }
}

/// Nothing here needs receive requests, so a peer that asks to wait does so for other reasons; not
/// 7, which would be for ever.
const RNR_RETRY: u8 = 6;

/// The most queue pairs between two NICs.
pub(super) const MAX_QUEUE_PAIRS: usize = 16;

/// The most pieces of a slice, each a work request: who completes and who decides is asked once for all.
const MAX_SLICE_PIECES: usize = 16;

/// How many pieces a slice may have: all of them go to one send queue, and it is to hold several slices.
pub(super) fn slice_pieces(config: &RdmaConfig) -> usize {
    (config.send_queue_depth / 8).clamp(1, MAX_SLICE_PIECES)
}

/// While fewer work requests than this are outstanding on a connection, a queue pair has room for one more slice:
/// the one that has fewest, which gets it.
pub(super) fn max_requests(config: &RdmaConfig) -> usize {
    config.queue_pairs_per_endpoint * (config.send_queue_depth + 1 - slice_pieces(config))
}

/// Work requests outstanding on each queue pair of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outstanding {
    counts: [u32; MAX_QUEUE_PAIRS],
    queue_pairs: usize,
}

impl Outstanding {
    pub(super) fn new(queue_pairs: usize) -> Self {
        debug_assert!((1..=MAX_QUEUE_PAIRS).contains(&queue_pairs));
        Self { counts: [0; MAX_QUEUE_PAIRS], queue_pairs }
    }

    /// The queue pair that has fewest.
    pub(super) fn fewest(&self) -> usize {
        (0..self.queue_pairs).min_by_key(|&index| self.counts[index]).unwrap_or_default()
    }

    pub(super) const fn add(&mut self, queue_pair: usize, requests: u32) {
        self.counts[queue_pair] += requests;
    }

    /// So many have completed. Those of a slice may all be told to have failed.
    pub(super) const fn remove(&mut self, queue_pair: usize, requests: u32) {
        self.counts[queue_pair] = self.counts[queue_pair].saturating_sub(requests);
    }
}

/// Queue pairs that are not connected yet.
pub(super) struct Unconnected {
    queue_pairs: Vec<QueuePair>,
    start_psn: Vec<Psn>,
    retry_count: u8,
}

/// What the peer has said.
pub(super) struct Peer {
    pub(super) at: PortAddress,
    pub(super) queue_pairs: Vec<Qpn>,
    pub(super) start_psn: Vec<Psn>,
    /// It does not say where its queue pairs start, nor look where ours do, as Mooncake: they expect 0.
    pub(super) expects_zero: bool,
    pub(super) path_mtu: Mtu,
    /// What all queue pairs together may have in flight to it.
    pub(super) receive_share: Option<u64>,
}

/// Connected queue pairs.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) queue_pairs: Vec<QueuePair>,
}

impl Unconnected {
    /// Makes queue pairs with random first packet sequence numbers, so that packets of an earlier
    /// connection are not taken for theirs.
    pub(super) fn new(
        device: &LocalDevice,
        count: usize,
        send_requests: usize,
    ) -> Result<Self, FailureReason> {
        let capabilities = QueuePairCapabilities::new(send_requests, 1);
        // What is written lies in a buffer of the target's descriptor, whole.
        let options = QueuePairOptions {
            split_writes: true,
            ..QueuePairOptions::new(&device.completions, capabilities)
        };
        let mut queue_pairs = Vec::with_capacity(count);
        for _ in 0..count {
            let queue_pair =
                device.domain.create_queue_pair_with(&options).map_err(FailureReason::Create)?;
            let initialized = QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                partition_key_index: Some(device.partition_key_index),
                access: Some(Access::REMOTE_READ | Access::REMOTE_WRITE),
                ..QueuePairAttributes::default()
            };
            queue_pair.modify(&initialized).map_err(FailureReason::Modify)?;
            queue_pairs.push(queue_pair);
        }
        // RandomState takes its keys from the operating system.
        let random = RandomState::new();
        let start_psn = queue_pairs
            .iter()
            .map(|queue_pair| Psn::new(random.hash_one(queue_pair.number().value()) as u32))
            .collect();
        let retry_count = retry_count(device.device.provider());
        Ok(Self { queue_pairs, start_psn, retry_count })
    }

    /// Their numbers, as the handshake carries them.
    pub(super) fn numbers(&self) -> Vec<u32> {
        self.queue_pairs.iter().map(|queue_pair| queue_pair.number().value()).collect()
    }

    /// Their first packet sequence numbers, as the handshake carries them.
    pub(super) fn start_psn(&self) -> Vec<u32> {
        self.start_psn.iter().map(|psn| psn.value()).collect()
    }

    /// Has them start where the peer expects them to.
    pub(super) fn expected_by(self, peer: &Peer) -> Self {
        match peer.expects_zero {
            true => Self { start_psn: vec![Psn::new(0); self.queue_pairs.len()], ..self },
            false => self,
        }
    }

    /// Connects each to the peer's queue pair of the same position.
    pub(super) fn connect(
        self,
        peer: &Peer,
        acknowledge_timeout: u8,
    ) -> Result<Connection, FailureReason> {
        let send_window_bytes = peer.send_window_bytes();
        let peers = peer.queue_pairs.iter().zip(&peer.start_psn);
        for ((queue_pair, send_psn), (&destination, &receive_psn)) in
            self.queue_pairs.iter().zip(&self.start_psn).zip(peers)
        {
            let ready_to_receive = QueuePairAttributes {
                state: Some(QueuePairState::ReadyToReceive),
                remote_address: Some(peer.at.ip),
                remote_lid: peer.at.lid,
                path_mtu: Some(peer.path_mtu),
                destination_qpn: Some(destination),
                receive_psn: Some(receive_psn),
                responder_resources: Some(READS),
                minimum_rnr_timer: Some(encode_rnr_timer(std::time::Duration::from_micros(640))),
                ..QueuePairAttributes::default()
            };
            queue_pair.modify(&ready_to_receive).map_err(FailureReason::Modify)?;
            let ready_to_send = QueuePairAttributes {
                state: Some(QueuePairState::ReadyToSend),
                send_psn: Some(*send_psn),
                timeout: Some(acknowledge_timeout),
                retry_count: Some(self.retry_count),
                rnr_retry: Some(RNR_RETRY),
                initiator_depth: Some(READS),
                send_window_bytes,
                ..QueuePairAttributes::default()
            };
            queue_pair.modify(&ready_to_send).map_err(FailureReason::Modify)?;
        }
        Ok(Connection { queue_pairs: self.queue_pairs })
    }
}

impl Peer {
    /// Understands what a handshake says of the sender's queue pairs, of which there must be
    /// `count`. `own_mtu` is the largest path MTU towards it from here.
    pub(super) fn parse(
        handshake: &millstream_metadata::HandShakeDesc,
        at: PortAddress,
        count: usize,
        own_mtu: Mtu,
    ) -> Result<Self, String> {
        let numbers = &handshake.qp_num;
        if numbers.len() != count {
            return Err(format!("{} queue pairs where {count} were expected", numbers.len()));
        }
        if let Some(number) = numbers.iter().find(|&&number| number == 0 || number >= 1 << 24) {
            return Err(format!("{number} is no queue pair number"));
        }
        let start_psn = match handshake.start_psn.len() {
            // Mooncake starts at 0 and does not say so.
            0 => vec![Psn::new(0); count],
            given if given == count => handshake.start_psn.iter().map(|&n| Psn::new(n)).collect(),
            given => return Err(format!("{given} start PSNs for {count} queue pairs")),
        };
        let path_mtu = match handshake.path_mtu {
            None => own_mtu,
            Some(bytes) => Mtu::from_bytes(bytes as usize)
                .ok_or_else(|| format!("{bytes} bytes are no path MTU"))?
                .min(own_mtu),
        };
        let queue_pairs = numbers.iter().map(|&number| Qpn::new(number)).collect();
        let receive_share = handshake.receive_share;
        let expects_zero = handshake.start_psn.is_empty();
        Ok(Self { at, queue_pairs, start_psn, expects_zero, path_mtu, receive_share })
    }

    /// The part of its share that each queue pair gets.
    fn send_window_bytes(&self) -> Option<u32> {
        let bytes = self.receive_share? / self.queue_pairs.len().max(1) as u64;
        Some(u32::try_from(bytes).unwrap_or(u32::MAX))
    }
}

impl Connection {
    /// Ends all that is under way, without completions. When this returns, no memory is touched
    /// for it any more, as it may be in the error state until the last completion.
    pub(super) fn halt(&self) {
        let attributes = QueuePairAttributes {
            state: Some(QueuePairState::Reset),
            ..QueuePairAttributes::default()
        };
        for queue_pair in &self.queue_pairs {
            // Every state leads there; a failed device has ended everything already.
            let _ = queue_pair.modify(&attributes);
        }
    }

    /// What its queue pairs expect next from the peer: it changes when the peer uses one.
    pub(super) fn receive_psn(&self) -> Vec<Option<Psn>> {
        self.queue_pairs.iter().map(QueuePair::receive_psn).collect()
    }
}

#[cfg(test)]
mod tests {
    use millstream_metadata::HandShakeDesc;

    use super::*;

    #[test]
    fn a_slice_always_finds_a_queue_pair_with_room() {
        for (queue_pairs, depth) in
            [(1, 1), (1, 128), (2, 16), (2, 256), (3, 7), (3, 24), (16, 17), (16, 64)]
        {
            let config = RdmaConfig {
                queue_pairs_per_endpoint: queue_pairs,
                send_queue_depth: depth,
                ..RdmaConfig::new(&[])
            };
            let (most, limit) = (slice_pieces(&config), max_requests(&config));
            assert!((1..=16).contains(&most) && limit > 0);
            let (mut outstanding, mut posted, mut random) =
                (Outstanding::new(queue_pairs), vec![], 7);
            for _ in 0..10_000 {
                // Knuth's generator.
                random = u64::wrapping_mul(random, 0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let draw = (random >> 33) as usize;
                let total: u32 = outstanding.counts.iter().sum();
                if (total as usize) < limit && draw % 8 > 2 {
                    let (queue_pair, pieces) = (outstanding.fewest(), 1 + draw / 8 % most);
                    outstanding.add(queue_pair, pieces as u32);
                    posted.push((queue_pair, pieces as u32));
                    assert!(outstanding.counts[queue_pair] as usize <= depth, "{config:?}");
                } else if !posted.is_empty() {
                    let (queue_pair, pieces) = posted.swap_remove(draw / 8 % posted.len());
                    outstanding.remove(queue_pair, pieces);
                }
            }
        }
    }

    fn parse(handshake: &HandShakeDesc) -> Result<Peer, String> {
        let at = "127.0.0.1".parse::<std::net::IpAddr>().unwrap().into();
        Peer::parse(handshake, at, 2, Mtu::B2048)
    }

    #[test]
    fn a_handshake_of_mooncake_has_defaults() {
        let handshake = HandShakeDesc { qp_num: vec![2, 0xff_ffff], ..HandShakeDesc::default() };
        let peer = parse(&handshake).unwrap();
        assert_eq!(peer.start_psn, [Psn::new(0); 2]);
        assert!(peer.expects_zero);
        assert_eq!(peer.path_mtu, Mtu::B2048);
        assert_eq!(peer.send_window_bytes(), None);
    }

    #[test]
    fn queue_pairs_divide_what_the_peer_has_room_for() {
        for (share, each) in [(0, 0), (1 << 20, 1 << 19), (u64::MAX, u32::MAX)] {
            let handshake = HandShakeDesc {
                qp_num: vec![2, 3],
                receive_share: Some(share),
                ..HandShakeDesc::default()
            };
            assert_eq!(parse(&handshake).unwrap().send_window_bytes(), Some(each));
        }
    }

    #[test]
    fn the_smaller_path_mtu_holds() {
        for (theirs, both) in [(1024, Mtu::B1024), (4096, Mtu::B2048)] {
            let handshake = HandShakeDesc {
                qp_num: vec![2, 3],
                start_psn: vec![7, 8],
                path_mtu: Some(theirs),
                ..HandShakeDesc::default()
            };
            let peer = parse(&handshake).unwrap();
            assert_eq!(peer.path_mtu, both);
            assert_eq!(peer.start_psn, [Psn::new(7), Psn::new(8)]);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let good = HandShakeDesc { qp_num: vec![2, 3], ..HandShakeDesc::default() };
        for bad in [
            HandShakeDesc { qp_num: vec![2], ..good.clone() },
            HandShakeDesc { qp_num: vec![], ..good.clone() },
            HandShakeDesc { qp_num: vec![2, 0], ..good.clone() },
            HandShakeDesc { qp_num: vec![2, 1 << 24], ..good.clone() },
            HandShakeDesc { start_psn: vec![1], ..good.clone() },
            HandShakeDesc { path_mtu: Some(1500), ..good.clone() },
        ] {
            assert!(parse(&bad).is_err(), "{bad:?}");
        }
    }
}
