//! Redis.

use std::time::Duration;

use millstream_metadata::{KeyValue, KeyValueConfig, Redis, RedisLogin, Secret, TlsFiles};

use crate::daemon::{Daemon, port};
use crate::{contract, patient, short_lived};

/// A server with these settings more, and its port.
pub(crate) fn start(settings: &[&str]) -> Option<(Daemon, u16)> {
    let port = port();
    let mut arguments = vec!["--port".to_owned(), port.to_string()];
    arguments.extend(["--bind", "127.0.0.1", "--save", ""].map(str::to_owned));
    arguments.extend(settings.iter().map(|&setting| setting.to_owned()));
    Some((Daemon::start("redis-server", arguments)?, port))
}

fn client(uri: &str, config: KeyValueConfig) -> Redis {
    Redis::new(uri, config).unwrap()
}

#[test]
fn redis_does_all_that_a_store_asks() {
    let Some((mut daemon, port)) = start(&[]) else { return };
    let client = client(&format!("redis://127.0.0.1:{port}"), patient());
    daemon.ready(&client);
    contract::operations(&client);
    contract::odd_keys(&client);
    contract::long_values(&client);
    contract::threads(&client);
}

#[test]
fn redis_entries_end_unless_they_are_refreshed() {
    let Some((mut daemon, port)) = start(&[]) else { return };
    let client = client(&format!("redis://localhost:{port}"), short_lived());
    daemon.ready(&client);
    contract::times_to_live(&client, short_lived().time_to_live);
}

#[test]
fn redis_is_killed_and_restarted_in_mid_run() {
    let Some((mut daemon, port)) = start(&[]) else { return };
    let client = client(&format!("redis://127.0.0.1:{port}"), patient());
    daemon.ready(&client);
    contract::killed_in_mid_run(&client, &mut daemon);
    // It kept nothing, as it was told, and says so.
    client.put("k", b"v").unwrap();
    daemon.kill();
    daemon.run();
    daemon.ready(&client);
    assert!(!client.refresh("k").unwrap());
    client.put("k", b"v").unwrap();
    assert!(client.refresh("k").unwrap());
}

#[test]
fn redis_that_has_stopped_is_an_error_in_time() {
    let Some((mut daemon, port)) = start(&[]) else { return };
    let uri = format!("redis://127.0.0.1:{port}");
    let patient = client(&uri, patient());
    daemon.ready(&patient);
    let short = KeyValueConfig { call_timeout: Duration::from_millis(500), ..crate::patient() };
    contract::stopped(&client(&uri, short), &patient, &mut daemon);
}

#[test]
fn redis_asks_for_a_password() {
    let Some((mut daemon, port)) = start(&["--requirepass", "p@ss/w%rd"]) else { return };
    let right = client(&format!("redis://:p%40ss%2Fw%25rd@127.0.0.1:{port}"), patient());
    daemon.ready(&right);
    contract::operations(&right);
    assert_eq!(right.uri(), format!("redis://127.0.0.1:{port}"));
    let refused = |login: &str, reason: &str| {
        let error =
            client(&format!("redis://{login}127.0.0.1:{port}"), patient()).get("k").unwrap_err();
        let text = error.to_string();
        assert!(text.contains(reason) && text.contains(&port.to_string()), "{text}");
        assert!(!text.contains("secret") && !error.is_transient(), "{text}");
    };
    refused(":secret@", "the password is wrong");
    refused("nobody:secret@", "the password is wrong, or the user");
    refused("", "it asks for a password");
    // After a restart the same client logs in again.
    daemon.kill();
    daemon.run();
    daemon.ready(&right);
    contract::operations(&right);
}

#[test]
fn redis_login_from_beside_the_uri() {
    let rules = ["--requirepass", "first", "--user", "me", "on", ">second", "~*", "+@all"];
    let Some((mut daemon, port)) = start(&rules) else { return };
    let uri = format!("redis://127.0.0.1:{port}");
    let of = |uri: &str, user: Option<&str>, password: &str, database| {
        let login = RedisLogin {
            user: user.map(str::to_owned),
            password: Some(Secret::new(password.to_owned())),
            database,
        };
        Redis::with(uri, patient(), &login, &TlsFiles::default()).unwrap()
    };
    let anybody = of(&uri, None, "first", None);
    daemon.ready(&anybody);
    let me = of(&uri, Some("me"), "second", Some(3));
    contract::operations(&me);
    me.put("k", b"3").unwrap();
    assert_eq!(anybody.get("k").unwrap(), None, "the database is another one");
    // What the URI says comes before it.
    let written = of(&format!("redis://:first@127.0.0.1:{port}/3"), Some("me"), "x", Some(5));
    assert_eq!(written.get("k").unwrap().unwrap(), b"3");
    let error = of(&uri, Some("me"), "first", None).get("k").unwrap_err().to_string();
    assert!(error.contains("the password is wrong, or the user"), "{error}");
}

#[test]
fn redis_without_password_says_that_one_is_too_many() {
    let Some((mut daemon, port)) = start(&[]) else { return };
    daemon.ready(&client(&format!("redis://127.0.0.1:{port}"), patient()));
    let error =
        client(&format!("redis://:secret@127.0.0.1:{port}"), patient()).get("k").unwrap_err();
    let text = error.to_string();
    assert!(text.contains("it has no password") && !text.contains("secret"), "{text}");
}

#[test]
fn redis_users_may_do_what_its_rules_say() {
    let rules = ["--user", "me", "on", ">secret", "~mooncake/*", "+@all"];
    let Some((mut daemon, port)) = start(&rules) else { return };
    daemon.ready(&client(&format!("redis://127.0.0.1:{port}"), patient()));
    let me = client(&format!("redis://me:secret@127.0.0.1:{port}"), patient());
    contract::operations(&me);
    let error = me.get("other").unwrap_err().to_string();
    assert!(error.contains("its user may not do that"), "{error}");
}

#[test]
fn redis_databases_are_apart() {
    let Some((mut daemon, port)) = start(&[]) else { return };
    let database = |number: u32| client(&format!("redis://127.0.0.1:{port}/{number}"), patient());
    let (zero, three) = (database(0), database(3));
    daemon.ready(&zero);
    zero.put("k", b"0").unwrap();
    assert_eq!(three.get("k").unwrap(), None);
    three.put("k", b"3").unwrap();
    assert_eq!(zero.get("k").unwrap().unwrap(), b"0");
    let error = database(99).get("k").unwrap_err().to_string();
    assert!(error.contains("database 99: ERR DB index is out of range"), "{error}");
}

#[test]
fn redis_that_takes_no_writes_says_why() {
    let Some((mut daemon, port)) = start(&["--maxmemory", "3mb"]) else { return };
    let full = client(&format!("redis://127.0.0.1:{port}"), patient());
    daemon.ready(&full);
    let value = vec![b'x'; full.limit()];
    let error = (0..4).find_map(|index| full.put(&index.to_string(), &value).err()).unwrap();
    assert!(error.to_string().contains("maxmemory"), "{error}");
    let master = port.to_string();
    let Some((mut daemon, port)) = start(&["--replicaof", "127.0.0.1", &master]) else { return };
    let replica = client(&format!("redis://127.0.0.1:{port}"), patient());
    daemon.ready(&replica);
    let error = replica.put("k", b"v").unwrap_err().to_string();
    assert!(error.contains("it is a replica: name its master"), "{error}");
}

#[test]
fn redis_that_has_clients_enough_may_have_room_later() {
    let Some((mut daemon, port)) = start(&["--maxclients", "1"]) else { return };
    let uri = format!("redis://127.0.0.1:{port}");
    let one = client(&uri, patient());
    daemon.ready(&one);
    let error = client(&uri, patient()).put("k", b"v").unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert!(error.to_string().contains("it is full"), "{error}");
    // It keeps one connection, and closes it in the end.
    drop(one);
    crate::until("there is room", || client(&uri, patient()).put("k", b"v").ok());
}
