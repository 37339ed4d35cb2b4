//! Memcached.

use std::time::Duration;

use millstream_metadata::{KeyValue, KeyValueConfig, Memcached};

use crate::daemon::{Daemon, port};
use crate::{contract, patient, short_lived};

/// A server with these arguments more, and its port.
pub(crate) fn start(arguments: &[&str]) -> Option<(Daemon, u16)> {
    let port = port();
    let own = ["-p", &port.to_string(), "-l", "127.0.0.1", "-u", "root"].map(str::to_owned);
    let arguments = own.into_iter().chain(arguments.iter().map(|&word| word.to_owned())).collect();
    Some((Daemon::start("memcached", arguments)?, port))
}

fn client(port: u16, config: KeyValueConfig) -> Memcached {
    Memcached::new(&format!("memcached://127.0.0.1:{port}"), config).unwrap()
}

#[test]
fn memcached_does_all_that_a_store_asks() {
    let Some((mut daemon, port)) = start(&[]) else { return };
    let client = client(port, patient());
    daemon.ready(&client);
    contract::operations(&client);
    contract::odd_keys(&client);
    contract::long_values(&client);
    contract::threads(&client);
    // The longest key.
    let key = "k".repeat(250);
    client.put(&key, b"v").unwrap();
    assert_eq!(client.get(&key).unwrap().unwrap(), b"v");
    let error = client.put(&"k".repeat(251), b"v").unwrap_err().to_string();
    assert!(error.contains("memcached has keys of 1 to 250"), "{error}");
}

#[test]
fn memcached_entries_end_unless_they_are_refreshed() {
    let Some((mut daemon, port)) = start(&[]) else { return };
    let client = client(port, short_lived());
    daemon.ready(&client);
    contract::times_to_live(&client, short_lived().time_to_live);
}

#[test]
fn memcached_is_killed_and_restarted_in_mid_run() {
    let Some((mut daemon, port)) = start(&[]) else { return };
    let client = client(port, patient());
    daemon.ready(&client);
    contract::killed_in_mid_run(&client, &mut daemon);
    // It has memory only.
    client.put("k", b"v").unwrap();
    daemon.kill();
    daemon.run();
    daemon.ready(&client);
    assert!(!client.refresh("k").unwrap());
}

#[test]
fn memcached_that_has_stopped_is_an_error_in_time() {
    let Some((mut daemon, port)) = start(&[]) else { return };
    let patient = client(port, patient());
    daemon.ready(&patient);
    let short = KeyValueConfig { call_timeout: Duration::from_millis(500), ..crate::patient() };
    contract::stopped(&client(port, short), &patient, &mut daemon);
}

#[test]
fn memcached_with_shorter_items_says_what_to_do() {
    let Some((mut daemon, port)) = start(&["-I", "512k"]) else { return };
    let client = client(port, patient());
    daemon.ready(&client);
    let error = client.put("k", &vec![b'x'; 700_000]).unwrap_err().to_string();
    assert!(error.contains("start it with -I 1m"), "{error}");
    client.put("k", b"short").unwrap();
    assert_eq!(client.get("k").unwrap().unwrap(), b"short");
}
