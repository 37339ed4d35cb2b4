//! Where copies go, and what becomes of the tasks of a group that was copied.

use std::sync::Arc;

use millstream_net::shared_memory::{Key, Peer};

use super::failed::{Failed, not_exchanged, reason, visit};
use super::group::{Group, Grouping, Piece, for_each};
use crate::batch::BatchShared;
use crate::memory::LocalMemory;
use crate::segment::OpenSegment;
use crate::task::{EndedTasks, TaskHandle};
use crate::{FailureReason, Opcode, TransferError, TransferState};

/// A group ends with the slice that makes it so long.
const GROUP_BYTES: u64 = 128 << 10;

/// A group where memory of a GPU is an end: each copy takes the driver some ten microseconds.
const GPU_GROUP_BYTES: u64 = 4 << 20;

/// Where bytes go, or come from.
#[derive(Clone)]
pub(crate) struct Way {
    pub(crate) local: Arc<LocalMemory>,
    pub(crate) other: Other,
    pub(crate) segment: Arc<OpenSegment>,
    /// Which start of the segment's process it is, if it says so.
    pub(crate) incarnation: Option<u64>,
}

/// The memory at the other end.
#[derive(Clone)]
pub(crate) enum Other {
    /// Of this process.
    Own(Arc<LocalMemory>),
    /// Of another one on this host.
    Peer(Arc<Peer>, Key),
}

impl Way {
    /// Whether copies can begin without a wait. Those of a GPU wait for its driver.
    pub(super) fn is_open(&self) -> bool {
        !self.has_gpu() && !self.is_shut()
    }

    /// Whether the peer must be asked first for its memory, and may let us wait.
    pub(super) fn is_shut(&self) -> bool {
        match &self.other {
            Other::Own(_) => false,
            Other::Peer(peer, key) => !peer.is_open(*key),
        }
    }

    /// Asks the peer for its memory. If that is in vain, so are copies, which say why: it is not asked again soon.
    pub(super) fn ask(&self) {
        if let Other::Peer(peer, key) = &self.other {
            drop(peer.open(*key));
        }
    }

    /// Whether an end is memory of a GPU.
    pub(super) fn has_gpu(&self) -> bool {
        let other = match &self.other {
            Other::Own(other) => other.is_gpu(),
            Other::Peer(..) => false,
        };
        other || self.local.is_gpu()
    }

    /// How to make groups of what goes this way.
    pub(super) fn grouping(&self) -> Grouping {
        Grouping {
            within: matches!(self.other, Other::Own(_)),
            bytes: if self.has_gpu() { GPU_GROUP_BYTES } else { GROUP_BYTES },
        }
    }

    /// Copies a group, and tells its tasks: returns those of which nothing is under way and that another transport may
    /// go on with. May wait for the peer if the way is not open.
    pub(super) fn copy(&self, batch: &Arc<BatchShared>, group: &Group) -> Vec<usize> {
        let mut left = Vec::new();
        for &index in &group.late {
            TaskHandle { batch: Arc::clone(batch), index }.end_rest(TransferState::Timeout);
        }
        if group.count == 0 {
            return left;
        }
        let mut failures = Vec::new();
        if let Err(failed) = self.try_copy(batch, group, &mut failures) {
            // None of it counts.
            let failed = |index| (index, Broken::Failed(failed.clone()));
            failures = (0..group.pieces().len()).map(failed).collect();
        }
        let mut failures = failures.into_iter().peekable();
        let (mut done, mut copied) = (0, [0; 2]);
        let mut ended = EndedTasks::default();
        // Pieces of one task that follow each other are told at once: others work on it too, and who writes what they
        // read waits for it.
        let mut told = Arrived::default();
        for (index, piece) in group.pieces().iter().enumerate() {
            match failures.next_if(|(failed, _)| *failed == index) {
                None => {
                    done += 1;
                    copied[piece.opcode as usize] += piece.slice.length;
                    if told.slices > 0 && told.task != piece.task {
                        left.extend(told.tell(batch, &mut ended));
                    }
                    told.task = piece.task;
                    told.slices += piece.slices;
                    told.length += piece.slice.length;
                }
                Some((_, Broken::Late(done))) => {
                    let task = TaskHandle { batch: Arc::clone(batch), index: piece.task };
                    task.slices_late(piece.slices, done);
                }
                Some((_, Broken::Failed(failed))) => {
                    left.extend(self.fail(batch, piece.task, piece.slices, failed));
                }
            }
        }
        left.extend(told.tell(batch, &mut ended));
        // Before those who wait are told.
        self.segment.traffic.add(done, copied);
        drop(ended);
        if done > 0 {
            self.works();
        }
        left
    }

    /// Something was copied.
    pub(super) fn works(&self) {
        if let Other::Peer(..) = self.other {
            self.segment.avoided.works(self.name());
        }
    }

    /// So many slices of a task have failed. The task, if another transport may go on with it and nothing of it is
    /// under way.
    pub(super) fn fail(
        &self,
        batch: &Arc<BatchShared>,
        index: usize,
        slices: u64,
        failed: Failed,
    ) -> Option<usize> {
        if let Other::Peer(..) = self.other {
            // Its memory is not what it was when it was asked.
            self.segment.mark_stale();
        }
        let peer = self.segment.name.as_str().into();
        let error = TransferError::new(peer, self.name(), failed.reason);
        self.segment.traffic.failed(slices);
        let task = TaskHandle { batch: Arc::clone(batch), index };
        if failed.elsewhere {
            return task.slices_left(slices, &error).then_some(index);
        }
        task.slices_failed(slices, &error);
        None
    }

    pub(super) fn name(&self) -> &'static str {
        match self.other {
            Other::Own(_) => "local",
            Other::Peer(..) => "shm",
        }
    }

    /// Copies each piece, or says why not; fails when none of them counts.
    fn try_copy(
        &self,
        batch: &Arc<BatchShared>,
        group: &Group,
        failures: &mut Vec<(usize, Broken)>,
    ) -> Result<(), Failed> {
        let enter = || self.local.enter().ok_or(FailureReason::Unregistered);
        let pieces = group.pieces();
        match &self.other {
            Other::Own(other) => {
                let local = enter()?;
                let other = other.enter().ok_or(FailureReason::Unregistered)?;
                let copy_one = |piece: &Piece| {
                    let Piece { opcode, caching, .. } = *piece;
                    let copied = piece.in_steps(batch, true, |near, far, length| match opcode {
                        Opcode::Write => local.copy_to(near, &other, far, length, caching),
                        Opcode::Read => other.copy_to(far, &local, near, length, caching),
                    });
                    broken(copied.map_err(Failed::from))
                };
                if self.has_gpu() {
                    group.for_each_joined(copy_one, failures);
                } else {
                    for_each(
                        pieces,
                        |together| {
                            let Piece { opcode, slice, .. } = together[0];
                            let ends = together.iter().map(|it| it.slice);
                            match opcode {
                                Opcode::Write => {
                                    let ends = ends.map(|it| (it.source, it.target));
                                    local.copy_together_to(&other, ends, slice.length)
                                }
                                Opcode::Read => {
                                    let ends = ends.map(|it| (it.target, it.source));
                                    other.copy_together_to(&local, ends, slice.length)
                                }
                            }
                        },
                        |index, piece| failures.extend(copy_one(piece).map(|why| (index, why))),
                    );
                }
            }
            Other::Peer(peer, key) => {
                let region = match peer.region(*key) {
                    Some(region) => region,
                    None => peer.open(*key).map_err(reason)?,
                };
                // Only now: whoever unregisters it waits for us, and the peer may have let us wait.
                let local = enter()?;
                let visit = visit(peer, &region)?;
                let copy_one = |piece: &Piece| {
                    let Piece { opcode, caching, .. } = *piece;
                    let copied = piece.in_steps(batch, false, |near, far, length| {
                        local.exchange(opcode, near, &visit, far, length, caching)
                    });
                    broken(copied.map_err(|error| not_exchanged(&local, error)))
                };
                if self.has_gpu() {
                    group.for_each_joined(copy_one, failures);
                } else {
                    for_each(
                        pieces,
                        |together| {
                            let Piece { opcode, slice, .. } = together[0];
                            let ends = together.iter().map(|it| (it.slice.source, it.slice.target));
                            local.exchange_together(opcode, &visit, ends, slice.length)
                        },
                        |index, piece| failures.extend(copy_one(piece).map(|why| (index, why))),
                    );
                }
                visit.confirm().map_err(reason)?;
            }
        }
        Ok(())
    }
}

/// Why a piece was not copied, or not to its end.
#[derive(Clone)]
pub(super) enum Broken {
    Failed(Failed),
    /// The deadline of its task passed when so many bytes had been.
    Late(u64),
}

/// Slices of a task that have arrived, and are not told.
#[derive(Default)]
struct Arrived {
    task: usize,
    slices: u64,
    length: u64,
}

impl Arrived {
    /// Their task, if it [is left](TaskHandle::slices_left).
    fn tell(&mut self, batch: &Arc<BatchShared>, ended: &mut EndedTasks) -> Option<usize> {
        if self.slices == 0 {
            return None;
        }
        let left = ended.slices_done(batch, self.task, self.slices, self.length);
        (self.slices, self.length) = (0, 0);
        left.then_some(self.task)
    }
}

/// What is wrong with a piece that was copied with this result.
fn broken(copied: Result<Option<u64>, Failed>) -> Option<Broken> {
    match copied {
        Ok(late) => late.map(Broken::Late),
        Err(failed) => Some(Broken::Failed(failed)),
    }
}
