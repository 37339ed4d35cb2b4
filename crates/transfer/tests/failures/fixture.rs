//! Engines that soon give up, and a peer that answers handshakes as a test wants.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use millstream_metadata::{
    BufferDesc, DeviceDesc, Frame, FrameType, Gid, HandShakeDesc, Handler, SegmentDesc, Server,
    ServerConfig,
};
use millstream_transfer::{
    Opcode, RdmaConfig, SubmitAndWaitError, TransferEngine, TransferError, TransferRequest,
};

use crate::common::{self, LONG, address, private, request};

pub(crate) const MIB: u64 = 1 << 20;

/// The error of a request that fails.
pub(crate) fn failure(engine: &TransferEngine, request: TransferRequest) -> TransferError {
    match engine.submit_and_wait(&[request], LONG).unwrap_err() {
        SubmitAndWaitError::Failed { error, .. } => *error,
        other => panic!("{other}"),
    }
}

/// For peers that answer at once: on a machine that is busy or stands still for a while they are late.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// An engine whose queue pairs give up after 8 * 4 ms: for peers that do not live.
pub(crate) fn impatient() -> TransferEngine {
    with_patience(Duration::ZERO)
}

/// The same, which goes on connecting for so long.
pub(crate) fn with_patience(patience: Duration) -> TransferEngine {
    with_limits(patience, CALL_TIMEOUT)
}

pub(crate) fn with_limits(patience: Duration, call_timeout: Duration) -> TransferEngine {
    let address = address();
    let mut config = common::config(address);
    config.client.call_timeout = call_timeout;
    let engine = TransferEngine::new(config).unwrap();
    let rdma = RdmaConfig { acknowledge_timeout: 10, patience, ..RdmaConfig::new(&[address]) };
    engine.install_rdma(rdma).unwrap();
    engine
}

/// A peer that offers a segment, and answers handshakes as it likes.
struct FakePeer {
    devices: Vec<std::net::IpAddr>,
    name: std::sync::OnceLock<String>,
    answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc>,
    handshakes: AtomicU32,
}

impl Handler for FakePeer {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        let body = if request.frame_type == FrameType::Metadata {
            let device = |(index, &address)| DeviceDesc {
                name: format!("fake_{index}"),
                lid: 0,
                gid: Gid::from_address(address),
            };
            let keys = vec![1; self.devices.len()];
            let buffer = BufferDesc {
                name: "cpu:0".to_owned(),
                addr: 4096,
                length: 4096,
                rkey: keys.clone(),
                lkey: keys,
                ..BufferDesc::default()
            };
            let descriptor = SegmentDesc {
                name: self.name.get()?.clone(),
                protocol: "rdma".to_owned(),
                devices: self.devices.iter().enumerate().map(device).collect(),
                buffers: vec![buffer],
                ..SegmentDesc::default()
            };
            descriptor.to_json()
        } else {
            let before = self.handshakes.fetch_add(1, Ordering::Relaxed);
            (self.answer)(&HandShakeDesc::from_json(&request.body).ok()?, before)?.to_json()
        };
        Some(Frame::new(request.frame_type, body))
    }
}

/// The failure of writing to a peer that answers like this. It is told how many handshakes came
/// before.
pub(crate) fn against(answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc>) -> TransferError {
    failure_of(&impatient(), Opcode::Write, answer)
}

pub(crate) fn failure_of(
    initiator: &TransferEngine,
    opcode: Opcode,
    answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc>,
) -> TransferError {
    failure_with(initiator, opcode, &fake_peer(answer))
}

pub(crate) fn failure_with(
    initiator: &TransferEngine,
    opcode: Opcode,
    server: &Server,
) -> TransferError {
    let local = private(initiator, 4096);
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    failure(initiator, request(opcode, (&local, 0), &segment, 0, 4096))
}

pub(crate) fn fake_peer(answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc>) -> Server {
    fake_peer_with(1, answer)
}

pub(crate) fn fake_peer_with(
    devices: usize,
    answer: fn(&HandShakeDesc, u32) -> Option<HandShakeDesc>,
) -> Server {
    let device = address();
    let others = (1..devices).map(|_| address());
    let peer = Arc::new(FakePeer {
        devices: std::iter::once(device).chain(others).collect(),
        name: Default::default(),
        answer,
        handshakes: AtomicU32::new(0),
    });
    let config = ServerConfig::default();
    let server =
        Server::start((device, 0).into(), config, Arc::clone(&peer) as Arc<dyn Handler>).unwrap();
    peer.name.set(server.address().to_string()).unwrap();
    server
}
