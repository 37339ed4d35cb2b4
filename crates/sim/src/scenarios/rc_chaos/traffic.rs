//! Posting, and the memory that requests name.

use core::time::Duration;

use millstream_roce::{
    Access, AtomicOperation, MAX_INLINE, Piece, ReceiveRequest, SendOperation, SendRequest,
};

use super::connection::Connection;
use super::director::{Action, DOMAIN, Director, Network};
use super::draw::duration;
use super::operation::{Kind, Operation};
use super::stream::Stream;
use super::world::Role;
use crate::NodeId;

impl Director {
    pub(super) fn post(&mut self, network: &mut Network<'_>, index: usize) {
        loop {
            let connection = &self.connections[index / 2];
            let end = connection.ends[index % 2];
            let stream = &mut self.streams[index];
            let (Some(qpn), true) = (end.qpn, end.up) else { return };
            if stream.next >= stream.allowed {
                return;
            }
            if stream.outstanding() >= stream.plan.send_depth {
                stream.blocked = true;
                return;
            }
            // Somebody must hear of its end: nobody would post more else.
            let last = stream.next + 1 == stream.allowed
                || stream.outstanding() + 1 == stream.plan.send_depth;
            let operation = &mut stream.plan.operations[stream.next];
            operation.signaled |= last;
            let names = operation.names().map(|role| &stream.regions[role as usize]);
            operation.key = names.map_or(0, |region| region.key);
            if operation.unknown_key {
                operation.key ^= 0x80;
            }
            let doomed = names.is_some_and(|region| region.dying);
            // Whoever knows that a key will be invalidated waits for the next, but for some.
            if doomed && !operation.reckless {
                return;
            }
            let operation = *operation;
            let excuses = &mut self.connections[index / 2].excuses;
            excuses.invalidated |= doomed || operation.has_wrong_key();
            if operation.kind == Kind::SendInvalidate && !operation.fence {
                // A READ before it may be refused, or not be answered again.
                let reads = &stream.plan.operations[stream.ended..stream.next];
                let reading = reads.iter().any(|operation| operation.kind == Kind::Read);
                excuses.invalidated |= reading;
                excuses.link |= reading;
            }
            let connection = &self.connections[index / 2];
            let request = request(stream, &operation);
            let mut inline = [0; MAX_INLINE];
            let inline =
                &mut inline[..if operation.inline { operation.length as usize } else { 0 }];
            stream.pattern(stream.next).fill(0, inline);
            let host = NodeId(connection.hosts[index % 2]);
            let (life, bound) = (connection.life, connection.bound(operation.length));
            let several = connection.packets(operation.length) > 1;
            let is_split = stream.plan.splits && operation.kind == Kind::Write && several;
            let now = network.now();
            let result = network.with_machine(host, |host, now| {
                let endpoint = host.endpoint_mut(Some(qpn));
                match operation.inline {
                    true => endpoint.post_send_inline(now, qpn, &request, inline),
                    false => endpoint.post_send(now, qpn, &request),
                }
            });
            for (is_one, name) in [
                (operation.inline, "posted: inline"),
                (doomed, "posted: key that is being invalidated"),
                (operation.has_wrong_key(), "posted: key that may not be invalidated"),
                (is_split, "posted: WRITE of several messages"),
            ] {
                self.tally.add(name, u64::from(is_one));
            }
            if let Err(error) = result {
                return self.violate(network, index, &format!("post_send: {error}"));
            }
            let number = stream.next;
            network.note(|| format!("post stream {index} request {number}: {operation:?}"));
            stream.posted(now);
            let sharing = if stream.plan.shares { Connection::SHARING } else { Duration::ZERO };
            stream.deadline = stream.deadline.max(now) + bound + sharing;
            if operation.is_short() {
                self.connections[index / 2].excuses.short = true;
            }
            if operation.signaled {
                let bound = Action::Bound { stream: index, operation: number, life };
                let deadline = self.streams[index].deadline;
                self.plan(network, deadline, bound);
            }
            self.tally.one(match operation.kind {
                Kind::Send | Kind::SendImmediate => "posted: SEND",
                Kind::SendInvalidate => "posted: SEND with invalidate",
                Kind::Write => "posted: WRITE",
                Kind::WriteImmediate => "posted: WRITE with immediate",
                Kind::Read => "posted: READ",
                Kind::CompareSwap => "posted: compare-and-swap",
                Kind::FetchAdd => "posted: fetch-and-add",
            });
            let pace = self.streams[index].plan.pace;
            if !pace.is_zero() {
                let pause = duration(&mut self.rng, pace);
                return self.plan_after(network, pause, Action::Post(index));
            }
        }
    }

    pub(super) fn post_receives(&mut self, network: &mut Network<'_>, index: usize) {
        let connection = &self.connections[index / 2];
        let end = connection.ends[1 - index % 2];
        let (Some(qpn), true) = (end.qpn, end.up && !end.broken) else { return };
        let host = NodeId(connection.hosts[1 - index % 2]);
        let stream = &mut self.streams[index];
        if stream.plan.shares {
            return self.fill_pool(network, host.0);
        }
        if stream.starved_until > network.now() {
            return;
        }
        while stream.receives < stream.plan.receive_depth {
            let Some((id, operation)) = stream.next_receive() else { return };
            let region = &stream.regions[Role::Inbox as usize];
            let pieces = match operation.kind.is_send() {
                true => {
                    let address = region.address + u64::from(operation.offsets[1]);
                    let length = operation.arrival_length();
                    operation.receive_layout.pieces(region.key, address, length)
                }
                false => Vec::new(),
            };
            let request = ReceiveRequest { id, pieces };
            let result = network.with_machine(host, |host, _| {
                host.endpoint_mut(Some(qpn)).post_receive(qpn, &request)
            });
            match result {
                Ok(()) => stream.receive_posted(),
                Err(error) => {
                    return self.violate(network, index, &format!("post_receive: {error}"));
                }
            }
        }
    }

    pub(super) fn register(&mut self, network: &mut Network<'_>, stream: usize, role: Role) {
        let host = self.host_of(stream, role);
        if !network.is_up(NodeId(host)) {
            return;
        }
        let kept = self.streams[stream].regions[role as usize].absent.take();
        let bytes = kept.unwrap_or_else(|| self.streams[stream].content(role));
        let remote = Access::REMOTE_INVALIDATE;
        let access = match role {
            Role::Source => Access::empty(),
            Role::Sink | Role::Inbox => Access::LOCAL_WRITE,
            Role::Target => remote | Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            Role::Readable => remote | Access::REMOTE_READ,
            Role::Counters => remote | Access::LOCAL_WRITE | Access::REMOTE_ATOMIC,
        };
        let region = &mut self.streams[stream].regions[role as usize];
        let memory = network.machine_mut(NodeId(host)).endpoint_mut(None).memory_mut();
        match memory.regions.register(DOMAIN, region.address, access, bytes) {
            Ok(key) => {
                region.key = key;
                (region.dying, region.dead) = (false, false);
                self.keys[host].push((key, stream, role));
                // Some requests may have waited for the key.
                self.plan_after(network, Duration::ZERO, Action::Post(stream));
            }
            Err(error) => self.violate(network, stream, &format!("register: {error}")),
        }
    }

    /// Gives an invalidated region, which its owner still uses, a new key.
    pub(super) fn revive(&mut self, network: &mut Network<'_>, stream: usize, role: Role) {
        if self.withdraw(network, stream, role) {
            self.register(network, stream, role);
        }
    }

    pub(super) fn deregister(
        &mut self,
        network: &mut Network<'_>,
        stream: usize,
        role: Role,
    ) -> bool {
        let done = self.withdraw(network, stream, role);
        self.connections[stream / 2].excuses.absent[role as usize] |= done;
        done
    }

    fn withdraw(&mut self, network: &mut Network<'_>, stream: usize, role: Role) -> bool {
        let host = self.host_of(stream, role);
        let region = &mut self.streams[stream].regions[role as usize];
        if !network.is_up(NodeId(host)) || region.absent.is_some() {
            return false;
        }
        let key = region.key;
        let result = network.with_machine(NodeId(host), |host, _| {
            host.endpoint_mut(None).memory_mut().regions.deregister(key)
        });
        match result {
            Ok(bytes) => region.absent = Some(bytes),
            Err(error) => self.violate(network, stream, &format!("deregister: {error}")),
        }
        self.keys[host].retain(|(other, ..)| *other != key);
        true
    }
}

/// What to post.
fn request(stream: &Stream, operation: &Operation) -> SendRequest<Vec<Piece>> {
    let [here, there] = operation.offsets.map(u64::from);
    let there = if operation.kind.is_atomic() { operation.counter as u64 * 8 } else { there };
    let remote_address = stream.regions[operation.remote() as usize].address + there;
    let remote_key = operation.key;
    let immediate = stream.immediate(stream.next);
    let immediate = operation.kind.has_immediate().then_some(immediate);
    let what = match operation.kind {
        Kind::Send | Kind::SendImmediate => SendOperation::Send { immediate },
        Kind::SendInvalidate => SendOperation::SendInvalidate { remote_key },
        Kind::Write | Kind::WriteImmediate => {
            SendOperation::Write { remote_address, remote_key, immediate }
        }
        Kind::Read => SendOperation::Read { remote_address, remote_key },
        Kind::CompareSwap | Kind::FetchAdd => match operation.atomic {
            AtomicOperation::CompareSwap { compare, swap } => {
                SendOperation::CompareSwap { remote_address, remote_key, compare, swap }
            }
            AtomicOperation::FetchAdd { add } => {
                SendOperation::FetchAdd { remote_address, remote_key, add }
            }
        },
    };
    let pieces = operation.local().map_or(Vec::new(), |role| {
        let local = &stream.regions[role as usize];
        operation.layout.pieces(local.key, local.address + here, operation.length)
    });
    SendRequest {
        signaled: operation.signaled,
        solicited: operation.solicited,
        fence: operation.fence,
        ..SendRequest::new(stream.id(stream.next), what, pieces)
    }
}
