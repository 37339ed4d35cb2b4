//! When a daemon should end.

use std::future::Future;
use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Ends a daemon that runs on another thread, when it is dropped.
#[derive(Debug)]
pub struct Shutdown {
    _sender: oneshot::Sender<()>,
}

/// A handle, and what a daemon waits for.
pub fn shutdown() -> (Shutdown, impl Future<Output = ()> + Send) {
    let (sender, receiver) = oneshot::channel();
    let dropped = async {
        // Nothing is ever sent: the error is the event.
        let _ = receiver.await;
    };
    (Shutdown { _sender: sender }, dropped)
}

/// Returns when the process is asked to end, by SIGTERM or SIGINT. To be awaited inside a daemon.
///
/// # Panics
/// When the system refuses to watch for signals, which it does only without memory.
pub async fn terminated() {
    async fn either() -> io::Result<()> {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        Ok(())
    }
    either().await.expect("signals can be watched for");
}
