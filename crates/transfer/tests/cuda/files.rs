//! Files, written from memory of a GPU and read into it.

use std::fs;
use std::path::Path;
use std::time::Instant;

use millstream_transfer::{Config, FileOptions, NvmeofConfig, Opcode, TransferEngine};

use crate::common::{LONG, address, pattern};
use crate::{Memory, has_gpu};

fn with_files() -> TransferEngine {
    let engine = TransferEngine::new(Config::new(address())).unwrap();
    engine.install_nvmeof(NvmeofConfig::default()).unwrap();
    engine
}

#[test]
fn files_are_written_from_and_read_into_memory_of_a_gpu() {
    if !has_gpu() {
        return;
    }
    const LENGTH: usize = 64 << 20;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = if folder.is_dir() { folder.to_owned() } else { std::env::temp_dir() };
    let path = folder.join(format!("cuda-{}", std::process::id()));
    fs::write(&path, vec![0; LENGTH]).unwrap();
    let (target, own) = (with_files(), with_files());
    let options = FileOptions { writable: true, ..FileOptions::default() };
    let segment = own.open_segment(&target.register_file(&path, options).unwrap()).unwrap();
    for gpu in [false, true] {
        let memory = Memory::new(&own, gpu, LENGTH);
        for (here, there, length) in
            [(0, 0, LENGTH), (3, 70_001, 1), (4095, 1, 4097), (1, 2, (1 << 20) + 3)]
        {
            let (mine, theirs) = (pattern(LENGTH, length as u64), pattern(LENGTH, !length as u64));
            memory.write(&mine);
            fs::write(&path, &theirs).unwrap();
            for opcode in [Opcode::Write, Opcode::Read] {
                let request = millstream_transfer::TransferRequest {
                    opcode,
                    source: memory.address() + here,
                    target: segment.id(),
                    target_offset: there,
                    length: length as u64,
                };
                let start = Instant::now();
                own.submit_and_wait(&[request], LONG).unwrap();
                if length == LENGTH {
                    let rate = LENGTH as f64 / start.elapsed().as_secs_f64() / 1e9;
                    println!("file, {opcode:?}, GPU {gpu}: {rate:.2} GB/s");
                }
                let (here, there) = (here as usize, there as usize);
                if opcode == Opcode::Write {
                    let mut after = theirs.clone();
                    after[there..there + length].copy_from_slice(&mine[here..here + length]);
                    assert!(fs::read(&path).unwrap() == after, "WRITE of {length}, GPU {gpu}");
                    memory.write(&theirs);
                } else {
                    let mut after = theirs.clone();
                    after[here..here + length].copy_from_slice(&mine[here..here + length]);
                    assert!(memory.read(LENGTH) == after, "READ of {length}, GPU {gpu}");
                }
            }
        }
    }
    fs::remove_file(&path).unwrap();
}
