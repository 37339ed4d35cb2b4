//! Where labs are that a process in the background holds, for commands other than the one that made them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::handle::start_time;
use crate::{Handle, LabError};

/// How long a lab may take to go.
const PATIENCE: Duration = Duration::from_secs(20);

const LONGEST_NAME: usize = 32;

/// The labs that are noted in a folder, each by a folder of its own, which is removed with it.
#[derive(Debug)]
pub struct Labs {
    base: PathBuf,
}

/// A lab, who holds it, and what runs in it from its beginning.
#[derive(Debug, Deserialize, Serialize)]
pub struct Record<L = Handle> {
    holder: Process,
    /// The lab.
    pub lab: L,
    /// What was started with it.
    pub processes: Vec<Process>,
}

/// A process, which is told from a later one of its number by when it was started.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Process {
    /// For people.
    pub name: String,
    /// The process id.
    pub id: u32,
    start: Option<String>,
}

impl Process {
    /// A process that runs.
    pub fn new(name: impl Into<String>, id: u32) -> Self {
        Self { name: name.into(), id, start: start_time(id) }
    }

    /// Whether it still runs.
    pub fn is_running(&self) -> bool {
        self.start.is_some() && start_time(self.id) == self.start
    }
}

impl Labs {
    /// Those that are noted in this folder.
    pub fn new(base: impl Into<PathBuf>) -> Self {
        Self { base: base.into() }
    }

    fn folder(&self, name: &str) -> Result<PathBuf, LabError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if !(1..=LONGEST_NAME).contains(&name.len()) || !name.chars().all(plain) {
            return Err(LabError::LabName(name.to_owned()));
        }
        Ok(self.base.join(format!("millstream-lab-{name}")))
    }

    /// The folder of a lab that is to be made. One that was left by a lab that is gone is removed.
    pub fn new_folder(&self, name: &str) -> Result<PathBuf, LabError> {
        let folder = self.folder(name)?;
        if folder.exists() {
            match self.read(name) {
                Ok(_) => return Err(LabError::Exists(name.to_owned())),
                Err(LabError::NoLab { .. }) if file(&folder).exists() => {}
                Err(LabError::NoLab { .. }) => return Err(LabError::Folder(folder)),
                Err(error) => return Err(error),
            }
            let failed = LabError::io(format!("cannot remove {}", folder.display()));
            fs::remove_dir_all(&folder).map_err(failed)?;
        }
        let failed = LabError::io(format!("cannot make {}", self.base.display()));
        fs::create_dir_all(&self.base).map_err(failed)?;
        Ok(folder)
    }

    /// The record of a lab that is there.
    pub fn read(&self, name: &str) -> Result<Record, LabError> {
        let folder = self.folder(name)?;
        let no_lab = || LabError::NoLab { name: name.to_owned(), base: self.base.clone() };
        // The record says which processes are to be ended.
        let owner = |path: &Path| fs::metadata(path).map(|metadata| metadata.uid());
        let (Ok(theirs), Ok(ours)) = (owner(&folder), owner(Path::new("/proc/self"))) else {
            return Err(no_lab());
        };
        if theirs != ours {
            return Err(LabError::Foreign(folder));
        }
        let text = fs::read_to_string(file(&folder)).map_err(|_| no_lab())?;
        let record: Record = serde_json::from_str(&text).map_err(|_| no_lab())?;
        if record.lab.is_up() { Ok(record) } else { Err(no_lab()) }
    }

    /// Writes the record of a lab that this process holds.
    pub fn write(&self, name: &str, lab: &Handle, processes: Vec<Process>) -> Result<(), LabError> {
        let holder = Process::new("holder", std::process::id());
        self.store(name, &Record { holder, lab, processes })
    }

    /// Changes a lab, and notes it.
    pub fn change(
        &self,
        name: &str,
        change: impl FnOnce(&mut Handle) -> Result<(), LabError>,
    ) -> Result<(), LabError> {
        let mut record = self.read(name)?;
        let changed = change(&mut record.lab);
        self.store(name, &record)?;
        changed
    }

    /// Ends a lab and all that runs in it, and waits until nothing of it is left.
    pub fn end(&self, name: &str) -> Result<(), LabError> {
        let Record { holder, lab, .. } = self.read(name)?;
        let id = holder.id.to_string();
        // It may have ended meanwhile, and the lab with it.
        if holder.is_running() {
            let mut kill = Command::new("kill");
            kill.args(["-s", "TERM", &id]).stdin(Stdio::null()).stderr(Stdio::null());
            kill.status().map_err(LabError::io("cannot start kill"))?;
        }
        let start = Instant::now();
        // Nothing tells when a process ends that is nobody's child here.
        while lab.is_up() || lab.folder().exists() {
            if start.elapsed() > PATIENCE {
                let folder = lab.folder().to_owned();
                return Err(LabError::Stays { name: name.to_owned(), folder });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn store(&self, name: &str, record: &impl Serialize) -> Result<(), LabError> {
        let folder = self.folder(name)?;
        let text = serde_json::to_string(record).expect("a record is JSON");
        // Whoever reads meanwhile gets the old one whole.
        let new = folder.join("record.json.new");
        let failed = || LabError::io(format!("cannot write {}", new.display()));
        fs::write(&new, text).map_err(failed())?;
        fs::rename(&new, file(&folder)).map_err(failed())
    }
}

fn file(folder: &Path) -> PathBuf {
    folder.join("record.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_a_record_is_not_taken_for_a_lab_that_is_gone() {
        let base = std::env::temp_dir().join(format!("millstream-labs-{}", std::process::id()));
        let labs = Labs::new(&base);
        let folder = labs.new_folder("one").unwrap();
        assert!(matches!(labs.read("one"), Err(LabError::NoLab { .. })));
        fs::create_dir(&folder).unwrap();
        assert!(matches!(labs.new_folder("one"), Err(LabError::Folder(_))));
        // What was left by a machine that went down.
        fs::write(file(&folder), "{").unwrap();
        assert_eq!(labs.new_folder("one").unwrap(), folder);
        assert!(!folder.exists());
        for name in ["", "../x", "a b", &"a".repeat(33)] {
            assert!(matches!(labs.read(name), Err(LabError::LabName(_))), "{name}");
        }
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_process_is_itself_and_no_later_one_of_its_number() {
        let own = Process::new("own", std::process::id());
        assert!(own.is_running());
        assert!(!Process { start: Some("1".to_owned()), ..own }.is_running());
        assert!(!Process::new("none", u32::MAX).is_running());
    }
}
