//! Of several datagrams that were received at once, each is announced before the one before it is handled.

mod common;

use std::net::UdpSocket;

use common::{address, config, eventually};
use millstream_net::Progress;
use millstream_roce::{DatagramMeta, Instant, Node, Piece, Transmit};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Call {
    Expect(u8),
    Handle(u8),
}

/// Notes what it is called with.
#[derive(Default)]
struct Notes {
    calls: std::sync::Mutex<Vec<Call>>,
}

impl Node for Notes {
    fn expect(&self, datagram: &[u8]) {
        self.calls.lock().unwrap().push(Call::Expect(datagram[0]));
    }

    fn handle_datagram(&mut self, _now: Instant, _meta: &DatagramMeta, datagram: &[u8]) {
        self.calls.get_mut().unwrap().push(Call::Handle(datagram[0]));
    }

    fn handle_timeout(&mut self, _now: Instant) {}

    fn poll_timeout(&mut self) -> Option<Instant> {
        None
    }

    fn poll_transmit(&mut self, _now: Instant, _transmit: &mut Transmit) -> bool {
        false
    }

    fn bytes(&self, _piece: &Piece) -> Option<&[u8]> {
        None
    }
}

#[test]
fn the_next_datagram_is_announced() {
    const COUNT: u8 = 9;
    let address = address();
    // SAFETY: it names no memory.
    let progress = unsafe { Progress::start(config(address), Notes::default(), |_| {}) }.unwrap();
    let socket = UdpSocket::bind((address, 0)).unwrap();
    {
        // The driver takes one of them, waits for the node, and then finds all others.
        let _node = progress.shared().lock().unwrap();
        for byte in 0..COUNT {
            socket.send_to(&[byte; 100], (address, millstream_wire::ROCE_PORT)).unwrap();
        }
    }
    let calls = || progress.shared().lock_regardless().calls.lock().unwrap().clone();
    eventually("all datagrams", || calls().contains(&Call::Handle(COUNT - 1)));
    let calls = calls();
    let handled = calls.iter().filter(|call| matches!(call, Call::Handle(_)));
    assert_eq!(handled.count(), usize::from(COUNT));
    let expected: Vec<u8> = calls
        .windows(3)
        .filter_map(|calls| match *calls {
            [Call::Expect(next), Call::Handle(now), _] => {
                assert_eq!(next, now + 1, "{calls:?}");
                Some(next)
            }
            _ => None,
        })
        .collect();
    assert!(expected.len() >= usize::from(COUNT) / 2, "{calls:?}");
}
