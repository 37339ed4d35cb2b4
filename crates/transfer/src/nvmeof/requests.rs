//! The requests of a connection, as they come to a target.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use millstream_metadata::Connection as Accepted;
use millstream_net::file_io::AlignedBuffer;

use super::connections::Connections;
use super::disk::{Disk, OpenFile, Operation};
use super::protocol::{Asked, Event, Outcome, Request, RequestDecoder};
use super::target::{ALIVE_INTERVAL, Connection, Files, deadline};
use crate::Opcode;

/// Bytes that are received at once where a request may begin.
const STAGE: usize = 64 << 10;

/// Reads a connection's requests.
pub(super) struct Reader<'a> {
    accepted: &'a Accepted,
    connection: &'a Arc<Connection>,
    connections: &'a Connections,
    files: &'a Files,
    disk: &'a Disk,
    decoder: RequestDecoder,
    /// A WRITE whose data comes.
    write: Option<Incoming>,
    /// By when what has begun to come is to be there.
    deadline: Option<Instant>,
    /// Whether the initiator has its place only until others need it.
    idle: bool,
}

struct Incoming {
    request: Request,
    /// What it is for; else the data is dropped, and this is why.
    file: Result<Arc<OpenFile>, Outcome>,
    buffer: AlignedBuffer,
    filled: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        accepted: &'a Accepted,
        connection: &'a Arc<Connection>,
        connections: &'a Connections,
        files: &'a Files,
        disk: &'a Disk,
    ) -> Self {
        let decoder = RequestDecoder::new();
        // Its hello is awaited.
        let deadline = Some(deadline(0));
        let write = None;
        Self {
            accepted,
            connection,
            connections,
            files,
            disk,
            decoder,
            write,
            deadline,
            idle: true,
        }
    }

    pub(super) fn read(mut self) -> io::Result<()> {
        let mut stage = vec![0; STAGE];
        let wire = &self.connection.wire;
        loop {
            if self.deadline.is_some_and(|deadline| Instant::now() > deadline) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            // Data goes where it belongs; what comes after it is looked for in the stage.
            let left = self.decoder.data_left();
            let into = match &mut self.write {
                Some(Incoming { file: Ok(_), buffer, filled, .. }) if left > 0 => {
                    &mut buffer.bytes_mut()[*filled..*filled + left]
                }
                _ => &mut stage[..],
            };
            match wire.read(into, ALIVE_INTERVAL) {
                Ok(0) => return Ok(()),
                Ok(count) => {
                    match &mut self.write {
                        Some(Incoming { file: Ok(_), filled, .. }) if left > 0 => {
                            *filled += count;
                            self.decoder.received(count);
                        }
                        _ => self.take(&stage[..count])?,
                    }
                    // The rest of a header, or of a hello.
                    match self.decoder.is_amid() {
                        false => self.deadline = None,
                        true => drop(self.deadline.get_or_insert_with(|| deadline(0))),
                    }
                    self.connection.amid.store(self.decoder.is_amid(), Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) =>
                {
                    let amid = self.decoder.is_amid();
                    if !amid && !self.idle && self.connection.is_at_rest() {
                        // Others may need its place.
                        self.accepted.idle();
                        self.idle = true;
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&mut self, mut input: &[u8]) -> io::Result<()> {
        let wrong = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        while let Some(event) = self.decoder.next(&mut input).map_err(wrong)? {
            match event {
                Event::Hello(hello) => {
                    if hello.wants_name {
                        self.connection.say_name();
                    }
                    self.deadline = None;
                }
                Event::Header(Asked::Fence { id, connection }) => {
                    if self.connections.fence(self.connection, id, connection).map_err(wrong)? {
                        // Nobody but its initiator knows that name.
                        self.heard();
                    }
                    self.deadline = None;
                }
                Event::Header(Asked::Io(request)) if request.opcode == Opcode::Read => {
                    self.begin_read(request);
                    self.deadline = None;
                }
                Event::Header(Asked::Io(request)) => {
                    self.begin_write(request);
                    // Not before there was room for it.
                    self.deadline = Some(deadline(request.length));
                }
                Event::Data(data) => {
                    if let Some(Incoming { file: Ok(_), buffer, filled, .. }) = &mut self.write {
                        buffer.bytes_mut()[*filled..*filled + data.len()].copy_from_slice(data);
                        *filled += data.len();
                    }
                }
                Event::End(counts) => {
                    self.end_write(counts);
                    self.deadline = None;
                }
            }
        }
        Ok(())
    }

    /// It has a key, or the name of a connection, and with that a place of its own. Strangers have none.
    fn heard(&mut self) {
        if std::mem::take(&mut self.idle) {
            self.accepted.heard();
        }
    }

    fn begin_read(&mut self, request: Request) {
        match self.files.find(&request) {
            Ok(file) => {
                self.heard();
                if let Some(buffer) = self.connection.buffer(request.length) {
                    self.begin(&file, request, buffer);
                }
            }
            Err(outcome) => self.connection.refuse(request.id, outcome, AlignedBuffer::default()),
        }
    }

    fn begin_write(&mut self, request: Request) {
        let file = self.files.find(&request);
        if file.is_ok() {
            self.heard();
        }
        let buffer = match &file {
            // Without one the connection is at its end, and the data is dropped.
            Ok(_) => self.connection.buffer(request.length),
            Err(_) => None,
        };
        let (file, buffer) = match (file, buffer) {
            (Ok(file), Some(buffer)) => (Ok(file), buffer),
            (file, _) => (Err(file.err().unwrap_or(Outcome::ShutDown)), AlignedBuffer::default()),
        };
        self.write = Some(Incoming { request, file, buffer, filled: 0 });
    }

    fn end_write(&mut self, counts: bool) {
        let Some(Incoming { request, file, buffer, .. }) = self.write.take() else { return };
        match file {
            Ok(file) if counts => self.begin(&file, request, buffer),
            Ok(_) => self.connection.refuse(request.id, Outcome::Abandoned, buffer),
            Err(outcome) => self.connection.refuse(request.id, outcome, buffer),
        }
    }

    fn begin(&self, file: &Arc<OpenFile>, request: Request, buffer: AlignedBuffer) {
        let Request { opcode, durable, id, offset, length, .. } = request;
        self.connection.lock().under_way += 1;
        let range = 0..length as usize;
        let operation = Operation { opcode, durable, id, offset, buffer, range };
        let owner = Arc::clone(self.connection);
        self.disk.begin(file, owner, operation);
    }
}
