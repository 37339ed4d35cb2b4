//! No bytes make a parser panic: arbitrary ones, and real packets with damage.

mod common;

use common::captures;
use millstream_wire::{Opcode, fuzz};
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// Bytes where a parser looks first: an opcode that it knows, and version and padding bits.
fn almost_packet() -> impl Strategy<Value = Vec<u8>> {
    (select(Opcode::ALL), 0..4_u8, vec(any::<u8>(), 0..80)).prop_map(|(opcode, pad, mut bytes)| {
        bytes.splice(0..0, [opcode as u8, pad << 4]);
        bytes
    })
}

/// A frame of a capture, with some bytes overwritten, and sometimes cut short.
fn damaged_frame() -> impl Strategy<Value = Vec<u8>> {
    let frames: Vec<_> = captures().into_iter().flat_map(|capture| capture.frames).collect();
    let damage = vec((any::<Index>(), any::<u8>(), any::<bool>()), 0..4);
    let cut = weighted(0.25, any::<Index>());
    (select(frames), damage, cut).prop_map(|(mut frame, damage, cut)| {
        // Half of the damage goes to the headers, where it changes the way through the parsers.
        let headers = frame.len().min(82);
        for (place, byte, early) in damage {
            let within = if early { headers } else { frame.len() };
            frame[place.index(within)] = byte;
        }
        if let Some(cut) = cut {
            frame.truncate(cut.index(frame.len()));
        }
        frame
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn arbitrary_bytes(bytes in vec(any::<u8>(), 0..200)) {
        fuzz::headers(&bytes);
        fuzz::packet(&bytes);
        fuzz::frame(&bytes);
        fuzz::icrc(&bytes);
    }

    #[test]
    fn almost_packets(bytes in almost_packet()) {
        fuzz::packet(&bytes);
    }

    #[test]
    fn damaged_frames(frame in damaged_frame()) {
        fuzz::frame(&frame);
        fuzz::headers(&frame);
        for layer in [14, 34, 42] {
            fuzz::headers(frame.get(layer..).unwrap_or_default());
        }
        fuzz::packet(frame.get(42..).unwrap_or_default());
    }
}

#[test]
fn captured_frames_are_accepted() {
    for capture in captures() {
        for frame in &capture.frames {
            assert!(fuzz::frame(frame));
            assert!(fuzz::packet(&frame[42..]));
        }
    }
}
