//! Telling peers that this engine closes: they need not find out by silence.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use millstream_metadata::{Frame, FrameType, HandShakeDesc, Store};

use crate::calls::Calls;

/// How long telling all of them may take.
const PATIENCE: Duration = Duration::from_millis(250);

/// Tells the engines of these names, as far as that is quick, that the engine of this incarnation closes.
pub(in super::super) fn tell(
    store: &dyn Store,
    calls: &Calls,
    incarnation: u64,
    names: impl Iterator<Item = String>,
) {
    let deadline = Instant::now() + PATIENCE;
    let message =
        HandShakeDesc { closing: true, incarnation: Some(incarnation), ..HandShakeDesc::default() };
    let frame = Frame::new(FrameType::Connection, message.to_json());
    let (done, all_done) = mpsc::channel::<()>();
    for name in names {
        let Ok(meta) = store.address(&name) else { continue };
        let done = done.clone();
        let told = Box::new(move |reply: Result<Frame, _>| {
            if let Err(error) = reply {
                tracing::debug!(%error, "a peer was not told that this engine closes");
            }
            drop(done);
        });
        calls.call(&meta.address, frame.clone(), PATIENCE, told);
    }
    drop(done);
    let left = deadline.saturating_duration_since(Instant::now());
    if matches!(all_done.recv_timeout(left), Err(RecvTimeoutError::Timeout)) {
        tracing::debug!("not all peers were told in time that this engine closes");
    }
}
