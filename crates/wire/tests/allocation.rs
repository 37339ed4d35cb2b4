//! Parsing, emitting and checking a packet allocates nothing. An allocator that counts is global
//! to its process, so this test has a binary to itself.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

use common::{Layers, captures};
use millstream_wire::icrc::{self, Addresses, Addressing, Solver};
use millstream_wire::{Packet, ParseError};

thread_local! {
    /// Allocations of this thread: the test harness has others, which allocate when they like.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged, whose promises hold for us. The
// counter is a plain cell, built at compile time, that needs no allocation and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above, that is from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often this thread allocates in `work`.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(black_box(vec![0_u8; 100]))), 1);
    assert_eq!(allocations(|| drop(black_box(vec![0_u8; 100].into_boxed_slice()))), 1);
    assert_eq!(allocations(|| ()), 0);
}

#[test]
fn packets_are_parsed_checked_and_emitted_without_allocating() {
    let captures = captures();
    let mut buffer = vec![0; 9000];
    let mut packets = 0;
    let count = allocations(|| {
        for frame in captures.iter().flat_map(|capture| &capture.frames) {
            let Ok(layers) = Layers::parse(frame) else { panic!("a frame does not parse") };
            let computed = icrc::of_datagram(&layers.addressing(), layers.datagram);
            assert!(computed == layers.packet.icrc);
            assert!(layers.packet.emit(&mut buffer) == layers.datagram.len());
            packets += 1;
        }
    });
    assert!(packets > 1000, "{packets}");
    assert_eq!(count, 0);
}

#[test]
fn solving_for_the_identification_does_not_allocate() {
    let datagram = [0; 1052];
    let addressing = |identification| Addressing {
        addresses: Addresses::V4 {
            source: [10, 0, 0, 1].into(),
            destination: [10, 0, 0, 2].into(),
            identification,
            flags: 0x4000,
        },
        source_port: 0xc000,
        destination_port: 4791,
    };
    let count = allocations(|| {
        let solver = Solver::new(datagram.len());
        let computed = icrc::of_datagram(&addressing(0), &datagram);
        let received = icrc::of_datagram(&addressing(63), &datagram);
        assert!(solver.identification(0, computed, received) == Some(63));
    });
    assert_eq!(count, 0);
}

#[test]
fn refusing_damaged_packets_does_not_allocate() {
    let captures = captures();
    let frames: Vec<_> = captures.iter().flat_map(|capture| &capture.frames).take(200).collect();
    let (mut refused, mut truncated) = (0, 0);
    let count = allocations(|| {
        for frame in &frames {
            for length in 0..40 {
                match Packet::parse(black_box(&frame[42..42 + length.min(frame.len() - 42)])) {
                    Ok(_) => {}
                    Err(ParseError::Truncated { .. }) => truncated += 1,
                    Err(_) => refused += 1,
                }
            }
        }
    });
    assert!(truncated > 1000, "{truncated} truncated, {refused} otherwise refused");
    assert_eq!(count, 0);
}
