//! What an engine has published, when its server dies and comes back without it.

use std::time::Duration;

use millstream_lab::Stopwatch;
use millstream_metadata::{KeyValueStoreConfig, RpcMeta, SegmentDesc, StoreError, open_store};

use crate::daemon::Daemon;
use crate::{etcd, memcached, redis, until};

/// How soon all entries of engines that live are back.
const BACK: Duration = Duration::from_secs(20);

fn meta() -> RpcMeta {
    RpcMeta { address: "127.0.0.1:1".parse().unwrap(), incarnation: None }
}

/// Publishes with the times that users have, kills the server, and has it start with nothing.
fn come_back(mut daemon: Daemon, uri: &str) {
    let open = || open_store(uri, KeyValueStoreConfig::default()).unwrap();
    let (engine, peer) = (open(), open());
    let descriptor = SegmentDesc {
        name: "node-a".to_owned(),
        protocol: "rdma".to_owned(),
        ..SegmentDesc::default()
    };
    until("the server answers", || engine.publish_address("node-a", &meta()).ok());
    engine.publish_segment(&descriptor).unwrap();
    assert_eq!(peer.segment("node-a").unwrap(), descriptor);
    assert_eq!(peer.address("node-a").unwrap().address, meta().address);
    daemon.kill();
    let error = peer.segment("node-a").unwrap_err();
    assert!(error.is_transient() && error.to_string().contains(uri), "{error}");
    daemon.empty();
    daemon.run();
    let gone = until("it is back", || match peer.segment("node-a") {
        Err(error) if error.is_transient() => None,
        result => Some(result),
    });
    assert!(matches!(gone, Err(StoreError::NotFound { .. }) | Ok(_)), "{gone:?}");
    let back = Stopwatch::start();
    until("the segment is back", || peer.segment("node-a").ok());
    until("the address is back", || open().address("node-a").ok());
    let took = back.took();
    assert!(took.own() < BACK, "{took}");
    // And no longer when it is withdrawn.
    engine.withdraw_segment("node-a").unwrap();
    engine.withdraw_address("node-a").unwrap();
    assert!(matches!(peer.segment("node-a"), Err(StoreError::NotFound { .. })));
}

#[test]
fn entries_come_back_to_an_etcd_that_lost_all() {
    let Some((daemon, port)) = etcd::start() else { return };
    come_back(daemon, &format!("etcd://127.0.0.1:{port}"));
}

#[test]
fn entries_come_back_to_a_redis_that_lost_all() {
    let Some((daemon, port)) = redis::start(&[]) else { return };
    come_back(daemon, &format!("redis://127.0.0.1:{port}"));
}

#[test]
fn entries_come_back_to_a_memcached_that_lost_all() {
    let Some((daemon, port)) = memcached::start(&[]) else { return };
    come_back(daemon, &format!("memcached://127.0.0.1:{port}"));
}
