//! What initiators and targets of files say to each other: bytes in, events out.
//!
//! Both begin with a [`Hello`]. Then the initiator sends requests, and the target a reply to each in any
//! order. All numbers are little-endian. The data of a WRITE follows its header, and an end that says
//! whether it counts: the target writes nothing before it has that. The data of a READ follows its reply.
//! TCP's checksum is the only one.
//!
//! An initiator that asks for it in its hello hears the name of the connection, which it uses once that is lost: over
//! another one it has the target end it, and confirm that nothing of it comes any more ([`Asked::Fence`]).

use std::io;
use std::time::Duration;

use thiserror::Error;

use crate::Opcode;

/// `version` is to be raised when what follows it changes.
const MAGIC: [u8; 8] = *b"MSFILES\n";
const VERSION: u16 = 1;

/// The most bytes that one request moves.
pub(super) const MAX_LENGTH: u32 = 1 << 20;

/// The end of a WRITE that counts, and of one that was given up in the midst of it.
const COMMIT: [u8; 4] = *b"done";
const ABANDON: [u8; 4] = *b"void";

/// Errors of Linux, as in errno(3).
pub(super) const EIO: i32 = 5;
pub(super) const EFAULT: i32 = 14;

/// What each side begins with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Hello {
    /// The initiator wants to hear the connection's name. Targets of before have no names, and do not look here.
    pub(super) wants_name: bool,
}

impl Hello {
    pub(super) const LENGTH: usize = 12;

    pub(super) fn emit(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = self.wants_name.into();
        bytes
    }

    fn parse(bytes: &[u8; Self::LENGTH]) -> Result<Self, ProtocolError> {
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        match bytes[..8] == MAGIC {
            false => Err(ProtocolError::Magic),
            true if version != VERSION => Err(ProtocolError::Version(version)),
            true => Ok(Self { wants_name: bytes[10] & 1 == 1 }),
        }
    }
}

/// What an initiator asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Asked {
    Io(Request),
    /// That the connection of this name is ended. The reply says that nothing of it comes any more.
    Fence {
        id: u64,
        connection: u128,
    },
}

/// A request for I/O: its header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Request {
    pub(super) opcode: Opcode,
    /// The reply is to wait until the bytes are where they survive a loss of power.
    pub(super) durable: bool,
    pub(super) id: u64,
    /// Which file: from the descriptor.
    pub(super) key: u128,
    /// Of the first byte in the file.
    pub(super) offset: u64,
    /// Bytes: 1 to [`MAX_LENGTH`].
    pub(super) length: u32,
}

impl Request {
    pub(super) const LENGTH: usize = 40;

    pub(super) fn emit(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[0] = self.opcode as u8;
        bytes[1] = self.durable.into();
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.key.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; Self::LENGTH]) -> Result<Self, ProtocolError> {
        let opcode = match bytes[0] {
            READ => Opcode::Read,
            WRITE => Opcode::Write,
            other => return Err(ProtocolError::Operation(other)),
        };
        let length = u32::from_le_bytes(part(bytes, 4));
        if bytes[1] > 1 || bytes[2..4] != [0; 2] {
            return Err(ProtocolError::Reserved);
        }
        if !(1..=MAX_LENGTH).contains(&length) {
            return Err(ProtocolError::Length(length));
        }
        Ok(Self {
            opcode,
            durable: bytes[1] == 1,
            id: u64::from_le_bytes(part(bytes, 8)),
            key: u128::from_le_bytes(part(bytes, 24)),
            offset: u64::from_le_bytes(part(bytes, 16)),
            length,
        })
    }

    /// The end of a WRITE's data.
    pub(super) const fn end(counts: bool) -> [u8; 4] {
        if counts { COMMIT } else { ABANDON }
    }
}

/// What a request's header begins with.
const READ: u8 = Opcode::Read as u8;
const WRITE: u8 = Opcode::Write as u8;
const FENCE: u8 = 2;

impl Asked {
    /// A header of a fence. What a request for I/O has besides is zero.
    pub(super) fn fence(id: u64, connection: u128) -> [u8; Request::LENGTH] {
        let mut bytes = [0; Request::LENGTH];
        bytes[0] = FENCE;
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        bytes[24..40].copy_from_slice(&connection.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; Request::LENGTH]) -> Result<Self, ProtocolError> {
        if bytes[0] != FENCE {
            return Request::parse(bytes).map(Self::Io);
        }
        if bytes[1..8] != [0; 7] || bytes[16..24] != [0; 8] {
            return Err(ProtocolError::Reserved);
        }
        let id = u64::from_le_bytes(part(bytes, 8));
        Ok(Self::Fence { id, connection: u128::from_le_bytes(part(bytes, 24)) })
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Outcome {
    Done,
    /// No file has this key, or not any more.
    UnknownFile,
    /// Beyond the file as it was registered.
    OutOfRange,
    ReadOnly,
    /// The file has become shorter.
    Truncated,
    /// The initiator has given the WRITE up.
    Abandoned,
    /// The target ends.
    ShutDown,
    /// What the system said: an errno.
    System(i32),
    /// The initiator has waited for so long. No target says so.
    Hung(Duration),
}

impl Outcome {
    /// What has become of an operation on a file.
    pub(super) fn of(error: &io::Error) -> Self {
        match (error.kind(), error.raw_os_error()) {
            (io::ErrorKind::UnexpectedEof, _) => Self::Truncated,
            (_, Some(errno)) => Self::System(errno),
            (io::ErrorKind::NotFound, None) => Self::UnknownFile,
            (io::ErrorKind::BrokenPipe, None) => Self::ShutDown,
            // What has no number of its own: an input or output error.
            _ => Self::System(EIO),
        }
    }
}

/// What a reply's header begins with.
const ENDED: u8 = 1;
const ALIVE: u8 = 2;
const CLOSING: u8 = 3;
const NAMED: u8 = 4;

/// A reply's header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reply {
    /// To the request of this number; so many bytes of data follow.
    Ended { id: u64, outcome: Outcome, length: u32 },
    /// The target is there, and at work.
    Alive,
    /// The name of this connection, which nobody else hears.
    Named { connection: u128 },
    /// The target closes the connection. It has not begun, and will not, what it has not replied to.
    Closing,
}

impl Reply {
    pub(super) const LENGTH: usize = 24;

    pub(super) fn emit(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        let (id, outcome, length) = match *self {
            Self::Ended { id, outcome, length } => (id, outcome, length),
            Self::Alive | Self::Closing => {
                bytes[0] = if *self == Self::Alive { ALIVE } else { CLOSING };
                return bytes;
            }
            Self::Named { connection } => {
                bytes[0] = NAMED;
                bytes[8..24].copy_from_slice(&connection.to_le_bytes());
                return bytes;
            }
        };
        bytes[0] = ENDED;
        bytes[1] = match outcome {
            Outcome::Done => 0,
            Outcome::UnknownFile => 1,
            Outcome::OutOfRange => 2,
            Outcome::ReadOnly => 3,
            Outcome::Truncated => 4,
            Outcome::Abandoned => 5,
            Outcome::ShutDown => 6,
            // Never said.
            Outcome::Hung(_) => 7,
            Outcome::System(errno) => {
                bytes[16..20].copy_from_slice(&errno.to_le_bytes());
                7
            }
        };
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; Self::LENGTH]) -> Result<Self, ProtocolError> {
        match bytes[0] {
            ENDED => {}
            ALIVE => return Ok(Self::Alive),
            CLOSING => return Ok(Self::Closing),
            NAMED => {
                return Ok(Self::Named { connection: u128::from_le_bytes(part(bytes, 8)) });
            }
            other => return Err(ProtocolError::Operation(other)),
        }
        let outcome = match bytes[1] {
            0 => Outcome::Done,
            1 => Outcome::UnknownFile,
            2 => Outcome::OutOfRange,
            3 => Outcome::ReadOnly,
            4 => Outcome::Truncated,
            5 => Outcome::Abandoned,
            6 => Outcome::ShutDown,
            7 => Outcome::System(i32::from_le_bytes(part(bytes, 16))),
            other => return Err(ProtocolError::Operation(other)),
        };
        let length = u32::from_le_bytes(part(bytes, 4));
        if length > MAX_LENGTH || (outcome != Outcome::Done && length > 0) {
            return Err(ProtocolError::Length(length));
        }
        Ok(Self::Ended { id: u64::from_le_bytes(part(bytes, 8)), outcome, length })
    }
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

/// What no initiator and no target says.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub(super) enum ProtocolError {
    #[error("it does not speak the protocol for files")]
    Magic,
    #[error("it speaks version {0} of the protocol for files, and this is version {VERSION}")]
    Version(u16),
    #[error("{0} is no operation or outcome")]
    Operation(u8),
    #[error("a reserved field is not zero")]
    Reserved,
    #[error("{0} bytes of data are too many or too few")]
    Length(u32),
    #[error("the end of a WRITE is none")]
    End,
    #[error("it asks for a fence of its own connection, or for too many at a time")]
    Fence,
}

/// Either side's header.
trait Header: Sized {
    /// Bytes.
    const LENGTH: usize;

    /// From so many bytes.
    fn parse(bytes: &[u8]) -> Result<Self, ProtocolError>;

    /// How many bytes of data follow, and whether an end follows these.
    fn data(&self) -> (u32, bool);
}

impl Header for Asked {
    const LENGTH: usize = Request::LENGTH;

    fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        Self::parse(&part(bytes, 0))
    }

    fn data(&self) -> (u32, bool) {
        match self {
            Self::Io(Request { opcode: Opcode::Write, length, .. }) => (*length, true),
            Self::Io(_) | Self::Fence { .. } => (0, false),
        }
    }
}

impl Header for Reply {
    const LENGTH: usize = Self::LENGTH;

    fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        Self::parse(&part(bytes, 0))
    }

    fn data(&self) -> (u32, bool) {
        match *self {
            Self::Ended { length, .. } => (length, false),
            Self::Alive | Self::Closing | Self::Named { .. } => (0, false),
        }
    }
}

/// What a stream says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Event<'a, H> {
    Hello(Hello),
    Header(H),
    /// Some of the data that belongs to the last header.
    Data(&'a [u8]),
    /// The end of a WRITE, and whether it counts.
    End(bool),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Hello,
    Header,
    /// So many bytes of data are left, and whether an end follows.
    Data(u32, bool),
    End,
}

/// Takes a stream apart. It keeps no more than a header.
#[derive(Debug)]
pub(super) struct Decoder<H> {
    state: State,
    /// What has come of a header.
    kept: [u8; Request::LENGTH],
    count: usize,
    header: std::marker::PhantomData<H>,
}

/// What a target reads.
pub(super) type RequestDecoder = Decoder<Asked>;

/// What an initiator reads.
pub(super) type ReplyDecoder = Decoder<Reply>;

#[expect(private_bounds, reason = "there are two")]
impl<H: Header> Decoder<H> {
    pub(super) fn new() -> Self {
        let kept = [0; Request::LENGTH];
        Self { state: State::Hello, kept, count: 0, header: std::marker::PhantomData }
    }

    /// The next event of `input`, which moves on; `None` when all of it was taken. After an error nothing
    /// that follows means anything.
    pub(super) fn next<'a>(
        &mut self,
        input: &mut &'a [u8],
    ) -> Result<Option<Event<'a, H>>, ProtocolError> {
        match self.state {
            State::Hello => {
                let Some(bytes) = self.gather(input, Hello::LENGTH) else { return Ok(None) };
                let hello = Hello::parse(&part(bytes, 0))?;
                self.state = State::Header;
                Ok(Some(Event::Hello(hello)))
            }
            State::Header => {
                let Some(bytes) = self.gather(input, H::LENGTH) else { return Ok(None) };
                let header = H::parse(bytes)?;
                let (data, end) = header.data();
                self.after_data(data, end);
                Ok(Some(Event::Header(header)))
            }
            State::Data(left, _) => {
                let count = input.len().min(left as usize);
                if count == 0 {
                    return Ok(None);
                }
                let (data, rest) = input.split_at(count);
                *input = rest;
                self.received(count);
                Ok(Some(Event::Data(data)))
            }
            State::End => {
                let Some(bytes) = self.gather(input, COMMIT.len()) else { return Ok(None) };
                let counts = match part(bytes, 0) {
                    COMMIT => true,
                    ABANDON => false,
                    _ => return Err(ProtocolError::End),
                };
                self.state = State::Header;
                Ok(Some(Event::End(counts)))
            }
        }
    }

    /// So many bytes of data come next, and can be received where they belong.
    pub(super) const fn data_left(&self) -> usize {
        match self.state {
            State::Data(left, _) => left as usize,
            _ => 0,
        }
    }

    /// So many bytes of data were received, up to [`Decoder::data_left`], without being decoded.
    pub(super) fn received(&mut self, count: usize) {
        if let State::Data(left, end) = self.state {
            self.after_data(left.saturating_sub(count as u32), end);
        }
    }

    /// What has come of a hello or a header that is not whole.
    pub(super) fn unread(&self) -> &[u8] {
        &self.kept[..self.count]
    }

    /// Whether something has begun that has not ended.
    pub(super) fn is_amid(&self) -> bool {
        self.count > 0 || self.state != State::Header
    }

    fn after_data(&mut self, left: u32, end: bool) {
        self.state = match (left, end) {
            (0, true) => State::End,
            (0, false) => State::Header,
            _ => State::Data(left, end),
        };
    }

    /// Takes from `input` until there are so many bytes.
    fn gather(&mut self, input: &mut &[u8], length: usize) -> Option<&[u8]> {
        let count = input.len().min(length - self.count);
        let (taken, rest) = input.split_at(count);
        *input = rest;
        self.kept[self.count..self.count + count].copy_from_slice(taken);
        self.count += count;
        if self.count < length {
            return None;
        }
        self.count = 0;
        Some(&self.kept[..length])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HELLO: Hello = Hello { wants_name: false };

    const SOME: Request = Request {
        opcode: Opcode::Write,
        durable: true,
        id: 0x0102_0304_0506_0708,
        key: 0x1112_1314_1516_1718_191a_1b1c_1d1e_1f20,
        offset: 0x2122_2324_2526_2728,
        length: 5,
    };

    /// Headers, data and ends.
    type Said<H> = (Vec<H>, Vec<u8>, Vec<bool>);

    fn events<H: Header>(pieces: &[&[u8]]) -> Result<Said<H>, ProtocolError> {
        let mut decoder = Decoder::<H>::new();
        let (mut headers, mut data, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for mut piece in pieces.iter().copied() {
            while let Some(event) = decoder.next(&mut piece)? {
                match event {
                    Event::Hello(_) => {}
                    Event::Header(header) => headers.push(header),
                    Event::Data(bytes) => data.extend_from_slice(bytes),
                    Event::End(counts) => ends.push(counts),
                }
            }
            assert!(piece.is_empty());
        }
        Ok((headers, data, ends))
    }

    fn stream() -> Vec<u8> {
        let read = Request { opcode: Opcode::Read, durable: false, length: MAX_LENGTH, ..SOME };
        let mut stream = HELLO.emit().to_vec();
        for counts in [true, false] {
            stream.extend(SOME.emit());
            stream.extend(b"12345");
            stream.extend(Request::end(counts));
            stream.extend(read.emit());
        }
        stream
    }

    #[test]
    fn requests_wherever_the_stream_is_cut() {
        let stream = stream();
        for cut in 0..stream.len() {
            let (first, second) = stream.split_at(cut);
            let (requests, data, ends) = events::<Asked>(&[first, second]).unwrap();
            assert_eq!(requests.len(), 4);
            assert_eq!((requests[0], requests[2]), (Asked::Io(SOME), Asked::Io(SOME)));
            let read = Request { opcode: Opcode::Read, durable: false, length: MAX_LENGTH, ..SOME };
            assert_eq!(requests[1], Asked::Io(read));
            assert_eq!((&data[..], &ends[..]), (&b"1234512345"[..], &[true, false][..]));
        }
        let single: Vec<_> = stream.chunks(1).collect();
        assert_eq!(events::<Asked>(&single).unwrap().0.len(), 4);
    }

    #[test]
    fn a_request_byte_by_byte() {
        let bytes = SOME.emit();
        assert_eq!(bytes[..8], [1, 1, 0, 0, 5, 0, 0, 0]);
        assert_eq!(bytes[8..16], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!((bytes[16], bytes[23], bytes[24], bytes[39]), (0x28, 0x21, 0x20, 0x11));
    }

    #[test]
    fn fences_and_hellos_both_ways() {
        let connection = SOME.key;
        let bytes = Asked::fence(77, connection);
        assert_eq!((bytes[0], bytes[8], bytes[24], bytes[39]), (2, 77, 0x20, 0x11));
        for wants_name in [false, true] {
            let hello = Hello { wants_name };
            let stream = [&hello.emit()[..], &bytes, &SOME.emit(), b"12345", b"done"].concat();
            let (asked, data, ends) = events::<Asked>(&[&stream]).unwrap();
            assert_eq!(asked, [Asked::Fence { id: 77, connection }, Asked::Io(SOME)]);
            assert_eq!((&data[..], &ends[..]), (&b"12345"[..], &[true][..]));
            let mut decoder = RequestDecoder::new();
            assert_eq!(decoder.next(&mut &stream[..]), Ok(Some(Event::Hello(hello))));
        }
        // What a fence has no use for.
        for at in [1, 4, 16] {
            let mut stream = [&HELLO.emit()[..], &bytes].concat();
            stream[Hello::LENGTH + at] = 1;
            assert_eq!(events::<Asked>(&[&stream]), Err(ProtocolError::Reserved), "{at}");
        }
    }

    #[test]
    fn replies_both_ways() {
        let ended = |outcome, length| Reply::Ended { id: 77, outcome, length };
        let replies = [
            ended(Outcome::Done, 3),
            ended(Outcome::UnknownFile, 0),
            ended(Outcome::OutOfRange, 0),
            Reply::Alive,
            ended(Outcome::ReadOnly, 0),
            ended(Outcome::Truncated, 0),
            ended(Outcome::Abandoned, 0),
            ended(Outcome::ShutDown, 0),
            ended(Outcome::System(28), 0),
            Reply::Closing,
            Reply::Named { connection: 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10 },
        ];
        let mut stream = HELLO.emit().to_vec();
        for reply in &replies {
            stream.extend(reply.emit());
            if *reply == replies[0] {
                stream.extend(b"abc");
            }
        }
        let (seen, data, _) = events::<Reply>(&[&stream]).unwrap();
        assert_eq!((&seen[..], &data[..]), (&replies[..], &b"abc"[..]));
    }

    #[test]
    fn data_that_is_received_elsewhere_is_not_decoded() {
        let stream = stream();
        let mut decoder = RequestDecoder::new();
        let mut input = &stream[..Hello::LENGTH + Request::LENGTH + 2];
        while decoder.next(&mut input).unwrap().is_some() {}
        assert_eq!(decoder.data_left(), 3);
        decoder.received(3);
        assert_eq!((decoder.data_left(), decoder.is_amid()), (0, true));
        let mut rest = &stream[Hello::LENGTH + Request::LENGTH + 5..];
        assert_eq!(decoder.next(&mut rest), Ok(Some(Event::End(true))));
        assert!(!decoder.is_amid());
    }

    #[test]
    fn what_nobody_says_is_refused() {
        let change = |at: usize, value: u8| {
            let mut stream = stream();
            stream[at] = value;
            events::<Asked>(&[&stream]).unwrap_err()
        };
        let request = Hello::LENGTH;
        assert_eq!(change(0, b'G'), ProtocolError::Magic);
        assert_eq!(change(8, 9), ProtocolError::Version(9));
        assert_eq!(change(request, 3), ProtocolError::Operation(3));
        assert_eq!(change(request, FENCE), ProtocolError::Reserved);
        assert_eq!(change(request + 1, 2), ProtocolError::Reserved);
        assert_eq!(change(request + 2, 1), ProtocolError::Reserved);
        assert_eq!(change(request + 4, 0), ProtocolError::Length(0));
        assert_eq!(change(request + 7, 1), ProtocolError::Length((1 << 24) + 5));
        assert_eq!(change(request + Request::LENGTH + 5, 0), ProtocolError::End);
        let failed = Reply::Ended { id: 1, outcome: Outcome::ReadOnly, length: 1 };
        let stream = [&HELLO.emit()[..], &failed.emit()].concat();
        assert_eq!(events::<Reply>(&[&stream]), Err(ProtocolError::Length(1)));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(
            hello: bool,
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 0..20),
        ) {
            let mut pieces: Vec<_> = pieces.iter().map(Vec::as_slice).collect();
            let greeting = HELLO.emit();
            if hello {
                pieces.insert(0, &greeting);
            }
            let _ = events::<Asked>(&pieces);
            let _ = events::<Reply>(&pieces);
        }

        /// Any valid header is what it was.
        #[test]
        fn requests_come_out_as_they_went_in(
            write: bool, durable: bool, id: u64, key: u128, offset: u64, length in 1..=MAX_LENGTH,
        ) {
            let opcode = if write { Opcode::Write } else { Opcode::Read };
            let request = Request { opcode, durable, id, key, offset, length };
            prop_assert_eq!(Request::parse(&request.emit()), Ok(request));
        }
    }
}
