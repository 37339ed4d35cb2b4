//! What hosts saw, held against the model.

use millstream_roce::{AsyncEvent, Completion, CompletionStatus};
use millstream_wire::Qpn;

use super::director::{Action, Director, Network};
use super::host::Seen;
use super::memory::{Effect, What};
use super::stream::Stream;
use super::tally::{receive_status, send_status};
use super::world::{Role, duration};
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
        let Seen { completions, events, faults } = core::mem::take(&mut machine.seen);
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
        for completion in &completions {
            network.note(|| format!("host {host}: {completion:?}"));
            self.completed(network, host, completion);
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
            AsyncEvent::CommunicationEstablished(_)
            | AsyncEvent::LastReceiveRequest(_)
            | AsyncEvent::SharedReceiveLimit(_) => {}
            AsyncEvent::DeviceFatal => network.violate(format!("host {host}: the device failed")),
            AsyncEvent::SendQueueDrained(qpn) => {
                if let Some((index, end)) = self.find(host, qpn) {
                    self.drained(network, index, end);
                }
            }
            AsyncEvent::CompletionQueueOverrun(queue) => {
                if !self.world.may_overrun {
                    network.violate(format!("host {host}: {queue:?} overran without need"));
                }
                self.tally.one("completion queues overrun");
                for connection in &mut self.connections {
                    if connection.hosts.contains(&host) {
                        connection.excuses.overrun = true;
                    }
                }
                self.plan_after(network, core::time::Duration::ZERO, Action::Renew(host));
            }
        }
    }

    fn written(&mut self, network: &mut Network<'_>, host: usize, effect: &Effect) {
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
                _ => stream.written(role, effect.remote, place, bytes),
            },
            None => Err(format!("written outside of the region: {effect:?}")),
        });
        if let Err(what) = result {
            self.violate(network, index, &what);
        } else if effect.what == What::Invalidate {
            // Its owner hears of it, and tells the initiator a new key.
            self.tally.one("regions invalidated");
            let pause = duration(&mut self.rng, core::time::Duration::from_micros(100));
            let action = Action::Revive { stream: index, role, key: effect.key };
            self.plan_after(network, pause, action);
        }
    }

    fn completed(&mut self, network: &mut Network<'_>, host: usize, completion: &Completion) {
        let Some((index, end)) = self.find(host, completion.qpn) else {
            return network.violate(format!("host {host}: of no queue pair: {completion:?}"));
        };
        let status = completion.status;
        if network.count(Happening::Overflowed) > 0 {
            self.connections[index].excuses.link = true;
        }
        let connection = &self.connections[index];
        let lossy = connection.excuses.overrun;
        if Stream::is_receive(completion) {
            let stream = 2 * index + 1 - end;
            self.tally.one(receive_status(status));
            let excused = connection.excuses_receive(status);
            match self.streams[stream].received(completion, lossy) {
                Err(what) => self.violate(network, stream, &what),
                Ok(operation) if !excused => {
                    let what = format!("no reason for {completion:?} of {operation:?}");
                    self.violate(network, stream, &what);
                }
                Ok(_) => {
                    let lag = self.streams[stream].plan.receive_lag;
                    self.plan_after(network, lag, Action::PostReceives(stream));
                }
            }
            return;
        }
        let stream = 2 * index + end;
        self.tally.one(send_status(status));
        let now = network.now();
        match self.streams[stream].completed(completion, lossy) {
            Err(what) => return self.violate(network, stream, &what),
            Ok(operation) => {
                let waited = now.saturating_duration_since(operation.posted_at);
                // What brings its bytes along needs no region.
                let local = operation.inline && status == CompletionStatus::LocalProtection;
                if local || !self.connections[index].excuses_send(status, waited) {
                    let what = format!(
                        "no reason for {completion:?} of {operation:?} after {waited:?}: {:?} {:?}",
                        self.connections[index].rules, self.connections[index].excuses
                    );
                    return self.violate(network, stream, &what);
                }
            }
        }
        if status != CompletionStatus::Success {
            self.failed(network, index, end);
        } else if core::mem::take(&mut self.streams[stream].blocked) {
            self.plan_after(network, core::time::Duration::ZERO, Action::Post(stream));
        }
    }
}
