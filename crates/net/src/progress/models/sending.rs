//! Memory that was removed from the node is its owner's again after [`Sending::wait`].

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::super::sending::Sending;
use crate::model::check;
use crate::sync::Mutex;

#[derive(Default)]
struct Node {
    sending: Sending,
    /// Whether the node names the memory.
    named: Mutex<bool>,
    /// `loom` says who uses it while another thread does.
    memory: UnsafeCell<u8>,
}

// SAFETY: only `memory` is not, and `loom` watches it.
unsafe impl Sync for Node {}

impl Node {
    fn send(&self) {
        let named = self.named.lock().unwrap();
        let collected = *named;
        let underway = self.sending.begin();
        drop(named);
        if collected {
            self.memory.with(|_memory| ());
        }
        drop(underway);
    }

    fn remove(&self) {
        *self.named.lock().unwrap() = false;
        self.sending.wait();
    }
}

#[test]
fn memory_is_free_when_its_send_has_ended() {
    check(3, || {
        let node = Arc::new(Node::default());
        *node.named.lock().unwrap() = true;
        let sender = {
            let node = Arc::clone(&node);
            thread::spawn(move || (0..2).for_each(|_| node.send()))
        };
        node.remove();
        node.memory.with_mut(|_memory| ());
        sender.join().unwrap();
    });
}

#[test]
fn two_threads_can_wait_for_one_send() {
    check(2, || {
        let node = Arc::new(Node::default());
        *node.named.lock().unwrap() = true;
        let [sender, other] = [true, false].map(|sends| {
            let node = Arc::clone(&node);
            thread::spawn(move || if sends { node.send() } else { node.remove() })
        });
        node.remove();
        other.join().unwrap();
        node.memory.with_mut(|_memory| ());
        sender.join().unwrap();
    });
}
