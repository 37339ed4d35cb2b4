//! The switch of a rank's own process. Where there is no switch for a group, its hosts take the place of one: each runs
//! what a switch runs, at the address of its device, and serves this group only.
//!
//! The controller asks for nodes of trees over the rank's own connection.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{io, thread};

use millstream_inc::protocol::{FallbackOffer, FromController, ToController, shortened};
use millstream_inc::{
    Abort, CommunicatorSpec, CreateError, Created, ParentSpec, PreparedCommunicator, SwitchConfig,
    SwitchEvent, SwitchNode, packets_too_long,
};
use millstream_net::{Hook, OpenError, Opened, ProgressConfig, Shared, Worker, ends_between_forks};
use millstream_verbs::{Device, Driver, Mtu, Waiters};

use crate::control::Sender;
use crate::memory::RunningSwitch;

/// The code of [`Abort::Requested`] where a controller that was restarted ends a node.
const UNCLAIMED: u32 = 1;

/// Whether a rank with this device can take the place of a switch.
pub(crate) fn offer(device: &Device, wanted: bool) -> FallbackOffer {
    let name = device.name();
    match device.driver() {
        _ if !wanted => FallbackOffer::Off,
        Some(Driver::Udp) => FallbackOffer::Able,
        Some(driver) => {
            let reason = format!(
                "its device {name} with the {driver} driver has its address to itself, which a switch would share: \
                 use the udp driver"
            );
            FallbackOffer::Unable { reason: shortened(reason) }
        }
        None => {
            let reason = format!(
                "its device {name} is an adapter, whose address a switch of its process cannot have: use a soft device"
            );
            FallbackOffer::Unable { reason: shortened(reason) }
        }
    }
}

/// A switch of this process.
pub(crate) struct HostedSwitch {
    running: RunningSwitch,
    progress: Arc<Announcer>,
    nodes: Mutex<BTreeMap<u64, Node>>,
}

/// A part of a tree.
#[derive(Clone, Copy)]
struct Node {
    path_mtu: Mtu,
    /// Where the switch above is.
    above: Option<IpAddr>,
}

/// Hears of what rounds of the node bring about.
struct Announcer {
    /// A communicator has three events at most, and their number is limited.
    events: mpsc::Sender<SwitchEvent>,
    /// Those who wait for the node to have sent everything.
    waiters: Waiters,
}

/// The node has a hook of its own.
struct Announces(Arc<Announcer>);

impl Hook<SwitchNode> for Announces {
    fn observe(&self, node: &mut SwitchNode, eventful: bool) -> u64 {
        while let Some(event) = node.poll_event() {
            // Nobody hears of it who does not want to.
            let _ = self.0.events.send(event);
        }
        u64::from(eventful)
    }

    fn announce(&self, _shared: &Shared<SwitchNode>, _observed: u64, _worker: Worker) -> u64 {
        self.0.waiters.wake();
        0
    }
}

impl HostedSwitch {
    /// A switch at the address of a device, and what happens there.
    pub(crate) fn start(device: &Device) -> Result<(Self, Receiver<SwitchEvent>), OpenError> {
        let address = device.address();
        let opened = Opened::new(ProgressConfig {
            share_address: true,
            name: "switch".to_owned(),
            ..ProgressConfig::new(address)
        })?;
        let seed = RandomState::new().hash_one(address);
        let node = SwitchNode::new(SwitchConfig {
            queue_pair_numbers: opened.queue_pair_numbers(),
            ..SwitchConfig::new(address, seed)
        });
        let (events, happened) = mpsc::channel();
        let progress = Arc::new(Announcer { events, waiters: Waiters::default() });
        let running = RunningSwitch::start(opened, node, Announces(Arc::clone(&progress)))?;
        let budget = running.shared().socket_info().receive_budget();
        running.shared().lock_regardless().set_receive_budget(budget);
        Ok((Self { running, progress, nodes: Mutex::default() }, happened))
    }

    fn nodes(&self) -> MutexGuard<'_, BTreeMap<u64, Node>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what the controller asks of a switch, and gives the answer to it. The error gives back a message that is
    /// not for a switch.
    pub(crate) fn obey(
        &self,
        message: FromController,
    ) -> Result<Option<ToController>, Box<FromController>> {
        if let Some(spec) = CommunicatorSpec::asked_for(&message) {
            return Ok(Some(self.create(&spec)));
        }
        Ok(match message {
            FromController::ConnectParent { communicator, address, qpn, psn, receive_share } => {
                let parent = ParentSpec { address, qpn, psn, receive_share };
                Some(self.connect_parent(communicator, &parent))
            }
            FromController::DestroyCommunicator { communicator } => self
                .destroy(communicator)
                .then_some(ToController::CommunicatorDestroyed { communicator }),
            FromController::AbortCommunicator { communicator, rank } => {
                self.abort(communicator, Abort::PeerLost { rank });
                None
            }
            FromController::EndCommunicator { communicator } => {
                self.abort(communicator, Abort::Requested { code: UNCLAIMED });
                None
            }
            message => return Err(Box::new(message)),
        })
    }

    fn create(&self, spec: &CommunicatorSpec) -> ToController {
        let communicator = spec.id;
        let neighbours = spec.children.iter().map(|child| child.address);
        if let Some(failed) = self.too_long(communicator, spec.path_mtu, neighbours) {
            return failed;
        }
        match self.create_node(spec) {
            Ok(created) => {
                let node = Node { path_mtu: spec.path_mtu, above: None };
                self.nodes().insert(communicator, node);
                created.message(communicator)
            }
            Err(reason) => {
                let reason = shortened(reason);
                ToController::CommunicatorFailed { communicator, reason, path_mtu: None }
            }
        }
    }

    fn create_node(&self, spec: &CommunicatorSpec) -> Result<Created, String> {
        let shared = self.running.shared();
        let node = || shared.lock().map_err(|failure| failure.to_string());
        let refused = |error: CreateError| error.to_string();
        node()?.check_communicator(spec).map_err(refused)?;
        // Its slots are cleared while others have the node.
        let prepared =
            PreparedCommunicator::new(spec.clone()).map_err(|error| error.to_string())?;
        node()?.create_prepared(shared.now(), prepared).map_err(refused)
    }

    /// Connects a node to the one above. When that fails, nothing is left of it.
    fn connect_parent(&self, communicator: u64, parent: &ParentSpec) -> ToController {
        let path_mtu = self.nodes().get(&communicator).map(|node| node.path_mtu);
        let above = [parent.address].into_iter();
        if let Some(failed) = path_mtu.and_then(|it| self.too_long(communicator, it, above)) {
            self.destroy(communicator);
            return failed;
        }
        let shared = self.running.shared();
        let connected = match shared.lock() {
            Ok(mut node) => match node.connect_parent(shared.now(), communicator, parent) {
                Ok(true) => Ok(()),
                Ok(false) => Err("there is no such node, or it has none above".to_owned()),
                Err(error) => Err(error.to_string()),
            },
            Err(failure) => Err(failure.to_string()),
        };
        let address = parent.address;
        match connected {
            Ok(()) => {
                if let Some(node) = self.nodes().get_mut(&communicator) {
                    node.above = Some(address);
                }
                ToController::ParentConnected { communicator }
            }
            Err(error) => {
                self.destroy(communicator);
                let reason = format!("it cannot be connected to the one at {address}: {error}");
                let reason = shortened(reason);
                ToController::CommunicatorFailed { communicator, reason, path_mtu: None }
            }
        }
    }

    /// What is said where packets to some neighbours of a node are shorter than its path MTU.
    fn too_long(
        &self,
        communicator: u64,
        path_mtu: Mtu,
        neighbours: impl Iterator<Item = IpAddr>,
    ) -> Option<ToController> {
        let own = self.running.shared().socket_info().address;
        // Who cannot be reached is told as lost later.
        let way = |other| Mtu::fitting(millstream_net::address::path_mtu(own, other).ok()?);
        let ways = neighbours.filter_map(|other| Some((way(other)?, other)));
        packets_too_long(communicator, path_mtu, own, ways)
    }

    /// Removes a node; `false` when there is none.
    fn destroy(&self, communicator: u64) -> bool {
        let known = self.nodes().remove(&communicator).is_some();
        if known {
            self.running.destroy(communicator);
        }
        known
    }

    fn abort(&self, communicator: u64, abort: Abort) {
        let shared = self.running.shared();
        if let Ok(mut node) = shared.lock() {
            node.abort_communicator(shared.now(), communicator, abort);
        }
    }

    /// Waits until all below and above have what its nodes owe them, but not longer than this: who stops the switch
    /// before takes results away.
    pub(crate) fn wait_settled(&self, patience: Duration) {
        let shared = self.running.shared();
        let settled = || {
            let is_settled = shared.lock_without_waking().map_or(true, |node| node.is_settled());
            is_settled.then_some(())
        };
        millstream_net::wait([&**shared], &self.progress.waiters, patience, settled);
    }

    /// Has a thread tell the controller what happens, until the switch is dropped.
    pub(crate) fn tell(
        self: &Arc<Self>,
        happened: Receiver<SwitchEvent>,
        sender: Arc<Sender>,
    ) -> io::Result<()> {
        let switch = Arc::downgrade(self);
        let tell = move || {
            for event in happened {
                let Some(switch) = switch.upgrade() else { return };
                tracing::info!(?event, "the switch of this rank reports");
                let communicator = event.communicator();
                if let SwitchEvent::Aborted { .. } = event {
                    // What is left is to remove it, for which no controller need be there.
                    switch.destroy(communicator);
                    continue;
                }
                let known = switch.nodes().get(&communicator).copied();
                if let Some(report) = known.and_then(|node| event.report(node.above)) {
                    // Where there is no connection, the ranks hear it from each other.
                    let _ = sender.send(&ToController::Report { communicator, report });
                }
            }
        };
        thread::Builder::new()
            .name("switch events".to_owned())
            .spawn(ends_between_forks(tell))
            .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};
    use std::sync::atomic::{AtomicU8, Ordering};

    use millstream_inc::protocol::SwitchChild;
    use millstream_inc::{CommunicatorOptions, Ranks};
    use millstream_verbs::{Psn, Qpn, SoftConfig};

    use super::*;
    use crate::control::{Proofs, connect};
    use crate::joining::Learned;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn start() -> (Arc<HostedSwitch>, IpAddr) {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        let (process, host) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let host = IpAddr::from([127, 128 | (process >> 8) as u8 & 63, process as u8, host]);
        let device = Device::open_soft(&SoftConfig::new(host)).unwrap();
        (Arc::new(HostedSwitch::start(&device).unwrap().0), host)
    }

    /// Has a node made, with a child that nobody is.
    fn create(switch: &HostedSwitch, address: IpAddr, communicator: u64) {
        let (qpn, psn) = (Qpn::new(77), Psn::new(0));
        let ranks = Ranks::one(0);
        let child = SwitchChild { ranks, is_switch: false, address, qpn, psn, receive_share: None };
        let created = switch.obey(FromController::CreateCommunicator {
            communicator,
            group: [1, 2],
            path_mtu: Mtu::B1024,
            segment_bytes: 4096,
            window: 2,
            world: 1,
            has_parent: false,
            children: vec![child],
            tree: 0,
            options: CommunicatorOptions::default(),
        });
        let created = created.unwrap().unwrap();
        assert!(matches!(created, ToController::CommunicatorCreated { .. }), "{created:?}");
    }

    /// How many nodes there are, and whether they take memory.
    fn held(switch: &HostedSwitch) -> (usize, bool) {
        let node = switch.running.shared().lock_regardless();
        (node.communicators(), node.memory_used() > 0)
    }

    #[test]
    fn a_node_that_is_destroyed_or_cannot_be_connected_is_gone_and_no_other() {
        let (switch, address) = start();
        create(&switch, address, 1);
        for _ in 0..2 {
            create(&switch, address, 2);
            assert_eq!(held(&switch), (2, true));
            let destroy = || FromController::DestroyCommunicator { communicator: 2 };
            let destroyed = ToController::CommunicatorDestroyed { communicator: 2 };
            assert_eq!(switch.obey(destroy()), Ok(Some(destroyed)));
            assert_eq!(held(&switch), (1, true));
            assert_eq!(switch.obey(destroy()), Ok(None));
        }
        // It has none above.
        let (qpn, psn) = (Qpn::new(78), Psn::new(0));
        let (communicator, receive_share) = (1, None);
        let parent =
            FromController::ConnectParent { communicator, address, qpn, psn, receive_share };
        let failed = switch.obey(parent).unwrap().unwrap();
        assert!(matches!(failed, ToController::CommunicatorFailed { .. }), "{failed:?}");
        assert_eq!(held(&switch), (0, false));
    }

    #[test]
    fn a_node_whose_ports_have_heard_of_its_abort_is_gone_though_no_controller_is_there() {
        let (switch, address) = start();
        (1..4).for_each(|communicator| create(&switch, address, communicator));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let controller = listener.local_addr().unwrap();
        let (sender, _) = connect(
            controller,
            &Proofs::default(),
            PATIENCE,
            PATIENCE,
            &Learned::default(),
            |_| (),
        )
        .unwrap();
        sender.close();
        let (events, happened) = mpsc::channel();
        let abort = Abort::PeerLost { rank: 0 };
        for communicator in [3, 1] {
            events.send(SwitchEvent::Aborted { communicator, abort }).unwrap();
        }
        drop(events);
        switch.tell(happened, sender).unwrap();
        // The thread ends with the events.
        while Arc::weak_count(&switch) > 0 {
            thread::yield_now();
        }
        assert_eq!(held(&switch), (1, true));
        assert!(switch.nodes().keys().eq(&[2]));
    }
}
