//! The daemons, each against a peer that the test plays itself.

use std::fs;
use std::future::{Future, poll_fn};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::pin::pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use millstream_control::controller::{self, ControllerConfig};
use millstream_control::switch::{self, SwitchConfig};
use millstream_control::{Shutdown, shutdown};
use millstream_inc::protocol::{
    Commanded, FrameDecoder, FromController, HeldNode, MAX_HELD_AT_ONCE, MAX_TERM, Message,
    PortCounters, Presence, Refusal, SwitchChild, SwitchLimits, SwitchReport, ToController, encode,
};
use millstream_inc::{CommunicatorOptions, Ranks};
use millstream_net::OpenError;
use millstream_wire::icrc::{self, Addresses, Addressing};
use millstream_wire::{Bth, Mtu, Opcode, Psn, Qpn, ROCE_PORT};

const PATIENCE: Duration = Duration::from_secs(20);
const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// An address of 127/8 that no other test process uses, a new one for every call.
fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let process = std::process::id();
    let host = NEXT.fetch_add(1, Ordering::Relaxed);
    Ipv4Addr::new(127, 32 | (process >> 8) as u8 & 31, process as u8, host).into()
}

fn start_controller() -> (Shutdown, SocketAddr) {
    start_controller_with(ControllerConfig::new(ANY_PORT), mpsc::channel().1)
}

/// One that stands still for each of these times as it comes.
fn start_controller_with(
    config: ControllerConfig,
    standstills: mpsc::Receiver<Duration>,
) -> (Shutdown, SocketAddr) {
    let (stop, stopped) = shutdown();
    let (ready, listening) = mpsc::channel();
    thread::spawn(move || {
        let ready = move |address| ready.send(address).unwrap();
        let mut stopped = pin!(stopped);
        // It is asked each time that the controller has nothing else to do.
        let shutdown = poll_fn(|context| {
            standstills.try_iter().for_each(thread::sleep);
            stopped.as_mut().poll(context)
        });
        controller::run(config, ready, shutdown).unwrap();
    });
    (stop, listening.recv_timeout(PATIENCE).unwrap())
}

/// One end of a connection.
struct Peer {
    stream: TcpStream,
    decoder: FrameDecoder,
}

impl Peer {
    fn new(stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream, decoder: FrameDecoder::new() }
    }

    /// As a controller.
    fn command(&self, term: u64, message: FromController) {
        self.say(&Commanded { term, message });
    }

    fn say(&self, message: &impl Message) {
        (&self.stream).write_all(&encode(message).unwrap()).unwrap();
    }

    /// The next message; `None` at the end of the connection.
    fn hear<M: Message>(&mut self) -> Option<M> {
        loop {
            if let Some(message) = self.decoder.next_message().unwrap() {
                return Some(message);
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes).unwrap() {
                0 => return None,
                count => self.decoder.extend(&bytes[..count]),
            }
        }
    }
}

/// What a switch of the default limits says first.
fn register(address: IpAddr) -> ToController {
    let limits = SwitchLimits { communicators: 64, memory_bytes: 1 << 30, queue_pairs: 4096 };
    ToController::Register { name: "s".to_owned(), address, limits, presence: Presence::default() }
}

#[test]
fn a_peer_that_talks_nonsense_is_told_so_and_nobody_else_notices() {
    let (_stop, controller) = start_controller();
    let mut bystander = Peer::new(TcpStream::connect(controller).unwrap());
    bystander.say(&register(address()));
    assert_eq!(bystander.hear(), Some(FromController::Registered));
    let browser = [b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![b'x'; 100_000]].concat();
    let newer = br#"{"version":12,"type":"register"}"#;
    let newer = [&(newer.len() as u32).to_be_bytes()[..], newer].concat();
    for (bytes, text) in [
        (browser, "\"GET \" in place of the length of a frame: the peer does not speak"),
        (newer, "the peer speaks version 12 of the protocol, and this is version 11"),
    ] {
        let mut peer = Peer::new(TcpStream::connect(controller).unwrap());
        peer.stream.write_all(&bytes).unwrap();
        let Some(FromController::Refused { reason }) = peer.hear() else { panic!("no refusal") };
        assert!(reason.to_string().starts_with(text), "{reason}");
        assert_eq!(peer.hear::<FromController>(), None);
    }
    // Half a frame, then the end: nothing to say, nothing to keep.
    let peer = TcpStream::connect(controller).unwrap();
    (&peer).write_all(&[0, 0, 1]).unwrap();
    drop(peer);
    // The bystander's next news is that it is asked whether it lives.
    assert_eq!(bystander.hear(), Some(FromController::Ping));
}

/// Nobody claims them, and their time is over while the controller stands still.
#[test]
fn a_switch_is_told_at_once_of_more_nodes_than_a_peer_usually_has_messages() {
    const HELD: u32 = 300;
    let mut config = ControllerConfig::new(ANY_PORT);
    config.rules.inventory_grace = Duration::from_secs(1);
    let (standstill, standstills) = mpsc::channel();
    let (_stop, controller) = start_controller_with(config, standstills);
    let mut switch = Peer::new(TcpStream::connect(controller).unwrap());
    let ToController::Register { name, address, limits, presence } = register(address()) else {
        unreachable!("made above")
    };
    let presence = Presence { held: HELD, ..presence };
    switch.say(&ToController::Register { name, address, limits, presence });
    let node = |communicator: u64| {
        let (group, below) = ([communicator, 1], Vec::new());
        HeldNode { group, communicator, children: 1, below, tree: 0 }
    };
    let nodes: Vec<HeldNode> = (0..u64::from(HELD)).map(node).collect();
    for nodes in nodes.chunks(MAX_HELD_AT_ONCE) {
        switch.say(&ToController::Held { nodes: nodes.to_vec() });
    }
    assert_eq!(switch.hear(), Some(FromController::Registered));
    standstill.send(Duration::from_millis(1200)).unwrap();
    switch.say(&ToController::Pong);
    let mut ended = Vec::new();
    let mut pings = 0;
    // It is connected still.
    while ended.len() < nodes.len() || pings == 0 {
        match switch.hear() {
            Some(FromController::EndCommunicator { communicator }) => ended.push(communicator),
            Some(FromController::Ping) => {
                pings += u32::from(ended.len() == nodes.len());
                switch.say(&ToController::Pong);
            }
            message => panic!("{message:?} after {} nodes", ended.len()),
        }
    }
    assert!(ended.iter().eq(nodes.iter().map(|node| &node.communicator)), "{ended:?}");
}

#[test]
fn a_port_in_use_is_named() {
    let (_stop, listen) = start_controller();
    let ready = |_| panic!("it cannot be ready");
    let config = ControllerConfig::new(listen);
    let error = controller::run(config, ready, std::future::pending()).unwrap_err();
    assert!(error.to_string().starts_with(&format!("cannot listen on {listen}: ")), "{error}");
}

#[test]
fn a_second_controller_leaves_the_plans_of_the_first() {
    let (_stop, listen) = start_controller();
    let directory = std::env::temp_dir().join(format!("millstream-second-{}", std::process::id()));
    let plan = directory.join("communicator-7.yaml");
    fs::create_dir(&directory).unwrap();
    fs::write(&plan, "").unwrap();
    let start = |listen| {
        let config =
            ControllerConfig { plans: Some(directory.clone()), ..ControllerConfig::new(listen) };
        let (stop, stopped) = shutdown();
        controller::run(config, move |_| drop(stop), stopped)
    };
    let error = start(listen).unwrap_err();
    assert!(matches!(error, controller::RunError::Listen { .. }), "{error}");
    assert!(plan.exists());
    // One that can listen removes them.
    start(ANY_PORT).unwrap();
    assert!(!plan.exists());
    fs::remove_dir_all(&directory).unwrap();
}

/// Runs a switch that is not expected to start.
fn switch_error(config: SwitchConfig) -> switch::RunError {
    switch::run(config, |_| panic!("it cannot be ready"), std::future::pending()).unwrap_err()
}

#[test]
fn a_second_switch_of_the_same_name_is_refused() {
    let (_stop, controller) = start_controller();
    let mut first = Peer::new(TcpStream::connect(controller).unwrap());
    let first_address = address();
    first.say(&register(first_address));
    assert_eq!(first.hear(), Some(FromController::Registered));
    let error = switch_error(SwitchConfig::new(controller, "s", address()));
    let switch::RunError::Refused { reason: Refusal::SwitchTaken { .. }, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!(
        error.to_string(),
        format!(
            "the controller at {controller} refuses this switch: \
             there is a switch \"s\" at {first_address} already: give this one its own name"
        )
    );
}

#[test]
fn an_address_that_is_in_use_or_not_ours_is_named() {
    let taken = address();
    let _other = std::net::UdpSocket::bind((taken, 4791)).unwrap();
    let error = switch_error(SwitchConfig::new(ANY_PORT, "s", taken));
    assert!(matches!(error, switch::RunError::Open(OpenError::PortInUse { .. })), "{error:?}");
    let elsewhere = IpAddr::from([192, 0, 2, 1]);
    let error = switch_error(SwitchConfig::new(ANY_PORT, "s", elsewhere));
    assert!(error.to_string().contains("192.0.2.1"), "{error}");
}

/// A switch, and its connection to a controller that the test plays.
struct PlayedController {
    listener: TcpListener,
    switch: Peer,
    stop: Option<Shutdown>,
    thread: Option<thread::JoinHandle<()>>,
    ready: mpsc::Receiver<IpAddr>,
    address: IpAddr,
    term: u64,
}

impl PlayedController {
    fn start() -> Self {
        let mut played = Self::unregistered();
        played.register();
        played
    }

    fn unregistered() -> Self {
        let listener = TcpListener::bind(ANY_PORT).unwrap();
        let address = address();
        let mut config = SwitchConfig::new(listener.local_addr().unwrap(), "s", address);
        // Hosts that do not answer are lost after 2 x 4 ms.
        (config.node.timeout, config.node.retry_count) = (10, 1);
        let (stop, stopped) = shutdown();
        let (sender, ready) = mpsc::channel();
        let thread = thread::spawn(move || run(config, sender, stopped));
        let (stream, _) = listener.accept().unwrap();
        let switch = Peer::new(stream);
        let (stop, thread) = (Some(stop), Some(thread));
        Self { listener, switch, stop, thread, ready, address, term: 7 }
    }

    fn register(&mut self) {
        let (presence, held) = self.introduced();
        assert_eq!((presence.held, held.len()), (0, 0));
        self.switch.command(self.term, FromController::Registered);
    }

    /// Accepts the next connection of the switch.
    fn accept(&mut self) {
        let (stream, _) = self.listener.accept().unwrap();
        self.switch = Peer::new(stream);
    }

    /// What the switch says of itself, and the nodes that it has.
    fn introduced(&mut self) -> (Presence, Vec<HeldNode>) {
        let Some(ToController::Register { name, address, presence, .. }) = self.switch.hear()
        else {
            panic!("it did not register");
        };
        assert_eq!((name.as_str(), address), ("s", self.address));
        let mut held = Vec::new();
        while held.len() < presence.held as usize {
            match self.switch.hear() {
                Some(ToController::Held { nodes }) => held.extend(nodes),
                message => panic!("{message:?}"),
            }
        }
        (presence, held)
    }

    fn create(&mut self, communicator: u64, window: u32) -> ToController {
        let child = |rank| SwitchChild {
            ranks: Ranks::one(rank),
            is_switch: false,
            address: address(),
            qpn: Qpn::new(9),
            psn: Psn::new(rank),
            receive_share: None,
        };
        self.switch.command(
            self.term,
            FromController::CreateCommunicator {
                communicator,
                group: [communicator, 1],
                path_mtu: Mtu::B1024,
                segment_bytes: 64 << 10,
                window,
                world: 2,
                has_parent: false,
                children: vec![child(0), child(1)],
                tree: 0,
                options: CommunicatorOptions::default(),
            },
        );
        self.switch.hear().unwrap()
    }
}

impl Drop for PlayedController {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || thread::panicking());
        }
    }
}

fn run(config: SwitchConfig, ready: mpsc::Sender<IpAddr>, stopped: impl Future<Output = ()>) {
    switch::run(config, move |address| ready.send(address).unwrap(), stopped).unwrap();
}

#[test]
fn a_new_switch_tries_again_while_the_connection_of_its_earlier_process_is_open() {
    let mut played = PlayedController::unregistered();
    for _ in 0..3 {
        played.introduced();
        let (name, address, what) = ("s".to_owned(), played.address, "name".to_owned());
        let reason = Refusal::SwitchTaken { name, address, what };
        played.switch.command(played.term, FromController::Refused { reason });
        played.accept();
    }
    assert!(played.ready.try_recv().is_err());
    played.register();
    assert_eq!(played.ready.recv_timeout(PATIENCE), Ok(played.address));
}

#[test]
fn a_switch_does_what_its_controller_says() {
    let mut played = PlayedController::start();
    assert_eq!(played.ready.recv_timeout(PATIENCE), Ok(played.address));
    played.switch.command(7, FromController::Ping);
    assert_eq!(played.switch.hear(), Some(ToController::Pong));

    let created = played.create(7, 4);
    let ToController::CommunicatorCreated { communicator: 7, edges, uplink: None } = created else {
        panic!("{created:?}");
    };
    assert_eq!(edges.iter().map(|edge| edge.rank).collect::<Vec<_>>(), [0, 1]);
    assert_ne!(edges[0].qpn, edges[1].qpn);
    // What cannot be says why.
    for (communicator, window, why) in
        [(7, 4, "communicator 7 exists already"), (8, 0, "a window of 0 segments is out of range")]
    {
        let answer = played.create(communicator, window);
        let ToController::CommunicatorFailed { communicator: of, reason, path_mtu: None } = answer
        else {
            panic!("{answer:?}");
        };
        assert_eq!(of, communicator);
        assert!(reason.starts_with(why), "{reason}");
    }
    played.switch.command(7, FromController::DestroyCommunicator { communicator: 7 });
    let communicator = 7;
    assert_eq!(played.switch.hear(), Some(ToController::CommunicatorDestroyed { communicator }));
    // A root has no way up, and there is none of this number.
    played.create(9, 4);
    let (qpn, psn) = (Qpn::new(9), Psn::new(0));
    for communicator in [9, 10] {
        let address = address();
        played.switch.command(
            7,
            FromController::ConnectParent { communicator, address, qpn, psn, receive_share: None },
        );
        let reason = format!(
            "it cannot be connected to the one at {address}: \
             there is no such communicator, or it has no node above"
        );
        let failed = ToController::CommunicatorFailed { communicator, reason, path_mtu: None };
        assert_eq!(played.switch.hear(), Some(failed));
    }
    // Then the number is free; destroying what is not there says nothing.
    played.switch.command(7, FromController::DestroyCommunicator { communicator: 7 });
    let created = played.create(7, 4);
    assert!(matches!(created, ToController::CommunicatorCreated { .. }), "{created:?}");
}

#[test]
fn a_switch_says_what_each_of_its_nodes_has_counted_when_it_is_asked() {
    let mut played = PlayedController::start();
    // There is nothing to say.
    played.switch.command(played.term, FromController::ReadCounters);
    played.create(7, 4);
    played.create(8, 4);
    let mut last = 0;
    for _ in 0..2 {
        played.switch.command(played.term, FromController::ReadCounters);
        let mut times = Vec::new();
        for number in [7, 8] {
            let heard = played.switch.hear();
            let Some(ToController::Counters { communicator, at_ns, collectives, ports }) = heard
            else {
                panic!("{heard:?}");
            };
            assert_eq!((communicator, collectives), (number, 0));
            let port = |rank| PortCounters { rank: Some(rank), ..PortCounters::default() };
            assert_eq!(ports, [port(0), port(1)]);
            times.push(at_ns);
        }
        assert!(times[0] == times[1] && times[0] > last, "{times:?}");
        last = times[0];
    }
}

#[test]
fn an_aborted_communicator_is_destroyed_though_nobody_answers() {
    let mut played = PlayedController::start();
    played.create(7, 4);
    // No host has these queue pairs, so the switch waits out its retries.
    played.switch.command(7, FromController::AbortCommunicator { communicator: 7, rank: 1 });
    let communicator = 7;
    assert_eq!(played.switch.hear(), Some(ToController::CommunicatorDestroyed { communicator }));
}

#[test]
fn a_switch_that_loses_its_controller_looks_for_it_and_keeps_what_it_has() {
    let mut played = PlayedController::start();
    let created = played.create(7, 4);
    assert!(matches!(created, ToController::CommunicatorCreated { .. }), "{created:?}");
    let mut first = None;
    for number in 0..2 {
        match number {
            0 => played.switch.stream.shutdown(std::net::Shutdown::Both).unwrap(),
            // What only hosts are told.
            _ => played.switch.command(7, FromController::Closed),
        }
        played.accept();
        let (presence, held) = played.introduced();
        assert_eq!((presence.term, held.len()), (7, 1));
        assert_eq!(*first.get_or_insert(presence.incarnation), presence.incarnation);
        let (group, below) = ([7, 1], Vec::new());
        assert_eq!(held, [HeldNode { group, communicator: 7, children: 2, below, tree: 0 }]);
        played.switch.command(7, FromController::Registered);
    }
    // Ready is said once.
    assert!(played.ready.recv_timeout(PATIENCE).is_ok());
    assert!(played.ready.try_recv().is_err());
    // It is still there, until the controller ends it.
    played.switch.command(7, FromController::EndCommunicator { communicator: 7 });
    let communicator = 7;
    assert_eq!(played.switch.hear(), Some(ToController::CommunicatorDestroyed { communicator }));
}

/// Sends a message that is no descriptor, as a host would.
fn send_nonsense(host: IpAddr, switch: IpAddr, qpn: Qpn, psn: Psn) {
    let socket = UdpSocket::bind((host, 0)).unwrap();
    let mut datagram = Bth::new(Opcode::RcSendOnly as u8, qpn, psn).to_bytes().to_vec();
    datagram.extend([0; 8 + 4]);
    let addresses = Addresses::unfragmented(host, switch, 0).unwrap();
    let source_port = socket.local_addr().unwrap().port();
    let ports = Addressing { addresses, source_port, destination_port: ROCE_PORT };
    let check = icrc::of_datagram(&ports, &datagram).to_le_bytes();
    let end = datagram.len() - check.len();
    datagram[end..].copy_from_slice(&check);
    socket.send_to(&datagram, (switch, ROCE_PORT)).unwrap();
}

#[test]
fn a_report_that_may_be_lost_with_the_connection_is_said_again() {
    let mut played = PlayedController::start();
    let (host, psn) = (address(), Psn::new(5));
    let ranks = Ranks::one(0);
    let child = SwitchChild {
        ranks,
        is_switch: false,
        address: host,
        qpn: Qpn::new(9),
        psn,
        receive_share: None,
    };
    played.switch.command(
        played.term,
        FromController::CreateCommunicator {
            communicator: 7,
            group: [7, 1],
            path_mtu: Mtu::B1024,
            segment_bytes: 64 << 10,
            window: 4,
            world: 1,
            has_parent: false,
            children: vec![child],
            tree: 0,
            options: CommunicatorOptions::default(),
        },
    );
    let created = played.switch.hear();
    let Some(ToController::CommunicatorCreated { edges, .. }) = created else {
        panic!("{created:?}");
    };
    send_nonsense(host, played.address, edges[0].qpn, psn);
    let told = played.switch.hear();
    let Some(ToController::Report { communicator: 7, report }) = &told else { panic!("{told:?}") };
    assert!(matches!(report, SwitchReport::Violation { rank: 0, .. }), "{report:?}");
    // As far as the switch knows, nobody has read it.
    played.switch.stream.shutdown(std::net::Shutdown::Both).unwrap();
    played.accept();
    let who = played.switch.hear();
    assert!(matches!(who, Some(ToController::Register { .. })), "{who:?}");
    assert_eq!(played.switch.hear(), told);
}

#[test]
fn a_switch_obeys_no_controller_that_was_replaced() {
    let mut played = PlayedController::start();
    played.create(7, 4);
    // The next one has a lower term: it is left, and nothing that it says is done.
    played.switch.stream.shutdown(std::net::Shutdown::Both).unwrap();
    played.accept();
    assert_eq!(played.introduced().0.term, 7);
    played.switch.command(6, FromController::DestroyCommunicator { communicator: 7 });
    assert_eq!(played.switch.hear::<ToController>(), None);
    played.accept();
    assert_eq!(played.introduced().1.len(), 1);
    // A higher one is obeyed, and the one before no more.
    played.switch.command(8, FromController::Registered);
    played.switch.command(7, FromController::DestroyCommunicator { communicator: 7 });
    assert_eq!(played.switch.hear::<ToController>(), None);
    played.accept();
    let (presence, held) = played.introduced();
    assert_eq!((presence.term, held.len()), (8, 1));
    // Nor is one that the next controller could not exceed.
    let destroy = FromController::DestroyCommunicator { communicator: 7 };
    played.switch.command(MAX_TERM + 1, destroy);
    assert_eq!(played.switch.hear::<ToController>(), None);
    played.accept();
    assert_eq!(played.introduced().0.term, 8);
}

#[test]
fn a_switch_that_is_refused_for_load_tries_again() {
    let mut played = PlayedController::start();
    played.create(7, 4);
    played.switch.stream.shutdown(std::net::Shutdown::Both).unwrap();
    for _ in 0..3 {
        played.accept();
        let reason = Refusal::Limit { what: "connections".to_owned(), limit: 1 };
        played.switch.command(7, FromController::Refused { reason });
    }
    played.accept();
    assert_eq!(played.introduced().1.len(), 1);
}

#[test]
fn what_ends_while_a_switch_has_no_controller_is_not_held_any_more() {
    let mut played = PlayedController::start();
    played.create(7, 4);
    // The hosts do not answer.
    played.switch.command(7, FromController::AbortCommunicator { communicator: 7, rank: 1 });
    played.switch.stream.shutdown(std::net::Shutdown::Both).unwrap();
    // Destroyed when the retries are over, with a controller or without.
    for _ in 0..1000 {
        played.accept();
        let (_, held) = played.introduced();
        if held.is_empty() {
            return;
        }
        played.switch.command(7, FromController::Closed);
    }
    panic!("it is still there");
}
