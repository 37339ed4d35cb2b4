//! The engine's own descriptor: what peers are told, and what requests within the engine go by.
//!
//! It has an entry for each piece of registered memory, of which there may be many. So it is not
//! written at each registration: these count up a version, and who looks at the descriptor has it
//! written if it is of an older one. Where a server keeps it for others, it is written at once, but once for
//! all who wait for it: while one call of the server is under way, others gather for the next.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use millstream_metadata::{MAX_BUFFERS, SegmentDesc, StoreError, timestamp};

use crate::engine::Inner;
use crate::memory::Region;
use crate::path::in_order;
use crate::{RegisterError, SegmentId};

/// What has been published.
#[derive(Debug, Default)]
pub(crate) struct Publication {
    /// Counts what happened to the memory that peers know of.
    version: AtomicU64,
    /// Of which version the descriptor is.
    published: Mutex<Option<u64>>,
    at_server: Mutex<AtServer>,
    size: Mutex<Size>,
    /// Where the engine answers at its NICs.
    control_addresses: Mutex<Vec<SocketAddr>>,
}

/// What became of versions that a metadata server was to have.
#[derive(Debug, Default)]
struct AtServer {
    /// It has this one.
    version: u64,
    /// It was not given this one, and why.
    failed: Option<(u64, Arc<StoreError>)>,
    /// What it had was taken back for good.
    withdrawn: bool,
}

/// Of the descriptor's buffers, with those that are about to be in it.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    buffers: usize,
    /// Bytes.
    length: usize,
}

impl Publication {
    fn size(&self) -> MutexGuard<'_, Size> {
        self.size.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn remove<'a>(&self, regions: impl Iterator<Item = &'a Region>) {
        let mut size = self.size();
        for region in regions {
            size.length -= region.text_length();
            size.buffers -= region.buffer_count();
        }
    }
}

impl Inner {
    /// What there is to tell has changed.
    pub(crate) fn changed(&self) -> Result<(), StoreError> {
        let version = self.count_change();
        if self.store.is_local() { Ok(()) } else { self.publish_at_server(version) }
    }

    /// As [`Inner::changed`], but the server is told when it can be: what it has is taken back.
    pub(crate) fn changed_back(&self) {
        self.count_change();
        if self.store.is_local() {
            return;
        }
        let at_server = self.at_server();
        if !at_server.withdrawn && !self.is_stopped() {
            self.store.publish_segment_later(&self.describe());
        }
    }

    fn at_server(&self) -> MutexGuard<'_, AtServer> {
        self.publication.at_server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the server this version or a later one, unless somebody else has meanwhile.
    fn publish_at_server(&self, version: u64) -> Result<(), StoreError> {
        let mut at_server = self.at_server();
        if at_server.version >= version || at_server.withdrawn || self.is_stopped() {
            return Ok(());
        }
        if let Some((failed, error)) = &at_server.failed
            && *failed >= version
        {
            return Err(StoreError::Shared(Arc::clone(error)));
        }
        let version = self.publication.version.load(Ordering::SeqCst);
        let published = self.store.publish_segment(&self.describe()).map_err(Arc::new);
        match &published {
            Ok(()) => *at_server = AtServer { version, failed: None, withdrawn: false },
            Err(error) => at_server.failed = Some((version, Arc::clone(error))),
        }
        published.map_err(StoreError::Shared)
    }

    /// Whoever looks next is told.
    fn count_change(&self) -> u64 {
        let version = self.publication.version.fetch_add(1, Ordering::SeqCst) + 1;
        // Only now: `publish` counts the marks before it looks at the version.
        if let Some(own) = self.segments.by_id(SegmentId::LOCAL) {
            own.mark_stale();
        }
        version
    }

    /// Makes the descriptor say what was so when this was called, or later. What changes meanwhile is left
    /// to the next call, so that this one ends however often memory is registered.
    pub(crate) fn publish(&self) -> Result<(), StoreError> {
        let Publication { version, published, .. } = &self.publication;
        let mut published = published.lock().unwrap_or_else(PoisonError::into_inner);
        let own = self.segments.by_id(SegmentId::LOCAL).map(|own| (own.marks(), own));
        let current = version.load(Ordering::SeqCst);
        if self.is_stopped() {
            return Ok(());
        }
        if *published == Some(current) {
            if let Some((marks, own)) = own {
                own.confirm_descriptor(marks);
            }
            return Ok(());
        }
        let descriptor = self.describe();
        if self.store.is_local() {
            self.store.publish_segment(&descriptor)?;
        }
        if let Some((marks, own)) = own {
            own.set_descriptor(descriptor, marks);
        }
        *published = Some(current);
        Ok(())
    }

    /// Takes the descriptors back, those of files too. None of the engine's own follows.
    pub(crate) fn withdraw(&self, files: &[String]) {
        let published = self.publication.published.lock();
        let _published = published.unwrap_or_else(PoisonError::into_inner);
        let mut at_server = self.at_server();
        at_server.withdrawn = true;
        files.iter().for_each(|name| drop(self.store.withdraw_segment(name)));
        let _ = self.store.withdraw_segment(self.name());
        let _ = self.store.withdraw_address(self.name());
    }

    /// Counts what is about to be in the descriptor, if that can be published then.
    pub(crate) fn add(&self, regions: &[Region]) -> Result<(), RegisterError> {
        let engine = self.describe_engine().to_json().len();
        let limit = self.store.segment_limit();
        // Held from the sum to the end: of two that do not fit together, one does.
        let mut size = self.publication.size();
        let buffers = size.buffers + regions.iter().map(Region::buffer_count).sum::<usize>();
        let length = size.length + regions.iter().map(Region::text_length).sum::<usize>();
        if buffers > MAX_BUFFERS {
            return Err(RegisterError::TooMany { limit: MAX_BUFFERS });
        }
        if engine + length > limit {
            let (name, length) = (self.name().to_owned(), engine + length);
            return Err(StoreError::TooLong { name, length, limit }.into());
        }
        *size = Size { buffers, length };
        Ok(())
    }

    /// Counts anew what is in the descriptor, where a transport that comes or goes has changed its buffers.
    pub(crate) fn recount(&self) -> Result<(), RegisterError> {
        let mut size = Size::default();
        let regions = self.memory().regions.read().unwrap_or_else(PoisonError::into_inner);
        let all = regions.iter().filter_map(|(_, _, region)| region.as_ref());
        for region in all.filter(|region| region.is_offered()) {
            size.buffers += region.buffer_count();
            size.length += region.text_length();
        }
        drop(regions);
        *self.publication.size() = size;
        self.add(&[])
    }

    fn control_addresses(&self) -> MutexGuard<'_, Vec<SocketAddr>> {
        self.publication.control_addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the engine answers at its NICs, as is to be told from now on. Where its name leads needs no telling.
    pub(crate) fn answers_at(&self, addresses: Vec<SocketAddr>) {
        let own = self.host().parse::<IpAddr>().ok();
        let others = addresses.into_iter().filter(|address| Some(address.ip()) != own);
        *self.control_addresses() = others.collect();
    }

    fn describe(&self) -> SegmentDesc {
        let mut descriptor = self.describe_engine();
        let regions = self.memory().regions.read().unwrap_or_else(PoisonError::into_inner);
        let regions = regions.iter().filter_map(|(_, _, region)| region.as_ref());
        let offered = regions.filter(|region| region.is_offered());
        descriptor.buffers.extend(offered.flat_map(Region::buffers));
        descriptor
    }

    /// The descriptor without its buffers.
    fn describe_engine(&self) -> SegmentDesc {
        let mut descriptor = SegmentDesc {
            name: self.name().to_owned(),
            protocol: "local".to_owned(),
            control_addresses: self.control_addresses().clone(),
            incarnation: Some(self.incarnation()),
            timestamp: timestamp(SystemTime::now()),
            ..SegmentDesc::default()
        };
        self.with_transports(|all| {
            in_order(all).for_each(|(_, transport)| transport.describe(&mut descriptor));
        });
        descriptor
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;
    use crate::{Config, TransferEngine};

    /// Who registers without end keeps nobody from the descriptor.
    #[test]
    fn a_descriptor_is_published_while_memory_changes_all_the_time() {
        let address = [127, 97, std::process::id() as u8, 1].into();
        let engine = TransferEngine::new(Config::new(address)).unwrap();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    engine.inner.changed().unwrap();
                }
            });
            for _ in 0..100 {
                engine.inner.publish().unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        let own = engine.inner.segments.by_id(SegmentId::LOCAL).unwrap();
        engine.inner.publish().unwrap();
        assert!(!own.is_stale());
        engine.inner.changed().unwrap();
        assert!(own.is_stale());
        // Somebody else's publication has it, but the mark comes after.
        engine.inner.publish().unwrap();
        own.mark_stale();
        engine.inner.publish().unwrap();
        assert!(!own.is_stale());
    }
}
