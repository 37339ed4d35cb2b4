//! What a connection has received: headers, and what has come behind them.

use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_metadata::Connection as Accepted;
use millstream_net::stream::{Readiness, wait_for_stream};
use millstream_net::{BusyPoll, Polling};

use super::LOOK;
use super::Output;
use super::pace::Pace;
use crate::gpu::STAGED;
use crate::tcp::line::{Checked, Layer, Line};
use crate::tcp::message::MAX_DATA;
use crate::tcp::pieces::Pieces;
use crate::tcp::stage::Stage;

/// Where bytes go that have no place.
const SCRATCH: usize = 64 << 10;

/// A connection that is read.
pub(super) struct Input<'a> {
    accepted: &'a Accepted,
    /// What is between the bytes and the socket.
    line: Line,
    stage: Stage,
    scratch: Vec<u8>,
    /// Of the headers of a request.
    pace: Pace,
    /// Nobody else gets the place.
    holds: bool,
    /// Where no request comes for so long, the stream is over.
    idle: Option<Duration>,
    /// For how long requests are looked for, and data of those that have begun.
    requests: BusyPoll,
    data: BusyPoll,
    /// The last request has as much data as a message can have: it is of a longer transfer, as far as one can tell here, and
    /// its data is not looked for.
    is_of_stream: bool,
}

impl<'a> Input<'a> {
    pub(super) fn new(
        accepted: &'a Accepted,
        layer: Option<Layer>,
        polling: &Arc<Polling>,
    ) -> Self {
        Self {
            accepted,
            line: Line::over(layer),
            stage: Stage::default(),
            scratch: Vec::new(),
            pace: Pace::new(0),
            holds: false,
            idle: None,
            requests: BusyPoll::new(polling),
            data: BusyPoll::new(polling),
            is_of_stream: false,
        }
    }

    /// Where no request comes for so long, the stream is taken to be over.
    pub(super) fn ends_when_idle(&mut self, idle: Duration) {
        self.idle = Some(idle);
    }

    /// What answers go over.
    pub(super) fn output(&mut self) -> Output<'_> {
        Output { stream: self.accepted.stream(), line: &mut self.line }
    }

    /// Another thread may end the connection by it.
    pub(super) fn stream(&self) -> &'a TcpStream {
        self.accepted.stream()
    }

    /// Whether it goes over TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.line.is_tls()
    }

    /// From here on all is in records with checksums.
    pub(super) fn check(&mut self) {
        let records = Checked::new(&[], self.stage.unread());
        self.stage.clear();
        self.line = Line::over(Some(Layer::Checked(records)));
    }

    /// The next bytes, where a request may begin: `None` at the end of the stream. The connection makes room for
    /// others until the request is [begun](Self::begun): who says half of one keeps no place from others.
    pub(super) fn header<const LENGTH: usize>(&mut self) -> io::Result<Option<[u8; LENGTH]>> {
        let mut pace = None;
        if self.stage.is_empty() {
            let since = Instant::now();
            // Behind those of a stream, too: who waits for all of it before it goes on has two threads woken in turn.
            let mut wait = self.requests.begin(false, [self.stream()]);
            loop {
                if self.line.is_amid_record() {
                    wait.stop_looking();
                }
                let looks = self.requests.looks(&mut wait);
                let filled = if looks { self.fill_by(Line::receive) } else { self.fill() };
                match filled {
                    Ok(0) => return Ok(None),
                    Ok(_) => break,
                    Err(error) if looks && is_pause(&error) => {}
                    // The time of a request begins with that of the record that it is in.
                    Err(error) if is_pause(&error) && self.line.is_amid_record() => {
                        pace.get_or_insert_with(|| Pace::new(0)).check()?;
                    }
                    // What has come was no record of a message, such as new keys (RFC 8446 4.6.3).
                    Err(error) if is_pause(&error) => {
                        pace = None;
                        if self.idle.is_some_and(|idle| since.elapsed() >= idle) {
                            return Ok(None);
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
            let now = Instant::now();
            self.requests.end(&wait, now, true);
            pace.get_or_insert_with(|| Pace::begin(now, 0));
        }
        self.pace = pace.unwrap_or_else(|| Pace::new(0));
        self.bytes().map(Some)
    }

    /// All of a request has come but its data, of this length, and it makes sense: until its end nobody else gets the
    /// place.
    pub(super) fn begun(&mut self, length: u64) {
        self.is_of_stream = length >= MAX_DATA;
        if !std::mem::replace(&mut self.holds, true) {
            self.accepted.heard();
        }
    }

    /// A request is over: the connection makes room for others until the next one begins.
    pub(super) fn rest(&mut self) {
        if self.stage.is_empty() && !self.line.has_ready() {
            self.give_place();
        }
    }

    fn give_place(&mut self) {
        if std::mem::replace(&mut self.holds, false) {
            self.accepted.idle();
        }
    }

    /// The next bytes of a request. All of them have the time that began with its first.
    pub(super) fn bytes<const LENGTH: usize>(&mut self) -> io::Result<[u8; LENGTH]> {
        loop {
            if let Some(bytes) = self.stage.unread().first_chunk().copied() {
                self.stage.read(LENGTH);
                return Ok(bytes);
            }
            // The end of the last request may have come with half of this one.
            self.give_place();
            match self.fill() {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if is_pause(&error) => {}
                Err(error) => return Err(error),
            }
            self.pace.check()?;
        }
    }

    /// Receives all of these pieces, those with faults for nothing.
    pub(super) fn receive(&mut self, pieces: &mut Pieces) -> io::Result<()> {
        let taken = pieces.take(self.stage.unread());
        self.stage.read(taken);
        if pieces.left() == 0 {
            return Ok(());
        }
        let (stream, mut pace) = (self.stream(), Pace::new(pieces.left()));
        while pieces.left() > 0 {
            let room = if pieces.is_staged() { STAGED } else { SCRATCH };
            self.scratch.resize(room.max(self.scratch.len()), 0);
            match self.line.receive_pieces(stream, pieces, &mut self.scratch) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => pace.moved(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_data()?;
                    pace.check()?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.tell();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Waits until something comes, up to [`LOOK`].
    fn wait_for_data(&mut self) -> io::Result<()> {
        let mut wait = self.data.begin(self.is_of_stream, [self.stream()]);
        let stream = self.stream().as_fd();
        loop {
            let looks = self.data.looks(&mut wait);
            let time = if looks { Duration::ZERO } else { LOOK };
            let came = wait_for_stream(stream, Readiness::Readable, time)?;
            if came || !looks {
                self.data.end(&wait, Instant::now(), came);
                return Ok(());
            }
        }
    }

    /// Throws away what still comes, for a moment: who closes a connection with bytes that were not read takes
    /// back what it has said last.
    pub(super) fn linger(&mut self) {
        let pace = Pace::new(0);
        self.stage.clear();
        let _ = self.stream().shutdown(std::net::Shutdown::Write);
        // The next one may need its place.
        self.accepted.awaited();
        while pace.check().is_ok() {
            match self.fill() {
                Ok(0) => return,
                Ok(_) => self.stage.clear(),
                Err(error) if is_pause(&error) => {}
                Err(_) => return,
            }
        }
    }

    /// Says what the initiator should know of a fault, and throws away what still comes, as [`Self::linger`]
    /// does: past the line, which takes nothing more.
    fn tell(&mut self) {
        let mut stream = self.stream();
        if !self.line.has_unsent() || self.line.flush(stream).is_err() {
            return;
        }
        let (pace, mut waste) = (Pace::new(0), [0; 4096]);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        self.accepted.awaited();
        while pace.check().is_ok() {
            match stream.read(&mut waste) {
                Ok(0) => return,
                Err(error) if !is_pause(&error) => return,
                _ => {}
            }
        }
    }

    /// Receives what comes, and waits for it up to [`LOOK`].
    fn fill(&mut self) -> io::Result<usize> {
        self.fill_by(Line::read)
    }

    fn fill_by(
        &mut self,
        receive: impl FnOnce(&mut Line, &TcpStream, &mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let stream = self.stream();
        match receive(&mut self.line, stream, self.stage.room()) {
            Ok(count) => {
                self.stage.received(count);
                Ok(count)
            }
            Err(error) => {
                if !is_pause(&error) {
                    self.tell();
                }
                Err(error)
            }
        }
    }
}

/// Whether nothing has come for a while.
fn is_pause(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}
