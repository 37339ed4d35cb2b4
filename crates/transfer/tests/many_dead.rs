//! Many peers that are dead at once do not delay what is done with one that lives.

mod common;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use common::{LONG, address, dead_peers, engine, private, request, shared};
use millstream_lab::Stopwatch;
use millstream_metadata::{
    BufferDesc, DEFAULT_CALL_LIMIT, DeviceDesc, Frame, FrameType, Gid, Handler, SegmentDesc,
    Server, ServerConfig,
};
use millstream_transfer::{Batch, Buffer, Opcode, Segment, TransferEngine, TransferState};

/// Peers, and the most NICs of each.
const PEERS: (usize, usize) = (64, 8);
const LENGTH: u64 = 1 << 20;

/// When all that was for peers is over whose hosts refuse connections.
const REFUSED: Duration = Duration::from_secs(1);

/// And for those that are silent.
const SILENT: Duration = Duration::from_secs(5);

/// How long the batches with the healthy peer are counted before, which is how long they are then.
const MEASURED: Duration = Duration::from_secs(1);

/// Gives out the descriptor of a peer of which there is nothing else.
struct Publisher {
    devices: Vec<IpAddr>,
    name: OnceLock<String>,
}

impl Handler for Publisher {
    fn handle(&self, _client: SocketAddr, request: Frame) -> Option<Frame> {
        if request.frame_type != FrameType::Metadata {
            return None;
        }
        let nic = |(index, &address)| DeviceDesc {
            name: format!("nic_{index}"),
            lid: 0,
            gid: Gid::from_address(address),
        };
        let buffer = BufferDesc {
            name: "cpu:0".to_owned(),
            addr: 4096,
            length: LENGTH,
            rkey: vec![1; self.devices.len()],
            lkey: vec![1; self.devices.len()],
            ..BufferDesc::default()
        };
        let descriptor = SegmentDesc {
            name: self.name.get()?.clone(),
            protocol: "rdma".to_owned(),
            devices: self.devices.iter().enumerate().map(nic).collect(),
            buffers: vec![buffer],
            incarnation: Some(4711),
            ..SegmentDesc::default()
        };
        Some(Frame::new(request.frame_type, descriptor.to_json()))
    }
}

/// Opens the segment of a peer, which is dead from then on. Its NICs' addresses are `devices`, where
/// nobody is.
fn dead_peer(initiator: &TransferEngine, host: IpAddr, devices: &[IpAddr]) -> Segment {
    let publisher = Arc::new(Publisher { devices: devices.to_vec(), name: OnceLock::new() });
    let handler = Arc::clone(&publisher) as Arc<dyn Handler>;
    let server = Server::start((host, 0).into(), ServerConfig::default(), handler).unwrap();
    let name = server.address().to_string();
    publisher.name.set(name.clone()).unwrap();
    initiator.open_segment(&name).unwrap()
}

/// Writes to the healthy peer for a while, one batch after the other; how many a second, of the time that the
/// machine left.
fn rate(initiator: &TransferEngine, healthy: &Segment, local: &Buffer) -> f64 {
    let write = request(Opcode::Write, (local, 0), healthy, 0, 64 << 10);
    let (end, stopwatch) = (Instant::now() + MEASURED, Stopwatch::start());
    let mut count = 0;
    while Instant::now() < end {
        initiator.submit_and_wait(&[write; 16], LONG).unwrap();
        count += 1;
    }
    f64::from(count) / stopwatch.took().own().max(MEASURED / 100).as_secs_f64()
}

/// Ends within so long, failed, with nothing that could still arrive.
fn all_end(initiator: &TransferEngine, batches: &[Batch], start: &Stopwatch, limit: Duration) {
    let all = batches.iter().all(|batch| initiator.wait(batch, LONG));
    let took = start.took();
    println!("all ended after {took}");
    assert!(all && took.own() < limit, "{took}");
    for batch in batches {
        for status in initiator.statuses(batch) {
            assert_eq!(status.state, TransferState::Failed, "{status:?}");
            assert!(!status.target_undefined, "nothing was sent: {status:?}");
        }
    }
}

/// `nics` of each dead peer, and of the initiator.
fn beside(peers: usize, nics: usize, silent: bool, limit: Duration) {
    let (target, initiator) = (engine(1), engine(nics));
    let _remote = shared(&target, LENGTH as usize);
    let local = private(&initiator, LENGTH as usize);
    let healthy = initiator.open_segment(target.name()).unwrap();
    let host = address();
    let devices: Vec<_> = (0..nics).map(|_| address()).collect();
    let mut listeners = Vec::new();
    let mut segments: Vec<Segment> = Vec::new();
    while segments.len() < peers {
        let segment = dead_peer(&initiator, host, &devices);
        // The port of one that is gone may be given again: then the two are one segment.
        if segments.iter().any(|other| other.name() == segment.name()) {
            continue;
        }
        // Its host takes connections, but nobody answers. Without, it refuses them.
        let address: SocketAddr = segment.name().parse().unwrap();
        listeners.extend(silent.then(|| TcpListener::bind(address).unwrap()));
        segments.push(segment);
    }
    rate(&initiator, &healthy, &local);
    let before = rate(&initiator, &healthy, &local);
    let start = Stopwatch::start();
    let batches: Vec<_> = segments
        .iter()
        .map(|segment| {
            let both = [Opcode::Write, Opcode::Read]
                .map(|opcode| request(opcode, (&local, 0), segment, 0, LENGTH));
            let batch = initiator.allocate_batch(2).unwrap();
            initiator.submit(&batch, &both).unwrap();
            batch
        })
        .collect();
    let submitted = start.took();
    let during = thread::scope(|scope| {
        scope.spawn(|| all_end(&initiator, &batches, &start, limit));
        rate(&initiator, &healthy, &local)
    });
    println!("{before:.0} batches/s before, {during:.0} then; submitted in {submitted}");
    // The processor is shared with others, that may come or go; a wait for one dead peer would leave one or none.
    assert!(during > before / 50.0, "{during:.0} batches/s in place of {before:.0}");
}

#[test]
fn peers_that_are_silent_delay_nobody() {
    let (peers, most_nics) = dead_peers().unwrap_or(PEERS);
    for nics in [1, most_nics] {
        beside(peers, nics, true, SILENT);
    }
}

#[test]
fn peers_that_are_gone_delay_nobody() {
    let (peers, most_nics) = dead_peers().unwrap_or(PEERS);
    for nics in [1, most_nics] {
        beside(peers, nics, false, REFUSED);
    }
}

/// While the kernel makes the table of open files larger, all who open sockets wait, for a second if a
/// processor is busy.
#[test]
fn there_is_room_for_the_sockets_of_all_calls() {
    let _engine = engine(1);
    let field = |file: &str, name: &str, place: usize| -> usize {
        let text = std::fs::read_to_string(format!("/proc/self/{file}")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().nth(place).unwrap().parse().unwrap()
    };
    let limit = field("limits", "Max open files", 0);
    let size = field("status", "FDSize:", 0);
    assert!(size >= limit.min(DEFAULT_CALL_LIMIT), "{size} of {limit}");
}
