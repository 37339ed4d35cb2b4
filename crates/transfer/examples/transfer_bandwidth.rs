//! Bandwidth and latency between two engines in one process, over loopback.
//!
//! `cargo run --release -p millstream-transfer --example transfer_bandwidth [BLOCK] [BATCH] [SECONDS]`

use std::net::IpAddr;
use std::time::{Duration, Instant};

use millstream_transfer::{
    Config, Opcode, RdmaConfig, Segment, TransferEngine, TransferRequest, TransferState,
};

const LONG: Duration = Duration::from_secs(60);

fn engine(address: IpAddr) -> Result<TransferEngine, Box<dyn std::error::Error>> {
    let engine = TransferEngine::new(Config::new(address))?;
    engine.install_rdma(RdmaConfig::new(&[address]))?;
    Ok(engine)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<usize> =
        std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let argument = |index: usize, default| arguments.get(index).copied().unwrap_or(default);
    let (block, batch) = (argument(0, 64 << 10), argument(1, 128));
    let duration = Duration::from_secs(argument(2, 3) as u64);

    let target = engine("127.77.0.1".parse()?)?;
    let initiator = engine("127.77.0.2".parse()?)?;
    let length = block * batch;
    let _remote = target.allocate_buffer(length, "*", true)?;
    let local = initiator.allocate_buffer(length, "*", false)?;
    let segment = initiator.open_segment(target.name())?;
    for opcode in [Opcode::Write, Opcode::Read] {
        let requests: Vec<_> = (0..batch)
            .map(|index| request(opcode, local.address(), &segment, index * block, block))
            .collect::<Result<_, _>>()?;
        let start = Instant::now();
        let mut bytes = 0;
        // Two batches, so that one is under way while the other is refilled.
        let mut other = None;
        while start.elapsed() < duration {
            let batch = initiator.allocate_batch(requests.len())?;
            initiator.submit(&batch, &requests)?;
            if let Some(batch) = other.replace(batch) {
                bytes += finish(&initiator, batch)?;
            }
        }
        if let Some(batch) = other {
            bytes += finish(&initiator, batch)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        let rate = bytes as f64 / seconds / 1e9;

        let mut latencies: Vec<_> = (0..2000)
            .map(|_| {
                let start = Instant::now();
                initiator.submit_and_wait(&requests[..1], LONG).map(|_| start.elapsed())
            })
            .collect::<Result<_, _>>()?;
        latencies.sort_unstable();
        println!(
            "{opcode:?} {block} B x {batch}: {rate:.3} GB/s; one request alone: median {:?}, p99 {:?}",
            latencies[latencies.len() / 2],
            latencies[latencies.len() * 99 / 100]
        );
    }
    Ok(())
}

fn request(
    opcode: Opcode,
    source: u64,
    segment: &Segment,
    offset: usize,
    length: usize,
) -> Result<TransferRequest, Box<dyn std::error::Error>> {
    let (offset, length) = (offset as u64, length as u64);
    let target_offset = segment.address_of(0, offset, length)?;
    Ok(TransferRequest {
        opcode,
        source: source + offset,
        target: segment.id(),
        target_offset,
        length,
    })
}

fn finish(
    engine: &TransferEngine,
    batch: millstream_transfer::Batch,
) -> Result<u64, Box<dyn std::error::Error>> {
    if !engine.wait(&batch, LONG) {
        return Err("a batch took longer than a minute".into());
    }
    let mut bytes = 0;
    for status in engine.statuses(&batch) {
        match (status.state, status.error) {
            (TransferState::Completed, _) => bytes += status.transferred_bytes,
            (_, Some(error)) => return Err(error.into()),
            (state, None) => return Err(format!("a task ended as {state:?}").into()),
        }
    }
    engine.free(batch)?;
    Ok(bytes)
}
