//! The engine's own segment, and memory that callers bring.

mod common;

use common::{LONG, contents, engine, pattern, private, shared};
use millstream_transfer::{Config, Opcode, SegmentId, TransferEngine, TransferRequest};

fn local_engine() -> TransferEngine {
    TransferEngine::new(Config::new("127.0.0.1".parse().unwrap())).unwrap()
}

#[test]
fn an_engine_copies_within_its_own_segment() {
    let engine = local_engine();
    let target = shared(&engine, 1 << 20);
    let source = private(&engine, 1 << 20);
    let bytes = pattern(300_000, 1);
    source.write(5, &bytes).unwrap();
    let segment = engine.open_segment(engine.name()).unwrap();
    assert_eq!(segment.id(), SegmentId::LOCAL);
    assert_eq!(segment.buffers().len(), 1, "what is not remote accessible is not offered");
    let request = |opcode| TransferRequest {
        opcode,
        source: source.address() + 5,
        target: SegmentId::LOCAL,
        target_offset: target.address() + 77,
        length: 300_000,
    };
    assert_eq!(engine.submit_and_wait(&[request(Opcode::Write)], LONG).unwrap(), 300_000);
    assert_eq!(contents(&target, 77, 300_000), bytes);
    source.write(5, &vec![0; 300_000]).unwrap();
    assert_eq!(engine.submit_and_wait(&[request(Opcode::Read)], LONG).unwrap(), 300_000);
    assert_eq!(contents(&source, 5, 300_000), bytes);
    assert_eq!(engine.transports().len(), 1);
}

#[test]
fn the_own_segment_by_another_name_is_the_own_segment() {
    let engine = local_engine();
    let port = engine.name().rsplit_once(':').unwrap().1.to_owned();
    let segment = engine.open_segment(&format!("localhost:{port}")).unwrap();
    assert_eq!(segment.id(), SegmentId::LOCAL);
}

#[test]
fn registering_has_the_codes_of_the_c_api() {
    let engine = engine(1);
    let buffer = shared(&engine, 8192);
    assert_eq!(engine.allocate_buffer(0, "*", true).unwrap_err().code(), -1);
    assert_eq!(engine.unregister_memory(std::ptr::dangling_mut()).unwrap_err().code(), -3);
    let address = buffer.address();
    let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
    engine.unregister_memory(pointer).unwrap();
    assert_eq!(engine.unregister_memory(pointer).unwrap_err().code(), -3);
    // It is still there, as plain memory.
    buffer.write(0, b"x").unwrap();
}

#[test]
fn buffers_have_bounds() {
    let engine = local_engine();
    let buffer = private(&engine, 100);
    assert!(buffer.write(0, &[1; 100]).is_ok());
    assert!(buffer.write(1, &[1; 100]).is_err());
    assert!(buffer.read(100, &mut []).is_ok());
    assert!(buffer.read(101, &mut []).is_err());
    let error = buffer.read(usize::MAX, &mut [0; 2]).unwrap_err();
    assert_eq!(error.code(), -1);
    assert_eq!(buffer.address() % 4096, 0);
}

#[test]
fn a_buffer_outlives_its_engine() {
    let engine = engine(1);
    let buffer = shared(&engine, 100);
    buffer.write(0, b"still here").unwrap();
    drop(engine);
    assert_eq!(contents(&buffer, 0, 10), b"still here");
}
