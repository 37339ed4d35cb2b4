//! `rdma pingpong` and `rdma ud-pingpong`: peers of libibverbs' `ibv_rc_pingpong` and
//! `ibv_ud_pingpong`, in both roles.
//!
//! The client sends first; each side sends its next message when the one before is acknowledged
//! and the peer's has come. Every byte that comes is checked.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use millstream_verbs::{Device, Mtu, Psn, Transport};

use super::connection::{self, Remote};
use super::exchange::{Client, QueuePairAddress};
use super::link::{Event, Link};
use super::patience::Patience;
use super::pattern::{Checker, Side, fill};
use super::server::Server;
use crate::device::{Choice, Chosen};
use crate::failure::usage;
use crate::output::line;
use crate::units;

/// How long we answer after the end. If our last acknowledgement is lost, the peer sends its last
/// message again after its timeout of 67 ms, and without an answer would do so for ever.
const LINGER: Duration = Duration::from_millis(200);

/// Arguments of `rdma pingpong`. The short ones are those of `ibv_rc_pingpong`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// Path MTU: 256, 512, 1024, 2048 or 4096
    #[arg(short, long, value_name = "M", default_value_t = 1024)]
    mtu: usize,
    #[command(flatten)]
    common: Common,
}

/// Arguments of both pingpongs, and all of `rdma ud-pingpong`.
#[derive(Args, Debug)]
pub(crate) struct Common {
    #[command(flatten)]
    device: Choice,
    /// Bytes in a message [default: 4096; of a datagram 1024]
    #[arg(short, long, value_name = "S", value_parser = units::size)]
    size: Option<u64>,
    /// Number of exchanges
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000)]
    iters: u32,
    /// TCP port on which the two sides find each other
    #[arg(short, long, default_value_t = 18515)]
    port: u16,
    #[command(flatten)]
    patience: Patience,
    /// The server to connect to; without it, be the server
    #[arg(value_name = "HOST")]
    host: Option<String>,
}

/// How messages go.
#[derive(Clone, Copy)]
enum Way {
    /// Over a connection, in packets of this size.
    Connected(Mtu),
    /// As datagrams of one packet.
    Datagrams,
}

/// Runs `rdma pingpong`.
pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mtu = connection::path_mtu(arguments.mtu)?;
    play("pingpong", Way::Connected(mtu), 4096, &arguments.common)
}

/// Runs `rdma ud-pingpong`.
pub(super) fn run_datagrams(arguments: &Common) -> anyhow::Result<()> {
    play("ud-pingpong", Way::Datagrams, 1024, arguments)
}

fn play(
    command: &'static str,
    way: Way,
    default_size: u64,
    arguments: &Common,
) -> anyhow::Result<()> {
    if arguments.iters == 0 {
        return Err(usage("--iters 0: there must be at least one exchange"));
    }
    let size = arguments.size.unwrap_or(default_size);
    let limit = match way {
        Way::Connected(_) => 1 << 30,
        Way::Datagrams => Mtu::B4096.bytes() as u64,
    };
    if size > limit {
        return Err(usage(format!("--size {size}: a message has at most {limit} bytes")));
    }
    let chosen = arguments.device.resolve()?;
    let psn = connection::initial_psn();
    let size = size as usize;
    let patience = arguments.patience;
    let prepare = |peer| prepare(&chosen, peer, &patience, way, size);
    let (Prepared { device, link }, side, remote) = match &arguments.host {
        Some(host) => {
            let client = Client::connect(command, host, arguments.port, &patience)?;
            let mut prepared = prepare(client.peer())?;
            let ours = introduce(&prepared, psn)?;
            let (theirs, _) = client.exchange(&ours)?;
            let remote = remote(&prepared.device, &theirs, way, size, patience.qp_timeout)?;
            prepared.link.connect(&remote, psn)?;
            (prepared, Side::Client, remote)
        }
        None => {
            // A mistake shows now then, and not when a client comes.
            let mut early = chosen.any_peer().map(prepare).transpose()?;
            let mut remotes = None;
            let server = Server::listen(&chosen, arguments.port, patience)?;
            let (prepared, ..) = server.serve(
                |peer| early.take().map_or_else(|| prepare(peer), Ok),
                |prepared, theirs| {
                    let ours = introduce(prepared, psn)?;
                    let remote = remote(&prepared.device, theirs, way, size, patience.qp_timeout)?;
                    prepared.link.connect(&remote, psn)?;
                    remotes = Some(remote);
                    Ok(ours)
                },
            )?;
            (prepared, Side::Server, remotes.context("no client was connected")?)
        }
    };
    let original = match way {
        Way::Connected(_) => "ibv_rc_pingpong",
        Way::Datagrams => "ibv_ud_pingpong",
    };
    let messages = Messages { side, size, iters: arguments.iters, timeout: patience.timeout };
    converse(link, messages, original).with_context(|| {
        let (address, qpn) = (remote.at, remote.qpn.value());
        let failure = device.failure().map_or_else(String::new, |why| format!("{why}: "));
        let lost = match way {
            Way::Connected(_) => "",
            Way::Datagrams => " (a datagram that is lost is not sent again)",
        };
        format!("{failure}the {command} with {address}, queue pair {qpn:#08x}, failed{lost}")
    })
}

/// A device and a queue pair on it.
struct Prepared {
    // Dropped before its device.
    link: Link,
    device: Device,
}

/// Opens the device and makes the queue pair, to talk to `peer`.
fn prepare(
    chosen: &Chosen,
    peer: IpAddr,
    patience: &Patience,
    way: Way,
    size: usize,
) -> anyhow::Result<Prepared> {
    let device = chosen.open(peer, patience.until())?;
    let transport = match way {
        Way::Connected(_) => Transport::ReliableConnection,
        Way::Datagrams => Transport::UnreliableDatagram,
    };
    let link = Link::new(&device, transport, size, chosen.busy_poll)?;
    Ok(Prepared { link, device })
}

/// Our queue pair's address, which is shown.
fn introduce(prepared: &Prepared, psn: Psn) -> anyhow::Result<QueuePairAddress> {
    let Prepared { link, device } = prepared;
    let ours = QueuePairAddress::new(device.port_address(), link.number(), psn);
    line(&format!("  local address:  {}", ours.describe()))?;
    Ok(ours)
}

/// The peer's side, which is shown.
fn remote(
    device: &Device,
    theirs: &QueuePairAddress,
    way: Way,
    size: usize,
    timeout: u8,
) -> anyhow::Result<Remote> {
    line(&format!("  remote address: {}", theirs.describe()))?;
    let at = theirs.port()?;
    let path_mtu = match way {
        Way::Connected(mtu) => {
            connection::check_path_mtu(device, at, mtu)?;
            mtu
        }
        Way::Datagrams => {
            let largest = connection::largest_path_mtu(device, at)?;
            if size > largest.bytes() {
                return Err(usage(format!(
                    "--size {size}: a datagram to {at} holds at most {largest} bytes"
                )));
            }
            largest
        }
    };
    let QueuePairAddress { qpn, psn, .. } = *theirs;
    Ok(Remote { at, qpn, psn, path_mtu, reads: 1, timeout })
}

/// What is sent and received.
struct Messages {
    side: Side,
    size: usize,
    iters: u32,
    /// For the next message or acknowledgement.
    timeout: Duration,
}

/// Sends and receives messages, and says how fast.
fn converse(mut link: Link, messages: Messages, original: &str) -> anyhow::Result<()> {
    let Messages { side, size, iters, timeout } = messages;
    let mut checker = Checker::new(side, size);
    // Messages that were posted, acknowledged, and received and checked.
    let (mut posted, mut sent, mut received) = (0, 0, 0);
    let start = Instant::now();
    while sent < iters || received < iters {
        // The server's message answers one of the client's.
        let turn = if side == Side::Client { received } else { received.wrapping_sub(1) };
        if posted < iters && posted == sent && posted == turn {
            link.send(|message| fill(message, side, posted))?;
            posted += 1;
        }
        match link.next(timeout)? {
            Some(Event::Sent) => sent += 1,
            Some(Event::Received(message)) => {
                let bytes = link.message(message)?;
                if received == iters {
                    bail!("the peer sent more than {iters} messages");
                }
                if bytes.len() != size {
                    let length = bytes.len();
                    bail!("message {received} has {length} bytes, not {size}: same --size there?");
                }
                if let Err(wrong) = checker.check(bytes, received) {
                    bail!(
                        "byte {} of message {received} is {:#04x}, not {:#04x}",
                        wrong.offset,
                        wrong.found,
                        wrong.expected
                    );
                }
                received += 1;
                link.post_receive(message)?;
            }
            None => bail!(
                "nothing came for {timeout:?}: {received} of {iters} messages were received, and \
                 {sent} of ours acknowledged; same --iters there?"
            ),
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let bytes = size as u64 * u64::from(iters) * 2;
    let (rate, latency) = (bytes as f64 * 8.0 / seconds / 1e6, seconds * 1e6 / f64::from(iters));
    line(&format!("{bytes} bytes in {seconds:.2} seconds = {rate:.2} Mbit/sec"))?;
    line(&format!("{iters} iters in {seconds:.2} seconds = {latency:.2} usec/iter"))?;
    let (checked, whose) = (checker.bytes_checked, checker.bytes_of(original));
    line(&format!("{checked} bytes checked: all are {whose}"))?;
    // A message that comes now is one too many, but the peer is told by its own counting.
    let end = Instant::now() + LINGER;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        match link.next(left) {
            Ok(_) => {}
            Err(_) => break,
        }
    }
    Ok(())
}
