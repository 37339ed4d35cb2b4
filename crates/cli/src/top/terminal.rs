//! A terminal that shows one picture after the other, and is as it was when this ends.

use std::io::{self, IsTerminal, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use crate::output;

/// The other screen of the terminal, and no cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// Where the size is not known.
const USUAL: (usize, usize) = (24, 80);

/// What somebody wants.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Key {
    /// The end.
    End,
    /// Something that means nothing here.
    Other,
}

/// The terminal of stdout, and of stdin if that is one.
pub(super) struct Terminal {
    /// The modes of stdin before.
    modes: Option<libc::termios>,
    /// Rows and columns.
    size: (usize, usize),
}

impl Terminal {
    /// Takes the terminal: keys come at once, and are not shown.
    pub(super) fn open() -> anyhow::Result<Self> {
        let modes = if io::stdin().is_terminal() { Some(modes()?) } else { None };
        // From here on it is given back, whatever happens.
        let terminal = Self { modes, size: size() };
        if let Some(mut modes) = modes {
            // Ctrl-C is a key, too, so that all is in order at the end.
            modes.c_lflag &= !(libc::ICANON | libc::ECHO | libc::ISIG | libc::IEXTEN);
            modes.c_iflag &= !(libc::IXON | libc::ICRNL);
            (modes.c_cc[libc::VMIN], modes.c_cc[libc::VTIME]) = (0, 0);
            set_modes(&modes)?;
        }
        output::print(ENTER)?;
        Ok(terminal)
    }

    /// Shows as much of these lines as there is room for. Nothing in them acts on the terminal.
    pub(super) fn show(&mut self, lines: &[String]) -> anyhow::Result<()> {
        self.size = size();
        Ok(output::print(&picture(lines, self.size))?)
    }

    /// Whether it has another size than when something was shown last.
    pub(super) fn was_resized(&self) -> bool {
        size() != self.size
    }

    /// Waits for a key, so long at most.
    pub(super) fn key(&self, patience: Duration) -> anyhow::Result<Option<Key>> {
        if self.modes.is_none() {
            thread::sleep(patience);
            return Ok(None);
        }
        let mut wanted =
            libc::pollfd { fd: io::stdin().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let milliseconds = libc::c_int::try_from(patience.as_millis()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the pointer is to one live `pollfd`, as the count says.
        let ready = unsafe { libc::poll(&raw mut wanted, 1, milliseconds) };
        if ready <= 0 {
            return Ok(None);
        }
        let mut keys = [0; 64];
        // Of what is typed at once, each key counts.
        let count = io::stdin().read(&mut keys).unwrap_or(0);
        let hung_up = count == 0 && wanted.revents & (libc::POLLHUP | libc::POLLERR) != 0;
        let ends = |key: &u8| matches!(key, b'q' | b'Q' | 3);
        Ok(match hung_up || keys[..count].iter().any(ends) {
            true => Some(Key::End),
            false => Some(Key::Other),
        })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // There is nobody to tell when the terminal is gone.
        let _ = output::print(LEAVE);
        if let Some(modes) = &self.modes {
            let _ = set_modes(modes);
        }
    }
}

/// What is written for these lines: all in one go, so that nothing flickers.
fn picture(lines: &[String], (rows, columns): (usize, usize)) -> String {
    let mut text = String::from("\x1b[H");
    for (index, line) in lines.iter().take(rows).enumerate() {
        if index > 0 {
            text.push_str("\r\n");
        }
        text.extend(line.chars().filter(|c| !c.is_control()).take(columns));
        text.push_str("\x1b[K");
    }
    text + "\x1b[J"
}

fn modes() -> io::Result<libc::termios> {
    let mut modes = MaybeUninit::uninit();
    // SAFETY: the pointer is to room for what is written.
    if unsafe { libc::tcgetattr(io::stdin().as_raw_fd(), modes.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has succeeded, so it has written all of it.
    Ok(unsafe { modes.assume_init() })
}

/// What was typed and not read is forgotten: it was for this program.
fn set_modes(modes: &libc::termios) -> io::Result<()> {
    // SAFETY: the pointer is to live modes, which are only read.
    match unsafe { libc::tcsetattr(io::stdin().as_raw_fd(), libc::TCSAFLUSH, modes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn size() -> (usize, usize) {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the request writes one `winsize`, to which the pointer is.
    let result = unsafe { libc::ioctl(io::stdout().as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
    match (result, size.ws_row, size.ws_col) {
        (0, rows @ 1.., columns @ 1..) => (rows.into(), columns.into()),
        _ => USUAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_no_more_than_fits_and_nothing_that_acts() {
        let lines = ["abcdef", "gh\u{1b}[2Ji", "x"].map(str::to_owned);
        assert_eq!(picture(&lines, (2, 4)), "\x1b[Habcd\x1b[K\r\ngh[2\x1b[K\x1b[J");
        assert_eq!(picture(&[], (2, 4)), "\x1b[H\x1b[J");
    }
}
