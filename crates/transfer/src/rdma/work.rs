//! What a flow wants done, to be done without its lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use millstream_transfer_core::{Opcode, Piece as SlicePiece, Post, RailId, SliceId};
use millstream_verbs::{Piece, PostError, SendOperation, SendRequest};

use super::connection::Connection;
use super::device::LocalDevice;
use super::runs::Keys;
use crate::batch::BatchShared;
use crate::engine::Inner;
use crate::task::{EndedTasks, TaskEnd};
use crate::terms::Terms;
use crate::transport::Run;

/// The most work requests handed to a queue pair at a time: the device is locked for all of them.
const POST_BATCH: usize = 256;

/// Threads that work at once in most engines.
const AT_ONCE: usize = 4;

/// The identifier of tests: no slice has it, as there are fewer, and it is none of a question
/// (`accepted/liveness.rs`), as which a completion would be noted that comes after its link is gone.
const TEST: u64 = (1 << 63) - 1;

/// Whether a completion is of a test.
pub(super) const fn is_test(completion: u64) -> bool {
    completion == TEST
}

/// A slice and where it goes.
pub(super) struct Posting<'a> {
    /// Index of the device.
    pub(super) device: usize,
    /// The number of the connection.
    pub(super) epoch: u64,
    pub(super) connection: &'a Arc<Connection>,
    pub(super) queue_pair: usize,
    pub(super) post: &'a Post,
}

/// A slice or a test that a queue pair did not take.
#[derive(Clone, Copy)]
pub(super) struct NotPosted {
    pub(super) rail: RailId,
    /// The number of the connection.
    pub(super) epoch: u64,
    pub(super) slice: SliceId,
    pub(super) error: PostError,
}

/// A task for which there is no rail, and how it ends if no other transport goes on with it.
pub(super) struct Moving {
    pub(super) batch: Arc<BatchShared>,
    /// The task alone.
    pub(super) run: Run,
    pub(super) terms: Terms,
    pub(super) end: TaskEnd,
}

/// Work requests for one queue pair.
struct Bucket {
    device: usize,
    /// `None` while it is not used.
    connection: Option<Arc<Connection>>,
    queue_pair: usize,
    rail: RailId,
    epoch: u64,
    requests: Vec<SendRequest>,
}

impl Bucket {
    fn new() -> Self {
        let requests = Vec::with_capacity(POST_BATCH);
        let rail = RailId(0);
        Self { device: 0, connection: None, queue_pair: 0, rail, epoch: 0, requests }
    }
}

/// Work that waits to be used again: as much as threads have ever done at once. What there is from the
/// start is enough for most.
pub(super) struct Works(Mutex<Vec<Work>>);

impl Works {
    pub(super) fn new() -> Self {
        Self(Mutex::new((0..AT_ONCE).map(|_| Work::with_room()).collect()))
    }

    pub(super) fn take(&self) -> Work {
        self.lock().pop().unwrap_or_else(Work::with_room)
    }

    pub(super) fn give_back(&self, work: Work) {
        self.lock().push(work);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Work>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Work requests to post, and tasks to tell. It keeps its room.
#[derive(Default)]
pub(super) struct Work {
    buckets: Vec<Bucket>,
    /// The first so many are used.
    used: usize,
    pub(super) ended: Vec<(Arc<BatchShared>, usize, TaskEnd)>,
    pub(super) moving: Vec<Moving>,
    failed: Vec<NotPosted>,
}

impl Work {
    fn with_room() -> Self {
        let mut work = Self::default();
        work.buckets.push(Bucket::new());
        work.ended.reserve(POST_BATCH);
        work
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.used == 0 && self.ended.is_empty() && self.moving.is_empty()
    }

    /// Adds a slice, each of its pieces a work request. The last one completes for all
    /// (IBTA 10.8.6). Adds nothing, and returns `None`, if a piece has no keys.
    pub(super) fn add(
        &mut self,
        posting: Posting<'_>,
        pieces: impl Iterator<Item = Option<(SlicePiece, Keys)>>,
    ) -> Option<()> {
        let Posting { device, epoch, connection, queue_pair, post } = posting;
        let id = post.slice.to_bits();
        let requests = self.bucket((device, post.rail, epoch), connection, queue_pair);
        let before = requests.len();
        for piece in pieces {
            let Some((piece, keys)) = piece else {
                requests.truncate(before);
                return None;
            };
            let (remote_address, remote_key) = (piece.remote, keys.remote);
            let operation = match post.opcode {
                Opcode::Read => SendOperation::Read { remote_address, remote_key },
                Opcode::Write => {
                    SendOperation::Write { remote_address, remote_key, immediate: None }
                }
            };
            let local =
                Piece { key: keys.local, address: piece.local, length: piece.length as u32 };
            let request = SendRequest::new(id, operation, [local]);
            requests.push(SendRequest { signaled: false, ..request });
        }
        requests[before..].last_mut()?.signaled = true;
        Some(())
    }

    /// Adds a WRITE of no bytes for a connection of this number. No memory is touched, so no key is needed (IBTA 9.7.4.1.4).
    pub(super) fn add_test(&mut self, way: (usize, RailId, u64), connection: &Arc<Connection>) {
        let operation = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };
        let nothing = Piece { key: 0, address: 0, length: 0 };
        self.bucket(way, connection, 0).push(SendRequest::new(TEST, operation, [nothing]));
    }

    /// What is to be posted for a device, on the connection of a rail that has this number.
    fn bucket(
        &mut self,
        (device, rail, epoch): (usize, RailId, u64),
        connection: &Arc<Connection>,
        queue_pair: usize,
    ) -> &mut Vec<SendRequest> {
        let is_it = |bucket: &Bucket| {
            let same = |known: &Arc<Connection>| Arc::ptr_eq(known, connection);
            bucket.queue_pair == queue_pair && bucket.connection.as_ref().is_some_and(same)
        };
        let known = self.buckets[..self.used].iter().rposition(is_it);
        let index = known.unwrap_or_else(|| {
            if self.used == self.buckets.len() {
                self.buckets.push(Bucket::new());
            }
            let bucket = &mut self.buckets[self.used];
            bucket.connection = Some(Arc::clone(connection));
            (bucket.device, bucket.queue_pair) = (device, queue_pair);
            (bucket.rail, bucket.epoch) = (rail, epoch);
            self.used += 1;
            self.used - 1
        });
        &mut self.buckets[index].requests
    }

    /// Posts the work requests.
    pub(super) fn post(&mut self, devices: &[Arc<LocalDevice>]) {
        if self.used > 0 {
            self.post_from(devices, 0);
        }
        // Whoever is the last to have a connection destroys its queue pairs: not under a lock.
        for bucket in &mut self.buckets[..self.used] {
            bucket.connection = None;
            bucket.requests.clear();
        }
        self.used = 0;
    }

    /// Has all devices from this one on collect what is posted, and then send it.
    fn post_from(&mut self, devices: &[Arc<LocalDevice>], index: usize) {
        let used = &self.buckets[..self.used];
        let Some(next) = (index..devices.len()).find(|&i| used.iter().any(|b| b.device == i))
        else {
            return self.post_all();
        };
        let device = &devices[next].device;
        device.postpone_sending(|| self.post_from(devices, next + 1));
    }

    fn post_all(&mut self) {
        for bucket in &self.buckets[..self.used] {
            let Some(connection) = &bucket.connection else { continue };
            let queue_pair = &connection.queue_pairs[bucket.queue_pair];
            let mut rest = &bucket.requests[..];
            while !rest.is_empty() {
                let (next, others) = rest.split_at(rest.len().min(POST_BATCH));
                rest = others;
                if let Err((posted, error)) = queue_pair.post_send(next) {
                    let left = next[posted..].iter().chain(others);
                    let &Bucket { rail, epoch, .. } = bucket;
                    let slice = |request: &SendRequest| SliceId::from_bits(request.id);
                    let failed = |it| NotPosted { rail, epoch, slice: slice(it), error };
                    // A slice has failed once, however many of its requests were not posted.
                    let last = left.filter(|request| request.signaled);
                    self.failed.extend(last.map(failed));
                    break;
                }
            }
        }
    }

    /// Tells the tasks that have ended.
    pub(super) fn tell(&mut self) {
        let mut told = EndedTasks::default();
        for (batch, index, end) in self.ended.drain(..) {
            told.ended(&batch, index, end);
        }
    }

    pub(super) const fn has_moving(&self) -> bool {
        !self.moving.is_empty()
    }

    /// Gives tasks for which there is no rail to other transports, or tells their end.
    pub(super) fn go_on_elsewhere(&mut self, engine: Option<&Weak<Inner>>) {
        let engine = engine.and_then(Weak::upgrade);
        for Moving { batch, run, terms, end } in self.moving.drain(..) {
            let index = run.tasks.start;
            let moves = engine.as_ref().is_some_and(|it| it.go_on_elsewhere(&batch, run, &terms));
            if !moves {
                EndedTasks::default().ended(&batch, index, end);
            }
        }
    }

    /// What was not posted, and why.
    pub(super) fn not_posted(&self) -> impl Iterator<Item = NotPosted> {
        self.failed.iter().copied()
    }

    pub(super) const fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.failed.clear();
    }
}

#[cfg(test)]
mod tests {
    use millstream_verbs::{QueuePairCapabilities, QueuePairOptions};

    use super::*;
    use crate::RdmaConfig;

    const KEYS: Keys = Keys { local: 1, remote: 2 };

    fn post(slice: u64, pieces: u32) -> Post {
        let first = SlicePiece { local: 0, remote: 0, length: 8 };
        let (rail, slice) = (RailId(0), SliceId::from_bits(slice));
        Post {
            rail,
            epoch: 1,
            slice,
            user: 0,
            opcode: Opcode::Write,
            first,
            pieces,
            length: pieces * 8,
        }
    }

    /// A queue pair that takes nothing, as it is not connected.
    #[test]
    fn a_slice_is_several_requests_and_fails_once() {
        let address = [127, 95, std::process::id() as u8, 1].into();
        let config = RdmaConfig::new(&[address]);
        let device = LocalDevice::open_all(&config, &Weak::new()).unwrap().remove(0);
        let options = QueuePairOptions::new(&device.completions, QueuePairCapabilities::new(8, 1));
        let queue_pairs = vec![device.domain.create_queue_pair_with(&options).unwrap()];
        let connection = Arc::new(Connection { queue_pairs });
        let mut work = Work::with_room();
        let mut add = |post: &Post, without_keys: Option<u32>| {
            let posting =
                Posting { device: 0, epoch: 1, connection: &connection, queue_pair: 0, post };
            let piece = |index: u32| {
                let at = u64::from(index) * 100;
                let piece = SlicePiece { local: at, remote: at + 7, length: 8 };
                (Some(index) != without_keys).then_some((piece, KEYS))
            };
            work.add(posting, (0..post.pieces).map(piece))
        };
        assert_eq!(add(&post(5, 3), None), Some(()));
        assert_eq!(add(&post(6, 4), Some(2)), None, "a piece without keys");
        assert_eq!(add(&post(7, 1), None), Some(()));
        let told = |request: &SendRequest| {
            let SendOperation::Write { remote_address, .. } = request.operation else {
                unreachable!("it is a WRITE")
            };
            (request.id, remote_address, request.signaled)
        };
        let requests = work.buckets[0].requests.iter().map(told).collect::<Vec<_>>();
        assert_eq!(requests, [(5, 7, false), (5, 107, false), (5, 207, true), (7, 7, true)]);
        work.post(&[Arc::new(device)]);
        let failed = work.not_posted().map(|it| it.slice.to_bits()).collect::<Vec<_>>();
        assert_eq!(failed, [5, 7]);
        assert!(work.is_empty());
    }
}
