//! A lab and who owns it.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::keeper::Keeper;
use crate::{Handle, LabError, Layout, Plan};

/// Hosts and links that go away with this value, or with this process, however it ends. What runs in
/// them is ended.
pub struct Lab {
    handle: Handle,
    /// After the handle: its end is the lab's.
    _keeper: Keeper,
}

impl Lab {
    /// Builds a lab, with a folder of its own among the temporary ones.
    pub fn up(plan: &Plan) -> Result<Self, LabError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("millstream-lab-{}-{number}", std::process::id());
        Self::up_in(plan, std::env::temp_dir().join(name))
    }

    /// The same, with this folder, which must not be there yet and is removed with the lab.
    pub fn up_in(plan: &Plan, folder: PathBuf) -> Result<Self, LabError> {
        let layout = Layout::new(plan)?;
        std::fs::create_dir(&folder)
            .map_err(LabError::io(format!("cannot make {}", folder.display())))?;
        let keeper = Keeper::start(layout.hosts.len(), &folder).inspect_err(|_| {
            // There is no keeper to do it.
            let _ = std::fs::remove_dir_all(&folder);
        })?;
        let handle = Handle::new(layout, &keeper, folder);
        handle.build()?;
        Ok(Self { handle, _keeper: keeper })
    }
}

impl Deref for Lab {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        &self.handle
    }
}

impl DerefMut for Lab {
    fn deref_mut(&mut self) -> &mut Handle {
        &mut self.handle
    }
}
