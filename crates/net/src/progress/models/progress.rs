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
use crate::Waiters;
use crate::model::check;
use crate::model::kernel::{self, Number};

/// Answers what it is asked, and calls itself after some time if so asked.
struct Model {
    /// Readable from when it was asked until it has answered.
    asked: Number,
    /// Readable from when it has to call itself until it has.
    due: Number,
    has_question: bool,
    deadline: Option<Instant>,
}

impl Node for Model {
    fn handle_datagram(&mut self, _: Instant, _: &DatagramMeta, _: &[u8]) {}

    fn handle_timeout(&mut self, now: Instant) {
        if std::mem::take(&mut self.has_question) {
            kernel::drain(self.asked);
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.deadline = None;
            kernel::drain(self.due);
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
    fn observe(&self, _: &mut Model, eventful: bool) -> u64 {
        u64::from(eventful)
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
        let node = Model { asked, due, has_question: false, deadline: None };
        let waiters = Arc::new(Waiters::default());
        let hook = Box::new(WakeAll(Arc::clone(&waiters)));
        let doze = Doze::new(Duration::ZERO).unwrap();
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
        kernel::write(self.due);
    }

    /// Waits until a datagram that has arrived has been received.
    fn wait_for_datagram(&self) {
        let look = || (!kernel::is_readable(self.socket)).then_some(());
        wait([&self.shared], &self.waiters, Duration::MAX, look).unwrap();
    }

    fn arrive(&self) {
        kernel::write(self.socket);
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
        device.arrive();
        device.wait_for_datagram();
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
        device.arrive();
        kernel::wait_until_drained(device.socket);
        device.shared.stop();
        driver.join().unwrap();
        assert!(device.shared.failure().is_none());
    });
}
