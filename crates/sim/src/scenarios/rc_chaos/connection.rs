//! A connection of a run: its ends, the rules of its present life, and what may go wrong in it.

use core::time::Duration;

use millstream_roce::{AsyncEvent, CompletionStatus, RNR_TIMERS};
use millstream_wire::{Mtu, Psn, Qpn};

use super::world::Role;
use crate::ConnectionOptions;

/// One end of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct End {
    /// Its queue pair, if it has one.
    pub(super) qpn: Option<Qpn>,
    /// It is connected, in the present life.
    pub(super) up: bool,
    /// The host and the queue pair that it is connected to, since it was raised.
    pub(super) peer: Option<(usize, Qpn)>,
    /// It is in the error state.
    pub(super) broken: bool,
    /// Its device told that it failed.
    pub(super) reported: bool,
    /// Its device told that it takes nothing more of the shared receive queue.
    pub(super) took_last: bool,
    /// It was taken down, and waits for the other and for the next life.
    pub(super) lowered: bool,
    /// It grants no remote access.
    pub(super) revoked: bool,
    /// Its send queue is being drained.
    pub(super) draining: bool,
}

/// Why requests of a life may fail.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Excuses {
    /// Packets were lost, delayed or refused for long.
    pub(super) link: bool,
    /// An end failed, was taken down, or was not up from the start.
    pub(super) gone: bool,
    /// The application, or what it polls, made a queue pair fail.
    pub(super) forced: bool,
    /// Completions were lost.
    pub(super) overrun: bool,
    /// Receive requests that are too short were needed.
    pub(super) short: bool,
    /// An end granted no remote access for a while.
    pub(super) revoked: bool,
    /// A key was named that an earlier request invalidates, or that may not be invalidated.
    pub(super) invalidated: bool,
    /// Regions of these roles were not registered for a while, of either stream.
    pub(super) absent: [bool; Role::COUNT],
}

impl Excuses {
    const fn absent(&self, role: Role) -> bool {
        self.absent[role as usize]
    }

    /// Whether remotes may be refused.
    const fn refused(&self) -> bool {
        self.revoked || self.invalidated || self.remote_absent()
    }

    /// Whether a region that remotes use was away.
    const fn remote_absent(&self) -> bool {
        self.absent(Role::Target) || self.absent(Role::Readable) || self.absent(Role::Counters)
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) hosts: [usize; 2],
    pub(super) ends: [End; 2],
    pub(super) rules: ConnectionOptions,
    /// The first packet sequence number of either end, in this life.
    pub(super) psns: [Psn; 2],
    /// Lives begun; in the first it is 1.
    pub(super) life: u32,
    /// It is about to be taken down.
    pub(super) going_down: bool,
    pub(super) excuses: Excuses,
}

impl Connection {
    pub(super) fn new(hosts: [usize; 2]) -> Self {
        Self {
            hosts,
            ends: [End::default(); 2],
            rules: ConnectionOptions::DEFAULT,
            psns: [Psn::default(); 2],
            life: 0,
            going_down: false,
            excuses: Excuses::default(),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.ends.iter().all(|end| end.up && !end.broken) && !self.going_down
    }

    /// The silence that a requester bears.
    pub(super) fn patience(&self) -> Duration {
        let timeout = Duration::from_nanos(4096 << self.rules.timeout);
        timeout * (u32::from(self.rules.retry_count) + 1)
    }

    /// The pause that an RNR NAK asks for.
    pub(super) fn rnr_wait(&self) -> Duration {
        let timer = usize::from(self.rules.minimum_rnr_timer);
        Duration::from_micros(RNR_TIMERS[timer].into())
    }

    /// Virtual time within which a request at the head of its queue must end: every packet may
    /// use all of the patience and of the receiver's pauses, and then comes forward by one.
    pub(super) fn bound(&self, length: u32) -> Duration {
        let packets = self.rules.path_mtu.packets(length.into()) as u32 + 1;
        let pauses = match self.rules.rnr_retry {
            // Any number, but receivers starve for some milliseconds only.
            7 => 16,
            retries => u32::from(retries) + 1,
        };
        let pause = self.rnr_wait() + self.patience();
        (self.patience() + pause * pauses) * packets + Duration::from_secs(1)
    }

    /// How much longer it may take where others hold the requests of a shared receive queue, each for
    /// as long as its own messages take.
    pub(super) const SHARING: Duration = Duration::from_secs(1 << 20);

    /// Packets of a message.
    pub(super) fn packets(&self, length: u32) -> u64 {
        let mtu: Mtu = self.rules.path_mtu;
        mtu.packets(length.into())
    }

    /// Whether a send request may end so. `waited`: how long ago it was posted.
    pub(super) fn excuses_send(&self, status: CompletionStatus, waited: Duration) -> bool {
        let excuses = &self.excuses;
        match status {
            CompletionStatus::Success => true,
            // The responder of the same queue pair may be what failed.
            CompletionStatus::Flushed => {
                excuses.gone
                    || excuses.forced
                    || excuses.overrun
                    || excuses.short
                    || excuses.revoked
                    || excuses.invalidated
                    || excuses.absent.contains(&true)
            }
            CompletionStatus::RetryExceeded => {
                (excuses.link || excuses.gone) && waited >= self.patience()
            }
            CompletionStatus::ReceiverNotReadyExceeded => self.rules.rnr_retry < 7,
            CompletionStatus::RemoteAccess => excuses.refused(),
            CompletionStatus::RemoteOperational => excuses.absent(Role::Inbox),
            CompletionStatus::RemoteInvalidRequest => excuses.short,
            CompletionStatus::LocalProtection => {
                excuses.absent(Role::Source) || excuses.absent(Role::Sink)
            }
            _ => false,
        }
    }

    /// Whether a queue pair may fail so.
    pub(super) fn excuses_event(&self, event: AsyncEvent) -> bool {
        match event {
            AsyncEvent::QueuePairAccessError(_) => self.excuses.refused(),
            // Nobody here breaks the protocol.
            AsyncEvent::QueuePairRequestError(_) => false,
            // A completion has the reason.
            _ => true,
        }
    }

    /// Whether a receive request may end so.
    pub(super) fn excuses_receive(&self, status: CompletionStatus) -> bool {
        match status {
            CompletionStatus::Success => true,
            CompletionStatus::LocalLength => self.excuses.short,
            // A key that may not be invalidated, too.
            CompletionStatus::LocalProtection => {
                let Excuses { invalidated, .. } = self.excuses;
                self.excuses.absent(Role::Inbox) || self.excuses.remote_absent() || invalidated
            }
            // Receives are flushed when either half of their queue pair fails; the half that did
            // has its own reason.
            CompletionStatus::Flushed => self.ends.iter().any(|end| end.broken),
            _ => false,
        }
    }
}

/// Ranges of packet sequence numbers of the past.
///
/// A packet of an earlier life of a queue pair differs from one of the present by its number
/// alone. RoCEv2 has no other protection: if the numbers of two lives overlap, a late packet may
/// be taken for one of today. So connection managers draw first numbers at random, and here those
/// are drawn again that come near an earlier life's.
#[derive(Debug, Default)]
pub(super) struct UsedNumbers(Vec<(Psn, u32)>);

impl UsedNumbers {
    /// The distance between the numbers of two lives: more than all that is posted in one.
    const DISTANCE: i32 = 1 << 17;

    pub(super) fn add(&mut self, first: Psn, count: u64) {
        self.0.push((first, count.min(u64::from(Psn::COUNT)) as u32));
    }

    /// This number, or the first that `draw` gives, that is far from all of them. After very many
    /// lives none is left, and then less must do.
    pub(super) fn far_from(&self, mut psn: Psn, mut draw: impl FnMut() -> Psn) -> Psn {
        const PATIENCE: u32 = 1000;
        let mut distance = Self::DISTANCE;
        loop {
            for _ in 0..PATIENCE {
                if !self.is_near(psn, distance) {
                    return psn;
                }
                psn = draw();
            }
            distance /= 2;
        }
    }

    fn is_near(&self, psn: Psn, distance: i32) -> bool {
        self.0.iter().any(|&(first, count)| {
            psn.distance_from(first) > -distance && psn.distance_from(first.add(count)) < distance
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_near_earlier_ones_are_known() {
        let mut used = UsedNumbers::default();
        used.add(Psn::new(Psn::COUNT - 10), 1000);
        for near in [Psn::COUNT - 10, Psn::COUNT - 1, 0, 989, 5000, Psn::COUNT - 100_000] {
            assert!(used.is_near(Psn::new(near), UsedNumbers::DISTANCE), "{near}");
        }
        for far in [1 << 20, 1 << 23, Psn::COUNT - (1 << 20)] {
            assert!(!used.is_near(Psn::new(far), UsedNumbers::DISTANCE), "{far}");
        }
    }

    #[test]
    fn there_is_a_number_after_any_count_of_lives() {
        let mut used = UsedNumbers::default();
        let mut rng = crate::Rng::new(1);
        let mut taken = Vec::new();
        for _ in 0..200 {
            let psn = used.far_from(Psn::default(), || Psn::new(rng.bits() as u32));
            assert!(taken.iter().all(|old| psn.distance_from(*old).abs() > 1000));
            used.add(psn, 500);
            taken.push(psn);
        }
    }
}
