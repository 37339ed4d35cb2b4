//! What hosts saw of their queue pairs for datagrams, held against the model.

use core::time::Duration;

use millstream_roce::{AsyncEvent, Completion, CompletionStatus};

use super::datagrams::{Header, Port, Received, State, holds};
use super::director::{Action, Director, Network};
use super::draw::duration;
use super::memory::Effect;
use super::pool::Pool;
use crate::NodeId;

impl Director {
    /// A port's device sends a datagram.
    pub(super) fn port_sends(&mut self, network: &mut Network<'_>, host: usize, header: &Header) {
        let Some(index) = self.find_port(host, Some(header.source)) else {
            return network.violate(format!("host {host}: sends for no queue pair: {header:?}"));
        };
        let next = self.ports[index].plan.messages.get(self.ports[index].next_sent());
        let to = next.map_or(0, |message| self.ports[message.to].plan.host);
        let address = self.world.hosts[to].address;
        if let Err(what) = self.ports[index].sends(header, address) {
            self.violate_port(network, index, &what);
        }
    }

    /// A datagram has reached a port.
    pub(super) fn port_is_reached(
        &mut self,
        network: &mut Network<'_>,
        host: usize,
        header: &Header,
    ) {
        let Some(index) = self.find_port(host, Some(header.destination)) else { return };
        let Some((from, number)) = header.message() else {
            return self.violate_port(network, index, &format!("reached by {header:?}"));
        };
        let copies = 1 + u32::from(self.world.doubles());
        let Some(message) =
            self.ports.get_mut(from).and_then(|port| port.plan.messages.get_mut(number))
        else {
            return self.violate_port(network, index, &format!("nobody sent {header:?}"));
        };
        message.arrived += 1;
        let (solicited, too_many) = (message.solicited, message.arrived > copies);
        let pool = match self.ports[index].plan.shares {
            true => self.pools[host].as_ref(),
            false => Some(&self.ports[index].pool),
        };
        let room = pool.and_then(Pool::room);
        match self.ports[index].is_due(header, room, solicited) {
            Err(what) => self.violate_port(network, index, &what),
            Ok(_) if too_many => {
                let what = format!("reached by more than {copies} copies of {header:?}");
                self.violate_port(network, index, &what);
            }
            Ok(true) => self.tally.one("datagrams: delivered"),
            Ok(false) => {
                self.tally.one("datagrams: no receive request");
                let open = matches!(self.ports[index].state, State::Up | State::Drained);
                self.unreceived[host] += u64::from(open);
            }
        }
    }

    /// Bytes were written by a datagram, into the region of this key. Returns whether it is one
    /// that datagrams may write.
    pub(super) fn port_writes(
        &self,
        network: &mut Network<'_>,
        host: usize,
        effect: &Effect,
    ) -> bool {
        let pool_of = |port: &Port| port.plan.host == host && port.pool.key == effect.key;
        let by = self.find_port(host, effect.qpn);
        let owner = self.ports.iter().position(pool_of);
        let Some(index) = by.or(owner) else { return false };
        let port = &self.ports[index];
        let pool = match port.plan.shares {
            true => self.pools[host].as_ref(),
            false => Some(&port.pool),
        };
        let slot = pool.and_then(|pool| Some((pool, pool.slot(port.writable()?))));
        let is_right = slot.is_some_and(|(pool, slot)| {
            let place = effect.address.wrapping_sub(pool.address);
            by == Some(index)
                && !effect.remote
                && effect.key == pool.key
                && place >= slot.offset.into()
                && place + u64::from(effect.length) <= u64::from(slot.offset + slot.length)
        });
        if !is_right {
            self.violate_port(network, index, &format!("not to be written: {effect:?}"));
        }
        true
    }

    /// A completion of a port's queue pair. Returns whether it counts as solicited.
    pub(super) fn port_completed(
        &mut self,
        network: &mut Network<'_>,
        index: usize,
        completion: &Completion,
    ) -> bool {
        let host = self.ports[index].plan.host;
        let failed = completion.status != CompletionStatus::Success;
        if Port::is_sent(completion) {
            self.tally.one(match completion.status {
                CompletionStatus::Success => "datagrams: sent",
                CompletionStatus::Flushed => "datagrams: flushed",
                _ => "datagrams: failed",
            });
            if let Err(what) = self.ports[index].completed(completion) {
                self.violate_port(network, index, &what);
            }
            if completion.status == CompletionStatus::LocalProtection {
                let life = self.ports[index].life;
                let pause = duration(&mut self.rng, Duration::from_micros(500));
                self.plan_after(network, pause, Action::RecoverPort { port: index, life });
            }
            if core::mem::take(&mut self.ports[index].blocked) {
                self.plan_after(network, Duration::ZERO, Action::PostDatagrams(index));
            }
            return failed;
        }
        if failed {
            self.receive_failed(network, index, completion);
            return true;
        }
        loop {
            let port = &mut self.ports[index];
            let pool = if port.plan.shares { self.pools[host].as_ref() } else { None };
            match port.received(completion, pool) {
                Err(what) => {
                    self.violate_port(network, index, &what);
                    return false;
                }
                Ok(received) => {
                    if received.is_right {
                        self.look_at(network, index, &received);
                    }
                    self.free_slot(network, index, received.slot);
                    if received.is_right {
                        return received.solicited;
                    }
                }
            }
        }
    }

    /// A receive request is flushed, oldest first, when its queue pair has failed.
    fn receive_failed(&mut self, network: &mut Network<'_>, index: usize, completion: &Completion) {
        let port = &mut self.ports[index];
        if port.lossy {
            return;
        }
        let slot = port.pool.take();
        let is_it = slot.is_some_and(|slot| port.pool.is_of(slot, completion.id));
        let may = port.state == State::Broken
            && completion.status == CompletionStatus::Flushed
            && !port.plan.shares
            && !port.is_owed();
        if let Some(slot) = slot {
            port.pool.release(slot);
        }
        if !may || !is_it {
            self.violate_port(network, index, &format!("no reason for {completion:?}"));
        }
    }

    /// The application reads what it got.
    fn look_at(&self, network: &mut Network<'_>, index: usize, received: &Received) {
        let port = &self.ports[index];
        let host = port.plan.host;
        let own = Some(&port.pool);
        let Some(pool) = (if port.plan.shares { self.pools[host].as_ref() } else { own }) else {
            return;
        };
        let slot = pool.slot(received.slot);
        let memory = network.machine(NodeId(host)).endpoint().memory();
        let region = memory.regions.region(pool.key).unwrap_or_default();
        let bytes = region.get(slot.offset as usize..).unwrap_or_default();
        let (from, number) = received.message;
        let payload = self.ports[from].bytes(number);
        let sender = self.world.hosts[self.ports[from].plan.host].address;
        let right = bytes.get(..slot.length as usize).is_some_and(|bytes| {
            holds(slot, bytes, &payload, received.from, self.world.hosts[host].address)
        });
        if !right || sender != received.from {
            let what = format!("datagram {number} of port {from} is not as it was sent");
            self.violate_port(network, index, &what);
        }
    }

    fn free_slot(&mut self, network: &mut Network<'_>, index: usize, slot: usize) {
        let port = &mut self.ports[index];
        if port.plan.shares {
            let host = port.plan.host;
            return self.release(network, host, slot);
        }
        port.pool.release(slot);
        let lag = port.pool.plan.lag;
        self.plan_after(network, lag, Action::FillPort(index));
    }

    /// An event of a port's queue pair.
    pub(super) fn port_happened(
        &mut self,
        network: &mut Network<'_>,
        index: usize,
        event: AsyncEvent,
    ) {
        let port = &mut self.ports[index];
        let right = match event {
            AsyncEvent::QueuePairFatal(_) => {
                port.state = State::Broken;
                port.lossy && !core::mem::replace(&mut port.reported, true)
            }
            AsyncEvent::LastReceiveRequest(_) => {
                port.plan.shares && !core::mem::replace(&mut port.took_last, true)
            }
            AsyncEvent::SendQueueDrained(_) => core::mem::take(&mut port.draining),
            _ => false,
        };
        if !right {
            return self.violate_port(network, index, &format!("no reason for {event:?}"));
        }
        if matches!(event, AsyncEvent::SendQueueDrained(_)) {
            let life = port.life;
            let pause = duration(&mut self.rng, Duration::from_micros(300));
            self.plan_after(network, pause, Action::ResumePort { port: index, life });
        }
    }
}
