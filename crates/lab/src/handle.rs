//! What can be done with a lab, by its owner and by others who know where it is.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::LabError;
use crate::keeper::{self, Keeper};
use crate::layout::{Host, Layout};

/// What can be done with a lab while its owner keeps it. It can be written down, for another process.
#[derive(Debug, Deserialize, Serialize)]
pub struct Handle {
    layout: Layout,
    keeper: u32,
    /// When the keeper was started, as the kernel says it: process ids come again.
    keeper_start: String,
    user_namespace: bool,
    holders: Vec<u32>,
    folder: PathBuf,
}

impl Handle {
    pub(crate) fn new(layout: Layout, keeper: &Keeper, folder: PathBuf) -> Self {
        Self {
            layout,
            keeper: keeper.id(),
            keeper_start: start_time(keeper.id()).unwrap_or_default(),
            user_namespace: keeper.user_namespace,
            holders: keeper.holders.clone(),
            folder,
        }
    }

    /// Whether the lab is still there.
    pub fn is_up(&self) -> bool {
        start_time(self.keeper).is_some_and(|start| start == self.keeper_start)
    }

    /// Hosts, NICs and addresses.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A host by its name.
    pub fn host(&self, name: &str) -> Result<&Host, LabError> {
        self.layout.host(name)
    }

    /// A folder that is removed with the lab.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A command that runs a program at a host. It replaces the one that enters the namespace, so a
    /// child's process id is the program's.
    pub fn command(&self, host: &str, program: impl AsRef<OsStr>) -> Result<Command, LabError> {
        let index = self.layout.hosts.iter().position(|other| other.name == host);
        let index = index.ok_or_else(|| LabError::Unknown(format!("host {host}")))?;
        Ok(self.inside(self.holders[index], program))
    }

    fn inside(&self, process: u32, program: impl AsRef<OsStr>) -> Command {
        let mut command = keeper::command("nsenter");
        if self.user_namespace {
            command.arg(format!("--user=/proc/{process}/ns/user")).arg("--preserve-credentials");
        }
        command.arg(format!("--net=/proc/{process}/ns/net")).arg("--").arg(program);
        command.stdin(Stdio::null());
        command
    }
}

/// When a process was started, in the kernel's words; `None` when there is none, or it has ended.
fn start_time(process: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // After the name, which may contain anything: the state is first, the start the 20th.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (state != "Z").then(|| fields.nth(18).map(str::to_owned))?
}
