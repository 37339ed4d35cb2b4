//! The cable between the guest of `cargo xtask interop` and this machine: it carries frames from
//! qemu to a tap device and back, and can lose, repeat and corrupt RoCE packets on the way.
//!
//! ```text
//! interop_relay TAP FRAMES_SOCKET CONTROL_SOCKET
//! ```
//!
//! qemu connects to the first socket (`-netdev stream`), where a frame is its length in four bytes,
//! most significant first, and its bytes. Commands go to the second one, a line each; see
//! [`Cable::command`]. Since the machine's end is a tap device that offloads nothing, every packet
//! passes as it would be on a wire.

mod capture;
mod faults;
mod tap;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use capture::{Capture, Recent};
use faults::{Direction, Faults};

/// No frame is longer: the largest MTU there is, and the header.
const FRAME_MAX: usize = 65_535 + 14;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [tap, frames, control] = arguments.as_slice() else {
        eprintln!("usage: interop_relay TAP FRAMES_SOCKET CONTROL_SOCKET");
        return ExitCode::from(2);
    };
    match run(tap, frames, control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("interop_relay: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Ends when qemu does.
fn run(tap: &str, frames: &str, control: &str) -> io::Result<()> {
    let tap = tap::open(tap)?;
    let cable = Arc::new(Mutex::new(Cable::new()));
    let commands = UnixListener::bind(control)?;
    let listener = UnixListener::bind(frames)?;
    println!("ready");
    io::stdout().flush()?;
    let for_commands = Arc::clone(&cable);
    std::thread::spawn(move || serve(&commands, &for_commands));
    let (guest, _) = listener.accept()?;
    let (to_guest, from_host) = (guest.try_clone()?, tap.try_clone()?);
    let outwards = Arc::clone(&cable);
    std::thread::spawn(move || {
        // Without this way the other is of no use.
        let result = to_guest_from(&from_host, &to_guest, &outwards);
        let _ = to_guest.shutdown(Shutdown::Both);
        result
    });
    from_guest_to(&guest, &tap, &cable)
}

/// What frames meet on their way.
struct Cable {
    faults: Faults,
    recent: Recent,
    capture: Option<Capture>,
    /// Frames pass by the capture.
    paused: bool,
}

impl Cable {
    fn new() -> Self {
        let (faults, recent) = (Faults::default(), Recent::new());
        Self { faults, recent, capture: None, paused: false }
    }

    /// Takes one frame, and gives those that leave to `send`.
    fn carry(
        &mut self,
        direction: Direction,
        frame: &mut [u8],
        mut send: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        for _ in 0..self.faults.meet(direction, frame) {
            self.recent.remember(frame);
            if let Some(capture) = self.capture.as_mut().filter(|_| !self.paused) {
                capture.record(frame)?;
            }
            send(frame)?;
        }
        Ok(())
    }

    /// `capture FILE`, `capture-end`, `pause` and `record` for the capture in between, `recent FILE`
    /// to save the headers of the last frames, `counters`, or what RoCE packets meet from now on, see
    /// [`Faults::parse`].
    fn command(&mut self, command: &str) -> Result<String, String> {
        match command.split_once(' ').unwrap_or((command, "")) {
            ("capture", path) => {
                self.capture = Some(Capture::create(path).map_err(|error| error.to_string())?);
                self.paused = false;
            }
            ("pause", "") => self.paused = true,
            ("record", "") => self.paused = false,
            ("capture-end", "") => {
                let capture = self.capture.take().ok_or("there is no capture")?;
                capture.finish().map_err(|error| error.to_string())?;
            }
            ("recent", path) => self.recent.save(path).map_err(|error| error.to_string())?,
            ("counters", "") => return Ok(self.faults.counters()),
            _ => self.faults = Faults::parse(command)?,
        }
        Ok(String::new())
    }
}

fn lock(cable: &Mutex<Cable>) -> std::sync::MutexGuard<'_, Cable> {
    cable.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(listener: &UnixListener, cable: &Arc<Mutex<Cable>>) {
    for stream in listener.incoming().flatten() {
        let cable = Arc::clone(cable);
        std::thread::spawn(move || obey(&stream, &cable));
    }
}

fn obey(stream: &UnixStream, cable: &Mutex<Cable>) -> io::Result<()> {
    let mut answers = stream;
    for line in BufReader::new(stream).lines() {
        let answer = match lock(cable).command(line?.trim()) {
            Ok(text) => format!("ok {text}\n"),
            Err(why) => format!("refused: {why}\n"),
        };
        answers.write_all(answer.as_bytes())?;
    }
    Ok(())
}

fn to_guest_from(mut tap: &File, mut guest: &UnixStream, cable: &Mutex<Cable>) -> io::Result<()> {
    let mut buffer = vec![0; 4 + FRAME_MAX];
    loop {
        let length = tap.read(&mut buffer[4..])?;
        buffer[..4].copy_from_slice(&(length as u32).to_be_bytes());
        // The length goes with the frame in one write.
        let (head, frame) = buffer[..4 + length].split_at_mut(4);
        let head: [u8; 4] = [head[0], head[1], head[2], head[3]];
        let mut copies = Vec::with_capacity(2 * (4 + length));
        lock(cable).carry(Direction::ToGuest, frame, |frame| {
            copies.extend(head);
            copies.extend(frame);
            Ok(())
        })?;
        guest.write_all(&copies)?;
    }
}

fn from_guest_to(guest: &UnixStream, mut tap: &File, cable: &Mutex<Cable>) -> io::Result<()> {
    let mut frames = BufReader::with_capacity(1 << 20, guest);
    let mut buffer = vec![0; FRAME_MAX];
    loop {
        let mut length = [0; 4];
        match frames.read_exact(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            result => result?,
        }
        let length = u32::from_be_bytes(length) as usize;
        let frame = buffer.get_mut(..length).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {length} bytes"))
        })?;
        frames.read_exact(frame)?;
        lock(cable).carry(Direction::FromGuest, frame, |frame| tap.write(frame).map(drop))?;
    }
}
