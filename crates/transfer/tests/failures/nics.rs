//! Which NICs are tried, in which order.

use std::sync::Mutex;

use millstream_metadata::HandShakeDesc;
use millstream_transfer::{Config, Opcode, PeerAffinity, RdmaConfig, TransferEngine};

use super::fixture::{failure_of, failure_with, fake_peer_with};
use crate::common::{self, LONG, address, contents, devices, engine, engine_with, request, shared};

/// An engine with the policy that connects NICs that are near first, and others only if need be.
fn classic_with(config: RdmaConfig) -> TransferEngine {
    let engine = TransferEngine::new(Config::new(config.addresses[0])).unwrap();
    engine.install_rdma(config).unwrap();
    engine
}

/// Then the other one, since the first is refused.
#[test]
fn the_nic_that_is_near_to_the_memory_is_taken() {
    let addresses = [address(), address()];
    let names = addresses.map(|address| devices::open(address).name().to_owned());
    let folder = std::env::temp_dir().join(format!("millstream-nics-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (near, far) in [(0, 1), (1, 0)] {
        let file = folder.join(format!("{near}.json"));
        let json = format!(r#"{{"cpu:0":[["{}"],["{}"]]}}"#, names[near], names[far]);
        std::fs::write(&file, json).unwrap();
        let initiator =
            classic_with(RdmaConfig { topology_file: Some(file), ..RdmaConfig::new(&addresses) });
        static ASKED: Mutex<Vec<String>> = Mutex::new(Vec::new());
        failure_of(&initiator, Opcode::Write, |request, _| {
            ASKED.lock().unwrap().push(request.local_nic_path.clone());
            Some(HandShakeDesc::refusal("no"))
        });
        let asked = std::mem::take(&mut *ASKED.lock().unwrap());
        assert!(asked[0].ends_with(&names[near]), "{asked:?}");
        // The first may be asked again before, after 10 ms.
        assert!(asked.iter().any(|asked| asked.ends_with(&names[far])), "{asked:?}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
    let none = RdmaConfig { topology_file: Some(folder), ..RdmaConfig::new(&[address()]) };
    let engine = TransferEngine::new(common::config(address())).unwrap();
    let error = engine.install_rdma(none).unwrap_err().to_string();
    assert!(error.contains("topology_file"), "{error}");
}

/// Then the others.
#[test]
fn the_nic_that_goes_with_ours_is_taken() {
    static ASKED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let own = address();
    let name = devices::open(own).name().to_owned();
    for goes_with in ["fake_0", "fake_1", "fake_2"] {
        let peer_affinity = PeerAffinity::parse(&format!("{name}={goes_with}")).unwrap();
        let initiator = classic_with(RdmaConfig { peer_affinity, ..RdmaConfig::new(&[own]) });
        let server = fake_peer_with(3, |request, _| {
            ASKED.lock().unwrap().push(request.peer_nic_path.clone());
            Some(HandShakeDesc::refusal("no"))
        });
        failure_with(&initiator, Opcode::Write, &server);
        let asked = std::mem::take(&mut *ASKED.lock().unwrap());
        assert!(asked[0].ends_with(goes_with), "{asked:?}");
        assert!(!asked[1].ends_with(goes_with), "{asked:?}");
    }
}

/// More than a flow has queues for.
#[test]
fn memory_at_any_number_of_locations_is_sent_from() {
    const LOCATIONS: usize = 300;
    let address = address();
    let near = |index| format!(r#""numa:{index}":[["soft-{address}"],[]]"#);
    let entries: Vec<_> = (0..LOCATIONS).map(near).collect();
    let file = std::env::temp_dir().join(format!("millstream-many-{}.json", std::process::id()));
    std::fs::write(&file, format!("{{{}}}", entries.join(","))).unwrap();
    let config = RdmaConfig { topology_file: Some(file.clone()), ..RdmaConfig::new(&[address]) };
    let (target, initiator) = (engine(1), engine_with(config));
    std::fs::remove_file(file).unwrap();
    let remote = shared(&target, 2 * LOCATIONS);
    let segment = initiator.open_segment(target.name()).unwrap();
    // The second time the first ones have their queues still.
    for round in 0..2 {
        for index in 0..LOCATIONS {
            let name = format!("numa:{index}");
            let local = initiator.allocate_buffer(2, &name, false).unwrap();
            let bytes = [index as u8, (index >> 8) as u8 + round];
            local.write(0, &bytes).unwrap();
            let offset = 2 * index;
            let write = request(Opcode::Write, (&local, 0), &segment, offset as u64, 2);
            initiator.submit_and_wait(&[write], LONG).unwrap();
            assert_eq!(contents(&remote, offset, 2), bytes, "{index}");
        }
    }
}
