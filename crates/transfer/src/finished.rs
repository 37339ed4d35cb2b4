//! Waiting for a batch in asynchronous code.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::Batch;

/// Ready when all submitted tasks of a batch are finished, for good or bad. Dropping it changes
/// nothing. The devices' own threads make the progress: a thread that waits by
/// [`crate::TransferEngine::wait`] is faster.
#[derive(Debug)]
pub struct Finished<'a> {
    pub(crate) batch: &'a Batch,
}

impl Future for Finished<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.batch.is_finished() {
            return Poll::Ready(());
        }
        self.batch.shared.wakers.add(context.waker());
        // It may have been finished just before.
        if self.batch.is_finished() { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// Who is woken when a batch is finished.
#[derive(Debug, Default)]
pub(crate) struct Wakers {
    any: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
}

impl Wakers {
    fn add(&self, waker: &Waker) {
        let mut wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        if !wakers.iter().any(|known| known.will_wake(waker)) {
            wakers.push(waker.clone());
        }
        self.any.store(true, Ordering::SeqCst);
    }

    /// Wakes all, once. To be called after that for which they wait.
    pub(crate) fn wake(&self) {
        if self.any.load(Ordering::SeqCst) {
            let mut wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
            self.any.store(false, Ordering::SeqCst);
            let woken = std::mem::take(&mut *wakers);
            drop(wakers);
            woken.into_iter().for_each(Waker::wake);
        }
    }
}
