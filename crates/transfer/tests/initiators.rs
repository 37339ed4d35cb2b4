//! Initiators in processes of their own that are killed, and leave nothing behind at their target.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::node::{self, Node};
use common::{LONG, address, engine, engine_with, is_emulated, private, request};
use millstream_lab::Stopwatch;
use millstream_metadata::{Client, Frame, FrameType, Gid, HandShakeDesc, SegmentDesc};
use millstream_transfer::{Opcode, RdmaConfig};

/// Set in initiators: the address of the device, and the name of the target.
const INITIATOR: &str = "MILLSTREAM_TEST_INITIATOR";

/// How many are killed in all, if not 400.
const KILLED: &str = "MILLSTREAM_TEST_KILLED";

const LENGTH: usize = 1 << 20;
/// Killed in each of two threads before memory is looked at again.
const EACH: usize = 20;

/// Queue pairs that the target has for peers: the killed make room for each other. That they are also
/// forgotten because they do not answer takes seconds, and is a test of the command `node`.
const ACCEPTED: usize = 32;

/// The first so many fill what is kept for use again.
const FIRST: usize = 200;

/// By how much memory may grow with each after those. The numbers of up to 8192 connections that are closed
/// are remembered, which takes less.
const GROWTH_KIB: usize = 2;

#[test]
fn a_node() {
    node::run();
}

/// The process that the test kills. As a test of its own, nothing.
#[test]
fn an_initiator() {
    let Ok(role) = std::env::var(INITIATOR) else { return };
    let (device, target) = role.split_once(' ').unwrap();
    let engine = engine_with(RdmaConfig::new(&[device.parse().unwrap()]));
    let local = private(&engine, LENGTH);
    let segment = engine.open_segment(target).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    engine.submit_and_wait(&[write], LONG).unwrap();
    println!("initiator: writes");
    while engine.submit_and_wait(&[write; 4], LONG).is_ok() {}
}

/// Starts an initiator, and kills it in the middle of a batch.
fn kill_one(device: &str, target: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "an_initiator", "--nocapture"]);
    command.env(INITIATOR, format!("{device} {target}")).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("initiator: writes")), "it ended early");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn initiators_that_are_killed_leave_nothing_behind() {
    let all = std::env::var(KILLED).map_or(400, |number| number.parse().unwrap());
    let mut target = Node::start_with(1, LENGTH, ACCEPTED);
    let devices = [address(), address()].map(|address| address.to_string());
    let mut before = None;
    let mut last = (0, 0);
    for round in 1..=all / (2 * EACH) {
        thread::scope(|scope| {
            for device in &devices {
                let target = &target.name;
                scope.spawn(|| (0..EACH).for_each(|_| kill_one(device, target)));
            }
        });
        // What it does still for the last is done when it has answered.
        target.sum();
        last = target.resources();
        println!("{} killed: {} KiB, {} files", round * 2 * EACH, last.0, last.1);
        if round * 2 * EACH == FIRST {
            before = Some(last);
        }
    }
    let before: (u64, usize) = before.unwrap();
    // A connection of the control port may be closed later.
    assert!(last.1 <= before.1 + 4, "{} files after {FIRST}, {} at the end", before.1, last.1);
    let most = before.0 + (GROWTH_KIB * (all - FIRST)) as u64;
    assert!(last.0 <= most, "{} KiB after {FIRST}, {} at the end", before.0, last.0);
}

/// Connects again and again: as the same initiator with one number after the other, or each time as another.
#[test]
fn a_peer_that_connects_in_a_loop_holds_up_nobody_and_leaves_nothing_behind() {
    const ROUNDS: u64 = 5;
    // An emulated processor takes a tenth of a second for each.
    let each: u64 = if is_emulated() { 200 } else { 1000 };
    let target = Node::start_with(1, LENGTH, ACCEPTED);
    let initiator = engine(1);
    let local = private(&initiator, LENGTH);
    let segment = initiator.open_segment(&target.name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    let (client, peer) = (Client::default(), target.name.parse().unwrap());
    let call = |frame_type, body| client.call(&peer, &Frame::new(frame_type, body)).unwrap().body;
    let descriptor = SegmentDesc::from_json(&call(FrameType::Metadata, Vec::new())).unwrap();
    let address = address();
    let connect = |incarnation, rail: u64, epoch| {
        let request = HandShakeDesc {
            // Nobody is there who could be told anything.
            local_nic_path: format!("{address}:1@nic"),
            local_gid: Some(Gid::from_address(address)),
            peer_nic_path: format!("{}@{}", target.name, descriptor.devices[0].name),
            qp_num: vec![17],
            incarnation: Some(incarnation),
            rail: Some(rail as u16),
            epoch: Some(epoch),
            ..HandShakeDesc::default()
        };
        let reply = call(FrameType::Connection, request.to_json());
        let reply = HandShakeDesc::from_json(&reply).unwrap();
        assert_eq!((reply.reply_msg.as_str(), reply.qp_num.len()), ("", 1));
    };
    let mut resources = Vec::new();
    for round in 0..ROUNDS {
        let stopwatch = Stopwatch::start();
        let longest = thread::scope(|scope| {
            let connecting = scope.spawn(|| {
                for number in (round * each..).take(each as usize) {
                    connect(1, number % 5, number + 1);
                    connect(number + 2, 0, 1);
                }
            });
            let mut longest = Duration::ZERO;
            while !connecting.is_finished() {
                let start = Instant::now();
                initiator.submit_and_wait(&[write; 4], LONG).unwrap();
                longest = longest.max(start.elapsed());
            }
            connecting.join().unwrap();
            longest
        });
        resources.push(target.resources());
        println!("{} connected: {resources:?}, {longest:?}", 2 * (round + 1) * each);
        // As if all that the machine took away was taken from that one.
        let held_up = stopwatch.took().held_up;
        assert!(longest < Duration::from_secs(1) + held_up, "{longest:?}, {held_up:?}");
    }
    // The first rounds fill what is kept for use again, and the numbers that are remembered.
    let ((memory, files), (at_the_end, last_files)) = (resources[0], resources[4]);
    assert!(last_files <= files + 4, "{resources:?}");
    let most = memory + 2 * (ROUNDS - 1) * each * GROWTH_KIB as u64;
    assert!(at_the_end <= most, "{resources:?}");
}
