//! What is said where hosts take the place of switches for their own group.

use serde::{Deserialize, Serialize};

/// Whether a host takes the place of a switch for its group.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FallbackOffer {
    /// It does not want that. One such host decides for its group.
    #[default]
    Off,
    /// It does.
    Able,
    /// It would, and cannot.
    Unable {
        /// Why not.
        reason: String,
    },
}

impl FallbackOffer {
    /// Whether the host does not want that.
    pub const fn is_off(&self) -> bool {
        matches!(self, Self::Off)
    }
}

/// Trees whose nodes are on the group's hosts.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct HostsTrees {
    /// Why no switch serves the group, for people.
    pub reason: String,
    /// Whether this host is to run a switch, at the first of its addresses. Then it is asked for nodes, as a switch is.
    pub serves: bool,
    /// How many addresses of each host the trees use: tree `t` uses the one with the number `t` modulo this.
    pub addresses: u32,
}

/// What becomes of a communicator when one of its switches is lost.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Failover {
    /// It is over: some rank wants no fall-back, or its switches are the ranks' own.
    #[default]
    Off,
    /// It is over, since some rank wants reproducible results, and other trees add in another order.
    Reproducible,
    /// Its ranks go on over other trees.
    On,
}

impl Failover {
    /// Whether nothing is to be said of it.
    pub const fn is_off(&self) -> bool {
        matches!(self, Self::Off)
    }
}
