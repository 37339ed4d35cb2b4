//! Rules: which transports do a request, and in which order, by what it is.

use std::ops::Range;

use millstream_transfer_core::PriorityLevel;

use super::classes::{transports, unknown};
use super::document::{Entry, Value};
use super::error::Fault;
use crate::settings::size_of_text;

/// The most rules of a file: as many as a number has bits.
pub(crate) const MAX_RULES: usize = 64;

/// Keys of a rule.
const KEYS: [&str; 9] = [
    "intent",
    "priority",
    "segment",
    "memory",
    "peer_memory",
    "same_machine",
    "length_from",
    "length_below",
    "transports",
];

/// What a segment is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SegmentKind {
    /// Memory of a process.
    Memory,
    /// A file.
    File,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MemoryKind {
    /// The host's.
    Host,
    /// A GPU's.
    Gpu,
}

/// Which transports do requests, and in which order. A condition that is `None` holds for all.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PolicyRule {
    /// Its name.
    pub name: String,
    /// What the request is for ([`crate::SubmitOptions::intent`]).
    pub intent: Option<String>,
    /// Its priority.
    pub priority: Option<PriorityLevel>,
    /// What its segment is.
    pub segment: Option<SegmentKind>,
    /// Whose memory there is here.
    pub memory: Option<MemoryKind>,
    /// Whose memory there is at the peer.
    pub peer_memory: Option<MemoryKind>,
    /// Whether the peer is on this machine, as far as is known.
    pub same_machine: Option<bool>,
    /// Its bytes.
    pub lengths: Range<u64>,
    /// The transports that may do it, the first one first. None are all, in their own order.
    pub transports: Vec<&'static str>,
}

/// Where a request goes, as rules see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) segment: SegmentKind,
    pub(crate) memory: MemoryKind,
    pub(crate) peer_memory: MemoryKind,
    pub(crate) same_machine: bool,
}

impl PolicyRule {
    /// Whether it is for requests that go there.
    pub(crate) fn is_for(&self, seen: Seen) -> bool {
        self.segment.is_none_or(|it| it == seen.segment)
            && self.memory.is_none_or(|it| it == seen.memory)
            && self.peer_memory.is_none_or(|it| it == seen.peer_memory)
            && self.same_machine.is_none_or(|it| it == seen.same_machine)
    }

    pub(super) fn read(entry: &Entry) -> Result<Self, Fault> {
        let place = format!("rule {:?}", entry.key);
        let Value::Table(entries) = &entry.value else {
            return Err(Fault::new(entry.line, format!("{place} is a table")));
        };
        let mut rule = Self {
            name: entry.key.clone(),
            intent: None,
            priority: None,
            segment: None,
            memory: None,
            peer_memory: None,
            same_machine: None,
            lengths: 0..u64::MAX,
            transports: Vec::new(),
        };
        for entry in entries {
            rule.take(entry, &place)?;
        }
        if rule.transports.is_empty() {
            return Err(Fault::new(entry.line, format!("{place} has no transports")));
        }
        if rule.lengths.is_empty() {
            let what = format!("{place}: no length is from length_from and below length_below");
            return Err(Fault::new(entry.line, what));
        }
        Ok(rule)
    }

    fn take(&mut self, entry: &Entry, place: &str) -> Result<(), Fault> {
        let wrong =
            |what: &str| Fault::new(entry.line, format!("{place}: {} is {what}", entry.key));
        let text = || if let Value::Text(text) = &entry.value { text.as_str() } else { "" };
        let size = || match &entry.value {
            Value::Number(number) => Ok(*number),
            Value::Text(text) => size_of_text(text).ok_or_else(|| wrong("a size, as \"64KiB\"")),
            _ => Err(wrong("a size, as \"64KiB\"")),
        };
        let memory = || match text() {
            "host" => Ok(Some(MemoryKind::Host)),
            "gpu" => Ok(Some(MemoryKind::Gpu)),
            _ => Err(wrong("host or gpu")),
        };
        match entry.key.as_str() {
            "intent" if !text().is_empty() => self.intent = Some(text().to_owned()),
            "intent" => return Err(wrong("a name")),
            "priority" => {
                let found = PriorityLevel::from_name(text());
                self.priority = Some(found.ok_or_else(|| wrong("one of latency, normal, bulk"))?);
            }
            "segment" => {
                self.segment = match text() {
                    "memory" => Some(SegmentKind::Memory),
                    "file" => Some(SegmentKind::File),
                    _ => return Err(wrong("memory or file")),
                }
            }
            "memory" => self.memory = memory()?,
            "peer_memory" => self.peer_memory = memory()?,
            "same_machine" => match entry.value {
                Value::Boolean(value) => self.same_machine = Some(value),
                _ => return Err(wrong("true or false")),
            },
            "length_from" => self.lengths.start = size()?,
            "length_below" => self.lengths.end = size()?,
            "transports" => self.transports = transports(entry, place)?,
            _ => return Err(unknown(entry, place, KEYS.into_iter())),
        }
        Ok(())
    }
}
