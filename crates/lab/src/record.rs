//! Where labs are that a process in the background holds, for commands other than the one that made them.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::handle::{KeptBy, start_time};
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

    /// The folder of a lab that is to be made. One that was left by a lab that is known to be gone is removed: the keeper
    /// of one that is there would remove the new lab's folder with its own.
    pub fn new_folder(&self, name: &str) -> Result<PathBuf, LabError> {
        let folder = self.folder(name)?;
        match find(&folder)? {
            Found::Nothing => {}
            Found::NoRecord => return Err(LabError::Folder(folder)),
            Found::Lab(_) => return Err(LabError::Exists(name.to_owned())),
            Found::Ended => {
                let failed = LabError::io(format!("cannot remove {}", folder.display()));
                fs::remove_dir_all(&folder).map_err(failed)?;
            }
        }
        let failed = LabError::io(format!("cannot make {}", self.base.display()));
        fs::create_dir_all(&self.base).map_err(failed)?;
        Ok(folder)
    }

    /// The record of a lab that is there.
    pub fn read(&self, name: &str) -> Result<Record, LabError> {
        match find(&self.folder(name)?)? {
            Found::Lab(record) => Ok(*record),
            Found::Nothing | Found::NoRecord | Found::Ended => {
                Err(LabError::NoLab { name: name.to_owned(), base: self.base.clone() })
            }
        }
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
        // Whoever reads meanwhile gets the old one whole.
        let new = folder.join("record.json.new");
        let failed = || LabError::io(format!("cannot write {}", new.display()));
        // JSON has no folders whose names are not UTF-8.
        let text = serde_json::to_string(record).map_err(|error| failed()(error.into()))?;
        fs::write(&new, text).map_err(failed())?;
        fs::rename(&new, file(&folder)).map_err(failed())
    }
}

fn file(folder: &Path) -> PathBuf {
    folder.join("record.json")
}

/// What a folder says of its lab.
enum Found {
    /// There is no folder.
    Nothing,
    /// No lab is noted in it.
    NoRecord,
    /// The lab is gone.
    Ended,
    /// The lab is there, as far as can be told.
    Lab(Box<Record>),
}

/// The part of a record that says whether its lab is there.
#[derive(Deserialize)]
struct Kept {
    lab: KeptBy,
}

/// Looks for a lab in its folder. Where it cannot be told whether there is one, that is an error.
fn find(folder: &Path) -> Result<Found, LabError> {
    let owner = |path: &Path| fs::metadata(path).map(|metadata| metadata.uid());
    let failed = |path: &Path| LabError::io(format!("cannot read {}", path.display()));
    let theirs = match owner(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Nothing),
        theirs => theirs.map_err(failed(folder))?,
    };
    let own = Path::new("/proc/self");
    // The record says which processes are to be ended.
    if theirs != owner(own).map_err(failed(own))? {
        return Err(LabError::Foreign(folder.to_owned()));
    }
    let unknown = |source: io::Error| LabError::Record { folder: folder.to_owned(), source };
    let text = match fs::read(file(folder)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::NoRecord),
        text => text.map_err(unknown)?,
    };
    let Kept { lab } = serde_json::from_slice(&text).map_err(|error| unknown(error.into()))?;
    if lab.has_ended() {
        return Ok(Found::Ended);
    }
    let record = serde_json::from_slice(&text).map_err(|error| unknown(error.into()))?;
    Ok(Found::Lab(Box::new(record)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_folder_of_a_lab_that_is_known_to_be_gone_is_removed() {
        let base = std::env::temp_dir().join(format!("millstream-labs-{}", std::process::id()));
        let labs = Labs::new(&base);
        let folder = labs.new_folder("one").unwrap();
        assert!(matches!(labs.read("one"), Err(LabError::NoLab { .. })));
        fs::create_dir(&folder).unwrap();
        assert!(matches!(labs.read("one"), Err(LabError::NoLab { .. })));
        assert!(matches!(labs.new_folder("one"), Err(LabError::Folder(_))));
        let own = std::process::id();
        let kept_by = |keeper: u32, start: &str| {
            format!(
                r#"{{"lab":{{"keeper":{keeper},"keeper_start":"{start}","of_later_versions":1}}}}"#
            )
        };
        // The keeper of the second one is there.
        for text in ["{".to_owned(), kept_by(own, &start_time(own).unwrap())] {
            fs::write(file(&folder), &text).unwrap();
            assert!(matches!(labs.read("one"), Err(LabError::Record { .. })), "{text}");
            let error = labs.new_folder("one").unwrap_err().to_string();
            assert!(error.contains(folder.to_str().unwrap()), "{error}");
            assert!(error.contains("remove the folder, or use --name"), "{error}");
            assert!(file(&folder).exists(), "{text}");
        }
        // What was left by a machine that went down: there is no such process, or another one has its number.
        for text in [kept_by(u32::MAX, "1"), kept_by(own, "1")] {
            fs::create_dir_all(&folder).unwrap();
            fs::write(file(&folder), &text).unwrap();
            assert!(matches!(labs.read("one"), Err(LabError::NoLab { .. })), "{text}");
            assert_eq!(labs.new_folder("one").unwrap(), folder);
            assert!(!folder.exists());
        }
        // A file that cannot be read says nothing of the lab.
        fs::create_dir_all(file(&folder)).unwrap();
        assert!(matches!(labs.new_folder("one"), Err(LabError::Record { .. })));
        assert!(folder.exists());
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
