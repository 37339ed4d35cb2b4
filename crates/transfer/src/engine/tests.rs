//! Memory that goes while its engine ends.

use std::pin::pin;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

use crate::copier::{Other, Way};
use crate::memory::Unregistering;
use crate::tcp::testing;
use crate::{Buffer, Config, Opcode, TransferEngine, TransferState};

const LENGTH: usize = 4096;

/// Longer than anything here takes, unless it hangs.
const LONG: Duration = Duration::from_secs(10);

/// An engine at an address of its own, and a buffer of it.
fn engine(last: u8) -> (TransferEngine, Buffer) {
    let address = [127, 97, std::process::id() as u8, last].into();
    let engine = TransferEngine::new(Config::new(address)).unwrap();
    let buffer = engine.allocate_buffer(LENGTH, "*", true).unwrap();
    (engine, buffer)
}

/// Has a buffer, as the future of a task may that waits for a batch, and lets go of it when it is woken.
struct Holder(Mutex<Option<Buffer>>);

impl Wake for Holder {
    fn wake(self: Arc<Self>) {
        let buffer = self.0.lock().unwrap().take();
        drop(buffer);
    }
}

#[test]
fn who_is_told_by_the_end_of_an_engine_can_drop_its_buffer() {
    let (engine, buffer) = engine(5);
    let local = engine.inner.memory().find(buffer.address(), 1).unwrap();
    let (batch, _tasks) = testing::tasks(Opcode::Read, buffer.address(), &[LENGTH as u64]);
    let other = Other::Own(Arc::clone(&local));
    let way = Way { local, other, segment: testing::segment(), incarnation: None };
    // No thread copies it: there is none, and none is started.
    engine.inner.copier.keep(way, &batch.shared);
    let holder = Arc::new(Holder(Mutex::new(Some(buffer))));
    let waker = Waker::from(Arc::clone(&holder));
    let mut finished = pin!(batch.finished());
    assert!(finished.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let (tell, told) = channel();
    thread::spawn(move || {
        drop(engine);
        let _ = tell.send(());
    });
    told.recv_timeout(LONG).expect("it waits for itself");
    assert_eq!(batch.status(0).unwrap().state, TransferState::Failed);
    assert!(holder.0.lock().unwrap().is_none());
}

#[test]
fn a_buffer_that_is_dropped_while_its_engine_ends_is_free_only_when_nobody_touches_it() {
    let (engine, buffer) = engine(6);
    let touched = engine.inner.memory().find(buffer.address(), 1).unwrap();
    let inside = touched.enter().unwrap();
    let ending = thread::spawn(move || drop(engine));
    while !touched.is_closed() && !ending.is_finished() {
        thread::yield_now();
    }
    let (tell, told) = channel();
    let dropping = thread::spawn(move || {
        drop(buffer);
        let _ = tell.send(());
    });
    let early = told.recv_timeout(Duration::from_millis(100));
    let has_ended = ending.is_finished();
    drop(inside);
    assert_eq!(early, Err(RecvTimeoutError::Timeout), "somebody was inside");
    assert!(!has_ended, "somebody was inside");
    ending.join().unwrap();
    dropping.join().unwrap();
}

/// As one may that is told of the end, and drops a buffer.
#[test]
fn an_engine_has_ended_only_when_nobody_unregisters_its_memory_any_more() {
    let (engine, buffer) = engine(7);
    let inner = Arc::clone(&engine.inner);
    let (memory, address) = (inner.memory(), buffer.address());
    let mut regions = memory.lock();
    let taken = Unregistering::take(memory, address, regions.entry(address).unwrap()).unwrap();
    drop(regions);
    let (tell, told) = channel();
    thread::spawn(move || {
        drop(engine);
        let _ = tell.send(());
    });
    let early = told.recv_timeout(Duration::from_millis(100));
    drop(taken);
    assert_eq!(early, Err(RecvTimeoutError::Timeout), "it was still being unregistered");
    told.recv_timeout(LONG).unwrap();
}
