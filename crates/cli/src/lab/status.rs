//! What a lab consists of, for people and as JSON.

use std::net::{IpAddr, SocketAddr};

use millstream_lab::{Cut, Record};
use serde::Serialize;

use super::hold::controller_address;
use crate::output;

#[derive(Serialize)]
pub(super) struct Status {
    name: String,
    /// Where the controller is, if one was started.
    controller: Option<SocketAddr>,
    processes: Vec<ProcessStatus>,
    hosts: Vec<HostStatus>,
}

#[derive(Serialize)]
struct ProcessStatus {
    name: String,
    id: u32,
    running: bool,
}

#[derive(Serialize)]
struct HostStatus {
    name: String,
    nics: Vec<NicStatus>,
}

#[derive(Serialize)]
struct NicStatus {
    name: String,
    addresses: Vec<IpAddr>,
    /// The address at the other end, where the link is no subnet.
    peer: Option<IpAddr>,
    rate_bits_per_s: Option<u64>,
    /// `down` or `silent`.
    cut: Option<Cut>,
}

impl Status {
    pub(super) fn new(name: &str, record: &Record) -> anyhow::Result<Self> {
        let Record { lab, processes, .. } = record;
        let controller = controller_address(lab).filter(|_| !processes.is_empty());
        let processes = processes.iter().map(|process| ProcessStatus {
            name: process.name.clone(),
            id: process.id,
            running: process.is_running(),
        });
        let mut hosts = Vec::new();
        for host in &lab.layout().hosts {
            let mut nics = Vec::new();
            for nic in &host.nics {
                nics.push(NicStatus {
                    name: nic.name.clone(),
                    addresses: nic.addresses.clone(),
                    peer: nic.peer,
                    rate_bits_per_s: lab.rate(&host.name, &nic.name)?.map(|it| it.bits_per_s()),
                    cut: lab.is_cut(&host.name, &nic.name)?,
                });
            }
            hosts.push(HostStatus { name: host.name.clone(), nics });
        }
        let (name, processes) = (name.to_owned(), processes.collect());
        Ok(Self { name, controller, processes, hosts })
    }

    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        if json { output::json(self) } else { output::line(&self.text()) }
    }

    fn text(&self) -> String {
        let mut rows = Vec::new();
        if let Some(controller) = self.controller {
            rows.push(format!("controller at {controller}"));
        }
        for ProcessStatus { name, id, running } in &self.processes {
            let state = if *running { "running" } else { "has ended" };
            rows.push(format!("{name:16} process {id:<8} {state}"));
        }
        for HostStatus { name, nics } in &self.hosts {
            for nic in nics {
                let place = format!("{name}:{}", nic.name);
                let addresses: Vec<String> = nic.addresses.iter().map(IpAddr::to_string).collect();
                let peer = nic.peer.map(|peer| format!(" to {peer}")).unwrap_or_default();
                let rate = nic.rate_bits_per_s.map_or_else(
                    || "no limit".to_owned(),
                    |bits| format!("{} Mbit/s", bits as f64 / 1e6),
                );
                let state = match nic.cut {
                    None => "up",
                    Some(Cut::Down) => "cut: down",
                    Some(Cut::Silent) => "cut: silent",
                };
                let ends = format!("{}{peer}", addresses.join(" "));
                rows.push(format!("{place:16} {ends:40} {rate:>14}  {state}"));
            }
        }
        rows.join("\n")
    }
}
