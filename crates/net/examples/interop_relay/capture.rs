//! Records frames in the format of libpcap.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::time::{SystemTime, UNIX_EPOCH};

/// The magic number of a file with times in microseconds, in this machine's byte order.
const MAGIC: u32 = 0xa1b2_c3d4;
const ETHERNET: u32 = 1;
const LENGTH_MAX: u32 = 65_549;

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
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let length = frame.len() as u32;
        for word in [time.as_secs() as u32, time.subsec_micros(), length, length] {
            self.0.write_all(&word.to_ne_bytes())?;
        }
        self.0.write_all(frame)
    }

    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.0.flush()
    }
}
