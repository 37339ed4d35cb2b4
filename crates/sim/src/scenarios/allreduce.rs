//! Hosts sum vectors in a switch, over faulty links. Every element of every result on every rank
//! is compared with the sum.

use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;
use std::sync::Arc;

use millstream_inc::{
    CONTROL_BYTES, ChildSpec, Collective, CollectiveCall, CollectiveError, CommunicatorOptions,
    CommunicatorSpec, DataType, HostConfig, HostWorker, Mode, Ranks, ReduceOperation, SwitchConfig,
    SwitchEvent, SwitchNode, send_window_up,
};
use millstream_roce::{
    Access, CompletionQueueId, Endpoint, EndpointConfig, IcrcCheck, Instant, OwnedMemory,
    QueuePairCapabilities, QueuePairConfig,
};
use millstream_wire::{Psn, Qpn};

use super::{NetworkCounts, Outputs, PATIENT, Parameters, Report, ScenarioError, within};
use crate::connection::{ConnectionOptions, Remote, connect};
use crate::rank::{Call, DOMAIN, Participant, Rank, RankParts};
use crate::{HostOptions, LinkId, LinkOptions, NodeId, Outcome, Rng, Simulation};

/// What is behind every vector, and must stay.
const UNTOUCHED: [u8; 16] = [0xa5; 16];
const COMMUNICATOR: u64 = 1;
/// The address of rank 0: 10.0.1.1. Those of the others follow.
const FIRST_HOST: u32 = 0x0a00_0101;
/// The most hosts that a switch serves in one communicator.
const MAX_HOSTS: u32 = 64;

/// How an allreduce is set up.
#[derive(Clone, Debug)]
pub struct AllReduceOptions {
    /// Decides everything random.
    pub seed: u64,
    /// Hosts, 1 to 64.
    pub hosts: u32,
    /// Elements of each call's vector.
    pub counts: Vec<u64>,
    /// Whether every other call has its result in the place of its vector.
    pub in_place: bool,
    /// Bytes of a segment.
    pub segment_bytes: u32,
    /// Segments that a host may be ahead of its last result.
    pub window: u32,
    /// The longest that a host waits before it makes its next call.
    pub pause: Duration,
    /// What the receive buffer of a switch holds, which it divides among those that send to it; unlimited unless given.
    pub receive_budget: Option<u64>,
    /// The same of a host, whose only sender is its switch.
    pub host_budget: Option<u64>,
    /// Each direction of each host's link.
    pub link: LinkOptions,
    /// The same of links between switches, if they are others.
    pub uplink: Option<LinkOptions>,
    /// How the hosts and switches send and receive, unless `switch` says another thing.
    pub host: HostOptions,
    /// How the switch does, if it does otherwise.
    pub switch: Option<HostOptions>,
    /// The rules of the connections; the switch uses their timeout too.
    pub connection: ConnectionOptions,
    /// How long a call may take until its caller gives it up.
    pub call_limit: Duration,
    /// Virtual time within which every call must have ended.
    pub time_limit: Duration,
}

impl Default for AllReduceOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            hosts: 8,
            counts: vec![0, 1, 255, 256, 1023, 16_384],
            in_place: false,
            segment_bytes: 4096,
            window: 32,
            pause: Duration::from_micros(50),
            link: LinkOptions::default(),
            uplink: None,
            host: HostOptions::default(),
            switch: None,
            receive_budget: None,
            host_budget: None,
            connection: ConnectionOptions { reads: 0, ..ConnectionOptions::default() },
            call_limit: Duration::from_secs(5),
            time_limit: Duration::from_secs(600),
        }
    }
}

/// An allreduce, ready to run.
pub struct Reduction<'a> {
    /// The network; faults may be added before it runs.
    pub simulation: Simulation<'a, Participant>,
    /// The switch.
    pub switch: NodeId,
    /// The hosts, by rank.
    pub hosts: Vec<NodeId>,
    /// The links from each host to the switch, and back.
    pub links: Vec<[LinkId; 2]>,
    options: AllReduceOptions,
    finished_at: Option<Instant>,
}

impl<'a> Reduction<'a> {
    /// Makes the switch, the hosts, their connections and their vectors.
    ///
    /// # Panics
    /// When the options are more than an endpoint or a switch can hold.
    pub fn new(options: &AllReduceOptions) -> Self {
        let mut rng = Rng::fork(options.seed, u64::MAX);
        let mut simulation = Simulation::new(options.seed);
        // Of hosts that reduce in place, and of the switch: it uses a slot again when a child's
        // next contribution shows that the child has the result, though its acknowledgement was
        // lost.
        simulation.allow_changed_sources();
        let switch_address: IpAddr = Ipv4Addr::new(10, 0, 0, 1).into();
        let mut builders: Vec<Builder> =
            (0..options.hosts).map(|rank| Builder::new(rank, rng.bits(), options)).collect();
        let calls = draw_calls(&mut rng, options, &mut builders);

        let mut switch = SwitchNode::new(SwitchConfig {
            icrc: IcrcCheck::Exact,
            timeout: options.connection.timeout,
            retry_count: options.connection.retry_count,
            ..SwitchConfig::new(switch_address, rng.bits())
        });
        if let Some(bytes) = options.receive_budget {
            switch.set_receive_budget(bytes);
        }
        let edges = switch
            .create_communicator(
                Instant::ZERO,
                &CommunicatorSpec {
                    id: COMMUNICATOR,
                    path_mtu: options.connection.path_mtu,
                    segment_bytes: options.segment_bytes,
                    window: options.window,
                    children: builders.iter().map(|builder| builder.child.clone()).collect(),
                    world: options.hosts,
                    has_parent: false,
                    options: CommunicatorOptions::default(),
                },
            )
            .expect("the options fit a switch")
            .edges;
        let participant = Participant::Switch(Box::new(switch), Vec::new());
        let of_switch = options.switch.unwrap_or(options.host);
        let switch = simulation.add_machine(switch_address, participant, of_switch);
        let mut hosts = Vec::new();
        let mut links = Vec::new();
        for ((builder, edge), calls) in builders.into_iter().zip(edges).zip(calls) {
            let address = builder.child.address;
            let remote = Remote {
                address: switch_address,
                qpn: edge.qpn,
                send_psn: builder.child.psn,
                receive_psn: edge.psn,
                receive_share: send_window_up(edge.receive_share, builder.child.receive_share),
            };
            let rank = builder.build(&remote, options, calls);
            let participant = Participant::Rank(Box::new(rank));
            let host = simulation.add_machine(address, participant, options.host);
            links.push(simulation.connect(host, switch, options.link));
            hosts.push(host);
        }
        Self { simulation, switch, hosts, links, options: options.clone(), finished_at: None }
    }

    /// Runs until every call on every rank that is up has ended, and the network is at rest.
    pub fn run(&mut self) {
        let Self { simulation, hosts, switch, options, .. } = self;
        let (hosts, switch) = (&*hosts, *switch);
        let slots = 2 * options.window;
        let deadline = simulation.after(options.time_limit);
        let outcome = simulation.run_until(deadline, |simulation| {
            follow(simulation, hosts, switch, slots);
            hosts.iter().all(|&host| {
                let rank = simulation.machine(host).rank();
                rank.is_none_or(|rank| rank.outcome().is_some()) || !simulation.is_up(host)
            })
        });
        match outcome {
            Outcome::Done => {}
            Outcome::Violated => return,
            Outcome::Quiet | Outcome::Deadline => {
                simulation.violate(format!("calls have not ended ({outcome:?})"));
                return;
            }
        }
        self.finished_at = Some(simulation.now());
        let deadline = simulation.after(options.time_limit);
        let outcome = simulation.run_until(deadline, |simulation| {
            follow(simulation, hosts, switch, slots);
            false
        });
        match outcome {
            Outcome::Quiet | Outcome::Violated => {}
            _ => simulation.violate("all is done, yet timers or packets go on".into()),
        }
        if self.failures().next().is_none() {
            self.check_rest();
        }
    }

    /// The switch holds nothing when all is done.
    fn check_rest(&mut self) {
        let Participant::Switch(switch, events) = self.simulation.machine(self.switch) else {
            return;
        };
        let mut wrong = Vec::new();
        if let Some(statistics) = switch.statistics(COMMUNICATOR) {
            if statistics.slots_in_use != 0 {
                wrong.push(format!("{} slots are in use at rest", statistics.slots_in_use));
            }
            let collectives = self.options.counts.len() as u64;
            if statistics.collectives != collectives {
                let found = statistics.collectives;
                wrong.push(format!("the switch counts {found} collectives of {collectives}"));
            }
        }
        wrong.extend(events.iter().map(|event| format!("the switch reports {event:?}")));
        wrong.into_iter().for_each(|what| self.simulation.violate(what));
    }

    /// The ranks whose calls failed: rank, when, and why.
    pub fn failures(&self) -> impl Iterator<Item = (usize, Instant, CollectiveError)> {
        self.hosts.iter().enumerate().filter_map(|(rank, &host)| {
            let (at, result) = self.simulation.machine(host).rank()?.outcome()?;
            Some((rank, at, result.err()?))
        })
    }

    /// What the switch has reported.
    pub fn switch_events(&self) -> &[SwitchEvent] {
        match self.simulation.machine(self.switch) {
            Participant::Switch(_, events) => events,
            Participant::Rank(_) => &[],
        }
    }

    /// What there is to tell.
    pub fn report(&self) -> Report {
        let AllReduceOptions { hosts, counts, segment_bytes, window, .. } = &self.options;
        let names = core::iter::once("switch".to_owned())
            .chain((0..self.hosts.len()).map(|rank| format!("rank {rank}")));
        let elements: u64 = counts.iter().sum();
        Report {
            scenario: "allreduce",
            seed: self.options.seed,
            digest: self.simulation.digest(),
            what: format!(
                "{hosts} hosts and a switch, {} sums of {elements} int32 elements in all, segments \
                 of {segment_bytes} bytes, window {window}",
                counts.len(),
            ),
            bytes: elements * 4,
            virtual_time: Duration::from_nanos(self.finished_at.map_or(0, Instant::nanos)),
            network: NetworkCounts::of(&self.simulation),
            devices: names.zip(self.simulation.machines().map(|m| *m.counters())).collect(),
            violations: self.simulation.violations().to_vec(),
            table: None,
        }
    }
}

/// What must hold after every step.
fn follow(
    simulation: &mut Simulation<'_, Participant>,
    hosts: &[NodeId],
    switch: NodeId,
    slots: u32,
) {
    for &host in hosts {
        let wrong = match simulation.machine_mut(host) {
            Participant::Rank(rank) => rank.take_wrong(),
            Participant::Switch(..) => Vec::new(),
        };
        let rank = host.0 - 1;
        wrong.into_iter().for_each(|what| simulation.violate(format!("rank {rank}: {what}")));
    }
    if let Participant::Switch(node, _) = simulation.machine(switch)
        && let Some(statistics) = node.statistics(COMMUNICATOR)
        && statistics.slots_in_use > slots
    {
        let used = statistics.slots_in_use;
        simulation.violate(format!("{used} slots are in use, of {slots}"));
    }
}

/// Every rank's calls, with random vectors, and the sums that must come out.
pub(super) fn draw_calls(
    rng: &mut Rng,
    options: &AllReduceOptions,
    builders: &mut [Builder],
) -> Vec<Vec<Call>> {
    let mut calls: Vec<Vec<Call>> = builders.iter().map(|_| Vec::new()).collect();
    for (index, &count) in options.counts.iter().enumerate() {
        let length = count as usize * 4;
        let mut sum = vec![0_i32; count as usize];
        let vectors: Vec<Vec<u8>> = builders
            .iter()
            .map(|_| {
                let mut bytes = vec![0; length];
                rng.fill(&mut bytes);
                for (sum, element) in sum.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *sum = sum.wrapping_add(i32::from_le_bytes(*element));
                }
                bytes
            })
            .collect();
        let mut expected: Vec<u8> = sum.into_iter().flat_map(i32::to_le_bytes).collect();
        expected.extend(UNTOUCHED);
        let expected: Arc<[u8]> = expected.into();
        let pause = options.pause.as_nanos() as u64;
        for ((builder, calls), vector) in builders.iter_mut().zip(&mut calls).zip(vectors) {
            let request = builder.request(vector, options.in_place && index % 2 == 1);
            let pause = Duration::from_nanos(rng.between(0, pause));
            calls.push(Call { request, pause, expected: expected.clone() });
        }
    }
    calls
}

/// A host that is being set up.
pub(super) struct Builder {
    endpoint: Endpoint<OwnedMemory>,
    completions: CompletionQueueId,
    pub(super) child: ChildSpec,
    control_key: u32,
    worker: HostWorker,
    regions: u64,
}

impl Builder {
    pub(super) fn new(rank: u32, seed: u64, options: &AllReduceOptions) -> Self {
        let address: IpAddr = Ipv4Addr::from(FIRST_HOST + rank).into();
        let config =
            EndpointConfig { icrc: IcrcCheck::Exact, ..EndpointConfig::new(address, seed) };
        let memory = OwnedMemory::new(1 + 2 * options.counts.len());
        let mut endpoint = Endpoint::new(config, memory);
        let control_address = 0x1_0000;
        let control_key = endpoint
            .memory_mut()
            .register(DOMAIN, control_address, Access::LOCAL_WRITE, vec![0; CONTROL_BYTES])
            .expect("there is room for the control region");
        let worker = HostWorker::new(HostConfig {
            segment_bytes: options.segment_bytes,
            window: options.window,
            control_key,
            control_address,
            rank,
            world: options.hosts,
            path_mtu: options.connection.path_mtu,
        })
        .expect("segment and window are in range");
        let capabilities = QueuePairCapabilities::new(
            worker.required_send_requests() as usize,
            worker.required_receive_requests() as usize,
        );
        let depth = capabilities.max_send_requests + capabilities.max_receive_requests;
        let completions =
            endpoint.create_completion_queue(depth).expect("one completion queue fits");
        let config = QueuePairConfig::new(DOMAIN, completions, capabilities);
        let qpn: Qpn = endpoint.create_queue_pair(&config).expect("one queue pair fits");
        let psn = Psn::new(Rng::new(seed).bits() as u32);
        let receive_share = options.host_budget.and_then(|bytes| {
            endpoint.set_receive_budget(bytes);
            endpoint.grant_receive_share(1)
        });
        let receive_share = receive_share.map(|bytes| bytes as u32);
        let ranks = Ranks::one(rank);
        let child = ChildSpec { ranks, address, qpn, psn, is_switch: false, receive_share };
        Self { endpoint, completions, child, control_key, worker, regions: 0 }
    }

    /// Registers a vector, and a place for the result unless it is the same.
    fn request(&mut self, mut vector: Vec<u8>, in_place: bool) -> CollectiveCall {
        let count = vector.len() as u64 / 4;
        let mut result = vec![0; vector.len()];
        vector.extend(UNTOUCHED);
        result.extend(UNTOUCHED);
        let remote = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let access = if in_place { remote } else { Access::empty() };
        let (source_key, source_address) = self.register(access, vector);
        let (destination_key, destination_address) =
            if in_place { (source_key, source_address) } else { self.register(remote, result) };
        CollectiveCall {
            collective: Collective::AllReduce,
            root: 0,
            mode: Mode::Write,
            source_key,
            source_address,
            destination_key,
            destination_address,
            count,
            stripe: millstream_inc::Stripe::WHOLE,
            data_type: DataType::Int32,
            operation: ReduceOperation::Sum,
        }
    }

    fn register(&mut self, access: Access, bytes: Vec<u8>) -> (u32, u64) {
        self.regions += 1;
        let address = self.regions << 32;
        let memory = self.endpoint.memory_mut();
        let key =
            memory.register(DOMAIN, address, access, bytes).expect("room was made for all regions");
        (key, address)
    }

    pub(super) fn build(
        mut self,
        remote: &Remote,
        options: &AllReduceOptions,
        calls: Vec<Call>,
    ) -> Rank {
        connect(&mut self.endpoint, self.child.qpn, remote, &options.connection);
        Rank::new(RankParts {
            endpoint: self.endpoint,
            completions: self.completions,
            qpn: self.child.qpn,
            control_key: self.control_key,
            worker: self.worker,
            calls,
            call_limit: options.call_limit,
        })
    }
}

/// The scenario `allreduce`.
pub(super) fn scenario(
    parameters: &Parameters,
    outputs: Outputs<'_>,
) -> Result<Report, ScenarioError> {
    let hosts = within("hosts", parameters.hosts, 8, 1, MAX_HOSTS)?;
    let operations = within("operations", parameters.operations, 10, 1, 1 << 16)?;
    let mut rng = Rng::fork(parameters.seed, 0xa11);
    let counts = match parameters.length {
        // At most so much memory in all: vectors and results are all made before the start.
        Some(_) => {
            let limit = (4 << 30) / u64::from(hosts) / u64::from(operations) / 2;
            let length = within("length", parameters.length, 0, 0, limit)?;
            vec![length / 4; operations as usize]
        }
        // 0, 1, and any other, odd ones too.
        None => (0..u64::from(operations))
            .map(|index| if index < 2 { index } else { rng.between(2, 16 << 10) })
            .collect(),
    };
    let limit = Duration::from_secs(3600);
    let mut reduction = Reduction::new(&AllReduceOptions {
        seed: parameters.seed,
        hosts,
        counts,
        in_place: rng.below(2) == 0,
        connection: ConnectionOptions { reads: 0, ..PATIENT },
        link: parameters.link()?,
        call_limit: limit,
        time_limit: limit.saturating_mul(operations),
        ..AllReduceOptions::default()
    });
    outputs.attach(&mut reduction.simulation)?;
    reduction.run();
    let failures: Vec<String> = reduction
        .failures()
        .map(|(rank, at, error)| format!("rank {rank} failed at {at} s: {error}"))
        .collect();
    failures.into_iter().for_each(|what| reduction.simulation.violate(what));
    reduction.simulation.finish()?;
    Ok(reduction.report())
}
