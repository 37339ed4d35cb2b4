//! Threads that ask, threads that wait, and the driver: somebody always goes on.

use std::sync::Arc;
use std::time::Duration;

use loom::thread;
use millstream_roce::{DatagramMeta, Instant, Node, Piece, Transmit};

use super::super::driver::{self, Doze};
use super::super::leader::wait;
use super::super::shared::Shared;
use super::super::socket::Socket;
use super::super::{Hook, Worker};
use crate::model::check;
use crate::model::kernel::{self, Number};
use crate::{Polling, Waiters};

/// Answers what it is asked, and calls itself after some time if so asked.
struct Model {
    /// Readable from when it was asked until it has answered.
    asked: Number,
    /// Readable from when it has to call itself until it has.
    due: Number,
    has_question: bool,
    deadline: Option<Instant>,
    /// Somebody may wait for what has happened.
    happened: bool,
}

impl Node for Model {
    fn handle_datagram(&mut self, _: Instant, _: &DatagramMeta, _: &[u8]) {
        self.happened = true;
    }

    fn handle_timeout(&mut self, now: Instant) {
        if std::mem::take(&mut self.has_question) {
            self.happened |= kernel::drain(self.asked);
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.deadline = None;
            self.happened |= kernel::drain(self.due);
        }
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        self.deadline
    }

    fn poll_transmit(&mut self, _: Instant, _: &mut Transmit) -> bool {
        false
    }

    fn bytes(&self, _: &Piece) -> Option<&[u8]> {
        None
    }
}

/// Wakes those who wait for what happens in rounds.
struct WakeAll(Arc<Waiters>);

impl Hook<Model> for WakeAll {
    fn observe(&self, node: &mut Model, _: bool) -> u64 {
        u64::from(std::mem::take(&mut node.happened))
    }

    fn announce(&self, _: &Shared<Model>, _: u64, _: Worker) -> u64 {
        self.0.wake();
        0
    }
}

struct Device {
    shared: Shared<Model>,
    waiters: Arc<Waiters>,
    socket: Number,
    asked: Number,
    due: Number,
}

impl Device {
    fn new() -> Arc<Self> {
        let socket = Socket::model();
        let (number, asked, due) = (socket.number(), kernel::open(), kernel::open());
        let node = Model { asked, due, has_question: false, deadline: None, happened: false };
        let waiters = Arc::new(Waiters::default());
        let hook = Box::new(WakeAll(Arc::clone(&waiters)));
        let doze = Doze::new(Polling::keeping(Duration::ZERO)).unwrap();
        let shared = Shared::new(node, socket.seat(), hook, doze, socket);
        Arc::new(Self { shared, waiters, socket: number, asked, due })
    }

    fn spawn(self: &Arc<Self>, run: impl FnOnce(&Self) + 'static) -> thread::JoinHandle<()> {
        let device = Arc::clone(self);
        thread::spawn(move || run(&device))
    }

    fn drive(self: &Arc<Self>) -> thread::JoinHandle<()> {
        self.spawn(|device| driver::work(&device.shared).unwrap())
    }

    fn ask(&self) {
        let mut node = self.shared.lock().unwrap();
        node.has_question = true;
        kernel::write(self.asked);
    }

    fn ask_for_deadline(&self, deadline: u64) {
        let mut node = self.shared.lock().unwrap();
        node.deadline = Some(Instant::from_nanos(deadline));
    }

    /// Waits, and makes progress, until somebody has drained this.
    fn wait_for(&self, number: Number) {
        let look = || (!kernel::is_readable(number)).then_some(());
        wait([&self.shared], &self.waiters, Duration::MAX, look).unwrap();
    }

    fn stop(&self, driver: thread::JoinHandle<()>) {
        self.shared.stop();
        driver.join().unwrap();
        assert!(self.shared.failure().is_none());
    }
}

/// Nobody but those who ask does rounds.
#[test]
fn no_request_is_left_undone() {
    check(3, || {
        let device = Device::new();
        // A thread that has asked goes on when its request may be left to another.
        let other = device.spawn(Device::ask);
        device.ask();
        other.join().unwrap();
        assert!(!kernel::is_readable(device.asked));
        assert!(!device.shared.is_requested());
        assert!(device.shared.failure().is_none());
    });
}

#[test]
fn who_follows_leads_on() {
    check(2, || {
        let device = Device::new();
        let other = device.spawn(|device| device.shared.progress());
        kernel::write(device.socket);
        device.wait_for(device.socket);
        other.join().unwrap();
        assert!(device.shared.failure().is_none());
    });
}

/// After the last leader has left.
#[test]
fn the_driver_watches_the_socket_again() {
    check(2, || {
        let device = Device::new();
        let driver = device.drive();
        device.shared.progress();
        kernel::let_time_pass();
        kernel::write(device.socket);
        kernel::wait_until_drained(device.socket);
        device.stop(driver);
    });
}

/// The leader is another one than the thread that asks, and the driver is told.
#[test]
fn the_driver_watches_the_socket_after_another_thread_has_led() {
    check(2, || {
        let device = Device::new();
        let driver = device.drive();
        let other = device.spawn(|device| device.shared.progress());
        // The grace may end at any time.
        kernel::pass(60_000);
        other.join().unwrap();
        kernel::let_time_pass();
        kernel::write(device.socket);
        kernel::wait_until_drained(device.socket);
        device.stop(driver);
    });
}

#[test]
fn a_leader_that_leaves_does_what_was_left_to_it() {
    check(3, || {
        let device = Device::new();
        let other = device.spawn(|device| device.shared.progress());
        device.ask();
        other.join().unwrap();
        assert!(!kernel::is_readable(device.asked));
        assert!(device.shared.failure().is_none());
    });
}

#[test]
fn a_leader_does_not_sleep_through_requests() {
    check(2, || {
        let device = Device::new();
        kernel::write(device.asked);
        let leader = device.spawn(|device| device.wait_for(device.asked));
        device.ask();
        leader.join().unwrap();
        assert!(device.shared.failure().is_none());
    });
}

#[test]
fn a_leader_does_not_sleep_through_deadlines() {
    check(2, || {
        let device = Device::new();
        kernel::write(device.due);
        let leader = device.spawn(|device| device.wait_for(device.due));
        device.ask_for_deadline(10);
        kernel::let_time_pass();
        leader.join().unwrap();
        assert!(device.shared.failure().is_none());
    });
}

#[test]
fn the_driver_does_not_sleep_through_requests() {
    check(2, || {
        let device = Device::new();
        let driver = device.drive();
        device.ask();
        kernel::wait_until_drained(device.asked);
        device.stop(driver);
    });
}

#[test]
fn the_driver_does_not_sleep_through_deadlines() {
    check(2, || {
        let device = Device::new();
        let driver = device.drive();
        kernel::write(device.due);
        device.ask_for_deadline(10);
        kernel::let_time_pass();
        kernel::wait_until_drained(device.due);
        device.stop(driver);
    });
}

/// Whoever the deadline is left to.
#[test]
fn a_deadline_is_met_while_a_leader_comes_and_goes() {
    check(2, || {
        let device = Device::new();
        let driver = device.drive();
        let other = device.spawn(|device| device.shared.progress());
        kernel::write(device.due);
        device.ask_for_deadline(10);
        other.join().unwrap();
        kernel::let_time_pass();
        kernel::wait_until_drained(device.due);
        device.stop(driver);
    });
}
