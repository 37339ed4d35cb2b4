//! What the kernels of the switch cost: payloads of one size, combined into slots that fit a
//! processor's cache, on one thread. GB/s of payload, beside a copy of the same bytes. Run with
//! `cargo run --release -p millstream-inc --example kernels [bytes of payload] [slots]`.
#![allow(clippy::disallowed_methods, reason = "an example is not the sans-IO crate: it measures")]

use std::hint::black_box;
use std::num::NonZeroU32;
use std::time::{Duration, Instant as Clock};

use millstream_inc::kernels::Kernel;
use millstream_inc::{DataType, ReduceOperation};

/// How long one kernel is measured; the best of as many times counts.
const SAMPLE: Duration = Duration::from_millis(2);
const SAMPLES: u32 = 10;

struct Bench {
    payload_bytes: usize,
    payloads: Vec<u8>,
    slots: Vec<u8>,
    slot_count: usize,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| {
        arguments.next().map_or(default, |text| text.parse().expect("a number of bytes or slots"))
    };
    let (payload_bytes, slot_count): (usize, usize) = (number(1024), number(16));
    let mut bench = Bench {
        payload_bytes,
        // Bytes that are small numbers in every type, none of them a NaN or subnormal for long.
        payloads: (0..payload_bytes * slot_count).map(|at| [0, 60, 1, 61][at % 4]).collect(),
        slots: vec![0; 8 * payload_bytes * slot_count],
        slot_count,
    };
    println!("{slot_count} payloads of {payload_bytes} bytes; GB/s of payload");
    let copy = bench.rate(1, |slot, payload| slot[..payload.len()].copy_from_slice(payload));
    println!("{:<14}{copy:8.1}", "copy");
    for &data_type in DataType::ALL {
        for &operation in ReduceOperation::ALL {
            let Some(kernel) = Kernel::of(data_type, operation) else { continue };
            let width = kernel.accumulator_size() / kernel.wire_size();
            let combine = bench.rate(width, |slot, payload| kernel.combine(slot, payload));
            print!("{:<14}{combine:8.1}", format!("{data_type} {operation}"));
            if operation == ReduceOperation::Sum {
                let first = bench.rate(width, |slot, payload| kernel.first(slot, payload));
                print!("  first {first:6.1}");
            }
            if width > 1 || operation == ReduceOperation::Average {
                let ranks = NonZeroU32::new(3);
                let finish = bench.rate(width, |slot, _| {
                    kernel.finish(slot, ranks);
                });
                print!("  finish {finish:6.1}");
            }
            println!();
        }
    }
}

impl Bench {
    /// GB/s of payload, with slots of `width` times its size.
    fn rate(&mut self, width: usize, mut work: impl FnMut(&mut [u8], &[u8])) -> f64 {
        let slot_bytes = width * self.payload_bytes;
        (0..SAMPLES)
            .map(|_| {
                self.slots.fill(0);
                let (start, mut rounds) = (Clock::now(), 0);
                while start.elapsed() < SAMPLE {
                    let slots = self.slots.chunks_exact_mut(slot_bytes).take(self.slot_count);
                    for (slot, payload) in slots.zip(self.payloads.chunks_exact(self.payload_bytes))
                    {
                        work(black_box(slot), black_box(payload));
                    }
                    rounds += 1;
                }
                let bytes = rounds * self.slot_count * self.payload_bytes;
                bytes as f64 / start.elapsed().as_secs_f64() / 1e9
            })
            .fold(0.0, f64::max)
    }
}
