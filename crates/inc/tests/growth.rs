//! A controller and a switch whose groups come and go by the thousand: what they keep does not grow. An allocator that
//! counts is global to its process, so this test has a binary to itself.

use core::net::IpAddr;
use core::time::Duration;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use millstream_inc::controller::{ConnectionId, Controller, ControllerConfig, Output};
use millstream_inc::protocol::{
    AbortReason, FallbackOffer, FromController, Hello, Presence, SwitchLimits, ToController,
};
use millstream_inc::{
    Abort, CommunicatorOptions, CommunicatorSpec, HeldNodes, SwitchConfig, SwitchEvent, SwitchNode,
};
use millstream_roce::{Instant, Node, Transmit};
use millstream_wire::{Mtu, Psn, Qpn};

thread_local! {
    /// Bytes that this thread has allocated and not freed, and how often it has.
    static LIVE: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

struct Counting;

fn count(bytes: isize, blocks: isize) {
    let live = LIVE.get();
    LIVE.set((live.0 + bytes, live.1 + blocks));
}

// SAFETY: every call goes to the system's allocator unchanged, whose promises hold for us. The
// counter is a plain cell, built at compile time, that needs no allocation and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize, 1);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize, 1);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize), -1);
        // SAFETY: the pointer came from one of the above, that is from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SWITCH: ConnectionId = ConnectionId(0);
const WORLD: u32 = 3;

/// How a group ends.
#[derive(Clone, Copy)]
enum End {
    /// All its ranks leave.
    Leave,
    /// A rank gives up, and the switch is told to end its node.
    GiveUp,
    /// The switch finds that a rank does not answer.
    Silent,
    /// A rank loses the switch, and says so.
    SwitchLost,
    /// A rank's connection breaks before all are there.
    Unformed,
}

const ENDS: [End; 5] = [End::Leave, End::GiveUp, End::Silent, End::SwitchLost, End::Unformed];

/// A controller, and a switch that does what it says. Nobody is at the other ends of the switch's queue pairs.
struct World {
    now: Instant,
    controller: Controller,
    switch: SwitchNode,
    nodes: HeldNodes,
    connections: u64,
    /// The ranks of the group that is being made, and those that have a plan.
    ranks: Vec<ConnectionId>,
    planned: usize,
    /// The node that was made last.
    node: Option<u64>,
}

impl World {
    fn new() -> Self {
        let address = IpAddr::from([10, 0, 0, 254]);
        let config = ControllerConfig { keep_records: true, ..ControllerConfig::new(7) };
        let mut world = Self {
            now: Instant::ZERO,
            controller: Controller::new(config),
            switch: SwitchNode::new(SwitchConfig::new(address, 5)),
            nodes: HeldNodes::new(9),
            connections: 0,
            ranks: Vec::new(),
            planned: 0,
            node: None,
        };
        world.controller.handle_connected(world.now, SWITCH);
        let (limits, presence) =
            (SwitchLimits::NONE, Presence { incarnation: 9, ..Presence::default() });
        world.say(SWITCH, ToController::Register { name: "s".into(), address, limits, presence });
        world
    }

    fn say(&mut self, connection: ConnectionId, message: ToController) {
        self.controller.handle_message(self.now, connection, message);
        self.carry_out();
    }

    fn carry_out(&mut self) {
        while self.controller.poll_record().is_some() {}
        while let Some(output) = self.controller.poll_output() {
            let Output::Send { connection, message, .. } = output else { continue };
            let answer = match message {
                FromController::Ping => Some(ToController::Pong),
                FromController::GroupReady { .. } => {
                    let (qpn, psn) = (Qpn::new(connection.0 as u32 & 0xffff), Psn::new(1));
                    let (path_mtu, more) = (Mtu::B1024, Vec::new());
                    Some(ToController::Connect { qpn, psn, path_mtu, more, receive_share: None })
                }
                FromController::Plan(_) => {
                    self.planned += 1;
                    None
                }
                message if connection == SWITCH => self.obey(&message),
                _ => None,
            };
            if let Some(answer) = answer {
                self.controller.handle_message(self.now, connection, answer);
            }
        }
    }

    /// What a switch does, as its daemon.
    fn obey(&mut self, message: &FromController) -> Option<ToController> {
        match *message {
            FromController::CreateCommunicator { communicator, .. } => {
                let spec = CommunicatorSpec::asked_for(message).unwrap();
                let created = self.switch.create_communicator(self.now, &spec).unwrap();
                self.nodes.made(message);
                self.node = Some(communicator);
                Some(created.message(communicator))
            }
            FromController::DestroyCommunicator { communicator } => self.destroy(communicator),
            FromController::AbortCommunicator { communicator, rank } => {
                self.switch.abort_communicator(self.now, communicator, Abort::PeerLost { rank });
                None
            }
            _ => None,
        }
    }

    fn destroy(&mut self, communicator: u64) -> Option<ToController> {
        self.switch.destroy_communicator(self.now, communicator);
        let destroyed = ToController::CommunicatorDestroyed { communicator };
        self.nodes.remove(communicator).then_some(destroyed)
    }

    /// Lets time pass in steps of a tenth of a second. What the switch sends nobody answers.
    fn pass(&mut self, duration: Duration) {
        let end = self.now + duration;
        let mut transmit = Transmit::new();
        while self.now < end {
            self.now = self.now + Duration::from_millis(100);
            self.switch.handle_timeout(self.now);
            while self.switch.poll_transmit(self.now, &mut transmit) {}
            while let Some(event) = self.switch.poll_event() {
                self.nodes.happened(&event);
                if let SwitchEvent::Aborted { communicator, .. } = event
                    && let Some(destroyed) = self.destroy(communicator)
                {
                    self.say(SWITCH, destroyed);
                }
            }
            while let Some((communicator, report)) = self.nodes.next_untold() {
                self.nodes.told(communicator, self.now.saturating_duration_since(Instant::ZERO));
                self.say(SWITCH, ToController::Report { communicator, report });
            }
            if self.controller.poll_timeout().is_some_and(|at| at <= self.now) {
                self.controller.handle_timeout(self.now);
                self.carry_out();
            }
        }
    }

    fn join(&mut self, number: usize, ranks: u32) {
        self.ranks.clear();
        self.planned = 0;
        for rank in 0..ranks {
            self.connections += 1;
            let connection = ConnectionId(self.connections);
            self.ranks.push(connection);
            self.controller.handle_connected(self.now, connection);
            let hello = Hello {
                group: format!("group {number:8}"),
                world: WORLD,
                rank,
                address: IpAddr::from([10, 0, 0, rank as u8 + 1]),
                timeout_ms: 30_000,
                more_addresses: Vec::new(),
                same_machine: None,
                options: CommunicatorOptions::default(),
                fallback: FallbackOffer::Off,
                meeting: None,
                avoid: Vec::new(),
            };
            self.say(connection, ToController::Join(hello));
        }
    }

    /// A group that is formed and ended.
    fn group(&mut self, number: usize, end: End) {
        if let End::Unformed = end {
            self.join(number, WORLD - 1);
            for connection in self.ranks.clone() {
                self.controller.handle_closed(self.now, connection);
                self.carry_out();
            }
            return;
        }
        self.join(number, WORLD);
        assert_eq!(self.planned, WORLD as usize);
        let ranks = self.ranks.clone();
        match end {
            End::Leave => {
                for &connection in &ranks {
                    self.say(connection, ToController::Leave { collectives: 1 });
                }
            }
            End::GiveUp => {
                let (reason, cause) = ("it is tired".to_owned(), None::<AbortReason>);
                self.say(ranks[1], ToController::Fail { reason, cause });
            }
            End::Silent => {
                let communicator = self.node.unwrap();
                self.switch.abort_communicator(self.now, communicator, Abort::PeerLost { rank: 2 });
                self.say(ranks[1], ToController::Leave { collectives: 1 });
                let (reason, cause) = ("it hears nothing".to_owned(), None);
                self.say(ranks[0], ToController::Fail { reason, cause });
            }
            End::SwitchLost => {
                let (detail, tree, switch) = ("silent".to_owned(), 0, None);
                self.say(
                    ranks[0],
                    ToController::SwitchLost { detail, tree, switch, further_up: false },
                );
            }
            End::Unformed => {}
        }
        for connection in ranks {
            self.controller.handle_closed(self.now, connection);
            self.carry_out();
        }
    }

    fn thousand(&mut self, first: usize) {
        for batch in (first..first + 1000).step_by(20) {
            for number in batch..batch + 20 {
                self.group(number, ENDS[number % ENDS.len()]);
            }
            // Aborts have been given up, and nodes destroyed that were to end by themselves.
            self.pass(Duration::from_secs(20));
        }
    }
}

#[test]
fn a_thousand_groups_leave_nothing_with_the_controller_and_the_switch() {
    let mut world = World::new();
    // Until all is full that is kept of the last groups, of which there is a limit.
    world.thousand(0);
    world.thousand(1000);
    let before = LIVE.get();
    world.thousand(2000);
    let after = LIVE.get();
    let census = world.controller.census();
    assert_eq!((census.groups, census.communicators, census.connections), (0, 0, 1));
    assert_eq!((census.held, census.away, census.ending), (0, 0, 0));
    assert_eq!((world.switch.communicators(), world.switch.memory_used()), (0, 0));
    let (bytes, blocks) = (after.0 - before.0, after.1 - before.1);
    // Tables may grow once more; each group alone has some ten blocks.
    assert!(bytes < 16 << 10 && blocks < 100, "{bytes} bytes in {blocks} blocks");
}
