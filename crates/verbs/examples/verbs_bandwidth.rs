//! WRITE and READ bandwidth between two soft devices of this process.
//!
//! `cargo run --release -p millstream-verbs --example verbs_bandwidth -- [write|read] [message bytes]`

use std::error::Error;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use millstream_verbs::{
    Access, CompletionStatus, Device, Mtu, Piece, Psn, QueuePair, QueuePairAttributes,
    QueuePairCapabilities, QueuePairState, SendOperation, SendRequest, SoftConfig,
};

const BUFFER: usize = 256 << 20;
const OUTSTANDING: usize = 128;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let read = arguments.next().as_deref() == Some("read");
    let message: usize = arguments.next().map_or(Ok(64 << 10), |text| text.parse())?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;

    let mut buffers = [vec![1_u8; BUFFER], vec![2_u8; BUFFER]];
    let mut devices = Vec::new();
    for (host, buffer) in buffers.iter_mut().enumerate() {
        let address = Ipv4Addr::new(127, 9, 9, host as u8 + 1).into();
        let device = Device::open_soft(&SoftConfig::new(address))?;
        let domain = device.allocate_protection_domain();
        // SAFETY: `buffers` is declared before `devices`, so it outlives the regions, and is not
        // touched meanwhile.
        let region = unsafe { domain.register_memory(buffer.as_mut_ptr(), BUFFER, access)? };
        let completions = device.create_completion_queue(4096)?;
        let capabilities = QueuePairCapabilities::new(OUTSTANDING, 1);
        let pair = domain.create_queue_pair(&completions, &completions, capabilities)?;
        devices.push((device, region, completions, pair));
    }
    let [a, b] = &devices[..] else { return Err("two devices".into()) };
    connect(&a.3, &b.0, &b.3)?;
    connect(&b.3, &a.0, &a.3)?;

    let duration = Duration::from_secs(3);
    let start = Instant::now();
    let mut completions = Vec::new();
    let (mut posted, mut done) = (0_usize, 0_usize);
    while start.elapsed() < duration || done < posted {
        let mut requests = Vec::new();
        while posted + requests.len() - done < OUTSTANDING && start.elapsed() < duration {
            let offset = (posted + requests.len()) * message % (BUFFER - message + 1);
            let piece = Piece {
                key: a.1.key(),
                address: a.1.address() + offset as u64,
                length: message as u32,
            };
            let (remote_address, remote_key) = (b.1.address() + offset as u64, b.1.key());
            let operation = if read {
                SendOperation::Read { remote_address, remote_key }
            } else {
                SendOperation::Write { remote_address, remote_key, immediate: None }
            };
            let pieces = [piece];
            requests.push(SendRequest::new(0, operation, pieces));
        }
        a.3.post_send(&requests).map_err(|(_, error)| error)?;
        posted += requests.len();
        a.2.wait(Duration::from_secs(5));
        completions.clear();
        done += a.2.poll(&mut completions, 4096);
        if let Some(bad) = completions.iter().find(|c| c.status != CompletionStatus::Success) {
            return Err(bad.status.into());
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{:.2} GB/s", (done * message) as f64 / seconds / 1e9);
    for (device, ..) in &devices {
        println!("{}: {:?}\n{:?}", device.name(), device.counters(), device.driver_counters());
    }
    Ok(())
}

fn connect(pair: &QueuePair, peer: &Device, peer_pair: &QueuePair) -> Result<(), Box<dyn Error>> {
    let none = QueuePairAttributes::default();
    let psn = Some(Psn::new(0));
    pair.modify(&QueuePairAttributes {
        state: Some(QueuePairState::Initialized),
        access: Some(Access::REMOTE_WRITE | Access::REMOTE_READ),
        ..none
    })?;
    pair.modify(&QueuePairAttributes {
        state: Some(QueuePairState::ReadyToReceive),
        remote_address: Some(peer.address()),
        path_mtu: Some(Mtu::B4096),
        destination_qpn: Some(peer_pair.number()),
        receive_psn: psn,
        responder_resources: Some(128),
        minimum_rnr_timer: Some(12),
        ..none
    })?;
    pair.modify(&QueuePairAttributes {
        state: Some(QueuePairState::ReadyToSend),
        send_psn: psn,
        timeout: Some(17),
        retry_count: Some(7),
        rnr_retry: Some(7),
        initiator_depth: Some(128),
        ..none
    })?;
    Ok(())
}
