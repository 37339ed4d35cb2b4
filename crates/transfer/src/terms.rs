//! What a submission asks for, and what its class of the policy file adds.

use std::time::Instant;

use millstream_transfer_core::PriorityLevel;

use crate::path::Allowed;
use crate::{Policy, PolicyFile, SubmitError, SubmitOptions};

/// On what terms requests are done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    /// When those that have not ended end as TIMEOUT.
    pub(crate) deadline: Option<Instant>,
    pub(crate) priority: PriorityLevel,
    /// The transports that may do them.
    pub(crate) allowed: Allowed,
    /// WRITEs count only once they survive a loss of power.
    pub(crate) durable: bool,
    /// The rules of the policy file that may be for them, as bits by their places.
    pub(crate) rules: u64,
    /// The class that they are of, by its place in the policy file.
    pub(crate) class: Option<usize>,
}

impl Terms {
    /// The terms of a submission, now.
    pub(crate) fn of(
        options: &SubmitOptions,
        file: &PolicyFile,
        policy: Policy,
        now: impl Fn() -> Instant,
    ) -> Result<Self, SubmitError> {
        let class = match &options.policy {
            None => None,
            Some(name) => {
                let found = file.classes.iter().position(|class| class.name == *name);
                let unknown = || SubmitError::UnknownPolicy {
                    policy: name.clone(),
                    known: listed(file.classes.iter().map(|class| &*class.name)),
                };
                Some(found.ok_or_else(unknown)?)
            }
        };
        let of_class = class.map(|class| &file.classes[class]);
        let mut allowed = match of_class {
            Some(class) if !class.transports.is_empty() => Allowed::these(&class.transports),
            _ => Allowed::default(),
        };
        if let Some(hint) = &options.transport {
            let one = Allowed::named(hint).ok_or_else(|| SubmitError::UnknownTransport {
                hint: hint.clone(),
                known: listed(crate::transport::NAMES.into_iter()),
            })?;
            if let Some(class) = of_class.filter(|_| !allowed.includes(one)) {
                return Err(SubmitError::HintNotAllowed {
                    hint: hint.clone(),
                    policy: class.name.clone(),
                    allowed: class.transports.join(", "),
                });
            }
            allowed = one;
        }
        let after = of_class.and_then(|class| class.deadline);
        let deadline = options.deadline.or_else(|| now().checked_add(after?));
        // What is late anyhow is refused where deadlines decide the order. Classic lets it time out.
        if policy == Policy::Tent
            && let Some(late) = options.deadline.and_then(|at| now().checked_duration_since(at))
        {
            return Err(SubmitError::DeadlinePassed { index: 0, late });
        }
        let priority = options.priority.or(of_class.map(|class| class.priority));
        let priority = priority.unwrap_or_default();
        let intent = options.intent.as_deref();
        if let Some(intent) = intent {
            let mut known = file.rules.iter().filter_map(|rule| rule.intent.as_deref());
            if !known.any(|known| known == intent) {
                let all = file.rules.iter().filter_map(|rule| rule.intent.as_deref());
                let known = listed(all);
                return Err(SubmitError::UnknownIntent { intent: intent.to_owned(), known });
            }
        }
        // A hint says more than any rule.
        let rules = match options.transport {
            Some(_) => 0,
            None => file.rules_for(intent, priority, allowed),
        };
        Ok(Self { deadline, priority, allowed, durable: options.durable, rules, class })
    }
}

/// Names, for an error.
fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    // More than fit a line help nobody.
    let names: Vec<_> = names.take(20).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
