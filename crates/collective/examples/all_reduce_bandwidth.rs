//! How fast an AllReduce is on this machine, with controller, switch and hosts in one process:
//!
//! ```text
//! cargo run --release -p millstream-collective --example all_reduce_bandwidth -- HOSTS MIB ITERATIONS [SEGMENT_KIB WINDOW]
//! ```

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use millstream_collective::{Communicator, JoinConfig, Path, ReduceOperation};
use millstream_control::controller::{self, ControllerConfig};
use millstream_control::shutdown;
use millstream_control::switch::{self, SwitchConfig};
use millstream_verbs::{Device, SoftConfig};

fn address(host: u32) -> IpAddr {
    let process = std::process::id();
    Ipv4Addr::new(127, 192 | (process >> 8) as u8 & 63, process as u8, host as u8 + 1).into()
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<u32> =
        std::env::args().skip(1).map(|a| a.parse()).collect::<Result<_, _>>()?;
    let &[hosts, mib, iterations, ref rest @ ..] = &arguments[..] else {
        return Err("usage: bandwidth HOSTS MIB ITERATIONS [SEGMENT_KIB WINDOW]".into());
    };
    let mut config = ControllerConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    if let &[segment_kib, window] = rest {
        config.rules.segment_bytes = segment_kib << 10;
        config.rules.window = window;
    }
    let (_stop_controller, stopped) = shutdown();
    let (ready, listening) = mpsc::channel();
    thread::spawn(move || {
        controller::run(config, move |address| ready.send(address).unwrap_or_default(), stopped)
    });
    let controller = listening.recv()?;
    let (_stop_switch, stopped) = shutdown();
    let switch_config = SwitchConfig::new(controller, "switch", address(0));
    thread::spawn(move || switch::run(switch_config, drop, stopped));

    let times: Vec<Result<Vec<Duration>, String>> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..hosts)
            .map(|rank| {
                scope.spawn(move || {
                    run(controller, hosts, rank, mib, iterations).map_err(|error| error.to_string())
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err("panic".into()))).collect()
    });
    let times = times.into_iter().collect::<Result<Vec<_>, _>>()?;
    // An iteration is as slow as its slowest rank.
    let mut slowest: Vec<Duration> = (0..iterations as usize)
        .map(|index| times.iter().map(|rank| rank[index]).max().unwrap_or_default())
        .collect();
    slowest.sort_unstable();
    let bytes = f64::from(mib) * 1024.0 * 1024.0;
    let rate = |time: Duration| bytes / time.as_secs_f64() / 1e6;
    let median = slowest[slowest.len() / 2];
    println!(
        "{hosts} hosts x {mib} MiB: median {median:?} ({:.0} MB/s), best {:?} ({:.0} MB/s), worst {:?}",
        rate(median),
        slowest[0],
        rate(slowest[0]),
        slowest[slowest.len() - 1],
    );
    Ok(())
}

fn run(
    controller: SocketAddr,
    hosts: u32,
    rank: u32,
    mib: u32,
    iterations: u32,
) -> Result<Vec<Duration>, Box<dyn Error>> {
    let device = Device::open_soft(&SoftConfig::new(address(rank + 1)))?;
    let config = JoinConfig::new(controller, "bandwidth", hosts, rank, &device);
    let mut communicator = Communicator::join(&JoinConfig { path: Path::Switch, ..config })?;
    let length = mib as usize * (1 << 18);
    let mut source = communicator.allocate::<i32>(length)?;
    let mut result = communicator.allocate::<i32>(length)?;
    source.fill(rank as i32 + 1);
    let sum = (hosts * (hosts + 1) / 2) as i32;
    let mut times = Vec::new();
    for iteration in 0..=iterations {
        // Everyone at the start line.
        communicator.all_reduce_in_place::<i32>(&mut [], ReduceOperation::Sum)?;
        let start = Instant::now();
        communicator.all_reduce_buffers(&source, &mut result, ReduceOperation::Sum)?;
        // The first one touches the pages.
        if iteration > 0 {
            times.push(start.elapsed());
        }
        if result.iter().any(|&element| element != sum) {
            return Err("a wrong sum".into());
        }
        result.fill(0);
    }
    let counters = device.counters();
    if counters.retransmissions + counters.timeouts > 0 {
        eprintln!("rank {rank}: {counters:?}");
    }
    Ok(times)
}
