//! The policy file: classes of requests by name, and what may be in flight.
//!
//! A request names a class ([`crate::SubmitOptions::policy`]) and has its priority, deadline, transports and
//! limits. The format is in docs/policy-file.md.

mod classes;
mod document;
mod error;
mod rules;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::time::Duration;

use millstream_transfer_core::PriorityLevel;

pub use self::error::PolicyFileError;
use self::rules::MAX_RULES;
pub(crate) use self::rules::Seen;
pub use self::rules::{MemoryKind, PolicyRule, SegmentKind};
use crate::path::Allowed;
use crate::settings::nearest;
use crate::transport;

/// The most classes of a file.
pub(crate) const MAX_CLASSES: usize = 256;

/// What may be in flight: submitted, and not ended.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct AdmissionLimits {
    /// Bytes of all requests together; without, any number.
    pub bytes: Option<u64>,
    /// Requests; without, any number.
    pub requests: Option<u64>,
}

impl AdmissionLimits {
    /// Whether anything is limited.
    pub const fn is_limited(&self) -> bool {
        self.bytes.is_some() || self.requests.is_some()
    }
}

/// A class of requests.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PolicyClass {
    /// Its name.
    pub name: String,
    /// Of its requests, unless they have another one.
    pub priority: PriorityLevel,
    /// So long after their submission is the deadline of its requests, unless they have another one.
    pub deadline: Option<Duration>,
    /// The transports that may do its requests. None are all.
    pub transports: Vec<&'static str>,
    /// What may be in flight of it.
    pub limits: AdmissionLimits,
}

/// What a policy file says. The default is what no file says: no classes, and no limits.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PolicyFile {
    /// What may be in flight of an engine.
    pub limits: AdmissionLimits,
    /// The classes, each with what it inherits, in the order of the file.
    pub classes: Vec<PolicyClass>,
    /// Of these the first that is for a request says which transports do it.
    pub rules: Vec<PolicyRule>,
}

impl PolicyFile {
    /// Whether a text is a configuration of the original: an object in JSON that has none of the keys of a policy
    /// file, and none that was perhaps meant as one.
    pub(crate) fn is_of_original(text: &str) -> bool {
        let read = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text);
        let ours = |key: &String| nearest(key, classes::TABLES.into_iter()).is_some();
        read.is_ok_and(|object| !object.is_empty() && !object.keys().any(ours))
    }

    /// Reads a file: JSON if its name ends in `.json`, else TOML. At most 1 MiB.
    pub fn load(path: &Path) -> Result<Self, PolicyFileError> {
        let text = crate::settings::read_file(path)
            .map_err(|error| PolicyFileError::Read { path: path.to_owned(), error })?;
        Self::parse(path, &text)
    }

    /// The same, of what was read already.
    pub fn parse(path: &Path, text: &str) -> Result<Self, PolicyFileError> {
        let is_json = path.extension().is_some_and(|suffix| suffix.eq_ignore_ascii_case("json"));
        let document = match is_json {
            true => document::json(text),
            false => document::toml(text),
        };
        let read = document.and_then(|document| classes::read(&document));
        read.map_err(|fault| fault.at(path))
    }

    /// The rules for requests of this intent and priority that these transports may do, as bits by their places.
    pub(crate) fn rules_for(
        &self,
        intent: Option<&str>,
        priority: PriorityLevel,
        allowed: Allowed,
    ) -> u64 {
        self.rules_where(|rule| {
            rule.intent.as_deref().is_none_or(|wanted| Some(wanted) == intent)
                && rule.priority.is_none_or(|wanted| wanted == priority)
                && (rule.transports.is_empty()
                    || rule.transports.iter().any(|name| allowed.has(name)))
        })
    }

    /// Those for requests of so many bytes.
    pub(crate) fn rules_of_length(&self, length: u64) -> u64 {
        self.rules_where(|rule| rule.lengths.contains(&length))
    }

    fn rules_where(&self, applies: impl Fn(&PolicyRule) -> bool) -> u64 {
        let rules = self.rules.iter().enumerate().take(MAX_RULES);
        rules.filter(|(_, rule)| applies(rule)).fold(0, |all, (index, _)| all | 1 << index)
    }

    /// The first of these rules that is for requests which go there.
    pub(crate) fn first_rule(&self, rules: u64, seen: Seen) -> Option<&PolicyRule> {
        let of = |(index, _): &(usize, &PolicyRule)| rules & 1 << index != 0;
        let mut rules = self.rules.iter().enumerate().take(MAX_RULES).filter(of);
        rules.find(|(_, rule)| rule.is_for(seen)).map(|(_, rule)| rule)
    }

    /// Whether an engine can go by it: what was read always is so, and what a program made is looked at.
    pub(crate) fn check(&self) -> Result<(), PolicyFileError> {
        for (index, class) in self.classes.iter().enumerate() {
            let unknown = class.transports.iter().find(|name| !transport::NAMES.contains(name));
            let rule = if let Some(name) = unknown {
                format!("{name:?} names no transport: there are {}", transport::NAMES.join(", "))
            } else if self.classes[..index].iter().any(|other| other.name == class.name) {
                "there are two of this name".to_owned()
            } else if index >= MAX_CLASSES {
                format!("there are more than {MAX_CLASSES} classes")
            } else {
                continue;
            };
            return Err(PolicyFileError::Made { class: class.name.clone(), rule });
        }
        for (index, rule) in self.rules.iter().enumerate() {
            let known = |name: &&'static str| transport::NAMES.contains(name);
            let fault = if !rule.transports.iter().all(known) {
                format!("its transports are some of {}", transport::NAMES.join(", "))
            } else if index >= MAX_RULES {
                format!("there are more than {MAX_RULES} rules")
            } else {
                continue;
            };
            return Err(PolicyFileError::MadeRule { name: rule.name.clone(), fault });
        }
        Ok(())
    }
}
