//! Answers in the framing of the original.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_net::stream::{receive_slice, set_receive_low_water};

use super::{Broken, Connection, SCRATCH, broke, closed, nonsense};
use crate::tcp::original::{self, STATUS_LENGTH, Version};
use crate::tcp::peer::Peer;
use crate::{FailureReason, Opcode};

/// Bytes of the data of a READ that are waited for at a time. The original sends 64 KiB at a time, and to be woken for
/// each of these takes longer than to receive them.
const PORTION: u64 = 256 << 10;

/// Where nothing was received for so long, less is taken as well: the peer may be slow, and is to be seen to move.
const PAUSE: Duration = Duration::from_millis(50);

/// What is awaited before the data, if any, of what is under way.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Status {
    #[default]
    None,
    /// A status, of which so many bytes have come.
    Awaited([u8; STATUS_LENGTH], usize),
    /// A byte that is read behind a WRITE.
    Behind,
    /// It has come, and the data of a READ comes.
    Data,
}

impl Status {
    pub(super) const fn of(version: Version, opcode: Opcode, behind: bool) -> Self {
        match (version, opcode) {
            (Version::Two, _) => Self::Awaited([0; STATUS_LENGTH], 0),
            (Version::One, Opcode::Read) => Self::Data,
            (Version::One, Opcode::Write) if behind => Self::Behind,
            (Version::One, Opcode::Write) => Self::None,
        }
    }
}

/// How much is to come before who waits for the connection is woken.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LowWater {
    /// As the socket has it, if it was told.
    bytes: Option<u32>,
    /// The data of this READ comes so slowly that any of it counts.
    is_slow: bool,
}

impl Connection {
    /// Tells the socket how much of the answer to what is under way is waited for. `begins`: it was not sent yet. The status comes
    /// before its data: who wakes up for it does so while the peer sends the data.
    pub(super) fn await_data(&mut self, begins: bool) {
        self.low_water.is_slow &= !begins;
        let front = self.under_way.front().filter(|_| !self.low_water.is_slow);
        let left = match (self.status, front) {
            (Status::Data, Some(message)) => message.pieces.left(),
            _ => 1,
        };
        let bytes = left.clamp(1, PORTION) as u32;
        if let Some(stream) = &self.stream
            && self.low_water.bytes.unwrap_or(1) != bytes
        {
            // Without it more wake-ups are needed, and nothing else.
            if set_receive_low_water(stream.as_fd(), bytes).is_ok() {
                self.low_water.bytes = Some(bytes);
            }
        }
    }

    /// Nothing was received for so long.
    pub(super) fn take_what_comes(&mut self, silence: Duration) {
        if silence >= PAUSE {
            self.low_water.is_slow = true;
            self.await_data(false);
        }
    }

    /// Receives what there is.
    pub(super) fn receive_old(&mut self, peer: &Arc<Peer>, version: Version) -> Result<(), Broken> {
        let Some(stream) = self.stream.clone() else { return Ok(()) };
        loop {
            let received = match (&mut self.status, self.under_way.front_mut()) {
                (Status::Data, Some(message)) if message.opcode == Some(Opcode::Read) => {
                    self.scratch.resize(SCRATCH, 0);
                    message.pieces.receive(&stream, &mut self.scratch)
                }
                (Status::Awaited(bytes, count), Some(_)) => {
                    let received = receive_slice(stream.as_fd(), &mut bytes[*count..]);
                    *count += *received.as_ref().unwrap_or(&0);
                    received
                }
                (Status::Behind, Some(_)) => receive_slice(stream.as_fd(), &mut [0]),
                // Nothing is to come but the end.
                _ => receive_slice(stream.as_fd(), &mut [0]),
            };
            match received {
                Ok(0) if self.may_end() => return Err(Broken::Done),
                Ok(0) => return Err(self.ended(version)),
                Ok(_) => self.moved = Some(Instant::now()),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if !self.under_way.is_empty() {
                        self.await_data(false);
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broke(&error)),
            }
            if !std::mem::replace(&mut self.answered, true) {
                peer.connected();
            }
            self.go_on(peer, version)?;
            if self.under_way.is_empty() {
                return Ok(());
            }
        }
    }

    /// Something more has come.
    fn go_on(&mut self, peer: &Arc<Peer>, version: Version) -> Result<(), Broken> {
        let Some(message) = self.under_way.front_mut() else {
            return Err(nonsense("it says something unasked"));
        };
        match self.status {
            Status::None => return Err(nonsense("it says something unasked")),
            Status::Awaited(_, count) if count < STATUS_LENGTH => return Ok(()),
            Status::Awaited(bytes, _) => match original::Status::parse(bytes) {
                None => return Err(nonsense("its status is none")),
                Some(original::Status::Rejected(_)) => {
                    message.reject();
                    self.finish(peer, true);
                    // It closes the connection.
                    return Err(Broken::Done);
                }
                Some(original::Status::Done) if message.opcode == Some(Opcode::Read) => {
                    self.status = Status::Data;
                    return Ok(());
                }
                Some(original::Status::Done) if self.sending => {
                    return Err(nonsense("it has acknowledged what was not sent yet"));
                }
                Some(original::Status::Done) => {}
            },
            Status::Behind if self.sending => {
                return Err(nonsense("it answers what was not sent yet"));
            }
            Status::Behind => {}
            Status::Data if message.pieces.left() > 0 => return Ok(()),
            Status::Data => {}
        }
        self.finish(peer, true);
        // Whether it serves another request cannot be told.
        if version == Version::One { Err(Broken::Done) } else { Ok(()) }
    }

    /// The message under way is over.
    fn finish(&mut self, peer: &Arc<Peer>, confirmed: bool) {
        if let Some(message) = self.under_way.pop_front() {
            self.under_way_bytes = 0;
            self.sending = false;
            self.status = Status::None;
            peer.flow().done(message, confirmed);
        }
    }

    /// Why the end of the stream comes amid a request.
    fn ended(&self, version: Version) -> Broken {
        let text = match (version, self.status) {
            (Version::One, Status::Behind) => {
                "it has closed the connection and confirmed no WRITE: it rejected the range, or serves one \
                 request for a connection"
            }
            (Version::One, Status::Data) => {
                "it has closed the connection, as it does when the range is not in memory that is registered \
                 there"
            }
            _ => return closed(),
        };
        Broken::Ended(FailureReason::Connection(text.into()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use millstream_net::stream::{Readiness, wait_for_stream};

    use super::super::{Did, Phase};
    use super::*;
    use crate::tcp::flow::Framing;
    use crate::tcp::testing::{Room, peer, peer_with, push, tasks};

    const MIB: u64 = 1 << 20;
    const LONG: Duration = Duration::from_secs(60);

    fn is_readable(stream: &TcpStream, time: Duration) -> bool {
        wait_for_stream(stream.as_fd(), Readiness::Readable, time).unwrap()
    }

    /// Waits until so many bytes are there, whether anybody is woken for them or not.
    fn arrived(stream: &TcpStream, count: usize) {
        let (mut bytes, start) = (vec![0; count], Instant::now());
        while stream.peek(&mut bytes).unwrap_or(0) < count {
            assert!(start.elapsed() < LONG);
            std::thread::yield_now();
        }
    }

    #[test]
    fn who_waits_for_a_read_is_woken_for_much_of_it_for_all_of_it_and_for_any_of_it_where_it_is_slow()
     {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        near.set_nonblocking(true).unwrap();
        let mut far = listener.accept().unwrap().0;
        let (peer, room, near) = (peer(), Room::new(MIB as usize), Arc::new(near));
        let mut connection =
            Connection { stream: Some(Arc::clone(&near)), ..Connection::default() };
        let mut batches = Vec::new();
        let mut asks = |connection: &mut Connection, opcode, length| {
            let (batch, handles) = tasks(opcode, room.address(), &[length]);
            push(&mut peer.flow(), &room, &handles);
            let message = peer.flow().next_message().unwrap();
            connection.under_way.push_back(message);
            connection.status = Status::of(Version::Two, opcode, false);
            connection.await_data(true);
            batches.push(batch);
        };
        // The status of a short one, and then all of it.
        asks(&mut connection, Opcode::Read, 100);
        far.write_all(&original::Status::Done.emit()).unwrap();
        assert!(is_readable(&near, LONG));
        connection.receive_old(&peer, Version::Two).map_err(|_| ()).unwrap();
        far.write_all(&[7; 99]).unwrap();
        arrived(&near, 99);
        assert!(!is_readable(&near, Duration::ZERO));
        far.write_all(&[7]).unwrap();
        assert!(is_readable(&near, LONG));
        connection.receive_old(&peer, Version::Two).map_err(|_| ()).unwrap();
        assert!(connection.under_way.is_empty());
        // A status is all that there is of a WRITE.
        asks(&mut connection, Opcode::Write, 100);
        far.write_all(&original::Status::Done.emit()).unwrap();
        assert!(is_readable(&near, LONG));
        connection.receive_old(&peer, Version::Two).map_err(|_| ()).unwrap();
        // Of a long one a portion, and what is left behind that.
        asks(&mut connection, Opcode::Read, PORTION + 1100);
        far.write_all(&original::Status::Done.emit()).unwrap();
        far.write_all(&[7; 1000]).unwrap();
        arrived(&near, STATUS_LENGTH + 1000);
        connection.receive_old(&peer, Version::Two).map_err(|_| ()).unwrap();
        assert_eq!(connection.under_way[0].pieces.left(), PORTION + 100);
        far.write_all(&vec![7; PORTION as usize - 1000]).unwrap();
        arrived(&near, PORTION as usize - 1000);
        assert!(!is_readable(&near, Duration::ZERO));
        far.write_all(&[7; 1000]).unwrap();
        assert!(is_readable(&near, LONG));
        while connection.under_way[0].pieces.left() > 100 {
            connection.receive_old(&peer, Version::Two).map_err(|_| ()).unwrap();
        }
        far.write_all(&[7; 50]).unwrap();
        arrived(&near, 50);
        assert!(!is_readable(&near, Duration::ZERO));
        // It says no more for a while.
        connection.take_what_comes(Duration::ZERO);
        assert!(!is_readable(&near, Duration::ZERO));
        connection.take_what_comes(PAUSE);
        assert!(is_readable(&near, LONG));
        connection.receive_old(&peer, Version::Two).map_err(|_| ()).unwrap();
        far.write_all(&[7]).unwrap();
        assert!(is_readable(&near, LONG));
        connection.receive_old(&peer, Version::Two).map_err(|_| ()).unwrap();
        assert_eq!(connection.under_way[0].pieces.left(), 49);
        // Nor is anybody left waiting whose peer ends amid a portion.
        asks(&mut connection, Opcode::Read, MIB);
        drop(far);
        assert!(is_readable(&near, LONG));
    }

    #[test]
    fn a_connection_that_was_not_used_yet_is_looked_at_before_something_is_sent() {
        for version in [Version::One, Version::Two] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            near.set_nonblocking(true).unwrap();
            let (peer, room, near) =
                (peer_with(Framing::Old(version)), Room::new(4), Arc::new(near));
            let mut connection = Connection { phase: Phase::Open, ..Connection::default() };
            connection.stream = Some(Arc::clone(&near));
            drop(listener.accept().unwrap());
            assert!(is_readable(&near, LONG));
            let (_batch, handles) = tasks(Opcode::Write, room.address(), &[4]);
            push(&mut peer.flow(), &room, &handles);
            assert_eq!(connection.work(&peer, false, false), Did::Again, "{version:?}");
            assert!(connection.under_way.is_empty() && peer.flow().has_more());
            assert!(connection.has_changed(), "it is closed");
        }
    }

    /// Otherwise it would be made again at once, and again.
    #[test]
    fn a_peer_that_ends_connections_as_they_are_made_is_left_alone_for_a_while() {
        for version in [Version::One, Version::Two] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let (peer, room) = (peer_with(Framing::Old(version)), Room::new(4));
            let (_batch, handles) = tasks(Opcode::Write, room.address(), &[4]);
            push(&mut peer.flow(), &room, &handles);
            let mut rounds = 0;
            while peer.may_connect() {
                assert!(rounds < 10, "{version:?}");
                rounds += 1;
                let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                near.set_nonblocking(true).unwrap();
                let near = Arc::new(near);
                let mut connection = Connection { phase: Phase::Open, ..Connection::default() };
                (connection.stream, connection.fresh) = (Some(Arc::clone(&near)), true);
                drop(listener.accept().unwrap());
                assert!(is_readable(&near, LONG));
                assert_eq!(connection.work(&peer, true, false), Did::Again);
            }
            assert!(peer.flow().has_more(), "{version:?}: nothing was asked");
        }
    }

    #[test]
    fn one_that_ends_as_it_is_made_is_refused() {
        let mut connection = Connection { phase: Phase::Open, ..Connection::default() };
        assert!(connection.may_end());
        connection.fresh = true;
        assert!(!connection.may_end(), "it would be made again and again");
        connection.fresh = false;
        connection.asked = true;
        assert!(!connection.may_end(), "it was asked, and not answered");
        connection.answered = true;
        assert!(connection.may_end());
    }
}
