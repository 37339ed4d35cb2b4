//! What the tables of a policy file mean.

use std::time::Duration;

use millstream_transfer_core::PriorityLevel;

use super::document::{Entry, Value};
use super::error::Fault;
use super::rules::{MAX_RULES, PolicyRule};
use super::{AdmissionLimits, MAX_CLASSES, PolicyClass, PolicyFile};
use crate::settings::{nearest, size_of_text, time_of_text};
use crate::transport;

/// Tables of the document.
pub(super) const TABLES: [&str; 3] = ["limits", "class", "rule"];
/// Keys of `limits`, and of a class, too.
const LIMITS: [&str; 2] = ["bytes_in_flight", "requests_in_flight"];
/// Other keys of a class.
const OF_CLASS: [&str; 4] = ["inherits", "priority", "deadline", "transports"];
/// Characters of a name.
const MOST_NAME: usize = 64;
/// No deadline is later, since that would be as good as none.
const MOST_DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// What a class says itself, and where.
#[derive(Clone, Debug, Default)]
struct Draft {
    name: String,
    line: usize,
    inherits: Option<(String, usize)>,
    priority: Option<PriorityLevel>,
    deadline: Option<Duration>,
    transports: Option<Vec<&'static str>>,
    bytes: Option<(u64, usize)>,
    requests: Option<(u64, usize)>,
}

/// Reads a document.
pub(super) fn read(document: &[Entry]) -> Result<PolicyFile, Fault> {
    let mut limits = Draft::default();
    let mut drafts: Vec<Draft> = Vec::new();
    let mut rules: Vec<PolicyRule> = Vec::new();
    for entry in document {
        match (&*entry.key, &entry.value) {
            ("limits", Value::Table(entries)) => {
                for entry in entries {
                    if !limits.take_limit(entry, "limits")? {
                        return Err(unknown(entry, "limits", LIMITS.into_iter()));
                    }
                }
            }
            ("class", Value::Table(classes)) => {
                for class in classes {
                    drafts.push(Draft::read(class)?);
                }
            }
            ("rule", Value::Table(entries)) => {
                for entry in entries {
                    if rules.len() == MAX_RULES {
                        let what = format!("there are more than {MAX_RULES} rules");
                        return Err(Fault::new(entry.line, what));
                    }
                    rules.push(PolicyRule::read(entry)?);
                }
            }
            ("limits" | "class" | "rule", _) => {
                return Err(Fault::new(entry.line, format!("{} is a table", entry.key)));
            }
            _ => return Err(unknown(entry, "a policy file", TABLES.into_iter())),
        }
    }
    if let Some(draft) = drafts.get(MAX_CLASSES) {
        return Err(Fault::new(draft.line, format!("there are more than {MAX_CLASSES} classes")));
    }
    let mut classes = Vec::new();
    for draft in &drafts {
        classes.push(whole(draft, &drafts, &limits)?);
    }
    Ok(PolicyFile { limits: limits.limits(), classes, rules })
}

/// A key that there is not.
pub(super) fn unknown(
    entry: &Entry,
    place: &str,
    keys: impl Iterator<Item = &'static str> + Clone,
) -> Fault {
    let shown: String = entry.key.chars().take(80).collect();
    let hint = match nearest(&entry.key, keys.clone()) {
        Some(key) => format!("is {key} meant?"),
        None => format!("there are {}", keys.collect::<Vec<_>>().join(", ")),
    };
    Fault::new(entry.line, format!("{place} has no key {shown:?}: {hint}"))
}

/// A list of transports.
pub(super) fn transports(entry: &Entry, place: &str) -> Result<Vec<&'static str>, Fault> {
    let name = |value: &Value| match value {
        Value::Text(text) => transport::NAMES.into_iter().find(|name| name == text),
        _ => None,
    };
    let names: Option<Vec<_>> = match &entry.value {
        Value::List(values) => values.iter().map(name).collect(),
        _ => None,
    };
    names.filter(|it| !it.is_empty()).ok_or_else(|| {
        let known = transport::NAMES.join(", ");
        let what = format!("{place}: {} is a list of at least one of {known}", entry.key);
        Fault::new(entry.line, what)
    })
}

impl Draft {
    fn read(class: &Entry) -> Result<Self, Fault> {
        let name = class.key.clone();
        if name.is_empty() || name.chars().count() > MOST_NAME || name.chars().any(char::is_control)
        {
            let rule =
                format!("a class has a name of 1 to {MOST_NAME} characters that can be shown");
            return Err(Fault::new(class.line, rule));
        }
        let Value::Table(entries) = &class.value else {
            return Err(Fault::new(class.line, format!("class {name:?} is a table")));
        };
        let mut draft = Self { name, line: class.line, ..Self::default() };
        for entry in entries {
            draft.take(entry)?;
        }
        Ok(draft)
    }

    fn take(&mut self, entry: &Entry) -> Result<(), Fault> {
        let place = format!("class {:?}", self.name);
        let wrong =
            |what: String| Fault::new(entry.line, format!("{place}: {} is {what}", entry.key));
        match (&*entry.key, &entry.value) {
            ("inherits", Value::Text(name)) => self.inherits = Some((name.clone(), entry.line)),
            ("inherits", _) => return Err(wrong("the name of a class".into())),
            ("priority", value) => {
                let text = if let Value::Text(text) = value { text } else { "" };
                let names = PriorityLevel::ALL.map(PriorityLevel::name).join(", ");
                let found = PriorityLevel::from_name(text);
                self.priority = Some(found.ok_or_else(|| wrong(format!("one of {names}")))?);
            }
            ("deadline", value) => {
                let text = if let Value::Text(text) = value { text } else { "" };
                let found = time_of_text(text)
                    .filter(|time| (Duration::from_micros(1)..=MOST_DEADLINE).contains(time));
                let range = "a time from 1us to 24h, with its unit, such as \"50ms\"";
                self.deadline = Some(found.ok_or_else(|| wrong(range.into()))?);
            }
            ("transports", _) => self.transports = Some(transports(entry, &place)?),
            _ if self.take_limit(entry, &place)? => {}
            _ => return Err(unknown(entry, &place, OF_CLASS.into_iter().chain(LIMITS))),
        }
        Ok(())
    }

    /// Takes a limit, if it is one.
    fn take_limit(&mut self, entry: &Entry, place: &str) -> Result<bool, Fault> {
        let number = match &entry.value {
            Value::Number(number) => Some(*number),
            Value::Text(text) if entry.key == LIMITS[0] => size_of_text(text),
            _ => None,
        };
        let number = number.filter(|number| *number > 0);
        let (limit, range) = match &*entry.key {
            key if key == LIMITS[0] => (&mut self.bytes, "a size of at least 1, such as \"64MiB\""),
            key if key == LIMITS[1] => (&mut self.requests, "a whole number of at least 1"),
            _ => return Ok(false),
        };
        let rule =
            || format!("{place}: {} is {range}: with none, nothing could be in flight", entry.key);
        let number = number.ok_or_else(|| Fault::new(entry.line, rule()))?;
        *limit = Some((number, entry.line));
        Ok(true)
    }

    fn limits(&self) -> AdmissionLimits {
        let value = |limit: Option<(u64, usize)>| limit.map(|(value, _)| value);
        AdmissionLimits { bytes: value(self.bytes), requests: value(self.requests) }
    }
}

/// A class with what it inherits.
fn whole(draft: &Draft, all: &[Draft], engine: &Draft) -> Result<PolicyClass, Fault> {
    let mut whole = draft.clone();
    let mut names = vec![&*draft.name];
    let mut heir = draft;
    while let Some((name, line)) = &heir.inherits {
        let place = format!("class {:?}", heir.name);
        let Some(parent) = all.iter().find(|class| class.name == *name) else {
            let known = all.iter().map(|class| &*class.name);
            let hint =
                nearest(name, known).map_or(String::new(), |it| format!(": is {it:?} meant?"));
            let rule = format!("{place} inherits from {name:?}, which is no class{hint}");
            return Err(Fault::new(*line, rule));
        };
        let is_cycle = names.contains(&&*parent.name);
        names.push(&parent.name);
        if is_cycle {
            let rule = format!("{place}: inherits goes in a cycle: {}", names.join(" -> "));
            return Err(Fault::new(*line, rule));
        }
        whole.priority = whole.priority.or(parent.priority);
        whole.deadline = whole.deadline.or(parent.deadline);
        whole.transports = whole.transports.or_else(|| parent.transports.clone());
        whole.bytes = whole.bytes.or(parent.bytes);
        whole.requests = whole.requests.or(parent.requests);
        heir = parent;
    }
    for (key, own, most) in
        [(LIMITS[0], whole.bytes, engine.bytes), (LIMITS[1], whole.requests, engine.requests)]
    {
        if let (Some((own, line)), Some((most, _))) = (own, most)
            && own > most
        {
            let rule = format!(
                "class {:?}: {key} = {own} can never be reached: limits.{key} is {most}",
                draft.name
            );
            return Err(Fault::new(line, rule));
        }
    }
    let limits = whole.limits();
    Ok(PolicyClass {
        name: whole.name,
        priority: whole.priority.unwrap_or_default(),
        deadline: whole.deadline,
        transports: whole.transports.unwrap_or_default(),
        limits,
    })
}
