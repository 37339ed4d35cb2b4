//! From a name and a number to a connected rank.

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_inc::protocol::{Awaited, FromController, Hello, Plan, Resume, ToController};
use millstream_inc::{HostConfig, HostWorker};
use millstream_verbs::{Device, ProtectionDomain, Psn, QueuePairCapabilities};

use crate::control::{self, ReceiveError, Receiver, Sender};
use crate::engine::{Edge, Engine, EngineSlot, completion_queue};
use crate::memory::ControlBlock;
use crate::watcher::Watcher;
use crate::{JoinError, LONGEST};

/// How much longer than its own patience a rank waits for the controller to say what is missing.
const GRACE: Duration = Duration::from_secs(3);

/// The controller says every second what a rank waits for; who hears nothing for so long waits for
/// the controller.
const SILENCE: Duration = Duration::from_secs(2);

/// What a rank joins with.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// Where the controller listens.
    pub controller: SocketAddr,
    /// The group's name, the same on all ranks.
    pub group: String,
    /// How many ranks there are, the same on all: 1 to 65,536.
    pub world: u32,
    /// Which of them this is, from 0.
    pub rank: u32,
    /// The device that connects to the switch.
    pub device: Device,
    /// How long to wait for the other ranks and for a switch.
    pub timeout: Duration,
    /// How long a collective may take. Then the switch is asked whom it waits for, which takes up to 2 s, and the
    /// collective fails unless it ends meanwhile. Ranks that die are noticed at once; this is for ranks that live
    /// and do not call.
    pub call_timeout: Duration,
}

impl JoinConfig {
    /// With 30 s for the group, and 60 s for a collective.
    pub fn new(
        controller: SocketAddr,
        group: impl Into<String>,
        world: u32,
        rank: u32,
        device: &Device,
    ) -> Self {
        Self {
            controller,
            group: group.into(),
            world,
            rank,
            device: device.clone(),
            timeout: Duration::from_secs(30),
            call_timeout: Duration::from_secs(60),
        }
    }
}

/// What a rank waits for while it joins.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Waiting {
    /// What its group lacks. `None` when the controller does not say: it is silent.
    pub awaited: Option<Awaited>,
    /// How long it still waits before it gives up.
    pub left: Duration,
}

/// A connected rank.
pub(crate) struct Joined {
    pub(crate) engine: Arc<Engine>,
    pub(crate) watcher: Watcher,
    pub(crate) sender: Arc<Sender>,
    pub(crate) domain: ProtectionDomain,
    pub(crate) plan: Plan,
}

pub(crate) fn join(
    config: &JoinConfig,
    waiting: &mut dyn FnMut(&Waiting),
) -> Result<Joined, JoinError> {
    let &JoinConfig { controller, ref device, timeout, .. } = config;
    let silent = |left| waiting(&Waiting { awaited: None, left });
    let (sender, receiver) = control::connect(controller, timeout, SILENCE, silent)
        .map_err(|source| JoinError::Unreachable { controller, source })?;
    let limit = timeout.saturating_add(GRACE).min(LONGEST);
    let deadline = Instant::now() + limit;
    let mut talk = Talk { controller, sender, receiver, deadline, limit, waiting };
    talk.send(&ToController::Join(Hello {
        group: config.group.clone(),
        world: config.world,
        rank: config.rank,
        address: device.address(),
        timeout_ms: timeout.as_millis().try_into().unwrap_or(u64::MAX),
    }))?;
    let (mut switch, segment_bytes, window) = match talk.next()? {
        FromController::GroupReady { switch_address, segment_bytes, window } => {
            (switch_address, segment_bytes, window)
        }
        message => return Err(talk.unexpected(&message)),
    };

    let domain = device.allocate_protection_domain();
    let control = ControlBlock::new(&domain)?;
    let path_mtu_to =
        |switch| device.path_mtu(switch).map_err(|source| JoinError::Path { switch, source });
    let path_mtu = path_mtu_to(switch)?;
    let host = HostConfig {
        segment_bytes,
        window,
        control_key: control.operand().local_key,
        control_address: control.operand().address,
        rank: config.rank,
        world: config.world,
        path_mtu,
    };
    // Before anybody waits for this rank.
    HostWorker::new(host)?;
    let capabilities = QueuePairCapabilities::new(
        host.required_send_requests() as usize,
        host.required_receive_requests() as usize,
    );
    let QueuePairCapabilities { max_send_requests, max_receive_requests, .. } = capabilities;
    let slot = EngineSlot::default();
    let completions = completion_queue(device, max_send_requests + max_receive_requests, &slot)?;
    let pair = domain.create_queue_pair(&completions, &completions, capabilities)?;
    let qpn = pair.number();
    let psn = Psn::from_extended(RandomState::new().hash_one(qpn.value()));
    talk.send(&ToController::Connect { qpn, psn, path_mtu })?;
    let plan = loop {
        match talk.next()? {
            FromController::Plan(plan) => break plan,
            // A switch has refused the tree, and this is another one.
            FromController::GroupReady { switch_address, .. } => {
                switch = switch_address;
                let path_mtu = path_mtu_to(switch)?;
                talk.send(&ToController::Connect { qpn, psn, path_mtu })?;
            }
            message => return Err(talk.unexpected(&message)),
        }
    };
    let worker = HostWorker::new(HostConfig { path_mtu: plan.path_mtu, ..host })?;
    let engine = Engine::new(worker, control, pair, device.clone(), switch, &slot);
    engine.connect(&Edge { qpn: plan.qpn, psn: plan.psn, path_mtu: plan.path_mtu }, psn)?;

    let Talk { sender, receiver, .. } = talk;
    let sender = Arc::new(sender);
    let resume = Resume {
        term: 0,
        group: config.group.clone(),
        identity: plan.group,
        communicator: plan.communicator,
        world: config.world,
        rank: config.rank,
        address: device.address(),
        departed: false,
    };
    let watcher =
        Watcher::start(Arc::clone(&engine), Arc::clone(&sender), receiver, controller, resume)
            .map_err(JoinError::Thread)?;
    Ok(Joined { engine, watcher, sender, domain, plan })
}

/// The conversation until the plan is there.
struct Talk<'a> {
    controller: SocketAddr,
    sender: Sender,
    receiver: Receiver,
    deadline: Instant,
    limit: Duration,
    /// Called with what the rank waits for.
    waiting: &'a mut dyn FnMut(&Waiting),
}

impl Talk<'_> {
    fn send(&self, message: &ToController) -> Result<(), JoinError> {
        let controller = self.controller;
        self.sender.send(message).map_err(|source| JoinError::Lost { controller, source })
    }

    fn next(&mut self) -> Result<FromController, JoinError> {
        let controller = self.controller;
        loop {
            match self.receiver.receive(self.deadline.min(Instant::now() + SILENCE)) {
                Ok(FromController::Ping) => self.send(&ToController::Pong)?,
                Ok(FromController::Waiting { awaited, left_ms }) => {
                    let left = Duration::from_millis(left_ms);
                    (self.waiting)(&Waiting { awaited: Some(awaited), left });
                }
                Ok(FromController::Refused { reason }) => return Err(JoinError::Refused(reason)),
                Ok(message) => return Ok(message),
                Err(ReceiveError::TimedOut) if Instant::now() < self.deadline => {
                    let left = self.deadline.saturating_duration_since(Instant::now());
                    (self.waiting)(&Waiting { awaited: None, left });
                }
                Err(ReceiveError::TimedOut) => {
                    return Err(JoinError::Timeout { controller, limit: self.limit });
                }
                Err(ReceiveError::Frame(error)) => {
                    return Err(JoinError::frame(controller, &error));
                }
                Err(ReceiveError::Io(source)) => {
                    return Err(JoinError::Lost { controller, source });
                }
                Err(error @ (ReceiveError::Stale { .. } | ReceiveError::Term(_))) => {
                    return Err(JoinError::Protocol { controller, detail: error.to_string() });
                }
            }
        }
    }

    fn unexpected(&self, message: &FromController) -> JoinError {
        let detail = format!("it sent {message:?} out of turn");
        JoinError::Protocol { controller: self.controller, detail }
    }
}
