//! The table of cases.

mod atomics;
mod datagrams;
mod death;
mod faults;
mod fences;
mod invalidation;
mod receiver;
mod refusals;
mod transfer;

use anyhow::Result;
use millstream_verbs::{MAX_SCATTER_GATHER, Mtu, Psn};

use self::transfer::{Kind, Message};
use super::Role;
use super::link::{Link, Settings};

const ROLES: [Role; 2] = [Role::Requester, Role::Responder];

/// What both sides do with a queue pair that is connected.
type Run = Box<dyn Fn(&mut Link<'_>) -> Result<()>>;

/// One case. Both sides run it, each in its role.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) settings: Settings,
    /// What befalls packets. Without a relay the case cannot be run.
    pub(crate) faults: Option<Faults>,
    /// Whether the leader's device must check the whole ICRC.
    pub(crate) whole_icrc: bool,
    /// The leader's roles in it.
    pub(crate) roles: &'static [Role],
    pub(crate) run: Run,
}

/// What the relay is told beforehand, and what must have happened in the end, by the names of its
/// counters: a case whose packets all arrived would prove nothing.
#[derive(Clone, Copy)]
pub(crate) struct Faults {
    pub(crate) command: &'static str,
    pub(crate) seen: &'static [&'static str],
}

impl Case {
    fn new(
        name: impl Into<String>,
        settings: Settings,
        run: impl Fn(&mut Link<'_>) -> Result<()> + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            settings,
            faults: None,
            whole_icrc: false,
            roles: &ROLES,
            run: Box::new(run),
        }
    }

    /// Moves these messages; the memory is as large as they need.
    fn transfer(name: impl Into<String>, settings: Settings, messages: Vec<Message>) -> Self {
        let arena = transfer::extent(&messages);
        Self::new(name, Settings { arena, ..settings }, move |link| {
            transfer::one_way(link, &messages)
        })
    }

    /// Whether its packets are worth a place in a capture: they are what they should be, and few.
    pub(crate) fn is_recorded(&self) -> bool {
        self.faults.is_none() && self.settings.arena < 8 << 20
    }

    fn with(self, command: &'static str, seen: &'static [&'static str]) -> Self {
        Self { faults: Some(Faults { command, seen }), ..self }
    }
}

pub(crate) fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.extend(sizes());
    cases.extend(kinds());
    cases.extend(split_writes());
    cases.extend(atomics::cases());
    cases.extend(datagrams::cases());
    cases.extend(fences::cases());
    cases.extend(invalidation::cases());
    cases.extend(receiver::cases());
    cases.extend(refusals::cases());
    cases.extend(death::cases());
    cases.extend(faults::cases());
    cases
}

/// The most bytes that a request brings along, where it does.
const INLINE: usize = 128;

const OPERATIONS: [(&str, Kind); 3] =
    [("SEND", Kind::Send), ("WRITE", Kind::Write), ("READ", Kind::Read)];

/// Every length at which the packets of a message change their form, at every path MTU.
fn sizes() -> Vec<Case> {
    let mut cases = Vec::new();
    for path_mtu in Mtu::ALL {
        let settings = Settings { path_mtu, ..Settings::USUAL };
        let mtu = path_mtu.bytes();
        for (word, kind) in OPERATIONS {
            let lengths = [0, 1, 3, 1000, mtu - 1, mtu, mtu + 1, 2 * mtu, 64 << 10, 1 << 20];
            let messages = transfer::layout(lengths.map(|length| Message::new(kind, length)));
            let name = format!("{word}, 0 B to 1 MiB, path MTU {mtu}");
            cases.push(Case::transfer(name, settings, messages));
            // Of as many packets as a processor in a guest handles in some seconds.
            let mebibytes = (16 * mtu / 1024).min(16);
            let messages = transfer::layout([Message::new(kind, mebibytes << 20)]);
            let name = format!("{word}, {mebibytes} MiB, path MTU {path_mtu}");
            cases.push(Case::transfer(name, settings, messages));
        }
    }
    cases
}

/// WRITEs that go out as one message for each packet. Only our stack does so.
fn split_writes() -> Vec<Case> {
    let ours = |case| Case { roles: &[Role::Requester], ..case };
    let settings = Settings { split_writes: true, ..Settings::USUAL };
    let mut cases = Vec::new();
    for path_mtu in [Mtu::B256, Mtu::B1024, Mtu::B4096] {
        let mtu = path_mtu.bytes();
        let lengths = [mtu, mtu + 1, 2 * mtu, 16 * mtu - 3, 64 << 10, 200_000, 1 << 20];
        // Twice: one follows the other without a pause.
        let messages = lengths.into_iter().flat_map(|length| [length; 2]);
        let messages = transfer::layout(messages.map(|length| Message::new(Kind::Write, length)));
        let name = format!("WRITE, a message for each packet, path MTU {mtu}");
        cases.push(ours(Case::transfer(name, Settings { path_mtu, ..settings }, messages)));
    }
    let name = "all kinds, WRITE as a message for each packet";
    cases.push(ours(Case::transfer(name, settings, transfer::mixture(13, 200, 20_000))));
    cases
}

/// What there is besides the length of a message.
fn kinds() -> Vec<Case> {
    let settings = Settings::USUAL;
    let immediates = [
        Message::new(Kind::SendImmediate(0x0102_0304), 100),
        Message::new(Kind::SendImmediate(0), 5000),
        Message::new(Kind::Write, 700),
        Message::new(Kind::WriteImmediate(u32::MAX), 5000),
        Message::new(Kind::SendImmediate(u32::MAX - 1), 0),
        Message::new(Kind::WriteImmediate(0x8000_0001), 1),
        Message::new(Kind::WriteImmediate(7), 0),
        Message::new(Kind::Send, 2048),
    ];
    let every_kind = [
        Kind::Send,
        Kind::Write,
        Kind::Read,
        Kind::SendImmediate(0xfeed_beef),
        Kind::WriteImmediate(0x1234),
    ];
    let pieces = every_kind.into_iter().flat_map(|kind| {
        [(4, 3, 1), (3, 4, 1001), (2, 4, 6007), (4, 2, 70_000)].map(|(local, remote, length)| {
            Message { local_pieces: local, receive_pieces: remote, ..Message::new(kind, length) }
        })
    });
    // As many as a request has. Linux's soft-RoCE takes 32.
    let most = MAX_SCATTER_GATHER;
    let many_pieces = every_kind.into_iter().flat_map(|kind| {
        [(most, most, 40), (most, 1, 1000), (1, most, 1023), (most, most, 70_000)].map(
            |(local, remote, length)| Message {
                local_pieces: local,
                receive_pieces: remote,
                ..Message::new(kind, length)
            },
        )
    });
    let inline = every_kind.into_iter().filter(|kind| *kind != Kind::Read).flat_map(|kind| {
        let brought = |length| Message { inline: true, ..Message::new(kind, length) };
        // One that is read from memory comes between them.
        [brought(1), brought(3), brought(0), Message::new(kind, 100), brought(INLINE)]
    });
    let bringing = Settings { inline: INLINE, ..settings };
    let unsignaled = (0..200).map(|index| {
        let kind = every_kind[index % every_kind.len()];
        Message { signaled: index % 8 == 7, ..Message::new(kind, 40 * index) }
    });
    // The number after 2^24 - 1 is 0: within the first message, and within later ones of each kind.
    let wrapping = Settings { first_psn: Psn::new(0xff_fffd), ..settings };
    let at_the_wrap = every_kind.map(|kind| Message::new(kind, 5 * 1024 + 1));
    let later = Settings { first_psn: Psn::new(0xff_ffc0), ..settings };
    let across = |kind| (0..12).map(move |_| Message::new(kind, 10 * 1024));
    let mut cases = vec![
        Case::transfer("immediate data", settings, transfer::layout(immediates)),
        Case::transfer("several pieces", settings, transfer::layout(pieces)),
        Case::transfer("16 pieces", settings, transfer::layout(many_pieces)),
        Case::transfer("inline data", bringing, transfer::layout(inline)),
        Case::transfer("one in eight signaled", settings, transfer::layout(unsignaled)),
        Case::transfer("PSN wrap in the first message", wrapping, transfer::layout(at_the_wrap)),
    ];
    for (word, kind) in OPERATIONS {
        let messages = transfer::layout(across(kind));
        cases.push(Case::transfer(format!("PSN wrap amid {word}"), later, messages));
    }
    let shared = Settings { shared_receives: true, ..settings };
    let from_shared = transfer::mixture(12, 200, 20_000);
    cases.push(Case::transfer("all kinds, shared receive queue", shared, from_shared));
    let both = transfer::mixture(11, 200, 20_000);
    let arena = 2 * transfer::extent(&both);
    cases.push(Case::new(
        "all kinds, both ways at once",
        Settings { arena, ..settings },
        move |link| transfer::both_ways(link, &both),
    ));
    cases
}
