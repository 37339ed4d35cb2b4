//! What a command says on stderr while it goes on: one line that begins with `note: `.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::output;

/// Says something that is no failure.
pub(crate) fn note(text: &str) {
    output::complain(&format!("note: {text}"));
}

/// Does `work`, and says `what` when that takes long.
pub(crate) fn when_slow<T>(what: &str, work: impl FnOnce() -> T) -> T {
    const LONG: Duration = Duration::from_secs(1);
    after(LONG, || note(what), work)
}

/// Does `work`, and calls `say` when that takes longer than `limit`.
fn after<T>(limit: Duration, say: impl FnOnce() + Send, work: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let (done, is_done) = mpsc::channel::<()>();
        scope.spawn(move || {
            if is_done.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                say();
            }
        });
        let result = work();
        drop(done);
        result
    })
}

/// Bytes from a stranger as they can be shown: a few, and none of them a control character.
pub(crate) fn quoted(bytes: &[u8]) -> String {
    const SHOWN: usize = 40;
    let line = bytes.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let more = if line.len() > SHOWN { "..." } else { "" };
    format!("\"{}{more}\"", line[..line.len().min(SHOWN)].escape_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_told_and_nothing_else() {
        let (sender, said) = mpsc::channel();
        after(Duration::ZERO, || sender.send(()).unwrap(), || said.recv().unwrap());
        after(Duration::MAX, || sender.send(()).unwrap(), || {});
        assert!(said.try_recv().is_err());
    }

    #[test]
    fn what_strangers_send_is_shown_harmlessly() {
        assert_eq!(quoted(b"GET / HTTP/1.1\r\nHost: x\r\n"), "\"GET / HTTP/1.1\"");
        assert_eq!(quoted(b"\x1b[31m\xff"), "\"\\x1b[31m\\xff\"");
        assert_eq!(quoted(&[b'x'; 100]).len(), 45);
        assert_eq!(quoted(b""), "\"\"");
    }
}
