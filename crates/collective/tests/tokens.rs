//! Tokens and quotas with real daemons: who has a token is served, who has not hears why, and one who wants everything
//! takes nothing from others.

mod common;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::{Cluster, PATIENCE, each, leave, start_controller_with, start_switch_with};
use millstream_collective::ReduceOperation::Sum;
use millstream_collective::{
    Communicator, JoinConfig, JoinError, Refusal, Token, TokenError, TokenProblem,
};
use millstream_control::controller::ControllerConfig;
use millstream_control::switch::SwitchConfig;
use millstream_control::tokens::Tokens;
use millstream_inc::protocol::{
    Commanded, FallbackOffer, FrameDecoder, FromController, Hello, Presence, SwitchLimits,
    ToController, encode,
};
use millstream_net::token::{Initiator, Purpose};

/// Quotas are what the good ones need, and no more.
const TOKENS: &str = r#"
    [[token]]
    name = "good"
    kind = "host"
    secret = "the token of the good ones"

    [[token]]
    name = "bad"
    kind = "host"
    secret = "the token of the bad ones"
    connections = 20
    groups = 3
    communicators = 1

    [[token]]
    name = "switches"
    kind = "switch"
    secret = "the token of the switches"
"#;

fn token(text: &str) -> Token {
    Token::new(text.as_bytes()).unwrap()
}

fn good() -> Token {
    token("the token of the good ones")
}

fn bad() -> Token {
    token("the token of the bad ones")
}

fn switches() -> Token {
    token("the token of the switches")
}

fn config(listen: SocketAddr) -> ControllerConfig {
    let tokens = Some(Tokens::parse(TOKENS, Path::new("")).unwrap());
    let mut config = ControllerConfig { tokens, ..ControllerConfig::new(listen) };
    // Those of the hostile host answer nothing, and stay all the same.
    config.rules.keep_alive_misses = 60;
    config
}

/// A controller with tokens, and a switch.
fn cluster() -> Cluster {
    let (daemon, controller) =
        start_controller_with(config(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))));
    let token = Some(switches());
    let switch = SwitchConfig { token, ..SwitchConfig::new(controller, "s0", common::address()) };
    let switches = vec![start_switch_with(switch)];
    Cluster {
        controller,
        switches,
        controller_daemon: Some(daemon),
        path: millstream_collective::Path::Switch,
        fallback: false,
    }
}

fn join(cluster: &Cluster, group: &str, token: Option<Token>) -> Result<Communicator, JoinError> {
    Communicator::join(&JoinConfig { token, ..cluster.config(group, 1, 0) })
}

fn pair(cluster: &Cluster, group: &str) -> Vec<Communicator> {
    let configs =
        (0..2).map(|rank| JoinConfig { token: Some(good()), ..cluster.config(group, 2, rank) });
    common::join_all(configs.collect()).into_iter().map(Result::unwrap).collect()
}

fn sum(ranks: &mut [Communicator]) {
    each(ranks, |rank| {
        let mut vector = vec![1_i32; 1000];
        rank.all_reduce_in_place(&mut vector, Sum).unwrap();
        assert_eq!(vector, [2; 1000]);
    });
}

/// Why somebody was turned away.
fn problem(error: JoinError) -> TokenProblem {
    match error {
        JoinError::Refused(Refusal::Token { problem }) => problem,
        error => panic!("{error:?}"),
    }
}

#[test]
fn who_has_the_token_joins_and_others_hear_why_not() {
    let cluster = cluster();
    let mut ranks = pair(&cluster, "g");
    let unknown = token("a token that nobody knows");
    for (token, expected) in [
        (None, TokenProblem::Needed),
        (Some(unknown), TokenProblem::Unknown),
        (
            Some(switches()),
            TokenProblem::OtherKind {
                name: "switches".to_owned(),
                meant_for: "switches".to_owned(),
                asked: "hosts".to_owned(),
            },
        ),
    ] {
        assert_eq!(problem(join(&cluster, "h", token).unwrap_err()), expected);
    }
    // Only their connections have ended.
    sum(&mut ranks);
    // A group of the same name, and another token.
    drop(join(&cluster, "g", Some(bad())).unwrap());
    sum(&mut ranks);
    leave(ranks);
}

#[test]
fn a_controller_without_tokens_says_so() {
    let cluster = Cluster::start(1);
    assert_eq!(problem(join(&cluster, "g", Some(good())).unwrap_err()), TokenProblem::NoneHere);
    drop(join(&cluster, "g", None).unwrap());
}

#[test]
fn a_switch_without_the_token_ends_with_the_reason() {
    let (_daemon, controller) =
        start_controller_with(config(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))));
    for (token, expected) in [
        (None, "only those who have a token, and none is set here"),
        (Some(token("a token that nobody knows")), "is none of the controller's tokens"),
        (Some(good()), "token \"good\" is for hosts, and switches need one for them"),
    ] {
        let switch =
            SwitchConfig { token, ..SwitchConfig::new(controller, "s0", common::address()) };
        let (_stop, stopped) = millstream_control::shutdown();
        let error = millstream_control::switch::run(switch, |_| (), stopped).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// Ranks that come back prove it again, and who takes the place of the controller and cannot is not obeyed.
#[test]
fn only_a_controller_with_the_token_commands_who_comes_back() {
    let mut cluster = cluster();
    let controller = cluster.controller;
    let mut ranks = pair(&cluster, "g");
    drop(cluster.controller_daemon.take());
    let listener = TcpListener::bind(controller).unwrap();
    // Three peers: the switch and the ranks. Each hears things that would end it, and comes again.
    let says = [
        FromController::Closed,
        FromController::Refused { reason: Refusal::Token { problem: TokenProblem::NoneHere } },
        FromController::Token { body: vec![b'V', 0] },
    ];
    for number in 0..12 {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut decoder = FrameDecoder::new();
        let first = loop {
            let mut bytes = [0; 4096];
            let count = stream.read(&mut bytes).unwrap();
            decoder.extend(&bytes[..count]);
            if let Some(message) = decoder.next_message::<ToController>().unwrap() {
                break message;
            }
        };
        // Nothing is said to him but the beginning of a proof.
        assert!(matches!(first, ToController::Token { .. }), "{first:?}");
        let message = says[number % says.len()].clone();
        // Whoever obeyed this would obey no other one again.
        let command = Commanded { term: 1 << 53, message };
        let _ = stream.write_all(&encode(&command).unwrap());
    }
    drop(listener);
    sum(&mut ranks);
    let (daemon, _) = start_controller_with(config(controller));
    cluster.controller_daemon = Some(daemon);
    // The switch has come back, and so have they: the one that leaves is heard of by the controller.
    let next = pair(&cluster, "next");
    leave(next);
    sum(&mut ranks);
    drop(ranks.pop());
    let error = ranks[0].all_reduce_in_place(&mut [1; 10], Sum).unwrap_err();
    assert!(error.to_string().contains("it left after 2 collectives"), "{error}");
}

#[test]
fn what_answers_and_proves_nothing_is_no_controller() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let controller = listener.local_addr().unwrap();
    let answering = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let command = Commanded { term: 1, message: FromController::Closed };
        stream.write_all(&encode(&command).unwrap()).unwrap();
        // Until it has gone.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let device = Cluster::start(0).config("g", 1, 0).device;
    let config =
        JoinConfig { token: Some(good()), ..JoinConfig::new(controller, "g", 1, 0, &device) };
    let error = Communicator::join(&config).unwrap_err();
    assert!(matches!(error, JoinError::Token { source: TokenError::NoProof, .. }), "{error:?}");
    answering.join().unwrap();
}

/// A connection of one who speaks the protocol, and means no good.
struct Hostile {
    stream: TcpStream,
    decoder: FrameDecoder,
}

impl Hostile {
    /// Proves the token; the reason when he is turned away.
    fn connect(controller: SocketAddr, token: Token) -> Result<Self, Refusal> {
        let stream = TcpStream::connect(controller).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut hostile = Self { stream, decoder: FrameDecoder::new() };
        let mut initiator = Initiator::new(token, Purpose::Control, controller, None).unwrap();
        let mut body = initiator.opening();
        loop {
            hostile.say(&ToController::Token { body });
            match hostile.hear() {
                FromController::Token { body: said } => match initiator.take(&said).unwrap() {
                    Some(next) => body = next,
                    None => return Ok(hostile),
                },
                FromController::Refused { reason } => return Err(reason),
                message => panic!("{message:?}"),
            }
        }
    }

    fn say(&mut self, message: &ToController) {
        // He may have been turned away.
        let _ = self.stream.write_all(&encode(message).unwrap());
    }

    fn hear(&mut self) -> FromController {
        loop {
            if let Some(Commanded { message, .. }) = self.decoder.next_message().unwrap() {
                return message;
            }
            let mut bytes = [0; 4096];
            let count = self.stream.read(&mut bytes).unwrap();
            assert!(count > 0, "closed without a reason");
            self.decoder.extend(&bytes[..count]);
        }
    }

    /// Asks for something until he is told that it is too much.
    fn refused(&mut self) -> Refusal {
        loop {
            match self.hear() {
                FromController::Refused { reason } => return reason,
                FromController::Ping => self.say(&ToController::Pong),
                _ => {}
            }
        }
    }
}

fn hello(group: String, world: u32, rank: u32) -> ToController {
    let address = Ipv4Addr::LOCALHOST.into();
    let (timeout_ms, more_addresses, same_machine) = (60_000, Vec::new(), None);
    ToController::Join(Hello {
        group,
        world,
        rank,
        address,
        timeout_ms,
        more_addresses,
        same_machine,
        options: millstream_inc::CommunicatorOptions::default(),
        fallback: FallbackOffer::Off,
        meeting: None,
        avoid: Vec::new(),
    })
}

#[test]
fn one_hostile_host_with_a_token_of_his_own_stops_nobody() {
    let cluster = cluster();
    let controller = cluster.controller;
    let mut ranks = pair(&cluster, "before");
    thread::scope(|scope| {
        let hostile = scope.spawn(|| {
            // A switch of a name that there is.
            let mut one = Hostile::connect(controller, bad()).unwrap();
            let limits = SwitchLimits::NONE;
            let (name, presence) = ("s0".to_owned(), Presence::default());
            let address = common::address();
            one.say(&ToController::Register { name, address, limits, presence });
            assert!(matches!(one.refused(), Refusal::Token { .. }));
            // Groups of all names, the others' among them: three are what he may have.
            let mut joined = Vec::new();
            for number in 0..10 {
                let group = ["before", "after", "more", "other"].get(number).map_or_else(
                    || format!("group {number}"),
                    |name| (*name).to_owned(),
                );
                let mut one = Hostile::connect(controller, bad()).unwrap();
                one.say(&hello(group, 2, 0));
                if number < 3 {
                    joined.push(one);
                    continue;
                }
                let refusal = one.refused();
                assert!(matches!(&refusal, Refusal::Quota { what, .. } if what == "groups"), "{refusal}");
            }
            // Connections that have proved the token, and say nothing.
            let mut refused = 0;
            for _ in 0..40 {
                match Hostile::connect(controller, bad()) {
                    Ok(one) => joined.push(one),
                    Err(refusal) => {
                        let expected = matches!(&refusal, Refusal::Quota { what, .. } if what == "connections");
                        assert!(expected, "{refusal}");
                        refused += 1;
                    }
                }
            }
            assert!(refused > 0);
            joined
        });
        while !hostile.is_finished() {
            sum(&mut ranks);
        }
        let joined = hostile.join().unwrap();
        // He still has what he has.
        let mut after = pair(&cluster, "after");
        sum(&mut after);
        sum(&mut ranks);
        leave(after);
        drop(joined);
    });
    leave(ranks);
}

/// A cluster where one address may have so many groups at a time.
fn limited(groups: u64) -> Cluster {
    let mut config = ControllerConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    config.rules.source_quotas.groups = groups;
    let (daemon, controller) = start_controller_with(config);
    let switch = SwitchConfig::new(controller, "s0", common::address());
    Cluster {
        controller,
        switches: vec![start_switch_with(switch)],
        controller_daemon: Some(daemon),
        path: millstream_collective::Path::Switch,
        fallback: false,
    }
}

#[test]
fn who_is_refused_for_a_quota_asks_again_until_there_is_room_or_its_time_is_over() {
    let cluster = limited(1);
    let first = cluster.group("first", 2);
    let timeout = Duration::from_secs(3);
    let impatient = JoinConfig { timeout, ..cluster.config("impatient", 1, 0) };
    let mut asked = 0;
    let error = Communicator::join_reporting(&impatient, |waiting| {
        asked += usize::from(waiting.refused.is_some());
    });
    let error = error.unwrap_err();
    let JoinError::Refused(Refusal::Quota { what, limit: 1, used: 1, .. }) = &error else {
        panic!("{error:?}");
    };
    assert!(what == "groups" && asked > 1, "{error}, {asked}");
    let (heard, refusals) = mpsc::channel();
    let configs = [0, 1].map(|rank| cluster.config("second", 2, rank));
    let mut second: Vec<Communicator> = thread::scope(|scope| {
        let join = |config: JoinConfig| {
            let heard = heard.clone();
            scope.spawn(move || {
                Communicator::join_reporting(&config, |waiting| {
                    if let Some(reason) = &waiting.refused {
                        let _ = heard.send(reason.clone());
                    }
                })
            })
        };
        let joining = configs.map(join);
        let refusal = refusals.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(refusal, Refusal::Quota { .. }), "{refusal}");
        leave(first);
        joining.map(|join| join.join().unwrap().unwrap()).into()
    });
    sum(&mut second);
    leave(second);
    // What there will never be room for is refused at once.
    let never = limited(0);
    let patient = JoinConfig { timeout: 100 * PATIENCE, ..never.config("g", 1, 0) };
    let error = Communicator::join(&patient).unwrap_err();
    assert!(matches!(error, JoinError::Refused(Refusal::Quota { limit: 0, .. })), "{error:?}");
}

const HOSTILE: Ipv4Addr = Ipv4Addr::new(127, 66, 66, 66);

/// Without tokens, each source address has quotas.
#[test]
fn one_hostile_address_without_a_token_stops_nobody() {
    let mut config = ControllerConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    config.rules.source_quotas.connections = 20;
    config.rules.source_quotas.groups = 3;
    let (daemon, controller) = start_controller_with(config);
    let switch = SwitchConfig::new(controller, "s0", common::address());
    let switches = vec![start_switch_with(switch)];
    let cluster = Cluster {
        controller,
        switches,
        controller_daemon: Some(daemon),
        path: millstream_collective::Path::Switch,
        fallback: false,
    };
    // All others come from 127.0.0.1.
    let connect = || {
        let socket =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::new(HOSTILE.into(), 0).into()).unwrap();
        socket.connect(&controller.into()).unwrap();
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        stream
    };
    let flood: Vec<TcpStream> = (0..100)
        .map(|number| {
            let mut stream = connect();
            let _ = stream.write_all(&encode(&hello(format!("group {number}"), 2, 0)).unwrap());
            stream
        })
        .collect();
    let mut ranks: Vec<Communicator> = cluster.group("g", 2);
    sum(&mut ranks);
    leave(ranks);
    // Three have groups; the others were told why not, those at least whose connection was not reset before.
    let mut told = 0;
    for mut stream in flood {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        told += usize::from(String::from_utf8_lossy(&bytes).contains("address 127.66.66.66"));
    }
    assert!(told > 0);
}
