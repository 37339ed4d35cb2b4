//! Who posts requests and takes their completions.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use millstream_verbs::{Completion, CompletionStatus, QueuePair, SendOperation, SendRequest};

use super::Operation;
use super::host::{Host, Remote};

/// For a completion. The queue pair gives up earlier.
const PATIENCE: Duration = Duration::from_secs(30);

/// Posts requests to the queue pairs of one shard, and takes their completions.
pub(super) struct Poster<'a> {
    host: &'a Host,
    shard: usize,
    pairs: Vec<&'a QueuePair>,
    remote: Remote,
    op: Operation,
    size: usize,
    depth: usize,
    posted: u64,
    done: u64,
    requests: Vec<SendRequest>,
    completions: Vec<Completion>,
}

impl<'a> Poster<'a> {
    pub(super) fn new(
        host: &'a Host,
        shard: usize,
        remote: Remote,
        op: Operation,
        size: usize,
        depth: usize,
    ) -> Self {
        Self {
            host,
            shard,
            pairs: host.pairs_of(shard),
            remote,
            op,
            size,
            depth,
            posted: 0,
            done: 0,
            requests: Vec::with_capacity(depth),
            completions: Vec::with_capacity(depth),
        }
    }

    /// Keeps the queue full for so long, and waits for its end; returns how many messages passed.
    pub(super) fn run(&mut self, duration: Duration) -> anyhow::Result<u64> {
        let (before, start) = (self.done, Instant::now());
        self.fill(|| start.elapsed() >= duration)?;
        self.drain()?;
        Ok(self.done - before)
    }

    /// Keeps the queue full until it is time.
    pub(super) fn fill(&mut self, is_time: impl Fn() -> bool) -> anyhow::Result<()> {
        while !is_time() {
            let room = self.depth - (self.posted - self.done) as usize;
            self.post(room)?;
            self.reap()?;
        }
        Ok(())
    }

    /// Waits until all that was posted is done.
    pub(super) fn drain(&mut self) -> anyhow::Result<()> {
        while self.done < self.posted {
            self.reap()?;
        }
        Ok(())
    }

    /// How many messages have passed.
    pub(super) const fn done(&self) -> u64 {
        self.done
    }

    /// Posts so many more, to one queue pair after the other.
    pub(super) fn post(&mut self, count: usize) -> anyhow::Result<()> {
        let host = self.host;
        // Together, what all queue pairs have to send makes longer trains.
        host.device.postpone_sending(|| self.post_to_each(count))
    }

    fn post_to_each(&mut self, count: usize) -> anyhow::Result<()> {
        let (pairs, posted) = (self.pairs.len(), self.posted);
        for turn in 0..pairs.min(count) as u64 {
            let pair = self.pairs[((posted + turn) % pairs as u64) as usize];
            self.requests.clear();
            for index in (posted + turn..posted + count as u64).step_by(pairs) {
                self.requests.push(self.request(index));
            }
            let posted = pair.post_send(&self.requests);
            posted.map_err(|(_, error)| error).context("cannot post")?;
        }
        self.posted += count as u64;
        Ok(())
    }

    fn request(&self, index: u64) -> SendRequest {
        // Each shard has blocks of its own.
        let index = index * self.host.device.shards() as u64 + self.shard as u64;
        let remote_address = self.remote.address + self.host.offset(self.size, index);
        let remote_key = self.remote.key;
        let operation = match self.op {
            Operation::Write => {
                SendOperation::Write { remote_address, remote_key, immediate: None }
            }
            Operation::Read => SendOperation::Read { remote_address, remote_key },
            Operation::Send => SendOperation::Send { immediate: None },
        };
        SendRequest::new(index, operation, self.host.piece(self.size, index))
    }

    /// Waits for completions and takes them; returns how many.
    pub(super) fn reap(&mut self) -> anyhow::Result<usize> {
        let completions = self.host.completions_of(self.shard);
        if !completions.wait(PATIENCE) {
            match self.host.device.failure() {
                Some(failure) => bail!(failure),
                None => bail!("no completion came for {} s", PATIENCE.as_secs()),
            }
        }
        self.completions.clear();
        let count = completions.poll(&mut self.completions, self.depth);
        let failed = |status: &CompletionStatus| *status != CompletionStatus::Success;
        if let Some(status) = self.completions.iter().map(|one| one.status).find(failed) {
            return Err(anyhow!(status).context("a request failed"));
        }
        self.done += count as u64;
        Ok(count)
    }
}
