//! Losses of switches that ranks hear of from a switch below: which switch it is, that one says itself.
//!
//! A switch whose uplink breaks tells those below on the data network, and the controller. What a rank hears so may be here
//! before what its switch says, which lives. So it is believed once that switch, or one between it and the one that is lost,
//! had time to say which one it is.
//!
//! So it is with a switch that is lost below another one, of which ranks below others hear. That one has as much time to say it,
//! and the ranks of the lost one mostly have said it before.

use core::time::Duration;

use millstream_roce::Instant;

use super::fallback::HOSTS_INCARNATION;
use super::group::{End, Group};
use super::resume::UNKNOWN;
use super::{Controller, GroupId, Switch};
use crate::protocol::{AbortReason, LostSwitch, shortened};

/// How long the switch that has found the loss may take to say so, where its control connection lives.
const TIME_TO_SAY: Duration = Duration::from_secs(1);

/// What a rank says of a switch that it is not connected to.
#[derive(Debug)]
pub(super) struct FurtherUp {
    pub(super) until: Instant,
    rank: u32,
    tree: usize,
    /// That of the rank, if it says so: it lives.
    own: Option<LostSwitch>,
    detail: String,
}

impl Group {
    /// When it ends, if the switch that has found a loss says nothing.
    pub(super) fn named_by(&self) -> Option<Instant> {
        self.further_up.as_ref().map(|further_up| further_up.until)
    }
}

impl Controller {
    /// A rank has heard from its switch that one further up is lost. The first to say so counts.
    pub(super) fn lost_further_up(
        &mut self,
        id: GroupId,
        rank: u32,
        (tree, own): (usize, Option<LostSwitch>),
        detail: &str,
    ) {
        let until = self.now + TIME_TO_SAY;
        let Some(group) = self.groups.get_mut(&id) else { return };
        let detail = shortened(detail.to_owned());
        group.further_up.get_or_insert(FurtherUp { until, rank, tree, own, detail });
    }

    /// Ends the groups whose switches had time to say which one is lost.
    pub(super) fn name_lost_further_up(&mut self, now: Instant) {
        for id in self.groups.due(now, Group::named_by) {
            let known = self.groups.get_mut(&id).and_then(|group| group.further_up.take());
            let Some(FurtherUp { rank, tree, own, detail, .. }) = known else { continue };
            // Where hosts take the place of switches, one that is away was perhaps it.
            let of_hosts = own.is_none_or(|own| own.incarnation == Some(HOSTS_INCARNATION));
            let away = self.away_beside(id, rank).filter(|_| of_hosts);
            let reason = match (self.likely_lost(id, tree, rank), away) {
                (Some(switch), _) => {
                    let said = format!("rank {rank} has heard so from a switch below");
                    switch.lost(said)
                }
                (None, Some(rank)) => AbortReason::PeerLost { rank, detail },
                // Its trees are of an earlier controller. The detail says that it is one further up.
                (None, None) => self.lost_of_before(own.unwrap_or(UNKNOWN), detail),
            };
            self.end_group(id, &End::Aborted(reason));
        }
    }

    /// Which switch above that of a rank it is, as none below has said so: those that could have are not connected, so that it
    /// is above the lowest of them.
    fn likely_lost(&self, id: GroupId, tree: usize, rank: u32) -> Option<&Switch> {
        let trees = self.groups.get(&id)?.trees.as_ref()?;
        let leaf = trees.leaf_of(tree, rank)?;
        let switch = |node: usize| self.switches.get(&trees.nodes()[node].switch);
        let above = |node: &usize| trees.nodes()[*node].parent;
        let parents = core::iter::successors(leaf.parent, above);
        let mute = |&node: &usize| {
            let is_mute = switch(node).is_some_and(|switch| switch.connection.is_none());
            is_mute && above(&node).is_some()
        };
        let leaf_is_mute = self.switches.get(&leaf.switch)?.connection.is_none();
        let lowest = parents.filter(|_| !leaf_is_mute).find(mute);
        switch(lowest.and_then(|node| above(&node)).or(leaf.parent)?)
    }
}
