//! What TENT makes of rails of unequal rates, beside the classic policy.

use std::collections::VecDeque;

use super::rates::{Copy, RATE};
use super::*;
use crate::{Tent, TentConfig};

/// 400, 200, 100 and 100 Mbit/s: together 400 in parts of a link's rate, percent.
const LINKS: [u64; 4] = [2 * RATE, RATE, RATE / 2, RATE / 2];

fn tent() -> AnyPolicy {
    AnyPolicy::Tent(Tent::new(TentConfig::default(), Vec::new(), Vec::new()))
}

fn classic() -> AnyPolicy {
    AnyPolicy::Classic(Classic::new(Order::RoundRobin, Vec::new(), Vec::new()))
}

/// The link that changes, how long its rate is a tenth, and what the others and the tenth carry together.
const SLOW: [(usize, u64); 4] = [(0, 220), (1, 310), (2, 355), (3, 355)];

#[test]
fn unequal_rails_carry_what_they_can() {
    let [tent, classic] = [tent(), classic()].map(|policy| {
        let mut copy = Copy::with(policy, &LINKS);
        copy.pass(at(3000));
        assert_eq!(copy.breaks, []);
        copy.least(200, 3000)
    });
    println!("of 400: tent {tent}, classic {classic}");
    assert!(tent >= 392 && classic >= 392, "{tent} {classic}");
}

#[test]
fn a_rail_that_becomes_slow_holds_up_nobody_for_long() {
    for (slow, left) in SLOW {
        let least = [tent(), classic()].map(|policy| {
            let mut copy = Copy::with(policy, &LINKS);
            copy.pass(at(1000));
            copy.links[slow].rate /= 10;
            copy.pass(at(3000));
            assert_eq!(copy.breaks, [], "it is slow, and not broken");
            let least = copy.least(1200, 3000);
            copy.links[slow].rate *= 10;
            copy.pass(at(6000));
            assert!(copy.least(4500, 6000) >= 388, "{:?}", copy.came);
            least
        });
        println!("link {slow} at a tenth, of {left}: tent {}, classic {}", least[0], least[1]);
        assert!(least[0] * 100 >= left * 95, "{least:?} of {left}");
        assert!(
            least[1] < least[0],
            "the classic policy sends there what the peak rate was: {least:?}"
        );
    }
}

#[test]
fn a_rail_that_is_cut_is_made_up_for_and_taken_again() {
    for (cut, rate) in LINKS.into_iter().enumerate() {
        let mut copy = Copy::with(tent(), &LINKS);
        copy.pass(at(1000));
        copy.links[cut].cut = true;
        copy.pass(at(9000));
        let left = 400 - 100 * rate / RATE;
        assert!(copy.least(1200, 9000) * 100 >= left * 97, "{:?}", copy.came);
        copy.links[cut].cut = false;
        // A pause has become as long as 8 s by then.
        copy.pass(at(20_000));
        assert!(copy.least(19_000, 20_000) >= 388, "{:?}", copy.came);
        assert!(copy.breaks.iter().all(|rail| usize::from(rail.0) == cut), "{:?}", copy.breaks);
    }
}

/// Not where all stood still for a moment in the seconds before: then it is given as long as on a busy machine.
#[test]
fn a_cut_after_slices_that_completed_regularly_is_found_within_80_ms() {
    for (held_up, soon) in [(0, true), (40, false)] {
        let mut copy = Copy::with(tent(), &LINKS);
        copy.pass(at(4000));
        copy.held_up_until = at(4000 + held_up);
        copy.pass(at(5000));
        copy.links[0].cut = true;
        copy.pass(at(5080));
        assert_eq!(copy.breaks == [RailId(0)], soon, "held up for {held_up} ms");
        copy.pass(at(5300));
        assert_eq!(copy.breaks[0], RailId(0));
    }
}

#[test]
fn what_is_told_late_is_no_slow_rail_for_long() {
    for millis in [20, 90, 1000] {
        let mut copy = Copy::with(tent(), &LINKS);
        copy.pass(at(1000));
        copy.held_up_until = at(1000 + millis);
        copy.pass(at(4000));
        assert!(copy.least(1200 + millis.next_multiple_of(100), 4000) >= 388, "{:?}", copy.came);
        assert_eq!(copy.breaks, []);
    }
}

/// Two rails complete a slice of 1 KiB each millisecond; then one of them each 60 ms, while it has many.
#[test]
fn what_trickles_is_given_up_when_its_oldest_byte_is_too_old() {
    let config = Config { slice_length: 1024, ..Config::default() };
    for (policy, breaks) in [(tent(), true), (classic(), false)] {
        let mut flow = Flow::new(config, policy, INCARNATION, 0);
        for nic in 0..2 {
            flow.add_rail(spec(nic, Access::Connection)).unwrap();
        }
        flow.submit(&write(1, 100 << 20)).unwrap();
        let mut posted: [VecDeque<Post>; 2] = Default::default();
        let mut given_up = None;
        for tick in 0..3000 {
            while let Some(output) = flow.poll_output(at(tick)) {
                match output {
                    Output::Post(post) => posted[usize::from(post.rail.0)].push_back(post),
                    Output::Connect { rail, epoch } => flow.rail_up(at(tick), rail, epoch),
                    Output::Abort { rail, .. } => given_up = given_up.or(Some((rail.0, tick))),
                    Output::Test { .. } | Output::Fence { .. } | Output::Ended(_) => {}
                }
            }
            for (rail, posted) in posted.iter_mut().enumerate() {
                let completes = rail == 0 || tick < 10 || tick % 60 == 0;
                if let Some(post) = posted.pop_front_if(|_| completes) {
                    flow.completed(at(tick), post.slice, SliceResult::Done);
                }
            }
            flow.handle_timeout(at(tick));
        }
        match given_up {
            Some((rail, tick)) => assert!(breaks && rail == 1 && tick > 400, "{tick}"),
            None => assert!(!breaks),
        }
    }
}
