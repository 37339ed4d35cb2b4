//! How the two sides find each other: the TCP exchange of libibverbs' examples.
//!
//! The client connects and sends its queue pair's address, the server answers with its own, the
//! client says `done`. An address is 52 bytes: `LID:QPN:PSN:GID` in hexadecimal and a NUL. The TCP
//! connection is left to the caller.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, bail};
use millstream_verbs::{Psn, Qpn};

/// Bytes of an address on the wire.
const LENGTH: usize = "0000:000000:000000:00000000000000000000000000000000\0".len();
const DONE: &[u8; 5] = b"done\0";
/// For the other side to say its part.
const PATIENCE: Duration = Duration::from_secs(10);

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
    pub(super) fn new(address: IpAddr, qpn: Qpn, psn: Psn) -> Self {
        let gid = match address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        Self { lid: 0, qpn, psn, gid }
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

    /// The IP address behind its GID.
    pub(super) fn address(&self) -> anyhow::Result<IpAddr> {
        if self.gid.is_unspecified() {
            bail!(
                "the peer gave no GID; start it with one of RoCE v2, as in \
                 `ibv_rc_pingpong -g INDEX` (`show_gids` or `ibv_devinfo -v` lists them)"
            );
        }
        Ok(IpAddr::V6(self.gid).to_canonical())
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
        let text = std::str::from_utf8(message).ok()?.trim_end_matches('\0');
        let mut fields = text.split(':');
        let mut number = |digits: usize| {
            let field = fields.next().filter(|field| field.len() == digits)?;
            // from_str_radix would take a sign.
            field.bytes().all(|byte| byte.is_ascii_hexdigit()).then_some(())?;
            u128::from_str_radix(field, 16).ok()
        };
        let (lid, qpn, psn, gid) = (number(4)?, number(6)?, number(6)?, number(32)?);
        let rest = fields.next();
        rest.is_none().then_some(Self {
            lid: lid as u16,
            qpn: Qpn::new(qpn as u32),
            psn: Psn::new(psn as u32),
            gid: Ipv6Addr::from(gid),
        })
    }
}

/// The client's side of the TCP connection.
pub(super) struct Client {
    stream: TcpStream,
}

impl Client {
    /// Connects to a server of `command`.
    pub(super) fn connect(command: &str, host: &str, port: u16) -> anyhow::Result<Self> {
        let addresses: Vec<SocketAddr> = (host, port)
            .to_socket_addrs()
            .with_context(|| format!("cannot find the address of {host}"))?
            .collect();
        let mut failure = io::Error::from(io::ErrorKind::NotFound);
        for address in addresses {
            match TcpStream::connect_timeout(&address, PATIENCE) {
                Ok(stream) => return Ok(Self { stream: with_timeouts(stream)? }),
                Err(error) => failure = error,
            }
        }
        Err(failure).with_context(|| {
            format!("cannot connect to {host}, TCP port {port}: does a {command} server run there?")
        })
    }

    pub(super) fn peer(&self) -> anyhow::Result<IpAddr> {
        Ok(self.stream.peer_addr().context("the peer is gone")?.ip().to_canonical())
    }

    /// Gives our address for the peer's.
    pub(super) fn exchange(
        mut self,
        ours: &QueuePairAddress,
    ) -> anyhow::Result<(QueuePairAddress, TcpStream)> {
        self.stream.write_all(&ours.emit()).context("cannot send our address to the server")?;
        let theirs = receive_address(&mut self.stream, "server")?;
        self.stream.write_all(DONE).context("cannot send `done` to the server")?;
        Ok((theirs, self.stream))
    }
}

/// The server's side, before a client came.
pub(super) struct Server {
    listener: TcpListener,
}

/// The server's side, with a client that waits for our address.
pub(super) struct Waiting {
    stream: TcpStream,
    pub(super) client: QueuePairAddress,
}

impl Server {
    /// Listens on `address`, or on all of them.
    pub(super) fn listen(address: Option<IpAddr>, port: u16) -> anyhow::Result<Self> {
        let listener = match address {
            Some(address) => TcpListener::bind((address, port)),
            // Takes IPv4 too; a machine without IPv6 has to say so.
            None => TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
                .or_else(|_| TcpListener::bind(("0.0.0.0", port))),
        };
        let place = address.map_or_else(String::new, |address| format!(" of {address}"));
        let listener = listener.with_context(|| {
            format!("cannot listen on TCP port {port}{place}: choose another with --port")
        })?;
        Ok(Self { listener })
    }

    /// Waits for a client, for ever, and reads its address.
    pub(super) fn accept(self) -> anyhow::Result<Waiting> {
        let (stream, _) = self.listener.accept().context("no client could be accepted")?;
        let mut stream = with_timeouts(stream)?;
        let client = receive_address(&mut stream, "client")?;
        Ok(Waiting { stream, client })
    }
}

impl Waiting {
    /// Gives our address, once our queue pair can receive.
    pub(super) fn answer(mut self, ours: &QueuePairAddress) -> anyhow::Result<TcpStream> {
        self.stream.write_all(&ours.emit()).context("cannot send our address to the client")?;
        let mut done = [0; DONE.len()];
        self.stream.read_exact(&mut done).context("the client did not say `done`")?;
        if done != *DONE {
            bail!("the client said {done:x?} for `done`");
        }
        Ok(self.stream)
    }
}

fn with_timeouts(stream: TcpStream) -> anyhow::Result<TcpStream> {
    stream.set_read_timeout(Some(PATIENCE)).context("cannot set a timeout")?;
    stream.set_write_timeout(Some(PATIENCE)).context("cannot set a timeout")?;
    Ok(stream)
}

fn receive_address(stream: &mut TcpStream, who: &str) -> anyhow::Result<QueuePairAddress> {
    let mut message = [0; LENGTH];
    stream.read_exact(&mut message).with_context(|| {
        format!(
            "the {who} did not send the {LENGTH} bytes of its address: is it of the same command?"
        )
    })?;
    QueuePairAddress::parse(&message).with_context(|| {
        let text = String::from_utf8_lossy(&message).into_owned();
        format!("the {who} sent {text:?} as its address, which is not LID:QPN:PSN:GID")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> QueuePairAddress {
        let ip = "10.91.0.1".parse().unwrap();
        QueuePairAddress::new(ip, Qpn::new(0x4242), Psn::new(0xabcdef))
    }

    #[test]
    fn the_wire_form_is_that_of_libibverbs() {
        let expected = b"0000:004242:abcdef:00000000000000000000ffff0a5b0001\0";
        assert_eq!(&address().emit(), expected);
        assert_eq!(QueuePairAddress::parse(expected), Some(address()));
        let upper = b"0000:004242:ABCDEF:00000000000000000000FFFF0A5B0001\0";
        assert_eq!(QueuePairAddress::parse(upper), Some(address()));
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
    fn a_peer_without_gid_is_told_what_to_do() {
        let nobody = QueuePairAddress { gid: Ipv6Addr::UNSPECIFIED, ..address() };
        assert!(nobody.address().unwrap_err().to_string().contains("-g INDEX"));
        assert_eq!(address().address().unwrap(), "10.91.0.1".parse::<IpAddr>().unwrap());
    }
}
