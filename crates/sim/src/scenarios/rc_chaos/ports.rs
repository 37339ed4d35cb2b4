//! Queue pairs for datagrams: bringing them up and down, and posting.

use core::time::Duration;

use millstream_roce::{
    Access, DatagramDestination, QueuePairAttributes, QueuePairCapabilities, QueuePairConfig,
    QueuePairState, SendOperation, SendRequest, Transport,
};
use millstream_wire::{Psn, Qpn};

use super::datagrams::{Fault, Port, State};
use super::director::{Action, DOMAIN, Director, Network};
use super::draw::duration;
use super::execution::UNTOUCHED;
use super::world::Lowering;
use crate::NodeId;

/// A number that no queue pair has: hosts give none below 2^12.
const NOBODY: Qpn = Qpn::new(0x123);

impl Director {
    /// The port of a queue pair.
    pub(super) fn find_port(&self, host: usize, qpn: Option<Qpn>) -> Option<usize> {
        let is_it = |port: &Port| port.plan.host == host && port.qpn == qpn;
        qpn.and_then(|_| self.ports.iter().position(is_it))
    }

    /// A host starts: its ports have memory again, and come up.
    pub(super) fn start_ports(&mut self, network: &mut Network<'_>, host: usize) {
        for index in 0..self.ports.len() {
            let port = &mut self.ports[index];
            if port.plan.host != host {
                continue;
            }
            let memory = network.machine_mut(NodeId(host)).endpoint_mut(None).memory_mut();
            let source =
                memory.regions.register(DOMAIN, port.address, Access::empty(), port.source());
            let blank = port.pool.blank();
            let write = Access::LOCAL_WRITE;
            let target = memory.regions.register(DOMAIN, port.pool.address, write, blank);
            match (source, target) {
                (Ok(source), Ok(target)) => (port.key, port.pool.key) = (source, target),
                (source, target) => {
                    let what = format!("port {index}: register: {source:?} {target:?}");
                    return network.violate(what);
                }
            }
            let life = port.life;
            self.plan_after(network, Duration::ZERO, Action::RaisePort { port: index, life });
        }
    }

    pub(super) fn raise_port(&mut self, network: &mut Network<'_>, index: usize, life: u32) {
        let port = &self.ports[index];
        let node = NodeId(port.plan.host);
        if port.life != life || port.state != State::Down || !network.is_up(node) {
            return;
        }
        if self.overrun[node.0] {
            let again = Action::RaisePort { port: index, life };
            return self.plan_after(network, Duration::from_micros(100), again);
        }
        let psn = Psn::new(self.rng.bits() as u32);
        let queue_key = port.plan.queue_key;
        let brought = port.plan.messages.iter().filter(|message| message.inline);
        let capabilities = QueuePairCapabilities {
            max_inline: brought.map(|message| message.length as usize).max().unwrap_or(0),
            ..QueuePairCapabilities::new(port.plan.send_depth, port.plan.pool.depth)
        };
        let host = network.machine_mut(node);
        let [send_completions, receive_completions] = host.queues();
        let config = QueuePairConfig {
            transport: Transport::UnreliableDatagram,
            receive_completions,
            shared_receive_queue: host.shared_receives().filter(|_| port.plan.shares),
            ..QueuePairConfig::new(DOMAIN, send_completions, capabilities)
        };
        let qpn = match port.qpn.map_or_else(|| host.create(&config), Ok) {
            Ok(qpn) => qpn,
            Err(error) => return self.violate_port(network, index, &error.to_string()),
        };
        let none = QueuePairAttributes::default();
        let steps = [
            QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                queue_key: Some(queue_key),
                ..none
            },
            QueuePairAttributes { state: Some(QueuePairState::ReadyToReceive), ..none },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToSend),
                send_psn: Some(psn),
                ..none
            },
        ];
        let mut result = Ok(());
        for attributes in &steps {
            result = result.and(self.modify_port(network, node, qpn, attributes));
        }
        network.machine_mut(node).set_queue_key(qpn, queue_key);
        network.note(|| format!("raise port {index}: {qpn} {psn:?}"));
        let port = &mut self.ports[index];
        (port.qpn, port.state, port.psn) = (Some(qpn), State::Up, psn);
        if let Err(what) = result {
            return self.violate_port(network, index, &what);
        }
        self.fill_port(network, index);
        self.post_datagrams(network, index);
    }

    fn modify_port(
        &self,
        network: &mut Network<'_>,
        node: NodeId,
        qpn: Qpn,
        attributes: &QueuePairAttributes,
    ) -> Result<(), String> {
        let result = network.with_machine(node, |host, now| {
            host.endpoint_mut(Some(qpn)).modify_queue_pair(now, qpn, attributes)
        });
        result.map_err(|error| format!("modify_queue_pair to {:?}: {error}", attributes.state))
    }

    /// Posts the receive requests that a port has slots for.
    pub(super) fn fill_port(&mut self, network: &mut Network<'_>, index: usize) {
        let port = &mut self.ports[index];
        let node = NodeId(port.plan.host);
        if port.plan.shares {
            return self.fill_pool(network, node.0);
        }
        let open = matches!(port.state, State::Up | State::Drained);
        let Some(qpn) = port.qpn.filter(|_| open) else { return };
        if port.pool.starved_until > network.now() {
            return;
        }
        let mut result = Ok(());
        while let Some((request, range)) = port.pool.next() {
            let endpoint = network.machine_mut(node).endpoint_mut(Some(qpn));
            let bytes = endpoint.memory_mut().regions.region_mut(port.pool.key);
            if let Some(bytes) = bytes.and_then(|bytes| bytes.get_mut(range)) {
                bytes.fill(UNTOUCHED);
            }
            result = result.and(endpoint.post_receive(qpn, &request));
        }
        if let Err(error) = result {
            self.violate_port(network, index, &format!("post_receive: {error}"));
        }
    }

    pub(super) fn post_datagrams(&mut self, network: &mut Network<'_>, index: usize) {
        loop {
            let port = &self.ports[index];
            let (Some(qpn), true) = (port.qpn, port.state != State::Down) else { return };
            let number = port.next;
            if number >= port.allowed {
                return;
            }
            let outstanding = number - port.ended;
            if outstanding >= port.plan.send_depth {
                self.ports[index].blocked = true;
                return;
            }
            let last = number + 1 == port.allowed || outstanding + 1 == port.plan.send_depth;
            let to = &self.ports[port.plan.messages[number].to];
            let (address, key) = (self.world.hosts[to.plan.host].address, to.plan.queue_key);
            let to = to.qpn.unwrap_or(NOBODY);
            let message = &mut self.ports[index].plan.messages[number];
            message.signaled |= last;
            let message = *message;
            let target = match message.fault {
                Fault::QueueKey => (to, key ^ 4),
                Fault::Number => (NOBODY, key),
                Fault::None | Fault::Memory => (to, key),
            };
            let port = &self.ports[index];
            let key = if message.fault == Fault::Memory { port.key ^ 0x80 } else { port.key };
            let pieces = match message.inline {
                true => Vec::new(),
                false => message.layout.pieces(key, port.place(number), message.length),
            };
            let operation = SendOperation::Send { immediate: port.immediate(number) };
            let request = SendRequest {
                signaled: message.signaled,
                solicited: message.solicited,
                datagram: Some(DatagramDestination { address, qpn: target.0, queue_key: target.1 }),
                ..SendRequest::new(port.id(number), operation, pieces)
            };
            let mut bytes = if message.inline { port.bytes(number) } else { Vec::new() };
            // What the device sends now is looked at when it is known what was posted.
            self.ports[index].posted(target);
            let node = NodeId(self.ports[index].plan.host);
            let result = network.with_machine(node, |host, now| {
                let endpoint = host.endpoint_mut(Some(qpn));
                let result = match message.inline {
                    true => endpoint.post_send_inline(now, qpn, &request, &bytes),
                    false => endpoint.post_send(now, qpn, &request),
                };
                // The buffer is the application's again before anything is sent.
                bytes.fill(UNTOUCHED);
                result
            });
            network.note(|| format!("post port {index} datagram {number}: {message:?}"));
            if let Err(error) = result {
                return self.violate_port(network, index, &format!("post_send: {error}"));
            }
            self.tally.one(match message.fault {
                Fault::None => "posted: datagram",
                Fault::QueueKey => "posted: datagram with another queue key",
                Fault::Number => "posted: datagram for nobody",
                Fault::Memory => "posted: datagram of unknown memory",
            });
            let pace = self.ports[index].plan.pace;
            if !pace.is_zero() {
                let pause = duration(&mut self.rng, pace);
                return self.plan_after(network, pause, Action::PostDatagrams(index));
            }
        }
    }

    pub(super) fn violate_port(&self, network: &mut Network<'_>, index: usize, what: &str) {
        let port = &self.ports[index];
        let qpn = port.qpn.map_or("none".into(), |qpn| qpn.to_string());
        network.violate(format!(
            "port {index} life {} on host {}, qp {qpn}, {:?}, {} of {} datagrams ended: {what}",
            port.life, port.plan.host, port.state, port.ended, port.next
        ));
    }

    fn set_port_state(&mut self, network: &mut Network<'_>, index: usize, to: QueuePairState) {
        let port = &self.ports[index];
        let Some(qpn) = port.qpn else { return };
        let attributes = QueuePairAttributes { state: Some(to), ..Default::default() };
        let result = self.modify_port(network, NodeId(port.plan.host), qpn, &attributes);
        if let Err(what) = result {
            self.violate_port(network, index, &what);
        }
    }

    /// All that a port's host has to tell is told.
    fn settle_port(&mut self, network: &mut Network<'_>, index: usize) {
        let node = NodeId(self.ports[index].plan.host);
        network.with_machine(node, |host, _| host.drain());
        self.follow(network);
    }

    /// Stops a port's send queue.
    pub(super) fn drain_port(&mut self, network: &mut Network<'_>, index: usize) {
        if self.ports[index].state != State::Up {
            return;
        }
        self.settle_port(network, index);
        let node = NodeId(self.ports[index].plan.host);
        let qpn = self.ports[index].qpn;
        let state = qpn.and_then(|qpn| network.machine(node).endpoint().queue_pair_state(qpn));
        if state != Some(QueuePairState::ReadyToSend) || self.ports[index].state != State::Up {
            return;
        }
        self.tally.one("datagrams: send queues drained");
        self.pending += 1;
        self.ports[index].draining = true;
        self.ports[index].held = true;
        self.ports[index].state = State::Drained;
        self.set_port_state(network, index, QueuePairState::SendQueueDrained);
    }

    pub(super) fn resume_port(&mut self, network: &mut Network<'_>, index: usize, life: u32) {
        let port = &mut self.ports[index];
        if port.life == life && port.state == State::Drained {
            self.pending -= 1;
            port.held = false;
            port.state = State::Up;
            self.set_port_state(network, index, QueuePairState::ReadyToSend);
        }
    }

    /// A port's send queue failed: its application has seen it, and goes on.
    pub(super) fn recover_port(&mut self, network: &mut Network<'_>, index: usize, life: u32) {
        if self.ports[index].life != life || self.ports[index].state == State::Broken {
            return;
        }
        self.settle_port(network, index);
        let node = NodeId(self.ports[index].plan.host);
        let qpn = self.ports[index].qpn;
        let state = qpn.and_then(|qpn| network.machine(node).endpoint().queue_pair_state(qpn));
        if state != Some(QueuePairState::SendQueueError) {
            let what = format!("a send queue that failed is in {state:?}");
            return self.violate_port(network, index, &what);
        }
        if let Err(what) = self.ports[index].flushed() {
            return self.violate_port(network, index, &what);
        }
        self.tally.one("datagrams: send queues recovered");
        self.set_port_state(network, index, QueuePairState::ReadyToSend);
        self.post_datagrams(network, index);
    }

    /// Takes a port down; it comes up again after a while.
    pub(super) fn lower_port(
        &mut self,
        network: &mut Network<'_>,
        index: usize,
        lowering: Lowering,
    ) {
        let host = self.ports[index].plan.host;
        let node = NodeId(host);
        if self.ports[index].state == State::Down {
            return;
        }
        if network.is_up(node) {
            self.settle_port(network, index);
            if lowering == Lowering::Flush && self.ports[index].state != State::Broken {
                self.ports[index].state = State::Broken;
                self.set_port_state(network, index, QueuePairState::Error);
                self.settle_port(network, index);
                // What is posted now is flushed at once.
                let pace = core::mem::take(&mut self.ports[index].plan.pace);
                self.post_datagrams(network, index);
                self.ports[index].plan.pace = pace;
                self.settle_port(network, index);
                let port = &mut self.ports[index];
                let mut result = port.flushed();
                if !port.plan.shares && port.pool.posted() > 0 || port.is_owed() {
                    result = Err("not all receive requests are complete in ERR".into());
                }
                if port.plan.shares != port.took_last {
                    result = Err(format!("the last shared request: {}", port.took_last));
                }
                if let Err(what) = result
                    && !self.ports[index].lossy
                {
                    self.violate_port(network, index, &what);
                }
            }
            let port = &self.ports[index];
            if port.is_owed() && !port.lossy {
                self.violate_port(network, index, "a datagram was not delivered");
            }
            if lowering == Lowering::Destroy {
                self.destroy_port(network, index);
            } else {
                self.set_port_state(network, index, QueuePairState::Reset);
            }
        }
        self.tally.one("datagrams: queue pairs taken down");
        self.forget_port(network, index);
        let life = self.ports[index].life;
        let pause = duration(&mut self.rng, Duration::from_micros(500));
        self.plan_after(network, pause, Action::RaisePort { port: index, life });
    }

    fn destroy_port(&mut self, network: &mut Network<'_>, index: usize) {
        let port = &mut self.ports[index];
        let host = NodeId(port.plan.host);
        let Some(qpn) = port.qpn.take() else { return };
        if !network.machine_mut(host).destroy(qpn) {
            self.violate_port(network, index, "destroy_queue_pair: unknown");
        }
    }

    /// A host makes new completion queues: no queue pair of its ports may be left.
    pub(super) fn renew_ports(&mut self, network: &mut Network<'_>, host: usize) {
        for index in 0..self.ports.len() {
            if self.ports[index].plan.host == host {
                self.lower_port(network, index, Lowering::Destroy);
                self.destroy_port(network, index);
            }
        }
    }

    /// A port's queue pair is gone, or as good as new.
    fn forget_port(&mut self, network: &mut Network<'_>, index: usize) {
        let port = &mut self.ports[index];
        let host = port.plan.host;
        let taken = port.forget_due();
        port.settle();
        if core::mem::take(&mut port.held) {
            self.pending -= 1;
        }
        port.state = State::Down;
        port.life += 1;
        (port.draining, port.took_last, port.reported) = (false, false, false);
        port.lossy = false;
        if port.plan.shares {
            taken.into_iter().for_each(|slot| self.release(network, host, slot));
        } else {
            taken.into_iter().for_each(|slot| port.pool.release(slot));
            port.pool.clear();
        }
    }

    /// A host is gone, and its ports with it.
    pub(super) fn crash_ports(&mut self, network: &mut Network<'_>, host: usize) {
        for index in 0..self.ports.len() {
            if self.ports[index].plan.host == host {
                self.forget_port(network, index);
                self.ports[index].qpn = None;
            }
        }
    }

    /// At rest: the last datagrams have come, and buffers are as they were.
    pub(super) fn close_ports(&mut self, network: &mut Network<'_>) {
        for index in 0..self.ports.len() {
            let port = &self.ports[index];
            let host = port.plan.host;
            if port.is_last_missing() {
                self.violate_port(network, index, "its last datagram has not come");
            }
            self.settle_port(network, index);
            let port = &self.ports[index];
            let memory = network.machine(NodeId(host)).endpoint().memory();
            let pool = memory.regions.region(port.pool.key).unwrap_or_default();
            let source = memory.regions.region(port.key).unwrap_or_default();
            if !port.pool.is_untouched(pool) || source != port.source() {
                self.violate_port(network, index, "its memory is not as it was");
            }
            self.lower_port(network, index, Lowering::Flush);
        }
    }
}
