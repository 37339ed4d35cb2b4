//! What initiators and targets of files say to each other: bytes in, events out.
//!
//! Both begin with a [`Hello`]. Then the initiator sends requests, and the target a reply to each in any
//! order. All numbers are little-endian. The data of a WRITE follows its header, and an end that says
//! whether it counts: the target writes nothing before it has that. The data of a READ follows its reply.
//! TCP's checksum is the only one.

use std::io;

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
pub(super) struct Hello;

impl Hello {
    pub(super) const LENGTH: usize = 12;

    pub(super) fn emit() -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; Self::LENGTH]) -> Result<Self, ProtocolError> {
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        match bytes[..8] == MAGIC {
            false => Err(ProtocolError::Magic),
            true if version != VERSION => Err(ProtocolError::Version(version)),
            true => Ok(Self),
        }
    }
}

/// A request's header.
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
            0 => Opcode::Read,
            1 => Opcode::Write,
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

/// A reply's header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reply {
    /// To the request of this number; so many bytes of data follow.
    Ended { id: u64, outcome: Outcome, length: u32 },
    /// The target is there, and at work.
    Alive,
}

impl Reply {
    pub(super) const LENGTH: usize = 24;

    pub(super) fn emit(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        let Self::Ended { id, outcome, length } = *self else {
            bytes[0] = 2;
            return bytes;
        };
        bytes[0] = 1;
        bytes[1] = match outcome {
            Outcome::Done => 0,
            Outcome::UnknownFile => 1,
            Outcome::OutOfRange => 2,
            Outcome::ReadOnly => 3,
            Outcome::Truncated => 4,
            Outcome::Abandoned => 5,
            Outcome::ShutDown => 6,
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
            1 => {}
            2 => return Ok(Self::Alive),
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

impl Header for Request {
    const LENGTH: usize = Self::LENGTH;

    fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        Self::parse(&part(bytes, 0))
    }

    fn data(&self) -> (u32, bool) {
        match self.opcode {
            Opcode::Read => (0, false),
            Opcode::Write => (self.length, true),
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
            Self::Alive => (0, false),
        }
    }
}

/// What a stream says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Event<'a, H> {
    Hello,
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
pub(super) type RequestDecoder = Decoder<Request>;

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
                Hello::parse(&part(bytes, 0))?;
                self.state = State::Header;
                Ok(Some(Event::Hello))
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
