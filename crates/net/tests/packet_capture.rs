//! What packet sockets send, as a referee sees it: tshark finds nothing malformed and no checksum
//! wrong, and knows every packet as RoCEv2.

mod common;

use std::fs;
use std::io::{ErrorKind, Read};
use std::net::IpAddr;
use std::process::Command;
use std::sync::Arc;

use common::lab::{HERE, HERE_V6, Lab, Namespace, THERE, THERE_V6};
use common::{PATIENCE, Signal, config, skip};
use millstream_net::{Driver, Progress, ProgressConfig, Shared};
use millstream_roce::{
    Access, CompletionQueueId, CompletionStatus, Endpoint, EndpointConfig, OwnedMemory, Piece,
    ProtectionDomainId, QueuePairAttributes, QueuePairCapabilities, QueuePairConfig,
    QueuePairState, SendOperation, SendRequest,
};
use millstream_wire::{Mtu, Psn, Qpn};
use socket2::{Domain, Protocol, Socket, Type};

const LENGTH: usize = 100_000;
const ADDRESS: u64 = 0x10_0000;
const DOMAIN: ProtectionDomainId = ProtectionDomainId(1);

struct Host {
    progress: Progress<Endpoint<OwnedMemory>>,
    address: IpAddr,
    pair: Qpn,
    queue: CompletionQueueId,
    key: u32,
}

impl Host {
    fn open(
        place: &Namespace,
        address: IpAddr,
        segmentation_offload: bool,
        bytes: Vec<u8>,
        signal: &Signal,
    ) -> Self {
        let mut endpoint = Endpoint::new(EndpointConfig::new(address, 1), OwnedMemory::new(1));
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let key = endpoint.memory_mut().register(DOMAIN, ADDRESS, access, bytes).unwrap();
        let queue = endpoint.create_completion_queue(16).unwrap();
        let capabilities = QueuePairCapabilities::new(4, 4);
        let pair = QueuePairConfig::new(DOMAIN, queue, capabilities);
        let pair = endpoint.create_queue_pair(&pair).unwrap();
        let (driver, traffic_class) = (Driver::Packet, 0xb8);
        let config =
            ProgressConfig { driver, segmentation_offload, traffic_class, ..config(address) };
        let hook = signal.hook();
        // SAFETY: its memory is never deregistered, and lives as long as the endpoint.
        let progress = place.run(move || unsafe { Progress::start(config, endpoint, hook) });
        Self { progress: progress.unwrap(), address, pair, queue, key }
    }

    fn shared(&self) -> &Arc<Shared<Endpoint<OwnedMemory>>> {
        self.progress.shared()
    }

    fn connect(&self, peer: &Self) {
        assert!(self.shared().prepare(peer.address, PATIENCE));
        let base = QueuePairAttributes::default;
        for attributes in [
            QueuePairAttributes {
                state: Some(QueuePairState::Initialized),
                access: Some(Access::REMOTE_WRITE | Access::REMOTE_READ),
                ..base()
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToReceive),
                remote_address: Some(peer.address),
                path_mtu: Some(Mtu::B1024),
                destination_qpn: Some(peer.pair),
                receive_psn: Some(Psn::new(0xff_fff0)),
                responder_resources: Some(4),
                minimum_rnr_timer: Some(12),
                ..base()
            },
            QueuePairAttributes {
                state: Some(QueuePairState::ReadyToSend),
                send_psn: Some(Psn::new(0xff_fff0)),
                timeout: Some(14),
                retry_count: Some(6),
                rnr_retry: Some(6),
                initiator_depth: Some(4),
                ..base()
            },
        ] {
            let mut endpoint = self.shared().lock().unwrap();
            endpoint.modify_queue_pair(millstream_net::now(), self.pair, &attributes).unwrap();
        }
    }

    /// Runs one request on all of both memories.
    fn run(&self, peer: &Self, read: bool, signal: &Signal) {
        let (remote_address, remote_key) = (ADDRESS, peer.key);
        let operation = if read {
            SendOperation::Read { remote_address, remote_key }
        } else {
            SendOperation::Write { remote_address, remote_key, immediate: None }
        };
        let piece = Piece { key: self.key, address: ADDRESS, length: LENGTH as u32 };
        let request = SendRequest::new(1, operation, [piece]);
        let mut endpoint = self.shared().lock().unwrap();
        endpoint.post_send(millstream_net::now(), self.pair, &request).unwrap();
        drop(endpoint);
        let mut completions = Vec::new();
        signal.wait_until("the completion", || {
            let mut endpoint = self.shared().lock_without_waking().unwrap();
            endpoint.poll_completions(self.queue, &mut completions, 1) > 0
        });
        assert_eq!(completions[0].status, CompletionStatus::Success);
    }
}

/// Everything that crosses the wire, both ways.
fn capture(place: &Namespace) -> Socket {
    place.run(|| {
        let protocol = Protocol::from(i32::from((libc::ETH_P_ALL as u16).to_be()));
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(protocol)).unwrap();
        socket.set_recv_buffer_size(16 << 20).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    })
}

/// What was captured, as a file of pcap's classic format, and the number of frames in it.
fn as_file(mut socket: &Socket) -> (Vec<u8>, usize) {
    let mut file = Vec::new();
    // Magic, version 2.4, zone, accuracy, longest frame, Ethernet.
    for word in [0xa1b2_c3d4, 0x0004_0002, 0, 0, 1 << 18, 1_u32] {
        file.extend(word.to_le_bytes());
    }
    let (mut buffer, mut count) = (vec![0; 1 << 17], 0);
    loop {
        let length = match socket.read(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return (file, count),
            Err(error) => panic!("{error}"),
        };
        for word in [0, count as u32, length as u32, length as u32] {
            file.extend(word.to_le_bytes());
        }
        file.extend(&buffer[..length]);
        count += 1;
    }
}

/// What it says of a checksum.
const GOOD: &str = "1";
const NOT_PRESENT: &str = "3";

/// These fields of every RoCEv2 packet, and not of the empty datagrams that ask for link addresses.
fn tshark(file: &str, fields: &[&str]) -> Vec<String> {
    let mut command = Command::new("tshark");
    command.args(["-n", "-r", file, "-Y", "udp.dstport == 4791 && udp.length > 8"]);
    command.args(["-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE"]);
    command.args(["-T", "fields"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn every_packet_is_well_formed_and_its_checksums_are_right() {
    let test = "every_packet_is_well_formed_and_its_checksums_are_right";
    if Command::new("tshark").arg("--version").output().is_err() {
        return skip(test, "tshark");
    }
    let Some(lab) = Lab::new(test, 1500) else { return };
    // Text, which the dissector does not take for another protocol.
    let text: Vec<u8> = b"All work and no play. ".iter().copied().cycle().take(LENGTH).collect();
    lab.as_on_copper();
    for (here, there, offload) in [
        (HERE, THERE, false),
        (HERE, THERE, true),
        (HERE_V6, THERE_V6, false),
        (HERE_V6, THERE_V6, true),
    ] {
        let signal = Signal::default();
        let capture = capture(&lab.there);
        let hosts = [
            Host::open(&lab.here, here, offload, text.clone(), &signal),
            Host::open(&lab.there, there, offload, vec![b' '; LENGTH], &signal),
        ];
        hosts[0].connect(&hosts[1]);
        hosts[1].connect(&hosts[0]);
        hosts[0].run(&hosts[1], false, &signal);
        hosts[1].run(&hosts[0], true, &signal);
        for host in &hosts {
            let endpoint = host.shared().lock_without_waking().unwrap();
            assert_eq!(endpoint.memory().region(host.key).unwrap(), text);
            assert_eq!(endpoint.counters().dropped_icrc, 0);
        }
        drop(hosts);
        let (bytes, count) = as_file(&capture);
        let file = std::env::temp_dir().join(format!("packet-{}.pcap", std::process::id()));
        let name = file.to_str().unwrap();
        fs::write(&file, bytes).unwrap();
        // One run for all questions: it takes longer to start than to read.
        let fields = [
            "frame.protocols",
            "ip.checksum.status",
            "udp.checksum.status",
            "ip.flags.df",
            "ip.ttl",
            "udp.checksum",
            "ip.dsfield.dscp",
            "ipv6.tclass.dscp",
        ];
        let lines = tshark(name, &fields);
        fs::remove_file(&file).unwrap();
        assert!(lines.len() > 200 && count >= lines.len(), "{} packets", lines.len());
        let (mut single, mut segmented) = (0, 0);
        for line in &lines {
            let [protocols, ip_status, udp_status, dont_fragment, time_to_live, checksum, v4, v6] =
                line.split('\t').collect::<Vec<_>>().try_into().unwrap();
            assert_eq!(if here.is_ipv4() { v4 } else { v6 }, "46", "{line}");
            assert!(protocols.contains("udp:infiniband"), "{line}");
            assert!(!protocols.contains("malformed"), "{line}");
            let has_checksum = checksum != "0x0000";
            assert_eq!(udp_status, if has_checksum { GOOD } else { NOT_PRESENT }, "{line}");
            if here.is_ipv4() {
                assert_eq!((ip_status, dont_fragment, time_to_live), (GOOD, "1", "64"), "{line}");
                *(if has_checksum { &mut segmented } else { &mut single }) += 1;
            } else {
                assert!(has_checksum, "{line}");
            }
        }
        if here.is_ipv4() {
            assert!(single > 0 && (segmented > 0) == offload, "{single} {segmented}");
        }
    }
}
