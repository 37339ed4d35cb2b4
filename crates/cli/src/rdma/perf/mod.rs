//! `rdma send-bw`, `write-bw`, `read-bw`, `atomic`: bandwidth and latency between two of us,
//! measured and shown as perftest's `ib_send_bw`, `ib_write_lat` and so on do.
//!
//! The two sides find each other as pingpongs do, then say in a line of JSON each what they are
//! about to do ([`agreement`]), and connect the queue pairs only when that is the same.

mod agreement;
mod bandwidth;
mod control;
mod figures;
mod lanes;
mod latency;
mod report;
mod test;

use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use millstream_verbs::{ATOMIC_LENGTH, Mtu, Psn, Qpn};

use self::agreement::{Description, Disagreement};
use self::control::{Control, Message};
use self::figures::Outcome;
use self::lanes::Lanes;
use self::report::Report;
pub(super) use self::test::Operation;
use self::test::{Amount, Plan, Test};
use super::connection::{self, Remote};
use super::exchange::{Client, QueuePairAddress};
use super::patience::Patience;
use super::pattern::Side;
use super::server::Server;
use crate::device::{Choice, Chosen};
use crate::failure::{sentence, usage};
use crate::{process, units};

const QUEUE_PAIRS_MAX: usize = 256;
const DEPTH_MAX: usize = 16_384;
/// The sizes of `--all`: 2 bytes to 8 MiB.
const ALL: std::ops::RangeInclusive<u32> = 1..=23;

/// Arguments of the tests. The short ones are perftest's.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    device: Choice,
    /// Measure latency, one message at a time, instead of bandwidth
    #[arg(long)]
    latency: bool,
    /// Bytes of a message [default: 64KiB; with --latency 2; atomic operations have 8]
    #[arg(short, long, value_name = "S", value_parser = units::size, conflicts_with = "all")]
    size: Option<u64>,
    /// All sizes from 2 bytes to 8 MiB
    #[arg(short, long)]
    all: bool,
    /// Messages of each queue pair [default: 1000; write-bw without --latency 5000]
    #[arg(short = 'n', long, value_name = "N", conflicts_with = "duration")]
    iters: Option<u64>,
    /// Run for so long instead, for each size
    #[arg(short = 'D', long, value_name = "D", value_parser = units::duration)]
    duration: Option<Duration>,
    /// Queue pairs
    #[arg(short, long, value_name = "N", default_value_t = 1)]
    qps: usize,
    /// Requests under way on each queue pair
    #[arg(short, long, value_name = "N", default_value_t = 128)]
    tx_depth: usize,
    /// Receives posted on each queue pair
    #[arg(short, long, value_name = "N", default_value_t = 512)]
    rx_depth: usize,
    /// Path MTU: 256, 512, 1024, 2048 or 4096 [default: the largest that both sides can]
    #[arg(short, long, value_name = "M")]
    mtu: Option<usize>,
    /// TCP port on which the two sides find each other
    #[arg(short, long, default_value_t = 18515)]
    port: u16,
    #[command(flatten)]
    patience: Patience,
    /// Do not compare the data with what they should be, after the measurement
    #[arg(long)]
    no_verify: bool,
    /// Show bandwidth in Gb/sec (10^9 bits) instead of MiB/sec (2^20 bytes)
    #[arg(long, alias = "report_gbits")]
    report_gbits: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// The server to connect to; without it, be the server
    #[arg(value_name = "HOST")]
    host: Option<String>,
}

/// Arguments of `rdma atomic`.
#[derive(Args, Debug)]
pub(crate) struct AtomicArguments {
    /// What to do with the server's counter
    #[arg(long, value_enum, default_value = "fetch-add")]
    op: AtomicOperation,
    #[command(flatten)]
    others: Arguments,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AtomicOperation {
    /// Add 1 to it
    FetchAdd,
    /// Replace what it should be by the next number
    CompareSwap,
}

/// Runs a test of atomic operations.
pub(super) fn run_atomic(arguments: &AtomicArguments) -> anyhow::Result<()> {
    let operation = match arguments.op {
        AtomicOperation::FetchAdd => Operation::FetchAdd,
        AtomicOperation::CompareSwap => Operation::CompareSwap,
    };
    run(operation, &arguments.others)
}

/// Runs a test, as the client or the server.
pub(super) fn run(operation: Operation, arguments: &Arguments) -> anyhow::Result<()> {
    let plan = arguments.plan(operation)?;
    let chosen = arguments.device.resolve()?;
    let meeting = match &arguments.host {
        Some(host) => meet_server(&plan, &chosen, host, arguments)?,
        None => meet_client(&plan, &chosen, arguments)?,
    };
    let Meeting { mut lanes, mut control, .. } = meeting;
    let done = converse(&plan, arguments, &mut lanes, &mut control, &meeting.theirs);
    done.map_err(|error| {
        let error = match control.complaint() {
            // Both sides see that by themselves.
            _ if error.is::<Disagreement>() => error,
            Some(complaint) => complaint,
            None => {
                // It may be gone.
                let _ = control.send(&Message::Failed { why: sentence(&error) });
                error
            }
        };
        let (name, address) = (plan.test.name(), meeting.theirs.gid.to_canonical());
        error.context(format!("{name} with {address} failed"))
    })
}

impl Arguments {
    fn plan(&self, operation: Operation) -> anyhow::Result<Plan> {
        let test = Test { operation, latency: self.latency };
        let sizes = match self.size {
            None | Some(8) if operation.is_atomic() && !self.all => vec![ATOMIC_LENGTH],
            _ if operation.is_atomic() => {
                return Err(usage("rdma atomic: atomic operations have 8 bytes: --size 8"));
            }
            _ if self.all => ALL.map(|power| 1 << power).collect(),
            Some(size) if (1..=1 << 30).contains(&size) => vec![size as u32],
            Some(size) => {
                return Err(usage(format!("--size {size}: a message has 1 to 2^30 bytes")));
            }
            None if self.latency => vec![2],
            None => vec![1 << 16],
        };
        let amount = match (self.duration, self.iters) {
            (Some(duration), _) if duration.is_zero() => {
                return Err(usage("--duration 0s: there must be some time"));
            }
            (Some(duration), _) => Amount::Duration(duration),
            (None, Some(0)) => return Err(usage("--iters 0: there must be at least one message")),
            (None, Some(iterations)) => Amount::Iterations(iterations),
            (None, None) if operation == Operation::Write && !self.latency => {
                Amount::Iterations(5000)
            }
            (None, None) => Amount::Iterations(1000),
        };
        for (option, value, most) in [
            ("--qps", self.qps, QUEUE_PAIRS_MAX),
            ("--tx-depth", self.tx_depth, DEPTH_MAX),
            ("--rx-depth", self.rx_depth, DEPTH_MAX),
        ] {
            if value == 0 || value > most {
                return Err(usage(format!("{option} {value}: it is 1 to {most}")));
            }
        }
        if self.latency && self.qps != 1 {
            return Err(usage(format!("--latency --qps {}: there is one queue pair", self.qps)));
        }
        Ok(Plan {
            test,
            side: if self.host.is_some() { Side::Client } else { Side::Server },
            sizes,
            amount,
            queue_pairs: self.qps,
            send_depth: self.tx_depth,
            receive_depth: self.rx_depth,
            mtu: self.mtu.map(connection::path_mtu).transpose()?,
            verify: !self.no_verify,
            busy_poll: self.device.busy_poll(),
            timeout: self.patience.timeout,
        })
    }
}

/// Two sides that know where each other's first queue pair is.
struct Meeting {
    lanes: Lanes,
    control: Control,
    theirs: QueuePairAddress,
}

fn meet_server(
    plan: &Plan,
    chosen: &Chosen,
    host: &str,
    arguments: &Arguments,
) -> anyhow::Result<Meeting> {
    let patience = &arguments.patience;
    let client = Client::connect(plan.test.command(), host, arguments.port, patience)?;
    let lanes = Lanes::new(chosen.open(client.peer(), patience.until())?, plan)?;
    let (theirs, stream) = client.exchange(&first(&lanes)?)?;
    Ok(Meeting { lanes, control: Control::new(stream, "server", plan.timeout)?, theirs })
}

fn meet_client(plan: &Plan, chosen: &Chosen, arguments: &Arguments) -> anyhow::Result<Meeting> {
    let patience = arguments.patience;
    let open = |peer| Lanes::new(chosen.open(peer, patience.until())?, plan);
    // A mistake shows now then, and not when a client comes.
    let mut early = chosen.any_peer().map(open).transpose()?;
    let (lanes, theirs, stream) = Server::listen(chosen, arguments.port, patience)?
        .serve(|peer| early.take().map_or_else(|| open(peer), Ok), |lanes, _| first(lanes))?;
    Ok(Meeting { lanes, control: Control::new(stream, "client", plan.timeout)?, theirs })
}

/// The address of the first queue pair, which libibverbs' examples exchange.
fn first(lanes: &Lanes) -> anyhow::Result<QueuePairAddress> {
    let addresses = lanes.addresses();
    let first = addresses.first().context("there is no queue pair")?;
    let (qpn, psn) = (Qpn::new(first.qpn), Psn::new(first.psn));
    Ok(QueuePairAddress::new(lanes.device().port_address(), qpn, psn))
}

/// Agrees, connects, measures each size, and shows it all.
fn converse(
    plan: &Plan,
    arguments: &Arguments,
    lanes: &mut Lanes,
    control: &mut Control,
    theirs: &QueuePairAddress,
) -> anyhow::Result<()> {
    let peer = theirs.port()?;
    let largest = connection::largest_path_mtu(lanes.device(), peer)?;
    if let Some(mtu) = plan.mtu {
        connection::check_path_mtu(lanes.device(), peer, mtu)?;
    }
    let ours = describe(plan, lanes, plan.mtu.unwrap_or(largest));
    control.send(&Message::Test(ours.clone()))?;
    let Message::Test(remote) = control.receive()? else {
        bail!("the {} did not say what it is about to do", control.peer());
    };
    agreement::compare(&ours, &remote, control.peer())?;
    control.expect_signs(remote.signs);
    let path_mtu = common_mtu(&ours, &remote)?;
    lanes.connect(
        &remote.queue_pairs,
        &Remote {
            at: peer,
            // Each lane has its own.
            qpn: theirs.qpn,
            psn: theirs.psn,
            path_mtu,
            reads: ours.reads.min(remote.reads).max(1),
            timeout: arguments.patience.qp_timeout,
        },
    )?;
    let (json, gigabits) = (arguments.json, arguments.report_gbits);
    let mut report = Report::start(plan, lanes.device(), peer.ip, path_mtu, json, gigabits)?;
    let here = QueuePairAddress::new(lanes.device().port_address(), theirs.qpn, theirs.psn);
    report.addresses(plan.test, "local", &here, &ours)?;
    report.addresses(plan.test, "remote", theirs, &remote)?;
    for &size in &plan.sizes {
        measure(plan, size, lanes, control, &mut report)?;
    }
    report.finish()
}

fn describe(plan: &Plan, lanes: &Lanes, mtu: Mtu) -> Description {
    let (iterations, duration_ms) = match plan.amount {
        Amount::Iterations(iterations) => (Some(iterations), None),
        Amount::Duration(duration) => (None, Some(duration.as_millis() as u64)),
    };
    Description {
        test: plan.test.name(),
        size: plan.sizes.first().copied().unwrap_or_default(),
        sizes: plan.sizes.len() as u32,
        iterations,
        duration_ms,
        verify: plan.verify,
        mtu: mtu.bytes(),
        reads: lanes.device().attributes().max_reads,
        signs: true,
        queue_pairs: lanes.addresses(),
    }
}

/// The smaller of what both can or want.
fn common_mtu(ours: &Description, theirs: &Description) -> anyhow::Result<Mtu> {
    let bytes = ours.mtu.min(theirs.mtu);
    Mtu::from_bytes(bytes).with_context(|| format!("the other side wants a path MTU of {bytes}"))
}

/// Measures one size.
fn measure(
    plan: &Plan,
    size: u32,
    lanes: &mut Lanes,
    control: &mut Control,
    report: &mut Report,
) -> anyhow::Result<()> {
    let theirs = if plan.side == Side::Client { Side::Server } else { Side::Client };
    lanes.prepare(size, plan.side)?;
    lanes.post_receives()?;
    control.send(&Message::Ready { size })?;
    match control.receive()? {
        Message::Ready { size: theirs } if theirs == size => {}
        _ => bail!("the {} is not ready for messages of {size} bytes", control.peer()),
    }
    report.table()?;
    let cpu = process::processor_time();
    let check = |lanes: &Lanes, outcome: &Outcome| match plan.side {
        _ if !plan.verify => Ok(0),
        // The client has looked at each result as it came.
        Side::Client if plan.test.operation.is_atomic() => {
            Ok(outcome.iterations.saturating_mul(size.into()))
        }
        Side::Server if plan.test.operation.is_atomic() => lanes.check_counters(outcome.iterations),
        _ => lanes.check(size, theirs),
    };
    if plan.side == Side::Client {
        let outcome = match plan.test.latency {
            true => latency::request(lanes, plan, size, control)?,
            false => bandwidth::request(lanes, plan, size, control)?,
        };
        let cpu = process::processor_time() - cpu;
        let checked = check(lanes, &outcome)?;
        control.send(&Message::Measured { outcome: outcome.clone(), checked })?;
        let Message::Checked { bytes } = control.receive_before(plan.patience(size))? else {
            bail!("the server did not say whether it got all");
        };
        report.result(size, &outcome, cpu.as_secs_f64(), checked.saturating_add(bytes))?;
        return Ok(());
    }
    let message = match plan.test.latency {
        true => latency::respond(lanes, plan, size, control)?,
        false => bandwidth::respond(lanes, plan, size, control)?,
    };
    let cpu = process::processor_time() - cpu;
    let Message::Measured { outcome, checked } = message else {
        bail!("the client did not say what it has measured");
    };
    let bytes = check(lanes, &outcome)?;
    control.send(&Message::Checked { bytes })?;
    report.result(size, &outcome, cpu.as_secs_f64(), checked.saturating_add(bytes))
}
