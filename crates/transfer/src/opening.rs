//! Segments are opened and refreshed: where their descriptors come from, relays among it, and who is told.

use std::sync::Arc;

use millstream_metadata::{HostPort, Purpose, SegmentDesc};

use crate::engine::Inner;
use crate::segment::OpenSegment;
use crate::tcp::relay::{self, RelayTransport, Way};
use crate::transport::Transport;
use crate::{InstallError, RelayConfig, Segment, SegmentError, SegmentId, TransferEngine};

impl TransferEngine {
    /// Installs the transport `relay`: segments of memory to which no other transport leads are reached through one of
    /// these relays, if it has a way there. What cannot be asked for its descriptor is looked for there, too. Behind all
    /// others; `tcp` is installed before it, if at all.
    ///
    /// A relay is an engine with [`crate::TcpConfig::relay`]. It asks no relays itself, so that there are no circles.
    pub fn install_relay(&self, config: &RelayConfig) -> Result<(), InstallError> {
        let inner = &self.inner;
        let installing = inner.installing();
        inner.check_new(relay::NAME)?;
        if self.staging.get().is_some() {
            return Err(InstallError::Relay(
                "a relay (tcp.relay) asks no relays itself".to_owned(),
            ));
        }
        let (client, gate) = (inner.client.clone(), inner.gate(Purpose::Memory));
        let progress = inner.streams.get().cloned();
        let transport = RelayTransport::new(config, inner.own.clone(), client, gate, progress)?;
        let transport = Arc::new(transport);
        inner.install(Arc::clone(&transport) as Arc<dyn Transport>)?;
        let _ = inner.streams.set(Arc::clone(transport.shared_progress()));
        let _ = inner.relays.set(Arc::clone(&transport));
        drop(installing);
        inner.prepare_open(&*transport);
        Ok(())
    }
}

impl Inner {
    /// [`crate::TransferEngine::open_segment`].
    pub(crate) fn open_segment(&self, name: &str) -> Result<Segment, SegmentError> {
        let segments = &self.segments;
        // What is no name is told by who looks it up. At a metadata server, names need no port.
        let default_port = self.default_port;
        let whole = default_port.and_then(|port| HostPort::parse_with_default(name, port).ok());
        let whole = whole.map(|name| name.to_string());
        let name = whole.as_deref().unwrap_or(name);
        if let Some(open) = segments.by_name(name) {
            match open.id {
                SegmentId::LOCAL => self.refresh(&open)?,
                // Another thread may have just opened it.
                _ => self.prepare(&open),
            }
            return Ok(Segment { open });
        }
        tracing::info!(segment = name, "asking for its descriptor");
        let (descriptor, way) = self.find(name)?;
        warn_of_bad_buffers(name, &descriptor, None);
        let (buffers, devices) = (descriptor.buffers.len(), descriptor.devices.len());
        tracing::info!(
            segment = name,
            own_name = descriptor.name,
            buffers,
            devices,
            relayed = way.is_some(),
            "segment open"
        );
        // Another process may have our name, seen from where it is.
        if descriptor.name == self.name()
            && descriptor.incarnation == Some(self.incarnation())
            && let Some(open) = segments.by_id(SegmentId::LOCAL)
        {
            self.refresh(&open)?;
            return Ok(Segment { open });
        }
        let open = segments.insert(name, descriptor, way)?;
        self.prepare(&open);
        Ok(Segment { open })
    }

    /// Opens a segment once more for itself, which nobody finds by its name. No relay is asked. It never becomes that of
    /// another start of its process: who has its addresses means this one.
    pub(crate) fn open_aside(&self, name: &str) -> Result<Arc<OpenSegment>, SegmentError> {
        let open = self.segments.insert_aside(name, self.descriptor(name)?)?;
        self.prepare(&open);
        Ok(open)
    }

    /// Closes one that was opened so. Transfers under way go on.
    pub(crate) fn close_aside(&self, open: &OpenSegment) {
        if self.segments.remove(open.id).is_ok() {
            self.transports().iter().for_each(|transport| transport.forget(open.id));
        }
    }

    /// Asks for the descriptor of an open segment again: where it was found.
    pub(crate) fn refresh(&self, open: &Arc<OpenSegment>) -> Result<(), SegmentError> {
        if open.id == SegmentId::LOCAL {
            let failed = |error| SegmentError::Store { name: open.name.clone(), error };
            return self.publish().map_err(failed);
        }
        let relays = self.relays.get().filter(|_| open.is_relayed());
        let (descriptor, way) = match relays.map(|relays| relays.find(&open.name)) {
            Some(Ok((descriptor, way))) => (descriptor, Some(way)),
            Some(Err(said)) => {
                let error = |error| not_relayed(error, said);
                (self.descriptor(&open.name).map_err(error)?, None)
            }
            None => (self.descriptor(&open.name)?, None),
        };
        if open.is_bound() && descriptor.incarnation != open.descriptor().incarnation {
            return Err(SegmentError::Restarted { name: open.name.clone() });
        }
        warn_of_bad_buffers(&open.name, &descriptor, Some(&open.descriptor()));
        open.answered();
        open.set_way(way);
        open.replace_descriptor(descriptor, |descriptor| self.tell_transports(open, descriptor));
        Ok(())
    }

    /// Tells the transports of a segment that was opened. May wait for its process.
    pub(crate) fn prepare(&self, open: &Arc<OpenSegment>) {
        open.prepare(|descriptor| self.tell_transports(open, descriptor));
    }

    fn tell_transports(&self, open: &Arc<OpenSegment>, descriptor: &Arc<SegmentDesc>) {
        let all = self.transports();
        let (last, others): (Vec<_>, Vec<_>) = all.iter().partition(|it| it.name() == relay::NAME);
        // Nobody else can have what a relay has found.
        let others = others.into_iter().filter(|_| !open.is_relayed());
        others.chain(last).for_each(|transport| transport.prepare(open, descriptor));
    }

    /// A segment's descriptor from where it is published, or from a relay and the way there.
    fn find(&self, name: &str) -> Result<(SegmentDesc, Option<Way>), SegmentError> {
        let error = match self.descriptor(name) {
            Ok(descriptor) => return Ok((descriptor, None)),
            Err(error) => error,
        };
        let Some(relays) = self.relays.get() else { return Err(error) };
        match relays.find(name) {
            Ok((descriptor, way)) => Ok((descriptor, Some(way))),
            Err(said) => Err(not_relayed(error, said)),
        }
    }

    /// Asks for a segment's descriptor where it is published.
    fn descriptor(&self, name: &str) -> Result<SegmentDesc, SegmentError> {
        let failed = |error| SegmentError::Store { name: name.to_owned(), error };
        self.store.segment(name).map_err(failed)
    }
}

/// The first bad buffer of a descriptor, and how many were left out.
fn bad_buffers(descriptor: &SegmentDesc) -> Option<(Option<String>, usize)> {
    let bad = descriptor.buffers.iter().position(|buffer| buffer.fault.is_some());
    let first = bad.and_then(|index| descriptor.unusable(index));
    let left_out = descriptor.buffers_left_out;
    (first.is_some() || left_out > 0).then_some((first, left_out))
}

/// Says which buffers of a descriptor are bad, unless they were in the one `before`.
fn warn_of_bad_buffers(name: &str, descriptor: &SegmentDesc, before: Option<&SegmentDesc>) {
    let bad = bad_buffers(descriptor);
    if let Some((first, left_out)) = &bad
        && before.map(bad_buffers) != Some(bad.clone())
    {
        tracing::warn!(segment = name, first, left_out, "its descriptor has bad buffers");
    }
}

/// The same, and what relays have said.
fn not_relayed(error: SegmentError, relays: String) -> SegmentError {
    match error {
        SegmentError::Store { name, error } => {
            SegmentError::NotRelayed { name, error: Box::new(error), relays }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, TcpConfig};

    #[test]
    fn what_was_opened_aside_stays_that_of_one_start() {
        let at = |last| [127, 98, std::process::id() as u8, last].into();
        let start = |listen| {
            let engine = TransferEngine::new(Config { listen, ..Config::new(at(1)) }).unwrap();
            engine.install_tcp(TcpConfig::default()).unwrap();
            engine
        };
        let target = start((at(1), 0).into());
        let (name, listen) = (target.name().to_owned(), target.listening_at());
        let engine = TransferEngine::new(Config::new(at(2))).unwrap();
        let inner = &engine.inner;
        let aside = inner.open_aside(&name).unwrap();
        let first = aside.descriptor().incarnation;
        assert!(inner.refresh(&aside).is_ok() && inner.segments.by_name(&name).is_none());
        let open = inner.open_segment(&name).unwrap().open;
        drop(target);
        let _again = start(listen);
        for _ in 0..2 {
            let refused = inner.refresh(&aside);
            assert!(matches!(refused, Err(SegmentError::Restarted { .. })), "{refused:?}");
            assert_eq!(aside.descriptor().incarnation, first);
        }
        // Closing it closes no other one.
        inner.close_aside(&aside);
        inner.refresh(&open).unwrap();
        assert!(open.descriptor().incarnation != first && inner.segments.by_name(&name).is_some());
    }
}
