//! A fixed number of requests, to count the instructions of one: run it with two numbers of batches, and
//! divide the difference.
//!
//! `valgrind --tool=callgrind target/release/examples/requests local|rdma|tcp BATCHES [BLOCK] [BATCH]`

use std::time::Duration;

use millstream_transfer::{Config, Opcode, RdmaConfig, TcpConfig, TransferEngine, TransferRequest};

const LONG: Duration = Duration::from_secs(600);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let transport = arguments.first().map_or("local", String::as_str);
    let number = |index: usize, default: usize| -> Result<usize, std::num::ParseIntError> {
        arguments.get(index).map_or(Ok(default), |text| text.parse())
    };
    let (batches, block, batch) = (number(1, 100)?, number(2, 64)?, number(3, 128)?);
    let engine = |address: &str| -> Result<TransferEngine, Box<dyn std::error::Error>> {
        let address = address.parse()?;
        let engine = TransferEngine::new(Config::new(address))?;
        match transport {
            "rdma" => engine.install_rdma(RdmaConfig::new(&[address]))?,
            "tcp" => engine.install_tcp(TcpConfig::default())?,
            _ => {}
        }
        Ok(engine)
    };
    let (initiator, target) = (engine("127.78.0.1")?, engine("127.78.0.2")?);
    let target = if transport == "local" { &initiator } else { &target };
    let length = block * batch;
    let _remote = target.allocate_buffer(length, "*", true)?;
    let local = initiator.allocate_buffer(length, "*", false)?;
    let segment = initiator.open_segment(target.name())?;
    let first = segment.address_of(0, 0, length as u64)?;
    let request = |index: usize| {
        let (offset, length) = ((index * block) as u64, block as u64);
        TransferRequest {
            opcode: Opcode::Write,
            source: local.address() + offset,
            target: segment.id(),
            target_offset: first + offset,
            length,
        }
    };
    let requests: Vec<_> = (0..batch).map(request).collect();
    for _ in 0..batches {
        let batch = initiator.allocate_batch(requests.len())?;
        initiator.submit(&batch, &requests)?;
        if !initiator.wait(&batch, LONG) {
            return Err("a batch took too long".into());
        }
    }
    println!("{} requests over {transport}", batches * batch);
    Ok(())
}
