//! Ranks that were given one controller, which is dead when they need those that it has told them of.

mod common;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};

use common::{Cluster, PATIENCE, each, joined, leave};
use millstream_collective::{
    Communicator, FailoverReport, Group, JoinConfig, Path, ReduceOperation::Sum,
};
use millstream_inc::protocol::{
    Commanded, FrameDecoder, FromController, Message, ToController, encode,
};

/// A controller that leads, at a second address, where it tells ranks of the first one.
struct Second {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    /// Of each connection both parts.
    streams: Arc<Mutex<Vec<TcpStream>>>,
    /// A rank has heard.
    heard: mpsc::Receiver<()>,
    thread: JoinHandle<()>,
}

impl Second {
    fn of(controller: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (ended, streams) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<_>>>::default());
        let (said, heard) = mpsc::channel();
        let (is_over, all) = (Arc::clone(&ended), Arc::clone(&streams));
        let thread = thread::spawn(move || {
            for near in listener.incoming() {
                if is_over.load(Ordering::SeqCst) {
                    return;
                }
                let (near, far) = (near.unwrap(), TcpStream::connect(controller).unwrap());
                let copies = [&near, &far].map(|stream| stream.try_clone().unwrap());
                all.lock().unwrap().extend(copies);
                between(near, far, controller, said.clone());
            }
        });
        Self { address, ended, streams, heard, thread }
    }

    /// Waits until so many connections were told of the first address, and have heard it.
    fn await_heard(&self, connections: usize) {
        for _ in 0..connections {
            self.heard.recv_timeout(PATIENCE).expect("the ranks hear where the other one is");
        }
    }

    /// Nobody is there any more.
    fn end(self) {
        self.ended.store(true, Ordering::SeqCst);
        // It looks when somebody comes.
        TcpStream::connect(self.address).unwrap();
        self.thread.join().unwrap();
        for stream in self.streams.lock().unwrap().iter() {
            // One side may have closed it.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Passes on what a rank and the controller say, and says behind a plan where the controller is. A question follows, whose answer
/// shows that this was heard.
fn between(near: TcpStream, far: TcpStream, controller: SocketAddr, heard: mpsc::Sender<()>) {
    // The answer to the question is that to so many.
    let last = Arc::new(AtomicU64::new(0));
    let [near_too, far_too] = [&near, &far].map(|stream| stream.try_clone().unwrap());
    let asked = Arc::clone(&last);
    thread::spawn(move || {
        let mut answers = 0;
        pass(near_too, far_too, |message: ToController| {
            answers += u64::from(message == ToController::Pong);
            if message == ToController::Pong && answers == asked.load(Ordering::SeqCst) {
                let _ = heard.send(());
                return Vec::new();
            }
            vec![message]
        });
    });
    thread::spawn(move || {
        let mut questions = 0;
        pass(far, near, |said: Commanded| {
            let (term, message) = (said.term, &said.message);
            questions += u64::from(*message == FromController::Ping);
            if !matches!(message, FromController::Plan(_) | FromController::SharedMemory(_)) {
                return vec![said];
            }
            questions += 1;
            last.store(questions, Ordering::SeqCst);
            let controllers = FromController::Controllers { controllers: vec![controller] };
            let more = [controllers, FromController::Ping];
            let more = more.map(|message| Commanded { term, message });
            [said].into_iter().chain(more).collect()
        });
    });
}

/// Passes on what is made of each message, until one side closes its connection.
fn pass<M: Message>(mut from: TcpStream, mut to: TcpStream, mut make: impl FnMut(M) -> Vec<M>) {
    let mut decoder = FrameDecoder::new();
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        decoder.extend(&bytes[..count]);
        while let Some(message) = decoder.next_message().unwrap() {
            for message in make(message) {
                if to.write_all(&encode(&message).unwrap()).is_err() {
                    return;
                }
            }
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn sum(ranks: &mut [Communicator]) {
    let world = ranks.len() as u32;
    each(ranks, |communicator| {
        let mut vector = [1_u32; 10];
        communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
        assert_eq!(vector, [world; 10]);
    });
}

fn communicators(groups: &mut [Group]) -> Vec<Communicator> {
    thread::scope(|scope| {
        let threads: Vec<_> =
            groups.iter_mut().map(|group| scope.spawn(|| group.communicator().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_group_makes_further_communicators_at_a_controller_that_was_not_given() {
    let cluster = Cluster::start(1);
    let second = Second::of(cluster.controller);
    let mut groups: Vec<Group> = thread::scope(|scope| {
        let create = |rank| {
            let controllers = second.address.into();
            let config = JoinConfig { controllers, ..cluster.config("further", 2, rank) };
            scope.spawn(move || Group::create(&config).unwrap())
        };
        let threads: Vec<_> = (0..2).map(create).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut first = communicators(&mut groups);
    second.await_heard(2);
    second.end();
    let mut next = communicators(&mut groups);
    sum(&mut next);
    // It says nothing of others, since there are none. What was learned before is not forgotten for that.
    let mut last = communicators(&mut groups);
    sum(&mut last);
    sum(&mut first);
    leave(first);
    leave(next);
    leave(last);
}

#[test]
fn ranks_go_on_over_another_switch_by_a_controller_that_was_not_given() {
    let mut cluster = Cluster { fallback: true, ..Cluster::start(2) };
    let second = Second::of(cluster.controller);
    // Rank 2 is not connected to a switch, and joins again, too.
    let config = |(rank, host): (u32, u32)| JoinConfig {
        path: Path::Auto,
        host_label: format!("host {host}"),
        controllers: second.address.into(),
        ..cluster.config("goes on", 3, rank)
    };
    let mut ranks = joined((0..).zip([0, 1, 1]).map(config));
    second.await_heard(3);
    second.end();
    let serves: usize = ranks[0].switch().unwrap().0.trim_start_matches('s').parse().unwrap();
    drop(cluster.switches.remove(serves));
    sum(&mut ranks);
    for rank in &ranks {
        let reports = rank.failovers();
        let over_a_switch = matches!(&reports[..], [FailoverReport { fallback: None, .. }]);
        assert!(over_a_switch, "rank {}: {reports:?}", rank.rank());
    }
    leave(ranks);
}
