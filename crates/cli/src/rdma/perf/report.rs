//! What is printed: perftest's header and tables, or one JSON object.

use std::net::{IpAddr, Ipv6Addr};

use millstream_verbs::{Device, Driver, Mtu};
use serde::Serialize;

use super::agreement::{Address, Description};
use super::bandwidth;
use super::figures::{Latency, Outcome};
use super::test::{Amount, Operation, Plan, Test};
use crate::output::{self, line};
use crate::rdma::exchange::QueuePairAddress;
use crate::rdma::pattern::Side;

const RULE: &str =
    "---------------------------------------------------------------------------------------";
const MIB: f64 = 1_048_576.0;

/// Shows results as they come, or collects them for one object.
pub(super) struct Report {
    json: bool,
    gigabits: bool,
    latency: bool,
    /// The table's head was printed.
    begun: bool,
    object: Object,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Object {
    test: String,
    side: &'static str,
    device: String,
    provider: String,
    /// Of a soft device.
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<&'static str>,
    address: IpAddr,
    peer: IpAddr,
    queue_pairs: usize,
    path_mtu: usize,
    send_depth: usize,
    verified: bool,
    results: Vec<Row>,
}

/// The result for one size.
#[derive(Serialize)]
struct Row {
    /// Of a message.
    size: u32,
    iterations: u64,
    seconds: f64,
    bytes: u64,
    #[serde(flatten)]
    bandwidth: Option<Bandwidth>,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_us: Option<Latency>,
    messages_per_s: f64,
    /// Of this process, not of the other side.
    cpu_s_per_gb: f64,
    /// Bytes of the last messages that were compared with what they should be.
    checked_bytes: u64,
}

#[derive(Serialize)]
struct Bandwidth {
    peak_mib_per_s: f64,
    average_mib_per_s: f64,
    gb_per_s: f64,
}

impl Report {
    /// Prints the header.
    pub(super) fn start(
        plan: &Plan,
        device: &Device,
        peer: IpAddr,
        mtu: Mtu,
        json: bool,
        gigabits: bool,
    ) -> anyhow::Result<Self> {
        let object = Object {
            test: plan.test.name(),
            side: side(plan.side),
            device: device.name().to_owned(),
            provider: device.provider().to_string(),
            driver: device.driver().map(Driver::name),
            address: device.address(),
            peer,
            queue_pairs: plan.queue_pairs,
            path_mtu: mtu.bytes(),
            send_depth: plan.send_depth,
            verified: plan.verify,
            results: Vec::new(),
        };
        if !json {
            header(plan, device, mtu).iter().try_for_each(|text| line(text))?;
        }
        Ok(Self { json, gigabits, latency: plan.test.latency, begun: false, object })
    }

    /// Prints where the queue pairs of one side are: all at one port.
    pub(super) fn addresses(
        &self,
        test: Test,
        whose: &str,
        at: &QueuePairAddress,
        side: &Description,
    ) -> anyhow::Result<()> {
        if self.json {
            return Ok(());
        }
        for address in &side.queue_pairs {
            line(&queue_pair(test, whose, at.lid, address, side.reads))?;
            line(&format!(" GID: {}", gid_bytes(at.gid)))?;
        }
        Ok(())
    }

    /// Prints the head of the table, before the first size is measured.
    pub(super) fn table(&mut self) -> anyhow::Result<()> {
        if self.json || std::mem::replace(&mut self.begun, true) {
            return Ok(());
        }
        line(RULE)?;
        line(match (self.latency, self.gigabits) {
            (true, _) => {
                " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    \
                 t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]"
            }
            (false, false) => {
                " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   \
                 MsgRate[Mpps]   CPU[s/GB]"
            }
            (false, true) => {
                " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   \
                 MsgRate[Mpps]   CPU[s/GB]"
            }
        })
    }

    /// Prints the row of one size.
    pub(super) fn result(
        &mut self,
        size: u32,
        outcome: &Outcome,
        cpu_s: f64,
        checked_bytes: u64,
    ) -> anyhow::Result<()> {
        // The client's word, where we are the server: it may be 0.
        let seconds = outcome.seconds.max(1e-9);
        let bytes = u64::from(size).saturating_mul(outcome.iterations);
        let messages_per_s = outcome.iterations as f64 / seconds;
        let [peak, average] =
            [outcome.peak_per_s, messages_per_s].map(|per_s| per_s * f64::from(size));
        let bandwidth = Bandwidth {
            peak_mib_per_s: peak / MIB,
            average_mib_per_s: average / MIB,
            gb_per_s: average / 1e9,
        };
        let row = Row {
            size,
            iterations: outcome.iterations,
            seconds: outcome.seconds,
            bytes,
            bandwidth: (!self.latency).then_some(bandwidth),
            latency_us: outcome.latency.clone(),
            messages_per_s,
            cpu_s_per_gb: cpu_s / (bytes.max(1) as f64 / 1e9),
            checked_bytes,
        };
        if self.json {
            self.object.results.push(row);
            return Ok(());
        }
        line(&row.text(self.gigabits))
    }

    /// Prints the end of the table, or all as one object.
    pub(super) fn finish(self) -> anyhow::Result<()> {
        if self.json {
            return output::json(&self.object);
        }
        line(RULE)
    }
}

impl Row {
    fn text(&self, gigabits: bool) -> String {
        let Self { size, iterations, cpu_s_per_gb, .. } = self;
        if let Some(it) = &self.latency_us {
            return format!(
                " {size:<7} {iterations:<11}    {:<7.2}        {:<7.2}      {:<7.2}            \
                 {:<7.2}        {:<7.2}         {:<7.2}                {:.2}",
                it.min, it.max, it.typical, it.average, it.standard_deviation, it.p99, it.p999
            );
        }
        let (peak, average) = self.bandwidth.as_ref().map_or((0.0, 0.0), |it| {
            let unit = if gigabits { MIB * 8.0 / 1e9 } else { 1.0 };
            (it.peak_mib_per_s * unit, it.average_mib_per_s * unit)
        });
        let rate = self.messages_per_s / 1e6;
        // As in perftest, for slow links.
        let places = if gigabits && average < 0.1 { 6 } else { 2 };
        format!(
            " {size:<7}    {iterations:<10}     {peak:<7.places$}             \
             {average:<7.places$}               {rate:<8.6}        {cpu_s_per_gb:.3}"
        )
    }
}

fn header(plan: &Plan, device: &Device, mtu: Mtu) -> Vec<String> {
    let link = match device.driver() {
        Some(driver) => format!("Ethernet (soft, driver {driver})"),
        None if device.port_address().is_infiniband() => "IB".to_owned(),
        None => "Ethernet".to_owned(),
    };
    let mut lines = vec![
        RULE.to_owned(),
        format!("                    {}", plan.test.title()),
        format!(" Dual-port       : OFF\t\tDevice         : {}", device.name()),
        format!(" Number of qps   : {}\t\tTransport type : IB", plan.queue_pairs),
        " Connection type : RC\t\tUsing SRQ      : OFF".to_owned(),
    ];
    if plan.side == Side::Client || plan.test.is_ping_pong() {
        lines.push(format!(" TX depth        : {}", plan.send_depth));
    }
    if plan.test.needs(plan.side).receives {
        lines.push(format!(" RX depth        : {}", plan.receive_depth));
    }
    if !plan.test.latency && plan.side == Side::Client {
        let moderation = bandwidth::moderation(plan, plan.largest());
        lines.push(format!(" CQ Moderation   : {moderation}"));
    }
    lines.push(format!(" Mtu             : {mtu}[B]"));
    lines.push(format!(" Link type       : {link}"));
    if plan.test.operation == Operation::Read || plan.test.operation.is_atomic() {
        let reads = device.attributes().max_reads;
        lines.push(format!(" Outstand reads  : {reads}"));
    }
    let amount = match plan.amount {
        Amount::Iterations(iterations) => format!("{iterations} iterations"),
        Amount::Duration(duration) => format!("{duration:?}"),
    };
    let verified = match (plan.verify, plan.test.operation.is_atomic()) {
        (true, true) => "each result and the counters checked",
        (true, false) => "data checked at the end",
        (false, _) => "data not checked",
    };
    lines.push(format!(" Each size       : {amount}, {verified}"));
    lines.push(" Data ex. method : Ethernet".to_owned());
    lines.push(RULE.to_owned());
    lines
}

fn queue_pair(test: Test, whose: &str, lid: u16, address: &Address, reads: u8) -> String {
    let Address { qpn, psn, key, address } = address;
    let mut text = format!(" {whose} address: LID {lid:04x} QPN {qpn:#06x} PSN {psn:#08x}");
    if test.operation == Operation::Read {
        text.push_str(&format!(" OUT {reads:#04x}"));
    }
    if *address != 0 {
        text.push_str(&format!(" RKey {key:#010x} VAddr {address:#018x}"));
    }
    text
}

/// As perftest writes it: each byte in decimal.
fn gid_bytes(gid: Ipv6Addr) -> String {
    gid.octets().map(|byte| format!("{byte:02}")).join(":")
}

fn side(side: Side) -> &'static str {
    match side {
        Side::Client => "client",
        Side::Server => "server",
    }
}
