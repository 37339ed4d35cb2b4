//! A target that is killed, and started again under its name.

mod common;

use common::compile;
use common::server::server;

#[test]
fn a_peer_that_was_restarted_is_written_to_once_its_segment_is_looked_up_again() {
    let (uri, _entries) = server();
    compile("restarted").run(&[&uri]);
}
