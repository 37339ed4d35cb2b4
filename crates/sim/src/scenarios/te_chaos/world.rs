//! What a run is like, drawn from its seed, and the trouble that its network makes.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;

use millstream_roce::Instant;
use millstream_transfer_core::{Access, Config};
use millstream_wire::Mtu;

use crate::{ConnectionOptions, LinkOptions, NodeId, PacketInfo, Probability, Rng, Rule, Verdict};

/// Processes of a run.
pub(super) const PROCESSES: usize = 8;

pub(super) struct World {
    /// Whether the policy is TENT, and NICs are slow and lie, too.
    pub(super) tent: bool,
    /// NICs of each process.
    pub(super) nics: Vec<u16>,
    pub(super) link: LinkOptions,
    pub(super) connection: ConnectionOptions,
    pub(super) config: Config,
    /// Who ends the access of slices: the peer, which may have files.
    pub(super) access: Access,
    /// Closed connections that a process remembers.
    pub(super) max_closed: usize,
    /// Troubles that are the end of a process.
    pub(super) kills: Probability,
    /// Transfers to make.
    pub(super) transfers: u64,
    /// Of a thousand packets, so many are later than anyone waits.
    pub(super) late: Probability,
    /// Of control messages, those that are lost, very late, and doubled.
    pub(super) control_loss: Probability,
    pub(super) control_late: Probability,
    pub(super) control_doubled: Probability,
}

impl World {
    pub(super) fn draw(rng: &mut Rng, transfers: u64, tent: bool) -> Self {
        let nics = (0..PROCESSES).map(|_| rng.between(1, 3) as u16).collect();
        let link = LinkOptions {
            rate: Some(*pick(rng, &[100_000_000, 400_000_000, 1_000_000_000])),
            latency: Duration::from_micros(rng.between(5, 2000)),
            jitter: Duration::from_micros(rng.below(200)),
            queue_bytes: *pick(rng, &[60_000, 1 << 20]),
            loss: Probability::per_mille(*pick(rng, &[0, 0, 5, 20])),
            duplicate: Probability::per_mille(*pick(rng, &[0, 5, 20])),
            reorder: Probability::per_mille(*pick(rng, &[0, 5, 20])),
            reorder_delay: Duration::from_micros(rng.below(2000)),
            ..LinkOptions::default()
        };
        let connection = ConnectionOptions {
            path_mtu: *pick(rng, &[Mtu::B1024, Mtu::B4096]),
            timeout: rng.between(12, 15) as u8,
            retry_count: rng.between(1, 7) as u8,
            ..ConnectionOptions::default()
        };
        let config = Config {
            slice_length: *pick(rng, &[1024, 4096, 16_384]),
            max_attempts: *pick(rng, &[3, 10]),
            ..Config::default()
        };
        let late = Probability::per_mille(*pick(rng, &[0, 2, 10]));
        let access = *pick(rng, &[Access::Connection, Access::Connection, Access::Durable]);
        let max_closed = *pick(rng, &[4, 64]);
        let kills = Probability::per_mille(*pick(rng, &[50, 50, 50, 600]));
        let control_loss = Probability::per_mille(*pick(rng, &[0, 50, 300]));
        let control_late = Probability::per_mille(*pick(rng, &[20, 20, 200]));
        let control_doubled = Probability::per_mille(*pick(rng, &[50, 50, 400]));
        Self {
            tent,
            nics,
            link,
            connection,
            config,
            access,
            max_closed,
            kills,
            transfers,
            late,
            control_loss,
            control_late,
            control_doubled,
        }
    }
}

pub(super) fn pick<'o, T>(rng: &mut Rng, options: &'o [T]) -> &'o T {
    &options[rng.below(options.len() as u64) as usize]
}

/// A time of up to `limit`, short ones as likely as long ones.
pub(super) fn duration(rng: &mut Rng, limit: Duration) -> Duration {
    let bits = u64::BITS - (limit.as_nanos() as u64).leading_zeros();
    let shift = rng.below(u64::from(bits.min(14)));
    Duration::from_nanos(rng.below((limit.as_nanos() as u64 >> shift).max(1)))
}

pub(super) fn address(nic: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, (nic / 200) as u8, (nic % 200 + 1) as u8).into()
}

/// What does not get through.
#[derive(Debug, Default)]
pub(super) struct Outages {
    pub(super) nics: BTreeSet<NodeId>,
    pub(super) pairs: BTreeSet<(NodeId, NodeId)>,
    /// Processes whose control messages are lost.
    pub(super) controls: BTreeSet<usize>,
    /// NICs of processes that stand still, and until when: what arrives waits for them.
    pub(super) stopped: BTreeMap<NodeId, Instant>,
    /// NICs whose links have another rate now, or always another one.
    pub(super) crawling: BTreeSet<NodeId>,
    /// NICs of which nothing is told that has completed, until they tell all of it.
    pub(super) silent: BTreeSet<NodeId>,
    /// No more packets are late.
    pub(super) over: bool,
    pub(super) late_packets: u64,
}

/// Drops what outages stop, and holds some packets back for very long.
pub(super) struct Weather {
    pub(super) outages: Rc<RefCell<Outages>>,
    pub(super) late: Probability,
    pub(super) rng: Rng,
}

impl Rule for Weather {
    fn on_packet(&mut self, packet: &PacketInfo<'_>) -> Verdict {
        let (from, to) = (packet.source, packet.destination);
        let mut outages = self.outages.borrow_mut();
        let late = self.late.happens(&mut self.rng);
        let delay = duration(&mut self.rng, Duration::from_secs(20));
        if outages.nics.contains(&from)
            || outages.nics.contains(&to)
            || outages.pairs.contains(&(from, to))
        {
            return Verdict::Drop;
        }
        if let Some(until) = outages.stopped.get(&to) {
            return Verdict::Delay(until.saturating_duration_since(packet.now));
        }
        if late && !outages.over {
            outages.late_packets += 1;
            return Verdict::Delay(delay);
        }
        Verdict::Pass
    }
}
