//! Leaves a copy of what the controller has for those who look at it, at intervals.

use std::sync::Arc;
use std::time::Duration;

use millstream_inc::controller::Controller;
use millstream_roce::Instant;

use super::ControllerView;

/// Between two copies. Before every second one, the switches are asked what they have counted.
const INTERVAL: Duration = Duration::from_millis(500);

/// Somebody may be looking.
pub(crate) struct Watch {
    view: Arc<ControllerView>,
    /// When the next copy is due.
    at: Instant,
    asked: bool,
}

impl Watch {
    pub(crate) fn new(view: Arc<ControllerView>, now: Instant) -> Self {
        Self { view, at: now, asked: false }
    }

    pub(crate) fn at(&self) -> Instant {
        self.at
    }

    /// Does what is due.
    pub(crate) fn look(&mut self, now: Instant, controller: &mut Controller) {
        if self.at > now {
            return;
        }
        self.at = now + INTERVAL;
        self.asked = !self.asked;
        if self.asked {
            controller.read_counters();
        }
        self.view.publish(controller.overview());
    }
}
