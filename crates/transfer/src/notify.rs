//! Messages between the applications of engines.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use millstream_metadata::{CallError, Frame, FrameType, Notify, StoreError};
use thiserror::Error;

use crate::{SegmentId, TransferState};

/// So many messages, with so many bytes of names and texts, wait to be taken. More are refused.
const MAX_MESSAGES: usize = 65_536;
const MAX_BYTES: usize = 16 << 20;

/// What a peer that takes a message answers.
const SUCCESS: &str = "success";

/// A message for a peer's application.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Notification {
    /// Who sends, or what about.
    pub name: String,
    /// The text. A peer may refuse an empty one.
    pub text: String,
}

/// Why a message was not delivered.
#[derive(Debug, Error)]
pub enum NotifyError {
    /// The segment is not open.
    #[error("segment {0:?} is not open")]
    Unknown(SegmentId),
    /// Nobody knows where its process is.
    #[error("cannot notify segment {segment}: {error}")]
    Store {
        /// Its name.
        segment: String,
        /// Why.
        error: StoreError,
    },
    /// The peer could not be asked.
    #[error("cannot notify {0}")]
    Call(#[from] CallError),
    /// The peer does not take it: nobody there takes messages, or too many wait.
    #[error(
        "segment {segment} refuses the message: nobody there takes messages, or too many wait to be \
         taken"
    )]
    Refused {
        /// Its name.
        segment: String,
    },
}

impl Notification {
    pub(crate) fn frame(&self) -> Frame {
        let message = Notify { name: self.name.clone(), notify_msg: self.text.clone() };
        // Two texts: nothing that JSON cannot hold.
        Frame::new(FrameType::Notify, serde_json::to_vec(&message).unwrap_or_default())
    }
}

/// Whether a reply says that a message was taken.
pub(crate) fn is_taken(reply: &Frame) -> bool {
    let reply: Result<Notify, _> = serde_json::from_slice(&reply.body);
    reply.is_ok_and(|reply| !reply.notify_msg.is_empty())
}

/// Messages that wait to be taken.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    messages: VecDeque<Notification>,
    bytes: usize,
}

impl Inbox {
    /// Takes a message in; `false` when too many wait.
    pub(crate) fn push(&self, message: Notification) -> bool {
        let length = message.name.len() + message.text.len();
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.messages.len() >= MAX_MESSAGES || waiting.bytes + length > MAX_BYTES {
            return false;
        }
        waiting.bytes += length;
        waiting.messages.push_back(message);
        true
    }

    /// Takes all that wait, in the order in which they came.
    pub(crate) fn take(&self) -> Vec<Notification> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.bytes = 0;
        waiting.messages.drain(..).collect()
    }

    /// Answers a request with a message.
    pub(crate) fn answer(&self, request: &Frame) -> Notify {
        let message: Result<Notify, _> = serde_json::from_slice(&request.body);
        let taken = message.is_ok_and(|message| {
            self.push(Notification { name: message.name, text: message.notify_msg })
        });
        let notify_msg = if taken { SUCCESS.to_owned() } else { String::new() };
        Notify { name: String::new(), notify_msg }
    }
}

/// Told of the end of each task that was submitted together, it does something once all are COMPLETED.
pub(crate) struct Submission {
    unfinished: AtomicUsize,
    failed: AtomicBool,
    then: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Submission {
    pub(crate) fn new(tasks: usize, then: impl FnOnce() + Send + 'static) -> Self {
        Self {
            unfinished: AtomicUsize::new(tasks),
            failed: AtomicBool::new(false),
            then: Mutex::new(Some(Box::new(then))),
        }
    }

    /// A task of it has ended.
    pub(crate) fn task_ended(&self, state: TransferState) {
        if state != TransferState::Completed {
            self.failed.store(true, Ordering::Relaxed);
        }
        // The last one sees what the others have said.
        if self.unfinished.fetch_sub(1, Ordering::AcqRel) == 1
            && !self.failed.load(Ordering::Relaxed)
        {
            let then = self.then.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(then) = then {
                then();
            }
        }
    }
}

impl fmt::Debug for Submission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Submission").field(&self.unfinished).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn what_waits_is_bounded_and_taken_in_order() {
        let inbox = Inbox::default();
        let message =
            |name: &str, length| Notification { name: name.to_owned(), text: "x".repeat(length) };
        assert!(inbox.push(message("first", 0)) && inbox.push(message("second", MAX_BYTES / 2)));
        assert!(!inbox.push(message("too long", MAX_BYTES / 2)));
        let names: Vec<_> = inbox.take().into_iter().map(|message| message.name).collect();
        assert_eq!(names, ["first", "second"]);
        (0..MAX_MESSAGES).for_each(|_| assert!(inbox.push(message("", 1))));
        assert!(!inbox.push(message("", 1)));
        assert_eq!(inbox.take().len(), MAX_MESSAGES);
        assert!(inbox.push(message("", 1)));
    }

    #[test]
    fn nonsense_is_no_message() {
        let inbox = Inbox::default();
        let answer = |body: &[u8]| inbox.answer(&Frame::new(FrameType::Notify, body.to_vec()));
        for nonsense in [&b""[..], b"[", b"7", br#"{"name":7}"#] {
            assert_eq!(answer(nonsense).notify_msg, "");
        }
        assert!(inbox.take().is_empty());
        assert_eq!(answer(br#"{"name":"a","notify_msg":"b"}"#).notify_msg, SUCCESS);
        assert_eq!(inbox.take(), [Notification { name: "a".to_owned(), text: "b".to_owned() }]);
    }

    #[test]
    fn what_follows_is_done_once_all_are_completed_and_only_then() {
        use TransferState::{Canceled, Completed, Failed};
        for (ends, expected) in [
            (vec![Completed], true),
            (vec![Completed, Completed], true),
            (vec![Completed, Failed], false),
            (vec![Canceled, Completed], false),
        ] {
            let done = Arc::new(AtomicBool::new(false));
            let then = Arc::clone(&done);
            let submission =
                Submission::new(ends.len(), move || then.store(true, Ordering::Relaxed));
            for end in &ends {
                assert!(!done.load(Ordering::Relaxed));
                submission.task_ended(*end);
            }
            assert_eq!(done.load(Ordering::Relaxed), expected, "{ends:?}");
        }
    }
}
