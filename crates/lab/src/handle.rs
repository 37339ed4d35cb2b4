//! What can be done with a lab, by its owner and by others who know where it is.

use std::ffi::OsStr;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::keeper::{self, Keeper};
use crate::layout::{End, Host, Layout, PlacedLink};
use crate::script::{self, Cut};
use crate::{LabError, Nic, Rate};

/// What can be done with a lab while its owner keeps it. It can be written down, for another process.
#[derive(Debug, Deserialize, Serialize)]
pub struct Handle {
    layout: Layout,
    /// For each link, how it is cut.
    cuts: Vec<Option<Cut>>,
    keeper: u32,
    /// When the keeper was started, as the kernel says it: process ids come again.
    keeper_start: String,
    user_namespace: bool,
    holders: Vec<u32>,
    folder: PathBuf,
}

/// What of a [`Handle`] says whether the lab is there. Labs of other versions have it, too.
#[derive(Deserialize)]
pub(crate) struct KeptBy {
    keeper: u32,
    keeper_start: String,
}

impl KeptBy {
    /// Whether the lab is gone. What cannot be found out is not taken for that.
    pub(crate) fn has_ended(&self) -> bool {
        match read_start_time(self.keeper) {
            Ok(Some(start)) => !self.keeper_start.is_empty() && start != self.keeper_start,
            Ok(None) => true,
            Err(_) => false,
        }
    }
}

impl Handle {
    pub(crate) fn new(layout: Layout, keeper: &Keeper, folder: PathBuf) -> Self {
        Self {
            cuts: vec![None; layout.links.len()],
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

    /// How the link of a NIC is cut, if it is.
    pub fn is_cut(&self, host: &str, nic: &str) -> Result<Option<Cut>, LabError> {
        Ok(self.cuts[self.nic(host, nic)?.link])
    }

    /// The rate of a NIC's link, if it has a limit.
    pub fn rate(&self, host: &str, nic: &str) -> Result<Option<Rate>, LabError> {
        Ok(self.layout.links[self.nic(host, nic)?.link].link.rate)
    }

    /// Cuts the link of a NIC. It must be up: what is cut one way is restored before the other.
    pub fn cut(&mut self, host: &str, nic: &str, how: Cut) -> Result<(), LabError> {
        let link = self.nic(host, nic)?.link;
        self.cuts[link] = Some(how);
        self.apply(link, Some((host, how)))
    }

    /// Makes a link whole again, with the rate it had.
    pub fn restore(&mut self, host: &str, nic: &str) -> Result<(), LabError> {
        let link = self.nic(host, nic)?.link;
        self.cuts[link] = None;
        self.apply(link, None)
    }

    /// Changes the rate of a link, in both directions; `None` is no limit. A link that is cut has it
    /// when it is restored.
    pub fn set_rate(&mut self, host: &str, nic: &str, rate: Option<Rate>) -> Result<(), LabError> {
        let link = self.nic(host, nic)?.link;
        self.layout.links[link].link.rate = rate;
        match self.cuts[link] {
            None => self.apply(link, None),
            Some(_) => Ok(()),
        }
    }

    fn nic(&self, host: &str, nic: &str) -> Result<&Nic, LabError> {
        let found = self.host(host)?.nics.iter().find(|other| other.name == nic);
        found.ok_or_else(|| LabError::Unknown(format!("NIC {host}:{nic}")))
    }

    /// Brings both ends of a link into a state. Only the host that is named has its interface down.
    fn apply(&self, link: usize, cut: Option<(&str, Cut)>) -> Result<(), LabError> {
        let PlacedLink { ends, link } = &self.layout.links[link];
        let mut work = Vec::new();
        for end in ends {
            let (process, is_nic, name) = match end {
                End::Nic(host, _) => (self.holders[*host], true, &*self.layout.hosts[*host].name),
                End::Port(..) => (self.keeper, false, ""),
            };
            let own = cut.filter(|(host, how)| *how == Cut::Silent || *host == name);
            let interface = self.layout.interface(end);
            let mut script = script::change(interface, is_nic, link, own.map(|(_, how)| how));
            if let (End::Nic(host, _), None) = (end, own) {
                let nics = &self.layout.hosts[*host].nics;
                let is_up = |nic: usize| self.cuts[nics[nic].link] != Some(Cut::Down);
                script += &script::routes(&self.layout, *host, is_up);
            }
            work.push((process, script));
        }
        self.run("cannot change the link", work)
    }

    /// Makes switches, links and hosts.
    pub(crate) fn build(&self) -> Result<(), LabError> {
        let links = script::links(&self.layout, &self.holders);
        self.run("cannot make the links", vec![(self.keeper, links)])?;
        let hosts = self.holders.iter().enumerate();
        let scripts = hosts.map(|(index, &holder)| (holder, script::host(&self.layout, index)));
        self.run("cannot make the hosts", scripts.collect())
    }

    /// Runs scripts in the namespaces of processes, side by side.
    fn run(&self, what: &str, scripts: Vec<(u32, String)>) -> Result<(), LabError> {
        let failed = || LabError::io(what.to_owned());
        let start = |(process, script): (u32, String)| {
            start_shell(self.inside(process, "sh"), &script).map_err(|error| match error.kind() {
                ErrorKind::NotFound => {
                    LabError::Unavailable("nsenter (util-linux) is not installed".to_owned())
                }
                _ => failed()(error),
            })
        };
        let children: Vec<Result<Child, LabError>> = scripts.into_iter().map(start).collect();
        let mut result = Ok(());
        for child in children {
            let output = child.and_then(|child| child.wait_with_output().map_err(failed()));
            let ended = output.and_then(|output| match output.status.success() {
                true => Ok(()),
                false => Err(why(what, &String::from_utf8_lossy(&output.stderr))),
            });
            // All are waited for.
            result = result.and(ended);
        }
        result
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

/// Reads a script to its end, and runs it. Nothing of it is left for commands that read.
const RUN_WHAT_IS_READ: &str = "unset script; script=$(cat) || exit\neval \"$script\"";

/// Has a shell run a script. It reads the script: Linux takes up to 128 KiB as an argument, and the routes of a large lab
/// are more.
fn start_shell(mut shell: Command, script: &str) -> io::Result<Child> {
    shell.args(["-c", RUN_WHAT_IS_READ]).stdin(Stdio::piped());
    let mut child = shell.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let mut stdin = child.stdin.take().expect("it is piped");
    match stdin.write_all(script.as_bytes()) {
        // One that has ended before says why.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            // It must not run a part.
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
        _ => Ok(child),
    }
}

/// What it means that a script said this.
fn why(what: &str, said: &str) -> LabError {
    let said = said.trim();
    let missing = [
        ("qdisc kind is unknown", "this kernel has no tbf or no netem (sch_tbf, sch_netem)"),
        ("Unknown device type", "this kernel has no veth links or no bridges"),
        ("not found", "ip and tc (iproute2) are not installed"),
        ("Operation not permitted", "network interfaces may not be made or changed here"),
        ("ead-only file system", "settings of the kernel may not be changed here (/proc/sys)"),
    ];
    match missing.iter().find(|(sign, _)| said.contains(sign)) {
        Some((_, reason)) => LabError::Unavailable(format!("{reason}: {said}")),
        None => LabError::Failed { what: what.to_owned(), message: said.to_owned() },
    }
}

/// When a process was started, in the kernel's words; `None` when there is none, or it has ended.
pub(crate) fn start_time(process: u32) -> Option<String> {
    read_start_time(process).ok().flatten()
}

/// The same, with an error where it cannot be found out.
fn read_start_time(process: u32) -> io::Result<Option<String>> {
    match std::fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) => Ok(start_of(&stat)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// When a process was started, by what the kernel says of it (proc_pid_stat(5)).
fn start_of(stat: &str) -> Option<String> {
    // After the name, which may contain anything: the state is first, the start the 20th.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (state != "Z").then(|| fields.nth(18).map(str::to_owned))?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str) -> (bool, String) {
        let child = start_shell(Command::new("sh"), script).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    }

    #[test]
    fn a_script_may_be_longer_than_an_argument() {
        // Linux ends one at 131,072 bytes.
        let lines = "a line\n".repeat(30_000);
        let script = format!("set -e\ngrep -c line <<'END' >&2\n{lines}END\n");
        assert_eq!(run(&script), (true, "30000\n".to_owned()));
    }

    #[test]
    fn a_script_ends_with_its_first_failure_and_is_not_read_by_its_commands() {
        assert_eq!(run("set -e\ncat >&2\necho end >&2\n"), (true, "end\n".to_owned()));
        assert_eq!(run("set -e\necho one >&2\nfalse\necho two >&2\n"), (false, "one\n".to_owned()));
    }
}
