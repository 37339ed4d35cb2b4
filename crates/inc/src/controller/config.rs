//! What a controller is made with.

use core::time::Duration;
use std::sync::Arc;

use super::identity_secret::IdentitySecret;
use super::quotas::{Quotas, TokenRules};
use crate::plan::FanIn;
use crate::spec::MAX_WORLD;
use crate::topology::Topology;

/// What a controller is made with.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// What the numbers of its groups and communicators are made from. They tell those of this run from those of an earlier
    /// one, and whoever could foresee that of another's group could claim it.
    pub secret: IdentitySecret,
    /// At most so many ranks are connected, of all groups: no group has more.
    pub max_ranks: usize,
    /// At most so many switches are connected.
    pub max_switches: usize,
    /// At most so many of them may not have said yet what they are: for another one, the oldest of those of the
    /// address that has most of them is sent away.
    pub max_strangers: usize,
    /// At most so many groups.
    pub max_groups: usize,
    /// Who has not said what it is after this time is sent away.
    pub introduction_timeout: Duration,
    /// No group waits longer than this, whatever its ranks ask for.
    pub max_group_timeout: Duration,
    /// How often everyone is asked whether it is alive.
    pub keep_alive_interval: Duration,
    /// Who does not answer so many times in a row is dead.
    pub keep_alive_misses: u32,
    /// How long a communicator that ends by itself may be on a switch before it is destroyed.
    pub abort_timeout: Duration,
    /// A rank of a communicator whose connection was closed is lost unless it comes back within this time.
    pub resume_timeout: Duration,
    /// The other ranks of a communicator that this controller has not made are lost unless they come back within
    /// this time after the first.
    pub claim_timeout: Duration,
    /// A node that a switch has from before is ended unless a rank of its communicator comes back within this time.
    pub inventory_grace: Duration,
    /// Deadlines that are seen so much too late mean that this process stood still: what has come meanwhile is read
    /// before anyone is given up.
    pub standstill: Duration,
    /// A full group whose hosts take the place of switches waits so long for one before, or half of the time that it has
    /// left if that is less.
    pub fallback_patience: Duration,
    /// Why there is no switch, and none is taken, if so: hosts take the place of switches at once.
    pub hosts_only: Option<String>,
    /// How many children a node of a tree may have.
    pub fan_in: FanIn,
    /// Bytes of a segment, for all communicators: a multiple of every path MTU.
    pub segment_bytes: u32,
    /// Segments that a host may be ahead of its last result.
    pub window: u32,
    /// The network, if trees are planned on it. Switches and hosts that it does not have are refused.
    pub topology: Option<Arc<Topology>>,
    /// Whether [`super::Controller::poll_placement`] says where communicators are.
    pub report_placements: bool,
    /// Hosts and switches must have proved one of these ([`super::Controller::handle_proved`]), where there are any.
    pub tokens: Vec<TokenRules>,
    /// How much one source address may have, of connections that came by [`super::Controller::handle_connected_from`].
    pub source_quotas: Quotas,
    /// Whether [`super::Controller::poll_record`] says what is to be kept for the controllers after this one.
    pub keep_records: bool,
}

impl ControllerConfig {
    /// The defaults: dead after three unanswered questions, a second apart.
    pub fn new(secret: impl Into<IdentitySecret>) -> Self {
        Self {
            secret: secret.into(),
            max_ranks: 4096,
            // As many as trees of 65,536 ranks with 64 children a node have, and some more.
            max_switches: 2048,
            max_strangers: 256,
            max_groups: 1024,
            introduction_timeout: Duration::from_secs(10),
            max_group_timeout: Duration::from_secs(3600),
            keep_alive_interval: Duration::from_secs(1),
            keep_alive_misses: 3,
            abort_timeout: Duration::from_secs(10),
            // Hosts try again after 1 s at the latest.
            resume_timeout: Duration::from_secs(3),
            claim_timeout: Duration::from_secs(3),
            inventory_grace: Duration::from_secs(10),
            standstill: Duration::from_secs(1),
            // Switches of an earlier controller try again after 1 s at the latest.
            fallback_patience: Duration::from_secs(3),
            hosts_only: None,
            fan_in: FanIn::MAX,
            // Measured with 4 hosts on 2 cores: smaller segments cost more for each packet, as
            // segmentation offload has less to work with; larger ones gain little.
            segment_bytes: 256 << 10,
            window: 8,
            topology: None,
            report_placements: false,
            tokens: Vec::new(),
            source_quotas: Quotas::SOURCE,
            keep_records: false,
        }
    }

    /// How many connections there are at most, as each kind of them has its limit.
    pub const fn max_connections(&self) -> usize {
        self.max_ranks + self.max_switches + self.max_strangers
    }

    /// How many ranks a group has at most: more than there can be would wait for each other in vain.
    pub(super) fn max_world(&self) -> u32 {
        MAX_WORLD.min(self.max_ranks.try_into().unwrap_or(MAX_WORLD))
    }
}
