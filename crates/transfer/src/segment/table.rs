//! All segments that are open, by number and by name.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use millstream_metadata::SegmentDesc;

use super::{OpenSegment, SegmentId};
use crate::SegmentError;
use crate::tcp::relay::Way;

/// The most segments open at a time.
const MAX_SEGMENTS: usize = 65_536;

/// All segments that are open, by number and by name.
#[derive(Debug)]
pub(crate) struct SegmentTable {
    inner: RwLock<Inner>,
}

#[derive(Debug)]
struct Inner {
    next: u32,
    /// Looked up by each submission: to find a small number in a tree takes less than to hash it.
    by_id: BTreeMap<SegmentId, Arc<OpenSegment>>,
    by_name: HashMap<String, SegmentId>,
}

impl SegmentTable {
    /// A table with the engine's own segment.
    pub(crate) fn new(own: SegmentDesc) -> Self {
        let name = own.name.clone();
        let open = Arc::new(OpenSegment::new(SegmentId::LOCAL, &name, own));
        let inner = Inner {
            next: 1,
            by_id: [(SegmentId::LOCAL, open)].into(),
            by_name: [(name, SegmentId::LOCAL)].into(),
        };
        Self { inner: RwLock::new(inner) }
    }

    pub(crate) fn by_id(&self, id: SegmentId) -> Option<Arc<OpenSegment>> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner).by_id.get(&id).cloned()
    }

    /// Those that are open, but the engine's own.
    pub(crate) fn others(&self) -> Vec<Arc<OpenSegment>> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.by_id.values().filter(|open| open.id != SegmentId::LOCAL).cloned().collect()
    }

    /// How many are open, the engine's own not counted.
    pub(crate) fn count_of_others(&self) -> usize {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.by_id.len().saturating_sub(1)
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<Arc<OpenSegment>> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.by_id.get(inner.by_name.get(name)?).cloned()
    }

    /// Adds a segment, unless another thread was faster.
    pub(crate) fn insert(
        &self,
        name: &str,
        descriptor: SegmentDesc,
        way: Option<Way>,
    ) -> Result<Arc<OpenSegment>, SegmentError> {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = inner.by_name.get(name).and_then(|id| inner.by_id.get(id)) {
            return Ok(Arc::clone(open));
        }
        let open = inner.add(name, descriptor, false)?;
        open.set_way(way);
        inner.by_name.insert(name.to_owned(), open.id);
        Ok(open)
    }

    /// Adds a segment that is not found by its name, beside one that may have it. It stays that of one start of its
    /// process.
    pub(crate) fn insert_aside(
        &self,
        name: &str,
        descriptor: SegmentDesc,
    ) -> Result<Arc<OpenSegment>, SegmentError> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner).add(name, descriptor, true)
    }

    /// Removes a segment other than the engine's own.
    pub(crate) fn remove(&self, id: SegmentId) -> Result<(), SegmentError> {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        if id == SegmentId::LOCAL {
            return Err(SegmentError::Unknown(id));
        }
        let open = inner.by_id.remove(&id).ok_or(SegmentError::Unknown(id))?;
        open.close();
        if inner.by_name.get(&open.name) == Some(&id) {
            inner.by_name.remove(&open.name);
        }
        Ok(())
    }
}

impl Inner {
    fn add(
        &mut self,
        name: &str,
        descriptor: SegmentDesc,
        bound: bool,
    ) -> Result<Arc<OpenSegment>, SegmentError> {
        if self.by_id.len() >= MAX_SEGMENTS || self.next == u32::MAX {
            return Err(SegmentError::TooMany { limit: MAX_SEGMENTS });
        }
        let id = SegmentId(self.next);
        self.next += 1;
        let open = Arc::new(OpenSegment { bound, ..OpenSegment::new(id, name, descriptor) });
        self.by_id.insert(id, Arc::clone(&open));
        Ok(open)
    }
}
