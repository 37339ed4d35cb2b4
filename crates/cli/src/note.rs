//! What a command says on stderr while it goes on: one line that begins with `note: `.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Says something that is no failure.
pub(crate) fn note(text: &str) {
    eprintln!("note: {text}");
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
}
