//! `rdma pingpong`: a peer of libibverbs' `ibv_rc_pingpong`, in both roles.
//!
//! The client sends first; each side sends its next message when the one before is acknowledged
//! and the peer's has come. Every byte that comes is checked.

use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use millstream_verbs::{Device, Mtu, Psn};

use super::Arguments;
use super::exchange::{Client, QueuePairAddress, Server};
use super::link::{Event, Link, Remote};
use super::pattern::{Checker, Side, fill};
use crate::address;
use crate::failure::usage;
use crate::output::line;

/// For the next message or acknowledgement.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long we answer after the end. If our last acknowledgement is lost, the peer sends its last
/// message again after its timeout of 67 ms, and without an answer would do so for ever.
const LINGER: Duration = Duration::from_millis(200);

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mtu = Mtu::from_bytes(arguments.mtu).ok_or_else(|| {
        usage(format!("--mtu {}: it is 256, 512, 1024, 2048 or 4096", arguments.mtu))
    })?;
    if arguments.iters == 0 {
        return Err(usage("--iters 0: there must be at least one exchange"));
    }
    if arguments.size > 1 << 30 {
        let size = arguments.size;
        return Err(usage(format!("--size {size}: a message has at most 2^30 bytes")));
    }
    let bind = arguments.address()?;
    let open = |peer| address::open_device(bind, peer, !arguments.no_segmentation_offload);
    let psn = initial_psn();
    let size = arguments.size as usize;
    let (device, link, side, remote) = match &arguments.host {
        Some(host) => {
            let client = Client::connect(host, arguments.port)?;
            let device = open(client.peer()?)?;
            let link = Link::new(&device, size)?;
            let ours = introduce(&device, &link, psn);
            let theirs = client.exchange(&ours)?;
            let remote = remote(&device, &theirs, mtu)?;
            link.connect(&remote, psn).context("cannot connect to the server's queue pair")?;
            (device, link, Side::Client, remote)
        }
        None => {
            // With --bind, a mistake shows now, not when a client comes.
            let early = bind.map(open).transpose()?;
            let waiting = Server::listen(bind, arguments.port)?.accept()?;
            let device = match early {
                Some(device) => device,
                None => open(waiting.client.address()?)?,
            };
            let link = Link::new(&device, size)?;
            let ours = introduce(&device, &link, psn);
            let remote = remote(&device, &waiting.client, mtu)?;
            link.connect(&remote, psn).context("cannot connect to the client's queue pair")?;
            waiting.answer(&ours)?;
            (device, link, Side::Server, remote)
        }
    };
    converse(link, side, size, arguments.iters).with_context(|| {
        let (address, qpn) = (remote.address, remote.qpn.value());
        let failure = device.failure().map_or_else(String::new, |why| format!("{why}: "));
        format!("{failure}the pingpong with {address}, queue pair {qpn:#08x}, failed")
    })
}

/// Our queue pair's address, which is shown.
fn introduce(device: &Device, link: &Link, psn: Psn) -> QueuePairAddress {
    let ours = QueuePairAddress::new(device.address(), link.number(), psn);
    line(&format!("  local address:  {}", describe(&ours)));
    ours
}

/// The peer's side of the connection, which is shown.
fn remote(device: &Device, theirs: &QueuePairAddress, mtu: Mtu) -> anyhow::Result<Remote> {
    line(&format!("  remote address: {}", describe(theirs)));
    let peer = theirs.address()?;
    let largest = device.path_mtu(peer).with_context(|| format!("there is no way to {peer}"))?;
    if mtu > largest {
        return Err(usage(format!(
            "--mtu {mtu}: packets to {peer} hold at most {largest} bytes, as the interface's MTU is"
        )));
    }
    Ok(Remote { address: peer, qpn: theirs.qpn, psn: theirs.psn, path_mtu: mtu })
}

fn describe(address: &QueuePairAddress) -> String {
    let QueuePairAddress { lid, qpn, psn, gid } = *address;
    let (qpn, psn) = (qpn.value(), psn.value());
    format!("LID 0x{lid:04x}, QPN 0x{qpn:06x}, PSN 0x{psn:06x}, GID {}", gid_text(gid))
}

/// As `inet_ntop` writes it.
fn gid_text(gid: Ipv6Addr) -> String {
    match gid.to_canonical() {
        IpAddr::V4(address) => format!("::ffff:{address}"),
        IpAddr::V6(address) => address.to_string(),
    }
}

/// Sends and receives `iters` messages of `size` bytes, and says how fast.
fn converse(mut link: Link, side: Side, size: usize, iters: u32) -> anyhow::Result<()> {
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
        match link.next(PATIENCE)? {
            Some(Event::Sent) => sent += 1,
            Some(Event::Received(message)) => {
                let bytes = link.message(message);
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
                "nothing came for {PATIENCE:?}: {received} of {iters} messages were received, and \
                 {sent} of ours acknowledged; same --iters there?"
            ),
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let bytes = size as u64 * u64::from(iters) * 2;
    let (rate, latency) = (bytes as f64 * 8.0 / seconds / 1e6, seconds * 1e6 / f64::from(iters));
    line(&format!("{bytes} bytes in {seconds:.2} seconds = {rate:.2} Mbit/sec"));
    line(&format!("{iters} iters in {seconds:.2} seconds = {latency:.2} usec/iter"));
    line(&format!("{} bytes checked: all are {}", checker.bytes_checked, checker.peer()));
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

/// A number that nobody can guess from the last one.
fn initial_psn() -> Psn {
    use std::hash::{BuildHasher, RandomState};
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // RandomState takes its keys from the operating system.
    Psn::new(RandomState::new().hash_one(time) as u32)
}
