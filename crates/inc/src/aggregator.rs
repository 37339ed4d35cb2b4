//! The memory that adds: what a switch's endpoint delivers into.
//!
//! Every edge has a protection domain of its own, so that a packet finds its communicator and
//! child by index. A key names a communicator; addresses within it are slots or control messages.

use millstream_roce::{
    AccessDenied, AccessKind, Destination, Memory, Piece, ProtectionDomainId, RemoteAccess,
};

use crate::abort::{Abort, Violation};
use crate::communicator::{Communicator, Progress};
use crate::spec::CommunicatorSpec;

/// Which child of which communicator an edge is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Edge {
    communicator: u32,
    child: u32,
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
    /// Makes a communicator; returns its index. The caller has checked `spec` and the limits.
    pub(crate) fn create(&mut self, spec: &CommunicatorSpec) -> u32 {
        let index = match self.places.iter().position(|place| place.communicator.is_none()) {
            Some(index) => index,
            None => {
                self.places.push(Place::default());
                self.places.len() - 1
            }
        };
        let domains: Vec<ProtectionDomainId> = (0..spec.children.len())
            .map(|child| self.create_edge(Edge { communicator: index as u32, child: child as u32 }))
            .collect();
        let place = &mut self.places[index];
        place.generation = place.generation.wrapping_add(1);
        let key = (index as u32 + 1) << 8 | u32::from(place.generation);
        let communicator = Communicator::new(spec, key, domains.into_iter());
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
        self.ready.retain(|&other| other != index);
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

    /// Aborts a communicator because of what a child did.
    pub(crate) fn violation(&mut self, index: u32, child: usize, violation: Violation) {
        if let Some(communicator) = self.get_mut(index) {
            let rank = communicator.children[child].rank;
            let progress = communicator.abort(Abort::Violation { rank, violation });
            self.mark(index, progress);
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
        let child = edge.child as usize;
        let RemoteAccess { address, key, length, .. } = *access;
        let result = match access.kind {
            AccessKind::Write => communicator.authorize(child, address, key, length),
            AccessKind::Read => Err(AccessDenied::InvalidRequest),
        };
        if result.is_err() {
            self.mark(edge.communicator, Progress::Ready);
        }
        result
    }

    fn write(&mut self, destination: &Destination, payload: &[u8]) -> Result<(), AccessDenied> {
        match *destination {
            Destination::Remote { access, offset } => {
                let (edge, communicator) =
                    self.edge(access.domain).ok_or(AccessDenied::InvalidRequest)?;
                let result = communicator.contribute(edge.child as usize, offset, payload);
                self.mark(edge.communicator, result.unwrap_or(Progress::Ready));
                result.map(drop)
            }
            Destination::Local { domain, address, .. } => {
                let (_, communicator) = self.edge(domain).ok_or(AccessDenied::Protection)?;
                communicator.store(address, payload)
            }
        }
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
        self.keyed(piece.key)
            .filter(|(index, _)| edge.is_some_and(|edge| edge.communicator == *index))
            .filter(|(_, communicator)| communicator.check_local(piece, write))
            .map(drop)
            .ok_or(AccessDenied::Protection)
    }
}
