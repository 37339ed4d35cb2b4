//! The memory that adds: what a switch's endpoint delivers into.
//!
//! Every edge has a protection domain of its own, so that a packet finds its communicator and
//! child by index. A key names a communicator; addresses within it are slots or control messages.

use millstream_roce::{
    AccessDenied, AccessKind, Destination, Memory, Piece, ProtectionDomainId, RemoteAccess,
};

use crate::abort::Violation;
use crate::communicator::{Communicator, Progress};
use crate::slots::Slots;
use crate::spec::CommunicatorSpec;

/// Which port of which communicator an edge is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Edge {
    communicator: u32,
    port: u32,
}

#[derive(Debug, Default)]
struct Place {
    /// Changes with every use, so that an old key does not open a new communicator.
    generation: u8,
    communicator: Option<Box<Communicator>>,
}

/// All communicators of a switch.
#[derive(Debug, Default)]
pub(crate) struct Aggregator {
    places: Vec<Place>,
    /// By protection domain.
    edges: Vec<Option<Edge>>,
    /// Communicators with something to send, each once.
    ready: Vec<u32>,
}

impl Aggregator {
    /// Makes a communicator with slots of this specification; returns its index. The caller has checked it and the limits.
    pub(crate) fn create(&mut self, spec: &CommunicatorSpec, slots: Slots) -> u32 {
        let index = match self.places.iter().position(|place| place.communicator.is_none()) {
            Some(index) => index,
            None => {
                self.places.push(Place::default());
                self.places.len() - 1
            }
        };
        let domains: Vec<ProtectionDomainId> = (0..spec.children.len()
            + usize::from(spec.has_parent))
            .map(|port| self.create_edge(Edge { communicator: index as u32, port: port as u32 }))
            .collect();
        let place = &mut self.places[index];
        place.generation = place.generation.wrapping_add(1);
        let key = (index as u32 + 1) << 8 | u32::from(place.generation);
        let communicator = Communicator::new(spec, slots, key, domains.into_iter());
        place.communicator = Some(Box::new(communicator));
        index as u32
    }

    fn create_edge(&mut self, edge: Edge) -> ProtectionDomainId {
        let free = self.edges.iter().position(Option::is_none);
        let domain = free.unwrap_or_else(|| {
            self.edges.push(None);
            self.edges.len() - 1
        });
        self.edges[domain] = Some(edge);
        ProtectionDomainId(domain as u32)
    }

    /// Removes a communicator; its queue pairs must be gone.
    pub(crate) fn destroy(&mut self, index: u32) {
        for edge in &mut self.edges {
            edge.take_if(|edge| edge.communicator == index);
        }
        if let Some(place) = self.places.get_mut(index as usize) {
            place.communicator = None;
        }
    }

    pub(crate) fn get(&self, index: u32) -> Option<&Communicator> {
        self.places.get(index as usize)?.communicator.as_deref()
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut Communicator> {
        self.places.get_mut(index as usize)?.communicator.as_deref_mut()
    }

    /// Notes that a communicator may have something to send.
    pub(crate) fn mark(&mut self, index: u32, progress: Progress) {
        if progress == Progress::Ready
            && let Some(communicator) = self.get_mut(index)
            && !communicator.ready
        {
            communicator.ready = true;
            self.ready.push(index);
        }
    }

    /// A communicator that may have something to send.
    pub(crate) fn take_ready(&mut self) -> Option<u32> {
        let index = self.ready.pop()?;
        if let Some(communicator) = self.get_mut(index) {
            communicator.ready = false;
        }
        Some(index)
    }

    /// Aborts a communicator because of what came on a port.
    pub(crate) fn violation(&mut self, index: u32, port: usize, violation: Violation) {
        if let Some(communicator) = self.get_mut(index) {
            // It may be aborted already, by the check that found this, and nobody was told yet.
            let _ = communicator.broken(port, violation);
            self.mark(index, Progress::Ready);
        }
    }

    fn edge(&mut self, domain: ProtectionDomainId) -> Option<(Edge, &mut Communicator)> {
        let edge = (*self.edges.get(domain.0 as usize)?)?;
        Some((edge, self.get_mut(edge.communicator)?))
    }

    /// The communicator that a key opens.
    fn keyed(&self, key: u32) -> Option<(u32, &Communicator)> {
        let index = (key >> 8).checked_sub(1)?;
        let place = self.places.get(index as usize)?;
        let communicator = place.communicator.as_deref()?;
        (place.generation == key as u8).then_some((index, communicator))
    }
}

impl Memory for Aggregator {
    fn authorize(&mut self, access: &RemoteAccess) -> Result<(), AccessDenied> {
        let (edge, communicator) = self.edge(access.domain).ok_or(AccessDenied::InvalidRequest)?;
        let port = edge.port as usize;
        let RemoteAccess { address, key, length, .. } = *access;
        let result = match access.kind {
            AccessKind::Write if communicator.is_uplink(port) => {
                communicator.admit_result(address, length)
            }
            AccessKind::Write => communicator.authorize(port, address, key, length),
            AccessKind::Read | AccessKind::Atomic => Err(AccessDenied::InvalidRequest),
        };
        if result.is_err() {
            self.mark(edge.communicator, Progress::Ready);
        }
        result
    }

    fn write(&mut self, destination: &Destination, payload: &[u8]) -> Result<(), AccessDenied> {
        let (edge, result) = match *destination {
            // The packets of a WRITE come in order, one WRITE after the other.
            Destination::Remote { access, .. } => {
                let (edge, communicator) =
                    self.edge(access.domain).ok_or(AccessDenied::InvalidRequest)?;
                let port = edge.port as usize;
                if communicator.is_uplink(port) {
                    (edge, communicator.take_result(payload))
                } else {
                    (edge, communicator.contribute(port, payload))
                }
            }
            Destination::Local { domain, address, .. } => {
                let (edge, communicator) = self.edge(domain).ok_or(AccessDenied::Protection)?;
                (edge, communicator.store(edge.port as usize, address, payload))
            }
        };
        self.mark(edge.communicator, result.unwrap_or(Progress::Ready));
        result.map(drop)
    }

    fn bytes(&self, piece: &Piece) -> Result<&[u8], AccessDenied> {
        self.keyed(piece.key)
            .and_then(|(_, communicator)| communicator.bytes(piece))
            .ok_or(AccessDenied::Protection)
    }

    fn check_local(
        &self,
        domain: ProtectionDomainId,
        piece: &Piece,
        write: bool,
    ) -> Result<(), AccessDenied> {
        let edge = self.edges.get(domain.0 as usize).copied().flatten();
        let (edge, (index, communicator)) =
            edge.zip(self.keyed(piece.key)).ok_or(AccessDenied::Protection)?;
        let right = edge.communicator == index
            && communicator.check_local(edge.port as usize, piece, write);
        if right { Ok(()) } else { Err(AccessDenied::Protection) }
    }
}

#[cfg(test)]
mod tests {
    use core::net::{IpAddr, Ipv4Addr};

    use millstream_wire::{Mtu, Psn, Qpn};

    use super::*;
    use crate::Ranks;
    use crate::spec::ChildSpec;

    fn spec(children: u32) -> CommunicatorSpec {
        let child = |rank| ChildSpec {
            ranks: Ranks::one(rank),
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            qpn: Qpn::new(5),
            psn: Psn::new(0),
            is_switch: false,
            receive_share: None,
        };
        CommunicatorSpec {
            id: 1,
            path_mtu: Mtu::B256,
            segment_bytes: 256,
            window: 1,
            world: children,
            children: (0..children).map(child).collect(),
            has_parent: false,
            options: crate::CommunicatorOptions::default(),
        }
    }

    fn create(aggregator: &mut Aggregator, children: u32) -> u32 {
        let spec = spec(children);
        aggregator.create(&spec, Slots::of(&spec))
    }

    /// A piece of the first slot, and the receive buffer of a child.
    fn pieces(aggregator: &Aggregator, index: u32, child: usize) -> (Piece, Piece) {
        let request = aggregator.get(index).unwrap().receive_request(child, 0);
        let [receive] = request.pieces;
        (Piece { key: receive.key, address: 0, length: 16 }, receive)
    }

    #[test]
    fn places_and_domains_are_used_again_and_old_keys_open_nothing() {
        let mut aggregator = Aggregator::default();
        let kept = create(&mut aggregator, 3);
        let first = create(&mut aggregator, 2);
        let (old, _) = pieces(&aggregator, first, 0);
        assert!(aggregator.bytes(&old).is_ok());
        aggregator.destroy(first);
        assert!(aggregator.bytes(&old).is_err());
        for _ in 0..300 {
            let next = create(&mut aggregator, 4);
            assert_eq!(next, first);
            aggregator.destroy(next);
        }
        assert_eq!(create(&mut aggregator, 2), first);
        assert!(aggregator.bytes(&old).is_err());
        assert_eq!((aggregator.places.len(), aggregator.edges.len()), (2, 7));
        let (kept, _) = pieces(&aggregator, kept, 0);
        assert!(aggregator.bytes(&kept).is_ok());
    }

    #[test]
    fn work_requests_reach_only_their_own_communicator() {
        let mut aggregator = Aggregator::default();
        let (ours, theirs) = (create(&mut aggregator, 2), create(&mut aggregator, 2));
        let domain =
            |index, child: usize| aggregator.get(index).map(|c| c.children[child].domain).unwrap();
        let (ours_domain, theirs_domain) = (domain(ours, 0), domain(theirs, 0));
        let (slot, receive) = pieces(&aggregator, ours, 0);
        let check =
            |domain, piece: Piece, write| aggregator.check_local(domain, &piece, write).is_ok();
        assert!(check(ours_domain, slot, false));
        assert!(check(ours_domain, receive, true));
        // Receives never go into slots, nor beyond the buffers.
        assert!(!check(ours_domain, slot, true));
        assert!(!check(ours_domain, Piece { length: 1 << 20, ..receive }, true));
        assert!(!check(ours_domain, Piece { length: 1 << 20, ..slot }, false));
        assert!(!check(ours_domain, Piece { address: u64::MAX, ..slot }, false));
        assert!(!check(theirs_domain, slot, false));
        assert!(!check(theirs_domain, receive, true));
        assert!(!check(ProtectionDomainId(99), slot, false));
        assert!(!check(ours_domain, Piece { key: 0, ..slot }, false));
    }

    #[test]
    fn a_read_or_an_unknown_edge_is_refused() {
        let mut aggregator = Aggregator::default();
        let index = create(&mut aggregator, 1);
        let domain = aggregator.get(index).unwrap().children[0].domain;
        let (qpn, key, address, length) = (Qpn::new(5), 0, 0, 4);
        let read = RemoteAccess { qpn, domain, kind: AccessKind::Read, key, address, length };
        assert_eq!(aggregator.authorize(&read), Err(AccessDenied::InvalidRequest));
        let domain = ProtectionDomainId(1);
        let write = RemoteAccess { domain, kind: AccessKind::Write, ..read };
        assert_eq!(aggregator.authorize(&write), Err(AccessDenied::InvalidRequest));
        let destination = Destination::Remote { access: write, offset: 0 };
        assert!(aggregator.write(&destination, &[1]).is_err());
    }
}
