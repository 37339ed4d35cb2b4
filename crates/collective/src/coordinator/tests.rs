//! Who may meet at rank 0, and who may not.

use std::net::{IpAddr, Ipv4Addr};

use millstream_inc::CommunicatorOptions;
use millstream_inc::protocol::{Awaited, FallbackOffer, Hello, Refusal};

use super::*;
use crate::control::{self, ConnectError, Proofs, Receiver, Sender};
use crate::joining::Learned;

const PATIENCE: Duration = Duration::from_secs(30);

fn started() -> (Coordinator, SocketAddr, Token) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let secret = Secret(draw_nonce().unwrap());
    let token = Rendezvous::token(&MeetingPoint { address, secret }, None).unwrap();
    let (group, reason) = ("g".to_owned(), "no controller".to_owned());
    let expected = Expected { group, world: 2, shape: (1 << 18, 8), reason };
    (Coordinator::start(listener, token, expected).unwrap(), address, token)
}

fn connect(
    address: SocketAddr,
    token: Option<Token>,
) -> Result<(Arc<Sender>, Receiver), ConnectError> {
    let proofs = Proofs { tls: None, token };
    control::connect(address, &proofs, PATIENCE, PATIENCE, &Learned::default(), |_| ())
}

fn join(group: &str, world: u32) -> ToController {
    ToController::Join(Hello {
        group: group.to_owned(),
        world,
        rank: 1,
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        timeout_ms: 60_000,
        more_addresses: Vec::new(),
        same_machine: None,
        options: CommunicatorOptions::default(),
        fallback: FallbackOffer::Able,
        meeting: None,
        avoid: Vec::new(),
    })
}

/// The next message that is no question whether one lives.
fn hear(receiver: &mut Receiver) -> Option<FromController> {
    loop {
        match receiver.receive(Instant::now() + PATIENCE) {
            Ok(FromController::Ping) => {}
            Ok(message) => return Some(message),
            Err(_) => return None,
        }
    }
}

/// What a stranger is told who says this, until the connection is closed.
fn answer(address: SocketAddr, bytes: &[u8]) -> usize {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // It may be closed meanwhile.
    let _ = stream.write_all(bytes);
    let mut heard = Vec::new();
    match stream.read_to_end(&mut heard) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => panic!("it stays open"),
        _ => heard.len(),
    }
}

#[test]
fn strangers_are_sent_away_and_keep_no_rank_out() {
    let (_coordinator, address, token) = started();
    // More than there may be.
    let idle: Vec<TcpStream> =
        (0..STRANGERS + 50).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert!(answer(address, b"GET / HTTP/1.1\r\n\r\n") < 1000);
    // A frame that is long, and not too long.
    let long = [&60_000_u32.to_be_bytes()[..], &[b' '; 50_000]].concat();
    assert_eq!(answer(address, &long), 0);
    let other = Token::new(b"another secret of enough bytes").unwrap();
    let refused = connect(address, Some(other)).err();
    assert!(matches!(refused, Some(ConnectError::Refused(Refusal::Token { .. }))), "{refused:?}");
    let (sender, mut receiver) = connect(address, None).unwrap();
    sender.send(&join("g", 2)).unwrap();
    let heard = hear(&mut receiver);
    let is_refused =
        matches!(heard, Some(FromController::Refused { reason: Refusal::Token { .. } }));
    assert!(is_refused, "{heard:?}");
    let (sender, mut receiver) = connect(address, Some(token)).unwrap();
    sender.send(&join("g", 2)).unwrap();
    let heard = hear(&mut receiver);
    let Some(FromController::Waiting { awaited: Awaited::Ranks { missing }, .. }) = heard else {
        panic!("{heard:?}")
    };
    assert_eq!(missing.to_string(), "0");
    drop(idle);
}

#[test]
fn a_rank_of_another_group_or_of_another_loss_is_not_taken() {
    let (_coordinator, address, token) = started();
    for (group, world) in [("h", 2), ("g", 3)] {
        let (sender, mut receiver) = connect(address, Some(token)).unwrap();
        sender.send(&join(group, world)).unwrap();
        assert_eq!(hear(&mut receiver), None, "{group} {world}");
    }
}

#[test]
fn who_has_a_token_of_the_controller_needs_that_as_well() {
    let secret = Secret([3; 32]);
    let point = MeetingPoint { address: ([127, 0, 0, 1], 1).into(), secret };
    let [plain, ours, theirs] = [None, Some("ours"), Some("theirs")].map(|name| {
        let token = name.map(|name| Token::new(name.repeat(5).as_bytes()).unwrap());
        Rendezvous::token(&point, token).unwrap()
    });
    assert!(!plain.is_same(&ours) && !ours.is_same(&theirs) && !plain.is_same(&theirs));
}
