//! What the controller says of others, and what answers where it was and is no controller.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use millstream_inc::protocol::{Commanded, encode};

use super::*;
use crate::control::tests::resume;
use crate::control::{Proofs, connect};
use crate::joining::Learned;

const PATIENCE: Duration = Duration::from_secs(10);

/// What happens to a rank.
enum Event {
    /// It has connected to the controller.
    Connected(TcpStream),
    Failed(CollectiveError),
    Closed,
}

struct Recorder(mpsc::Sender<Event>);

impl Watched for Recorder {
    fn probe(&self) {}

    fn failure(&self) -> Option<CollectiveError> {
        None
    }

    fn fail(&self, error: CollectiveError) {
        let _ = self.0.send(Event::Failed(error));
    }

    fn peer_left(&self, _rank: u32, _collectives: u64) {}

    fn has_departed(&self) -> bool {
        false
    }

    fn close(&self) {
        let _ = self.0.send(Event::Closed);
    }
}

/// A rank that is connected to the only controller that it knows.
fn watched() -> (Watcher, mpsc::Receiver<Event>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let controller = listener.local_addr().unwrap();
    let (events, happened) = mpsc::channel();
    let way = Box::new(Recorder(events.clone()));
    thread::spawn(move || {
        for stream in listener.incoming() {
            if events.send(Event::Connected(stream.unwrap())).is_err() {
                return;
            }
        }
    });
    let (proofs, learned) = (Proofs::default(), Learned::default());
    let heard = connect(controller, &proofs, PATIENCE, PATIENCE, &learned, |_| ()).unwrap();
    let search = Search::new(controller.into());
    (Watcher::start(way, heard, search, resume(), None).unwrap(), happened)
}

fn next(happened: &mpsc::Receiver<Event>) -> Event {
    happened.recv_timeout(PATIENCE).expect("something happens")
}

/// The next connection, while nothing ends.
fn connection(happened: &mpsc::Receiver<Event>) -> TcpStream {
    match next(happened) {
        Event::Connected(stream) => {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream
        }
        Event::Failed(error) => panic!("it fails: {error}"),
        Event::Closed => panic!("it does not come back"),
    }
}

/// One on which the rank has said that it comes back.
fn come_back(happened: &mpsc::Receiver<Event>) -> TcpStream {
    let mut stream = connection(happened);
    let expected = encode(&ToController::Resume(resume())).unwrap();
    let mut bytes = vec![0; expected.len()];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, expected);
    stream
}

fn command(message: FromController) -> Vec<u8> {
    encode(&Commanded { term: 0, message }).unwrap()
}

#[test]
fn what_answers_at_the_port_of_a_dead_controller_is_left_and_what_the_controller_says_is_not() {
    let (_watcher, happened) = watched();
    drop(connection(&happened));
    let json = br#"{"version":1,"type":"resumed","term":0}"#;
    let other_version = [&(json.len() as u32).to_be_bytes()[..], &json[..]].concat();
    // They stay open: what is said there is why the rank leaves.
    let mut left = Vec::new();
    for said in [
        // What it has said itself.
        encode(&ToController::Resume(resume())).unwrap(),
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n".to_vec(),
        other_version,
        // Of a controller that takes it for a switch.
        command(FromController::Registered),
    ] {
        let mut stream = come_back(&happened);
        stream.write_all(&said).unwrap();
        left.push(stream);
    }
    let mut stream = come_back(&happened);
    stream.write_all(&command(FromController::Resumed)).unwrap();
    stream.write_all(&command(FromController::Registered)).unwrap();
    let Event::Failed(error) = next(&happened) else { panic!("it goes on") };
    let sent = "the controller sent Registered".to_owned();
    assert_eq!(error, CollectiveError::Protocol(sent));
}

#[test]
fn what_the_controller_says_of_others_outlives_the_connection() {
    let (watcher, happened) = watched();
    let learned = watcher.sender.learned().clone();
    let mut stream = connection(&happened);
    let (controller, other) = (stream.local_addr().unwrap(), SocketAddr::from(([10, 0, 0, 1], 7)));
    let controllers = vec![other];
    stream.write_all(&command(FromController::Controllers { controllers })).unwrap();
    // It hears one after the other.
    stream.write_all(&command(FromController::Ping)).unwrap();
    let pong = encode(&ToController::Pong).unwrap();
    let mut bytes = vec![0; pong.len()];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, pong);
    drop(watcher);
    assert_eq!(learned.all(), [controller, other]);
}
