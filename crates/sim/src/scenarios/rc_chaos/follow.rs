//! What hosts saw, held against the model.

use core::time::Duration;

use millstream_roce::{AsyncEvent, Completion, CompletionStatus};
use millstream_wire::Qpn;

use super::director::{Action, Director, Network};
use super::draw::duration;
use super::host::{Look, Seen};
use super::memory::{Effect, What};
use super::operation::Operation;
use super::pool::Pool;
use super::stream::Stream;
use super::tally::{receive_status, send_status};
use super::world::Role;
use crate::{Happening, NodeId};

impl Director {
    /// Looks at everything that hosts have seen.
    pub(super) fn follow(&mut self, network: &mut Network<'_>) {
        for host in 0..self.world.hosts.len() {
            while network.machine(NodeId(host)).has_news() && network.violations().is_empty() {
                self.follow_host(network, host);
            }
        }
    }

    fn follow_host(&mut self, network: &mut Network<'_>, host: usize) {
        let machine = network.machine_mut(NodeId(host));
        let Seen { completions, events, faults, looks } = core::mem::take(&mut machine.seen);
        let mut effects = core::mem::take(&mut machine.endpoint_mut(None).memory_mut().effects);
        for fault in faults {
            network.violate(format!("host {host}: {fault}"));
        }
        // Why queue pairs fail comes first, then what was done, then who heard of it.
        for event in &events {
            self.happened(network, host, *event);
        }
        for effect in &effects {
            self.written(network, host, effect);
        }
        let level = network.machine(NodeId(host)).level();
        if let Some(pool) = self.pools[host].as_ref().filter(|pool| pool.posted() != level) {
            let posted = pool.posted();
            network.violate(format!(
                "host {host}: {level} requests in the shared receive queue, where {posted} are right"
            ));
        }
        let mut solicited = Vec::new();
        for completion in &completions {
            network.note(|| format!("host {host}: {completion:?}"));
            solicited.push(self.completed(network, host, completion));
        }
        for Look { found, left, solicited: said } in looks {
            let one = solicited[found].contains(&true);
            if one && !said || said && !one && left == 0 {
                network.violate(format!(
                    "host {host}: said that something solicited waits: {said}, where it is {one}"
                ));
            }
        }
        effects.clear();
        let machine = network.machine_mut(NodeId(host));
        let memory = machine.endpoint_mut(None).memory_mut();
        if memory.effects.is_empty() {
            memory.effects = effects;
        }
    }

    /// The connection and end of a queue pair.
    fn find(&self, host: usize, qpn: Qpn) -> Option<(usize, usize)> {
        self.connections.iter().enumerate().find_map(|(index, connection)| {
            let is_it = |&end: &usize| {
                connection.hosts[end] == host && connection.ends[end].qpn == Some(qpn)
            };
            (0..2).find(is_it).map(|end| (index, end))
        })
    }

    fn happened(&mut self, network: &mut Network<'_>, host: usize, event: AsyncEvent) {
        network.note(|| format!("host {host}: {event:?}"));
        match event {
            AsyncEvent::QueuePairFatal(qpn)
            | AsyncEvent::QueuePairRequestError(qpn)
            | AsyncEvent::QueuePairAccessError(qpn) => {
                if let Some(port) = self.find_port(host, Some(qpn)) {
                    return self.port_happened(network, port, event);
                }
                // It may have been destroyed since.
                let Some((index, end)) = self.find(host, qpn) else { return };
                self.tally.one("queue pairs failed");
                let connection = &mut self.connections[index];
                let again = core::mem::replace(&mut connection.ends[end].reported, true);
                if again || !connection.excuses_event(event) {
                    let what = format!("no reason for {event:?}: {:?}", connection.excuses);
                    return self.violate(network, 2 * index + end, &what);
                }
                self.failed(network, index, end);
            }
            AsyncEvent::CommunicationEstablished(_) => {}
            AsyncEvent::LastReceiveRequest(qpn) => {
                if let Some(port) = self.find_port(host, Some(qpn)) {
                    return self.port_happened(network, port, event);
                }
                let Some((index, end)) = self.find(host, qpn) else { return };
                let stream = 2 * index + 1 - end;
                let took_last = &mut self.connections[index].ends[end].took_last;
                if core::mem::replace(took_last, true) || !self.streams[stream].plan.shares {
                    self.violate(network, stream, &format!("no reason for {event:?}"));
                }
            }
            AsyncEvent::SharedReceiveLimit(_) => {
                self.tally.one("shared receive queues ran low");
                self.plan_after(network, Duration::ZERO, Action::FillPool(host));
            }
            AsyncEvent::DeviceFatal => network.violate(format!("host {host}: the device failed")),
            AsyncEvent::SendQueueDrained(qpn) => {
                if let Some(port) = self.find_port(host, Some(qpn)) {
                    self.port_happened(network, port, event);
                } else if let Some((index, end)) = self.find(host, qpn) {
                    self.drained(network, index, end);
                }
            }
            AsyncEvent::CompletionQueueOverrun(queue) => {
                if !self.world.may_overrun {
                    network.violate(format!("host {host}: {queue:?} overran without need"));
                }
                self.tally.one("completion queues overrun");
                self.overrun[host] = true;
                let ports = self.ports.iter_mut().filter(|port| port.plan.host == host);
                ports.for_each(|port| port.lossy = true);
                for connection in &mut self.connections {
                    if connection.hosts.contains(&host) {
                        connection.excuses.overrun = true;
                    }
                }
                self.plan_after(network, Duration::ZERO, Action::Renew(host));
            }
        }
    }

    fn written(&mut self, network: &mut Network<'_>, host: usize, effect: &Effect) {
        match effect.what {
            What::Take => return self.took(network, host, effect),
            What::Sends(header) => return self.port_sends(network, host, &header),
            What::Reached(header) => return self.port_is_reached(network, host, &header),
            What::Write | What::Atomic(..) | What::Invalidate => {}
        }
        if self.port_writes(network, host, effect) {
            return;
        }
        let pooled = self.pools[host].as_ref().filter(|pool| pool.key == effect.key);
        if let Some(pool) = pooled {
            let Some((index, end)) = effect.qpn.and_then(|qpn| self.find(host, qpn)) else {
                return network.violate(format!("host {host}: nobody's packet did {effect:?}"));
            };
            let index = 2 * index + 1 - end;
            let place = effect.address.wrapping_sub(pool.address);
            let stream = &mut self.streams[index];
            let slot = stream.claims.back().map(|&(_, slot)| pool.slot(slot));
            let memory = network.machine(NodeId(host)).endpoint().memory();
            let bytes = memory.regions.region(effect.key).unwrap_or_default();
            let bytes = bytes.get(place as usize..);
            let bytes = bytes.and_then(|rest| rest.get(..effect.length as usize));
            let result = match bytes {
                Some(bytes) => stream.written(Role::Inbox, effect.remote, place, bytes, slot),
                None => Err(format!("written outside of the region: {effect:?}")),
            };
            if let Err(what) = result {
                self.violate(network, index, &what);
            }
            return;
        }
        let owner = self.keys[host].iter().find(|(key, ..)| *key == effect.key).copied();
        let Some((_, index, role)) = owner else {
            return network
                .violate(format!("host {host}: written with an unknown key: {effect:?}"));
        };
        let stream = &mut self.streams[index];
        let end = if role == Role::Sink { index % 2 } else { 1 - index % 2 };
        let mut result = Ok(());
        // A message that was admitted before goes on.
        let asks = effect.remote && effect.what != What::Invalidate;
        if asks && self.connections[index / 2].ends[end].revoked && stream.is_at_start() {
            result = Err(format!("written without the right to: {effect:?}"));
        }
        if effect.remote && stream.regions[role as usize].dead {
            result = Err(format!("done by a key that was invalidated: {effect:?}"));
        }
        if effect.qpn != self.connections[index / 2].ends[end].qpn {
            result = Err(format!("a packet for another queue pair wrote here: {effect:?}"));
        }
        let place = effect.address.wrapping_sub(stream.regions[role as usize].address);
        let memory = network.machine(NodeId(host)).endpoint().memory();
        let bytes = memory.regions.region(effect.key).unwrap_or_default();
        let bytes = bytes.get(place as usize..).and_then(|rest| rest.get(..effect.length as usize));
        result = result.and_then(|()| match bytes {
            _ if effect.what == What::Invalidate => stream.invalidated(role),
            Some(bytes) => match effect.what {
                What::Atomic(operation, original) => {
                    stream.changed(role, place, operation, original)
                }
                _ => stream.written(role, effect.remote, place, bytes, None),
            },
            None => Err(format!("written outside of the region: {effect:?}")),
        });
        if let Err(what) = result {
            self.violate(network, index, &what);
        } else if effect.what == What::Invalidate {
            // Its owner hears of it, and tells the initiator a new key.
            self.tally.one("regions invalidated");
            let pause = duration(&mut self.rng, Duration::from_micros(100));
            let action = Action::Revive { stream: index, role, key: effect.key };
            self.plan_after(network, pause, action);
        }
    }

    /// A message took the oldest request of a shared receive queue.
    fn took(&mut self, network: &mut Network<'_>, host: usize, effect: &Effect) {
        let slot = self.pools[host].as_mut().and_then(Pool::take);
        if let (Some(port), Some(slot)) = (self.find_port(host, effect.qpn), slot) {
            if let Err(what) = self.ports[port].took(slot) {
                self.violate_port(network, port, &what);
            }
            return;
        }
        let pair = effect.qpn.and_then(|qpn| self.find(host, qpn));
        let (Some((index, end)), Some(slot)) = (pair, slot) else {
            return network.violate(format!("host {host}: a shared receive request for nobody"));
        };
        let stream = 2 * index + 1 - end;
        if let Err(what) = self.streams[stream].took(slot) {
            self.violate(network, stream, &what);
        }
    }

    /// Whether the completion counts as solicited.
    fn completed(
        &mut self,
        network: &mut Network<'_>,
        host: usize,
        completion: &Completion,
    ) -> bool {
        if let Some(port) = self.find_port(host, Some(completion.qpn)) {
            return self.port_completed(network, port, completion);
        }
        let Some((index, end)) = self.find(host, completion.qpn) else {
            network.violate(format!("host {host}: of no queue pair: {completion:?}"));
            return false;
        };
        let status = completion.status;
        if network.count(Happening::Overflowed) > 0 {
            self.connections[index].excuses.link = true;
        }
        let connection = &self.connections[index];
        let lossy = connection.excuses.overrun;
        let failed = status != CompletionStatus::Success;
        if Stream::is_receive(completion) {
            let stream = 2 * index + 1 - end;
            self.tally.one(receive_status(status));
            let excused = connection.excuses_receive(status);
            let mut solicited = false;
            let received = match Pool::is_pooled(completion.id) {
                true => self.received_shared(network, host, stream, completion, lossy),
                false => self.streams[stream].received(completion, lossy),
            };
            match received {
                Err(what) => self.violate(network, stream, &what),
                Ok(operation) if !excused => {
                    let what = format!("no reason for {completion:?} of {operation:?}");
                    self.violate(network, stream, &what);
                }
                Ok(operation) => {
                    solicited = operation.solicited;
                    let lag = self.streams[stream].plan.receive_lag;
                    self.plan_after(network, lag, Action::PostReceives(stream));
                }
            }
            return solicited || failed;
        }
        let stream = 2 * index + end;
        self.tally.one(send_status(status));
        let now = network.now();
        match self.streams[stream].completed(completion, lossy) {
            Err(what) => self.violate(network, stream, &what),
            Ok(operation) => {
                let waited = now.saturating_duration_since(operation.posted_at);
                // What brings its bytes along needs no region.
                let local = operation.inline && status == CompletionStatus::LocalProtection;
                if local || !self.connections[index].excuses_send(status, waited) {
                    let what = format!(
                        "no reason for {completion:?} of {operation:?} after {waited:?}: {:?} {:?}",
                        self.connections[index].rules, self.connections[index].excuses
                    );
                    self.violate(network, stream, &what);
                }
            }
        }
        if failed {
            self.failed(network, index, end);
        } else if core::mem::take(&mut self.streams[stream].blocked) {
            self.plan_after(network, Duration::ZERO, Action::Post(stream));
        }
        failed
    }

    /// The request that a completion of a shared receive queue is for.
    fn received_shared(
        &mut self,
        network: &mut Network<'_>,
        host: usize,
        stream: usize,
        completion: &Completion,
        lossy: bool,
    ) -> Result<&Operation, String> {
        loop {
            let claim = self.streams[stream].next_claim();
            let (Some((operation, slot)), Some(pool)) = (claim, &mut self.pools[host]) else {
                return Err(format!("of no shared receive request: {completion:?}"));
            };
            let is_it = pool.is_of(slot, completion.id);
            self.release(network, host, slot);
            if is_it {
                return self.streams[stream].received_for(completion, operation);
            }
            if !lossy {
                return Err(format!("{completion:?}, where that of slot {slot} is next"));
            }
        }
    }
}
