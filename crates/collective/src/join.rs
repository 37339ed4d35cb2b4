//! From a name and a number to a connected rank.

mod config;
mod leader;
mod share;
mod talk;
#[cfg(test)]
mod tests;
mod trees;

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use millstream_inc::controllers::Search;
use millstream_inc::protocol::{
    Awaited, Failover, FallbackOffer, FromController, GroupIdentity, Hello, HostQueuePair,
    LostSwitch, Refusal, Resume, SameMachine, ToController,
};
use millstream_inc::{CommunicatorOptions, HostConfig, HostWorker, MAX_TREES};
use millstream_verbs::{Device, PortAddress, Psn};

use crate::JoinError;
use crate::control::Sender;
use crate::coordinator::Rendezvous;
use crate::engine::{Edge, Engine, EngineSlot, MAX_STARTED};
use crate::failover::OnWire;
use crate::hosted::{self, HostedSwitch};
use crate::joining::{Cancellation, IsTaken, Joining, Learned};
use crate::local::Forming;
use crate::memory::Domains;
use crate::path::{Path, Way};
use crate::tree::{Link, Tree};
use crate::watcher::{Watched, Watcher};
use leader::{Opening, find};
use share::{labelled, local_of, meeting, members, share};
use talk::Talk;
use trees::{TreeEnd, all_switches};

pub use config::JoinConfig;

/// Between turns to all controllers, of which none leads, and between questions whether there is room.
const PAUSE: Duration = Duration::from_millis(500);

/// How long what others have is asked for: a run before this one may be about to end, or its death be noticed. Who answers
/// no question is given up after 4 s.
const TAKEN: Duration = Duration::from_secs(6);

/// Before the second of these questions. The pauses are doubled, up to [`PAUSE`].
const RETRY: Duration = Duration::from_millis(50);

/// What a rank waits for while it joins.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Waiting {
    /// What its group lacks. `None` when the controller does not say: it is silent, or has refused this rank for now.
    pub awaited: Option<Awaited>,
    /// Why the controller has refused this rank, which asks again: others are to let go of something first.
    pub refused: Option<Refusal>,
    /// How long it still waits before it gives up.
    pub left: Duration,
}

/// A connected rank.
pub(crate) struct Joined {
    /// That of a rank that is on the wire, whether for itself or for its host; else the memory that it shares.
    pub(crate) way: Way,
    /// What is to be done before it can be used, if the rank shares memory and did not before.
    pub(crate) forming: Option<Forming>,
    pub(crate) watcher: Watcher,
    pub(crate) sender: Arc<Sender>,
    pub(crate) domains: Domains,
    /// Name and address of the switch of each tree.
    pub(crate) switches: Vec<(String, IpAddr)>,
    /// Why the ranks' own processes take the place of switches, if they do.
    pub(crate) fallback: Option<String>,
    /// That of this process.
    pub(crate) hosted: Option<Arc<HostedSwitch>>,
    /// What becomes of it when a switch is lost.
    pub(crate) failover: Failover,
    /// The group's, and the communicator's number.
    pub(crate) identity: (GroupIdentity, u64),
    /// Which processes the switches of its trees are, those first that it is connected to.
    pub(crate) processes: Vec<LostSwitch>,
    /// Where the ranks meet when a switch is lost and no controller is there.
    pub(crate) rendezvous: Option<Rendezvous>,
}

/// Joins. Where the controller has no room now, the rank asks again for as long as the group may take; where others have
/// what it asks for, for some seconds of that.
pub(crate) fn join(
    config: &JoinConfig,
    is_taken: IsTaken,
    waiting: &mut dyn FnMut(&Waiting),
) -> Result<Joined, JoinError> {
    join_at(config, Device::port_address, is_taken, waiting)
}

/// The same, with ports that are there.
fn join_at(
    config: &JoinConfig,
    port: impl Fn(&Device) -> PortAddress,
    is_taken: IsTaken,
    waiting: &mut dyn FnMut(&Waiting),
) -> Result<Joined, JoinError> {
    let devices = [&config.device].into_iter().chain(&config.more_devices);
    if config.more_devices.len() >= MAX_TREES {
        return Err(JoinError::TooManyDevices { count: devices.count() });
    }
    check_ports(devices.clone().map(|it| (it.name(), port(it))))?;
    let mut joining = Joining {
        waiting,
        cancellation: &Cancellation::default(),
        is_taken,
        silence: None,
        prepares: true,
        avoid: &[],
        local: None,
        learned: &Learned::default(),
    };
    join_with(config, &Domains::of(devices), &mut joining)
}

/// Refuses ports of InfiniBand: switches speak RoCEv2 on IP networks.
fn check_ports<'a>(
    mut devices: impl Iterator<Item = (&'a str, PortAddress)>,
) -> Result<(), JoinError> {
    match devices.find(|(_, at)| at.is_infiniband()) {
        Some((device, _)) => Err(JoinError::InfiniBand { device: device.to_owned() }),
        None => Ok(()),
    }
}

/// As above, with protection domains that there are, one for each device.
pub(crate) fn join_with(
    config: &JoinConfig,
    domains: &Domains,
    joining: &mut Joining<'_>,
) -> Result<Joined, JoinError> {
    let start = Instant::now();
    let taken_until = start + TAKEN.min(config.timeout);
    let mut patience = config.timeout;
    let (mut refused, mut retry) = (None, RETRY);
    loop {
        let joined = join_once(config, domains, patience, joining);
        if joined.is_err() {
            // The controller is to see at once that the attempt is over.
            joining.cancellation.watch(None);
        }
        let left = config.timeout.saturating_sub(start.elapsed());
        let taken_for = taken_until.saturating_duration_since(Instant::now());
        let (reason, left, pause) = match (joined, refused) {
            (Err(JoinError::Refused(reason)), _) if reason.is_for_load() => (reason, left, PAUSE),
            (Err(JoinError::Refused(reason)), _)
                if (joining.is_taken)(&reason, config.device.address()) && !taken_for.is_zero() =>
            {
                let pause = retry;
                retry = PAUSE.min(2 * retry);
                (reason, taken_for, pause)
            }
            // For what was short it did not fail.
            (Err(_), Some(reason)) if patience < PAUSE => return Err(JoinError::Refused(reason)),
            (joined, _) => return joined,
        };
        (joining.waiting)(&Waiting { awaited: None, refused: Some(reason.clone()), left });
        thread::sleep(pause.min(left));
        patience = config.timeout.saturating_sub(start.elapsed());
        if patience.is_zero() || joining.cancellation.is_canceled() {
            return Err(JoinError::Refused(reason));
        }
        refused = Some(reason);
    }
}

fn join_once(
    config: &JoinConfig,
    domains: &Domains,
    patience: Duration,
    joining: &mut Joining<'_>,
) -> Result<Joined, JoinError> {
    let devices: Vec<&Device> = [&config.device].into_iter().chain(&config.more_devices).collect();
    let more_addresses: Vec<IpAddr> =
        config.more_devices.iter().map(|device| device.address()).collect();
    let meeting = meeting(config.path)?;
    let same_machine = meeting.as_ref().map(|meeting| SameMachine {
        host: labelled(&meeting.host, &config.host_label),
        socket: meeting.door.name().to_owned(),
        required: config.path == Path::SharedMemory,
    });
    let fallback = hosted::offer(&config.device, config.fallback);
    let opens = joining.prepares && config.rank == 0 && fallback == FallbackOffer::Able;
    let rendezvous = opens.then(|| open_rendezvous(&config.device)).flatten();
    let hello = Hello {
        group: config.group.clone(),
        world: config.world,
        rank: config.rank,
        address: config.device.address(),
        timeout_ms: 0,
        more_addresses: more_addresses.clone(),
        same_machine,
        options: CommunicatorOptions { reproducible: config.reproducible, plain: false },
        fallback,
        meeting: rendezvous.as_ref().map(|rendezvous| Box::new(rendezvous.point)),
        avoid: joining.avoid.to_vec(),
    };
    let mut search = Search::new(config.controllers.clone());
    search.learn(&joining.learned.all());
    let opening = find(config, patience, &hello, &mut search, joining)?;
    let Opening { sender, receiver, deadline, limit, answer } = opening;
    let (controller, silence, hosted) = (search.current(), joining.silence, None);
    let answer_by = silence.map(|silence| Instant::now() + silence);
    let waiting = &mut *joining.waiting;
    let mut talk =
        Talk { controller, sender, receiver, deadline, limit, answer_by, silence, waiting, hosted };
    let (mut trees, segment_bytes, window) = match answer {
        FromController::GroupReady {
            switch_address,
            segment_bytes,
            window,
            more_switches,
            hosts,
        } => {
            let switches = all_switches(switch_address, more_switches);
            (talk.trees(config, &devices, switches, hosts)?, segment_bytes, window)
        }
        message => match (message, &meeting) {
            (FromController::SharedMemory(plan), Some(_)) => {
                return share(config, domains, talk, search, plan, meeting, joining.local);
            }
            (message, _) => return Err(talk.unexpected(&message)),
        },
    };

    let mut host = HostConfig {
        segment_bytes,
        window,
        control_key: 0,
        control_address: 0,
        rank: config.rank,
        world: config.world,
        path_mtu: trees.path_mtu()?,
    };
    // Before anybody waits for this rank.
    HostWorker::new(host)?;
    let slot = EngineSlot::default();
    // Another plan, after a switch has refused the first, may have more trees.
    let mut ends: Vec<TreeEnd> = Vec::new();
    let plan = loop {
        let ways = trees.devices().zip(domains.each()[..trees.devices.len()].iter().cycle());
        for (tree, (device, domain)) in ways.enumerate().skip(ends.len()) {
            ends.push(TreeEnd::new(device, domain, &host, &slot, tree)?);
        }
        let mut pairs = ends[..trees.switches.len()].iter().map(TreeEnd::described);
        let Some(HostQueuePair { qpn, psn, receive_share }) = pairs.next() else {
            unreachable!("there is a switch, and an end for each")
        };
        let (path_mtu, more) = (trees.path_mtu()?, pairs.collect());
        talk.send(&ToController::Connect { qpn, psn, path_mtu, receive_share, more })?;
        match talk.next()? {
            FromController::Plan(plan) => break plan,
            // A switch has refused a tree, and these are others, whose nodes may have more children.
            FromController::GroupReady {
                switch_address,
                segment_bytes,
                more_switches,
                hosts,
                ..
            } => {
                host.segment_bytes = segment_bytes;
                HostWorker::new(host)?;
                let switches = all_switches(switch_address, more_switches);
                let others = talk.trees(config, &devices, switches, hosts)?;
                if others.fallback != trees.fallback {
                    // Further trees may be on other devices.
                    ends.truncate(1);
                }
                trees = others;
            }
            message => return Err(talk.unexpected(&message)),
        }
    };
    if plan.more.len() + 1 != trees.switches.len() {
        let (found, wanted) = (plan.more.len() + 1, trees.switches.len());
        let detail = format!("its plan has {found} trees, after {wanted} switches");
        return Err(JoinError::Protocol { controller, detail });
    }
    let members = match (plan.ranks.is_empty(), &meeting) {
        (true, _) => None,
        (false, Some(_)) => match members(config, controller, &plan.ranks)? {
            (0, members) => Some(members),
            (place, _) => {
                let detail = format!("its plan is for the {place} ranks before this one, too");
                return Err(JoinError::Protocol { controller, detail });
            }
        },
        (false, None) => {
            let detail = "it has this rank share memory, unasked".to_owned();
            return Err(JoinError::Protocol { controller, detail });
        }
    };
    ends.truncate(trees.switches.len());
    let path_mtu = plan.path_mtu;
    let edge = |qpn, psn, receive_share| Edge { qpn, psn, path_mtu, receive_share };
    let more = plan.more.iter().map(|tree| edge(tree.qpn, tree.psn, tree.receive_share));
    let edges = [edge(plan.qpn, plan.psn, plan.receive_share)].into_iter().chain(more);
    let psns: Vec<Psn> = ends.iter().map(|end| end.psn).collect();
    let mut connected = Vec::new();
    for ((end, &switch), device) in ends.into_iter().zip(&trees.switches).zip(trees.devices()) {
        let TreeEnd { control, pair, receive_share, .. } = end;
        let (control_key, control_address) = control.place();
        let host = HostConfig { path_mtu, control_key, control_address, ..host };
        let worker = HostWorker::of_ranks(host, plan.ranks.clone())?;
        let tree = Tree::new(worker, control, MAX_STARTED);
        let (device, receive_share) = (device.clone(), Mutex::new(receive_share));
        connected.push((tree, Link { pair, device, switch, receive_share }));
    }
    let engine = Engine::new(connected, trees.devices.len(), config.world, &slot);
    if plan.failover == Failover::On {
        engine.prepare_failover(config.keep_overwritten);
    }
    for ((tree, edge), psn) in edges.enumerate().zip(psns) {
        engine.connect(tree, &edge, psn)?;
    }

    let Talk { sender, receiver, hosted, deadline, .. } = talk;
    let hosted = match hosted {
        Some((switch, happened)) => {
            switch.tell(happened, Arc::clone(&sender)).map_err(JoinError::Thread)?;
            Some(switch)
        }
        None => None,
    };
    let resume = Resume {
        term: 0,
        group: config.group.clone(),
        identity: plan.group,
        communicator: plan.communicator,
        world: config.world,
        rank: config.rank,
        address: config.device.address(),
        departed: false,
        more_addresses,
    };
    let local = local_of(0, members, joining.local)
        .map_err(|detail| JoinError::Protocol { controller, detail })?;
    let goes_on = plan.failover != Failover::Off || joining.local.is_some();
    let watched: Box<dyn Watched> = match &local {
        None => Box::new(Arc::clone(&engine)),
        Some(local) if goes_on => {
            Box::new(OnWire { local: Arc::clone(local), engine: Arc::clone(&engine) })
        }
        Some(local) => {
            local.connect(Way::Switch(Arc::clone(&engine)));
            Box::new(Arc::clone(local))
        }
    };
    let heard = (Arc::clone(&sender), receiver);
    let watcher = Watcher::start(watched, heard, search, resume, hosted.clone())
        .map_err(JoinError::Thread)?;
    let way = Way::Switch(engine);
    let forming = match (local, meeting) {
        (Some(local), Some(meeting)) if joining.local.is_none() => {
            let socket = meeting.door.name().to_owned();
            Some(Forming { local, meeting, socket, deadline })
        }
        _ => None,
    };
    let neighbour = |address, incarnation| LostSwitch { address, incarnation: Some(incarnation) };
    let others = plan.more.iter().map(|tree| neighbour(tree.address, tree.incarnation));
    let neighbours: Vec<LostSwitch> =
        [neighbour(plan.address, plan.incarnation)].into_iter().chain(others).collect();
    sender.set_switches(&neighbours);
    let processes = [neighbours, plan.processes].concat();
    let listener = rendezvous.and_then(|rendezvous| rendezvous.listener);
    let rendezvous = plan.meeting.map(|point| Rendezvous { point: *point, listener });
    let more = plan.more.into_iter().map(|tree| (tree.switch, tree.address));
    let switches = [(plan.switch, plan.address)].into_iter().chain(more).collect();
    let (failover, identity) = (plan.failover, (plan.group, plan.communicator));
    let domains = match failover {
        Failover::Off => domains.first(trees.devices.len()),
        // Other trees may be on other devices.
        Failover::Reproducible | Failover::On => domains.clone(),
    };
    let fallback = trees.fallback;
    Ok(Joined {
        way,
        forming,
        watcher,
        sender,
        domains,
        switches,
        fallback,
        hosted,
        failover,
        identity,
        processes,
        rendezvous,
    })
}

/// Where this rank takes the place of the controller, should it have to.
fn open_rendezvous(device: &Device) -> Option<Rendezvous> {
    let opened = Rendezvous::open(device);
    let failed = |error: &io::Error| {
        tracing::debug!(%error, "without a controller, the ranks cannot meet here");
    };
    opened.inspect_err(failed).ok()
}
