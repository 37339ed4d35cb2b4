//! What an engine answers initiators that number their connections: here they are made by hand, over
//! devices and control ports of their own.

mod common;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::{LONG, address, contents, devices, engine, shared};
use millstream_lab::Stopwatch;
use millstream_metadata::{
    Client, Frame, FrameType, Gid, HandShakeDesc, Handler, SegmentDesc, Server, ServerConfig,
};
use millstream_transfer::TransferEngine;
use millstream_verbs::{
    Access, Completion, CompletionQueue, CompletionStatus, Device, Psn, QueuePair,
    QueuePairAttributes, QueuePairCapabilities, QueuePairOptions, QueuePairState, SendOperation,
    SendRequest,
};

fn call(target: &TransferEngine, frame_type: FrameType, body: Vec<u8>) -> Vec<u8> {
    let peer = target.name().parse().unwrap();
    Client::default().call(&peer, &Frame::new(frame_type, body)).unwrap().body
}

fn ask(target: &TransferEngine, request: &HandShakeDesc) -> HandShakeDesc {
    let reply = call(target, FrameType::Connection, request.to_json());
    HandShakeDesc::from_json(&reply).unwrap()
}

fn descriptor(target: &TransferEngine) -> SegmentDesc {
    SegmentDesc::from_json(&call(target, FrameType::Metadata, Vec::new())).unwrap()
}

/// One end of a rail.
struct Rail {
    pair: QueuePair,
    completions: CompletionQueue,
    _device: Device,
    address: IpAddr,
    request: HandShakeDesc,
}

impl Rail {
    fn new(target: &TransferEngine, rail: u16, epoch: u64) -> Self {
        let address = address();
        let device = devices::open(address);
        let completions = device.create_completion_queue(64).unwrap();
        let capabilities =
            QueuePairCapabilities { max_inline: 8, ..QueuePairCapabilities::new(16, 1) };
        let options = QueuePairOptions::new(&completions, capabilities);
        let pair = device.allocate_protection_domain().create_queue_pair_with(&options).unwrap();
        let request = HandShakeDesc {
            local_nic_path: format!("{address}:1@nic"),
            local_gid: Some(Gid::from_address(address)),
            peer_nic_path: format!("{}@{}", target.name(), target.devices()[0]),
            qp_num: vec![pair.number().value()],
            incarnation: Some(4711),
            peer_incarnation: descriptor(target).incarnation,
            rail: Some(rail),
            epoch: Some(epoch),
            ..HandShakeDesc::default()
        };
        Self { pair, completions, _device: device, address, request }
    }

    fn fence(&self) -> HandShakeDesc {
        HandShakeDesc { fence: true, qp_num: Vec::new(), ..self.request.clone() }
    }

    fn connect(&self, target: &TransferEngine) {
        let reply = ask(target, &self.request);
        assert_eq!(reply.reply_msg, "");
        let state =
            |state| QueuePairAttributes { state: Some(state), ..QueuePairAttributes::default() };
        let peer: IpAddr = target.listening_at().ip();
        // The system's devices talk to themselves, too.
        assert!(devices::are_of_the_system() || peer != self.address);
        for step in [
            QueuePairAttributes {
                // As engines have it: the target asks now and then whether somebody is there, by a WRITE.
                access: Some(Access::REMOTE_READ | Access::REMOTE_WRITE),
                ..state(QueuePairState::Initialized)
            },
            QueuePairAttributes {
                remote_address: Some(peer),
                path_mtu: Some(millstream_verbs::Mtu::B1024),
                destination_qpn: Some(millstream_verbs::Qpn::new(reply.qp_num[0])),
                receive_psn: Some(Psn::new(reply.start_psn[0])),
                responder_resources: Some(1),
                minimum_rnr_timer: Some(12),
                ..state(QueuePairState::ReadyToReceive)
            },
            QueuePairAttributes {
                send_psn: Some(Psn::new(0)),
                // 134 ms, seven times, as a busy machine may stand still for long; eight times is for
                // ever with the kernel's soft-RoCE.
                timeout: Some(15),
                retry_count: Some(6),
                rnr_retry: Some(7),
                initiator_depth: Some(1),
                ..state(QueuePairState::ReadyToSend)
            },
        ] {
            self.pair.modify(&step).unwrap();
        }
    }

    /// Writes a number to the beginning of the only buffer; how that ended.
    fn write(&self, descriptor: &SegmentDesc, number: u64) -> CompletionStatus {
        let buffer = &descriptor.buffers[0];
        let operation = SendOperation::Write {
            remote_address: buffer.addr,
            remote_key: buffer.rkey[0],
            immediate: None,
        };
        let request = SendRequest::new(number, operation, []);
        if self.pair.post_send_inline(&request, &number.to_le_bytes()).is_err() {
            return CompletionStatus::Flushed;
        }
        let mut done: Vec<Completion> = Vec::new();
        while done.is_empty() {
            assert!(self.completions.wait(LONG));
            self.completions.poll(&mut done, 1);
        }
        done[0].status
    }
}

#[test]
fn nothing_arrives_after_a_fence_was_confirmed() {
    let target = engine(1);
    let memory = shared(&target, 4096);
    let described = descriptor(&target);
    let number = || u64::from_le_bytes(contents(&memory, 0, 8).try_into().unwrap());
    for round in 0..10 {
        let rail = Rail::new(&target, 3, 2 * round + 1);
        rail.connect(&target);
        let begun = round << 32;
        assert_eq!(rail.write(&described, begun + 1), CompletionStatus::Success);
        thread::scope(|scope| {
            let writing = scope.spawn(|| {
                // Far more than there is time for, unless the fence stops nothing.
                for next in begun + 2..begun + (1 << 20) {
                    let status = rail.write(&described, next);
                    if status != CompletionStatus::Success {
                        return (next - 1, status);
                    }
                }
                panic!("a million WRITEs were not stopped");
            });
            while number() < begun + 10 && !writing.is_finished() {
                thread::yield_now();
            }
            assert!(!writing.is_finished(), "it gave up early: {:?}", writing.join());
            let reply = ask(&target, &rail.fence());
            assert_eq!((reply.fenced, reply.reply_msg.as_str()), (Some(2 * round + 1), ""));
            let fenced = number();
            // It goes on trying until it gives up.
            let (written, _) = writing.join().unwrap();
            assert_eq!(number(), fenced);
            assert!(written <= fenced);
        });
        // Its request comes late, or again.
        let reply = ask(&target, &rail.request);
        assert_eq!(reply.epoch_floor, Some(2 * round + 1));
        assert!(!reply.reply_msg.is_empty() && reply.qp_num.is_empty());
    }
}

#[test]
fn a_newer_connection_ends_the_one_before() {
    let target = engine(1);
    let _memory = shared(&target, 4096);
    let described = descriptor(&target);
    let [old, new] = [1, 2].map(|epoch| Rail::new(&target, 0, epoch));
    old.connect(&target);
    assert_eq!(old.write(&described, 1), CompletionStatus::Success);
    new.connect(&target);
    assert_eq!(new.write(&described, 2), CompletionStatus::Success);
    assert_ne!(old.write(&described, 3), CompletionStatus::Success);
    assert_eq!(new.write(&described, 4), CompletionStatus::Success);
}

#[test]
fn requests_for_another_start_are_refused() {
    let target = engine(1);
    let rail = Rail::new(&target, 0, 1);
    let ours = rail.request.peer_incarnation;
    for request in [rail.request.clone(), rail.fence()] {
        let other = HandShakeDesc { peer_incarnation: Some(1), ..request };
        let reply = ask(&target, &other);
        assert!(reply.reply_msg.contains("was restarted"), "{}", reply.reply_msg);
        assert_eq!((reply.incarnation, reply.fenced, reply.qp_num.len()), (ours, None, 0));
    }
    // A fence is for a process: it needs no NIC, but it must say which process.
    let anywhere = HandShakeDesc { peer_nic_path: String::new(), ..rail.fence() };
    assert_eq!(ask(&target, &anywhere).fenced, Some(1));
    let nowhere = HandShakeDesc { peer_incarnation: None, ..anywhere };
    assert_eq!(ask(&target, &nowhere).fenced, None);
    let named = HandShakeDesc { peer_incarnation: None, ..rail.fence() };
    assert_eq!(ask(&target, &named).fenced, Some(1));
}

#[test]
fn an_initiator_that_closes_is_forgotten() {
    let target = engine(1);
    let _memory = shared(&target, 4096);
    let described = descriptor(&target);
    let rail = Rail::new(&target, 0, 1);
    rail.connect(&target);
    let closing =
        HandShakeDesc { closing: true, incarnation: Some(4711), ..HandShakeDesc::default() };
    assert_eq!(ask(&target, &closing).reply_msg, "");
    assert_ne!(rail.write(&described, 1), CompletionStatus::Success);
}

/// Tells of the requests that come.
struct Listener(Mutex<Sender<HandShakeDesc>>);

impl Handler for Listener {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        let _ = self.0.lock().unwrap().send(HandShakeDesc::from_json(&request.body).ok()?);
        Some(Frame::new(request.frame_type, HandShakeDesc::default().to_json()))
    }
}

#[test]
fn an_engine_that_closes_tells_its_initiators_at_once() {
    let target = engine(1);
    let (told, tidings) = mpsc::channel();
    let servers = [(); 3].map(|()| {
        let listener = Arc::new(Listener(Mutex::new(told.clone())));
        Server::start((address(), 0).into(), ServerConfig::default(), listener).unwrap()
    });
    // Those that do not answer keep nobody from being told.
    let silent = [(); 20].map(|()| TcpListener::bind((address(), 0)).unwrap());
    let silent = silent.iter().map(|silent| silent.local_addr().unwrap());
    let all = silent.chain(servers.iter().map(Server::address));
    let mut rail = Rail::new(&target, 0, 1);
    for (number, name) in all.enumerate() {
        for nic in ["nic", "other"] {
            let epoch = rail.request.epoch.map(|epoch| epoch + 1);
            rail.request = HandShakeDesc {
                rail: Some(2 * number as u16 + u16::from(nic == "nic")),
                epoch,
                local_nic_path: format!("{name}@{nic}"),
                ..rail.request
            };
            assert_eq!(ask(&target, &rail.request).reply_msg, "");
        }
    }
    let stopwatch = Stopwatch::start();
    drop(target);
    let took = stopwatch.took();
    assert!(took.own() < Duration::from_secs(2), "{took}");
    // Each once, whatever the number of its NICs.
    let ours = rail.request.peer_incarnation;
    for _ in 0..3 {
        let closing = tidings.recv_timeout(LONG).unwrap();
        assert_eq!((closing.closing, closing.incarnation), (true, ours));
    }
    drop(servers);
    assert!(tidings.try_recv().is_err());
}
