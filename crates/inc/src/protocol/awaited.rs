//! What a group that is being made waits for.

use core::fmt;

use serde::{Deserialize, Serialize};

use super::{RankList, Refusal};

/// What a group lacks before its communicator is there.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Awaited {
    /// Ranks that have not joined.
    Ranks {
        /// Which.
        missing: RankList,
    },
    /// A switch: none is registered.
    Switch,
    /// Switches of the topology that are not registered.
    Switches {
        /// Which, for people.
        switches: String,
    },
    /// Ranks that have joined, and not made their end of the connection.
    Connections {
        /// Which.
        ranks: RankList,
    },
    /// The switch that makes the communicator.
    Communicator {
        /// Its name.
        switch: String,
    },
}

impl Awaited {
    /// What the ranks of a group are told when their time is up.
    pub(crate) fn refusal(self, group: String, world: u32) -> Refusal {
        match self {
            Self::Ranks { missing } => Refusal::Incomplete { group, world, missing },
            Self::Switch => Refusal::NoSwitch { group, hosts: None },
            Self::Switches { switches } => Refusal::SwitchesMissing { group, switches },
            Self::Connections { ranks } => Refusal::Unconnected { group, ranks },
            Self::Communicator { switch: name } => {
                Refusal::SwitchFailed { name, reason: "it did not answer in time".to_owned() }
            }
        }
    }
}

impl fmt::Display for Awaited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |ranks: &RankList| if ranks.count() == 1 { "" } else { "s" };
        match self {
            Self::Ranks { missing } => write!(f, "rank{} {}", plural(missing), missing),
            Self::Switch => f.write_str("a switch"),
            Self::Switches { switches } => write!(f, "switch {switches} of the topology"),
            Self::Connections { ranks } => {
                write!(f, "rank{} {} to connect", plural(ranks), ranks)
            }
            Self::Communicator { switch } => {
                write!(f, "switch {switch:?} to make the communicator")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reads_as_what_one_waits_for() {
        let ranks = |ranks: &[u32]| ranks.iter().copied().collect();
        for (awaited, text) in [
            (Awaited::Ranks { missing: ranks(&[2]) }, "rank 2"),
            (Awaited::Ranks { missing: ranks(&[0, 2, 3]) }, "ranks 0, 2-3"),
            (Awaited::Switch, "a switch"),
            (
                Awaited::Switches { switches: "1 (10.0.0.1)".to_owned() },
                "switch 1 (10.0.0.1) of the topology",
            ),
            (Awaited::Connections { ranks: ranks(&[1]) }, "rank 1 to connect"),
            (
                Awaited::Communicator { switch: "s0".to_owned() },
                "switch \"s0\" to make the communicator",
            ),
        ] {
            assert_eq!(awaited.to_string(), text);
        }
    }
}
