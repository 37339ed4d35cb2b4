//! What an engine is made with has its effect.

mod common;

use common::{address, shared};
use millstream_transfer::{Config, RdmaConfig, TransferEngine};

#[test]
fn a_name_without_a_port_is_that_of_an_engine_at_the_default_port() {
    let (own, other) = (address(), address());
    let target = TransferEngine::new(Config::new(own)).unwrap();
    target.install_rdma(RdmaConfig::new(&[own])).unwrap();
    let _buffer = shared(&target, 100);
    let default_port = target.name().parse::<std::net::SocketAddr>().unwrap().port();
    let initiator =
        TransferEngine::new(Config { default_port: Some(default_port), ..Config::new(other) })
            .unwrap();
    let segment = initiator.open_segment(&own.to_string()).unwrap();
    assert_eq!(segment.buffers().len(), 1);
    // One segment, by both names.
    assert_eq!(initiator.open_segment(target.name()).unwrap().id(), segment.id());
}
