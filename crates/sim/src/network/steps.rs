//! What happens when an event's time has come.

use std::io;

use millstream_wire::{Bth, Packet};

use super::{Change, Event, HostOptions, IdentificationSource, NodeId, Place, Simulation};
use crate::link::Fate;
use crate::record::{self, Happening, Record, Subject};
use crate::{Datagram, LinkId, Machine, PacketInfo, Verdict};

impl<M: Machine> Simulation<'_, M> {
    /// Lets the next event happen; `false` when there is none.
    pub fn step(&mut self) -> bool {
        let Some((at, event)) = self.events.pop() else { return false };
        assert!(at >= self.now, "an event was queued for the past");
        self.events_now = if at == self.now { self.events_now + 1 } else { 0 };
        self.now = at;
        if self.events_now > Self::EVENTS_AT_ONE_TIME {
            self.violate(
                "time stands still: the machines wake or answer each other for ever".into(),
            );
        }
        match event {
            Event::Deliver(node, datagram) => self.deliver(node, datagram),
            Event::Take(node) => self.take(node),
            Event::Wake(node) => self.wake(node),
            Event::Alarm => {}
            Event::Change(change) => self.change(change),
        }
        true
    }

    fn deliver(&mut self, node: NodeId, datagram: Datagram) {
        let place = &mut self.places[node.0];
        if !place.up {
            self.record(Happening::ReceiverDown, Subject::Datagram(&datagram));
            return self.recycle(datagram);
        }
        let account = 2 * (datagram.payload.len() as u64 + 256);
        if place.inbox_account + account > place.options.receive_buffer {
            self.record(Happening::ReceiveBufferFull, Subject::Datagram(&datagram));
            return self.recycle(datagram);
        }
        place.inbox_account += account;
        place.inbox.push(datagram);
        let coalescing = place.options.coalescing;
        if coalescing.is_zero() {
            self.take(node);
        } else if place.inbox.len() == 1 {
            self.events.push(self.now + coalescing, Event::Take(node));
        }
    }

    fn take(&mut self, node: NodeId) {
        let mut inbox = core::mem::take(&mut self.places[node.0].inbox);
        self.places[node.0].inbox_account = 0;
        for datagram in inbox.drain(..) {
            self.record(Happening::Delivered, Subject::Datagram(&datagram));
            let place = &mut self.places[node.0];
            let meta = datagram.meta(place.options.sees_ip_header);
            place.machine.handle_datagram(self.now, &meta, &datagram.payload);
            self.recycle(datagram);
        }
        let place = &mut self.places[node.0];
        place.inbox = inbox;
        // As drivers do in each round: early calls are harmless.
        place.machine.handle_timeout(self.now);
        self.settle(node);
    }

    fn wake(&mut self, node: NodeId) {
        let place = &mut self.places[node.0];
        // An earlier event than this one took its place.
        if place.wake != Some(self.now) {
            return;
        }
        place.wake = None;
        if !place.up {
            return;
        }
        if place.machine.poll_timeout().is_some_and(|at| at <= self.now) {
            place.machine.handle_timeout(self.now);
        }
        self.settle(node);
    }

    pub(super) fn change(&mut self, change: Change) {
        match change {
            Change::Cut(link) => {
                self.links[link.0].cut = true;
                self.record(Happening::Cut, Subject::Link(link.0));
            }
            Change::Heal(link) => {
                self.links[link.0].cut = false;
                self.record(Happening::Healed, Subject::Link(link.0));
            }
            Change::Crash(node) => {
                let place = &mut self.places[node.0];
                place.up = false;
                place.inbox.clear();
                place.inbox_account = 0;
                let address = place.address;
                self.record(Happening::Crashed, Subject::Machine(address));
            }
            Change::Restart(node) => {
                let place = &mut self.places[node.0];
                place.up = true;
                place.machine.restart(self.now);
                let address = place.address;
                self.checker.forget_sender(address);
                self.record(Happening::Restarted, Subject::Machine(address));
                self.settle(node);
            }
        }
    }

    /// Lets a machine act and send until it has nothing left to do now.
    pub(super) fn settle(&mut self, node: NodeId) {
        if !self.places[node.0].up {
            return;
        }
        let mut sent = 0;
        loop {
            let place = &mut self.places[node.0];
            place.machine.run(self.now);
            while sent < Self::EVENTS_AT_ONE_TIME
                && place.machine.poll_transmit(self.now, &mut self.transmit)
            {
                sent += 1;
                let mut payload = self.spare.pop().unwrap_or_default();
                payload.clear();
                let identification = place.next_identification;
                let Place { address: source, options, .. } = *place;
                let HostOptions { source_port, .. } = options;
                if !self.transmit.assemble(
                    &place.machine,
                    source,
                    source_port,
                    identification,
                    &mut payload,
                ) {
                    continue;
                }
                if source.is_ipv4() && options.identification == IdentificationSource::Counter {
                    place.next_identification = identification.wrapping_add(1);
                }
                let datagram = Datagram {
                    number: self.next_number,
                    source,
                    source_port,
                    destination: self.transmit.destination,
                    identification,
                    congestion_experienced: false,
                    payload,
                };
                self.outbox.push((self.transmit.source_qpn, datagram));
                self.next_number += 1;
            }
            if self.outbox.is_empty() {
                break;
            }
            let mut outbox = core::mem::take(&mut self.outbox);
            for (source, datagram) in outbox.drain(..) {
                if let Err(what) = self.checker.sent(source, &datagram) {
                    self.violate(format!("{}: {what}", datagram.source));
                }
                self.send(node, datagram);
            }
            self.outbox = outbox;
            if sent >= Self::EVENTS_AT_ONE_TIME {
                let address = self.places[node.0].address;
                self.violate(format!("{address} sends for ever without waiting"));
                break;
            }
        }
        self.schedule_wake(node);
    }

    fn schedule_wake(&mut self, node: NodeId) {
        let place = &mut self.places[node.0];
        let timeout = place.machine.poll_timeout();
        let wake = place.machine.poll_wake();
        let Some(at) = timeout.into_iter().chain(wake).min() else { return };
        let at = at.max(self.now);
        if place.wake.is_none_or(|queued| at < queued) {
            place.wake = Some(at);
            self.events.push(at, Event::Wake(node));
        }
    }

    /// Puts a datagram on its way.
    pub(super) fn send(&mut self, from: NodeId, mut datagram: Datagram) {
        self.bytes_sent += datagram.payload.len() as u64;
        self.record(Happening::Sent, Subject::Datagram(&datagram));
        if let Some(pcap) = &mut self.pcap {
            let result = pcap.write(self.now, &datagram);
            self.keep_error(result);
        }
        let route = self.by_address.get(&datagram.destination).copied();
        let route = route.and_then(|to| Some((to, *self.routes.get(&(from, to))?)));
        let Some((to, link)) = route else {
            self.record(Happening::Unreachable, Subject::Datagram(&datagram));
            return self.recycle(datagram);
        };
        let verdict = self.verdict(from, to, link, &datagram);
        if verdict == Verdict::Drop {
            self.record(Happening::Dropped, Subject::Datagram(&datagram));
            return self.recycle(datagram);
        }
        let fate = self.links[link.0].carry(self.now, datagram.wire_length() as u64);
        let gone = match fate {
            Fate::Partitioned => Happening::Partitioned,
            Fate::Overflowed => Happening::Overflowed,
            Fate::Lost => Happening::Lost,
            Fate::Carried(carried) => {
                let mut at = carried.at;
                if let Verdict::Delay(delay) = verdict {
                    at = at + delay;
                }
                let copy_at = carried.copy_at.or((verdict == Verdict::Duplicate).then_some(at));
                if carried.held_back || at != carried.at {
                    self.record(Happening::HeldBack, Subject::Datagram(&datagram));
                }
                if carried.marked {
                    datagram.congestion_experienced = true;
                    self.record(Happening::Marked, Subject::Datagram(&datagram));
                }
                if let Some(copy_at) = copy_at {
                    self.record(Happening::Duplicated, Subject::Datagram(&datagram));
                    let copy = datagram.clone();
                    self.events.push(copy_at, Event::Deliver(to, copy));
                }
                if let Some(random) = carried.flip {
                    flip_covered_bit(&mut datagram.payload, random);
                    self.record(Happening::Corrupted, Subject::Datagram(&datagram));
                }
                self.events.push(at, Event::Deliver(to, datagram));
                return;
            }
        };
        self.record(gone, Subject::Datagram(&datagram));
        self.recycle(datagram);
    }

    fn verdict(&mut self, from: NodeId, to: NodeId, link: LinkId, datagram: &Datagram) -> Verdict {
        if self.rules.is_empty() {
            return Verdict::Pass;
        }
        let info = PacketInfo {
            now: self.now,
            source: from,
            destination: to,
            link,
            datagram,
            packet: Packet::parse(&datagram.payload).ok(),
        };
        let verdicts = self.rules.iter_mut().map(|rule| rule.on_packet(&info));
        verdicts.into_iter().find(|verdict| *verdict != Verdict::Pass).unwrap_or(Verdict::Pass)
    }

    fn record(&mut self, happening: Happening, subject: Subject<'_>) {
        let record = Record { at: self.now, happening, subject };
        self.counts[happening as usize] += 1;
        self.digest.add(&record);
        if let Some(log) = &mut self.log {
            let result = record::write_line(*log, &record);
            self.keep_error(result);
        }
    }

    pub(super) fn keep_error(&mut self, result: io::Result<()>) {
        if let Err(error) = result {
            self.output_error.get_or_insert(error);
        }
    }

    fn recycle(&mut self, datagram: Datagram) {
        const KEPT: usize = 1024;
        if self.spare.len() < KEPT {
            self.spare.push(datagram.payload);
        }
    }
}

/// Flips one of the bits that the ICRC covers: all but the byte of the BTH that routers may change
/// (FECN, BECN and six reserved bits), by which nothing is stored or acknowledged.
fn flip_covered_bit(payload: &mut [u8], random: u64) {
    const UNCOVERED: usize = 4;
    const _: () = assert!(UNCOVERED < Bth::LENGTH);
    let covered = payload.len().saturating_sub(1);
    if covered == 0 {
        return;
    }
    let bit = ((u128::from(random) * (covered as u128 * 8)) >> 64) as usize;
    let byte = bit / 8 + usize::from(bit / 8 >= UNCOVERED);
    payload[byte] ^= 1 << (bit % 8);
}
