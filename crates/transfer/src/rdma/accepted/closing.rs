//! Telling initiators that this engine closes: they need not find out by silence.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use millstream_metadata::{Client, ClientConfig, Frame, FrameType, HandShakeDesc, Store};

/// How long telling all of them may take.
const PATIENCE: Duration = Duration::from_millis(250);

/// How many are told at the same time.
const THREADS: usize = 32;

/// Tells the engines of these names, as far as that is quick, that the engine of this incarnation closes.
pub(in super::super) fn tell(
    store: &Arc<dyn Store>,
    limits: &ClientConfig,
    incarnation: u64,
    names: Vec<String>,
) {
    if names.is_empty() {
        return;
    }
    let deadline = Instant::now() + PATIENCE;
    let message =
        HandShakeDesc { closing: true, incarnation: Some(incarnation), ..HandShakeDesc::default() };
    let frame = Arc::new(Frame::new(FrameType::Connection, message.to_json()));
    let threads = names.len().min(THREADS);
    let names = Arc::new(Mutex::new(names.into_iter()));
    let (done, all_done) = mpsc::channel::<()>();
    for _ in 0..threads {
        let (store, names) = (Arc::clone(store), Arc::clone(&names));
        let (frame, limits, done) = (Arc::clone(&frame), *limits, done.clone());
        let tell = move || {
            let _done = done;
            loop {
                let next = names.lock().unwrap_or_else(PoisonError::into_inner).next();
                let left = deadline.saturating_duration_since(Instant::now());
                let Some(name) = next.filter(|_| !left.is_zero()) else { return };
                let Ok(meta) = store.address(&name) else { continue };
                let client = Client::new(ClientConfig {
                    connect_timeout: left,
                    call_timeout: left,
                    ..limits
                });
                if let Err(error) = client.call(&meta.address, &frame) {
                    tracing::debug!(%error, "a peer was not told that this engine closes");
                }
            }
        };
        // Nobody waits for a thread whose name service is slow: it ends by itself.
        if thread::Builder::new().name("closing".to_owned()).spawn(tell).is_err() {
            break;
        }
    }
    drop(done);
    let left = deadline.saturating_duration_since(Instant::now());
    if matches!(all_done.recv_timeout(left), Err(RecvTimeoutError::Timeout)) {
        tracing::debug!("not all peers were told in time that this engine closes");
    }
}
