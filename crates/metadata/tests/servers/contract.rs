//! What all servers do alike.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use millstream_metadata::{KeyValue, KeyValueErrorKind};

use crate::daemon::Daemon;
use crate::until;

const KEY: &str = "mooncake/ram/node-a:12345";

/// All operations.
pub(crate) fn operations(client: &dyn KeyValue) {
    assert_eq!(client.get(KEY).unwrap(), None);
    assert!(!client.refresh(KEY).unwrap());
    client.remove(KEY).unwrap();
    let all: Vec<u8> = (0..=255).collect();
    let values: [&[u8]; 6] = [b"{}", b"{\"a\":1}\n", b"", b"\r\nEND\r\n", b"$-1\r\n", &all];
    for value in values {
        client.put(KEY, value).unwrap();
        assert_eq!(client.get(KEY).unwrap().as_deref(), Some(value));
        assert!(client.refresh(KEY).unwrap());
    }
    client.remove(KEY).unwrap();
    assert_eq!(client.get(KEY).unwrap(), None);
    assert!(!client.refresh(KEY).unwrap());
    client.remove(KEY).unwrap();
}

/// Names have any characters, and none is another one's.
pub(crate) fn odd_keys(client: &dyn KeyValue) {
    let keys = ["a b", "a%20b", "a\r\nb", "a", "ä\u{a0}\u{2028}", "a/b", "\"a\"", "mooncake/ram/"];
    for (index, key) in keys.iter().enumerate() {
        client.put(key, &[u8::try_from(index).unwrap()]).unwrap();
    }
    for (index, key) in keys.iter().enumerate() {
        let value = client.get(key).unwrap().unwrap();
        assert_eq!(value, [u8::try_from(index).unwrap()], "{key:?}");
        client.remove(key).unwrap();
    }
    for key in keys {
        assert_eq!(client.get(key).unwrap(), None, "{key:?}");
    }
}

/// A value of the limit fits, and one byte more is refused before it is sent, and leaves the old one.
pub(crate) fn long_values(client: &dyn KeyValue) {
    let mut value: Vec<u8> = (0..client.limit()).map(|index| (index * 7 % 251) as u8).collect();
    client.put(KEY, &value).unwrap();
    assert!(client.get(KEY).unwrap().unwrap() == value);
    value.push(0);
    let error = client.put(KEY, &value).unwrap_err();
    let (length, limit) = (value.len(), client.limit());
    assert!(
        matches!(error.kind, KeyValueErrorKind::TooLong { length: l, limit: m } if (l, m) == (length, limit)),
        "{error}"
    );
    assert_eq!(client.get(KEY).unwrap().unwrap().len(), limit);
    client.remove(KEY).unwrap();
}

/// Many threads at once: each sees what it wrote.
pub(crate) fn threads(client: &dyn KeyValue) {
    thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || {
                let key = format!("mooncake/ram/{thread}");
                for round in 0..20 {
                    let value = format!("{thread} {round}").into_bytes();
                    client.put(&key, &value).unwrap();
                    assert_eq!(client.get(&key).unwrap(), Some(value));
                    assert!(client.refresh(&key).unwrap());
                }
                client.remove(&key).unwrap();
            });
        }
    });
}

/// An entry that is put and never refreshed ends, and one that is refreshed outlives its time several times
/// over, and ends after that.
pub(crate) fn times_to_live(client: &dyn KeyValue, time_to_live: Duration) {
    let ends = |what: &str| {
        until(what, || client.get(KEY).unwrap().is_none().then_some(()));
        assert!(!client.refresh(KEY).unwrap());
    };
    client.put(KEY, b"value").unwrap();
    assert!(client.get(KEY).unwrap().is_some());
    ends("an entry that was put once ends");
    client.put(KEY, b"again").unwrap();
    let start = Instant::now();
    while start.elapsed() < time_to_live * 2 {
        assert!(client.refresh(KEY).unwrap(), "after {:?}", start.elapsed());
        // Time has to pass: entries are refreshed three times as often as needed.
        thread::sleep(time_to_live / 3);
    }
    assert_eq!(client.get(KEY).unwrap().as_deref(), Some(&b"again"[..]));
    ends("an entry that is refreshed no more ends");
    client.put(KEY, b"once more").unwrap();
    assert!(client.refresh(KEY).unwrap());
}

/// The server is killed and started again while threads use it. All errors meanwhile say so and may pass, and
/// the same client goes on.
pub(crate) fn killed_in_mid_run(client: &dyn KeyValue, daemon: &mut Daemon) {
    let (done, calls, failed) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
    thread::scope(|scope| {
        for thread in 0..3 {
            let (done, calls, failed) = (&done, &calls, &failed);
            scope.spawn(move || {
                let key = format!("mooncake/ram/{thread}");
                while !done.load(Ordering::Relaxed) {
                    let result = client.put(&key, b"value").and_then(|()| client.get(&key));
                    match result {
                        Ok(_) => {
                            calls.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => {
                            assert!(error.is_transient(), "{error}");
                            let text = error.to_string();
                            assert!(text.contains(client.uri()) && text.contains(&key), "{text}");
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        let progress = |counter: &AtomicU32, what: &str| {
            let before = counter.load(Ordering::Relaxed);
            until(what, || (counter.load(Ordering::Relaxed) > before + 10).then_some(()));
        };
        for _ in 0..2 {
            progress(&calls, "calls succeed");
            daemon.kill();
            progress(&failed, "calls fail while it is down");
            daemon.run();
            progress(&calls, "calls succeed again");
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// A server that has stopped is an error in time, and when it goes on, so do calls.
pub(crate) fn stopped(impatient: &dyn KeyValue, patient: &dyn KeyValue, daemon: &mut Daemon) {
    impatient.put(KEY, b"value").unwrap();
    daemon.signal("STOP");
    for _ in 0..2 {
        let error = impatient.get(KEY).unwrap_err();
        assert!(error.is_transient(), "{error}");
        assert!(error.to_string().contains("no whole reply"), "{error}");
    }
    daemon.signal("CONT");
    daemon.ready(patient);
    assert_eq!(patient.get(KEY).unwrap().as_deref(), Some(&b"value"[..]));
    impatient.remove(KEY).unwrap();
}
