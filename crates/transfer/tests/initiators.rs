//! Initiators in processes of their own that are killed, and leave nothing behind at their target.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread;

use common::node::{self, Node};
use common::{LONG, address, engine_with, private, request};
use millstream_transfer::{Opcode, RdmaConfig};

/// Set in initiators: the address of the device, and the name of the target.
const INITIATOR: &str = "MILLSTREAM_TEST_INITIATOR";

/// How many are killed in all, if not 200.
const KILLED: &str = "MILLSTREAM_TEST_KILLED";

const LENGTH: usize = 1 << 20;
/// Killed in each of two threads before memory is looked at again.
const EACH: usize = 20;

/// Queue pairs that the target has for peers: the killed make room for each other. That they are also
/// forgotten because they do not answer takes seconds, and is a test of the command `node`.
const ACCEPTED: usize = 32;

/// The first so many fill what is kept for use again.
const FIRST: usize = 80;

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
    let all = std::env::var(KILLED).map_or(200, |number| number.parse().unwrap());
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
