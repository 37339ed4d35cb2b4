//! What COMPLETED and FAILED mean over TCP: the cases of the original's tests that a program can observe.

mod common;

use common::compile_with;

fn run(case: &str) {
    compile_with(&format!("visibility-{case}"), "tests/programs/visibility.c", &[]).run(&[case]);
}

#[test]
fn a_write_that_is_completed_is_seen_by_who_looks_afterwards() {
    run("completed");
}

#[test]
fn what_the_peer_refuses_fails_and_moves_nothing() {
    run("rejected");
}

#[test]
fn the_source_of_a_write_that_has_failed_may_go() {
    run("rejected_source");
}

#[test]
fn an_initiator_of_the_first_framing_is_served() {
    run("version_one");
}

#[test]
fn more_than_connections_hold_waits_and_does_not_fail() {
    run("waiting");
}

#[test]
fn the_source_of_an_engine_that_was_destroyed_amid_transfers_may_go() {
    run("shutdown_amid");
}
