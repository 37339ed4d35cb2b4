//! Pairs of processes that all work at once, on one pair of addresses: each process has a device of its
//! own, and all of one side share an address.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context;
use millstream_net::baseline::machine_time;

use super::process_end::{Arguments, Introduction, Share, Window};
use super::report::Stream;
use super::work::Work;
use crate::process::Child;

/// For a child to open its device, to connect, and to end beyond the time that it measures.
const PATIENCE: Duration = Duration::from_secs(20);

/// Until all have heard when they measure.
const LEAD: Duration = Duration::from_millis(100);

/// The children of one measurement.
struct Pair {
    near: Child,
    far: Child,
}

/// What all of them did.
pub(super) struct Total {
    pub(super) bytes: u64,
    pub(super) stream: Stream,
    pub(super) work: Work,
}

/// Measures so many pairs, of which the first of each posts.
pub(super) fn measure(
    [near, far]: [IpAddr; 2],
    count: u16,
    duration: Duration,
    end: impl Fn(IpAddr, bool) -> Arguments,
) -> anyhow::Result<Total> {
    let start = |address, posts| {
        Child::start_to_tell("an end that measures bandwidth", end(address, posts).words())
    };
    let mut pairs = Vec::with_capacity(count.into());
    for _ in 0..count {
        pairs.push(Pair { near: start(near, true)?, far: start(far, false)? });
    }
    for Pair { near, far } in &mut pairs {
        let [first, second] = [introduction(near)?, introduction(far)?];
        near.tell(&second)?;
        far.tell(&first)?;
    }
    let both = |pair: &mut Pair, each: &dyn Fn(&mut Child) -> anyhow::Result<()>| {
        each(&mut pair.near).and_then(|()| each(&mut pair.far))
    };
    for pair in &mut pairs {
        both(pair, &|child| child.ready(PATIENCE).map(drop))?;
    }
    // Until windows have opened.
    let start = machine_time() + LEAD + duration / 10;
    let window = Window { start, end: start + duration };
    for pair in &mut pairs {
        both(pair, &|child| child.tell(&window))?;
    }
    let (mut shares, mut rest) = (Vec::with_capacity(2 * pairs.len()), Vec::new());
    for Pair { near, far } in pairs {
        shares.push(share(near, duration)?);
        rest.push(far);
    }
    // Nobody has requests any more.
    for mut far in rest {
        far.hush();
        shares.push(share(far, duration)?);
    }
    Ok(add_up(&shares))
}

fn introduction(child: &mut Child) -> anyhow::Result<Introduction> {
    let said = child.ready(PATIENCE)?;
    serde_json::from_value(said).context("an end that measures bandwidth said something else")
}

fn share(child: Child, duration: Duration) -> anyhow::Result<Share> {
    let printed = child.finish(duration * 2 + PATIENCE)?;
    serde_json::from_str(&printed).context("an end that measures bandwidth printed no report")
}

/// The rates of all, and what all took together.
fn add_up(shares: &[Share]) -> Total {
    let bytes = shares.iter().map(|share| share.bytes).sum();
    let cpu = shares.iter().map(|share| share.cpu).sum();
    let gb_per_s = shares.iter().map(|share| share.bytes_per_s).sum::<f64>() / 1e9;
    let stream = Stream { gb_per_s, ..Stream::new(bytes, Duration::ZERO, cpu) };
    let work = shares.iter().fold(Work::default(), |sum, share| sum.plus(share.work));
    Total { bytes, stream, work }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_processor_time_are_those_of_all() {
        let share = |bytes: u64, millis, cpu| Share {
            bytes,
            bytes_per_s: bytes as f64 / Duration::from_millis(millis).as_secs_f64(),
            cpu: Duration::from_millis(cpu),
            work: Work::default(),
        };
        let shares = [
            share(1_000_000_000, 500, 300),
            share(3_000_000_000, 1000, 700),
            share(0, 490, 400),
            share(0, 1000, 600),
        ];
        let Total { bytes, stream, .. } = add_up(&shares);
        assert_eq!(bytes, 4_000_000_000);
        assert!((stream.gb_per_s - 5.0).abs() < 1e-9, "{}", stream.gb_per_s);
        assert!((stream.cpu_s_per_gb - 0.5).abs() < 1e-9, "{}", stream.cpu_s_per_gb);
    }
}
