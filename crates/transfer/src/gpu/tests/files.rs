//! Files, and memory of a GPU that is not there.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::{FileOptions, NvmeofConfig};

/// A file that is removed.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Self {
        let name = format!("millstream-gpu-{}", address());
        let path = std::env::temp_dir().join(name);
        fs::write(&path, vec![0; LENGTH]).unwrap();
        Self(path.canonicalize().unwrap())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// An engine that offers a file, one that asks it for that, or opens it itself where it is mapped, and the file.
fn engines(mapped: bool) -> (TransferEngine, TransferEngine, Temporary, String) {
    let file = Temporary::new();
    let folder = file.0.parent().unwrap().to_owned();
    let (target, own) = (engine(&[]), engine(&[]));
    target.install_nvmeof(NvmeofConfig::default()).unwrap();
    own.install_nvmeof(NvmeofConfig {
        mapped_folders: vec![folder],
        server_name: Some("here".to_owned()),
        ..NvmeofConfig::default()
    })
    .unwrap();
    let place = ("here".to_owned(), file.0.display().to_string());
    let local_path_map = mapped.then_some(place).into_iter().collect();
    let options = FileOptions { writable: true, local_path_map, ..FileOptions::default() };
    let name = target.register_file(&file.0, options).unwrap();
    (target, own, file, name)
}

fn transfer(
    opcode: Opcode,
    memory: (&Memory, u64),
    segment: &Segment,
    target_offset: u64,
    length: usize,
) -> TransferRequest {
    let source = memory.0.address() + memory.1;
    TransferRequest { opcode, source, target: segment.id(), target_offset, length: length as u64 }
}

#[test]
fn files_are_written_from_and_read_into_memory_of_a_gpu() {
    let gpu = gpu();
    for mapped in [false, true] {
        let (_target, own, file, name) = engines(mapped);
        let segment = own.open_segment(&name).unwrap();
        let memory = Memory::new(&own, Some(&gpu));
        for (here, there, length) in
            [(0, 0, LENGTH), (3, 70_001, 1), (77, 4096, 4096), (1, 2, 300_003), (9, 5, 4_300_001)]
        {
            let (mine, theirs) = (pattern(length as u8), pattern(!length as u8));
            memory.write(&mine);
            fs::write(&file.0, &theirs).unwrap();
            let write = transfer(Opcode::Write, (&memory, here as u64), &segment, there, length);
            own.submit_and_wait(&[write], LONG).unwrap();
            let mut after = theirs;
            after[there as usize..][..length].copy_from_slice(&mine[here..][..length]);
            assert!(fs::read(&file.0).unwrap() == after, "mapped {mapped}, WRITE of {length}");

            memory.write(&pattern(9));
            let read = transfer(Opcode::Read, (&memory, here as u64), &segment, there, length);
            own.submit_and_wait(&[read], LONG).unwrap();
            let mut expected = pattern(9);
            expected[here..][..length].copy_from_slice(&mine[here..][..length]);
            assert!(memory.read() == expected, "mapped {mapped}, READ of {length}");
        }
    }
}

/// READs and WRITEs of both kinds of memory, of which many are under way: their headers go together.
#[test]
fn both_kinds_of_memory_are_under_way_to_a_file() {
    let gpu = gpu();
    let (_target, own, file, name) = engines(false);
    let segment = own.open_segment(&name).unwrap();
    let [near, there, host] = [Some(&gpu), Some(&gpu), None].map(|gpu| Memory::new(&own, gpu));
    let bytes = pattern(1);
    fs::write(&file.0, &bytes).unwrap();
    near.write(&pattern(2));
    let length = 5000_u64;
    let mut requests = Vec::new();
    for round in 0..300_u64 {
        let at = round * 3 * length;
        requests.push(transfer(Opcode::Read, (&there, at), &segment, at, length as usize));
        let to = at + length;
        requests.push(transfer(Opcode::Write, (&near, to), &segment, to, length as usize));
        let from = at + 2 * length;
        requests.push(transfer(Opcode::Read, (&host, from), &segment, from, length as usize));
    }
    own.submit_and_wait(&requests, LONG).unwrap();
    let (written, read, host) = (fs::read(&file.0).unwrap(), there.read(), host.read());
    let other = pattern(2);
    let length = length as usize;
    for at in (0..300).map(|round| round * 3 * length) {
        let [first, second, third] =
            [0, 1, 2].map(|place| at + place * length..at + (place + 1) * length);
        assert!(read[first.clone()] == bytes[first], "{at}");
        assert!(written[second.clone()] == other[second], "{at}");
        assert!(host[third.clone()] == bytes[third], "{at}");
    }
}

#[test]
fn memory_that_was_freed_fails_its_own_requests_to_files() {
    let gpu = gpu();
    for mapped in [false, true] {
        let (_target, own, file, name) = engines(mapped);
        let segment = own.open_segment(&name).unwrap();
        let (memory, gone) = (Memory::new(&own, Some(&gpu)), Memory::new(&own, Some(&gpu)));
        memory.write(&pattern(5));
        gpu.free(gone.address());
        for _ in 0..2 {
            for opcode in [Opcode::Write, Opcode::Read] {
                let one = transfer(opcode, (&gone, 0), &segment, 0, 400_000);
                let error = own.submit_and_wait(&[one], LONG).unwrap_err().to_string();
                let text = "memory of a GPU here cannot be copied";
                assert!(error.contains(text), "mapped {mapped}, {opcode:?}: {error}");
            }
            let one = transfer(Opcode::Write, (&memory, 0), &segment, 0, LENGTH);
            own.submit_and_wait(&[one], LONG).unwrap();
            assert!(fs::read(&file.0).unwrap() == pattern(5));
        }
    }
}

/// Once it is unregistered, nothing is read into it any more.
#[test]
fn memory_can_be_unregistered_while_a_file_is_read() {
    let gpu = gpu();
    for mapped in [false, true] {
        let (_target, own, file, name) = engines(mapped);
        fs::write(&file.0, pattern(3)).unwrap();
        let segment = own.open_segment(&name).unwrap();
        let memory = Memory::new(&own, Some(&gpu));
        let one = transfer(Opcode::Read, (&memory, 0), &segment, 0, LENGTH);
        let pointer = std::ptr::without_provenance_mut(memory.address() as usize);
        for round in 0..10 {
            let batch = own.allocate_batch(16).unwrap();
            own.submit(&batch, &[one; 16]).unwrap();
            own.unregister_memory(pointer).unwrap();
            gpu.write(memory.address(), &vec![0xee; LENGTH]);
            assert!(own.wait(&batch, LONG));
            assert!(memory.read().iter().all(|byte| *byte == 0xee), "{mapped}, round {round}");
            drop(batch);
            register(&own, memory.address()).unwrap();
        }
        own.submit_and_wait(&[one], LONG).unwrap();
        assert!(memory.read() == pattern(3));
    }
}
