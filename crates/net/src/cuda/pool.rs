//! Lanes for copies between registered memories: a few for each GPU, taken in turn.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::{CudaError, Gpu, Lane};

/// Bytes of a lane. Copies of more take two by turns: one is filled while the other is copied.
const LENGTH: usize = 512 << 10;

/// Copies at a time, each with two lanes: so 4 MiB are pinned for each GPU at most.
const MAX_PAIRS: usize = 4;

/// Two lanes.
pub(super) type Pair = [Box<dyn Lane>; 2];

#[derive(Debug, Default)]
pub(super) struct Pool {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    idle: Vec<Pair>,
    /// All that there are, or are about to be.
    count: usize,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Two lanes that are nobody else's until this is dropped.
pub(super) struct Taken<'a> {
    pool: &'a Pool,
    pair: Option<Pair>,
}

impl Gpu {
    /// Takes a pair of lanes, and waits for one if all are taken.
    pub(super) fn lanes(&self) -> Result<Taken<'_>, CudaError> {
        let pool = &self.pool;
        let mut state = pool.lock();
        loop {
            if let Some(pair) = state.idle.pop() {
                return Ok(Taken { pool, pair: Some(pair) });
            }
            if state.count < MAX_PAIRS {
                break;
            }
            state = pool.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.count += 1;
        drop(state);
        // Given back on failure, by which somebody may try again.
        let mut taken = Taken { pool, pair: None };
        taken.pair = Some([self.open_lane(LENGTH)?, self.open_lane(LENGTH)?]);
        Ok(taken)
    }
}

impl Deref for Taken<'_> {
    type Target = Pair;

    fn deref(&self) -> &Pair {
        self.pair.as_ref().expect("it is there until this is dropped")
    }
}

impl DerefMut for Taken<'_> {
    fn deref_mut(&mut self) -> &mut Pair {
        self.pair.as_mut().expect("it is there until this is dropped")
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        match self.pair.take() {
            Some(pair) => state.idle.push(pair),
            None => state.count -= 1,
        }
        drop(state);
        self.pool.returned.notify_one();
    }
}
