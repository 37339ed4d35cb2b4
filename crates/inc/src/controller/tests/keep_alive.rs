//! Who is asked whether it lives, and what becomes of those that say nothing.

use super::*;

#[test]
fn a_host_that_stands_still_is_dead_after_three_misses() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, communicator) = world.ready(20, "g", 2);
    // Here only the silent host's questions are left unanswered.
    for second in 1..=4 {
        world.now = world.now + Duration::from_secs(1);
        world.controller.handle_timeout(world.now);
        let mut outputs = Vec::new();
        while let Some(output) = world.controller.poll_output() {
            if let Output::Send { connection, message: FromController::Ping, .. } = output {
                assert!(second < 4 || connection != hosts[1]);
                if connection != hosts[1] {
                    world.controller.handle_message(world.now, connection, ToController::Pong);
                }
            } else {
                outputs.push(output);
            }
        }
        assert_eq!(outputs.is_empty(), second < 4, "after {second} s: {outputs:?}");
        if second == 4 {
            let message = FromController::AbortCommunicator { communicator, rank: 1 };
            assert!(outputs.contains(&Output::Send { connection: SWITCH, term: 1, message }));
            assert!(outputs.contains(&Output::Close { connection: hosts[0] }));
            assert!(outputs.contains(&Output::Close { connection: hosts[1] }));
        }
    }
}

#[test]
fn everyone_is_asked_whether_it_lives_in_its_own_time() {
    let mut world = World::new();
    world.join(1, "g", 3, 0);
    world.pass(seconds(0.5));
    world.join(2, "g", 3, 1);
    let mut asked = Vec::new();
    while let Some(deadline) =
        world.controller.poll_timeout().filter(|&at| at <= world.now + seconds(2.0))
    {
        world.controller.handle_timeout(deadline);
        while let Some(output) = world.controller.poll_output() {
            if let Output::Send { connection, message: FromController::Ping, .. } = output {
                asked.push((connection.0, deadline));
                world.controller.handle_message(deadline, connection, ToController::Pong);
            }
        }
    }
    let at = |time| Instant::ZERO + seconds(time);
    assert_eq!(asked, [(1, at(1.0)), (2, at(1.5)), (1, at(2.0)), (2, at(2.5))]);
}

#[test]
fn a_controller_that_stood_still_itself_blames_nobody() {
    let mut world = World::new();
    world.switch(SWITCH, "s", 1);
    let (hosts, _) = world.ready(20, "g", 2);
    world.now = world.now + Duration::from_secs(3600);
    world.controller.handle_timeout(world.now);
    world.settle();
    assert_eq!(world.heard(hosts[0]), []);
    assert_eq!(world.controller.census().connections, 3);
}

#[test]
fn those_that_say_nothing_keep_nobody_out() {
    let config = ControllerConfig { max_strangers: 2, ..ControllerConfig::new(0) };
    let mut world = World::with(config);
    world.join(1, "a", 2, 0);
    (2..=4).for_each(|number| world.connect(ConnectionId(number)));
    let refusal = world.refusal(ConnectionId(2)).to_string();
    let expected = "the controller has its 2 connections of peers that have not said what they are \
                    already";
    assert_eq!(refusal, expected);
    // The others are still there, and who has said what it is was never in question.
    assert_eq!(world.controller.census().connections, 3);
    world.join(5, "a", 2, 1);
    assert_eq!(world.heard(ConnectionId(1)), []);
}

#[test]
fn who_says_nothing_is_sent_away() {
    // In time, however seldom others are asked whether they live.
    for keep_alive in [1.0, 7.0] {
        let keep_alive_interval = seconds(keep_alive);
        let mut world =
            World::with(ControllerConfig { keep_alive_interval, ..ControllerConfig::new(0) });
        world.connect(ConnectionId(1));
        world.pass(seconds(9.9));
        assert_eq!(world.heard(ConnectionId(1)), []);
        world.pass(seconds(0.1));
        assert_eq!(world.refusal(ConnectionId(1)).to_string(), "it did not say what it is");
        assert_eq!(world.controller.poll_timeout(), None);
        assert_eq!(world.controller.census(), Census::default());
    }
}
