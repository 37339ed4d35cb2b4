//! Etcd.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use millstream_metadata::{
    Etcd, EtcdOperation, EtcdTransactions, KeyValue, KeyValueConfig, LeaderKey, TlsFiles,
};

use crate::daemon::{Daemon, port};
use crate::fake::silent;
use crate::{contract, patient, short_lived};

/// The arguments of one member. Nobody else listens on its ports.
fn member(name: &str, ports: (u16, u16), cluster: &str) -> Vec<String> {
    speaking("http", name, ports, cluster)
}

/// The same, with clients over this.
fn speaking(scheme: &str, name: &str, ports: (u16, u16), cluster: &str) -> Vec<String> {
    let url = |port: u16| format!("http://127.0.0.1:{port}");
    let clients = format!("{scheme}://127.0.0.1:{}", ports.0);
    let words = [
        ("--name", name.to_owned()),
        ("--data-dir", "data".to_owned()),
        ("--listen-client-urls", clients.clone()),
        ("--advertise-client-urls", clients),
        ("--listen-peer-urls", url(ports.1)),
        ("--initial-advertise-peer-urls", url(ports.1)),
        ("--initial-cluster", cluster.to_owned()),
    ];
    words.into_iter().flat_map(|(word, value)| [word.to_owned(), value]).collect()
}

/// One server, and its port.
pub(crate) fn start() -> Option<(Daemon, u16)> {
    start_with(&[])
}

/// One server with these arguments more, and its port.
fn start_with(more: &[&str]) -> Option<(Daemon, u16)> {
    let ports = (port(), port());
    let mut arguments = member("one", ports, &format!("one=http://127.0.0.1:{}", ports.1));
    arguments.extend(more.iter().map(|&word| word.to_owned()));
    Some((Daemon::start("etcd", arguments)?, ports.0))
}

/// One server that speaks TLS with these arguments, and its port.
#[cfg(feature = "tls")]
pub(crate) fn start_tls(more: &[&str]) -> Option<(Daemon, u16)> {
    let ports = (port(), port());
    let cluster = format!("one=http://127.0.0.1:{}", ports.1);
    let mut arguments = speaking("https", "one", ports, &cluster);
    arguments.extend(more.iter().map(|&word| word.to_owned()));
    Some((Daemon::start("etcd", arguments)?, ports.0))
}

/// Asks for something that clients have no use for.
fn post(port: u16, path: &str, body: &str) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let length = body.len();
    let head = format!("POST /v3/{path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}");
    write!(stream, "{head}\r\nConnection: close\r\n\r\n{body}").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
}

fn client(ports: &[u16], config: KeyValueConfig) -> Etcd {
    let hosts: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    Etcd::new(&format!("etcd://{}", hosts.join(",")), config).unwrap()
}

#[test]
fn etcd_does_all_that_a_store_asks() {
    let Some((mut daemon, port)) = start() else { return };
    let client = client(&[port], patient());
    daemon.ready(&client);
    contract::operations(&client);
    contract::odd_keys(&client);
    contract::long_values(&client);
    contract::threads(&client);
}

#[test]
fn etcd_entries_end_unless_they_are_refreshed() {
    let Some((mut daemon, port)) = start() else { return };
    let client = client(&[port], short_lived());
    daemon.ready(&client);
    contract::times_to_live(&client, short_lived().time_to_live);
}

#[test]
fn etcd_entries_of_a_client_end_together_and_apart_from_those_of_others() {
    let Some((mut daemon, port)) = start() else { return };
    let (one, other) = (client(&[port], short_lived()), client(&[port], short_lived()));
    daemon.ready(&one);
    one.put("a", b"1").unwrap();
    one.put("b", b"1").unwrap();
    other.put("c", b"2").unwrap();
    // A refresh of one entry is one of all that the client has put. Nobody refreshes those of the other one.
    crate::until("the entry of a client that is gone ends", || {
        assert!(one.refresh("a").unwrap());
        other.get("c").unwrap().is_none().then_some(())
    });
    assert_eq!(one.get("b").unwrap().unwrap(), b"1");
    // Another one's entry is none of this client's: with its lease it ends.
    other.put("a", b"2").unwrap();
    assert!(!one.refresh("a").unwrap());
}

#[test]
fn etcd_is_killed_and_restarted_in_mid_run() {
    let Some((mut daemon, port)) = start() else { return };
    let client = client(&[port], patient());
    daemon.ready(&client);
    contract::killed_in_mid_run(&client, &mut daemon);
    // It keeps entries and leases.
    client.put("k", b"v").unwrap();
    daemon.kill();
    daemon.run();
    daemon.ready(&client);
    assert!(client.refresh("k").unwrap());
    assert_eq!(client.get("k").unwrap().unwrap(), b"v");
    // With its files it loses both, and a put takes a new lease.
    daemon.kill();
    daemon.empty();
    daemon.run();
    daemon.ready(&client);
    client.put("other", b"v").unwrap();
    assert!(!client.refresh("k").unwrap());
    client.put("k", b"v").unwrap();
    assert!(client.refresh("k").unwrap() && client.refresh("other").unwrap());
}

#[test]
fn etcd_that_has_stopped_is_an_error_in_time() {
    let Some((mut daemon, port)) = start() else { return };
    let patient = client(&[port], patient());
    daemon.ready(&patient);
    let short = KeyValueConfig { call_timeout: Duration::from_millis(500), ..crate::patient() };
    let short = client(&[port], short);
    // The first put takes a lease, and two fsyncs.
    crate::until("a put in half a second", || short.put("first", b"").ok());
    contract::stopped(&short, &patient, &mut daemon);
}

#[test]
fn etcd_endpoints_that_do_not_answer_are_passed_over() {
    let Some((mut daemon, live)) = start() else { return };
    let silent = silent();
    daemon.ready(&client(&[live], patient()));
    let config = KeyValueConfig { call_timeout: Duration::from_secs(3), ..patient() };
    let client = client(&[port(), silent.port(), live], config);
    contract::operations(&client);
    // The one that answers is asked first from then on: the silent one would take a second of each call.
    assert_eq!(silent.connections(), 1);
    daemon.kill();
    let error = client.get("k").unwrap_err();
    assert!(error.is_transient(), "{error}");
    let text = error.to_string();
    assert!(text.contains("no process listens there") && text.contains("no whole reply"), "{text}");
}

#[test]
fn etcd_that_refuses_says_why() {
    let Some((mut daemon, port)) = start_with(&["--max-request-bytes", "10000"]) else { return };
    let client = client(&[port], patient());
    daemon.ready(&client);
    let error = client.put("k", &[b'x'; 20_000]).unwrap_err();
    assert!(!error.is_transient(), "{error}");
    assert!(error.to_string().contains("larger --max-request-bytes"), "{error}");
    client.put("k", b"short").unwrap();
    post(port, "auth/user/add", r#"{"name":"root","password":"secret"}"#);
    post(port, "auth/user/grant", r#"{"user":"root","role":"root"}"#);
    post(port, "auth/enable", "{}");
    let error = client.get("k").unwrap_err();
    assert!(!error.is_transient(), "{error}");
    assert!(error.to_string().contains("etcd://USER:PASSWORD@HOST"), "{error}");
}

/// Makes it ask for passwords: `root` may do all, and `engine` what engines need. Both have this password.
fn enable_passwords(port: u16) {
    for user in ["root", "engine"] {
        post(port, "auth/user/add", &format!(r#"{{"name":"{user}","password":"p@s;s,:/"}}"#));
    }
    post(port, "auth/role/add", r#"{"name":"engines"}"#);
    // From `mooncake/` to before `mooncake0`, in base64.
    let keys = r#"{"permType":"READWRITE","key":"bW9vbmNha2Uv","range_end":"bW9vbmNha2Uw"}"#;
    post(port, "auth/role/grant", &format!(r#"{{"name":"engines","perm":{keys}}}"#));
    post(port, "auth/user/grant", r#"{"user":"root","role":"root"}"#);
    post(port, "auth/user/grant", r#"{"user":"engine","role":"engines"}"#);
    post(port, "auth/enable", "{}");
}

fn of_user(user: &str, password: &str, port: u16) -> Etcd {
    Etcd::new(&format!("etcd://{user}:{password}@127.0.0.1:{port}"), patient()).unwrap()
}

#[test]
fn etcd_with_passwords_knows_users_by_them() {
    let Some((mut daemon, port)) = start() else { return };
    daemon.ready(&client(&[port], patient()));
    enable_passwords(port);
    let (root, engine) = (of_user("root", "p@s;s,:/", port), of_user("engine", "p%40s;s,:/", port));
    contract::operations(&engine);
    contract::threads(&engine);
    contract::odd_keys(&root);
    for (client, reason) in [
        (&of_user("engine", "secret", port), "the password is wrong, or the user"),
        (&of_user("nobody", "secret", port), "the password is wrong, or the user"),
        (&client(&[port], patient()), "it asks for a user and a password"),
        (&engine, "its user may not do that: grant its role the keys that begin with mooncake/"),
    ] {
        let error = client.put("k", b"v").unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
        assert!(!error.is_transient() && !error.to_string().contains("secret"), "{error}");
    }
    // Started anew it knows no token of before. Entries and their lease are kept.
    engine.put("mooncake/ram/a", b"v").unwrap();
    daemon.kill();
    daemon.run();
    daemon.ready(&root);
    assert!(engine.refresh("mooncake/ram/a").unwrap());
    assert_eq!(engine.get("mooncake/ram/a").unwrap().unwrap(), b"v");
}

#[test]
fn etcd_without_passwords_is_told() {
    let Some((mut daemon, port)) = start() else { return };
    daemon.ready(&client(&[port], patient()));
    let error = of_user("engine", "secret", port).get("k").unwrap_err();
    assert!(error.to_string().contains("leave the user and the password out"), "{error}");
    assert!(!error.is_transient() && !error.to_string().contains("secret"), "{error}");
}

#[test]
fn etcd_goes_on_without_a_member_of_its_cluster() {
    let ports: Vec<(u16, u16)> = (0..3).map(|_| (port(), port())).collect();
    let names = ["one", "two", "three"];
    let urls =
        names.iter().zip(&ports).map(|(name, (_, peer))| format!("{name}=http://127.0.0.1:{peer}"));
    let cluster = urls.collect::<Vec<_>>().join(",");
    let mut members = Vec::new();
    for (name, ports) in names.iter().zip(&ports) {
        let Some(daemon) = Daemon::start("etcd", member(name, *ports, &cluster)) else { return };
        members.push(daemon);
    }
    let client = client(&ports.iter().map(|ports| ports.0).collect::<Vec<_>>(), patient());
    for member in &mut members {
        member.ready(&client);
    }
    for index in 0..3 {
        client.put("k", &[index]).unwrap();
        // One of the three is the leader.
        let member = &mut members[usize::from(index)];
        member.kill();
        let put = || match client.put("l", &[index]) {
            Ok(()) => Some(()),
            Err(error) => {
                assert!(error.is_transient(), "{error}");
                None
            }
        };
        crate::until("another member leads", put);
        assert_eq!(client.get("k").unwrap().unwrap(), [index]);
        assert!(client.refresh("k").unwrap());
        member.run();
    }
}

#[test]
fn etcd_transactions_are_of_who_has_the_key() {
    let Some((mut daemon, port)) = start() else { return };
    daemon.ready(&client(&[port], patient()));
    let uri = format!("etcd://127.0.0.1:{port}/inc/one");
    let client = EtcdTransactions::new(&uri, patient(), &TlsFiles::default()).unwrap();
    let other = format!("etcd://127.0.0.1:{port}/inc/other");
    let other = EtcdTransactions::new(&other, patient(), &TlsFiles::default()).unwrap();
    let put = |key: &str, value: &[u8], lease| EtcdOperation::Put {
        key: key.to_owned(),
        value: value.to_vec(),
        lease,
    };
    let get = |key: &str| EtcdOperation::Get(key.to_owned());
    let made =
        |create_revision| LeaderKey { key: "leader", create_revision, below: None, absent: None };
    let (lease, time) = client.grant(60).unwrap();
    assert_eq!(time, Duration::from_secs(60));
    let campaign = || {
        let then = vec![put("leader", b"a:1", lease), get("term")];
        client.transact(&made(0), then, vec![get("leader"), get("term")]).unwrap()
    };
    let won = campaign();
    assert_eq!((won.succeeded, won.entries.len()), (true, 0));
    // Repeated, it says the same.
    let again = campaign();
    assert!(!again.succeeded);
    assert_eq!((again.entries[0].lease, again.entries[0].create_revision), (lease, won.revision));
    assert_eq!((again.entries[0].key.as_str(), &*again.entries[0].value), ("leader", &b"a:1"[..]));
    // What another one writes is not written, nor a term that is not above.
    let write = |revision, term: &[u8]| {
        let below = Some(("term", term));
        let condition = LeaderKey { below, ..made(revision) };
        client.transact(&condition, vec![put("term", term, 0)], vec![get("leader"), get("term")])
    };
    // Nothing is below what is not there.
    assert!(!write(won.revision, b"5").unwrap().succeeded);
    for expected in [true, false] {
        let absent = LeaderKey { absent: Some("term"), ..made(won.revision) };
        let first = client.transact(&absent, vec![put("term", b"0", 0)], Vec::new()).unwrap();
        assert_eq!(first.succeeded, expected);
    }
    assert!(!write(won.revision + 1, b"5").unwrap().succeeded);
    assert!(write(won.revision, b"5").unwrap().succeeded);
    let lower = write(won.revision, b"4").unwrap();
    assert_eq!((lower.succeeded, &*lower.entries[1].value), (false, &b"5"[..]));
    for key in ["c/1", "c/2", "c/3", "d"] {
        client.put(key, key.as_bytes(), 0).unwrap();
    }
    other.put("c/9", b"", 0).unwrap();
    let keys = |after: Option<&str>, limit| -> Vec<String> {
        let found = client.list("c/", after, limit).unwrap();
        found.into_iter().map(|entry| entry.key).collect()
    };
    assert_eq!(keys(None, 2), ["c/1", "c/2"]);
    assert_eq!(keys(Some("c/2"), 2), ["c/3"]);
    let delete = vec![EtcdOperation::Delete("c/2".to_owned())];
    client.transact(&made(won.revision), delete, Vec::new()).unwrap();
    assert_eq!(keys(None, 9), ["c/1", "c/3"]);
    assert_eq!(client.keep_alive(lease).unwrap(), Some(time));
    // With the lease goes the key.
    client.revoke(lease).unwrap();
    client.revoke(lease).unwrap();
    assert_eq!(client.keep_alive(lease).unwrap(), None);
    assert!(!write(won.revision, b"6").unwrap().succeeded);
    daemon.kill();
    let error = client.grant(5).unwrap_err();
    assert!(error.is_transient() && error.to_string().contains(&uri), "{error}");
}
