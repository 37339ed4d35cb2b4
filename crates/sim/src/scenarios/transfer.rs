//! Two hosts exchange SENDs, WRITEs and READs of random sizes over faulty links. Every byte is
//! compared: those of an operation when it completes, all of the buffers at the end.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;

use millstream_roce::{
    Access, CompletionQueueId, CompletionStatus, Endpoint, EndpointConfig, IcrcCheck, Instant,
    OwnedMemory, ProtectionDomainId, QueuePairCapabilities, QueuePairConfig,
};
use millstream_wire::{Psn, Qpn};

use super::{NetworkCounts, Outputs, PATIENT, Parameters, Report, ScenarioError, within};
use crate::connection::{ConnectionOptions, Remote, connect};
use crate::peer::{Buffer, News, Receiving, Sending};
use crate::plan::{Kind, Operation, Plan};
use crate::{HostOptions, LinkId, LinkOptions, NodeId, Outcome, Peer, Rng, Simulation};

/// What targets are filled with: what must still be there where nothing was to be written.
const UNTOUCHED: u8 = 0xa5;
const DOMAIN: ProtectionDomainId = ProtectionDomainId(1);

/// How a transfer is set up.
#[derive(Clone, Debug)]
pub struct TransferOptions {
    /// Decides everything random.
    pub seed: u64,
    /// Queue pairs between the hosts; they share the links.
    pub connections: usize,
    /// Operations per connection and direction.
    pub operations: usize,
    /// Kinds of operations to draw from.
    pub kinds: Vec<Kind>,
    /// The longest operation, in bytes.
    pub max_length: u32,
    /// All lengths are multiples of this; unless it is 1, none is 0.
    pub length_unit: u32,
    /// All operations have the longest length, and are signaled.
    pub uniform: bool,
    /// Both hosts start operations.
    pub both_ways: bool,
    /// Each direction's link.
    pub link: LinkOptions,
    /// How the hosts send and receive.
    pub host: HostOptions,
    /// How they check the ICRC.
    pub icrc: IcrcCheck,
    /// Whether they have IPv6 addresses.
    pub ipv6: bool,
    /// The rules of all connections.
    pub connection: ConnectionOptions,
    /// Packet sequence number that all connections start with; random when `None`.
    pub first_psn: Option<Psn>,
    /// Packets of 4096 bytes in flight per connection.
    pub max_window: u32,
    /// What the endpoints take their receive buffers for, if not for endless.
    pub receive_budget: Option<u64>,
    /// Send requests outstanding per connection.
    pub send_depth: usize,
    /// Receive requests posted per connection.
    pub receive_depth: usize,
    /// How long after one was consumed the next receive request is posted.
    pub receive_lag: Duration,
    /// Virtual time within which everything must have ended.
    pub time_limit: Duration,
}

impl Default for TransferOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            connections: 1,
            operations: 100,
            kinds: Kind::ALL.to_vec(),
            max_length: 20_000,
            length_unit: 1,
            uniform: false,
            both_ways: true,
            link: LinkOptions::default(),
            host: HostOptions::default(),
            icrc: IcrcCheck::Exact,
            ipv6: false,
            connection: ConnectionOptions::default(),
            first_psn: None,
            max_window: 128,
            receive_budget: None,
            send_depth: 32,
            receive_depth: 16,
            receive_lag: Duration::ZERO,
            time_limit: Duration::from_secs(120),
        }
    }
}

/// A transfer, ready to run.
pub struct Transfer<'a> {
    /// The network; faults may be added before it runs.
    pub simulation: Simulation<'a, Peer>,
    /// The hosts.
    pub hosts: [NodeId; 2],
    /// The links from the first host to the second, and back.
    pub links: [LinkId; 2],
    /// The queue pairs of each connection, by host.
    pub queue_pairs: Vec<[Qpn; 2]>,
    flows: Vec<Flow>,
    time_limit: Duration,
    finished_at: Option<Instant>,
}

/// One direction of one connection.
struct Flow {
    initiator: NodeId,
    responder: NodeId,
    channel: usize,
    sending: Sending,
    /// Operations whose bytes were compared.
    compared: usize,
}

impl<'a> Transfer<'a> {
    /// Makes the hosts, connects their queue pairs, and draws the plans.
    ///
    /// # Panics
    /// When the options are more than an endpoint can hold.
    pub fn new(options: &TransferOptions) -> Self {
        let mut rng = Rng::fork(options.seed, u64::MAX);
        let addresses: [IpAddr; 2] = if options.ipv6 {
            [1, 2].map(|host| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host).into())
        } else {
            [1, 2].map(|host| Ipv4Addr::new(10, 0, 0, host).into())
        };
        let mut builders = addresses.map(|address| Builder::new(address, rng.bits(), options));
        let mut flows = Vec::new();
        let mut queue_pairs = Vec::new();
        for channel in 0..options.connections {
            let qpns = builders.each_mut().map(|builder| builder.queue_pair(options));
            let psns: [Psn; 2] = core::array::from_fn(|_| {
                let random = Psn::new(rng.bits() as u32);
                options.first_psn.unwrap_or(random)
            });
            let mut sendings = [Sending::default(), Sending::default()];
            for from in 0..2 {
                let to = 1 - from;
                let remote = Remote {
                    address: addresses[to],
                    qpn: qpns[to],
                    send_psn: psns[from],
                    receive_psn: psns[to],
                    receive_share: None,
                };
                let endpoint = builders[from].peer.endpoint_mut();
                connect(endpoint, qpns[from], &remote, &options.connection);
                if from == 0 || options.both_ways {
                    let plan = draw_plan(&mut rng, options);
                    let length = plan.buffer_length.max(1);
                    sendings[from] = Sending {
                        plan,
                        source: builders[from].source(&mut rng, length),
                        target: builders[from].target(length),
                        remote_source: builders[to].source(&mut rng, length),
                        remote_target: builders[to].target(length),
                    };
                }
            }
            for from in 0..2 {
                let (sending, opposite) = (sendings[from].clone(), &sendings[1 - from]);
                let receiving = Receiving {
                    plan: opposite.plan.clone(),
                    target: opposite.remote_target,
                    depth: options.receive_depth,
                    lag: options.receive_lag,
                };
                flows.push(Flow {
                    initiator: NodeId(from),
                    responder: NodeId(1 - from),
                    channel,
                    sending: sending.clone(),
                    compared: 0,
                });
                builders[from].peer.add_channel(qpns[from], sending, receiving);
            }
            queue_pairs.push(qpns);
        }
        let mut simulation = Simulation::new(options.seed);
        let hosts = builders
            .map(|builder| simulation.add_machine(builder.address, builder.peer, options.host));
        let links = simulation.connect(hosts[0], hosts[1], options.link);
        Self {
            simulation,
            hosts,
            links,
            queue_pairs,
            flows,
            time_limit: options.time_limit,
            finished_at: None,
        }
    }

    /// Runs until every operation has ended and the network is at rest. What does not hold is in
    /// [`Simulation::violations`] afterwards.
    pub fn run(&mut self) {
        let Self { simulation, flows, .. } = self;
        let deadline = simulation.after(self.time_limit);
        let outcome = simulation.run_until(deadline, |simulation| {
            follow(simulation, flows);
            simulation.machines().all(Peer::is_finished)
        });
        match outcome {
            Outcome::Done => {}
            Outcome::Violated => return,
            Outcome::Quiet | Outcome::Deadline => {
                let hosts = simulation.machines();
                let open: Vec<String> = hosts.flat_map(|peer| peer.unfinished()).collect();
                for what in open {
                    simulation.violate(format!("not finished ({outcome:?}): {what}"));
                }
                return;
            }
        }
        self.finished_at = Some(simulation.now());
        // At rest nothing is left: no timers, no packets.
        let deadline = simulation.after(self.time_limit);
        let outcome = simulation.run_until(deadline, |simulation| {
            follow(simulation, flows);
            false
        });
        match outcome {
            Outcome::Quiet => compare_all(simulation, flows),
            Outcome::Violated => {}
            _ => simulation.violate("all is done, yet timers or packets go on".into()),
        }
    }

    /// Virtual time until the last operation ended, if all did.
    pub fn finished_at(&self) -> Option<Instant> {
        self.finished_at
    }

    /// Bytes of all operations.
    pub fn bytes(&self) -> u64 {
        self.flows.iter().map(|flow| flow.sending.plan.bytes()).sum()
    }

    /// How many operations there are.
    pub fn operations(&self) -> u64 {
        self.flows.iter().map(|flow| flow.sending.plan.operations.len() as u64).sum()
    }

    /// What there is to tell.
    pub fn report(&self, scenario: &'static str, seed: u64) -> Report {
        let simulation = &self.simulation;
        let host = |peer: &Peer| (peer.endpoint().config().address.to_string(), *peer.counters());
        let failed = (0..self.queue_pairs.len())
            .filter(|&channel| (0..2).any(|host| self.failure(host, channel).is_some()))
            .count();
        let connections = self.queue_pairs.len();
        Report {
            scenario,
            seed,
            digest: simulation.digest(),
            what: format!(
                "2 hosts, {connections} connections ({failed} failed), {} operations",
                self.operations()
            ),
            bytes: self.bytes(),
            virtual_time: Duration::from_nanos(self.finished_at.map_or(0, Instant::nanos)),
            network: NetworkCounts::of(simulation),
            devices: simulation.machines().map(host).collect(),
            violations: simulation.violations().to_vec(),
            table: None,
        }
    }

    /// Objects to connections that failed, for runs in which none may.
    pub fn expect_no_failure(&mut self) {
        for channel in 0..self.queue_pairs.len() {
            for host in 0..2 {
                if let Some((at, status)) = self.failure(host, channel) {
                    self.simulation
                        .violate(format!("connection {channel} failed at {at} s: {status}"));
                }
            }
        }
    }

    /// When and how a connection first failed at a host.
    pub fn failure(&self, host: usize, channel: usize) -> Option<(Instant, CompletionStatus)> {
        self.simulation.machine(self.hosts[host]).failure(channel)
    }
}

/// The scenario `transfer`.
pub(super) fn scenario(
    parameters: &Parameters,
    outputs: Outputs<'_>,
) -> Result<Report, ScenarioError> {
    let length = within("length", parameters.length, 64 << 10, 0, 1 << 30)?;
    let options = TransferOptions {
        seed: parameters.seed,
        connections: within("connections", parameters.connections, 4, 1, 1024)? as usize,
        operations: within("operations", parameters.operations, 100, 1, 1 << 20)? as usize,
        max_length: length as u32,
        // Wireshark tries a dozen protocols on every payload, and where one of them wants to see
        // more bytes than there are, calls the packet malformed. Here captures are to be looked
        // at; odd and empty messages are for the swarm.
        length_unit: 64,
        connection: PATIENT,
        link: parameters.link()?,
        time_limit: Duration::from_secs(3600),
        ..TransferOptions::default()
    };
    let mut transfer = Transfer::new(&options);
    outputs.attach(&mut transfer.simulation)?;
    transfer.run();
    transfer.expect_no_failure();
    transfer.simulation.finish()?;
    Ok(transfer.report("transfer", parameters.seed))
}

fn draw_plan(rng: &mut Rng, options: &TransferOptions) -> Plan {
    let TransferOptions { operations, kinds, max_length, length_unit, .. } = options;
    match kinds.first() {
        Some(kind) if options.uniform => Plan::uniform(*operations, *kind, *max_length),
        Some(_) => Plan::random(rng, *operations, kinds, *max_length, *length_unit),
        None => Plan::default(),
    }
}

/// Looks at what the applications have seen, and at the bytes that must be there by now.
fn follow(simulation: &mut Simulation<'_, Peer>, flows: &mut [Flow]) {
    for host in [NodeId(0), NodeId(1)] {
        if !simulation.machine(host).has_news() {
            continue;
        }
        for news in simulation.machine_mut(host).take_news() {
            let wrong = match news {
                News::Wrong(what) => Some(what),
                News::Failed { .. } => None,
                News::Completed { channel, operation } => flows
                    .iter_mut()
                    .find(|flow| flow.initiator == host && flow.channel == channel)
                    .and_then(|flow| {
                        let from = core::mem::replace(&mut flow.compared, operation + 1);
                        let done = &flow.sending.plan.operations[from..=operation];
                        done.iter().find_map(|operation| compare(simulation, flow, operation))
                    }),
                News::Received { channel, operation } => flows
                    .iter()
                    .find(|flow| flow.responder == host && flow.channel == channel)
                    .and_then(|flow| {
                        compare(simulation, flow, &flow.sending.plan.operations[operation])
                    }),
            };
            if let Some(what) = wrong {
                simulation.violate(what);
            }
        }
    }
}

/// The bytes of one operation that is complete. A host that came back from a crash has none.
fn compare(
    simulation: &Simulation<'_, Peer>,
    flow: &Flow,
    operation: &Operation,
) -> Option<String> {
    let [local, remote] = [flow.initiator, flow.responder].map(|host| simulation.machine(host));
    let sending = &flow.sending;
    let (source, target) = match operation.kind {
        Kind::Read => (remote.buffer(sending.remote_source), local.buffer(sending.target)),
        _ => (local.buffer(sending.source), remote.buffer(sending.remote_target)),
    };
    let (source, target) = (source.get(operation.range())?, target.get(operation.range())?);
    let differs = source.iter().zip(target).position(|(a, b)| a != b)?;
    Some(format!(
        "channel {}, {operation:?}: complete, but byte {differs} is not what was sent",
        flow.channel
    ))
}

/// All bytes of all targets: what was to be written, and nothing else.
fn compare_all(simulation: &mut Simulation<'_, Peer>, flows: &[Flow]) {
    let mut wrong = Vec::new();
    for flow in flows {
        let [local, remote] = [flow.initiator, flow.responder].map(|host| simulation.machine(host));
        let sending = &flow.sending;
        let whole = local.failure(flow.channel).is_none();
        for (source, target, reads) in [
            (remote.buffer(sending.remote_source), local.buffer(sending.target), true),
            (local.buffer(sending.source), remote.buffer(sending.remote_target), false),
        ] {
            if source.len() != target.len() {
                continue;
            }
            let mut expected = vec![UNTOUCHED; target.len()];
            for operation in &sending.plan.operations {
                if (operation.kind == Kind::Read) == reads {
                    // Of what a failed connection had under way, anything may have arrived.
                    let bytes = if whole { source } else { target };
                    expected[operation.range()].copy_from_slice(&bytes[operation.range()]);
                }
            }
            if let Some(at) = expected.iter().zip(target).position(|(a, b)| a != b) {
                wrong.push(format!(
                    "channel {} from host {}: byte {at} of the target is wrong at the end",
                    flow.channel, flow.initiator.0
                ));
            }
        }
    }
    wrong.into_iter().for_each(|what| simulation.violate(what));
}

/// A host that is being set up.
struct Builder {
    address: IpAddr,
    completions: CompletionQueueId,
    peer: Peer,
    regions: u64,
}

impl Builder {
    fn new(address: IpAddr, seed: u64, options: &TransferOptions) -> Self {
        let config = EndpointConfig {
            icrc: options.icrc,
            max_window: options.max_window,
            ..EndpointConfig::new(address, seed)
        };
        let memory = OwnedMemory::new(options.connections * 4);
        let mut endpoint = Endpoint::new(config, memory);
        if let Some(bytes) = options.receive_budget {
            endpoint.set_receive_budget(bytes);
        }
        let depth = options.send_depth + options.receive_depth;
        let completions = endpoint
            .create_completion_queue(depth * options.connections)
            .expect("the connections are few enough for one completion queue");
        Self { address, completions, peer: Peer::new(endpoint, completions), regions: 0 }
    }

    fn queue_pair(&mut self, options: &TransferOptions) -> Qpn {
        let config = QueuePairConfig::new(
            DOMAIN,
            self.completions,
            QueuePairCapabilities::new(options.send_depth, options.receive_depth),
        );
        self.peer.endpoint_mut().create_queue_pair(&config).expect("the options fit a device")
    }

    /// A region of random bytes that the peer may read.
    fn source(&mut self, rng: &mut Rng, length: usize) -> Buffer {
        let mut bytes = vec![0; length];
        rng.fill(&mut bytes);
        self.register(Access::REMOTE_READ, bytes)
    }

    /// A region that the peer may write.
    fn target(&mut self, length: usize) -> Buffer {
        self.register(Access::LOCAL_WRITE | Access::REMOTE_WRITE, vec![UNTOUCHED; length])
    }

    fn register(&mut self, access: Access, bytes: Vec<u8>) -> Buffer {
        self.regions += 1;
        // Not aligned to anything, and far apart.
        let address = (self.regions << 32) + 13;
        let memory = self.peer.endpoint_mut().memory_mut();
        let key =
            memory.register(DOMAIN, address, access, bytes).expect("room was made for all regions");
        Buffer { key, address }
    }
}
