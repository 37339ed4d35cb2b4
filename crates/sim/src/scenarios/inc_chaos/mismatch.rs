//! Ranks that call something else than others, ranks that do not call at all meanwhile, or much later, and what all who have
//! called must be told, and when.
//!
//! A difference is there once two ranks that differ have called. From then on everybody who has called hears of it as soon as
//! messages reach, up the tree and down again, whoever else has not called.

use core::time::Duration;
use std::collections::BTreeMap;

use millstream_inc::{Abort, CollectiveError, Field, Mismatch, Mode};
use millstream_roce::Instant;

use super::build::Network;
use super::call::Shape;
use super::director::Director;
use super::member::Member;
use super::world::{Group, World, one_in};
use crate::{NodeId, Rng};

/// How long a switch may keep what a rank has called before it tells the one above.
const FIRST_CALL_PATIENCE: Duration = Duration::from_millis(10);

/// How often a message may be lost on each edge.
const LOSSES: u32 = 2;

/// A rank that is late, or does not come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Absence {
    /// The lowest rank of its host.
    pub(super) rank: u32,
    pub(super) call: usize,
    /// How much later than it could call; `None` when it never does.
    pub(super) late: Option<Duration>,
}

impl World {
    /// Lets some ranks be late for a call; where ranks differ, some do not call at all. Drawn from numbers of its own, so that
    /// a seed of before is the same run where that changes nothing.
    pub(super) fn add_absences(&mut self, rng: &mut Rng) {
        for group in &mut self.groups {
            match group.mismatch {
                Some((call, ..)) if one_in(rng, 2) => group.draw_absences(rng, call),
                None if group.rude.is_none() && !group.calls.is_empty() && one_in(rng, 12) => {
                    let call = rng.below(group.calls.len() as u64) as usize;
                    let members = group.members();
                    let rank = members[rng.below(members.len() as u64) as usize][0];
                    group.absences.push(Absence { rank, call, late: Some(lateness(rng)) });
                }
                _ => {}
            }
        }
    }

    /// How long it may take from a difference until all who have called have heard of it, where nothing else happens.
    pub(super) fn mismatch_limit(&self, group: &Group) -> Duration {
        let edges = 2 * group.tree.levels() as u32;
        // Links are cut, and machines stand still, for less than a timeout each.
        let troubles = self.troubles.len().min(3) as u32;
        edges * (FIRST_CALL_PATIENCE + LOSSES * self.timeout()) + troubles * self.timeout()
    }
}

/// Short times are as likely as long ones.
fn lateness(rng: &mut Rng) -> Duration {
    let scale = 1 << rng.between(20, 33);
    Duration::from_nanos(scale + rng.below(scale))
}

impl Group {
    /// One rank calls something else than all others.
    pub(super) fn differ(&mut self, rng: &mut Rng) {
        if self.sizes.world == 1 {
            return;
        }
        let call = rng.below(self.calls.len() as u64) as usize;
        let rank = rng.below(self.sizes.world.into()) as u32;
        if let Some(other) = self.calls[call].changed(rng, &self.sizes) {
            self.mismatch = Some((call, rank, other));
            self.is_excused = self.may_fail;
            self.is_watched = self.may_fail;
            self.may_fail = true;
        }
    }

    /// Of those who do not differ at least one calls in time; the one that differs may call after all of them.
    pub(super) fn draw_absences(&mut self, rng: &mut Rng, call: usize) {
        let Some((_, odd, _)) = self.mismatch else { return };
        let members = self.members();
        let mut others: Vec<u32> =
            members.iter().map(|ranks| ranks[0]).filter(|&rank| rank != odd).collect();
        let Some(most) = (others.len() as u64).checked_sub(1).filter(|&most| most > 0) else {
            return;
        };
        for _ in 0..rng.between(1, most) {
            let rank = others.swap_remove(rng.below(others.len() as u64) as usize);
            let late = if one_in(rng, 2) { Some(lateness(rng)) } else { None };
            self.absences.push(Absence { rank, call, late });
        }
        if one_in(rng, 3) {
            self.absences.push(Absence { rank: odd, call, late: Some(lateness(rng)) });
        }
        // So that switches have told of the call before, too, what somebody has called.
        if let Some(call) = call.checked_sub(1).filter(|_| one_in(rng, 2)) {
            let rank = members[rng.below(members.len() as u64) as usize][0];
            self.absences.push(Absence { rank, call, late: Some(lateness(rng)) });
        }
    }

    /// What a rank calls.
    pub(super) fn shape(&self, call: usize, rank: u32) -> Shape {
        match self.mismatch {
            Some((at, differs, other)) if (at, differs) == (call, rank) => other,
            _ => self.calls[call],
        }
    }

    /// What is wrong with what somebody says is the difference, who called by then as given.
    pub(super) fn check_difference(
        &self,
        mismatch: &Mismatch,
        called: &BTreeMap<u32, Instant>,
        at: Instant,
    ) -> Option<&'static str> {
        let Some((call, odd, _)) = self.mismatch else { return Some("all ranks agree") };
        let &Mismatch { sequence, rank, reference, field, expected, found } = mismatch;
        if sequence != self.calls[call].number {
            return Some("it is of another call");
        }
        if (rank == odd) == (reference == odd) {
            return Some("these two agree");
        }
        // Of more than two most agree; of two the lower one is taken for right.
        if reference == odd && rank < odd {
            return Some("most are taken for those who differ");
        }
        let has_called = |rank: &u32| called.get(rank).is_some_and(|&since| since <= at);
        if !has_called(&rank) || !has_called(&reference) {
            return Some("not both of them have called");
        }
        let [wanted, other] = [reference, rank].map(|rank| fields(&self.shape(call, rank)));
        let first = wanted.into_iter().zip(other).find(|(wanted, other)| wanted != other);
        let right = Some(((field, expected), (field, found)));
        (first != right).then_some("this is not where they differ first")
    }
}

/// What ranks can differ in, in the order in which it is compared.
fn fields(shape: &Shape) -> [(Field, u64); 6] {
    [
        (Field::Collective, shape.collective.code().into()),
        (Field::Operation, shape.operation.code().into()),
        (Field::DataType, shape.data_type.code().into()),
        (Field::Root, shape.root.into()),
        (Field::Count, shape.count),
        (Field::Mode, u64::from(shape.mode == Mode::Send)),
    ]
}

impl Director {
    /// What is wrong with what ranks that differ were told.
    pub(super) fn check_differences(&self, network: &Network<'_>) -> Vec<String> {
        let mut wrong = Vec::new();
        let groups = self.world.groups.iter().enumerate();
        for (number, group) in groups.filter(|(_, group)| group.plain.is_none()) {
            let all = (0..self.world.hosts).map(NodeId).filter(|&host| network.is_up(host));
            let all = all.flat_map(|host| network.machine(host).members());
            let members: Vec<&Member> = all.filter(|it| it.group == number).collect();
            let limit = self.world.mismatch_limit(group);
            let is_slow =
                |it: &Member| self.world.is_told_slowly(group, group.hosts[it.rank as usize]);
            let limit = |it: &Member| Some(limit).filter(|_| !group.is_excused && !is_slow(it));
            let found = check(group, &members, &self.told[number], limit);
            wrong.extend(found.into_iter().map(|what| format!("communicator {number}: {what}")));
        }
        wrong
    }
}

/// When there was a difference: two have called that differ.
pub(super) fn difference_since(odd: u32, called: &BTreeMap<u32, Instant>) -> Option<Instant> {
    let others = called.iter().filter(|&(&rank, _)| rank != odd).map(|(_, &at)| at).min();
    Some(others?.max(*called.get(&odd)?))
}

/// What is wrong with what the ranks of a group that differ were told, and its switches said, at the end of all.
///
/// `limit` is none where more than what the ranks do may take time.
fn check(
    group: &Group,
    members: &[&Member],
    told: &[(Instant, Mismatch)],
    limit: impl Fn(&Member) -> Option<Duration>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    let Some((call, odd, _)) = group.mismatch else {
        wrong.extend(told.first().map(|(_, mismatch)| format!("{mismatch:?} was told: all agree")));
        return wrong;
    };
    let since = |it: &Member| Some((it.rank, it.calls.get(call)?.started?));
    let called: BTreeMap<u32, Instant> = members.iter().filter_map(|it| since(it)).collect();
    for (at, mismatch) in told {
        let what = group.check_difference(mismatch, &called, *at);
        wrong.extend(what.map(|what| format!("{mismatch:?} was told at {at}: {what}")));
        // The only switch knew of these.
        let is_known = |member: &&&Member| {
            let since = called.get(&member.rank).filter(|_| member.rank != odd);
            since.zip(limit(member)).is_some_and(|(&since, limit)| since + limit <= *at)
        };
        let is_clear = members.iter().filter(is_known).count() > 1;
        if is_clear && group.tree.levels() == 1 && mismatch.rank != odd {
            wrong.push(format!(
                "{mismatch:?} was told at {at}: most are taken for those who differ"
            ));
        }
    }
    let difference = difference_since(odd, &called);
    for member in members {
        let (rank, failed) = (member.rank, member.failed);
        if let Some(CollectiveError::Aborted(Abort::Mismatch(mismatch))) = failed
            && !told.iter().any(|(_, other)| *other == mismatch)
        {
            wrong.push(format!("rank {rank} was told {mismatch:?}, which no switch has said"));
        }
        let (Some(limit), Some(&own), Some(difference)) =
            (limit(member), called.get(&rank), difference)
        else {
            continue;
        };
        let until = own.max(difference) + limit;
        if member.failed_at.is_none_or(|at| at > until) {
            let at = member.failed_at;
            wrong.push(format!(
                "rank {rank} called at {own}, ranks differ since {difference}, and it heard of that at {at:?}: \
                 later than {until}"
            ));
        }
    }
    if difference.is_some() && told.is_empty() && !group.is_excused {
        wrong.push("ranks differ, and no switch has said so".into());
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenarios::inc_chaos::call::Sizes;

    fn groups() -> impl Iterator<Item = Group> {
        (0..400).filter_map(|seed| {
            let mut rng = Rng::new(seed);
            let mut world = World::draw(&mut rng);
            let mut group = world.groups.swap_remove(0);
            group.differ(&mut rng);
            group.mismatch.is_some().then_some(group)
        })
    }

    #[test]
    fn two_that_differ_always_call() {
        let mut never = 0;
        for (seed, mut group) in groups().enumerate() {
            let (call, odd, _) = group.mismatch.unwrap();
            group.draw_absences(&mut Rng::new(seed as u64), call);
            group.absences.retain(|it| it.call == call || it.late.is_none());
            assert!(group.absences.iter().all(|it| it.call == call));
            group.absences.retain(|it| it.rank != odd || it.late.is_none());
            assert!(group.absences.iter().all(|it| it.rank != odd));
            let mut ranks: Vec<u32> = group.absences.iter().map(|it| it.rank).collect();
            ranks.sort_unstable();
            ranks.dedup();
            assert_eq!(ranks.len(), group.absences.len());
            assert!(ranks.len() + 2 <= group.members().len().max(2), "{:?}", group.absences);
            never += group.absences.iter().filter(|it| it.late.is_none()).count();
        }
        assert!(never > 0);
    }

    #[test]
    fn what_is_told_of_a_difference_must_be_true() {
        let at = |nanos| Instant::ZERO + Duration::from_nanos(nanos);
        for group in groups().take(50) {
            let (call, odd, other) = group.mismatch.unwrap();
            let Sizes { world, .. } = group.sizes;
            let called: BTreeMap<u32, Instant> = (0..world).map(|rank| (rank, at(5))).collect();
            let ours = group.calls[call];
            let (wanted, found) = (fields(&ours), fields(&other));
            let ((field, expected), (_, found)) =
                wanted.into_iter().zip(found).find(|(a, b)| a != b).unwrap();
            let reference = u32::from(odd == 0);
            let sequence = ours.number;
            let right = Mismatch { sequence, rank: odd, reference, field, expected, found };
            let check = |mismatch, now| group.check_difference(&mismatch, &called, at(now));
            assert_eq!(check(right, 5), None);
            assert!(check(right, 4).is_some(), "nobody had called");
            for wrong in [
                Mismatch { sequence: sequence + 1, ..right },
                Mismatch { rank: reference, ..right },
                Mismatch { rank: world, ..right },
                Mismatch { expected: found, found: expected, ..right },
                Mismatch { field: Field::Stripe, ..right },
            ] {
                assert!(check(wrong, 5).is_some(), "{wrong:?}");
            }
        }
    }
}
