//! Ranks that share memory with others of their machine.

use std::net::SocketAddr;
use std::sync::Arc;

use millstream_inc::Ranks;
use millstream_inc::controllers::Search;
use millstream_inc::protocol::{Failover, Resume, SharedMemoryPlan, shortened};

use super::{JoinConfig, Joined, Talk};
use crate::JoinError;
use crate::coordinator::Rendezvous;
use crate::failover::BesideWire;
use crate::local::{Forming, LocalEngine, Meeting, Members};
use crate::memory::Domains;
use crate::path::{Path, Way};
use crate::watcher::{Watched, Watcher};

/// What this rank says to those of its machine, if it may share memory.
pub(super) fn meeting(path: Path) -> Result<Option<Meeting>, JoinError> {
    match (path, Meeting::prepare()) {
        (Path::Switch, _) => Ok(None),
        (_, Ok(meeting)) => Ok(Some(meeting)),
        (Path::SharedMemory, Err(error)) => Err(error),
        (Path::Auto, Err(error)) => {
            tracing::debug!(%error, "collectives go over a switch");
            Ok(None)
        }
    }
}

/// What ranks of this machine with the same label say to share memory.
pub(super) fn labelled(host: &str, label: &str) -> String {
    if label.is_empty() { host.to_owned() } else { format!("{host}/{label}") }
}

/// The ranks of this host as the controller says, and the place of this rank among them.
pub(super) fn members(
    config: &JoinConfig,
    controller: SocketAddr,
    ranks: &Ranks,
) -> Result<(u32, Members), JoinError> {
    let found = match ranks.is_empty() {
        true => Ok(Members::all(config.world)),
        false => Members::of_host(ranks, config.world),
    };
    let members = found.map_err(|detail| JoinError::Protocol { controller, detail })?;
    match members.place(config.rank) {
        Some(place) => Ok((place, members)),
        None => {
            let detail = format!("rank {} is none of those of its host", config.rank);
            Err(JoinError::Protocol { controller, detail })
        }
    }
}

/// What those of a host share memory by, of which this rank has this place: the same as before, if they did.
pub(super) fn local_of(
    place: u32,
    members: Option<Members>,
    before: Option<&Arc<LocalEngine>>,
) -> Result<Option<Arc<LocalEngine>>, String> {
    match (members, before) {
        (None, None) => Ok(None),
        (Some(members), None) => Ok(Some(LocalEngine::new(place, members))),
        (Some(members), Some(before)) if members.ranks() == before.members().ranks() => {
            Ok(Some(Arc::clone(before)))
        }
        (_, Some(_)) => Err("it has other ranks of this host share memory than before".to_owned()),
    }
}

/// Joins the ranks of this machine, which share memory. Where there are other machines, another rank is on the wire.
pub(super) fn share(
    config: &JoinConfig,
    domains: &Domains,
    talk: Talk<'_>,
    search: Search,
    plan: SharedMemoryPlan,
    meeting: Option<Meeting>,
    before: Option<&Arc<LocalEngine>>,
) -> Result<Joined, JoinError> {
    let &JoinConfig { world, rank, ref device, .. } = config;
    let Talk { controller, sender, receiver, deadline, .. } = talk;
    let (place, members) = members(config, controller, &plan.ranks)?;
    if place == 0 && members.has_others() {
        let detail = "it has no plan for the lowest rank of a host".to_owned();
        return Err(JoinError::Protocol { controller, detail });
    }
    let resume = Resume {
        term: 0,
        group: config.group.clone(),
        identity: plan.group,
        communicator: plan.communicator,
        world,
        rank,
        address: device.address(),
        departed: false,
        more_addresses: config.more_devices.iter().map(|device| device.address()).collect(),
    };
    let local = local_of(place, Some(members), before)
        .map_err(|detail| JoinError::Protocol { controller, detail })?;
    let Some(local) = local else { unreachable!("there are members") };
    let way = Way::SharedMemory(Arc::clone(&local));
    let watched: Box<dyn Watched> = match plan.failover {
        Failover::Off if before.is_none() => Box::new(Arc::clone(&local)),
        _ => Box::new(BesideWire(Arc::clone(&local))),
    };
    // It answers the controller from here on.
    let heard = (Arc::clone(&sender), receiver);
    let watcher =
        Watcher::start(watched, heard, search, resume, None).map_err(JoinError::Thread)?;
    let forming = match (before, meeting) {
        (None, Some(meeting)) => Some(Forming { local, meeting, socket: plan.socket, deadline }),
        _ => None,
    };
    let (domains, switches, hosted) = (domains.clone(), Vec::new(), None);
    let fallback = plan.fallback.map(shortened);
    let (failover, identity) = (plan.failover, (plan.group, plan.communicator));
    let rendezvous = plan.meeting.map(|point| Rendezvous { point: *point, listener: None });
    let processes = Vec::new();
    Ok(Joined {
        way,
        forming,
        watcher,
        sender,
        domains,
        switches,
        fallback,
        hosted,
        failover,
        identity,
        processes,
        rendezvous,
    })
}
