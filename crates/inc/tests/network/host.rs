//! One host: an endpoint, a worker, and the queue pair between them.

use core::net::{IpAddr, Ipv4Addr};

use millstream_inc::{
    ACKNOWLEDGEMENT_DELAY, CONTROL_BYTES, Command, DESCRIPTOR_BYTES, HostConfig, HostWorker,
};
use millstream_roce::{
    Access, Completion, CompletionQueueId, Destination, Endpoint, EndpointConfig, Instant, Memory,
    OwnedMemory, QueuePairAttributes, QueuePairCapabilities, QueuePairConfig, QueuePairState,
};
use millstream_wire::{Psn, Qpn};

use super::{DOMAIN, Outcome, SWITCH, Setup};

#[derive(Debug)]
pub struct Host {
    pub address: IpAddr,
    pub endpoint: Endpoint<OwnedMemory>,
    pub qpn: Qpn,
    pub worker: HostWorker,
    pub outcome: Option<Outcome>,
    /// Completions of requests that the test posted past the worker.
    pub raw: Vec<Completion>,
    queue: CompletionQueueId,
    control: u32,
    /// Sends nothing and hears nothing any more.
    pub dead: bool,
    /// All requests are the test's own.
    is_raw: bool,
}

/// Requests with this bit in their id are the test's own.
pub const RAW: u64 = 1 << 60;

impl Host {
    pub fn new(rank: u32, setup: &Setup) -> Self {
        let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, rank as u8 + 1));
        let config = EndpointConfig {
            icrc: setup.icrc,
            ..EndpointConfig::new(address, setup.seed + 1000 + u64::from(rank))
        };
        let mut endpoint = Endpoint::new(config, OwnedMemory::new(16));
        let base = control_address(rank);
        let control = endpoint
            .memory_mut()
            .register(DOMAIN, base, Access::LOCAL_WRITE, vec![0; CONTROL_BYTES])
            .unwrap();
        let worker = HostWorker::new(HostConfig {
            segment_bytes: setup.segment_bytes,
            window: setup.window,
            control_key: control,
            control_address: base,
            rank: rank % setup.hosts,
            world: setup.hosts,
            path_mtu: setup.path_mtu,
        })
        .unwrap();
        let (sends, receives) =
            (worker.required_send_requests() as usize, worker.required_receive_requests() as usize);
        let queue = endpoint.create_completion_queue(sends + receives).unwrap();
        let qpn = endpoint
            .create_queue_pair(&QueuePairConfig {
                acknowledgement_delay: ACKNOWLEDGEMENT_DELAY,
                ..QueuePairConfig::new(DOMAIN, queue, QueuePairCapabilities::new(sends, receives))
            })
            .unwrap();
        Self {
            address,
            endpoint,
            qpn,
            worker,
            outcome: None,
            raw: Vec::new(),
            queue,
            control,
            dead: false,
            is_raw: setup.options.plain,
        }
    }

    pub fn connect(&mut self, setup: &Setup, switch: IpAddr, switch_qpn: Qpn, switch_psn: Psn) {
        let none = QueuePairAttributes::default();
        for attributes in [
            QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                access: Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToReceive),
                remote_address: Some(switch),
                path_mtu: Some(setup.path_mtu),
                destination_qpn: Some(switch_qpn),
                receive_psn: Some(switch_psn),
                responder_resources: Some(1),
                minimum_rnr_timer: Some(12),
                ..none
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToSend),
                send_psn: Some(setup.first_psn),
                timeout: Some(17),
                retry_count: Some(7),
                rnr_retry: Some(7),
                initiator_depth: Some(1),
                ..none
            },
        ] {
            self.endpoint.modify_queue_pair(Instant::ZERO, self.qpn, &attributes).unwrap();
        }
    }

    /// Exchanges commands and completions with the worker until both are silent.
    pub fn work(&mut self, now: Instant) {
        let mut completions = Vec::new();
        loop {
            while !self.is_raw
                && let Some(command) = self.worker.poll_command()
            {
                match command {
                    Command::Store(bytes) => {
                        let region = self.endpoint.memory_mut().region_mut(self.control).unwrap();
                        region[..bytes.len()].copy_from_slice(&bytes);
                    }
                    Command::Load(from) => {
                        let memory = self.endpoint.memory_mut();
                        let bytes = memory.bytes(&from).unwrap().to_vec();
                        let region = memory.region_mut(self.control).unwrap();
                        region[DESCRIPTOR_BYTES..][..bytes.len()].copy_from_slice(&bytes);
                    }
                    Command::Deliver { offset, to } => {
                        let memory = self.endpoint.memory_mut();
                        let region = memory.region(self.control).unwrap();
                        let bytes = region[offset..][..to.length as usize].to_vec();
                        let (key, address) = (to.key, to.address);
                        let place = Destination::Local { domain: DOMAIN, key, address };
                        memory.write(&place, &bytes).unwrap();
                    }
                    Command::Receive(request) => {
                        self.endpoint.post_receive(self.qpn, &request).unwrap();
                    }
                    Command::Send(request) => {
                        self.endpoint.post_send(now, self.qpn, &request).unwrap();
                    }
                }
            }
            if self.endpoint.poll_completions(self.queue, &mut completions, usize::MAX) == 0 {
                break;
            }
            for completion in completions.drain(..) {
                if completion.id & RAW != 0 {
                    self.raw.push(completion);
                    continue;
                }
                let control = self.endpoint.memory().region(self.control).unwrap();
                let message = |at: usize| *control[at..].first_chunk().unwrap();
                self.worker.handle_completion(&completion, message);
            }
        }
        if let Some(outcome) = self.worker.poll_outcome() {
            assert!(self.outcome.replace(outcome).is_none(), "an outcome is told once");
        }
    }
}

fn control_address(rank: u32) -> u64 {
    u64::from(rank + 1) << 40
}

/// Where a rank's source and destination are registered.
pub fn vector_address(rank: u32, destination: bool) -> u64 {
    control_address(rank) + if destination { 2 << 32 } else { 1 << 32 }
}
