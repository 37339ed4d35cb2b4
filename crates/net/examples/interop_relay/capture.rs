//! Records frames in the format of libpcap.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The magic number of a file with times in microseconds, in this machine's byte order.
const MAGIC: u32 = 0xa1b2_c3d4;
const ETHERNET: u32 = 1;
const LENGTH_MAX: u32 = 65_549;

/// How many frames are remembered, and how many bytes of each: all headers.
const RECENT: usize = 4096;
const RECENT_LENGTH: usize = 96;

pub(crate) struct Capture(BufWriter<File>);

impl Capture {
    pub(crate) fn create(path: &str) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(&MAGIC.to_ne_bytes())?;
        // Version 2.4.
        file.write_all(&2_u16.to_ne_bytes())?;
        file.write_all(&4_u16.to_ne_bytes())?;
        // Time zone and accuracy are always 0.
        for word in [0, 0, LENGTH_MAX, ETHERNET] {
            file.write_all(&word.to_ne_bytes())?;
        }
        Ok(Self(file))
    }

    pub(crate) fn record(&mut self, frame: &[u8]) -> io::Result<()> {
        self.write(now(), frame, frame.len())
    }

    /// Records the first bytes of a frame that was `length` bytes long.
    fn write(&mut self, time: Duration, bytes: &[u8], length: usize) -> io::Result<()> {
        let seconds = time.as_secs() as u32;
        for word in [seconds, time.subsec_micros(), bytes.len() as u32, length as u32] {
            self.0.write_all(&word.to_ne_bytes())?;
        }
        self.0.write_all(bytes)
    }

    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// The headers of the frames that passed last: what happened before something went wrong.
pub(crate) struct Recent(VecDeque<Head>);

struct Head {
    time: Duration,
    /// Of the whole frame.
    length: usize,
    bytes: [u8; RECENT_LENGTH],
}

impl Recent {
    pub(crate) fn new() -> Self {
        Self(VecDeque::with_capacity(RECENT))
    }

    pub(crate) fn remember(&mut self, frame: &[u8]) {
        if self.0.len() == RECENT {
            self.0.pop_front();
        }
        let mut bytes = [0; RECENT_LENGTH];
        let kept = frame.len().min(RECENT_LENGTH);
        bytes[..kept].copy_from_slice(&frame[..kept]);
        self.0.push_back(Head { time: now(), length: frame.len(), bytes });
    }

    pub(crate) fn save(&self, path: &str) -> io::Result<()> {
        let mut capture = Capture::create(path)?;
        for Head { time, length, bytes } in &self.0 {
            capture.write(*time, &bytes[..RECENT_LENGTH.min(*length)], *length)?;
        }
        capture.finish()
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
