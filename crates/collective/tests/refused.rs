//! A switch that refuses a tree, and another one that serves it.

mod common;

use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::thread;

use common::{Cluster, PATIENCE, address, each, leave};
use millstream_collective::ReduceOperation::Sum;
use millstream_inc::protocol::{
    FrameDecoder, FromController, Presence, SwitchLimits, ToController, encode,
};

/// A switch that is registered, and makes nothing.
struct Refusing {
    stream: TcpStream,
    decoder: FrameDecoder,
}

impl Refusing {
    fn register(cluster: &Cluster, address: IpAddr) -> Self {
        let stream = TcpStream::connect(cluster.controller).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut switch = Self { stream, decoder: FrameDecoder::new() };
        let (name, limits) = ("refusing".to_owned(), SwitchLimits::NONE);
        switch.say(&ToController::Register {
            name,
            address,
            limits,
            presence: Presence::default(),
        });
        assert_eq!(switch.hear(), Some(FromController::Registered));
        switch
    }

    fn say(&self, message: &ToController) {
        (&self.stream).write_all(&encode(message).unwrap()).unwrap();
    }

    /// What it is told; `None` when the controller has ended.
    fn hear(&mut self) -> Option<FromController> {
        loop {
            match self.decoder.next_message().unwrap() {
                Some(FromController::Ping) => self.say(&ToController::Pong),
                Some(message) => return Some(message),
                None => {
                    let mut bytes = [0; 4096];
                    match self.stream.read(&mut bytes).unwrap() {
                        0 => return None,
                        count => self.decoder.extend(&bytes[..count]),
                    }
                }
            }
        }
    }

    /// Refuses until the controller ends, and says how often it was asked.
    fn refuse(mut self) -> u32 {
        let mut asked = 0;
        while let Some(message) = self.hear() {
            if let FromController::CreateCommunicator { communicator, .. } = message {
                asked += 1;
                let reason = "it makes nothing".to_owned();
                self.say(&ToController::CommunicatorFailed {
                    communicator,
                    reason,
                    path_mtu: None,
                });
            }
        }
        asked
    }
}

#[test]
fn ranks_whose_switch_refuses_are_served_by_another() {
    let cluster = Cluster::start(1);
    // The first switch serves a group, so that the next one is for the other switch.
    let mut first = cluster.group("first", 1);
    let refusing = Refusing::register(&cluster, address());
    let refusing = thread::spawn(|| refusing.refuse());
    let mut ranks = cluster.group("second", 3);
    each(&mut ranks, |rank| {
        let mut values = [rank.rank() as i32; 1000];
        rank.all_reduce_in_place(&mut values, Sum).unwrap();
        assert_eq!(values, [3; 1000]);
    });
    first[0].all_reduce_in_place(&mut [1], Sum).unwrap();
    leave(ranks);
    leave(first);
    drop(cluster);
    assert_eq!(refusing.join().unwrap(), 1);
}
