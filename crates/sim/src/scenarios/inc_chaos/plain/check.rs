//! What must hold of plain hosts, and of what their switch says of them.

use core::time::Duration;
use std::collections::BTreeMap;

use millstream_inc::{Abort, Mismatch};
use millstream_roce::Instant;

use super::super::build::{Network, number};
use super::super::director::Director;
use super::super::machine::Kind;
use super::super::mismatch::difference_since;
use super::super::world::Group;
use super::Member;
use crate::NodeId;

impl Director {
    /// Tells plain hosts that their communicator is over, as its switch has said, or as was asked for.
    pub(in super::super) fn tell_plain(
        &self,
        network: &mut Network<'_>,
        group: usize,
        abort: Abort,
    ) {
        let said = self.said[group];
        if self.world.groups[group].plain.is_none() {
            return;
        }
        for &host in &self.world.groups[group].hosts {
            if !network.is_up(NodeId(host)) {
                continue;
            }
            network.with_machine(NodeId(host), |it, _| {
                let Kind::Host { plain, .. } = &mut it.kind else { return };
                let own = plain.iter_mut().filter(|it| it.group == group);
                own.for_each(|it| it.tell(said.unwrap_or(abort)));
            });
        }
    }

    /// What is wrong at rest with plain hosts, and with what was said of them.
    pub(in super::super) fn check_plain(&mut self, network: &Network<'_>) -> Vec<String> {
        let mut wrong = Vec::new();
        for (index, group) in self.world.groups.iter().enumerate() {
            if group.plain.is_none() {
                continue;
            }
            let mut members = Vec::new();
            for host in (0..self.world.hosts).map(NodeId).filter(|&host| network.is_up(host)) {
                let Kind::Host { endpoint, plain, .. } = &network.machine(host).kind else {
                    continue;
                };
                for member in plain.iter().filter(|it| it.group == index) {
                    let name = format!("communicator {index}, plain rank {}", member.rank);
                    let found = member.check(endpoint).into_iter();
                    wrong.extend(found.map(|what| format!("{name}: {what}")));
                    self.tally.one(match member.failed {
                        None => "plain hosts: all messages were answered",
                        Some(_) => "plain hosts: failed",
                    });
                    members.push(member);
                }
            }
            if group.mismatch.is_some() {
                self.tally.one("plain hosts: of different lengths");
            }
            if members.iter().any(|it| it.has_broken) {
                self.tally.one("plain hosts: breaches");
            }
            self.tally.add("plain hosts: messages answered", {
                members.iter().map(|it| it.ended as u64).sum()
            });
            if group.is_excused {
                continue;
            }
            let is_slow = self.world.is_told_slowly(group, group.hosts[0]);
            let limit = Some(self.world.mismatch_limit(group)).filter(|_| !is_slow);
            let found = check_said(group, &members, &self.told[index], limit);
            let found = found.into_iter().chain(self.check_breach(index, group, &members));
            wrong.extend(found.map(|what| format!("communicator {index}: {what}")));
        }
        wrong
    }

    /// Whoever sends what no plain host sends is named.
    fn check_breach(&self, index: usize, group: &Group, members: &[&Member]) -> Option<String> {
        let broken = members.iter().find(|it| it.has_broken)?;
        let said = self.said[index];
        match said {
            Some(Abort::Violation { rank, .. }) if rank == broken.rank => None,
            _ => Some(format!(
                "rank {} did {:?}, and its switch has said {said:?} (node {:#x})",
                broken.rank,
                group.plain.and_then(|plain| plain.breach),
                number(index, 0),
            )),
        }
    }
}

/// What is wrong with what a switch said of messages of different lengths.
fn check_said(
    group: &Group,
    members: &[&Member],
    told: &[(Instant, Mismatch)],
    limit: Option<Duration>,
) -> Vec<String> {
    let Some((call, odd, _)) = group.mismatch else {
        return told
            .first()
            .map(|(_, it)| format!("{it:?} was told: all agree"))
            .into_iter()
            .collect();
    };
    let mut wrong = Vec::new();
    let since = |it: &Member| Some((it.rank, it.calls[call].started?));
    let called: BTreeMap<u32, Instant> = members.iter().filter_map(|it| since(it)).collect();
    for (at, mismatch) in told {
        // Which of the two is named for it says who came first.
        let turned = Mismatch {
            rank: mismatch.reference,
            reference: mismatch.rank,
            expected: mismatch.found,
            found: mismatch.expected,
            ..*mismatch
        };
        let first = if mismatch.reference == odd { turned } else { *mismatch };
        let what = group.check_difference(&first, &called, *at);
        wrong.extend(what.map(|what| format!("{mismatch:?} was told at {at}: {what}")));
    }
    let reached = |it: &Member| Some((it.rank, it.reached?));
    let reached: BTreeMap<u32, Instant> = members.iter().filter_map(|it| reached(it)).collect();
    let first = told.first().map(|(at, _)| *at);
    if let Some(since) = difference_since(odd, &reached)
        && first.is_none_or(|at| limit.is_some_and(|limit| at > since + limit))
    {
        wrong.push(format!("ranks differ since {since}, and the switch has said so at {first:?}"));
    }
    wrong
}
