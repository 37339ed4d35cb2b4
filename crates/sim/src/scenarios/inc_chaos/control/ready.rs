//! How a rank connects to its switch, and begins its calls.

use core::time::Duration;

use millstream_inc::protocol::{LostSwitch, Plan, Resume, ToController};
use millstream_inc::{ACKNOWLEDGEMENT_DELAY, CONTROL_BYTES, HostConfig, HostWorker};
use millstream_roce::{Access, CompletionQueueId, QueuePairCapabilities, QueuePairConfig};
use millstream_wire::{Psn, Qpn};

use super::super::build::Network;
use super::super::call::Arena;
use super::super::machine::Kind;
use super::super::member::{CALL_LIMIT, Call, Member};
use super::director::Director;
use super::rank::{Rank, Stage};
use crate::connection::{Remote, connect};
use crate::rank::DOMAIN;
use crate::{ConnectionOptions, NodeId, Rng};

/// How often a rank that waits asks whether the switch lives.
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// Its end of the connection to the switch.
#[derive(Debug)]
pub(super) struct Prepared {
    qpn: Qpn,
    psn: Psn,
    completions: CompletionQueueId,
    config: HostConfig,
}

impl Director {
    /// Makes its end of the connection to the switch, unless it has.
    pub(super) fn prepare(
        &mut self,
        network: &mut Network<'_>,
        machine: usize,
        stream: u64,
        segment_bytes: u32,
        window: u32,
    ) {
        let path_mtu = self.world.path_mtus[machine];
        let psn = Psn::new(self.rng.bits() as u32);
        let Rank { prepared, rank, job, .. } = &mut self.ranks[machine];
        if prepared.is_none() {
            let world = self.world.jobs[*job].hosts.len() as u32;
            let Kind::Host { endpoint, .. } = &mut network.machine_mut(NodeId(machine)).kind else {
                return;
            };
            let control_address = 1 << 48;
            let memory = endpoint.memory_mut();
            let bytes = vec![0; CONTROL_BYTES];
            let key = memory.register(DOMAIN, control_address, Access::LOCAL_WRITE, bytes);
            let control_key = key.expect("room was made for all regions");
            let config = HostConfig {
                segment_bytes,
                window,
                control_key,
                control_address,
                rank: *rank,
                world,
                path_mtu,
            };
            let sends = config.required_send_requests() as usize;
            let receives = config.required_receive_requests() as usize;
            let completions = endpoint.create_completion_queue(sends + receives);
            let completions = completions.expect("a process has one completion queue");
            let capabilities = QueuePairCapabilities::new(sends, receives);
            let config_of_pair = QueuePairConfig {
                acknowledgement_delay: ACKNOWLEDGEMENT_DELAY,
                ..QueuePairConfig::new(DOMAIN, completions, capabilities)
            };
            let qpn = endpoint.create_queue_pair(&config_of_pair);
            let qpn = qpn.expect("a process has one queue pair");
            *prepared = Some(Prepared { qpn, psn, completions, config });
        }
        if let &mut Some(Prepared { qpn, psn, .. }) = prepared {
            let connect =
                ToController::Connect { qpn, psn, path_mtu, more: Vec::new(), receive_share: None };
            self.send_up(network, stream, Some(connect));
        }
    }

    /// The communicator is ready.
    pub(super) fn work(&mut self, network: &mut Network<'_>, machine: usize, plan: &Plan) {
        let now = network.now();
        let random = self.rng.bits();
        let (job, number) = (self.ranks[machine].job, self.ranks[machine].rank);
        let arenas = self.take_arenas(job, number);
        let Rank { prepared, hello, resume, stage, switch, .. } = &mut self.ranks[machine];
        let (Some(prepared), Some(hello)) = (prepared.take(), hello.take()) else {
            return network.violate("a plan came before the group was ready".to_owned());
        };
        let Prepared { qpn, psn, completions, config } = prepared;
        let config = HostConfig { path_mtu: plan.path_mtu, ..config };
        *resume = Some(Resume {
            term: 0,
            group: hello.group,
            identity: plan.group,
            communicator: plan.communicator,
            world: hello.world,
            rank: number,
            address: hello.address,
            departed: false,
            more_addresses: Vec::new(),
        });
        *stage = Stage::Working;
        let incarnation = Some(plan.incarnation);
        *switch = Some(LostSwitch { address: plan.address, incarnation });
        let worker = HostWorker::new(config).expect("segment and window are in range");
        let jobs = &self.world.jobs[job];
        network.with_machine(NodeId(machine), |it, _| {
            let Kind::Host { endpoint, members, .. } = &mut it.kind else { return };
            let options = ConnectionOptions {
                path_mtu: plan.path_mtu,
                timeout: 16,
                reads: 0,
                ..ConnectionOptions::DEFAULT
            };
            let remote = Remote {
                address: plan.address,
                qpn: plan.qpn,
                send_psn: psn,
                receive_psn: plan.psn,
                receive_share: plan.receive_share,
            };
            connect(endpoint, qpn, &remote, &options);
            let register = |(index, mut arena): (usize, Arena)| {
                let address = ((index as u64 + 1) << 32) + random % 64;
                let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
                let bytes = arena.bytes.clone();
                let key = endpoint.memory_mut().register(DOMAIN, address, access, bytes);
                let key = key.expect("room was made for all regions");
                let (shape, pause) = &jobs.calls[index];
                arena.registered(shape, &[number], config.world, (key, address));
                Call { key, arena, pause: *pause, started: None }
            };
            let calls: Vec<Call> = arenas.into_iter().enumerate().map(register).collect();
            members.push(Member {
                group: job,
                family: job,
                rank: number,
                qpn,
                completions,
                control_key: config.control_key,
                control_address: config.control_address,
                worker,
                ended: 0,
                start_at: calls.first().map(|call| now + call.pause),
                calls,
                leaves_out: None,
                call_limit: CALL_LIMIT,
                deadline: None,
                overdue: false,
                probe_at: None,
                probe_every: PROBE_EVERY,
                failed: None,
                failed_at: None,
                is_confused: false,
                rng: Rng::new(random),
            });
        });
        self.tally.one("ranks: communicator ready");
    }
}
