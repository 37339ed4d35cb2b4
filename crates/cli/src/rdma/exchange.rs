//! How the two sides find each other: the TCP exchange of libibverbs' examples.
//!
//! The client connects and sends its queue pair's address, the server answers with its own, the
//! client says `done`. An address is 52 bytes: `LID:QPN:PSN:GID` in hexadecimal and a NUL. A server
//! of ours that cannot answer says why instead: [`REFUSAL`] and a sentence. The TCP connection is
//! left to the caller.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use millstream_verbs::{PortAddress, Psn, Qpn};
use thiserror::Error;

use super::patience::Patience;
use crate::note::quoted;
use crate::{address, retry};

/// An address on the wire: hexadecimal digits stand where this has a 0.
const FORM: &[u8; LENGTH] = b"0000:000000:000000:00000000000000000000000000000000\0";
const LENGTH: usize = 52;
const DONE: &[u8; 5] = b"done\0";
/// What a refusal begins with, which no address does.
const REFUSAL: &[u8] = b"error: ";
/// At most so much of a refusal is sent and read.
const REFUSAL_MAX: usize = 1000;
/// For `done`, which a client says at once, and for the rest of a refusal.
const SHORT: Duration = Duration::from_secs(5);
/// For `done`, while other clients wait for their turn.
const SHORT_FOR_OTHERS: Duration = Duration::from_millis(500);

/// The address of a queue pair.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct QueuePairAddress {
    /// InfiniBand's local identifier; 0 on Ethernet.
    pub(super) lid: u16,
    pub(super) qpn: Qpn,
    /// The first packet sequence number that it sends.
    pub(super) psn: Psn,
    pub(super) gid: Ipv6Addr,
}

impl QueuePairAddress {
    pub(super) fn new(at: PortAddress, qpn: Qpn, psn: Psn) -> Self {
        let gid = match at.ip {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        Self { lid: at.lid, qpn, psn, gid }
    }

    /// As libibverbs' examples show it.
    pub(super) fn describe(&self) -> String {
        let (lid, qpn, psn) = (self.lid, self.qpn.value(), self.psn.value());
        // As `inet_ntop` writes it.
        let gid = match self.gid.to_canonical() {
            IpAddr::V4(address) => format!("::ffff:{address}"),
            IpAddr::V6(address) => address.to_string(),
        };
        format!("LID 0x{lid:04x}, QPN 0x{qpn:06x}, PSN 0x{psn:06x}, GID {gid}")
    }

    /// Its port.
    pub(super) fn port(&self) -> anyhow::Result<PortAddress> {
        if self.gid.is_unspecified() {
            bail!(
                "the peer gave no GID; start it with one of RoCE v2 or of InfiniBand, as in \
                 `ibv_rc_pingpong -g INDEX` (`show_gids` or `ibv_devinfo -v` lists them)"
            );
        }
        Ok(PortAddress { ip: IpAddr::V6(self.gid).to_canonical(), lid: self.lid })
    }

    fn emit(&self) -> [u8; LENGTH] {
        let gid: String = self.gid.octets().iter().map(|byte| format!("{byte:02x}")).collect();
        let (qpn, psn) = (self.qpn.value(), self.psn.value());
        let mut message = [0; LENGTH];
        let text = format!("{:04x}:{qpn:06x}:{psn:06x}:{gid}", self.lid);
        message[..text.len()].copy_from_slice(text.as_bytes());
        message
    }

    fn parse(message: &[u8; LENGTH]) -> Option<Self> {
        if !may_become_address(message) {
            return None;
        }
        let text = std::str::from_utf8(message).ok()?.trim_end_matches('\0');
        let mut fields = text.split(':');
        let mut number = || u128::from_str_radix(fields.next()?, 16).ok();
        let (lid, qpn, psn, gid) = (number()?, number()?, number()?, number()?);
        Some(Self {
            lid: lid as u16,
            qpn: Qpn::new(qpn as u32),
            psn: Psn::new(psn as u32),
            gid: Ipv6Addr::from(gid),
        })
    }
}

/// Whether an address can begin with these bytes.
fn may_become_address(bytes: &[u8]) -> bool {
    bytes.len() <= LENGTH
        && bytes.iter().zip(FORM).all(|(byte, form)| match form {
            b'0' => byte.is_ascii_hexdigit(),
            form => byte == form,
        })
}

/// What the other side did instead of its part.
#[derive(Debug, Error)]
pub(super) enum Mistake {
    #[error("it closed the connection without a word")]
    Closed,
    #[error("it closed the connection in the middle of what it had to say, after {0}")]
    ClosedEarly(String),
    #[error("it said nothing for {0:?}")]
    Silent(Duration),
    #[error("it did not say all that it had to within {1:?}, only {0}")]
    Slow(String, Duration),
    #[error("it sent {0}, which is HTTP")]
    Http(String),
    #[error("it sent {0}, which is no address of a queue pair (LID:QPN:PSN:GID)")]
    NoAddress(String),
    #[error("it sent {0} in place of `done`")]
    NotDone(String),
    #[error("the connection failed: {0}")]
    Failed(io::Error),
    #[error("{0}")]
    Refused(String),
}

/// The client's side of the TCP connection.
pub(super) struct Client {
    stream: TcpStream,
    server: SocketAddr,
    command: &'static str,
    timeout: Duration,
}

impl Client {
    /// Connects to a server of `command`.
    pub(super) fn connect(
        command: &'static str,
        host: &str,
        port: u16,
        patience: &Patience,
    ) -> anyhow::Result<Self> {
        let timeout = patience.timeout;
        let addresses = address::look_up(host, port, address::lookup_deadline(timeout))
            .with_context(|| format!("cannot find the address of {host}"))?;
        retry::until(patience.until(), retry::is_unreachable, || {
            let start = Instant::now();
            let failure = match connect(&addresses, timeout) {
                Ok((stream, server)) => return Ok(Self { stream, server, command, timeout }),
                Err(failure) => failure,
            };
            let advice = match failure.kind() {
                io::ErrorKind::ConnectionRefused => {
                    format!("does a {command} server run there? (--wait waits for one)")
                }
                io::ErrorKind::TimedOut => format!(
                    "no answer within {:.1?}: is its machine up, and does a firewall let the \
                     connection through?",
                    start.elapsed()
                ),
                _ => "is the interface up? (`ip route get ADDRESS` shows the way)".to_owned(),
            };
            Err(failure)
                .with_context(|| format!("cannot connect to {host}, TCP port {port}: {advice}"))
        })
    }

    pub(super) fn peer(&self) -> IpAddr {
        self.server.ip().to_canonical()
    }

    /// Gives our address for the peer's.
    pub(super) fn exchange(
        mut self,
        ours: &QueuePairAddress,
    ) -> anyhow::Result<(QueuePairAddress, TcpStream)> {
        let Self { server, command, timeout, .. } = self;
        let mut exchange = || {
            self.stream.set_write_timeout(Some(SHORT)).map_err(Mistake::Failed)?;
            self.stream.write_all(&ours.emit()).map_err(Mistake::Failed)?;
            let theirs = receive_address(&mut self.stream, timeout)?;
            self.stream.write_all(DONE).map_err(Mistake::Failed)?;
            Ok(theirs)
        };
        match exchange() {
            Ok(theirs) => Ok((theirs, self.stream)),
            Err(Mistake::Refused(why)) => bail!("the {command} server at {server} refused: {why}"),
            Err(mistake) => {
                bail!("what listens at {server} is no {command} server, or is busy: {mistake}")
            }
        }
    }
}

/// Connects to the first of these addresses where somebody listens. Where nobody does, the error is
/// a refusal if there is one: it says most, for a name often has an address that leads nowhere.
fn connect(
    addresses: &[SocketAddr],
    timeout: Duration,
) -> Result<(TcpStream, SocketAddr), io::Error> {
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    for &server in addresses {
        match TcpStream::connect_timeout(&server, timeout) {
            Ok(stream) => return Ok((stream, server)),
            Err(_) if failure.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// A client that waits for the server's address.
pub(super) struct Waiting {
    stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) address: QueuePairAddress,
}

impl Waiting {
    /// Hears out whoever has connected.
    pub(super) fn hear(
        mut stream: TcpStream,
        peer: SocketAddr,
        timeout: Duration,
    ) -> Result<Self, Mistake> {
        let address = receive_address(&mut stream, timeout)?;
        Ok(Self { stream, peer, address })
    }

    /// Gives our address, once our queue pair can receive. Who does not say `done` soon is no
    /// client; while `others_wait`, sooner.
    pub(super) fn answer(
        mut self,
        ours: &QueuePairAddress,
        others_wait: bool,
    ) -> Result<TcpStream, Mistake> {
        let limit = if others_wait { SHORT_FOR_OTHERS } else { SHORT };
        self.stream.set_write_timeout(Some(SHORT)).map_err(Mistake::Failed)?;
        self.stream.write_all(&ours.emit()).map_err(Mistake::Failed)?;
        let mut done = [0; DONE.len()];
        let count = receive(&mut self.stream, &mut done, limit, |bytes| DONE.starts_with(bytes))?;
        if done[..count] != DONE[..] {
            return Err(Mistake::NotDone(quoted(&done[..count])));
        }
        Ok(self.stream)
    }

    /// Tells the client why it gets no answer.
    pub(super) fn refuse(mut self, why: &str) {
        let why: String = why.chars().filter(|char| !char.is_control()).collect();
        let mut message = REFUSAL.to_vec();
        message.extend(why.bytes().take(REFUSAL_MAX));
        // It may be gone.
        let _ = self.stream.set_write_timeout(Some(SHORT));
        let _ = self.stream.write_all(&message);
    }
}

fn receive_address(stream: &mut TcpStream, timeout: Duration) -> Result<QueuePairAddress, Mistake> {
    let mut message = [0; LENGTH];
    let fits = |bytes: &[u8]| may_become_address(bytes);
    let count = receive(stream, &mut message, timeout, fits)?;
    if let Some(address) = QueuePairAddress::parse(&message) {
        return Ok(address);
    }
    let bytes = &message[..count];
    if bytes.starts_with(REFUSAL) || REFUSAL.starts_with(bytes) {
        let mut text = bytes.to_vec();
        let mut rest = [0; REFUSAL_MAX];
        // Up to its end; what can be had of it will do.
        let deadline = Instant::now() + SHORT;
        while text.len() < REFUSAL_MAX
            && let Ok(count @ 1..) = read_before(stream, &mut rest, deadline)
        {
            text.extend_from_slice(&rest[..count]);
        }
        if let Some(why) = text.strip_prefix(REFUSAL) {
            let why = String::from_utf8_lossy(&why[..why.len().min(REFUSAL_MAX)]);
            return Err(Mistake::Refused(why.chars().filter(|char| !char.is_control()).collect()));
        }
    }
    let methods = ["GET ", "HEAD ", "POST ", "PUT ", "OPTIONS ", "CONNECT ", "HTTP/", "PRI * "];
    if methods.iter().any(|method| bytes.starts_with(method.as_bytes())) {
        return Err(Mistake::Http(quoted(bytes)));
    }
    Err(Mistake::NoAddress(quoted(bytes)))
}

/// Fills `buffer`, or stops where what came does not fit any more; returns how many bytes came.
fn receive(
    stream: &mut TcpStream,
    buffer: &mut [u8],
    timeout: Duration,
    fits: impl Fn(&[u8]) -> bool,
) -> Result<usize, Mistake> {
    let deadline = Instant::now() + timeout;
    let mut count = 0;
    while count < buffer.len() && fits(&buffer[..count]) {
        let read = read_before(stream, &mut buffer[count..], deadline);
        let so_far = |count: usize| quoted(&buffer[..count]);
        match read {
            Ok(0) if count == 0 => return Err(Mistake::Closed),
            Ok(0) => return Err(Mistake::ClosedEarly(so_far(count))),
            Ok(more) => count += more,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut if count == 0 => {
                    return Err(Mistake::Silent(timeout));
                }
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    return Err(Mistake::Slow(so_far(count), timeout));
                }
                io::ErrorKind::ConnectionReset if count == 0 => return Err(Mistake::Closed),
                _ => return Err(Mistake::Failed(error)),
            },
        }
    }
    Ok(count)
}

/// Reads once, before the deadline.
fn read_before(stream: &mut TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn address() -> QueuePairAddress {
        at(PortAddress { ip: "10.91.0.1".parse().unwrap(), lid: 0 })
    }

    fn at(port: PortAddress) -> QueuePairAddress {
        QueuePairAddress::new(port, Qpn::new(0x4242), Psn::new(0xabcdef))
    }

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (stream, listener.accept().unwrap().0)
    }

    #[test]
    fn the_wire_form_is_that_of_libibverbs() {
        let expected = b"0000:004242:abcdef:00000000000000000000ffff0a5b0001\0";
        assert_eq!(&address().emit(), expected);
        assert_eq!(QueuePairAddress::parse(expected), Some(address()));
        let upper = b"0000:004242:ABCDEF:00000000000000000000FFFF0A5B0001\0";
        assert_eq!(QueuePairAddress::parse(upper), Some(address()));
        let port = PortAddress { ip: "fe80::2:c903:a0:1".parse().unwrap(), lid: 0xbfff };
        let infiniband = b"bfff:004242:abcdef:fe800000000000000002c90300a00001\0";
        assert_eq!(&at(port).emit(), infiniband);
        assert_eq!(QueuePairAddress::parse(infiniband).unwrap().port().unwrap(), port);
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for wrong in [
            b"0000:004242:abcdef:00000000000000000000ffff0a5b000\0\0",
            b"0000:004242:+bcdef:00000000000000000000ffff0a5b0001\0",
            b"0000:004242;abcdef:00000000000000000000ffff0a5b0001\0",
            b"0000:004242:abcdef:0000:0000000000000000000ffff0a5b\0",
            b"\xff000:004242:abcdef:00000000000000000000ffff0a5b0001\0",
            &[0; LENGTH],
        ] {
            assert_eq!(QueuePairAddress::parse(wrong), None, "{}", wrong.escape_ascii());
        }
    }

    #[test]
    fn of_several_failures_the_refusal_is_told() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let listening = listener.local_addr().unwrap();
        let refusing = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        // The broadcast address is nobody's.
        let nowhere: SocketAddr = "255.255.255.255:1".parse().unwrap();
        let kind = |addresses: &[SocketAddr]| connect(addresses, SHORT).unwrap_err().kind();
        assert_eq!(kind(&[nowhere]), io::ErrorKind::NetworkUnreachable);
        assert_eq!(kind(&[refusing, nowhere]), io::ErrorKind::ConnectionRefused);
        assert_eq!(kind(&[nowhere, refusing]), io::ErrorKind::ConnectionRefused);
        assert_eq!(connect(&[nowhere, refusing, listening], SHORT).unwrap().1, listening);
    }

    #[test]
    fn a_peer_without_gid_is_told_what_to_do() {
        let nobody = QueuePairAddress { gid: Ipv6Addr::UNSPECIFIED, ..address() };
        assert!(nobody.port().unwrap_err().to_string().contains("-g INDEX"));
        assert_eq!(address().port().unwrap().ip, "10.91.0.1".parse::<IpAddr>().unwrap());
    }

    #[test]
    fn strangers_are_told_apart() {
        let short = Duration::from_millis(20);
        for (said, expected) in [
            (&b""[..], "said nothing for 20ms"),
            (b"0000:0042", "only \"0000:0042\""),
            (b"GET / HTTP/1.1\r\n\r\n", "it sent \"GET / HTTP/1.1\", which is HTTP"),
            (b"\x16\x03\x01", "it sent \"\\x16\\x03\\x01\", which is no address"),
        ] {
            let (mut stranger, stream) = pair();
            stranger.write_all(said).unwrap();
            let peer = stream.peer_addr().unwrap();
            let mistake = Waiting::hear(stream, peer, short).err().unwrap().to_string();
            assert!(mistake.contains(expected), "{mistake}");
        }
        for (said, expected) in [
            (&b""[..], "closed the connection without a word"),
            (b"0000:0042", "in the middle of what it had to say, after \"0000:0042\""),
        ] {
            let (mut stranger, mut stream) = pair();
            stranger.write_all(said).unwrap();
            drop(stranger);
            let mistake = receive_address(&mut stream, SHORT).unwrap_err().to_string();
            assert!(mistake.contains(expected), "{mistake}");
        }
    }

    #[test]
    fn the_sentence_of_a_refusal_arrives_whole_and_printable() {
        let (mut client, server) = pair();
        let peer = server.peer_addr().unwrap();
        client.write_all(&address().emit()).unwrap();
        let waiting = Waiting::hear(server, peer, SHORT).unwrap();
        assert_eq!(waiting.address, address());
        waiting.refuse("no \x1bmemory left: see `ulimit -l`");
        let mistake = receive_address(&mut client, SHORT).unwrap_err().to_string();
        assert_eq!(mistake, "no memory left: see `ulimit -l`");

        let (mut client, server) = pair();
        client.write_all(&address().emit()).unwrap();
        Waiting::hear(server, peer, SHORT).unwrap().refuse(&"x".repeat(5000));
        let mistake = receive_address(&mut client, SHORT).unwrap_err().to_string();
        assert!(mistake.len() <= REFUSAL_MAX && mistake.starts_with("xxx"), "{mistake}");
    }
}
