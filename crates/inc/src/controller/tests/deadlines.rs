//! The next deadline is the first of all that there are, whatever has happened to whom.

use proptest::prelude::*;

use super::*;
use crate::protocol::{FallbackOffer, Resume};

/// When something is due next, by a look at all that there is.
fn by_a_look_at_all(controller: &Controller) -> Option<Instant> {
    let pings = controller.connections.values().map(|connection| match connection.role() {
        Role::New { until } => Some(until.min(connection.next_ping)),
        Role::Switch(_) | Role::Host { .. } => Some(connection.next_ping),
    });
    let claims = |group: &Group| group.revived.as_ref().and_then(|revived| revived.until);
    let groups = controller.groups.values();
    let groups = groups.flat_map(|it| [it.deadline, it.fall_back_at, claims(it), it.named_by()]);
    let switches = controller.switches.values().map(|switch| switch.inventory_until);
    let others = [
        controller.ending.front().map(|ending| ending.until),
        controller.away.first().map(|&(until, ..)| until),
        controller.unclaimed.front().map(|&(until, _)| until),
        controller.records.until,
        controller.replanning.at(),
    ];
    let earliest = pings.chain(groups).chain(switches).chain(others).flatten().min();
    earliest.max(controller.reading_until.filter(|_| earliest.is_some()))
}

/// The number of the first connection, but for that of the switch.
const FIRST: u64 = 2000;

/// Things happen by chance to connections, of which there are so many.
struct Chance {
    world: World,
    next: u64,
    has_switch: bool,
}

impl Chance {
    fn new(has_switch: bool) -> Self {
        let mut world = World::new();
        if has_switch {
            world.switch(SWITCH, "s", 1);
        }
        Self { world, next: FIRST, has_switch }
    }

    /// A connection that somebody has just made.
    fn fresh(&mut self) -> ConnectionId {
        let connection = ConnectionId(self.next);
        self.next += 1;
        self.world.connect(connection);
        connection
    }

    fn step(&mut self, what: u8, chance: u16) {
        let any = ConnectionId(FIRST + u64::from(chance) % (self.next - FIRST).max(1));
        let (third, rank) = (chance % 3, u32::from(chance / 3 % 3));
        match what {
            0 => {
                self.fresh();
            }
            1 => {
                let fallback = FallbackOffer::Able;
                let hello = Hello { fallback, ..hello(&format!("g{third}"), 3, rank) };
                let connection = self.fresh();
                self.world.say(connection, ToController::Join(hello));
            }
            2 => {
                let claim = Resume {
                    term: 0,
                    group: format!("old {third}"),
                    identity: [7, third.into()],
                    communicator: 70 + u64::from(third),
                    world: 3,
                    rank,
                    address: hello("g", 3, rank).address,
                    departed: chance.is_multiple_of(7),
                    more_addresses: Vec::new(),
                };
                let connection = self.fresh();
                self.world.say(connection, ToController::Resume(claim));
            }
            3 => {
                // It has a node that it does not name, and so serves nobody.
                let presence = Presence { incarnation: 3, term: 0, held: 1 };
                let (connection, name) = (ConnectionId(self.next), format!("t{third}"));
                self.next += 1;
                self.world.switch_with(connection, &name, 10 + third as u8, presence);
            }
            4 if self.has_switch => {
                let name = format!("ready {}", self.next);
                self.world.ready(self.next, &name, 2);
                self.next += 2;
            }
            5 => self.world.end(any),
            6 => self.world.say(any, ToController::Leave { collectives: chance.into() }),
            7 => {
                let reason = "it is tired".to_owned();
                self.world.say(any, ToController::Fail { reason, cause: None });
            }
            8 => {
                let (detail, tree, switch) = ("silent".to_owned(), 0, None);
                let lost = ToController::SwitchLost { detail, tree, switch, further_up: true };
                self.world.say(any, lost);
            }
            9 => self.world.close(any),
            10 => {
                // It stands still, and is called late.
                self.world.now = self.world.now + seconds(f64::from(chance % 30) / 10.0);
                self.world.controller.handle_timeout(self.world.now);
                self.world.settle();
            }
            _ => self.world.pass(seconds(f64::from(chance % 40) / 10.0)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_next_deadline_is_the_first_of_all(
        has_switch in any::<bool>(),
        steps in proptest::collection::vec((0..13_u8, any::<u16>()), 0..80),
    ) {
        let mut chance = Chance::new(has_switch);
        for (what, which) in steps {
            chance.step(what, which);
            let first = by_a_look_at_all(&chance.world.controller);
            prop_assert_eq!(chance.world.controller.poll_timeout(), first);
        }
    }
}
