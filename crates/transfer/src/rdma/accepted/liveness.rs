//! Whether peers are there.
//!
//! A peer that is killed does not say goodbye. So each is asked now and then whether it is there, by
//! a WRITE of no bytes, which every adapter answers by itself. Who does not answer is forgotten. On the
//! same occasion it is noted who has used its connection since the last time.

use std::mem;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use millstream_verbs::{Completion, CompletionStatus, SendOperation, SendRequest};

use super::super::connection::Connection;
use super::Accepted;

/// The identifiers of questions have this bit, and below it the number of the connection. Those of tests
/// do not have it, and those of slices only when 2^31 others were in their place before.
const QUESTION: u64 = 1 << 63;

impl Accepted {
    /// Asks peers whether they are there, and forgets those that are not, until `stop`.
    pub(in super::super) fn keep_asking(&self) {
        while self.pause() {
            self.forget();
            self.ask();
        }
    }

    /// Whether a completion is of a question.
    pub(in super::super) fn is_question(completion: &Completion) -> bool {
        completion.id & QUESTION != 0
    }

    /// A question has ended. On a thread that makes the device's progress.
    pub(in super::super) fn ended(&self, completion: &Completion) {
        let answered = completion.status == CompletionStatus::Success;
        self.note_answer(completion.id & !QUESTION, answered);
    }

    fn note_answer(&self, number: u64, answered: bool) {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).push((number, answered));
    }

    /// Waits for an interval with peers in it; `false` when none will come any more.
    fn pause(&self) -> bool {
        let mut store = self.lock();
        let mut until = Instant::now() + self.config.interval;
        loop {
            if store.stopped {
                return false;
            }
            if store.is_empty() {
                store = self.changed.wait(store).unwrap_or_else(PoisonError::into_inner);
                until = Instant::now() + self.config.interval;
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let waited = self.changed.wait_timeout(store, left);
            (store, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Closes the connections of those that have not answered.
    fn forget(&self) {
        let ended = mem::take(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner));
        for (number, answered) in ended {
            let mut store = self.lock();
            // Not there if it was closed meanwhile.
            let Some((initiator, epoch, sender, open)) = store.open(number) else { continue };
            if answered {
                open.asked = false;
                continue;
            }
            let peer = &sender.nic_path;
            tracing::debug!(peer, "does not answer any more: forgotten");
            store.close(initiator, epoch);
            drop(self.carry_out(store));
        }
    }

    /// Asks all whose answer is not still awaited, and notes who was used.
    pub(super) fn ask(&self) {
        let numbers = self.lock().numbers();
        for number in numbers {
            let (connection, asked) = match self.lock().open(number) {
                Some((.., open)) => {
                    (Arc::clone(&open.connection), mem::replace(&mut open.asked, true))
                }
                None => continue,
            };
            // Both may take a system call, so the lock is not held.
            let receive_psn = connection.receive_psn();
            if !asked && !question(number, &connection) {
                // Its queue pair has failed, which is an answer too.
                self.note_answer(number, false);
            }
            self.lock().note(number, receive_psn);
        }
        self.lock().looked();
        self.changed.notify_all();
    }
}

/// Asks a peer whether it is there. `false` when that cannot be asked any more.
fn question(number: u64, connection: &Connection) -> bool {
    // No memory is touched, so no key is needed (IBTA 9.7.4.1.4).
    let operation = SendOperation::Write { remote_address: 0, remote_key: 0, immediate: None };
    let question = SendRequest::new(QUESTION | number, operation, []);
    // All queue pairs of a connection are of one process.
    connection.queue_pairs.first().is_some_and(|pair| pair.post_send(&[question]).is_ok())
}
