//! Where the ranks of lost trees meet, to go on over others: at the controller, or at rank 0 if no controller is there.
//!
//! There is one successor at most, whatever is cut off from whatever:
//!
//! - A successor is made where all ranks are, and only there. Rank 0 counts them as a controller does.
//! - A rank is at one place at a time, and from rank 0 it does not come back. So once a rank is there, no controller has all.
//! - A rank goes there when it has heard nothing of a controller for long enough, or has waited at one for long enough. So
//!   those that hear the controller follow the others, who do not.
//! - A rank that has the plan of a successor goes nowhere else: it ends with that one.
//!
//! A controller that lives tells all ranks of a successor or none: it is the first to know when one gives up.

use core::time::Duration;

use millstream_roce::Instant;

/// Where ranks meet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
    /// The controllers that the rank knows.
    Controller,
    /// Rank 0, in the place of the controller.
    RankZero,
}

/// How long a rank looks for the others.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Patience {
    /// Without a word of a controller.
    pub silence: Duration,
    /// At controllers.
    pub controllers: Duration,
    /// In all.
    pub total: Duration,
}

/// Why a rank has not met the others at a place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Failure {
    /// Nobody is there, or something broke that may be mended soon.
    Passing,
    /// Others did not come in time: they are elsewhere, or late.
    Incomplete,
    /// It will not go better.
    Final,
}

/// What a rank does after a failure.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Next {
    /// It tries to meet them at [`Succession::place`].
    Again,
    /// It ends.
    GiveUp,
}

/// One rank's way to the others.
#[derive(Clone, Copy, Debug)]
pub struct Succession {
    patience: Patience,
    began: Instant,
    /// When a controller was heard, or the loss noticed.
    heard: Instant,
    place: Place,
    /// Whether rank 0 can take the place of the controller.
    can_meet: bool,
}

impl Patience {
    /// In all so much. Several controllers need longer until one of them leads.
    pub fn new(total: Duration, controllers: usize) -> Self {
        let share = total * 3 / 5;
        Self { silence: if controllers > 1 { share } else { total / 4 }, controllers: share, total }
    }
}

impl Succession {
    /// A rank has noticed a loss. `can_meet` when all ranks know where rank 0 takes the place of the controller.
    pub const fn new(now: Instant, patience: Patience, can_meet: bool) -> Self {
        Self { patience, began: now, heard: now, place: Place::Controller, can_meet }
    }

    /// Where it is to meet the others now.
    pub const fn place(&self) -> Place {
        self.place
    }

    /// Until when, at that place.
    pub fn until(&self) -> Instant {
        let stays = !self.can_meet || self.place == Place::RankZero;
        self.began + if stays { self.patience.total } else { self.patience.controllers }
    }

    /// A controller that leads has said something.
    pub fn handle_heard(&mut self, now: Instant) {
        if self.place == Place::Controller {
            self.heard = now;
        }
    }

    /// It has not met the others at its place, and has no part in what may be there.
    pub fn handle_failure(&mut self, now: Instant, failure: Failure) -> Next {
        if failure == Failure::Final || now >= self.began + self.patience.total {
            return Next::GiveUp;
        }
        if self.place == Place::RankZero {
            return if failure == Failure::Passing { Next::Again } else { Next::GiveUp };
        }
        let is_silent = now >= self.heard + self.patience.silence;
        let is_enough = now >= self.began + self.patience.controllers;
        if self.can_meet {
            // Who is missing at a controller that lives has gone there.
            if is_silent || is_enough || failure == Failure::Incomplete {
                self.place = Place::RankZero;
            }
            return Next::Again;
        }
        if failure == Failure::Passing { Next::Again } else { Next::GiveUp }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TOTAL: Duration = Duration::from_secs(20);

    fn at(seconds: f64) -> Instant {
        Instant::ZERO + Duration::from_secs_f64(seconds)
    }

    fn succession(can_meet: bool) -> Succession {
        Succession::new(at(0.0), Patience::new(TOTAL, 1), can_meet)
    }

    #[test]
    fn without_a_word_of_a_controller_it_goes_to_rank_0_and_stays() {
        let mut rank = succession(true);
        assert_eq!((rank.place(), rank.until()), (Place::Controller, at(12.0)));
        assert_eq!(rank.handle_failure(at(4.9), Failure::Passing), Next::Again);
        assert_eq!(rank.place(), Place::Controller);
        assert_eq!(rank.handle_failure(at(5.0), Failure::Passing), Next::Again);
        assert_eq!((rank.place(), rank.until()), (Place::RankZero, at(20.0)));
        rank.handle_heard(at(6.0));
        assert_eq!(rank.handle_failure(at(7.0), Failure::Passing), Next::Again);
        assert_eq!(rank.place(), Place::RankZero);
        assert_eq!(rank.handle_failure(at(20.0), Failure::Passing), Next::GiveUp);
    }

    #[test]
    fn a_controller_that_is_heard_is_waited_for_longer_and_not_for_ever() {
        let mut rank = succession(true);
        rank.handle_heard(at(4.0));
        assert_eq!(rank.handle_failure(at(8.9), Failure::Passing), Next::Again);
        assert_eq!(rank.place(), Place::Controller);
        rank.handle_heard(at(11.9));
        assert_eq!(rank.handle_failure(at(12.0), Failure::Passing), Next::Again);
        assert_eq!(rank.place(), Place::RankZero);
        let mut rank = succession(true);
        assert_eq!(rank.handle_failure(at(1.0), Failure::Incomplete), Next::Again);
        assert_eq!(rank.place(), Place::RankZero);
    }

    #[test]
    fn what_will_not_go_better_is_the_end_and_so_is_rank_0_without_all() {
        assert_eq!(succession(true).handle_failure(at(1.0), Failure::Final), Next::GiveUp);
        let mut rank = succession(true);
        rank.handle_failure(at(5.0), Failure::Passing);
        assert_eq!(rank.handle_failure(at(6.0), Failure::Incomplete), Next::GiveUp);
        // Where rank 0 cannot, there is only the controller.
        let mut rank = succession(false);
        assert_eq!(rank.until(), at(20.0));
        assert_eq!(rank.handle_failure(at(19.0), Failure::Passing), Next::Again);
        assert_eq!(rank.place(), Place::Controller);
        assert_eq!(rank.handle_failure(at(19.5), Failure::Incomplete), Next::GiveUp);
    }

    /// Where a rank is, in a model.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum State {
        /// It has not noticed the loss.
        Serving,
        /// It is on its way.
        Looking,
        /// It waits for the others there.
        There(Place),
        /// It has the plan of the successor that was made there.
        Planned(Place),
        Over,
    }

    /// Ranks that notice a loss at different times, a controller that is there now and then and that each rank may be cut
    /// off from, and rank 0. Steps of 100 ms.
    struct Model {
        states: Vec<(State, Succession)>,
        /// How many steps after the first each notices.
        late: Vec<u64>,
        /// Whether the controller works, in each second, and each rank reaches it.
        works: Vec<bool>,
        reaches: Vec<Vec<bool>>,
        /// How many ranks get a plan before the controller stops, if it stops just then.
        told: usize,
    }

    impl Model {
        fn reaches(&self, step: u64, rank: usize) -> bool {
            let second = (step / 10) as usize;
            self.works[second] && self.reaches[rank][second]
        }

        fn has_all(&self, place: Place) -> bool {
            self.states.iter().all(|(state, _)| *state == State::There(place))
        }

        fn run(&mut self) {
            for step in 0..250 {
                let now = at(step as f64 / 10.0);
                for rank in 0..self.states.len() {
                    self.one(step, now, rank);
                }
                let all = [Place::Controller, Place::RankZero].map(|place| self.has_all(place));
                if all[0] && self.works[(step / 10) as usize] {
                    // It may stop amid that, and the last to be told hear nothing.
                    let stops = self.works.get((step / 10) as usize + 1) == Some(&false);
                    let told = if stops { self.told } else { self.states.len() };
                    for (state, _) in self.states.iter_mut().take(told) {
                        *state = State::Planned(Place::Controller);
                    }
                }
                if all[1] {
                    for (state, _) in &mut self.states {
                        *state = State::Planned(Place::RankZero);
                    }
                }
            }
        }

        fn one(&mut self, step: u64, now: Instant, rank: usize) {
            let reaches = self.reaches(step, rank);
            let (state, late) = (self.states[rank].0, self.late[rank]);
            let (state_of, succession) = &mut self.states[rank];
            let failure = match state {
                State::Serving if step >= late => {
                    *succession = Succession::new(now, Patience::new(TOTAL, 1), true);
                    *state_of = State::Looking;
                    return;
                }
                State::Serving | State::Planned(_) | State::Over => return,
                State::Looking => {
                    if succession.place() == Place::RankZero || reaches {
                        *state_of = State::There(succession.place());
                        return;
                    }
                    Failure::Passing
                }
                State::There(Place::Controller) if !reaches => Failure::Passing,
                State::There(place) => {
                    if place == Place::Controller {
                        succession.handle_heard(now);
                    }
                    if now < succession.until() {
                        return;
                    }
                    Failure::Incomplete
                }
            };
            *state_of = match succession.handle_failure(now, failure) {
                Next::Again => State::Looking,
                Next::GiveUp => State::Over,
            };
        }
    }

    fn model(ranks: usize, works: Vec<bool>, reaches: Vec<Vec<bool>>) -> Model {
        let states = vec![(State::Serving, succession(true)); ranks];
        Model { states, late: vec![0; ranks], works, reaches, told: ranks }
    }

    #[test]
    fn ranks_that_all_have_lost_the_controller_or_some_of_them_meet_at_rank_0() {
        for cut in [vec![0, 1, 2], vec![1], vec![0, 2], vec![0]] {
            let reaches = (0..3).map(|rank| vec![!cut.contains(&rank); 26]).collect();
            let mut model = model(3, vec![true; 26], reaches);
            model.late = vec![0, 20, 7];
            model.run();
            let met = |(state, _): &(State, _)| *state == State::Planned(Place::RankZero);
            assert!(model.states.iter().all(met), "{cut:?}: {:?}", model.states);
        }
        let mut model = model(3, vec![true; 26], vec![vec![true; 26]; 3]);
        model.run();
        let met = |(state, _): &(State, _)| *state == State::Planned(Place::Controller);
        assert!(model.states.iter().all(met), "{:?}", model.states);
    }

    proptest! {
        #[test]
        fn there_is_one_successor_at_most_and_every_rank_ends(
            works in proptest::collection::vec(any::<bool>(), 26),
            reaches in proptest::collection::vec(proptest::collection::vec(any::<bool>(), 26), 4),
            late in proptest::collection::vec(0..25_u64, 4),
            told in 0..4_usize,
        ) {
            let mut model = model(4, works, reaches);
            (model.late, model.told) = (late, told);
            model.run();
            let planned = |place| {
                let has = |(state, _): &&(State, Succession)| *state == State::Planned(place);
                model.states.iter().filter(has).count()
            };
            let (controller, rank_zero) = (planned(Place::Controller), planned(Place::RankZero));
            prop_assert!(rank_zero == 0 || rank_zero == 4);
            prop_assert!(controller == 0 || rank_zero == 0, "{:?}", model.states);
            for (state, _) in &model.states {
                prop_assert!(matches!(state, State::Planned(_) | State::Over), "{state:?}");
            }
        }
    }
}
