//! Files that this process opens itself, since their segment says where they are mapped here.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_metadata::SegmentDesc;
use millstream_net::file_io::AlignedBuffer;

use super::disk::{Disk, Ended, OpenFile, Operation, Owner};
use super::flow::{Entry, Part, stuck};
use super::protocol::{MAX_LENGTH, Outcome};
use super::queue::Queue;
use crate::task::EndedTasks;
use crate::{FailureReason, Opcode};

/// Parts that are under way at a time: each has a buffer.
const BUFFERS: usize = 8;

/// The most files of one segment that are opened.
const MAX_FILES: usize = 64;

/// A segment's files that are open here, by their places in the descriptor.
pub(super) type OpenFiles = HashMap<usize, Result<Arc<OpenFile>, String>>;

/// Opens those files of a segment that are mapped for the server of this name, if they lie in one of the
/// folders: a descriptor can name any path.
pub(super) fn open(
    descriptor: &SegmentDesc,
    server: &str,
    folders: &[PathBuf],
    direct: bool,
) -> OpenFiles {
    let files = descriptor.buffers.iter().enumerate().filter(|(_, file)| file.fault.is_none());
    let mapped = files
        .filter_map(|(index, file)| {
            Some((index, file.local_path_map.get(server)?, !file.file_read_only))
        })
        .take(MAX_FILES);
    let check = |path: &Path| {
        let inside =
            |folder: &PathBuf| folder.canonicalize().is_ok_and(|folder| path.starts_with(folder));
        let path = path.display();
        let outside = || format!("{path} lies in none of the folders for mapped files");
        folders.iter().any(inside).then_some(()).ok_or_else(outside)
    };
    let open = |path: &String, writable| {
        let failed = |error: io::Error| format!("{path}, where it is mapped here: {error}");
        let path = Path::new(path).canonicalize().map_err(failed)?;
        check(&path)?;
        let file = match OpenFile::open(&path, None, writable, direct) {
            Err(error)
                if writable
                    && matches!(
                        error.kind(),
                        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
                    ) =>
            {
                OpenFile::open(&path, None, false, direct)
            }
            opened => opened,
        };
        let file = file.map_err(failed)?;
        // Somebody may have put a link in its place meanwhile.
        check(&file.real_path().map_err(failed)?)?;
        Ok(Arc::new(file))
    };
    mapped.map(|(index, path, writable)| (index, open(path, writable))).collect()
}

/// Does I/O on the files of one segment. Dropping it fails what has not begun.
pub(super) struct Mapped {
    shared: Arc<Shared>,
}

struct Shared {
    disk: Arc<Disk>,
    files: OpenFiles,
    /// For a device.
    io_timeout: Duration,
    queue: Queue<Own>,
}

#[derive(Default)]
struct Own {
    buffers: Vec<AlignedBuffer>,
    under_way: usize,
    /// READs that the disk has done, whose bytes go to memory of a GPU: whoever tells of the disk must not wait for that.
    to_copy: Vec<Ended>,
}

impl Mapped {
    pub(super) fn new(disk: &Arc<Disk>, files: OpenFiles, io_timeout: Duration) -> Self {
        let shared = Shared { disk: Arc::clone(disk), files, io_timeout, queue: Queue::default() };
        Self { shared: Arc::new(shared) }
    }

    /// Whether a file of the segment is open here; why not, if it is mapped.
    pub(super) fn reaches(&self, buffer: usize) -> Option<Result<(), String>> {
        Some(self.shared.files.get(&buffer)?.as_ref().map(drop).map_err(Clone::clone))
    }

    /// Begins to do these tasks.
    pub(super) fn submit(&self, entry: Entry) {
        let shared = Arc::clone(&self.shared);
        self.shared.queue.submit(entry, "mapped files", move || shared.work());
    }

    /// Whether it has nothing to do, and nothing is at the disk that was given up: `stop` waits for that.
    pub(super) fn is_at_rest(&self) -> bool {
        self.shared.queue.lock().own.under_way == 0 && self.shared.queue.is_at_rest()
    }

    /// Ends it. What has begun ends, and the rest fails.
    pub(super) fn stop(&self) {
        self.shared.queue.stop(|_| ());
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn work(self: Arc<Self>) {
        let mut state = self.queue.lock();
        loop {
            if let Some(ended) = state.own.to_copy.pop() {
                drop(state);
                self.ended(ended);
                state = self.queue.lock();
                continue;
            }
            if state.stopping {
                // What has begun ends.
                if state.own.under_way > 0 {
                    state = self.queue.wait(state, None);
                    continue;
                }
                let rest = state.flow.take();
                drop(state);
                return rest.fail(&FailureReason::ShutDown);
            }
            let part = state.flow.begin(BUFFERS);
            let late = state.flow.take_late();
            let Some(part) = part else {
                if !late.is_empty() {
                    drop(state);
                    late.tell();
                    state = self.queue.lock();
                    continue;
                }
                let busy = state.own.under_way > 0;
                let timeout = busy.then(|| state.flow.next_look(Instant::now()));
                state = self.queue.wait(state, timeout);
                let (now, limit) = (Instant::now(), self.io_timeout);
                let overdue = state.flow.look_after(now, limit);
                let is_stuck = state.flow.is_full(BUFFERS) && state.flow.is_stuck(now, limit);
                // What is at the disk goes on to count. The segment is as it was: with its files opened anew
                // there would be more at the disk.
                let rest = is_stuck.then(|| state.flow.take_waiting());
                drop(state);
                overdue.tell();
                if let Some(rest) = rest {
                    rest.fail(&FailureReason::File(stuck(limit).into()));
                }
                state = self.queue.lock();
                continue;
            };
            state.own.under_way += 1;
            let buffer = state.own.buffers.pop();
            drop(state);
            late.tell();
            let buffer = buffer.unwrap_or_else(|| AlignedBuffer::new(MAX_LENGTH as usize));
            self.begin(part, buffer);
            state = self.queue.lock();
        }
    }

    fn begin(self: &Arc<Self>, part: Part, mut buffer: AlignedBuffer) {
        let Part { id, opcode, durable, offset, length, .. } = part;
        let file = match self.files.get(&part.buffer) {
            Some(Ok(file)) if !file.holds(offset, length.into()) => Err(Outcome::OutOfRange),
            Some(Ok(file)) if opcode == Opcode::Write && !file.writable => Err(Outcome::ReadOnly),
            Some(Ok(file)) => Ok(file),
            _ => Err(Outcome::UnknownFile),
        };
        let range = 0..length as usize;
        let file = file.and_then(|file| {
            let filled = opcode == Opcode::Read
                || part.local.enter().is_some_and(|inside| {
                    inside.copy_out(part.address, &mut buffer.bytes_mut()[range.clone()])
                });
            if filled { Ok(file) } else { Err(Outcome::Abandoned) }
        });
        match file {
            Ok(file) => {
                let operation = Operation { opcode, durable, id, offset, buffer, range };
                self.disk.begin(file, Arc::clone(self) as Arc<dyn Owner>, operation);
            }
            Err(outcome) => self.end(id, outcome, buffer),
        }
    }

    /// The disk has done it, or not.
    fn ended(&self, ended: Ended) {
        let Ended { opcode, id, buffer, range, result } = ended;
        let mut outcome = result.map_or_else(|error| Outcome::of(&error), |()| Outcome::Done);
        if opcode == Opcode::Read && outcome == Outcome::Done {
            let mut state = self.queue.lock();
            let part = if state.flow.enter(id) { state.flow.part(id).cloned() } else { None };
            drop(state);
            let copied = part.is_some_and(|part| {
                let inside = part.local.enter();
                inside.is_some_and(|inside| inside.copy_in(part.address, &buffer.bytes()[range]))
            });
            if !copied {
                outcome = Outcome::Abandoned;
            }
        }
        self.end(id, outcome, buffer);
    }

    fn end(&self, id: u64, outcome: Outcome, buffer: AlignedBuffer) {
        let mut state = self.queue.lock();
        let ended = state.flow.end(id, outcome);
        state.own.buffers.push(buffer);
        state.own.under_way -= 1;
        self.queue.wake(state);
        if let Some(group) = ended {
            group.tell(&mut EndedTasks::default());
        }
    }
}

impl Owner for Shared {
    fn done(&self, ended: Ended) {
        let mut state = self.queue.lock();
        let is_staged = state.flow.part(ended.id).is_some_and(|part| part.local.is_gpu());
        if is_staged && ended.opcode == Opcode::Read {
            state.own.to_copy.push(ended);
            return self.queue.wake(state);
        }
        drop(state);
        self.ended(ended);
    }
}

#[cfg(test)]
mod tests {
    use millstream_net::cuda::pretended::Pretended;

    use super::super::flow::tests::submit_from;
    use super::*;
    use crate::tcp::testing::Room;
    use crate::{TransferState, gpu};

    const LENGTH: usize = 4096;

    /// Whoever tells of the disk does so for all files, and must not wait for a GPU.
    #[test]
    fn what_was_read_for_memory_of_a_gpu_is_copied_by_the_thread_of_mapped_files() {
        let room = Room::new(LENGTH);
        let pretended = Pretended::default();
        let (_engine, of_gpu) = gpu::tests::registered(&pretended);
        for (local, by_thread) in [(Arc::clone(&room.local), false), (of_gpu, true)] {
            let disk = Arc::new(Disk::start(None).unwrap());
            let mapped = Mapped::new(&disk, OpenFiles::new(), Duration::from_secs(60));
            let shared = Arc::clone(&mapped.shared);
            let mut state = shared.queue.lock();
            let batch = submit_from(&mut state.flow, &local, LENGTH as u64, &[Opcode::Read]);
            let Part { id, opcode, address, .. } = state.flow.begin(BUFFERS).unwrap();
            state.own.under_way = 1;
            drop(state);
            let mut buffer = AlignedBuffer::new(LENGTH);
            buffer.bytes_mut().fill(7);
            let is_there = || {
                let mut bytes = vec![0; LENGTH];
                assert!(local.enter().unwrap().copy_out(address, &mut bytes));
                bytes == [7; LENGTH]
            };
            assert!(!is_there());
            shared.done(Ended { opcode, id, buffer, range: 0..LENGTH, result: Ok(()) });
            let under_way = shared.queue.lock().own.under_way;
            assert_eq!((is_there(), under_way), (!by_thread, usize::from(by_thread)));
            // What its thread does, which is not there.
            mapped.stop();
            shared.work();
            assert!(is_there());
            assert_eq!(batch.status(0).unwrap().state, TransferState::Completed);
        }
    }
}
