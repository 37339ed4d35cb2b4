//! What is asked of a peer: to connect, to fence, and whether it is there.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use millstream_metadata::{
    CallError, CallErrorKind, Frame, FrameType, HandShakeDesc, HostPort, NicPath,
};
use millstream_transfer_core::RailId;

use super::connection::{self, Unconnected};
use super::control_addresses::Place;
use super::peer::Peer;
use super::ports::sender_of;
use crate::FailureReason;

/// How long a fence, and the question whether it is there, may take the peer.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(1);

impl Peer {
    /// Makes queue pairs, and asks the peer to connect them.
    pub(super) fn connect(&self, rail: RailId, epoch: u64) {
        if self.wants(rail, epoch)
            && let Err(reason) = self.begin_to_connect(rail, epoch)
        {
            self.not_connected(rail, epoch, reason);
        }
    }

    fn begin_to_connect(&self, rail: RailId, epoch: u64) -> Result<(), FailureReason> {
        let (device, way, config) = (self.device(rail), self.way(rail), &self.shared.config);
        tracing::info!(peer = &*self.name, nic = way.nic.nic, epoch, "connecting");
        // The system looks for a neighbour for a second, and in vain.
        if !device.device.port_works() {
            return Err(device.port_down());
        }
        let own_mtu = device
            .path_mtu(way.at.ip)
            .map_err(|error| FailureReason::PathMtu(error.to_string()))?;
        let place = device.links.make_room(device.device.name())?;
        let count = config.queue_pairs_per_endpoint;
        let unconnected = Unconnected::new(device, count, config.send_queue_depth)?;
        let request = HandShakeDesc {
            qp_num: unconnected.numbers(),
            start_psn: unconnected.start_psn(),
            path_mtu: Some(own_mtu.bytes() as u32),
            epoch: Some(epoch),
            control_address: Some(self.shared.context.control_address),
            ..self.greeting(rail)
        };
        let timeout = self.shared.context.calls.timeout();
        self.ask_peer(request, timeout, None, move |peer, reply| {
            let connected = reply.and_then(|reply| {
                if !reply.reply_msg.is_empty() {
                    let reason = reply.reply_msg.chars().take(200).collect();
                    let reason = FailureReason::Refused(reason);
                    if let Some(floor) = reply.epoch_floor {
                        peer.refused(rail, epoch, floor, reason);
                        return Ok(None);
                    }
                    return Err(reason);
                }
                let nonsense = FailureReason::Handshake;
                let at = sender_of(&reply).unwrap_or(peer.way(rail).at);
                let theirs = connection::Peer::parse(&reply, at, count, own_mtu);
                let timeout = peer.shared.config.acknowledge_timeout;
                let theirs = theirs.map_err(nonsense)?;
                unconnected.expected_by(&theirs).connect(&theirs, timeout).map(Some)
            });
            match connected {
                // What is not wanted any more is dropped here, without a lock.
                Ok(Some(connection)) => drop(peer.connected(rail, epoch, connection, place)),
                Ok(None) => {}
                Err(reason) => peer.not_connected(rail, epoch, reason),
            }
        });
        Ok(())
    }

    /// Asks the peer to confirm that nothing of a connection can arrive any more.
    pub(super) fn fence(&self, rail: RailId, epoch: u64) {
        let request = HandShakeDesc { fence: true, epoch: Some(epoch), ..self.greeting(rail) };
        // What has just failed is no way to ask.
        let failed = self.rails.get(usize::from(rail.0)).map(|way| way.at.ip);
        self.ask_peer(request, QUESTION_TIMEOUT, failed, move |peer, reply| {
            match reply {
                Ok(reply) if reply.fenced.is_some_and(|fenced| fenced >= epoch) => {
                    peer.fenced(rail, epoch, true);
                }
                // It does not know of fences.
                Ok(reply) if reply.incarnation.is_none() => peer.fenced(rail, epoch, false),
                // The flow asks again, also where nobody knows where to ask.
                Ok(_) | Err(_) => {}
            }
        });
    }

    /// Asks the peer whether it is there: to fence what was never connected, which changes nothing.
    pub(super) fn ask(&self) {
        let request =
            HandShakeDesc { fence: true, epoch: Some(0), ..self.greeting(RailId(u16::MAX)) };
        self.ask_peer(request, QUESTION_TIMEOUT, None, |peer, reply| {
            peer.asked();
            if reply.is_ok() {
                peer.leave_to_others();
            }
        });
    }

    /// What every handshake from here says.
    fn greeting(&self, rail: RailId) -> HandShakeDesc {
        let way = self.rails.get(usize::from(rail.0)).unwrap_or(&self.rails[0]);
        let device = &self.shared.devices[way.local];
        let context = &self.shared.context;
        let nic = device.device.name().to_owned();
        HandShakeDesc {
            local_nic_path: NicPath { server: context.engine.clone(), nic }.to_string(),
            local_lid: device.device.lid(),
            local_gid: Some(device.gid()),
            peer_nic_path: way.nic.to_string(),
            incarnation: Some(context.incarnation),
            peer_incarnation: self.incarnation(),
            rail: Some(rail.0),
            ..HandShakeDesc::default()
        }
    }

    /// Asks at the peer's control port, rather not by the NIC with the address `avoided`, and tells `done` what it
    /// has answered. Takes note of who answers, or that nobody is there.
    fn ask_peer(
        &self,
        request: HandShakeDesc,
        timeout: Duration,
        avoided: Option<IpAddr>,
        done: impl FnOnce(&Self, Result<HandShakeDesc, FailureReason>) + Send + 'static,
    ) {
        let (own, asked) = (self.own.clone(), self.incarnation());
        self.shared.context.lookups.address(&self.name, asked, move |found| {
            let Some(own) = own.upgrade() else { return };
            match found {
                Ok(name) => own.ask_at(&name, request, (timeout, avoided, asked), done),
                Err(error) => done(&own, Err(FailureReason::Handshake(error.to_string()))),
            }
        });
    }

    /// The same of a peer that had this incarnation, and whose name leads there.
    fn ask_at(
        &self,
        name: &HostPort,
        request: HandShakeDesc,
        (timeout, avoided, asked): (Duration, Option<IpAddr>, Option<u64>),
        done: impl FnOnce(&Self, Result<HandShakeDesc, FailureReason>) + Send + 'static,
    ) {
        let frame = Frame::new(FrameType::Connection, request.to_json());
        let own = self.own.clone();
        let (place, address) = self.control.choose(self.now(), name, avoided);
        let answered = move |reply: Result<Frame, CallError>| {
            let Some(own) = own.upgrade() else { return };
            // Whoever makes the call has others to make.
            own.clone().in_background(move |peer| {
                let reply = peer.understand(reply, asked, place);
                done(peer, reply);
            });
        };
        self.shared.context.calls.call(&address, frame, timeout, Box::new(answered));
    }

    /// What a peer that had this incarnation has answered at this one of its addresses.
    fn understand(
        &self,
        reply: Result<Frame, CallError>,
        asked: Option<u64>,
        place: Place,
    ) -> Result<HandShakeDesc, FailureReason> {
        let reply = match reply {
            Ok(reply) => reply,
            Err(CallError { kind, .. }) => {
                let refused = matches!(kind, CallErrorKind::Refused { .. });
                let reason = FailureReason::Unreachable(Arc::new(kind));
                if refused {
                    self.control.refused(place);
                }
                // At the address of a NIC it may not listen.
                if refused && place.is_none() {
                    self.gone(asked, reason.clone());
                }
                return Err(reason);
            }
        };
        let reply = HandShakeDesc::from_json(&reply.body)
            .map_err(|error| FailureReason::Handshake(error.to_string()))?;
        // Only at the address of its name may it be another process now. At that of a NIC somebody else may listen.
        if place.is_some() && (asked.is_none() || reply.incarnation != asked) {
            self.control.refused(place);
            let what = "somebody else answers at the address of its NIC".to_owned();
            return Err(FailureReason::Handshake(what));
        }
        self.answered();
        self.control.answered(place);
        if let Some(incarnation) = reply.incarnation
            && self.has_incarnation
        {
            self.restarted(asked, incarnation);
        }
        Ok(reply)
    }
}
