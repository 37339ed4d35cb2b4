//! A check's answer.

use serde::Serialize;

/// How much stands in the way.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Ok,
    /// It works, and costs something.
    Degraded,
    /// Something does not work.
    Blocked,
}

/// What was found of one thing.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    pub(super) name: &'static str,
    pub(super) state: State,
    pub(super) found: String,
    /// What that costs, unless it is all right.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cost: Option<String>,
    /// The line that changes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
}

impl State {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Blocked => "blocked",
        }
    }
}

impl Check {
    pub(super) fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, state: State::Ok, found: found.into(), cost: None, remedy: None }
    }

    pub(super) fn unknown(name: &'static str) -> Self {
        Self::ok(name, "not known here")
    }

    pub(super) fn degraded(
        name: &'static str,
        found: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (cost, remedy) = (Some(cost.into()), Some(remedy.into()));
        Self { name, state: State::Degraded, found: found.into(), cost, remedy }
    }

    pub(super) fn blocked(
        name: &'static str,
        found: impl Into<String>,
        cost: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { state: State::Blocked, ..Self::degraded(name, found, cost, remedy) }
    }
}
