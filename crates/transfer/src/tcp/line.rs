//! The bytes of a connection: as they are, or in records of a layer that checks them.
//!
//! Without a layer they go between registered memory and the socket, and nowhere else. A layer has them copied once more:
//! what is checked or encrypted must not change meanwhile, and memory may. So has memory of GPUs, which sockets do not
//! take: what was copied of it and not sent waits here, as with a layer.

mod checked;

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::AsFd;

use millstream_metadata::TlsSession;
use millstream_net::stream::{receive_slice, send_slice};

pub(super) use self::checked::{Checked, Damaged};
use super::pieces::Pieces;
use crate::gpu::STAGED;
use crate::memory::Gathered;

/// Bytes that are put into a layer at a time.
const PORTION: usize = 64 << 10;

/// Parts that are sent at once.
const MAX_VECTOR: usize = 64;

/// What is between messages and the socket.
pub(super) enum Layer {
    /// Records with a checksum each.
    Checked(Checked),
    Tls(Box<TlsSession>),
}

impl Layer {
    /// Bytes that have come, and were checked.
    fn ready(&mut self) -> &[u8] {
        match self {
            Self::Checked(records) => records.ready(),
            Self::Tls(session) => session.ready(),
        }
    }

    /// So many of these were taken.
    fn consume(&mut self, count: usize) {
        match self {
            Self::Checked(records) => records.consume(count),
            Self::Tls(session) => session.consume(count),
        }
    }

    /// Reads once from the socket; 0 at the end of the stream. There may be nothing ready after it.
    fn fill(&mut self, stream: &mut dyn Read) -> io::Result<usize> {
        match self {
            Self::Checked(records) => records.fill(stream),
            Self::Tls(session) => session.fill(stream),
        }
    }

    /// Whether the first bytes of a record have come, and not all of it.
    fn is_amid_record(&self) -> bool {
        match self {
            Self::Checked(records) => !records.unread().is_empty(),
            Self::Tls(session) => session.is_amid_record(),
        }
    }

    /// Takes all of these bytes.
    fn accept(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Checked(records) => {
                records.accept(bytes);
                Ok(())
            }
            Self::Tls(session) => session.accept(bytes),
        }
    }

    fn has_unsent(&self) -> bool {
        match self {
            Self::Checked(records) => records.has_unsent(),
            Self::Tls(session) => session.has_unsent(),
        }
    }

    /// Writes all that was accepted.
    fn flush(&mut self, stream: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Checked(records) => records.flush(stream),
            Self::Tls(session) => session.flush(stream),
        }
    }
}

/// See above. No call waits, but for [`Line::read`].
#[derive(Default)]
pub(crate) struct Line {
    layer: Option<Box<Layer>>,
    /// Where bytes are gathered that the layer takes, or that are staged.
    portion: Vec<u8>,
    /// What of it was staged and not sent. Empty with a layer.
    unsent: Range<usize>,
}

impl Line {
    pub(super) fn over(layer: Option<Layer>) -> Self {
        Self { layer: layer.map(Box::new), ..Self::default() }
    }

    /// Where bytes go over TLS.
    pub(crate) fn over_tls(session: TlsSession) -> Self {
        Self::over(Some(Layer::Tls(Box::new(session))))
    }

    /// Says and hears what it can of what comes before the first message; whether that is over.
    pub(super) fn handshake(&mut self, stream: &TcpStream) -> io::Result<bool> {
        match self.layer.as_deref_mut() {
            Some(Layer::Tls(session)) => session.handshake(&mut WithoutWait(stream)),
            _ => Ok(true),
        }
    }

    /// Whether it goes over TLS.
    pub(super) fn is_tls(&self) -> bool {
        matches!(self.layer.as_deref(), Some(Layer::Tls(_)))
    }

    /// Whether something was taken that is not with the kernel yet.
    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty() || self.layer.as_ref().is_some_and(|layer| layer.has_unsent())
    }

    /// Whether something has come that was not taken.
    pub(super) fn has_ready(&mut self) -> bool {
        self.layer.as_mut().is_some_and(|layer| !layer.ready().is_empty())
    }

    /// What has come that a layer could not take for its own.
    pub(super) fn unread(&self) -> &[u8] {
        match self.layer.as_deref() {
            Some(Layer::Checked(records)) => records.unread(),
            Some(Layer::Tls(_)) | None => &[],
        }
    }

    /// Whether the first bytes of a record have come, and not all of it.
    pub(super) fn is_amid_record(&self) -> bool {
        self.layer.as_ref().is_some_and(|layer| layer.is_amid_record())
    }

    /// Sends what was taken before: an error if there is no room for all of it.
    pub(crate) fn flush(&mut self, stream: &TcpStream) -> io::Result<()> {
        while !self.unsent.is_empty() {
            self.unsent.start += send_slice(stream.as_fd(), &self.portion[self.unsent.clone()])?;
        }
        self.layer.as_mut().map_or(Ok(()), |layer| layer.flush(&mut WithoutWait(stream)))
    }

    /// Sends, or takes, as many of these bytes as there is room for.
    pub(crate) fn send(&mut self, stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
        self.flush(stream)?;
        let Some(layer) = &mut self.layer else { return send_slice(stream.as_fd(), bytes) };
        let now = &bytes[..bytes.len().min(PORTION)];
        layer.accept(now)?;
        try_flush(layer, stream)?;
        Ok(now.len())
    }

    /// [`Pieces::send`].
    pub(super) fn send_pieces(
        &mut self,
        stream: &TcpStream,
        pieces: &mut Pieces,
        before: &[u8],
        after: &[u8],
    ) -> io::Result<usize> {
        self.flush(stream)?;
        if self.layer.is_none() && !pieces.is_staged() {
            return pieces.send(stream, before, after);
        }
        self.portion.resize(if self.layer.is_some() { PORTION } else { STAGED }, 0);
        let faults = pieces.faults().count();
        let mut count = put(&mut self.portion, before);
        let is_all = count == before.len();
        count += pieces.copy_out(&mut self.portion[count..])?;
        // What follows says that all is well.
        if is_all && pieces.left() == 0 && pieces.faults().count() == faults {
            count += put(&mut self.portion[count..], after);
        }
        match &mut self.layer {
            Some(layer) => {
                layer.accept(&self.portion[..count])?;
                try_flush(layer, stream)?;
            }
            None => {
                self.unsent = 0..count;
                match self.flush(stream) {
                    Err(error) if !is_for_later(&error) => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(count)
    }

    /// Whether there is nothing between the bytes and the socket.
    pub(super) const fn is_bare(&self) -> bool {
        self.layer.is_none()
    }

    /// Receives what has come; 0 at the end of the stream.
    pub(crate) fn receive(&mut self, stream: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
        match &mut self.layer {
            None => receive_slice(stream.as_fd(), bytes),
            Some(layer) => receive_from(layer, &mut WithoutWait(stream), |ready| put(bytes, ready)),
        }
    }

    /// The same, and waits as long as the socket is set to, once. [`io::ErrorKind::WouldBlock`] where some of a record
    /// has come, as who sends it byte by byte is to be looked at after each, or one of the layer's own.
    pub(super) fn read(&mut self, mut stream: &TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
        let Some(layer) = &mut self.layer else { return stream.read(bytes) };
        if layer.ready().is_empty() {
            if layer.fill(&mut stream)? == 0 {
                return Ok(0);
            }
            if layer.ready().is_empty() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        let count = put(bytes, layer.ready());
        layer.consume(count);
        Ok(count)
    }

    /// [`Pieces::receive`].
    pub(super) fn receive_pieces(
        &mut self,
        stream: &TcpStream,
        pieces: &mut Pieces,
        scratch: &mut [u8],
    ) -> io::Result<usize> {
        match &mut self.layer {
            None => pieces.receive(stream, scratch),
            Some(layer) => {
                receive_from(layer, &mut WithoutWait(stream), |ready| pieces.take(ready))
            }
        }
    }
}

/// Has `take` take of what is ready, once something is; 0 at the end of the stream.
fn receive_from(
    layer: &mut Layer,
    stream: &mut dyn Read,
    take: impl FnOnce(&[u8]) -> usize,
) -> io::Result<usize> {
    while layer.ready().is_empty() {
        if layer.fill(stream)? == 0 {
            return Ok(0);
        }
    }
    let count = take(layer.ready());
    layer.consume(count);
    Ok(count)
}

/// Whether the same call may do better later.
fn is_for_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// What there is no room for is for the next time.
fn try_flush(layer: &mut Layer, stream: &TcpStream) -> io::Result<()> {
    match layer.flush(&mut WithoutWait(stream)) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}

/// Copies what there is room for.
fn put(room: &mut [u8], bytes: &[u8]) -> usize {
    let count = room.len().min(bytes.len());
    room[..count].copy_from_slice(&bytes[..count]);
    count
}

/// A socket whose calls do not wait, whatever it is set to.
struct WithoutWait<'a>(&'a TcpStream);

impl Read for WithoutWait<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        receive_slice(self.0.as_fd(), bytes)
    }
}

impl Write for WithoutWait<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        send_slice(self.0.as_fd(), bytes)
    }

    /// TLS has many records to write.
    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut gathered = Gathered::default();
        for part in parts.iter().take(MAX_VECTOR) {
            gathered.add_bytes(part);
        }
        gathered.send(self.0.as_fd())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::testing::Room;

    /// Gives so many bytes at a time, and then has none.
    struct Portions<'a>(&'a [u8], usize);

    impl Read for Portions<'_> {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            let count = self.0.len().min(self.1).min(bytes.len());
            if count == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            bytes[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    /// Bytes in records of these lengths.
    fn records(bytes: &[u8], lengths: &[usize]) -> Vec<u8> {
        let (mut sender, mut stream, mut rest) = (Checked::default(), Vec::new(), bytes);
        for length in lengths.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, behind) = rest.split_at(rest.len().min(*length));
            sender.accept(now);
            rest = behind;
        }
        sender.flush(&mut stream).unwrap();
        stream
    }

    #[test]
    fn pieces_and_records_end_where_they_like() {
        let bytes: Vec<u8> = (0..100).collect();
        let lengths = [1, 0, 30, 13, 36];
        for records_of in [&[1][..], &[31], &[100], &[44, 1], &[7, 90]] {
            let stream = records(&bytes, records_of);
            for portion in [1, 11, 12, 13, 50, 1000] {
                let (room, mut pieces) = (Room::new(80), Pieces::default());
                let mut address = room.address();
                for length in lengths {
                    pieces.push(Some(&room.local), address, length);
                    address += length;
                }
                let mut layer = Layer::Checked(Checked::default());
                let mut stream = Portions(&stream, portion);
                while pieces.left() > 0 {
                    let taken = receive_from(&mut layer, &mut stream, |ready| pieces.take(ready));
                    assert!(taken.unwrap() > 0, "{records_of:?} {portion}");
                }
                assert_eq!(room.contents(), bytes[..80]);
                // What is behind them in the same record is for the next message.
                let mut behind = [0; 20];
                let mut count = 0;
                while count < behind.len() {
                    let next = |ready: &[u8]| put(&mut behind[count..], ready);
                    count += receive_from(&mut layer, &mut stream, next).unwrap();
                }
                assert_eq!(behind, bytes[80..]);
                let none = receive_from(&mut layer, &mut stream, <[u8]>::len).unwrap_err();
                assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
            }
        }
    }

    #[test]
    fn a_record_that_is_damaged_amid_a_piece_reaches_no_memory() {
        let stream = records(&[7; 40], &[20]);
        for at in 12 + 20..stream.len() {
            let mut wrong = stream.clone();
            wrong[at] ^= 1;
            let (room, mut pieces) = (Room::new(40), Pieces::default());
            pieces.push(Some(&room.local), room.address(), 40);
            let mut layer = Layer::Checked(Checked::default());
            let mut stream = Portions(&wrong, 1000);
            let mut take = || receive_from(&mut layer, &mut stream, |ready| pieces.take(ready));
            assert_eq!(take().unwrap(), 20);
            assert!(take().is_err(), "{at}");
            assert_eq!(room.contents(), [[7; 20], [0; 20]].concat());
        }
    }
}
