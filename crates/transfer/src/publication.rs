//! The engine's own descriptor: what peers are told, and what requests within the engine go by.
//!
//! It has an entry for each piece of registered memory, of which there may be many. So it is not
//! written at each registration: these count up a version, and who looks at the descriptor has it
//! written if it is of an older one. Where a store keeps it for others, it is written at once.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use millstream_metadata::{MAX_BUFFERS, SegmentDesc, StoreError, timestamp};

use crate::engine::Inner;
use crate::memory::Region;
use crate::{RegisterError, SegmentId};

/// What has been published.
#[derive(Debug, Default)]
pub(crate) struct Publication {
    /// Counts what happened to the memory that peers know of.
    version: AtomicU64,
    /// Of which version the descriptor is.
    published: Mutex<Option<u64>>,
    /// How many buffers are in it, and how many bytes these take.
    buffers: AtomicUsize,
    length: AtomicUsize,
}

impl Publication {
    pub(crate) fn add(&self, regions: &[Region]) {
        self.length.fetch_add(regions.iter().map(Region::text_length).sum(), Ordering::Relaxed);
        self.buffers.fetch_add(regions.iter().map(Region::buffer_count).sum(), Ordering::Relaxed);
    }

    pub(crate) fn remove<'a>(&self, regions: impl Iterator<Item = &'a Region>) {
        for region in regions {
            self.length.fetch_sub(region.text_length(), Ordering::Relaxed);
            self.buffers.fetch_sub(region.buffer_count(), Ordering::Relaxed);
        }
    }
}

impl Inner {
    /// What there is to tell has changed.
    pub(crate) fn changed(&self) -> Result<(), StoreError> {
        self.publication.version.fetch_add(1, Ordering::SeqCst);
        // Only now: `publish` clears the mark before it looks at the version again.
        if let Some(own) = self.segments.by_id(SegmentId::LOCAL) {
            own.mark_stale();
        }
        if self.store.is_local() { Ok(()) } else { self.publish() }
    }

    /// Makes the descriptor say what is so now.
    pub(crate) fn publish(&self) -> Result<(), StoreError> {
        let Publication { version, published, .. } = &self.publication;
        let mut published = published.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let version = || version.load(Ordering::SeqCst);
            let current = version();
            if *published == Some(current) || self.is_stopped() {
                return Ok(());
            }
            let descriptor = self.describe();
            self.store.publish_segment(&descriptor)?;
            if let Some(own) = self.segments.by_id(SegmentId::LOCAL) {
                own.set_descriptor(descriptor);
            }
            *published = Some(current);
        }
    }

    /// Takes the descriptor back. The engine has been stopped, so that none follows.
    pub(crate) fn withdraw(&self) {
        let published = self.publication.published.lock();
        let _published = published.unwrap_or_else(PoisonError::into_inner);
        let _ = self.store.withdraw_segment(self.name());
        let _ = self.store.withdraw_address(self.name());
    }

    /// Whether the descriptor can be published with all that was added.
    pub(crate) fn check_length(&self) -> Result<(), RegisterError> {
        if self.publication.buffers.load(Ordering::Relaxed) > MAX_BUFFERS {
            return Err(RegisterError::TooMany { limit: MAX_BUFFERS });
        }
        let buffers = self.publication.length.load(Ordering::Relaxed);
        let length = self.describe_engine().to_json().len() + buffers;
        let limit = self.store.segment_limit();
        match length > limit {
            true => Err(StoreError::TooLong { length, limit }.into()),
            false => Ok(()),
        }
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
            incarnation: Some(self.incarnation()),
            timestamp: timestamp(SystemTime::now()),
            ..SegmentDesc::default()
        };
        self.with_transports(|all| all.iter().for_each(|each| each.describe(&mut descriptor)));
        descriptor
    }
}
