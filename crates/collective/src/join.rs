//! From a name and a number to a connected rank.

mod share;
mod trees;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use millstream_inc::controllers::{Controllers, Search};
use millstream_inc::protocol::{
    Awaited, Failover, FallbackOffer, FromController, GroupIdentity, Hello, HostQueuePair,
    HostsTrees, LostSwitch, Refusal, Resume, SameMachine, ToController, shortened,
};
use millstream_inc::{CommunicatorOptions, HostConfig, HostWorker, MAX_TREES, SwitchEvent};
use millstream_net::tls::{self, CallerTls};
use millstream_net::token::Token;
use millstream_verbs::{Device, PortAddress, Psn};

use crate::control::{self, ConnectError, Proofs, ReceiveError, Receiver, Sender};
use crate::coordinator::Rendezvous;
use crate::engine::{Edge, Engine, EngineSlot, MAX_STARTED};
use crate::failover::OnWire;
use crate::hosted::{self, HostedSwitch};
use crate::joining::{Cancellation, Joining};
use crate::local::Forming;
use crate::memory::Domains;
use crate::path::{Path, Way};
use crate::tree::{Link, Tree};
use crate::watcher::{Watched, Watcher};
use crate::{JoinError, LONGEST};
use share::{labelled, local_of, meeting, members, share};
use trees::{TreeEnd, Trees, all_switches};

/// How much longer than its own patience a rank waits for the controller to say what is missing.
const GRACE: Duration = Duration::from_secs(3);

/// The controller says every second what a rank waits for; who hears nothing for so long waits for
/// the controller.
const SILENCE: Duration = Duration::from_secs(2);

/// Where there are other controllers to ask: how long one may take to say something.
const ANSWER: Duration = Duration::from_secs(2);

/// Between turns to all controllers, of which none leads, and between questions whether there is room.
const PAUSE: Duration = Duration::from_millis(500);

/// What a rank joins with.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// Where controllers listen. With several, the one that leads is looked for, for as long as the group may take.
    pub controllers: Controllers,
    /// The group's name, the same on all ranks.
    pub group: String,
    /// How many ranks there are, the same on all: 1 to 65,536.
    pub world: u32,
    /// Which of them this is, from 0.
    pub rank: u32,
    /// The device that connects to the switch.
    pub device: Device,
    /// Further devices, of other NICs: for each number of devices that all ranks have there is a tree of its own, if the
    /// network has one, and long vectors are divided among them. Up to 8 with the first.
    pub more_devices: Vec<Device>,
    /// By which way collectives may go.
    pub path: Path,
    /// Divides a machine: only ranks that say the same can be of one host, and share memory. Up to 32 bytes, none unless
    /// this was set.
    pub host_label: String,
    /// Sums, products and averages of floats do not depend on who comes first: the same calls on the same trees have
    /// the same bits. What one rank asks for, all have. Ranks that share memory always have it.
    pub reproducible: bool,
    /// Whether the ranks' own processes take the place of switches where there is none. One rank that does not want that
    /// decides for all: then they wait for a switch, and joining fails without one.
    pub fallback: bool,
    /// Whether copies are kept of what results overwrite in place: a window of segments for each tree, 2 MiB unless the
    /// controller says otherwise. Without, the loss of a switch ends a communicator during such a call, though there is
    /// fall-back. Of no meaning without fall-back.
    pub keep_overwritten: bool,
    /// How long to wait for the other ranks and for a switch, and for room at the controller.
    pub timeout: Duration,
    /// How long a collective may take. Then the switch is asked whom it waits for, which takes up to 2 s, and the
    /// collective fails unless it ends meanwhile. Ranks that die are noticed at once; this is for ranks that live
    /// and do not call.
    pub call_timeout: Duration,
    /// What the controller and this rank prove to each other that they have. Without, a controller that has tokens refuses
    /// this rank, and nobody proves that he is the controller.
    pub token: Option<Token>,
    /// TLS with the controller, which needs it then.
    pub tls: Option<CallerTls>,
}

impl JoinConfig {
    /// With 30 s for the group, and 60 s for a collective, and fall-back.
    pub fn new(
        controllers: impl Into<Controllers>,
        group: impl Into<String>,
        world: u32,
        rank: u32,
        device: &Device,
    ) -> Self {
        Self {
            controllers: controllers.into(),
            group: group.into(),
            world,
            rank,
            device: device.clone(),
            more_devices: Vec::new(),
            path: Path::Auto,
            host_label: String::new(),
            reproducible: false,
            fallback: true,
            keep_overwritten: true,
            timeout: Duration::from_secs(30),
            call_timeout: Duration::from_secs(60),
            token: None,
            tls: None,
        }
    }
}

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

/// Joins. Where the controller has no room now, the rank asks again for as long as the group may take.
pub(crate) fn join(
    config: &JoinConfig,
    waiting: &mut dyn FnMut(&Waiting),
) -> Result<Joined, JoinError> {
    join_at(config, Device::port_address, waiting)
}

/// The same, with ports that are there.
fn join_at(
    config: &JoinConfig,
    port: impl Fn(&Device) -> PortAddress,
    waiting: &mut dyn FnMut(&Waiting),
) -> Result<Joined, JoinError> {
    let devices = [&config.device].into_iter().chain(&config.more_devices);
    if config.more_devices.len() >= MAX_TREES {
        return Err(JoinError::TooManyDevices { count: devices.count() });
    }
    check_ports(devices.clone().map(|it| (it.name(), port(it))))?;
    let cancellation = Cancellation::default();
    let (silence, prepares, avoid, local) = (None, true, &[], None);
    let mut joining =
        Joining { waiting, cancellation: &cancellation, silence, prepares, avoid, local };
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
    let mut patience = config.timeout;
    let mut refused = None;
    loop {
        let joined = join_once(config, domains, patience, joining);
        if joined.is_err() {
            // The controller is to see at once that the attempt is over.
            joining.cancellation.watch(None);
        }
        let reason = match (joined, refused) {
            (Err(JoinError::Refused(reason)), _) if reason.is_for_load() => reason,
            // For what was short it did not fail.
            (Err(_), Some(reason)) if patience < PAUSE => return Err(JoinError::Refused(reason)),
            (joined, _) => return joined,
        };
        let left = config.timeout.saturating_sub(start.elapsed());
        (joining.waiting)(&Waiting { awaited: None, refused: Some(reason.clone()), left });
        thread::sleep(PAUSE.min(left));
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
        let device = device.clone();
        connected.push((tree, Link { pair, device, switch, _receive_share: receive_share }));
    }
    let engine = Engine::new(connected, trees.devices.len(), config.world, &slot);
    if plan.failover == Failover::On {
        engine.prepare_failover(config.keep_overwritten);
    }
    for ((tree, edge), psn) in edges.enumerate().zip(psns) {
        engine.connect(tree, &edge, psn)?;
    }

    let Talk { sender, receiver, hosted, deadline, .. } = talk;
    let sender = Arc::new(sender);
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
    if trees.fallback.is_none() {
        sender.set_switches(&neighbours);
    }
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

fn not_connected(controller: SocketAddr, limit: Duration, error: ConnectError) -> JoinError {
    match error {
        ConnectError::Io(source) => JoinError::Unreachable { controller, source },
        ConnectError::Refused(reason) => JoinError::Refused(reason),
        ConnectError::Tls(reason) => JoinError::Tls { controller, reason },
        ConnectError::Token(source) => JoinError::Token { controller, source },
        ConnectError::Receive(error) => not_received(controller, limit, error),
    }
}

fn not_received(controller: SocketAddr, limit: Duration, error: ReceiveError) -> JoinError {
    match error {
        ReceiveError::TimedOut => JoinError::Timeout { controller, limit },
        ReceiveError::Frame(error) => JoinError::frame(controller, &error),
        ReceiveError::Io(source) => match tls::reason(&source) {
            // Where it does not like our certificate, it says so after the handshake.
            Some(reason) => JoinError::Tls { controller, reason },
            None => JoinError::Lost { controller, source },
        },
        error @ ReceiveError::Term(_) => {
            JoinError::Protocol { controller, detail: error.to_string() }
        }
    }
}

/// The controller that leads is found, and the group complete.
struct Opening {
    sender: Sender,
    receiver: Receiver,
    deadline: Instant,
    limit: Duration,
    answer: FromController,
}

/// Joins the group at the controller that leads. Those that do not say so, and all are asked in turns.
fn find(
    config: &JoinConfig,
    patience: Duration,
    hello: &Hello,
    search: &mut Search,
    joining: &mut Joining<'_>,
) -> Result<Opening, JoinError> {
    let start = Instant::now();
    // What one has said that is there and does not lead.
    let mut refused = None;
    loop {
        let left = match search.has_others() {
            true => patience.saturating_sub(start.elapsed()),
            false => patience,
        };
        let (error, is_mute) = match attempt(config, hello, search, left, joining) {
            Ok(opening) => {
                search.found();
                return Ok(opening);
            }
            Err(failed) => failed,
        };
        let (is_turn_over, error) = match error {
            JoinError::Refused(Refusal::NotLeader { leader, detail }) => {
                let reason = Refusal::NotLeader { leader, detail };
                refused = Some(reason.clone());
                (search.follow(leader), JoinError::Refused(reason))
            }
            error if is_mute && search.has_others() => (search.advance(), error),
            error => return Err(error),
        };
        if is_turn_over {
            let left = patience.saturating_sub(start.elapsed());
            match &refused {
                Some(reason) if left.is_zero() => return Err(JoinError::Refused(reason.clone())),
                // Nobody is there at all.
                None => return Err(error),
                // Somebody will lead soon.
                Some(_) => {
                    (joining.waiting)(&Waiting { awaited: None, refused: None, left });
                    thread::sleep(PAUSE.min(left));
                    if joining.cancellation.is_canceled() {
                        return Err(error);
                    }
                }
            }
        }
    }
}

/// Asks one controller. The error says too whether it has said nothing at all.
fn attempt(
    config: &JoinConfig,
    hello: &Hello,
    search: &Search,
    left: Duration,
    joining: &mut Joining<'_>,
) -> Result<Opening, (JoinError, bool)> {
    let (controller, has_others) = (search.current(), search.has_others());
    let silence = joining.silence;
    let hurry = if has_others { Some(ANSWER) } else { silence };
    let patience = hurry.map_or(left, |hurry| left.min(hurry));
    let waiting = &mut *joining.waiting;
    let silent = |left| waiting(&Waiting { awaited: None, refused: None, left });
    let proofs = Proofs { tls: config.tls.clone(), token: config.token };
    let begun = Instant::now();
    let connected = control::connect(controller, &proofs, patience, SILENCE, silent);
    let (sender, receiver) = connected.map_err(|error| {
        // One that stands still proves nothing, and one that begins or ceases to lead closes all connections.
        let is_mute = match &error {
            ConnectError::Io(_) | ConnectError::Receive(ReceiveError::TimedOut) => true,
            ConnectError::Receive(ReceiveError::Io(error)) => tls::reason(error).is_none(),
            _ => false,
        };
        let error = match error {
            ConnectError::Io(source) if has_others => {
                let text = format!("{source} (one of {})", search.known());
                ConnectError::Io(io::Error::new(source.kind(), text))
            }
            error => error,
        };
        (not_connected(controller, patience, error), is_mute)
    })?;
    let now = Instant::now();
    let left = left.saturating_sub(now - begun);
    let limit = left.saturating_add(GRACE).min(LONGEST);
    let answer_by = hurry.map(|hurry| now + hurry);
    let deadline = now + limit;
    let hosted = None;
    joining.cancellation.watch(sender.line());
    let waiting = &mut *joining.waiting;
    let mut talk =
        Talk { controller, sender, receiver, deadline, limit, answer_by, silence, waiting, hosted };
    let timeout_ms = left.as_millis().try_into().unwrap_or(u64::MAX);
    let hello = ToController::Join(Hello { timeout_ms, ..hello.clone() });
    let answer = talk.send(&hello).and_then(|()| talk.next());
    match answer {
        Ok(answer) => {
            let Talk { sender, receiver, deadline, limit, .. } = talk;
            Ok(Opening { sender, receiver, deadline, limit, answer })
        }
        Err(error) => {
            let is_mute = talk.answer_by.is_some()
                && matches!(error, JoinError::Timeout { .. } | JoinError::Lost { .. });
            joining.cancellation.watch(None);
            Err((error, is_mute))
        }
    }
}

/// The conversation until the plan is there.
struct Talk<'a> {
    controller: SocketAddr,
    sender: Sender,
    receiver: Receiver,
    deadline: Instant,
    limit: Duration,
    /// Until then it must have said something, if there are others to ask and it has not.
    answer_by: Option<Instant>,
    /// How long it may say nothing after that.
    silence: Option<Duration>,
    /// Called with what the rank waits for.
    waiting: &'a mut dyn FnMut(&Waiting),
    /// The switch of this process, and what happens there, if it takes the place of one.
    hosted: Option<(Arc<HostedSwitch>, mpsc::Receiver<SwitchEvent>)>,
}

impl Talk<'_> {
    /// The trees that the controller has planned. Starts the switch of this process if they need it.
    fn trees<'a>(
        &mut self,
        config: &JoinConfig,
        devices: &'a [&'a Device],
        switches: Vec<IpAddr>,
        hosts: Option<HostsTrees>,
    ) -> Result<Trees<'a>, JoinError> {
        let (controller, count) = (self.controller, switches.len());
        let most = if hosts.is_some() { MAX_TREES } else { devices.len() };
        if count > most {
            let detail = format!("it has {count} trees, and there are at most {most}");
            return Err(JoinError::Protocol { controller, detail });
        }
        let Some(HostsTrees { reason, serves, addresses }) = hosts else {
            return Ok(Trees { switches, devices: &devices[..count], fallback: None });
        };
        let Some(devices) = devices.get(..addresses as usize).filter(|it| !it.is_empty()) else {
            let detail = format!("its trees use {addresses} of {} addresses", devices.len());
            return Err(JoinError::Protocol { controller, detail });
        };
        if !config.fallback {
            let detail = "it has this rank take the place of a switch, unasked".to_owned();
            return Err(JoinError::Protocol { controller, detail });
        }
        tracing::warn!(group = config.group, %reason, "no switch: the ranks take its place");
        if serves && self.hosted.is_none() {
            match HostedSwitch::start(&config.device) {
                Ok((switch, happened)) => self.hosted = Some((Arc::new(switch), happened)),
                Err(source) => {
                    let error = JoinError::Fallback { source };
                    self.send(&ToController::Fail {
                        reason: shortened(error.to_string()),
                        cause: None,
                    })?;
                    return Err(error);
                }
            }
        }
        let devices = &devices[..devices.len().min(count)];
        Ok(Trees { switches, devices, fallback: Some(shortened(reason)) })
    }

    fn send(&self, message: &ToController) -> Result<(), JoinError> {
        let controller = self.controller;
        self.sender.send(message).map_err(|source| JoinError::Lost { controller, source })
    }

    fn next(&mut self) -> Result<FromController, JoinError> {
        let controller = self.controller;
        loop {
            let until = self.deadline.min(Instant::now() + SILENCE);
            let until = self.answer_by.map_or(until, |by| until.min(by));
            let received = self.receiver.receive(until);
            if received.is_ok() {
                self.answer_by = self.silence.map(|silence| Instant::now() + silence);
            }
            match received {
                Ok(FromController::Ping) => self.send(&ToController::Pong)?,
                Ok(FromController::Waiting { awaited, left_ms }) => {
                    let left = Duration::from_millis(left_ms);
                    (self.waiting)(&Waiting { awaited: Some(awaited), refused: None, left });
                }
                Ok(FromController::Refused { reason }) => return Err(JoinError::Refused(reason)),
                Ok(message) => {
                    let Some((switch, _)) = &self.hosted else { return Ok(message) };
                    match switch.obey(message) {
                        Ok(Some(answer)) => self.send(&answer)?,
                        Ok(None) => {}
                        Err(message) => return Ok(*message),
                    }
                }
                Err(ReceiveError::TimedOut)
                    if self.answer_by.is_some_and(|by| Instant::now() >= by) =>
                {
                    let limit = self.silence.unwrap_or(ANSWER);
                    return Err(JoinError::Timeout { controller, limit });
                }
                Err(ReceiveError::TimedOut) if Instant::now() < self.deadline => {
                    let left = self.deadline.saturating_duration_since(Instant::now());
                    (self.waiting)(&Waiting { awaited: None, refused: None, left });
                }
                Err(error) => return Err(not_received(controller, self.limit, error)),
            }
        }
    }

    fn unexpected(&self, message: &FromController) -> JoinError {
        let detail = format!("it sent {message:?} out of turn");
        JoinError::Protocol { controller: self.controller, detail }
    }
}

#[cfg(test)]
mod tests {
    use millstream_verbs::SoftConfig;

    use super::*;

    #[test]
    fn a_rank_has_no_port_of_infiniband() {
        let port = |lid| PortAddress { ip: "fe80::1".parse().unwrap(), lid };
        assert!(check_ports([("mlx5_0", port(0)), ("mlx5_1", port(0))].into_iter()).is_ok());
        let refused = check_ports([("mlx5_0", port(0)), ("mlx5_1", port(7))].into_iter());
        let error = refused.unwrap_err().to_string();
        assert!(error.starts_with("mlx5_1 has a port of InfiniBand"), "{error}");
    }

    #[test]
    fn who_joins_with_a_port_of_infiniband_is_refused_before_anybody_is_asked() {
        let address = |last| IpAddr::from([127, 97, std::process::id() as u8, last]);
        let open = |last| Device::open_soft(&SoftConfig::new(address(last))).unwrap();
        let (first, second) = (open(1), open(2));
        // Nobody listens there.
        let controller = SocketAddr::new(address(3), 1);
        let mut config = JoinConfig::new(controller, "g", 1, 0, &first);
        config.more_devices.push(second.clone());
        let join = |infiniband: Option<&Device>| {
            let port = |device: &Device| match infiniband {
                Some(it) if it.name() == device.name() => {
                    PortAddress { ip: "fe80::1".parse().unwrap(), lid: 7 }
                }
                _ => device.port_address(),
            };
            join_at(&config, port, &mut |_| {}).err().unwrap()
        };
        for device in [&first, &second] {
            let error = join(Some(device));
            let named =
                matches!(&error, JoinError::InfiniBand { device: it } if it == device.name());
            assert!(named, "{error}");
        }
        let error = join(None);
        assert!(matches!(error, JoinError::Unreachable { .. }), "{error}");
    }
}
