//! A transfer whose every option is drawn at random: link, hosts, connections, queue depths, path
//! MTU, first packet sequence numbers. Combinations that nobody thinks of are where bugs live; run
//! it with many seeds.

use core::time::Duration;

use millstream_roce::IcrcCheck;
use millstream_wire::{Mtu, Psn};

use super::transfer::{Transfer, TransferOptions};
use super::{Outputs, Parameters, Report, ScenarioError};
use crate::plan::Kind;
use crate::{ConnectionOptions, HostOptions, IdentificationSource, LinkOptions, Probability, Rng};

/// Packets in flight that a reported loss leaves to a connection.
const LEAST_WINDOW: usize = 4;

/// Bytes of a packet's headers, at most.
const LONGEST_HEADERS: usize = 100;

/// Options that depend on the seed alone.
pub fn options(seed: u64) -> TransferOptions {
    let mut rng = Rng::fork(seed, 0x5aa2);
    let rng = &mut rng;
    // Drawn apart, since they came later.
    let mut buffers = Rng::fork(seed, 0xb0ff);
    let receive_budget = *pick(&mut buffers, &[None, Some(1), Some(20_000), Some(200_000)]);
    let send_window_bytes = *pick(&mut buffers, &[None, Some(1), Some(10_000), Some(100_000)]);
    let receive_buffer = *pick(&mut buffers, &[u64::MAX, u64::MAX, 50_000, 400_000]);
    let coin = |rng: &mut Rng| rng.below(2) == 0;
    // A host behind a UDP socket does not see the IPv4 identification.
    let sees_ip_header = coin(rng);
    let kinds = if coin(rng) {
        Kind::ALL.to_vec()
    } else {
        vec![*pick(rng, &Kind::ALL), *pick(rng, &Kind::ALL)]
    };
    let mut options = TransferOptions {
        seed,
        connections: rng.between(1, 8) as usize,
        operations: rng.between(1, 100) as usize,
        kinds,
        max_length: *pick(rng, &[1000, 5000, 20_000, 100_000]),
        length_unit: 1,
        uniform: false,
        both_ways: coin(rng),
        link: LinkOptions {
            rate: *pick(rng, &[None, Some(1 << 27), Some(1 << 30), Some(100_000_000_000)]),
            latency: Duration::from_micros(rng.between(1, 200)),
            jitter: Duration::from_micros(rng.below(100)),
            queue_bytes: *pick(rng, &[10_000, 100_000, 4 << 20]),
            mark_bytes: Some(*pick(rng, &[0, 20_000])),
            loss: fault(rng),
            duplicate: fault(rng),
            reorder: fault(rng),
            reorder_delay: Duration::from_micros(rng.below(1000)),
            corrupt: fault(rng),
        },
        host: HostOptions {
            source_port: rng.between(1, 0xffff) as u16,
            identification: *pick(
                rng,
                &[IdentificationSource::Zero, IdentificationSource::Counter],
            ),
            sees_ip_header,
            coalescing: Duration::from_micros(*pick(rng, &[0, 0, 5, 50])),
            receive_buffer,
        },
        icrc: if sees_ip_header { IcrcCheck::Exact } else { IcrcCheck::AnyIdentification },
        ipv6: rng.below(4) == 0,
        connection: ConnectionOptions {
            path_mtu: *pick(rng, &Mtu::ALL),
            reads: *pick(rng, &[1, 2, 16]),
            // Patience enough for one packet in ten lost, in both directions, again and again.
            timeout: 15,
            send_window_bytes,
            ..ConnectionOptions::default()
        },
        first_psn: coin(rng).then(|| Psn::new(Psn::COUNT - rng.between(1, 100) as u32)),
        max_window: *pick(rng, &[1, 2, 8, 128]),
        receive_budget,
        send_depth: *pick(rng, &[1, 4, 64]),
        receive_depth: *pick(rng, &[1, 4, 64]),
        receive_lag: Duration::from_micros(*pick(rng, &[0, 0, 10, 1000])),
        time_limit: Duration::from_secs(3600),
    };
    // Reports of losses leave some packets to each window. Where the queue has no room for those of all, they are lost again and
    // again, and with one in ten lost otherwise eight tries were not enough (tests/pinned.rs).
    let packet = options.connection.path_mtu.bytes() + LONGEST_HEADERS;
    let least = options.connections * LEAST_WINDOW * packet;
    options.link.queue_bytes = options.link.queue_bytes.max(least as u64);
    options
}

/// Half of the time never, else up to one packet in ten.
fn fault(rng: &mut Rng) -> Probability {
    let per_mille = Probability::per_mille(rng.below(100) as u32);
    if rng.below(2) == 0 { Probability::NEVER } else { per_mille }
}

fn pick<'o, T>(rng: &mut Rng, options: &'o [T]) -> &'o T {
    &options[rng.below(options.len() as u64) as usize]
}

/// The scenario `swarm`. Only the seed is a parameter of it.
pub(super) fn scenario(
    parameters: &Parameters,
    outputs: Outputs<'_>,
) -> Result<Report, ScenarioError> {
    let mut transfer = Transfer::new(&options(parameters.seed));
    outputs.attach(&mut transfer.simulation)?;
    transfer.run();
    transfer.expect_no_failure();
    transfer.simulation.finish()?;
    Ok(transfer.report("swarm", parameters.seed))
}
