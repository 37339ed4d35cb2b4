//! What `bench rdma` found, as JSON and as a table.

use std::time::Duration;

use serde::Serialize;

use super::Operation;
use super::latency::{Latency, Pair};
use super::work::Counted;
use crate::bench::figures::{per, three_digits};
use crate::{output, units};

/// What `--json` prints.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) seconds_each: f64,
    pub(super) busy_poll: bool,
    pub(super) bandwidth: Vec<Bandwidth>,
    pub(super) working_set: u64,
    /// Of each device.
    pub(super) queue_pairs: u16,
    pub(super) shards: u16,
    /// Pairs of them.
    pub(super) devices: u16,
    /// Pairs of processes, where it is not one process that has both sides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) processes: Option<u16>,
    /// Of a WRITE of 4 KiB, from posting it to its completion, with no other outstanding, and of 4 KiB
    /// there and back over TCP: asleep and awake.
    pub(super) latency: [Pair; 2],
    pub(super) udp_stream: Stream,
    /// So many streams at once.
    pub(super) udp_streams: u16,
    /// Payload bytes of their datagrams.
    pub(super) udp_datagram: usize,
    pub(super) udp_segmentation_offload: bool,
    pub(super) tcp_stream: Stream,
    pub(super) memory_copy: Stream,
}

#[derive(Serialize)]
pub(super) struct Bandwidth {
    pub(super) op: Operation,
    pub(super) size: u64,
    /// Requests outstanding of each pair of devices.
    pub(super) depth: usize,
    #[serde(flatten)]
    pub(super) stream: Stream,
    /// Our rate in parts of the plain UDP stream's.
    pub(super) ratio_to_udp: f64,
    /// And of the TCP stream's.
    pub(super) ratio_to_tcp: f64,
    pub(super) retransmissions: u64,
    #[serde(flatten)]
    pub(super) counted: Counted,
}

impl Bandwidth {
    fn name(&self) -> String {
        format!("{} {}", format!("{:?}", self.op).to_uppercase(), units::readable(self.size))
    }
}

#[derive(Clone, Copy, Serialize)]
pub(super) struct Stream {
    /// Of all devices together.
    pub(super) gb_per_s: f64,
    /// Of all processes: of both sides, and of the kernel on their behalf.
    pub(super) cpu_s_per_gb: f64,
}

impl Stream {
    pub(super) fn new(bytes: u64, elapsed: Duration, cpu: Duration) -> Self {
        let gigabytes = bytes as f64 / 1e9;
        Self {
            gb_per_s: per(gigabytes, elapsed.as_secs_f64()),
            cpu_s_per_gb: per(cpu.as_secs_f64(), gigabytes),
        }
    }

    /// Half of the one and half of the other.
    pub(super) fn mean(self, other: Self) -> Self {
        Self {
            gb_per_s: f64::midpoint(self.gb_per_s, other.gb_per_s),
            cpu_s_per_gb: f64::midpoint(self.cpu_s_per_gb, other.cpu_s_per_gb),
        }
    }
}

pub(super) fn print(report: &Report) -> anyhow::Result<()> {
    let line = |what: &str, stream: &Stream, more: &str| {
        let (gb_per_s, cpu_s_per_gb) = (three_digits(stream.gb_per_s), stream.cpu_s_per_gb);
        output::line(&format!("{what:<28}{gb_per_s:>8}{cpu_s_per_gb:>13.3}{more}"))
    };
    let Report { devices, queue_pairs, shards, .. } = *report;
    let shards = if shards == 1 { String::new() } else { format!(", shards of each: {shards}") };
    if let Some(processes) = report.processes {
        output::line(&format!(
            "pairs of processes: {processes}, queue pairs of each: {queue_pairs}{shards}"
        ))?;
    } else if (devices, queue_pairs) != (1, 1) {
        output::line(&format!(
            "pairs of devices: {devices}, queue pairs of each: {queue_pairs}{shards}"
        ))?;
    }
    output::line(&format!(
        "{:<28}{:>8}{:>13}{:>9}{:>9}{:>9}",
        "", "GB/s", "CPU s/GB", "of UDP", "of TCP", "resends"
    ))?;
    for one in &report.bandwidth {
        let more =
            format!("{:>9.2}{:>9.2}{:>9}", one.ratio_to_udp, one.ratio_to_tcp, one.retransmissions);
        line(&format!("{}, {} outstanding", one.name(), one.depth), &one.stream, &more)?;
    }
    let offload = if report.udp_segmentation_offload { "GSO and GRO" } else { "no offload" };
    let plain = match report.udp_streams {
        1 => format!("plain UDP, {offload}"),
        streams => format!("{streams} plain UDP, {offload}"),
    };
    line(&plain, &report.udp_stream, "")?;
    line("TCP", &report.tcp_stream, "")?;
    line("memory copy", &report.memory_copy, "")?;
    for Pair { busy_poll, write, tcp_ping_pong, ratio_to_tcp } in &report.latency {
        let how = if *busy_poll { "busy polling" } else { "asleep" };
        let Latency { p50_us, p99_us, .. } = write;
        output::line(&format!(
            "{:<28}{p50_us:>8.1} us (p99 {p99_us:.1} us), {ratio_to_tcp:.2} of TCP's {:.1} us (p99 \
             {:.1} us)",
            format!("WRITE 4 KiB, {how}"),
            tcp_ping_pong.p50_us,
            tcp_ping_pong.p99_us
        ))?;
    }
    print_counted(&report.bandwidth)
}

fn print_counted(bandwidth: &[Bandwidth]) -> anyhow::Result<()> {
    let (sent, received) = ("messages sent", "received");
    output::line("")?;
    output::line(&format!("{:<22}{:>14}{sent:>18}{received:>13}", "a packet", "system calls"))?;
    for one in bandwidth {
        let Counted {
            system_calls_per_packet: calls,
            sent_messages_per_packet: sent,
            received_messages_per_packet: received,
            packets_per_gb,
            ..
        } = one.counted;
        output::line(&format!(
            "{:<22}{calls:>14.3}{sent:>18.3}{received:>13.3}{packets_per_gb:>15.0} packets/GB",
            one.name()
        ))?;
    }
    Ok(())
}
