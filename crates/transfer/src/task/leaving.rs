//! Tasks that their transport has given up, until another one goes on with them or they end.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::{EndedTasks, LEFT, Step, TaskHandle};
use crate::segment::OpenSegment;
use crate::{TransferError, TransferState};

impl TaskHandle {
    /// So many slices have failed as another transport may do the task. Whether that is to be looked for now, since
    /// nothing else of it is under way: then it ends by [`TaskHandle::end_left`], if there is none.
    pub(crate) fn slices_left(&self, slices: u64, error: &TransferError) -> bool {
        let task = self.task();
        let _ = task.rare_room().moves.get_or_init(Box::default).error.set(error.clone());
        task.task.transport.fetch_or(LEFT, Ordering::Relaxed);
        // Nobody claims more of it, and who cancels it may yet be heard.
        task.given_away.store(true, Ordering::SeqCst);
        match task.end_slices(slices + task.stop()) {
            Step::GoesOn => false,
            Step::Left => true,
            Step::Ended => {
                EndedTasks::default().count(&self.batch, self.index);
                false
            }
        }
    }

    /// It waits until the process of its segment has said whether it is there: who cancels it looks there.
    pub(crate) fn departs(&self, segment: &Arc<OpenSegment>) {
        let moves = self.task().rare_room().moves.get_or_init(Box::default);
        let _ = moves.segment.set(Arc::downgrade(segment));
    }

    /// How one that has left its transport is to end though another one leads there, if so.
    pub(crate) fn is_to_end(&self) -> Option<TransferState> {
        match self.task().end_wanted.load(Ordering::SeqCst) {
            true => Some(TransferState::Canceled),
            false => self.is_late().then_some(TransferState::Timeout),
        }
    }

    /// No other transport goes on with one that has left [by its slices](Self::slices_left): it ends with this state, or
    /// fails.
    pub(crate) fn end_left(&self, state: Option<TransferState>) {
        let task = self.task();
        let error = task.rare().and_then(|rare| rare.moves.get()?.error.get());
        match (state, error) {
            (None, Some(error)) => task.set_error(error.clone()),
            (state, _) => {
                let state = state.unwrap_or(TransferState::Canceled);
                task.end_as.store(state as u8, Ordering::Relaxed);
            }
        }
        task.end();
        EndedTasks::default().count(&self.batch, self.index);
    }

    /// Cancels it if it [waits to leave](Self::departs) its transport.
    pub(super) fn ends_departing(&self) -> bool {
        let moves = self.task().rare().and_then(|rare| rare.moves.get());
        let segment = moves.and_then(|moves| moves.segment.get()).and_then(Weak::upgrade);
        segment.is_some_and(|segment| segment.departures.cancel(self))
    }
}
