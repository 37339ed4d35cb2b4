//! Where an engine with several NICs answers its peers, and who else may answer there.

mod common;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use common::relay::{Between, relayed};
use common::{LONG, address, contents, devices, pattern, private, request, shared};
use millstream_metadata::{
    Client, Frame, FrameType, HandShakeDesc, Handler, HostPort, Probe, SegmentDesc, Server,
    ServerConfig,
};
use millstream_transfer::{Config, Opcode, RdmaConfig, TransferEngine, TransferState};

fn call(address: &HostPort, frame_type: FrameType) -> Vec<u8> {
    Client::default().call(address, &Frame::new(frame_type, b"{}".to_vec())).unwrap().body
}

/// Where an engine says that it answers, each of which is tried.
fn answers(engine: &TransferEngine) -> Vec<SocketAddr> {
    let own = call(&engine.name().parse().unwrap(), FrameType::Metadata);
    let descriptor = SegmentDesc::from_json(&own).unwrap();
    for at in &descriptor.control_addresses {
        let probe = call(&HostPort::from_address(at.ip(), at.port()), FrameType::Probe);
        let probe: Probe = serde_json::from_slice(&probe).unwrap();
        assert_eq!(probe.incarnation, descriptor.incarnation, "{at}");
    }
    descriptor.control_addresses
}

fn addresses(engine: &TransferEngine) -> Vec<IpAddr> {
    answers(engine).iter().map(SocketAddr::ip).collect()
}

#[test]
fn engines_with_the_same_nics_have_one_port_each_at_an_address_of_its_own() {
    if devices::are_of_the_system() {
        return println!("nothing to test: there may be one device only");
    }
    let [a, b] = [(); 2].map(|()| address());
    let first = TransferEngine::new(common::config(a)).unwrap();
    assert!(addresses(&first).is_empty());
    first.install_rdma(RdmaConfig::new(&[a, b])).unwrap();
    assert_eq!(addresses(&first), [b]);
    let listen = SocketAddr::new(b, first.listening_at().port());
    let second = TransferEngine::new(Config { listen, ..common::config(b) }).unwrap();
    second.install_rdma(RdmaConfig::new(&[a, b])).unwrap();
    assert_eq!(addresses(&second), [a]);
    assert_eq!(addresses(&first), [b]);
}

#[test]
fn ports_at_other_nics_are_of_the_range_that_is_set_and_those_that_are_taken_are_left_out() {
    if devices::are_of_the_system() {
        return println!("nothing to test: there may be one device only");
    }
    let [a, b] = [(); 2].map(|()| address());
    // The only port of the range: it is free at addresses that nobody else has.
    let ports = Some(11_500..=11_500);
    let config = Config { ports, ..common::config(a) };
    let first = TransferEngine::new(config.clone()).unwrap();
    first.install_rdma(RdmaConfig::new(&[a, b])).unwrap();
    assert_eq!(answers(&first), [SocketAddr::new(b, 11_500)]);
    let c = address();
    let second = Config { listen: (c, 0).into(), ..config };
    let second = TransferEngine::new(second).unwrap();
    second.install_rdma(RdmaConfig::new(&[b, c])).unwrap();
    assert_eq!(answers(&second), [], "the first has it");
}

#[test]
fn who_listens_everywhere_answers_at_all_nics_by_one_port() {
    if devices::are_of_the_system() {
        return println!("nothing to test: there may be one device only");
    }
    let [a, b] = [(); 2].map(|()| address());
    let listen = (Ipv4Addr::UNSPECIFIED, 0).into();
    let config = Config { listen, host: Some(a.to_string()), ..common::config(a) };
    let engine = TransferEngine::new(config).unwrap();
    engine.install_rdma(RdmaConfig::new(&[a, b])).unwrap();
    assert_eq!(answers(&engine), [SocketAddr::new(b, engine.listening_at().port())]);
    // At another network than its NICs, it is asked there only.
    let engine = TransferEngine::new(common::config(Ipv4Addr::LOCALHOST.into())).unwrap();
    engine.install_rdma(RdmaConfig::new(&[address(), address()])).unwrap();
    assert_eq!(answers(&engine), []);
}

/// Says that it is another start of the peer.
#[derive(Default)]
struct Stranger(AtomicUsize);

impl Handler for Stranger {
    fn handle(&self, _: SocketAddr, request: Frame) -> Option<Frame> {
        self.0.fetch_add(1, Ordering::SeqCst);
        let reply = HandShakeDesc { incarnation: Some(1), ..HandShakeDesc::default() };
        Some(Frame::new(request.frame_type, reply.to_json()))
    }
}

#[test]
fn a_stranger_at_an_address_of_a_nic_says_nothing_of_the_peer() {
    const LENGTH: usize = 1 << 20;
    let engine = || {
        let address = address();
        let engine = TransferEngine::new(common::config(address)).unwrap();
        engine.install_rdma(RdmaConfig { patience: LONG, ..relayed(address) }).unwrap();
        engine
    };
    let (target, initiator) = (engine(), engine());
    let stranger = Arc::new(Stranger::default());
    let handler = Arc::clone(&stranger) as Arc<dyn Handler>;
    let server = Server::start((address(), 0).into(), ServerConfig::default(), handler).unwrap();
    let between = Between::new(target.name());
    between.relay.also_at.set(server.address()).unwrap();
    let (remote, local) = (shared(&target, LENGTH), private(&initiator, LENGTH));
    let segment = initiator.open_segment(&between.name).unwrap();
    let write = request(Opcode::Write, (&local, 0), &segment, 0, LENGTH as u64);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    // It is asked for a fence, and silent where its name leads.
    between.relay.is_silent.store(true, Ordering::SeqCst);
    between.relay.hold();
    local.write(0, &pattern(LENGTH, 1)).unwrap();
    let batch = initiator.allocate_batch(1).unwrap();
    initiator.submit(&batch, &[write]).unwrap();
    let start = Instant::now();
    while stranger.0.load(Ordering::SeqCst) < 2 {
        assert!(start.elapsed() < LONG, "the stranger is not asked");
        thread::yield_now();
    }
    between.relay.release();
    between.relay.is_silent.store(false, Ordering::SeqCst);
    assert!(initiator.wait(&batch, LONG));
    let status = initiator.status(&batch, 0).unwrap();
    assert_eq!(status.state, TransferState::Completed, "{status:?}");
    assert!(contents(&remote, 0, LENGTH) == pattern(LENGTH, 1));
}
