//! The socket at which an engine answers.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::RangeInclusive;

use socket2::{Domain, Protocol, Socket, Type};

/// Listens at `address`. Where it has no port, at a free one of `ports`, or of the system's choice.
pub(crate) fn listen(
    address: SocketAddr,
    ports: Option<&RangeInclusive<u16>>,
    backlog: u16,
) -> io::Result<TcpListener> {
    let Some(ports) = ports.filter(|_| address.port() == 0) else {
        return listen_at(address, backlog);
    };
    let (first, count) = (*ports.start(), ports.clone().count());
    if count == 0 || first == 0 {
        let what = format!("{first}-{} is no range of ports", ports.end());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    // Engines that start at the same time, or one after the other, are to meet rarely: a peer may
    // still connect to the port of one that has ended.
    let start = RandomState::new().hash_one(address) as usize % count;
    for turn in 0..count {
        let port = first + ((start + turn) % count) as u16;
        match listen_at(SocketAddr::new(address.ip(), port), backlog) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            result => return result,
        }
    }
    let what = format!("each port from {first} to {} is in use", ports.end());
    Err(io::Error::new(io::ErrorKind::AddrInUse, what))
}

/// Listens there.
pub(crate) fn listen_at(address: SocketAddr, backlog: u16) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // Connections of an earlier process that are still closing do not keep the port.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(backlog.into())?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback(port: u16) -> SocketAddr {
        SocketAddr::new([127, 0, 0, 1].into(), port)
    }

    #[test]
    fn a_free_port_of_the_range_is_found_and_none_is_told() {
        // Two neighbours that are free, as far as can be told.
        let (held, ports) = (40_000..60_000)
            .find_map(|port| {
                let held = listen_at(loopback(port), 1).ok()?;
                drop(listen_at(loopback(port + 1), 1).ok()?);
                Some((held, port..=port + 1))
            })
            .unwrap();
        let listener = listen(loopback(0), Some(&ports), 128).unwrap();
        assert_eq!(listener.local_addr().unwrap().port(), *ports.end());
        let error = listen(loopback(0), Some(&ports), 128).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let expected = format!("each port from {} to {} is in use", ports.start(), ports.end());
        assert_eq!(error.to_string(), expected);
        drop(held);
        let again = listen(loopback(0), Some(&ports), 128).unwrap();
        assert_eq!(again.local_addr().unwrap().port(), *ports.start());
        // A port of its own comes before the range.
        assert!(listen(loopback(*ports.start()), Some(&(1..=2)), 128).is_err());
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "it is what is refused")]
    fn a_range_without_ports_is_refused() {
        for ports in [0..=0, 0..=10, 2000..=1999] {
            let error = listen(loopback(0), Some(&ports), 128).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{ports:?}");
        }
    }
}
