//! Where labs are, for commands other than the one that made them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use millstream_lab::Handle;
use serde::{Deserialize, Serialize};

use crate::process;

/// A lab and who holds it.
#[derive(Deserialize)]
pub(super) struct Record {
    pub(super) holder: u32,
    pub(super) lab: Handle,
}

/// The same, to be written.
#[derive(Serialize)]
struct Written<'a> {
    holder: u32,
    lab: &'a Handle,
}

fn folder(name: &str) -> PathBuf {
    process::target_directory().join("lab").join(name)
}

fn file(folder: &Path) -> PathBuf {
    folder.join("record.json")
}

/// The folder of a lab that is to be made. One that was left by a lab that is gone is removed.
pub(super) fn new_folder(name: &str) -> Result<PathBuf> {
    let folder = folder(name);
    if folder.exists() {
        if Record::read(name).is_ok() {
            bail!("there is a lab {name} already: end it by `cargo xtask lab down`, or use --name");
        }
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    if let Some(all) = folder.parent() {
        fs::create_dir_all(all).with_context(|| format!("cannot make {}", all.display()))?;
    }
    Ok(folder)
}

impl Record {
    /// The record of a lab that is there.
    pub(super) fn read(name: &str) -> Result<Self> {
        let no_lab = || format!("there is no lab {name}: make it by `cargo xtask lab up FILE`");
        let text = fs::read_to_string(file(&folder(name))).with_context(no_lab)?;
        let record: Self = serde_json::from_str(&text).with_context(no_lab)?;
        if !record.lab.is_up() {
            bail!("the lab {name} is gone: its keeper has ended");
        }
        Ok(record)
    }

    /// Writes the record of a lab that this process holds.
    pub(super) fn write(name: &str, lab: &Handle) -> Result<()> {
        store(name, std::process::id(), lab)
    }

    /// Changes a lab, and notes it.
    pub(super) fn change(name: &str, change: impl FnOnce(&mut Handle) -> Result<()>) -> Result<()> {
        let Self { holder, mut lab } = Self::read(name)?;
        let changed = change(&mut lab);
        store(name, holder, &lab)?;
        changed
    }
}

fn store(name: &str, holder: u32, lab: &Handle) -> Result<()> {
    let folder = folder(name);
    let text = serde_json::to_string(&Written { holder, lab }).context("a record is JSON")?;
    // Whoever reads meanwhile gets the old one whole.
    let new = folder.join("record.json.new");
    fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
    fs::rename(&new, file(&folder)).context("cannot replace the record of the lab")
}
