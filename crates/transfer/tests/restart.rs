//! A peer that is started again under its old name is another one: nothing that was meant for the
//! first reaches it.

mod common;

use std::net::IpAddr;

use common::{LONG, address, contents, engine, private, request, shared};
use millstream_transfer::{Config, Opcode, RdmaConfig, TransferEngine};

/// An engine on this port of the address of its only device.
fn start(device: IpAddr, port: u16) -> TransferEngine {
    let config = Config { listen: (device, port).into(), ..common::config(device) };
    let engine = TransferEngine::new(config).unwrap();
    engine.install_rdma(RdmaConfig::new(&[device])).unwrap();
    engine
}

fn port(engine: &TransferEngine) -> u16 {
    engine.name().rsplit_once(':').unwrap().1.parse().unwrap()
}

#[test]
fn a_restart_before_the_first_transfer_is_noticed() {
    let device = address();
    let first = start(device, 0);
    let _memory = shared(&first, 100);
    let (name, port) = (first.name().to_owned(), port(&first));
    let initiator = engine(1);
    let local = private(&initiator, 100);
    local.write(0, &[9; 100]).unwrap();
    let segment = initiator.open_segment(&name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 100);
    drop(first);
    let second = start(device, port);
    let memory = shared(&second, 100);
    let error = initiator.submit_and_wait(&[write], LONG).unwrap_err().to_string();
    assert!(error.contains("restarted"), "{error}");
    assert_eq!(contents(&memory, 0, 100), [0; 100]);
}

#[test]
fn who_opens_the_segment_again_after_a_restart_is_served() {
    let device = address();
    let first = start(device, 0);
    let _memory = shared(&first, 100);
    let (name, port) = (first.name().to_owned(), port(&first));
    let initiator = engine(1);
    let local = private(&initiator, 100);
    local.write(0, &[9; 100]).unwrap();
    let segment = initiator.open_segment(&name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 100);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    drop(first);
    let second = start(device, port);
    let memory = shared(&second, 100);
    initiator.close_segment(segment.id()).unwrap();
    let segment = initiator.open_segment(&name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 100);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert_eq!(contents(&memory, 0, 100), [9; 100]);
}

/// Two segments are of one process, which is started three times. One of them is used only then, with what the first start
/// had said.
#[test]
fn what_the_first_start_of_a_process_has_said_is_not_taken_for_news_after_the_third() {
    let device = address();
    let first = start(device, 0);
    let _memory = shared(&first, 100);
    let (name, port) = (first.name().to_owned(), port(&first));
    let initiator = engine(1);
    let local = private(&initiator, 100);
    local.write(0, &[9; 100]).unwrap();
    let old = initiator.open_segment(&name).unwrap();
    drop(first);
    // The same address in other words.
    let IpAddr::V4(four) = device else { panic!("{device}") };
    let [a, b, c, d] = four.octets();
    let alias = format!("{a:#x}.{b}.{c}.{d}:{port}");
    let second = start(device, port);
    let _memory = shared(&second, 100);
    let segment = initiator.open_segment(&alias).unwrap();
    assert_ne!(segment.id(), old.id());
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 100);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    drop(second);
    let third = start(device, port);
    let memory = shared(&third, 100);
    initiator.refresh_segment(segment.id()).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, 100);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    memory.write(0, &[0; 100]).unwrap();
    let late = request(Opcode::Write, (&local, 0), &old, 0, 100);
    let error = initiator.submit_and_wait(&[late], LONG).unwrap_err().to_string();
    assert!(error.contains("restarted"), "{error}");
    assert_eq!(contents(&memory, 0, 100), [0; 100]);
    for segment in [&segment, &old] {
        initiator.refresh_segment(segment.id()).unwrap();
        let write = request(Opcode::Write, (&local, 0), segment, 0, 100);
        initiator.submit_and_wait(&[write], LONG).unwrap();
        assert_eq!(contents(&memory, 0, 100), [9; 100]);
        memory.write(0, &[0; 100]).unwrap();
    }
}
