//! Batches of an engine: how they are made, submitted, waited for and ended.

use std::time::{Duration, Instant};

use super::{Inner, TransferEngine};
use crate::{
    Batch, BatchError, BatchStatus, FreeError, PiecesRequest, SubmitAndWaitError, SubmitError,
    SubmitNewError, SubmitOptions, TransferRequest, TransferState, TransferStatus,
};

impl TransferEngine {
    /// Makes a batch that holds up to `capacity` tasks.
    pub fn allocate_batch(&self, capacity: usize) -> Result<Batch, BatchError> {
        self.inner.allocate_batch(capacity)
    }

    /// Adds a task for each request to the batch and begins to do them. All or none: when one
    /// request is bad, none is accepted. Does not wait, except to ask for the descriptor of a
    /// segment that has proven out of date.
    pub fn submit(&self, batch: &Batch, requests: &[TransferRequest]) -> Result<(), SubmitError> {
        self.submit_with(batch, requests, &SubmitOptions::default())
    }

    /// As [`TransferEngine::submit`], with options.
    pub fn submit_with(
        &self,
        batch: &Batch,
        requests: &[TransferRequest],
        options: &SubmitOptions,
    ) -> Result<(), SubmitError> {
        self.inner.submit(&batch.shared, requests, options)
    }

    /// Makes a batch of just these requests, and begins to do them.
    pub fn submit_new(
        &self,
        requests: &[TransferRequest],
        options: &SubmitOptions,
    ) -> Result<Batch, SubmitNewError> {
        let batch = self.allocate_batch(requests.len())?;
        self.submit_with(&batch, requests, options)?;
        Ok(batch)
    }

    /// As [`TransferEngine::submit_with`], with requests of several pieces: each is one task.
    pub fn submit_pieces(
        &self,
        batch: &Batch,
        requests: &[PiecesRequest<'_>],
        options: &SubmitOptions,
    ) -> Result<(), SubmitError> {
        self.inner.submit(&batch.shared, requests, options)
    }

    /// How a task of the batch stands, counted from 0 in the order of submission. Makes progress
    /// while it is unfinished, so that who asks without a pause waits for no other thread.
    pub fn status(&self, batch: &Batch, task: usize) -> Result<TransferStatus, BatchError> {
        let status = batch.status(task)?;
        if status.state.is_final() {
            return Ok(status);
        }
        self.inner.progress();
        batch.status(task)
    }

    /// How all tasks of the batch stand. Makes progress while one is unfinished.
    pub fn statuses(&self, batch: &Batch) -> Vec<TransferStatus> {
        if !batch.is_finished() {
            self.inner.progress();
        }
        batch.statuses().collect()
    }

    /// How all tasks of the batch stand together. Makes progress while one is unfinished. Takes a part of the
    /// time of [`TransferEngine::statuses`], and allocates nothing.
    pub fn batch_status(&self, batch: &Batch) -> BatchStatus {
        if !batch.is_finished() {
            self.inner.progress();
        }
        batch.status_of_all()
    }

    /// How all tasks of the batch have ended, and frees it; gives it back while one is unfinished. Makes
    /// progress then.
    pub fn take_statuses(&self, batch: Batch) -> Result<Vec<TransferStatus>, Batch> {
        let statuses = self.statuses(&batch);
        match statuses.iter().all(|status| status.state.is_final()) {
            true => Ok(statuses),
            false => Err(batch),
        }
    }

    /// Waits until all submitted tasks of the batch are finished, for good or bad; `false` when
    /// that takes longer than `timeout`. The waiting thread sends, receives and handles what comes for
    /// the engine's soft devices meanwhile, where no other thread does, and copies what waits for that.
    pub fn wait(&self, batch: &Batch, timeout: Duration) -> bool {
        self.inner.wait(batch, timeout)
    }

    /// Ends a task; whether it was neither over nor about to end. Local access ends at once. The task
    /// is over, which [`TransferEngine::wait`] waits for, once the peer has confirmed that nothing of
    /// it can arrive any more, after two seconds at most: then its status says that the target's range
    /// is undefined.
    pub fn cancel(&self, batch: &Batch, task: usize) -> Result<bool, BatchError> {
        Ok(batch.task(task)?.cancel())
    }

    /// Frees a batch. Refused while one of its tasks is unfinished.
    pub fn free(&self, batch: Batch) -> Result<(), FreeError> {
        batch.free()
    }

    /// Does these requests and waits for them; returns the bytes moved. When it returns, for good
    /// or bad, nothing of them is under way any more.
    pub fn submit_and_wait(
        &self,
        requests: &[TransferRequest],
        timeout: Duration,
    ) -> Result<u64, SubmitAndWaitError> {
        let batch = self.allocate_batch(requests.len())?;
        self.submit(&batch, requests)?;
        if !self.wait(&batch, timeout) {
            for index in 0..batch.len() {
                batch.task(index)?.cancel();
            }
            // What was sent ends, since queue pairs give up on a peer that does not answer.
            while !self.wait(&batch, Duration::from_secs(60)) {
                tracing::warn!("still waiting for the last slices of canceled tasks");
            }
        }
        let all = batch.status_of_all();
        if all.state == TransferState::Completed {
            return Ok(all.transferred_bytes);
        }
        let mut transferred_bytes = 0;
        let mut canceled = false;
        for (index, status) in batch.statuses().enumerate() {
            if let Some(error) = status.error {
                return Err(SubmitAndWaitError::Failed { index, error: Box::new(error) });
            }
            canceled |= status.state != TransferState::Completed;
            transferred_bytes += status.transferred_bytes;
        }
        if canceled {
            let total_bytes = requests.iter().map(|request| request.length).sum();
            return Err(SubmitAndWaitError::Timeout { timeout, transferred_bytes, total_bytes });
        }
        Ok(transferred_bytes)
    }
}

impl Inner {
    /// [`TransferEngine::allocate_batch`].
    pub(crate) fn allocate_batch(&self, capacity: usize) -> Result<Batch, BatchError> {
        let owned = self.with_transports(|all| all.iter().any(|each| !each.capabilities().copies));
        Batch::new(capacity, self.slicing, owned, &self.counters)
    }

    /// [`TransferEngine::wait`].
    pub(crate) fn wait(&self, batch: &Batch, timeout: Duration) -> bool {
        if batch.is_finished() {
            return true;
        }
        let start = Instant::now();
        while start.elapsed() < timeout && self.copier.help() {
            if batch.is_finished() {
                return true;
            }
        }
        let left = || timeout.saturating_sub(start.elapsed());
        if let Some(streams) = self.streams.get() {
            batch.wait_for_streams(left(), streams);
            if batch.is_finished() {
                return true;
            }
        }
        batch.wait(left(), &self.devices())
    }
}
