use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use millstream_lab::Stopwatch;

use super::*;
use crate::{BufferDesc, Frame, FrameType, Handler, HostPort, Probe, Server, ServerConfig};

/// A server in this process, which fails as it is told to.
#[derive(Default)]
struct Fake {
    state: Mutex<State>,
    changed: Condvar,
    puts: AtomicUsize,
    gets: AtomicUsize,
}

#[derive(Default)]
struct State {
    entries: HashMap<String, Vec<u8>>,
    /// How calls fail.
    failure: Option<fn() -> KeyValueErrorKind>,
    /// So many calls fail.
    failures: usize,
    /// Addresses cannot be written over, as on the original's server.
    guards_addresses: bool,
}

fn down() -> KeyValueErrorKind {
    KeyValueErrorKind::Unreachable("it is down".to_owned())
}

fn error_500() -> KeyValueErrorKind {
    KeyValueErrorKind::Refused { status: Some(500), message: "oops".to_owned() }
}

fn denied() -> KeyValueErrorKind {
    KeyValueErrorKind::Refused { status: Some(403), message: "no".to_owned() }
}

impl Fake {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn fail(&self, failure: fn() -> KeyValueErrorKind, calls: usize) {
        let mut state = self.state();
        (state.failure, state.failures) = (Some(failure), calls);
    }

    fn entry(&self, key: &str) -> Option<String> {
        self.state().entries.get(key).map(|value| String::from_utf8(value.clone()).unwrap())
    }

    fn set(&self, key: &str, value: &str) {
        self.state().entries.insert(key.to_owned(), value.into());
    }

    /// Waits until this is so after some write.
    fn wait(&self, so: impl Fn(&State) -> bool) {
        let limit = Duration::from_secs(60);
        let waited = self.changed.wait_timeout_while(self.state(), limit, |state| !so(state));
        assert!(!waited.unwrap().1.timed_out());
    }

    fn call<T>(
        &self,
        key: &str,
        call: impl FnOnce(&mut State) -> Result<T, KeyValueErrorKind>,
    ) -> Result<T, KeyValueError> {
        let mut state = self.state();
        let failure = state.failure.filter(|_| state.failures > 0);
        let result = match failure {
            Some(failure) => {
                state.failures -= 1;
                Err(failure())
            }
            None => call(&mut state),
        };
        self.changed.notify_all();
        let error = |kind| KeyValueError { uri: URI.to_owned(), key: key.to_owned(), kind };
        result.map_err(error)
    }
}

impl KeyValue for Arc<Fake> {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, KeyValueError> {
        self.gets.fetch_add(1, Ordering::SeqCst);
        self.call(key, |state| Ok(state.entries.get(key).cloned()))
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KeyValueError> {
        self.puts.fetch_add(1, Ordering::SeqCst);
        self.call(key, |state| {
            if state.guards_addresses && key.contains("rpc_meta") && state.entries.contains_key(key)
            {
                let message = "Duplicate rpc_meta key not allowed".to_owned();
                return Err(KeyValueErrorKind::Refused { status: Some(400), message });
            }
            state.entries.insert(key.to_owned(), value.to_vec());
            Ok(())
        })
    }

    fn refresh(&self, key: &str) -> Result<bool, KeyValueError> {
        self.call(key, |state| Ok(state.entries.contains_key(key)))
    }

    fn remove(&self, key: &str) -> Result<(), KeyValueError> {
        self.call(key, |state| {
            state.entries.remove(key);
            Ok(())
        })
    }

    fn limit(&self) -> usize {
        1000
    }

    fn uri(&self) -> &str {
        URI
    }
}

const URI: &str = "fake://host";
const ADDRESS: &str = "mooncake/rpc_meta/node-a";
const SEGMENT: &str = "mooncake/ram/node-a";
/// Nothing is looked after in a test.
const LONG: Duration = Duration::from_secs(3600);

/// A store that looks after its entries often.
fn store(fake: &Arc<Fake>) -> KeyValueStore<Arc<Fake>> {
    let refresh_interval = Duration::from_millis(20);
    let patience = Duration::from_millis(500);
    let config = KeyValueStoreConfig { refresh_interval, patience, ..Default::default() };
    KeyValueStore::new(Arc::clone(fake), config)
}

fn meta(port: u16, incarnation: u64) -> RpcMeta {
    let address = HostPort { host: "127.0.0.1".to_owned(), port };
    RpcMeta { address, incarnation: Some(incarnation) }
}

fn descriptor(addresses: &[u64]) -> SegmentDesc {
    let buffer = |&addr: &u64| BufferDesc {
        name: "cpu:0".to_owned(),
        addr,
        length: 1,
        ..BufferDesc::default()
    };
    SegmentDesc {
        name: "node-a".to_owned(),
        protocol: "rdma".to_owned(),
        buffers: addresses.iter().map(buffer).collect(),
        ..SegmentDesc::default()
    }
}

/// An engine that answers probes with this.
struct Answering(Probe);

impl Handler for Answering {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        assert_eq!(request.frame_type, FrameType::Probe);
        Some(Frame::new(FrameType::Probe, serde_json::to_vec(&self.0).unwrap()))
    }
}

fn engine(name: Option<&str>, incarnation: Option<u64>) -> (Server, u16) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let probe = Probe { status: "success".to_owned(), name: name.map(str::to_owned), incarnation };
    let handler = Arc::new(Answering(probe));
    (Server::serve(listener, ServerConfig::default(), handler).unwrap(), port)
}

/// A port where nobody listens.
fn dead_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Whoever has put a descriptor under the name since keeps it.
#[test]
fn another_engines_descriptor_is_not_withdrawn() {
    let fake = Arc::new(Fake::default());
    let config = KeyValueStoreConfig { refresh_interval: LONG, ..Default::default() };
    let own = KeyValueStore::new(Arc::clone(&fake), config);
    let descriptor = SegmentDesc { incarnation: Some(1), ..descriptor(&[5]) };
    own.publish_segment(&descriptor).unwrap();
    let others = SegmentDesc { incarnation: Some(2), ..descriptor.clone() }.to_json();
    let others = String::from_utf8(others).unwrap();
    fake.set(SEGMENT, &others);
    own.withdraw_segment("node-a").unwrap();
    assert_eq!(fake.entry(SEGMENT), Some(others));
    // What others have added to ours does not make it theirs.
    own.publish_segment(&descriptor).unwrap();
    let ours = String::from_utf8(descriptor.to_json()).unwrap();
    fake.set(SEGMENT, &ours.replacen('{', "{\"more\":1,", 1));
    own.withdraw_segment("node-a").unwrap();
    assert_eq!(fake.entry(SEGMENT), None);
}

#[test]
fn what_is_published_is_found_until_it_is_withdrawn() {
    let fake = Arc::default();
    let (own, other) = (store(&fake), store(&fake));
    own.publish_address("node-a", &meta(5, 1)).unwrap();
    own.publish_segment(&descriptor(&[7])).unwrap();
    assert_eq!(
        fake.entry(ADDRESS).unwrap(),
        r#"{"ip_or_host_name":"127.0.0.1","rpc_port":5,"incarnation":1}"#
    );
    assert_eq!(other.address("node-a").unwrap(), meta(5, 1));
    assert_eq!(other.segment("node-a").unwrap(), descriptor(&[7]));
    own.withdraw_segment("node-a").unwrap();
    own.withdraw_address("node-a").unwrap();
    assert!(fake.state().entries.is_empty());
    let error = other.segment("node-a").unwrap_err();
    assert_eq!(error.to_string(), "there is no segment \"node-a\" in fake://host");
    assert!(matches!(other.address("node-a"), Err(StoreError::NotFound { .. })));
}

#[test]
fn entries_that_are_gone_come_back_with_what_others_have_added() {
    let fake = Arc::new(Fake::default());
    let own = store(&fake);
    own.publish_address("node-a", &meta(5, 1)).unwrap();
    own.publish_segment(&descriptor(&[7])).unwrap();
    let text = fake.entry(SEGMENT).unwrap();
    fake.set(SEGMENT, &text.replacen('{', r#"{"rack":"r 1","#, 1));
    own.publish_segment(&descriptor(&[7, 9])).unwrap();
    let with_rack = fake.entry(SEGMENT).unwrap();
    assert!(with_rack.contains(r#""rack":"r 1""#) && with_rack.contains(r#""addr":9"#));
    let address = fake.entry(ADDRESS).unwrap();
    fake.state().entries.clear();
    fake.wait(|state| state.entries.len() == 2);
    assert_eq!(fake.entry(SEGMENT).unwrap(), with_rack);
    assert_eq!(fake.entry(ADDRESS).unwrap(), address);
}

#[test]
fn a_server_that_comes_back_empty_has_all_entries_again() {
    let fake = Arc::new(Fake::default());
    let own = store(&fake);
    own.publish_address("node-a", &meta(5, 1)).unwrap();
    own.publish_segment(&descriptor(&[7])).unwrap();
    fake.fail(down, usize::MAX);
    fake.state().entries.clear();
    fake.wait(|state| state.failures < usize::MAX - 3);
    fake.fail(down, 0);
    fake.wait(|state| state.entries.len() == 2);
}

#[test]
fn what_may_pass_is_tried_again_and_what_may_not_is_not() {
    let fake = Arc::new(Fake::default());
    let own = store(&fake);
    for failure in [down, error_500] {
        fake.fail(failure, 2);
        own.publish_segment(&descriptor(&[7])).unwrap();
    }
    fake.fail(denied, usize::MAX);
    let puts = fake.puts.load(Ordering::SeqCst);
    let error = own.publish_address("node-a", &meta(5, 1)).unwrap_err();
    assert!(error.to_string().contains("it refused: status 403, no"), "{error}");
    assert!(fake.puts.load(Ordering::SeqCst) <= puts + 1);
    fake.fail(down, usize::MAX);
    let stopwatch = Stopwatch::start();
    let error = own.segment("node-b").unwrap_err();
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_secs(5), "{took}");
    let expected = "metadata server fake://host, key \"mooncake/ram/node-b\": it is down";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn what_could_not_be_published_is_not_there_later() {
    let fake = Arc::new(Fake::default());
    let own = store(&fake);
    own.publish_segment(&descriptor(&[7])).unwrap();
    let before = fake.entry(SEGMENT).unwrap();
    fake.fail(down, usize::MAX);
    own.publish_segment(&descriptor(&[7, 9])).unwrap_err();
    // As if its reply had got lost.
    let text = String::from_utf8(descriptor(&[7, 9]).to_json()).unwrap();
    fake.set(SEGMENT, &text);
    fake.fail(down, 0);
    fake.wait(|state| state.entries[SEGMENT] == before.as_bytes());
}

#[test]
fn what_is_published_later_waits_for_the_server() {
    let fake = Arc::new(Fake::default());
    let own = store(&fake);
    fake.fail(down, usize::MAX);
    let stopwatch = Stopwatch::start();
    own.publish_segment_later(&descriptor(&[7]));
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_millis(400), "{took}");
    fake.wait(|state| state.failures < usize::MAX);
    fake.fail(down, 0);
    fake.wait(|state| state.entries.contains_key(SEGMENT));
}

#[test]
fn a_descriptor_over_the_limit_is_named() {
    let fake = Arc::default();
    let addresses: Vec<u64> = (1..100).collect();
    let error = store(&fake).publish_segment(&descriptor(&addresses)).unwrap_err().to_string();
    assert!(error.starts_with("the descriptor of segment \"node-a\" takes "), "{error}");
    assert!(error.contains("more than the 1000"), "{error}");
    assert_eq!(fake.puts.load(Ordering::SeqCst), 0);
}

#[test]
fn a_name_of_a_live_engine_is_refused_and_that_of_a_dead_one_replaced() {
    for guards_addresses in [false, true] {
        let fake = Arc::new(Fake::default());
        fake.state().guards_addresses = guards_addresses;
        let (holder, port) = engine(None, None);
        // As the original writes it.
        let entry = format!(r#"{{"ip_or_host_name":"127.0.0.1","rpc_port":{port}}}"#);
        fake.set(ADDRESS, &entry);
        let own = store(&fake);
        let error = own.publish_address("node-a", &meta(5, 1)).unwrap_err();
        assert!(matches!(error, StoreError::Taken { .. }), "{error}");
        let expected = format!(
            "segment name \"node-a\" is taken: fake://host has it for the engine at 127.0.0.1:{port}, \
             which answers there"
        );
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert_eq!(fake.entry(ADDRESS).unwrap(), entry);
        drop(holder);
        own.publish_address("node-a", &meta(5, 1)).unwrap();
        assert_eq!(own.address("node-a").unwrap(), meta(5, 1));
    }
}

#[test]
fn entries_of_engines_that_were_here_before_are_replaced() {
    let (_stranger, stranger) = engine(Some("node-b"), Some(3));
    let (_self, reached) = engine(Some("node-a"), Some(1));
    for (what, entry) in [
        (
            "our address, an earlier start",
            format!(r#"{{"ip_or_host_name":"127.0.0.1","rpc_port":{stranger}}}"#),
        ),
        (
            "us by another name",
            format!(r#"{{"ip_or_host_name":"localhost","rpc_port":{reached}}}"#),
        ),
        (
            "another engine's port now",
            format!(r#"{{"ip_or_host_name":"localhost","rpc_port":{stranger}}}"#),
        ),
        ("nobody", format!(r#"{{"ip_or_host_name":"127.0.0.1","rpc_port":{}}}"#, dead_port())),
        ("no address", "garbage".to_owned()),
    ] {
        let fake = Arc::new(Fake::default());
        fake.state().guards_addresses = true;
        fake.set(ADDRESS, &entry);
        store(&fake).publish_address("node-a", &meta(stranger, 1)).expect(what);
        assert!(fake.entry(ADDRESS).unwrap().contains(r#""incarnation":1"#), "{what}");
    }
}

#[test]
fn an_engine_whose_name_was_taken_over_leaves_it_to_the_other() {
    let fake = Arc::new(Fake::default());
    let own = store(&fake);
    own.publish_address("node-a", &meta(5, 1)).unwrap();
    own.publish_segment(&descriptor(&[7])).unwrap();
    let (other, port) = engine(Some("node-a"), Some(2));
    let entry = format!(r#"{{"ip_or_host_name":"127.0.0.1","rpc_port":{port},"incarnation":2}}"#);
    fake.set(ADDRESS, &entry);
    // Until it has noticed that, its descriptor is written.
    let error = loop {
        if let Err(error) = own.publish_segment(&descriptor(&[7])) {
            break error;
        }
    };
    assert!(error.to_string().contains("which took it over"), "{error}");
    fake.set(SEGMENT, "theirs");
    // It goes on looking after its entries, several times.
    let gets = fake.gets.load(Ordering::SeqCst);
    fake.wait(|_| fake.gets.load(Ordering::SeqCst) > gets + 10);
    assert_eq!(fake.entry(SEGMENT).unwrap(), "theirs");
    own.withdraw_segment("node-a").unwrap();
    own.publish_segment(&descriptor(&[7])).unwrap_err();
    assert_eq!(
        (fake.entry(ADDRESS).unwrap(), fake.entry(SEGMENT).unwrap()),
        (entry, "theirs".into())
    );
    // It ends, and the name is free.
    drop(other);
    // The other's entry is removed before this one's is there.
    let is_own = |entry: &Vec<u8>| String::from_utf8_lossy(entry).contains(r#""rpc_port":5"#);
    fake.wait(|state| state.entries.get(ADDRESS).is_some_and(is_own));
    own.withdraw_address("node-a").unwrap();
    assert!(fake.entry(ADDRESS).is_none());
}

#[test]
fn a_server_that_lies_is_named() {
    let fake = Arc::new(Fake::default());
    let own = store(&fake);
    for (text, what) in [
        ("garbage", "is not valid JSON"),
        (r#"{"name":"node-b","protocol":"rdma"}"#, "the descriptor of another segment, \"node-b\""),
        (r#"{"name":"node-a"}"#, "it names no protocol"),
    ] {
        fake.set(SEGMENT, text);
        let error = own.segment("node-a").unwrap_err().to_string();
        assert!(
            error.starts_with("metadata server fake://host, key \"mooncake/ram/node-a\""),
            "{error}"
        );
        assert!(error.contains(what), "{error}");
    }
    fake.set(ADDRESS, "[]");
    let error = own.address("node-a").unwrap_err().to_string();
    assert!(error.contains("fake://host") && error.contains("no address of an engine"), "{error}");
}

#[test]
fn addresses_that_were_known_are_known_while_the_server_is_down() {
    let fake = Arc::new(Fake::default());
    let own = store(&fake);
    fake.set(ADDRESS, r#"{"ip_or_host_name":"127.0.0.1","rpc_port":5}"#);
    let known = own.address("node-a").unwrap();
    fake.fail(down, usize::MAX);
    let stopwatch = Stopwatch::start();
    for _ in 0..10 {
        assert_eq!(own.address("node-a").unwrap(), known);
    }
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_millis(400), "it was tried again: {took}");
    assert!(own.address("node-b").is_err());
    fake.fail(down, 0);
    fake.state().entries.clear();
    own.segment("node-a").unwrap_err();
    assert!(own.address("node-a").is_err(), "what is gone is not remembered");
}

#[test]
fn files_are_at_the_server_in_their_name() {
    let fake = Arc::default();
    let own = store(&fake);
    assert_eq!(own.address("nvmeof/10.0.0.1:5/f").unwrap().address.to_string(), "10.0.0.1:5");
    assert_eq!(fake.gets.load(Ordering::SeqCst), 0);
}
