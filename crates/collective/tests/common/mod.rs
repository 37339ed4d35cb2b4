//! A controller, switches and hosts in one process, on loopback addresses that only it has.

// Each test file uses its own part of this.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod rank;

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use millstream_collective::{Communicator, JoinConfig, JoinError, Path};
use millstream_control::controller::ControllerConfig;
use millstream_control::switch::SwitchConfig;
use millstream_control::{Shutdown, controller, shutdown, switch};
use millstream_verbs::{Device, SoftConfig};

/// How long anything may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Says that a test cannot run, and why; fails where nothing may be skipped.
pub(crate) fn skip(reason: &str) {
    let required = std::env::var_os("MILLSTREAM_REQUIRE").is_some_and(|value| value == "all");
    assert!(!required, "cannot be skipped, as MILLSTREAM_REQUIRE=all: {reason}");
    println!("skipped: {reason}");
}

/// An address of 127/8 that no other test process uses, a new one for every call.
pub(crate) fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let process = std::process::id();
    let host = NEXT.fetch_add(1, Ordering::Relaxed);
    assert_ne!(host, 255, "this process has used all its addresses");
    Ipv4Addr::new(127, 128 | (process >> 8) as u8 & 63, process as u8, host).into()
}

/// A daemon on a thread of its own, stopped when dropped.
pub(crate) struct Daemon {
    stop: Option<Shutdown>,
    thread: Option<JoinHandle<()>>,
}

impl Daemon {
    fn start<T: Send + 'static>(
        run: impl FnOnce(mpsc::Sender<T>, Pin<Box<dyn Future<Output = ()> + Send>>) + Send + 'static,
    ) -> (Self, T) {
        let (stop, stopped) = shutdown();
        let (sender, ready) = mpsc::channel();
        let thread = thread::spawn(move || run(sender, Box::pin(stopped)));
        let what = ready.recv_timeout(PATIENCE).expect("the daemon gets ready");
        (Self { stop: Some(stop), thread: Some(thread) }, what)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "a daemon panicked");
        }
    }
}

pub(crate) fn start_controller(listen: SocketAddr) -> (Daemon, SocketAddr) {
    start_controller_with(ControllerConfig::new(listen))
}

pub(crate) fn start_controller_with(config: ControllerConfig) -> (Daemon, SocketAddr) {
    Daemon::start(move |ready, stopped| {
        let ready = move |address| ready.send(address).unwrap();
        controller::run(config, ready, stopped).unwrap();
    })
}

pub(crate) fn start_switch(controller: SocketAddr, name: &str) -> Daemon {
    start_switch_with(SwitchConfig::new(controller, name, address()))
}

pub(crate) fn start_switch_with(config: SwitchConfig) -> Daemon {
    let (daemon, _) = Daemon::start(move |ready, stopped| {
        switch::run(config, move |address| ready.send(address).unwrap(), stopped).unwrap();
    });
    daemon
}

pub(crate) struct Cluster {
    pub(crate) controller: SocketAddr,
    /// Switches end before the controller, so that nobody looks for a controller in vain.
    pub(crate) switches: Vec<Daemon>,
    pub(crate) controller_daemon: Option<Daemon>,
    /// The way of its ranks.
    pub(crate) path: Path,
    /// Whether they take the place of switches.
    pub(crate) fallback: bool,
}

impl Cluster {
    /// Whose ranks use the switches, though they are of one machine.
    pub(crate) fn start(switches: usize) -> Self {
        let (daemon, controller) = start_controller(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let switches =
            (0..switches).map(|number| start_switch(controller, &format!("s{number}"))).collect();
        let (controller_daemon, path) = (Some(daemon), Path::Switch);
        Self { controller, switches, controller_daemon, path, fallback: false }
    }

    /// Without a switch.
    pub(crate) fn of_shared_memory() -> Self {
        Self { path: Path::SharedMemory, ..Self::start(0) }
    }

    /// Without a switch, whose ranks take the place of one.
    pub(crate) fn of_hosts() -> Self {
        Self { fallback: true, ..Self::start(0) }
    }

    pub(crate) fn config(&self, group: &str, world: u32, rank: u32) -> JoinConfig {
        let config = JoinConfig::new(self.controller, group, world, rank, &device());
        JoinConfig { path: self.path, fallback: self.fallback, ..config }
    }

    /// Of a rank with so many devices.
    pub(crate) fn config_with(
        &self,
        group: &str,
        world: u32,
        rank: u32,
        devices: usize,
    ) -> JoinConfig {
        let more_devices = (1..devices).map(|_| device()).collect();
        JoinConfig { more_devices, ..self.config(group, world, rank) }
    }

    pub(crate) fn join(&self, group: &str, world: u32, rank: u32) -> Communicator {
        Communicator::join(&self.config(group, world, rank)).unwrap()
    }

    /// All ranks of a group.
    pub(crate) fn group(&self, group: &str, world: u32) -> Vec<Communicator> {
        joined((0..world).map(|rank| self.config(group, world, rank)))
    }
}

/// Tests over a switch, and through shared memory.
pub(crate) fn on_both(test: impl Fn(&Cluster)) {
    for cluster in [Cluster::start(1), Cluster::of_shared_memory()] {
        test(&cluster);
    }
}

/// A soft device of an address that no other has.
pub(crate) fn device() -> Device {
    Device::open_soft(&SoftConfig::new(address())).unwrap()
}

/// Ranks that have joined at once, with all of these.
pub(crate) fn joined(configs: impl IntoIterator<Item = JoinConfig>) -> Vec<Communicator> {
    let joined = join_all(configs.into_iter().collect());
    joined.into_iter().map(Result::unwrap).collect()
}

/// Joins with all of these at once.
pub(crate) fn join_all(configs: Vec<JoinConfig>) -> Vec<Result<Communicator, JoinError>> {
    thread::scope(|scope| {
        let joins: Vec<_> = configs
            .into_iter()
            .map(|config| scope.spawn(move || Communicator::join(&config)))
            .collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect()
    })
}

/// Lets every rank do this at the same time.
pub(crate) fn each<T: Send>(
    ranks: &mut [Communicator],
    work: impl Fn(&mut Communicator) -> T + Sync,
) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            ranks.iter_mut().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Leaves with all ranks at once, as processes that end together do.
pub(crate) fn leave(ranks: Vec<Communicator>) {
    thread::scope(|scope| {
        for rank in ranks {
            scope.spawn(move || drop(rank));
        }
    });
}
