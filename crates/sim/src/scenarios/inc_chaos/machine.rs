//! The machines: hosts with ranks of several communicators, and switches. Any of them may stand still for a
//! while.

use millstream_inc::{CollectiveError, SwitchEvent, SwitchNode};
use millstream_roce::{
    CompletionStatus, Counters, DatagramMeta, Endpoint, Instant, Node, OwnedMemory, Piece,
    SendRequest, Transmit,
};

use super::failover;
use super::member::Member;
use super::plain;
use super::slow::{KeptBack, Slow};
use crate::Machine;

/// What a machine is.
#[derive(Debug)]
pub(super) enum Kind {
    /// With ranks, those that send no descriptors, and those that go on when a switch is lost.
    Host {
        endpoint: Box<Endpoint<OwnedMemory>>,
        members: Vec<Member>,
        plain: Vec<plain::Member>,
        ranks: Vec<failover::Rank>,
    },
    Switch(Box<SwitchNode>),
    /// Somebody else, who takes nothing.
    Outsider,
}

/// A machine of a run.
#[derive(Debug)]
pub(super) struct Participant {
    pub(super) kind: Kind,
    stands_until: Option<Instant>,
    /// What has come since it stands still.
    backlog: Vec<(DatagramMeta, Vec<u8>)>,
    /// It acknowledges slowly.
    kept_back: Option<KeptBack>,
    pub(super) events: Vec<SwitchEvent>,
    pub(super) wrong: Vec<String>,
}

impl Participant {
    pub(super) fn new(kind: Kind) -> Self {
        let (backlog, events, wrong) = (Vec::new(), Vec::new(), Vec::new());
        Self { kind, stands_until: None, backlog, kept_back: None, events, wrong }
    }

    /// It is slow to acknowledge.
    pub(super) fn slow_down(&mut self, slow: &Slow) {
        self.kept_back = Some(KeptBack::new(slow));
    }

    /// Acknowledgements that it has kept back.
    pub(super) fn kept_back(&self) -> u64 {
        self.kept_back.as_ref().map_or(0, |kept| kept.count)
    }

    pub(super) fn stand_still(&mut self, until: Instant) {
        self.stands_until = Some(until);
    }

    pub(super) fn members(&self) -> &[Member] {
        if let Kind::Host { members, .. } = &self.kind { members } else { &[] }
    }

    /// The communicators that have failed for one of its ranks, and why.
    pub(super) fn failures(&self) -> impl Iterator<Item = (usize, CollectiveError)> {
        let plain: &[plain::Member] =
            if let Kind::Host { plain, .. } = &self.kind { plain } else { &[] };
        let of_plain = plain.iter().map(|it| (it.group, it.failed));
        let all = self.members().iter().map(|it| (it.group, it.failed)).chain(of_plain);
        all.filter_map(|(group, failed)| Some((group, failed?)))
    }

    /// Whether it stands still.
    pub(super) const fn stands(&self) -> bool {
        self.stands_until.is_some()
    }

    pub(super) fn switch(&self) -> Option<&SwitchNode> {
        if let Kind::Switch(node) = &self.kind { Some(node) } else { None }
    }

    pub(super) fn switch_mut(&mut self) -> Option<&mut SwitchNode> {
        if let Kind::Switch(node) = &mut self.kind { Some(node) } else { None }
    }

    pub(super) fn counters(&self) -> Option<&Counters> {
        match &self.kind {
            Kind::Host { endpoint, .. } => Some(endpoint.counters()),
            Kind::Switch(node) => Some(node.counters()),
            Kind::Outsider => None,
        }
    }

    /// Posts a request past the worker of a rank that is at work; whether it took it.
    pub(super) fn post(
        &mut self,
        now: Instant,
        group: usize,
        rank: u32,
        request: impl FnOnce(&Member) -> Option<SendRequest>,
    ) -> bool {
        let Kind::Host { endpoint, members, .. } = &mut self.kind else { return false };
        let mut all = members.iter();
        let member = all.find(|it| (it.group, it.rank) == (group, rank) && !it.is_over());
        let Some(member) = member else { return false };
        request(member).is_some_and(|it| endpoint.post_send(now, member.qpn, &it).is_ok())
    }

    /// What was written after the calls had ended.
    pub(super) fn check_memory(&self) -> Vec<String> {
        let Kind::Host { endpoint, members, .. } = &self.kind else { return Vec::new() };
        let calls = members.iter().flat_map(|it| it.calls.iter().map(move |call| (it, call)));
        let changed =
            calls.filter(|(_, call)| endpoint.memory().region(call.key) != Some(&call.arena.bytes));
        changed
            .map(|(member, call)| {
                let Member { group, rank, ended, failed, .. } = member;
                format!(
                    "communicator {group}, rank {rank}, which ended {ended} calls and then had {failed:?}: \
                     the memory of {:?} changed outside of the call",
                    call.arena.request
                )
            })
            .collect()
    }

    /// What its ranks that go on have done, for a tally.
    pub(super) fn take_tally(&mut self) -> Vec<&'static str> {
        let Kind::Host { ranks, .. } = &mut self.kind else { return Vec::new() };
        ranks.iter_mut().flat_map(failover::Rank::take_tally).collect()
    }

    fn node(&mut self) -> Option<&mut dyn Node> {
        match &mut self.kind {
            Kind::Host { endpoint, .. } => Some(&mut **endpoint),
            Kind::Switch(node) => Some(&mut **node),
            Kind::Outsider => None,
        }
    }
}

impl Node for Participant {
    fn handle_datagram(&mut self, now: Instant, meta: &DatagramMeta, datagram: &[u8]) {
        if self.stands_until.is_some() {
            self.backlog.push((*meta, datagram.to_vec()));
        } else if let Some(node) = self.node() {
            node.handle_datagram(now, meta, datagram);
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        if self.stands_until.is_some_and(|until| until > now) {
            return;
        }
        self.stands_until = None;
        for (meta, datagram) in core::mem::take(&mut self.backlog) {
            if let Some(node) = self.node() {
                node.handle_datagram(now, &meta, &datagram);
            }
        }
        if let Some(node) = self.node() {
            node.handle_timeout(now);
        }
    }

    fn poll_timeout(&mut self) -> Option<Instant> {
        if self.stands_until.is_some() {
            return self.stands_until;
        }
        let kept = self.kept_back.as_ref().and_then(KeptBack::next_at);
        self.node()?.poll_timeout().into_iter().chain(kept).min()
    }

    fn poll_transmit(&mut self, now: Instant, transmit: &mut Transmit) -> bool {
        if self.stands_until.is_some() {
            return false;
        }
        if let Some(due) = self.kept_back.as_mut().and_then(|kept| kept.due(now)) {
            *transmit = due;
            return true;
        }
        while self.node().is_some_and(|node| node.poll_transmit(now, transmit)) {
            if !self.kept_back.as_mut().is_some_and(|kept| kept.takes(now, transmit)) {
                return true;
            }
        }
        false
    }

    fn bytes(&self, piece: &Piece) -> Option<&[u8]> {
        match &self.kind {
            Kind::Host { endpoint, .. } => endpoint.bytes(piece),
            Kind::Switch(node) => node.bytes(piece),
            Kind::Outsider => None,
        }
    }
}

impl Machine for Participant {
    fn run(&mut self, now: Instant) {
        if self.stands_until.is_some() {
            return;
        }
        match &mut self.kind {
            Kind::Host { endpoint, members, plain, ranks } => {
                for member in members.iter_mut() {
                    let mut wrong = Vec::new();
                    member.run(now, endpoint, &mut wrong);
                    let Member { group, rank, ended, .. } = member;
                    self.wrong.extend(wrong.into_iter().map(|what| {
                        format!("communicator {group}, rank {rank}, after {ended} calls: {what}")
                    }));
                }
                // What fails on one tree is over on all.
                let failed: Vec<bool> =
                    members.iter().map(|it| !it.is_over() && it.sibling_failed(members)).collect();
                for (member, _) in members.iter_mut().zip(failed).filter(|(_, failed)| *failed) {
                    let flushed = CollectiveError::Transport(CompletionStatus::Flushed);
                    member.end(now, endpoint, flushed, &mut self.wrong);
                }
                for member in plain {
                    let mut wrong = Vec::new();
                    member.run(now, endpoint, &mut wrong);
                    let (group, rank) = (member.group, member.rank);
                    self.wrong.extend(
                        wrong
                            .into_iter()
                            .map(|what| format!("communicator {group}, plain rank {rank}: {what}")),
                    );
                }
                for rank in ranks {
                    rank.run(now, endpoint);
                    self.wrong.extend(rank.take_wrong());
                }
            }
            Kind::Switch(node) => self.events.extend(core::iter::from_fn(|| node.poll_event())),
            Kind::Outsider => {}
        }
    }

    fn poll_wake(&mut self) -> Option<Instant> {
        if self.stands() {
            return None;
        }
        let Kind::Host { members, plain, ranks, .. } = &self.kind else { return None };
        let of_ranks = ranks.iter().filter_map(failover::Rank::wake);
        let of_plain = plain.iter().filter_map(plain::Member::wake);
        members.iter().filter_map(Member::wake).chain(of_plain).chain(of_ranks).min()
    }
}
