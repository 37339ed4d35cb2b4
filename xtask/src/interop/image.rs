//! The guest's image: built once from Debian's packages, and again when its recipe changes.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

const RECIPE: &str = include_str!("image.sh");
const INIT: &str = include_str!("init.sh");

/// Where it lies.
pub(super) struct Image {
    folder: PathBuf,
}

impl Image {
    /// The image, which is built if there is none of this recipe.
    pub(super) fn ensure() -> Result<Self> {
        let cache =
            cache().context("neither HOME nor XDG_CACHE_HOME says where to keep the image")?;
        fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
        let image = Self { folder: cache.join("guest") };
        // Two runs at once build it once. The lock ends with the file.
        let lock = File::create(cache.join("lock"))?;
        lock.lock()?;
        let recipe = [RECIPE, INIT].concat();
        let built_by = image.folder.join("recipe");
        if fs::read_to_string(&built_by).is_ok_and(|built_by| built_by == recipe) {
            return Ok(image);
        }
        eprintln!("xtask: building the guest's image (once)");
        let (script, init) = (cache.join("image.sh"), cache.join("init.sh"));
        fs::write(&script, RECIPE)?;
        fs::write(&init, INIT)?;
        process::run(Command::new("bash").arg(script).arg(&image.folder).arg(init))?;
        fs::write(built_by, recipe)?;
        Ok(image)
    }

    pub(super) fn kernel(&self) -> PathBuf {
        self.folder.join("vmlinux")
    }

    pub(super) fn file_system(&self) -> PathBuf {
        self.folder.join("initrd")
    }

    /// The kernel's version, as `uname -r` says it there.
    pub(super) fn version(&self) -> String {
        let text = fs::read_to_string(self.folder.join("version")).unwrap_or_default();
        text.trim().to_owned()
    }
}

/// The folder of this project among the user's caches.
fn cache() -> Option<PathBuf> {
    let from = |variable| std::env::var_os(variable).map(PathBuf::from);
    let caches = from("XDG_CACHE_HOME").or_else(|| Some(from("HOME")?.join(".cache")))?;
    Some(caches.join(Path::new("millstream")))
}
