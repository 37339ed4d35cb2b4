//! Which transport takes the requests to a segment, and why the others do not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use millstream_metadata::SegmentDesc;

use crate::engine::Inner;
use crate::policy_file::Seen;
use crate::segment::OpenSegment;
use crate::tcp::relay;
use crate::transport::{NAMES, Transport, code_of, name_of};
use crate::{MemoryKind, SegmentId, SegmentKind, SubmitError};

/// Whether a transport takes requests to a segment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PathReport {
    /// The transport's name.
    pub transport: &'static str,
    /// Whether it takes the requests to one of the segment's buffers at least.
    pub chosen: bool,
    /// Why it does not take those to the first buffer that it does not take. `None` when it takes all.
    pub reason: Option<String>,
}

/// A transport that an engine insists on.
#[derive(Debug, Default)]
pub(crate) struct Required(AtomicU8);

impl Required {
    /// Insists on this one, or on none.
    pub(crate) fn set(&self, name: Option<&'static str>) {
        self.0.store(name.map_or(0, code_of), Ordering::Relaxed);
    }

    fn name(&self) -> Option<&'static str> {
        name_of(self.0.load(Ordering::Relaxed))
    }

    /// Whether it is one.
    pub(crate) fn is_set(&self) -> bool {
        self.name().is_some()
    }
}

/// The transports that may do a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Allowed(u8);

impl Default for Allowed {
    /// All of them.
    fn default() -> Self {
        Self(u8::MAX)
    }
}

impl Allowed {
    /// These, which are names of transports.
    pub(crate) fn these(names: &[&'static str]) -> Self {
        Self(names.iter().fold(0, |all, name| all | bit(name)))
    }

    /// The one of this name, if it is one.
    pub(crate) fn named(name: &str) -> Option<Self> {
        NAMES.into_iter().find(|known| *known == name).map(|name| Self(bit(name)))
    }

    /// Those that are also among these.
    pub(crate) const fn and(self, these: Self) -> Self {
        Self(self.0 & these.0)
    }

    /// Those but this one.
    pub(crate) fn without(self, name: &'static str) -> Self {
        Self(self.0 & !bit(name))
    }

    /// Whether all of these are among them.
    pub(crate) const fn includes(self, these: Self) -> bool {
        self.0 & these.0 == these.0
    }

    /// Whether this one is among them.
    pub(crate) fn has(self, name: &'static str) -> bool {
        self.0 & bit(name) != 0
    }

    /// Whether some are not.
    const fn is_restricted(self) -> bool {
        self.0 != u8::MAX
    }

    fn names(self) -> String {
        let names: Vec<_> = NAMES.into_iter().filter(|name| self.has(name)).collect();
        names.join(", ")
    }
}

/// The transports that the log has told to take requests to a segment.
#[derive(Debug, Default)]
pub(crate) struct Told(AtomicU8);

impl Told {
    fn has(&self, name: &'static str) -> bool {
        self.0.load(Ordering::Relaxed) & bit(name) != 0
    }

    fn set(&self, names: impl Iterator<Item = &'static str>) {
        self.0.store(names.fold(0, |all, name| all | bit(name)), Ordering::Relaxed);
    }
}

fn bit(name: &'static str) -> u8 {
    match code_of(name) {
        0 => 0,
        code => 1 << (code - 1),
    }
}

/// Where a request goes: a buffer of a segment.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) segment: &'a Arc<OpenSegment>,
    pub(crate) descriptor: &'a Arc<SegmentDesc>,
    /// Its index in the descriptor.
    pub(crate) buffer: usize,
}

/// What keeps a transport from a buffer.
enum Obstacle {
    /// It is for other segments: the engine's own, or those of other processes.
    Unable(&'static str),
    /// The buffer has no keys for it.
    KeysMissing,
    /// What it says itself.
    Reason(String),
}

impl Obstacle {
    fn into_reason(self) -> String {
        match self {
            Self::Unable(reason) => reason.to_owned(),
            Self::KeysMissing => "that buffer is not accessible for remotes".to_owned(),
            Self::Reason(reason) => reason,
        }
    }
}

impl Place<'_> {
    /// Why the transport is for other segments, if so.
    fn unable(&self, transport: &dyn Transport) -> Option<&'static str> {
        let capabilities = transport.capabilities();
        if self.segment.is_relayed() && transport.name() != relay::NAME {
            return Some("its process was found through a relay, and not from here");
        }
        match self.segment.id {
            SegmentId::LOCAL if !capabilities.own_segment => Some("it is this engine's own"),
            SegmentId::LOCAL => None,
            _ if !capabilities.remote_segments => Some("it is another process's"),
            _ => None,
        }
    }

    fn keys_missing(&self, transport: &dyn Transport) -> bool {
        transport.capabilities().needs_keys && self.descriptor.buffers[self.buffer].rkey.is_empty()
    }

    /// Whether the transport takes requests to it.
    pub(crate) fn led_to_by(&self, transport: &dyn Transport) -> bool {
        self.unable(transport).is_none()
            && !self.keys_missing(transport)
            && transport.leads(self.segment, self.descriptor, self.buffer)
    }

    /// Why it does not, if so.
    fn obstacle(&self, transport: &dyn Transport) -> Option<Obstacle> {
        if let Some(reason) = self.unable(transport) {
            return Some(Obstacle::Unable(reason));
        }
        match transport.reaches(self.segment, self.descriptor, self.buffer) {
            Err(reason) => Some(Obstacle::Reason(reason)),
            Ok(()) => self.keys_missing(transport).then_some(Obstacle::KeysMissing),
        }
    }
}

/// Transports with their indexes, in the order in which they are tried: `local`, `shm`, then others as they were
/// installed, and `relay`. Where they are listed they stay, as what is under way knows them by their indexes.
pub(crate) fn in_order(
    all: &[Arc<dyn Transport>],
) -> impl Iterator<Item = (usize, &dyn Transport)> {
    (0..RANKS).flat_map(move |rank| of_rank(all, rank))
}

/// How many ranks transports have.
const RANKS: u8 = 4;

fn of_rank(all: &[Arc<dyn Transport>], rank: u8) -> impl Iterator<Item = (usize, &dyn Transport)> {
    let each = all.iter().map(|transport| &**transport).enumerate();
    each.filter(move |(_, transport)| transport.rank() == rank)
}

impl Inner {
    /// The transport that takes requests to this place: the first of those that may which leads there, or the
    /// one that is required. They are looked at in this order, or in their own where it names none. One that
    /// requests to the segment had to leave is the last. Its index and its name.
    pub(crate) fn choose(
        &self,
        place: Place<'_>,
        allowed: Allowed,
        order: &[&'static str],
    ) -> Option<(usize, &'static str)> {
        let avoided = |name| place.segment.avoided.is_to_be_avoided(name);
        self.choose_unless(place, (allowed, order), avoided)
    }

    /// Whether another transport than this takes requests to one of these places, as far as it may.
    pub(crate) fn leads_without<'a>(
        &self,
        name: &'static str,
        mut places: impl Iterator<Item = Place<'a>>,
    ) -> bool {
        let required = self.required.name();
        let may = |it: &str| it != name && required.is_none_or(|required| required == it);
        places.any(|place| {
            self.with_transports(|all| {
                all.iter().any(|it| may(it.name()) && place.led_to_by(&**it))
            })
        })
    }

    /// The transports that can let a WRITE count only once it survives a loss of power.
    pub(crate) fn durable_transports(&self) -> Allowed {
        self.with_transports(|all| {
            let durable = all.iter().filter(|it| it.capabilities().durable);
            Allowed(durable.fold(0, |all, it| all | bit(it.name())))
        })
    }

    /// What rules of the policy file see of a place.
    pub(crate) fn seen(&self, place: Place<'_>, gpu: bool) -> Seen {
        let memory = |gpu| if gpu { MemoryKind::Gpu } else { MemoryKind::Host };
        let descriptor = place.descriptor;
        let own = self.segments.by_id(SegmentId::LOCAL).map(|own| own.descriptor());
        let here = own.as_ref().and_then(|own| own.shm.as_ref()).map(|shm| &shm.boot_id);
        let there = descriptor.shm.as_ref().map(|shm| &shm.boot_id);
        let buffer = &descriptor.buffers[place.buffer];
        Seen {
            segment: match buffer.file_path {
                Some(_) => SegmentKind::File,
                None => SegmentKind::Memory,
            },
            memory: memory(gpu),
            peer_memory: memory(buffer.name.starts_with("cuda:")),
            same_machine: place.segment.id == SegmentId::LOCAL || (here.is_some() && here == there),
        }
    }

    /// As [`Inner::choose`], with those that are `avoided`.
    pub(crate) fn choose_unless(
        &self,
        place: Place<'_>,
        (allowed, order): (Allowed, &[&'static str]),
        avoided: impl Fn(&'static str) -> bool,
    ) -> Option<(usize, &'static str)> {
        let required = self.required.name();
        self.with_transports(|all| {
            let mut avoidable = None;
            let mut is_chosen = |index: usize, transport: &dyn Transport| {
                let name = transport.name();
                // Mostly all are.
                let is_allowed = !allowed.is_restricted() || allowed.has(name);
                let may = is_allowed && required.is_none_or(|required| required == name);
                if !may || !place.led_to_by(transport) {
                    return None;
                }
                if avoided(name) {
                    avoidable.get_or_insert((index, name));
                    return None;
                }
                Some((index, name))
            };
            // Each submission comes here: plain loops take a fraction of what one chain of iterators does.
            let chosen = match order {
                [] => (0..RANKS).find_map(|rank| {
                    of_rank(all, rank).find_map(|(index, transport)| is_chosen(index, transport))
                }),
                _ => order.iter().find_map(|name| {
                    let index = all.iter().position(|transport| transport.name() == *name)?;
                    is_chosen(index, &*all[index])
                }),
            };
            chosen.or(avoidable)
        })
    }

    /// Tells in the log which transports take requests to a segment, unless it has told this one.
    pub(crate) fn tell_path(&self, place: Place<'_>, chosen: &'static str) {
        let Place { segment, descriptor, .. } = place;
        if segment.told.has(chosen) {
            return;
        }
        let reports = self.reports(segment, descriptor);
        let taken = reports.iter().filter(|report| report.chosen).map(|report| report.transport);
        // What has changed since the reports counts, too.
        segment.told.set(taken.chain([chosen]));
        let others: Vec<_> = reports
            .iter()
            .filter(|report| report.transport != chosen)
            .filter_map(|PathReport { transport, reason, .. }| {
                reason.as_ref().map(|reason| format!("{transport}: {reason}"))
            })
            .collect();
        let (name, not) = (&segment.name, others.join("; "));
        tracing::info!(segment = name, transport = chosen, not, "path chosen");
    }

    /// What each transport that is installed does for a segment.
    pub(crate) fn reports(
        &self,
        segment: &Arc<OpenSegment>,
        descriptor: &Arc<SegmentDesc>,
    ) -> Vec<PathReport> {
        let mut reports: Vec<_> = self.with_transports(|all| {
            let report = |(_, transport): (_, &dyn Transport)| PathReport {
                transport: transport.name(),
                chosen: false,
                reason: None,
            };
            in_order(all).map(report).collect()
        });
        let is_usable = |&buffer: &usize| descriptor.buffers[buffer].fault.is_none();
        if !(0..descriptor.buffers.len()).any(|buffer| is_usable(&buffer)) {
            let nothing = match descriptor.unusable(0) {
                None => "the segment has no memory".to_owned(),
                Some(what) => format!("the segment has no memory that can be used: {what}"),
            };
            reports.iter_mut().for_each(|report| report.reason = Some(nothing.clone()));
            return reports;
        }
        for buffer in (0..descriptor.buffers.len()).filter(is_usable) {
            let place = Place { segment, descriptor, buffer };
            // Nothing is tried again by that.
            let chosen = self.choose_unless(place, (Allowed::default(), &[]), |name| {
                segment.avoided.left(name).is_some()
            });
            self.with_transports(|all| {
                let rank_of = |wanted| in_order(all).position(|(index, _)| index == wanted);
                let chosen = chosen.and_then(|(index, name)| Some((rank_of(index)?, name)));
                for (rank, (report, (_, transport))) in
                    reports.iter_mut().zip(in_order(all)).enumerate()
                {
                    if chosen.is_some_and(|(chosen, _)| chosen == rank) {
                        report.chosen = true;
                    } else if report.reason.is_none() {
                        report.reason = Some(self.why_not(place, rank, transport, chosen));
                    }
                }
            });
        }
        reports
    }

    /// Why a transport does not take requests to this place, which another takes, if any does.
    fn why_not(
        &self,
        place: Place<'_>,
        rank: usize,
        transport: &dyn Transport,
        chosen: Option<(usize, &'static str)>,
    ) -> String {
        if let Some((first, name)) = chosen
            && first < rank
        {
            // It is not asked: it would begin to prepare for requests that it does not get.
            return place
                .unable(transport)
                .map_or_else(|| format!("{name} goes before it"), str::to_owned);
        }
        match (place.obstacle(transport), self.required.name()) {
            (Some(obstacle), _) => obstacle.into_reason(),
            (None, Some(required)) => format!("{required} is required"),
            (None, None) => match place.segment.avoided.left(transport.name()) {
                Some(left) => format!(
                    "requests had to go on over another transport: it is tried again in {:.1} s",
                    left.as_secs_f64()
                ),
                None => "it has led there only since".to_owned(),
            },
        }
    }

    /// Why no transport takes a request to this place: of those that are allowed, and of these those that `may`, as
    /// they do what else it asks for.
    pub(crate) fn refusal(
        &self,
        index: usize,
        place: Place<'_>,
        allowed: Allowed,
        may: Allowed,
    ) -> SubmitError {
        let required = self.required.name();
        let segment = place.segment.name.clone();
        if may != allowed
            && let Some((_, transport)) = self.choose_unless(place, (allowed, &[]), |_| false)
        {
            return SubmitError::NotDurable { index, segment, transport };
        }
        self.with_transports(|all| {
            let others = || in_order(all).filter(|(_, other)| place.led_to_by(*other));
            if allowed.is_restricted() && required.is_none_or(|name| !allowed.has(name)) {
                let mut reasons: Vec<_> = all
                    .iter()
                    .filter(|transport| allowed.has(transport.name()))
                    .filter_map(|it| Some((it.name(), place.obstacle(&**it)?.into_reason())))
                    .map(|(name, reason)| format!("{name}: {reason}"))
                    .collect();
                if let Some(required) = required {
                    reasons.push(format!(
                        "{required} is required of all requests, and is not allowed"
                    ));
                } else if reasons.is_empty() {
                    let installed: Vec<_> = all.iter().map(|it| it.name()).collect();
                    reasons.push(format!("installed are {}", installed.join(", ")));
                }
                return SubmitError::NotServed {
                    index,
                    segment,
                    allowed: allowed.names(),
                    reason: reasons.join("; "),
                    instead: others().map(|(_, other)| other.name()).next(),
                };
            }
            if let Some(required) = required {
                let named = all.iter().find(|transport| transport.name() == required);
                let obstacle = named.map(|transport| place.obstacle(&**transport));
                let reason = match obstacle {
                    None => "it is not installed".to_owned(),
                    Some(None) => "it has led there only since".to_owned(),
                    Some(Some(obstacle)) => obstacle.into_reason(),
                };
                let instead = others().map(|(_, other)| other.name()).next();
                return SubmitError::PathRequired { index, segment, required, reason, instead };
            }
            let mut reasons = Vec::new();
            let mut keys_missing = false;
            for transport in all {
                match place.obstacle(&**transport) {
                    Some(Obstacle::KeysMissing) => keys_missing = true,
                    Some(Obstacle::Reason(why)) => {
                        reasons.push(format!("{}: {why}", transport.name()));
                    }
                    Some(Obstacle::Unable(_)) | None => {}
                }
            }
            if keys_missing {
                return SubmitError::TargetNotAccessible { index, segment };
            }
            let reason = match reasons.is_empty() {
                true => "no transport for other processes is installed".to_owned(),
                false => reasons.join("; "),
            };
            SubmitError::NoPath { index, segment, reason }
        })
    }
}
