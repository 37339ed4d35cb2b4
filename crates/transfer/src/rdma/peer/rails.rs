//! The connections of a peer's rails: made, closed, and fenced.

use std::sync::Arc;

use millstream_transfer_core::{Rail, RailId, RailState};

use super::super::connection::{Connection, Outstanding};
use super::super::links::{Link, Place};
use super::{Connected, Peer};
use crate::FailureReason;

impl Peer {
    /// Whether a rail is being connected with this number still.
    pub(in super::super) fn wants(&self, rail: RailId, epoch: u64) -> bool {
        let state = self.lock();
        let rail = &state.flow.rails()[usize::from(rail.0)];
        !state.stopped && rail.epoch() == epoch && rail.state() == RailState::Connecting
    }

    /// A rail is connected. What is not needed any more is given back.
    pub(in super::super) fn connected(
        &self,
        rail: RailId,
        epoch: u64,
        connection: Connection,
        place: Place,
    ) -> Option<Connection> {
        let mut state = self.lock();
        let now = self.now();
        let found = &state.flow.rails()[usize::from(rail.0)];
        if state.stopped || found.epoch() != epoch || found.state() != RailState::Connecting {
            return Some(connection);
        }
        let (nic, queue_pairs) = (&self.way(rail).nic, connection.queue_pairs.len());
        tracing::info!(peer = &*self.name, nic = nic.nic, queue_pairs, epoch, "connected");
        let connection = Arc::new(connection);
        let link = Link { peer: self.own.clone(), rail, epoch, queue_pair: 0 };
        self.device(rail).links.add(&connection, &link, place);
        let outstanding = Outstanding::new(queue_pairs);
        state.connections[usize::from(rail.0)] = Some(Connected { epoch, connection, outstanding });
        state.flow.rail_up(now, rail, epoch);
        state.last = None;
        state.reasons[usize::from(rail.0)] = None;
        self.act(now, state);
        None
    }

    /// The port of one of the devices here has ceased to work, or works again.
    pub(in super::super) fn port_changed(&self, device: usize, works: bool) {
        let mut state = self.lock();
        let now = self.now();
        if works {
            state.flow.nic_works(now, device as u16);
        } else {
            let ways = self.rails.iter().enumerate().filter(|(_, way)| way.local == device);
            for (index, _) in ways {
                let rail = RailId(index as u16);
                let (epoch, up) = {
                    let rail = &state.flow.rails()[index];
                    (rail.epoch(), rail.is_up())
                };
                if up {
                    state.failed(rail, self.shared.devices[device].port_down());
                    state.flow.rail_down(now, rail, epoch);
                }
            }
        }
        self.act(now, state);
    }

    /// A rail could not be connected.
    pub(in super::super) fn not_connected(&self, rail: RailId, epoch: u64, reason: FailureReason) {
        let mut state = self.lock();
        let now = self.now();
        tracing::info!(error = %self.error(Some(rail), reason.clone()), epoch, "not connected");
        let hopeless = !reason.may_pass();
        state.failed(rail, reason);
        state.flow.rail_down(now, rail, epoch);
        let state = self.act_and_keep(now, state);
        let Some(mut state) = state.filter(|_| hopeless) else { return };
        // No patience helps, unless another rail is there or will be.
        let may_come = |rail: &Rail| {
            matches!(rail.state(), RailState::Up | RailState::Connecting | RailState::Fencing)
        };
        if !state.flow.rails().iter().any(may_come) {
            state.flow.give_up();
        }
        self.act(now, state);
    }

    /// The peer takes only connections with higher numbers than `floor`.
    pub(in super::super) fn refused(
        &self,
        rail: RailId,
        epoch: u64,
        floor: u64,
        reason: FailureReason,
    ) {
        let mut state = self.lock();
        let now = self.now();
        state.failed(rail, reason);
        state.flow.rail_refused(now, rail, epoch, floor);
        self.act(now, state);
    }

    /// The peer has closed a connection to make room for others. What comes next connects again.
    pub(in super::super) fn evicted(&self, rail: RailId, epoch: u64) {
        let mut state = self.lock();
        let now = self.now();
        let found = state.flow.rails().get(usize::from(rail.0));
        if found.is_some_and(|found| found.epoch() == epoch) {
            tracing::info!(peer = &*self.name, epoch, "the peer has closed a connection");
            // Also while it connects: it may have been told before the answer to its request.
            state.flow.close_rail(now, rail, epoch);
        }
        self.act(now, state);
    }

    /// Nothing touches memory for a connection here any more.
    pub(super) fn aborted(&self, rail: RailId, epoch: u64) {
        let mut state = self.lock();
        let now = self.now();
        state.aborting.retain(|(aborting, old, _)| (*aborting, *old) != (rail, epoch));
        state.flow.rail_aborted(now, rail, epoch);
        self.act(now, state);
    }

    /// The peer has confirmed a fence, or does not fence.
    pub(in super::super) fn fenced(&self, rail: RailId, epoch: u64, confirmed: bool) {
        let mut state = self.lock();
        let now = self.now();
        match confirmed {
            true => state.flow.fence_confirmed(now, rail, epoch),
            false => state.flow.fence_refused(now, rail, epoch),
        }
        self.act(now, state);
    }

    /// Closes the connection of a rail if nothing is under way on it; whether it did.
    pub(in super::super) fn close_if_idle(&self, rail: RailId, epoch: u64) -> bool {
        let mut state = self.lock();
        let now = self.now();
        let found = &state.flow.rails()[usize::from(rail.0)];
        let idle = found.epoch() == epoch && found.is_up() && found.slices_in_flight() == 0;
        if idle {
            state.flow.close_rail(now, rail, epoch);
        }
        self.act(now, state);
        idle
    }
}
