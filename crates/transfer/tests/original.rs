//! An engine that speaks over RDMA as Mooncake's does: its descriptor and its handshake have no more keys than that has, and
//! its queue pairs expect the first packet to have number 0, whatever is said of it.

mod common;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use common::{LONG, address, contents, engine, pattern, private, request, shared};
use millstream_metadata::{
    Client, Frame, FrameType, HandShakeDesc, Handler, SegmentDesc, Server, ServerConfig,
};
use millstream_transfer::Opcode;

/// Stands before one of our engines, and passes on what Mooncake would understand and say.
struct Original {
    behind: String,
    name: OnceLock<String>,
}

impl Original {
    fn asked(&self, frame_type: FrameType, body: Vec<u8>) -> Vec<u8> {
        let peer = self.behind.parse().unwrap();
        Client::default().call(&peer, &Frame::new(frame_type, body)).unwrap().body
    }
}

impl Handler for Original {
    fn handle(&self, _client: SocketAddr, frame: Frame) -> Option<Frame> {
        let name = self.name.get()?;
        let body = if frame.frame_type == FrameType::Metadata {
            let it = SegmentDesc::from_json(&self.asked(FrameType::Metadata, frame.body)).ok()?;
            let buffers = it.buffers.into_iter().map(|mut buffer| {
                (buffer.shm_key, buffer.part_of) = (None, None);
                buffer
            });
            let descriptor = SegmentDesc {
                name: name.clone(),
                protocol: it.protocol,
                devices: it.devices,
                priority_matrix: it.priority_matrix,
                buffers: buffers.collect(),
                ..SegmentDesc::default()
            };
            descriptor.to_json()
        } else {
            let said = HandShakeDesc::from_json(&frame.body).ok()?;
            let (_, nic) = said.peer_nic_path.split_once('@')?;
            let asked = HandShakeDesc {
                local_nic_path: said.local_nic_path.clone(),
                peer_nic_path: format!("{}@{nic}", self.behind),
                start_psn: vec![0; said.qp_num.len()],
                qp_num: said.qp_num,
                local_lid: said.local_lid,
                local_gid: said.local_gid,
                ..HandShakeDesc::default()
            };
            let reply = self.asked(FrameType::Connection, asked.to_json());
            let reply = HandShakeDesc::from_json(&reply).ok()?;
            let answer = HandShakeDesc {
                local_nic_path: said.peer_nic_path,
                peer_nic_path: said.local_nic_path,
                qp_num: reply.qp_num,
                reply_msg: reply.reply_msg,
                local_lid: reply.local_lid,
                local_gid: reply.local_gid,
                ..HandShakeDesc::default()
            };
            answer.to_json()
        };
        Some(Frame::new(frame.frame_type, body))
    }
}

#[test]
fn bytes_go_to_an_engine_whose_queue_pairs_expect_zero_and_come_back() {
    const LENGTH: usize = 1 << 20;
    let (target, initiator) = (engine(1), engine(1));
    let theirs = shared(&target, LENGTH);
    let original = Arc::new(Original { behind: target.name().to_owned(), name: OnceLock::new() });
    let handler = Arc::clone(&original) as Arc<dyn Handler>;
    let server = Server::start((address(), 0).into(), ServerConfig::default(), handler).unwrap();
    original.name.set(server.address().to_string()).unwrap();
    let ours = private(&initiator, 2 * LENGTH);
    let bytes = pattern(LENGTH, 3);
    ours.write(0, &bytes).unwrap();
    let segment = initiator.open_segment(&server.address().to_string()).unwrap();
    let length = LENGTH as u64;
    let write = request(Opcode::Write, (&ours, 0), &segment, 0, length);
    initiator.submit_and_wait(&[write], LONG).unwrap();
    assert!(contents(&theirs, 0, LENGTH) == bytes);
    let read = request(Opcode::Read, (&ours, length), &segment, 0, length);
    initiator.submit_and_wait(&[read], LONG).unwrap();
    assert!(contents(&ours, LENGTH, LENGTH) == bytes);
}
