//! How the ranks of one machine come to share memory.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_net::shared_memory::{
    GroupDoor, GroupGuest, GroupOwner, Host, MemberProcesses, own_process,
};

use super::area::Area;
use super::engine::LocalEngine;
use super::layout::Layout;
use super::wait::{self, Spinning};
use super::wire::Wire;
use crate::JoinError;
use crate::memory::Domains;
use crate::path::Way;

/// How long a rank waits before it looks whether it is to go on.
const LOOK: Duration = Duration::from_millis(50);

/// How long rank 0 waits for one that asks before it looks whether all have come.
const GIVE: Duration = Duration::from_millis(5);

/// What a rank says to others of its machine by the controller.
#[derive(Debug)]
pub(crate) struct Meeting {
    /// Who says the same can share memory.
    pub(crate) host: String,
    /// Where others get the memory, if this rank gives it.
    pub(crate) door: GroupDoor,
}

impl Meeting {
    pub(crate) fn prepare() -> Result<Self, JoinError> {
        let failed = |what| move |source| JoinError::SharedMemory { what, source };
        // Where the system refuses one of these, switches do as well, as long as nothing is agreed.
        GroupOwner::create(4096).map_err(failed("making memory to share"))?;
        let own = own_process().map_err(failed("reading which process this is"))?;
        MemberProcesses::open([own].into_iter())
            .map_err(|(_, error)| failed("watching a process")(io::Error::other(error)))?;
        Ok(Self {
            host: Host::own()
                .and_then(|host| host.with_user())
                .map_err(failed("reading which host and user this is"))?,
            door: GroupDoor::open().map_err(failed("listening at a UNIX socket"))?,
        })
    }
}

/// What is left to do until ranks share memory.
pub(crate) struct Forming {
    pub(crate) local: Arc<LocalEngine>,
    pub(crate) meeting: Meeting,
    /// Where the first of them gives the memory.
    pub(crate) socket: String,
    pub(crate) deadline: Instant,
}

impl Forming {
    /// Meets the other ranks. The first one has the connection to switches, where there are other hosts. What has `failed` is
    /// told while that is there.
    pub(crate) fn form(
        &self,
        way: Option<Way>,
        domains: &Domains,
        failed: impl FnOnce(&JoinError),
    ) -> Result<(), JoinError> {
        let Self { local, meeting, socket, deadline } = self;
        let ranks = local.members().ranks();
        let mut wire = None;
        let made = way.map(|way| Wire::new(way, domains, ranks)).transpose();
        let formed = made.map_err(JoinError::from).and_then(|made| {
            wire = made;
            form(local, meeting, socket, *deadline, &mut wire)
        });
        formed.inspect_err(failed)
    }
}

/// Meets the other ranks, which get the memory at the first one's socket.
fn form(
    engine: &LocalEngine,
    meeting: &Meeting,
    socket: &str,
    deadline: Instant,
    wire: &mut Option<Wire>,
) -> Result<(), JoinError> {
    let (rank, members) = engine.place();
    let world = members.count();
    let failed = |what| move |source| JoinError::SharedMemory { what, source };
    let patience = deadline.saturating_duration_since(Instant::now());
    let look = || -> Result<(), JoinError> {
        if let Some(failure) = engine.failure() {
            return Err(JoinError::Agreement(failure));
        }
        match Instant::now() < deadline {
            true => Ok(()),
            false => {
                let late = io::Error::from(io::ErrorKind::TimedOut);
                Err(failed("waiting for the other ranks of this machine")(late))
            }
        }
    };
    let own = own_process().map_err(failed("reading /proc/self/stat"))?;
    let length = Layout::of(members).length();
    let (area, owner) = match rank {
        0 => {
            let created = GroupOwner::create(length);
            let (owner, memory) = created.map_err(failed("making a sealed memfd"))?;
            (Area::new(memory, members.clone()), Some(owner))
        }
        _ => {
            let asking = failed("asking the lowest rank of this machine for its memory");
            let guest = GroupGuest::ask(socket, length, patience.min(crate::LONGEST));
            let guest = guest.map_err(asking)?;
            let memory = loop {
                look()?;
                if let Some(memory) = guest.take(LOOK).map_err(asking)? {
                    break memory;
                }
            };
            let adopted = Area::adopt(memory, members.clone()).map_err(io::Error::other);
            let area = adopted.map_err(asking)?;
            (area, None)
        }
    };
    area.introduce(rank, own);
    area.arrive(rank, 1);
    if let Some(owner) = &owner {
        while (1..world).any(|rank| area.lacks(rank, 1)) {
            look()?;
            let given = owner.give(&meeting.door, GIVE);
            given.map_err(failed("giving memory to a rank"))?;
        }
    }
    wait::wait(&area, 1, Spinning::of(world), || look().map(|()| LOOK))?;
    let processes = MemberProcesses::open(area.processes()).map_err(|(rank, error)| {
        let what = "looking at the process of a rank";
        let rank = members.rank(rank as u32);
        JoinError::SharedMemory { what, source: io::Error::other(format!("rank {rank}: {error}")) }
    })?;
    engine.begin(area, processes, 1, wire.take());
    Ok(())
}
