//! Drawing a run from its seed.

use core::net::{Ipv4Addr, Ipv6Addr};
use core::time::Duration;

use millstream_roce::RNR_TIMERS;
use millstream_wire::{Mtu, Psn};

use super::datagrams::{Message, PortPlan};
use super::host::Polling;
use super::operation::{Kind, Operation};
use super::pool::PoolPlan;
use super::world::{ConnectionPlan, Disturbance, HostPlan, Lowering, Role, StreamPlan, World};
use crate::{ConnectionOptions, HostOptions, IdentificationSource, LinkOptions, Probability, Rng};

impl World {
    /// The world of a seed.
    pub(super) fn draw(seed: u64) -> Self {
        let mut rng = Rng::fork(seed, 0xc4a0);
        let rng = &mut rng;
        // One run in ten has no trouble at all, and nothing may fail in it.
        let calm = rng.below(10) == 0;
        let may_overrun = !calm && rng.below(20) == 0;
        let host_count = *pick(rng, &[2, 2, 2, 2, 3, 3, 4]);
        let horizon = Duration::from_micros(*pick(rng, &[200, 1000, 5000, 20_000]));
        // A few runs move much, most little, so that there can be many.
        let big = rng.below(1000) == 0;
        let link = draw_link(rng, calm, big);
        let mut connections: Vec<ConnectionPlan> = (0..*pick(rng, &[1, 1, 2, 2, 3, 4]))
            .map(|_| draw_connection(rng, host_count, horizon, calm, big))
            .collect();
        let ipv6 = rng.below(4) == 0;
        let mut hosts: Vec<HostPlan> = (0..host_count)
            .map(|host| draw_host(rng, host, ipv6, may_overrun, &connections))
            .collect();
        if !big {
            for (index, host) in hosts.iter_mut().enumerate() {
                draw_sharing(rng, index, host, &mut connections);
            }
        }
        let count = if calm { 0 } else { *pick(rng, &[0, 1, 2, 3, 5, 8]) };
        let mut disturbances: Vec<(Duration, Disturbance)> = (0..count)
            .map(|_| (duration(rng, horizon), draw_disturbance(rng, host_count, connections.len())))
            .collect();
        let ports = if big { Vec::new() } else { draw_ports(rng, horizon, calm, &mut hosts) };
        for host in &mut hosts {
            let Some(pool) = &mut host.pool else { continue };
            pool.spare = 2 * connections.len() + ports.len();
            let capacity = pool.depth + pool.spare;
            host.polling.shared_receives = Some(capacity);
            host.make_room(capacity);
        }
        for _ in 0..if calm || ports.is_empty() { 0 } else { rng.below(4) } {
            let port = rng.below(ports.len() as u64) as usize;
            let what = match rng.below(2) {
                0 => Disturbance::DrainPort { port },
                _ => Disturbance::ResetPort { port, lowering: *pick(rng, &Lowering::ALL) },
            };
            disturbances.push((duration(rng, horizon), what));
        }
        disturbances.sort_by_key(|&(at, _)| at);
        // From a fork of its own, so that what else a seed draws stays as it was; and from this one,
        // so that the runs of `tests/pinned.rs` do.
        let mut splits = Rng::fork(seed, 0xc4b9);
        if splits.below(2) == 0 {
            let streams = connections.iter_mut().flat_map(|plan| &mut plan.streams);
            streams.for_each(|stream| stream.splits = splits.below(2) == 0);
        }
        let rng = Rng::fork(seed, 0xc4a1);
        Self { hosts, link, connections, ports, disturbances, may_overrun, rng }
    }
}

/// The rules of a connection's next life.
pub(super) fn draw_rules(rng: &mut Rng) -> ConnectionOptions {
    let rnr_timer = rng.between(1, 14) as u8;
    debug_assert!(RNR_TIMERS[usize::from(rnr_timer)] <= 1280);
    ConnectionOptions {
        path_mtu: *pick(rng, &Mtu::ALL),
        timeout: rng.between(8, 14) as u8,
        retry_count: rng.below(8) as u8,
        rnr_retry: *pick(rng, &[0, 1, 3, 6, 7, 7, 7]),
        minimum_rnr_timer: rnr_timer,
        reads: *pick(rng, &[1, 1, 2, 4, 16]),
        send_window_bytes: None,
    }
}

fn draw_link(rng: &mut Rng, calm: bool, big: bool) -> LinkOptions {
    let fault = |rng: &mut Rng| {
        let some = rng.below(2) == 0;
        let per_mille = *pick(rng, &[1, 5, 10, 20, 50, 100, 200, 300]);
        let limit = if big { 10 } else { 1000 };
        let fault = Probability::per_mille(per_mille.min(limit));
        if some && !calm { fault } else { Probability::NEVER }
    };
    LinkOptions {
        rate: *pick(rng, &[None, Some(100_000_000), Some(1 << 30), Some(100_000_000_000)]),
        latency: Duration::from_micros(rng.between(1, 200)),
        jitter: Duration::from_micros(rng.below(100)),
        queue_bytes: if calm { 64 << 20 } else { *pick(rng, &[10_000, 100_000, 4 << 20]) },
        mark_bytes: Some(*pick(rng, &[0, 20_000])),
        loss: fault(rng),
        duplicate: fault(rng),
        reorder: fault(rng),
        reorder_delay: Duration::from_micros(rng.below(1000)),
        corrupt: fault(rng),
    }
}

fn draw_host(
    rng: &mut Rng,
    host: usize,
    ipv6: bool,
    may_overrun: bool,
    connections: &[ConnectionPlan],
) -> HostPlan {
    // Room for exactly what may complete: with fewer, completions would be lost.
    let mut capacity = 0;
    for connection in connections {
        for end in (0..2).filter(|&end| connection.hosts[end] == host) {
            let [own, other] = [end, 1 - end].map(|end| &connection.streams[end]);
            capacity += own.send_depth + other.receive_depth;
        }
    }
    let enough = capacity.max(1);
    let few = rng.between(1, 8) as usize;
    let polling = Polling {
        interval: Duration::from_micros(*pick(rng, &[0, 0, 0, 5, 100, 1000])),
        batch: *pick(rng, &[1, 4, 64]),
        capacity: if may_overrun { enough.min(few) } else { enough },
        separate: rng.below(2) == 0,
        shared_receives: None,
    };
    let address = match ipv6 {
        true => Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1 + host as u16).into(),
        false => Ipv4Addr::new(10, 0, 0, 1 + host as u8).into(),
    };
    let identification = *pick(rng, &[IdentificationSource::Zero, IdentificationSource::Counter]);
    HostPlan {
        address,
        options: HostOptions {
            source_port: rng.between(1, 0xffff) as u16,
            identification,
            sees_ip_header: true,
            coalescing: Duration::from_micros(*pick(rng, &[0, 0, 0, 5, 50])),
            receive_buffer: u64::MAX,
        },
        polling,
        enough,
        max_window: *pick(rng, &[1, 2, 8, 32, 128]),
        seed: rng.bits(),
        pool: None,
    }
}

/// Some hosts have a shared receive queue, and some of their connections use it.
fn draw_sharing(
    rng: &mut Rng,
    index: usize,
    host: &mut HostPlan,
    connections: &mut [ConnectionPlan],
) {
    const LONGEST: u32 = 5000;
    if rng.below(2) == 0 {
        return;
    }
    let mut pool = PoolPlan::draw(rng);
    pool.length = 100;
    for connection in connections {
        for end in (0..2).filter(|&end| connection.hosts[end] == index) {
            let stream = &mut connection.streams[1 - end];
            stream.shares = rng.below(4) > 0;
            for operation in stream.operations.iter_mut().filter(|_| stream.shares) {
                operation.short = false;
                if operation.kind.is_send() {
                    operation.length = operation.length.min(LONGEST);
                    pool.length = pool.length.max(operation.length);
                }
            }
        }
    }
    host.pool = Some(pool);
}

/// In half of the runs each host has one or two queue pairs for datagrams.
fn draw_ports(
    rng: &mut Rng,
    horizon: Duration,
    calm: bool,
    hosts: &mut [HostPlan],
) -> Vec<PortPlan> {
    let mut ports = Vec::new();
    if rng.below(2) == 0 {
        return ports;
    }
    for (index, host) in hosts.iter_mut().enumerate() {
        for _ in 0..rng.between(1, 2) {
            let mut port = PortPlan::draw(rng, index, horizon);
            port.shares = host.pool.is_some() && rng.below(2) == 0;
            host.make_room(port.send_depth + port.pool.depth);
            ports.push(port);
        }
    }
    for index in 0..ports.len() {
        let others = ports.iter().enumerate();
        let others: Vec<usize> = others
            .filter_map(|(other, port)| (port.host != ports[index].host).then_some(other))
            .collect();
        let count = rng.below(16);
        ports[index].messages = (0..count)
            .map(|_| {
                let to = *pick(rng, &others);
                Message::draw(rng, to, calm)
            })
            .collect();
    }
    ports
}

fn draw_connection(
    rng: &mut Rng,
    hosts: usize,
    horizon: Duration,
    calm: bool,
    big: bool,
) -> ConnectionPlan {
    let first = rng.below(hosts as u64) as usize;
    let second = (first + rng.between(1, hosts as u64 - 1) as usize) % hosts;
    ConnectionPlan {
        hosts: [first, second],
        first_psns: core::array::from_fn(|_| {
            let wraps = rng.below(2) == 0;
            let before = rng.between(1, 200) as u32;
            let random = Psn::new(rng.bits() as u32);
            if wraps { Psn::new(Psn::COUNT - before) } else { random }
        }),
        streams: core::array::from_fn(|_| draw_stream(rng, horizon, calm, big)),
    }
}

fn draw_stream(rng: &mut Rng, horizon: Duration, calm: bool, big: bool) -> StreamPlan {
    let count = rng.below(if big { 4 } else { 25 }) as usize;
    let operations = (0..count)
        .map(|_| {
            let kind = *pick(rng, &Kind::ALL);
            let mut operation = Operation::new(kind, draw_length(rng, big), rng);
            if calm {
                operation.heed();
            }
            let short = !calm && rng.below(300) == 0;
            Operation { short: short && kind.takes_receive(), ..operation }
        })
        .collect();
    let slow = rng.below(3) > 0;
    StreamPlan {
        operations,
        send_depth: *pick(rng, &[1, 2, 4, 16]),
        receive_depth: *pick(rng, &[1, 2, 8, 16]),
        pace: if slow { 2 * horizon / (1 + count as u32) } else { Duration::ZERO },
        receive_lag: Duration::from_micros(*pick(rng, &[0, 0, 0, 10, 500])),
        shares: false,
        splits: false,
    }
}

fn draw_length(rng: &mut Rng, big: bool) -> u32 {
    if big && rng.below(2) == 0 {
        return rng.between(100_000, 4 << 20) as u32;
    }
    let length = match rng.below(16) {
        0 => 0,
        1..5 => rng.between(1, 64),
        // Around multiples of a path MTU.
        5..8 => (pick(rng, &Mtu::ALL).bytes() as u64 * rng.below(4) + rng.below(3)).max(1) - 1,
        8..13 => rng.below(5000),
        13..15 => rng.below(16_000),
        _ => rng.below(60_000),
    };
    length as u32
}

fn draw_disturbance(rng: &mut Rng, hosts: usize, connections: usize) -> Disturbance {
    let connection = rng.below(connections as u64) as usize;
    let stream = rng.below(2 * connections as u64) as usize;
    let host = rng.below(hosts as u64) as usize;
    let end = rng.below(2) as usize;
    let time = Duration::from_micros(*pick(rng, &[1, 50, 300, 3000]));
    match rng.below(18) {
        0..3 => Disturbance::Blackout {
            connection,
            directions: *pick(rng, &[[true, true], [true, true], [true, false], [false, true]]),
            share_of_patience: *pick(rng, &[2, 10, 50, 150]),
        },
        3..6 => Disturbance::Reset { connection, first: end, lowering: *pick(rng, &Lowering::ALL) },
        6 => Disturbance::Fail { connection, end },
        7 => Disturbance::Crash { host, down: time },
        8..11 => Disturbance::Deregister { stream, role: *pick(rng, &Role::ALL), absent: time },
        11 => Disturbance::Revoke { connection, end, absent: time },
        12..14 => Disturbance::Starve { stream, duration: time },
        14..16 => Disturbance::Pause { host, duration: time },
        _ => Disturbance::Drain { connection, end },
    }
}

pub(super) fn pick<'o, T>(rng: &mut Rng, options: &'o [T]) -> &'o T {
    &options[rng.below(options.len() as u64) as usize]
}

/// Up to so long.
pub(super) fn duration(rng: &mut Rng, limit: Duration) -> Duration {
    Duration::from_nanos(rng.between(0, limit.as_nanos() as u64))
}
