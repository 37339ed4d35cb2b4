//! Responses that were never asked for, contradict the request, or come in storms.

mod common;

use std::time::Duration;

use common::forge::Forge;
use common::{Options, Pair, pattern, piece};
use millstream_roce::{CompletionStatus, Counters, Node, QueuePairState, SendOperation};
use millstream_wire::{NakCode, Opcode, Syndrome};

const LOCAL: u64 = 0x1000_0000;
const REMOTE: u64 = 0x2000_0000_0000;
const FIRST: u32 = 100;
const SEQUENCE: Syndrome = Syndrome::Nak(NakCode::PsnSequenceError);

/// Host 0 with requests whose packets have left and met nobody.
struct Victim {
    pair: Pair,
    key: u32,
}

impl Victim {
    fn with(options: Options, operations: &[SendOperation], length: usize) -> Self {
        let mut pair = Pair::with(Options { psn: [FIRST, 200], ..options });
        let key = pair.register(0, LOCAL, pattern(length + 16, 4));
        for (&operation, id) in operations.iter().zip(1..) {
            pair.post(0, id, operation, &[piece(key, LOCAL, length)]);
        }
        pair.answers(0);
        Self { pair, key }
    }

    fn new(operations: &[SendOperation], length: usize) -> Self {
        Self::with(Options::default(), operations, length)
    }

    fn respond(&mut self, opcode: Opcode, psn: u32, syndrome: Syndrome, payload: &[u8]) {
        let mut forge = Forge::new(&self.pair, 0, opcode, psn).payload(payload);
        if opcode.has_aeth() {
            forge = forge.syndrome(syndrome);
        }
        forge.inject(&mut self.pair);
    }

    fn acknowledge(&mut self, psn: u32, syndrome: Syndrome) {
        self.respond(Opcode::RcAcknowledge, psn, syndrome, &[]);
    }

    fn ends(&mut self) -> Vec<(u64, CompletionStatus)> {
        self.pair.poll(0);
        self.pair.completions(0).iter().map(|c| (c.id, c.status)).collect()
    }

    /// The PSNs that go out now.
    fn sent(&mut self) -> Vec<u32> {
        self.pair.answers(0).iter().map(|answer| answer.psn).collect()
    }

    fn counters(&self) -> Counters {
        self.pair.counters(0)
    }

    /// Moves time to the next deadline and past it.
    fn wait(&mut self) {
        let endpoint = &mut self.pair.hosts[0].endpoint;
        self.pair.now = endpoint.poll_timeout().unwrap();
        endpoint.handle_timeout(self.pair.now);
    }
}

/// What goes out next, however long that takes.
fn next_sent(victim: &mut Victim) -> Vec<u32> {
    loop {
        let sent = victim.sent();
        if !sent.is_empty() {
            return sent;
        }
        victim.wait();
    }
}

fn post(victim: &mut Victim, id: u64) {
    let key = victim.key;
    victim.pair.post(0, id, SEND, &[piece(key, LOCAL, 64)]);
}

const fn write() -> SendOperation {
    SendOperation::Write { remote_address: REMOTE, remote_key: 1, immediate: None }
}

const fn fetch_add() -> SendOperation {
    SendOperation::FetchAdd { remote_address: REMOTE, remote_key: 1, add: 1 }
}

const fn read() -> SendOperation {
    SendOperation::Read { remote_address: REMOTE, remote_key: 1 }
}

const SEND: SendOperation = SendOperation::Send { immediate: None };

#[test]
fn ghosts_only_count() {
    let syndromes = (0..=u8::MAX).map(Syndrome::from_byte);
    for (operations, outstanding) in [(&[][..], 0), (&[write(), SEND, read()][..], 9)] {
        for syndrome in syndromes.clone() {
            let mut victim = Victim::new(operations, 700);
            let before = victim.pair.snapshot(0, &[victim.key]);
            let psns = [
                FIRST - 1,
                FIRST - 50,
                FIRST + outstanding,
                FIRST + outstanding + 1,
                FIRST + 1000,
                FIRST + (1 << 23) - 1,
                FIRST + (1 << 23),
                FIRST + (1 << 23) + 1,
            ];
            for psn in psns {
                for opcode in [
                    Opcode::RcAcknowledge,
                    Opcode::RcAtomicAcknowledge,
                    Opcode::RcReadResponseOnly,
                    Opcode::RcReadResponseFirst,
                    Opcode::RcReadResponseMiddle,
                ] {
                    victim.respond(opcode, psn, syndrome, &[]);
                    assert_eq!(victim.sent(), [0; 0], "{syndrome:?} {psn} {opcode:?}");
                }
            }
            assert_eq!(victim.pair.snapshot(0, &[victim.key]), before, "{syndrome:?}");
            assert_eq!(victim.counters().dropped_response, psns.len() as u64 * 5);
        }
    }
}

#[test]
fn each_refusal_has_its_status() {
    use CompletionStatus as S;
    for (code, status) in [
        (NakCode::InvalidRequest, S::RemoteInvalidRequest),
        (NakCode::RemoteAccessError, S::RemoteAccess),
        (NakCode::RemoteOperationalError, S::RemoteOperational),
    ] {
        // The second of three requests is refused; its NAK acknowledges the first.
        let mut victim = Victim::new(&[write(), SEND, write()], 700);
        victim.acknowledge(FIRST + 4, Syndrome::Nak(code));
        assert_eq!(victim.ends(), [(1, S::Success), (2, status), (3, S::Flushed)]);
        assert_eq!(victim.pair.state(0), QueuePairState::Error);
        assert_eq!(victim.sent(), [0; 0]);
    }
}

#[test]
fn reserved_syndromes_are_bad_responses() {
    for byte in 0..=u8::MAX {
        let syndrome = Syndrome::from_byte(byte);
        if matches!(syndrome, Syndrome::Reserved(_)) {
            let mut victim = Victim::new(&[write(), SEND], 700);
            victim.acknowledge(FIRST, syndrome);
            use CompletionStatus as S;
            assert_eq!(victim.ends(), [(1, S::BadResponse), (2, S::Flushed)], "{byte:#x}");
        }
    }
}

#[test]
fn a_storm_of_sequence_naks_goes_back_once() {
    let mut victim = Victim::new(&[write()], 256 * 40);
    for _ in 0..1000 {
        victim.acknowledge(FIRST + 3, SEQUENCE);
    }
    assert_eq!(victim.counters().retransmissions, 1);
    assert_eq!(victim.sent().first(), Some(&(FIRST + 3)));
    for _ in 0..1000 {
        victim.acknowledge(FIRST + 3, SEQUENCE);
        assert_eq!(victim.sent(), [0; 0]);
    }
    assert_eq!(victim.counters().retransmissions, 1);
    // A peer that only ever says so is as good as dead: the retry budget ends it.
    for _ in 0..100 {
        if victim.pair.state(0) == QueuePairState::Error {
            break;
        }
        victim.acknowledge(FIRST + 3, SEQUENCE);
        victim.wait();
        victim.sent();
    }
    assert_eq!(victim.ends(), [(1, CompletionStatus::RetryExceeded)]);
}

/// A NAK of a packet that was sent again is news when it comes a round trip later, and an echo
/// before.
#[test]
fn what_was_sent_again_may_be_lost_again() {
    let mut victim = Victim::new(&[SEND, write()], 256 * 4);
    let round_trip = Duration::from_millis(1);
    victim.pair.now = victim.pair.now + round_trip;
    victim.acknowledge(FIRST, Syndrome::ACK_UNLIMITED);
    victim.acknowledge(FIRST + 3, Syndrome::ACK_UNLIMITED);
    let lost = FIRST + 5;
    victim.acknowledge(lost, SEQUENCE);
    assert_eq!(victim.sent(), [lost, lost + 1, lost + 2]);
    victim.pair.now = victim.pair.now + round_trip / 2;
    victim.acknowledge(lost, SEQUENCE);
    assert_eq!(victim.sent(), [0; 0]);
    victim.pair.now = victim.pair.now + round_trip;
    victim.acknowledge(lost, SEQUENCE);
    assert_eq!(victim.sent(), [lost, lost + 1, lost + 2]);
    assert_eq!((victim.counters().retransmissions, victim.counters().timeouts), (2, 0));
}

/// The oldest fills a gap, and the newest makes the peer say whether there is another.
#[test]
fn silence_is_probed_with_two_packets() {
    let mut victim = Victim::with(Options { timeout: 20, ..Options::default() }, &[SEND], 256 * 9);
    assert_eq!(next_sent(&mut victim), [FIRST, FIRST + 8]);
    // Nothing was lost: the peer is slow.
    victim.acknowledge(FIRST + 8, Syndrome::ACK_UNLIMITED);
    assert_eq!(victim.ends(), [(1, CompletionStatus::Success)]);
    assert_eq!(victim.sent(), [0; 0]);
    // Of one packet there is one.
    post(&mut victim, 2);
    assert_eq!(victim.sent(), [FIRST + 9]);
    assert_eq!(next_sent(&mut victim), [FIRST + 9]);
}

/// What is sent again and lost again stands in a queue that is full: each time less is sent.
#[test]
fn less_is_sent_for_each_loss_of_a_repeat() {
    let options = Options { timeout: 20, ..Options::default() };
    let mut victim = Victim::with(options, &[SEND], 256 * 100);
    let mut sent = 64;
    for _ in 0..6 {
        victim.acknowledge(FIRST, SEQUENCE);
        let repeats = victim.sent();
        assert_eq!(repeats[0], FIRST);
        assert!(repeats.len() < sent && repeats.len() >= 4, "{} after {sent}", repeats.len());
        sent = repeats.len();
        // The silence ends what belongs to this loss.
        victim.wait();
        victim.sent();
        if victim.counters().timeouts >= 3 {
            break;
        }
    }
    assert_eq!(victim.counters().timeouts, 3);
}

#[test]
fn a_storm_of_receiver_not_ready_counts_once_a_wait() {
    let mut victim = Victim::with(Options { rnr_retry: 2, ..Options::default() }, &[SEND], 64);
    let not_ready = Syndrome::ReceiverNotReady { timer: 14 };
    for round in 1..=2 {
        let asked = victim.pair.now;
        for _ in 0..100 {
            victim.acknowledge(FIRST, not_ready);
            assert_eq!(victim.sent(), [0; 0]);
        }
        assert_eq!(victim.ends(), []);
        assert_eq!(victim.counters().retransmissions, round);
        victim.wait();
        // Code 14: 1.28 ms (IBTA table 46).
        assert_eq!(victim.pair.now, asked + Duration::from_micros(1280));
        assert_eq!(victim.sent(), [FIRST]);
    }
    victim.acknowledge(FIRST, not_ready);
    assert_eq!(victim.ends(), [(1, CompletionStatus::ReceiverNotReadyExceeded)]);
}

/// What was sent behind a packet that the peer was not ready for is out of sequence to it, and it
/// may say so (Linux rxe does).
#[test]
fn a_sequence_nak_does_not_cut_a_wait_short() {
    let options = Options { timeout: 8, retry_count: 1, rnr_retry: 1, ..Options::default() };
    let mut victim = Victim::with(options, &[SEND, SEND, SEND], 64);
    // Code 30: 327.68 ms, when the retry budget is 2 ms.
    victim.acknowledge(FIRST, Syndrome::ReceiverNotReady { timer: 30 });
    victim.acknowledge(FIRST, SEQUENCE);
    assert_eq!(victim.sent(), [0; 0]);
    while victim.sent().is_empty() {
        assert_eq!(victim.ends(), []);
        victim.wait();
    }
    assert_eq!(victim.pair.now.nanos(), 327_680_000);
    assert_eq!(victim.counters().timeouts, 0);
    victim.acknowledge(FIRST + 2, Syndrome::ACK_UNLIMITED);
    assert_eq!(victim.ends(), [1, 2, 3].map(|id| (id, CompletionStatus::Success)));
}

/// The time that the peer asked for is not silence: the retry budget starts when it is over.
#[test]
fn a_wait_takes_nothing_from_the_retry_budget() {
    let options = Options { timeout: 8, retry_count: 1, ..Options::default() };
    let mut victim = Victim::with(options, &[SEND], 64);
    victim.acknowledge(FIRST, Syndrome::ReceiverNotReady { timer: 30 });
    assert_eq!(next_sent(&mut victim), [FIRST], "this one is lost");
    assert_eq!(next_sent(&mut victim), [FIRST], "and sent again");
    assert_eq!(victim.ends(), []);
    assert_eq!(victim.counters().timeouts, 1);
}

/// Nor is it a round trip: what is lost later is noticed as soon as before.
#[test]
fn a_wait_is_not_taken_for_the_round_trip() {
    let mut victim = Victim::with(Options { timeout: 20, ..Options::default() }, &[SEND], 64);
    // Code 31: 491.52 ms.
    victim.acknowledge(FIRST, Syndrome::ReceiverNotReady { timer: 31 });
    assert_eq!(next_sent(&mut victim), [FIRST]);
    victim.acknowledge(FIRST, Syndrome::ACK_UNLIMITED);
    post(&mut victim, 2);
    assert_eq!(victim.sent(), [FIRST + 1]);
    let start = victim.pair.now;
    assert_eq!(next_sent(&mut victim), [FIRST + 1]);
    let silence = victim.pair.now.saturating_duration_since(start);
    assert!(silence <= Duration::from_millis(40), "{silence:?}");
}

/// Only packets that were sent once are measured (Karn's rule): the answer that follows a repeat at
/// once is that to the first copy.
#[test]
fn an_answer_to_a_repeat_says_nothing_about_the_round_trip() {
    let mut victim = Victim::with(Options { timeout: 20, ..Options::default() }, &[SEND], 64);
    let first = Duration::from_nanos(victim.pair.hosts[0].endpoint.poll_timeout().unwrap().nanos());
    assert_eq!(next_sent(&mut victim), [FIRST]);
    victim.pair.now = victim.pair.now + Duration::from_micros(1);
    victim.acknowledge(FIRST, Syndrome::ACK_UNLIMITED);
    post(&mut victim, 2);
    assert_eq!(victim.sent(), [FIRST + 1]);
    let start = victim.pair.now;
    assert_eq!(next_sent(&mut victim), [FIRST + 1]);
    assert!(victim.pair.now >= start + first, "as patient as at first");
}

/// Once for each time that the data is asked for: what was under way says the same again, but a
/// repeat that was lost too is noticed without another timeout.
#[test]
fn a_gap_in_read_responses_is_acted_on_once_a_request() {
    let mut victim = Victim::new(&[read()], 700);
    let second = |victim: &mut Victim| {
        let ack = Syndrome::ACK_UNLIMITED;
        victim.respond(Opcode::RcReadResponseMiddle, FIRST + 1, ack, &[0xee; 256]);
        victim.sent()
    };
    assert_eq!(second(&mut victim), [FIRST]);
    assert_eq!(second(&mut victim), [0; 0]);
    assert_eq!(next_sent(&mut victim), [FIRST], "after a timeout");
    assert_eq!(second(&mut victim), [FIRST]);
    assert_eq!(second(&mut victim), [0; 0]);
}

/// Silence counts from when something was sent, not from when the last answer came.
#[test]
fn idleness_is_not_silence() {
    let options = Options { timeout: 10, retry_count: 1, ..Options::default() };
    let mut victim = Victim::with(options, &[SEND], 64);
    victim.acknowledge(FIRST, Syndrome::ACK_UNLIMITED);
    victim.pair.now = victim.pair.now + Duration::from_secs(60);
    let now = victim.pair.now;
    victim.pair.hosts[0].endpoint.handle_timeout(now);
    post(&mut victim, 2);
    assert_eq!(victim.sent(), [FIRST + 1], "this one is lost");
    assert_eq!(next_sent(&mut victim), [FIRST + 1]);
    victim.acknowledge(FIRST + 1, Syndrome::ACK_UNLIMITED);
    assert_eq!(victim.ends(), [1, 2].map(|id| (id, CompletionStatus::Success)));
}

/// The answers that a READ asks for are in flight too.
#[test]
fn a_read_waits_for_room_in_the_window() {
    let options = Options { max_window: 2, ..Options::default() };
    // A window of 8 packets of 256 bytes.
    let mut victim = Victim::with(options, &[SEND], 256 * 5);
    let key = victim.key;
    victim.pair.post(0, 2, read(), &[piece(key, LOCAL, 256 * 4)]);
    assert_eq!(victim.sent(), [0; 0]);
    victim.acknowledge(FIRST, Syndrome::ACK_UNLIMITED);
    assert_eq!(victim.sent(), [FIRST + 5], "4 and 4");
}

#[test]
fn each_message_may_wait_as_often() {
    let options = Options { rnr_retry: 2, ..Options::default() };
    let mut victim = Victim::with(options, &[SEND; 5], 64);
    for psn in FIRST..FIRST + 5 {
        for _ in 0..2 {
            victim.acknowledge(psn, Syndrome::ReceiverNotReady { timer: 1 });
            assert_eq!(next_sent(&mut victim)[0], psn);
        }
        victim.acknowledge(psn, Syndrome::ACK_UNLIMITED);
    }
    assert_eq!(victim.ends(), [1, 2, 3, 4, 5].map(|id| (id, CompletionStatus::Success)));
}

/// The refusal of a request says nothing about a READ before it whose data was lost.
#[test]
fn a_refusal_is_not_put_on_the_read_before_it() {
    let mut victim = Victim::new(&[read(), write()], 700);
    victim.acknowledge(FIRST + 3, Syndrome::Nak(NakCode::RemoteAccessError));
    assert_eq!(victim.ends(), []);
    assert_eq!(victim.sent().first(), Some(&FIRST), "the READ is asked for again");
    for (index, opcode, length) in [
        (0, Opcode::RcReadResponseFirst, 256),
        (1, Opcode::RcReadResponseMiddle, 256),
        (2, Opcode::RcReadResponseLast, 188),
    ] {
        let data = vec![0xee; length];
        victim.respond(opcode, FIRST + index, Syndrome::ACK_UNLIMITED, &data);
    }
    victim.acknowledge(FIRST + 3, Syndrome::Nak(NakCode::RemoteAccessError));
    use CompletionStatus as S;
    assert_eq!(victim.ends(), [(1, S::Success), (2, S::RemoteAccess)]);
}

#[test]
fn an_acknowledgement_ends_a_wait_for_its_packet() {
    let mut victim = Victim::new(&[SEND, SEND], 64);
    victim.acknowledge(FIRST, Syndrome::ReceiverNotReady { timer: 0 });
    // A copy of the packet arrived when the peer was ready.
    victim.acknowledge(FIRST, Syndrome::ACK_UNLIMITED);
    assert_eq!(victim.ends(), [(1, CompletionStatus::Success)]);
    assert_eq!(victim.sent(), [FIRST + 1]);
}

#[test]
fn an_acknowledgement_of_a_read_is_not_its_data() {
    let mut victim = Victim::new(&[read()], 700);
    victim.acknowledge(FIRST + 2, Syndrome::ACK_UNLIMITED);
    assert_eq!(victim.ends(), []);
    assert_eq!(victim.sent(), [FIRST], "asked again");
    assert_eq!(victim.pair.region(0, victim.key), pattern(716, 4));
}

#[test]
fn read_responses_that_contradict_the_request() {
    use Opcode as O;
    let ack = Syndrome::ACK_UNLIMITED;
    type Row = &'static [(u32, Opcode, usize)];
    // A READ of 700 bytes: 256, 256, 188. The last response is the bad one.
    let table: &[(&str, Row)] = &[
        ("too short", &[(0, O::RcReadResponseFirst, 255)]),
        ("empty", &[(0, O::RcReadResponseFirst, 0)]),
        ("longer than the path MTU", &[(0, O::RcReadResponseFirst, 257)]),
        ("all in one", &[(0, O::RcReadResponseOnly, 700)]),
        ("the end too early", &[(0, O::RcReadResponseOnly, 256)]),
        ("the end too early", &[(0, O::RcReadResponseFirst, 256), (1, O::RcReadResponseLast, 256)]),
        ("a start without First", &[(0, O::RcReadResponseMiddle, 256)]),
        (
            "no end",
            &[
                (0, O::RcReadResponseFirst, 256),
                (1, O::RcReadResponseMiddle, 256),
                (2, O::RcReadResponseMiddle, 188),
            ],
        ),
        (
            "a byte too many",
            &[
                (0, O::RcReadResponseFirst, 256),
                (1, O::RcReadResponseMiddle, 256),
                (2, O::RcReadResponseLast, 189),
            ],
        ),
        (
            "a byte too few",
            &[
                (0, O::RcReadResponseFirst, 256),
                (1, O::RcReadResponseMiddle, 256),
                (2, O::RcReadResponseLast, 187),
            ],
        ),
    ];
    for (what, row) in table {
        let mut victim = Victim::new(&[read()], 700);
        for &(index, opcode, payload) in *row {
            assert_eq!(victim.ends(), [], "{what}");
            victim.respond(opcode, FIRST + index, ack, &vec![0xee; payload]);
        }
        assert_eq!(victim.ends(), [(1, CompletionStatus::BadResponse)], "{what}");
        let good = (row.len() - 1) * 256;
        assert_eq!(victim.pair.region(0, victim.key)[good..], pattern(716, 4)[good..], "{what}");
    }
}

#[test]
fn responses_of_the_wrong_kind() {
    let ack = Syndrome::ACK_UNLIMITED;
    // Data for a WRITE, an atomic's answer for a WRITE and for a READ, and data for an atomic.
    for (operation, opcode, payload) in [
        (write(), Opcode::RcReadResponseOnly, 4),
        (write(), Opcode::RcReadResponseMiddle, 256),
        (write(), Opcode::RcAtomicAcknowledge, 0),
        (read(), Opcode::RcAtomicAcknowledge, 0),
        (fetch_add(), Opcode::RcReadResponseOnly, 8),
        (fetch_add(), Opcode::RcReadResponseFirst, 256),
    ] {
        let mut victim = Victim::new(&[operation], 8);
        victim.respond(opcode, FIRST, ack, &vec![0xee; payload]);
        assert_eq!(victim.ends(), [(1, CompletionStatus::BadResponse)], "{opcode:?}");
        assert_eq!(victim.pair.region(0, victim.key), pattern(24, 4));
    }
}

#[test]
fn data_must_come_with_a_positive_answer() {
    for syndrome in [
        SEQUENCE,
        Syndrome::Nak(NakCode::RemoteAccessError),
        Syndrome::ReceiverNotReady { timer: 1 },
        Syndrome::Reserved(0x40),
    ] {
        for (operation, opcode, payload) in [
            (read(), Opcode::RcReadResponseOnly, &b"evil....."[..8]),
            (fetch_add(), Opcode::RcAtomicAcknowledge, &[]),
        ] {
            let mut victim = Victim::new(&[operation], 8);
            victim.respond(opcode, FIRST, syndrome, payload);
            assert_eq!(victim.ends(), [(1, CompletionStatus::BadResponse)], "{syndrome:?}");
            assert_eq!(victim.pair.region(0, victim.key), pattern(24, 4));
        }
    }
}

#[test]
fn an_acknowledgement_has_no_payload() {
    let mut victim = Victim::new(&[write()], 4);
    victim.respond(Opcode::RcAcknowledge, FIRST, Syndrome::ACK_UNLIMITED, &[0; 4]);
    assert_eq!(victim.counters().dropped_malformed, 1);
    assert_eq!(victim.ends(), []);
    assert_eq!(victim.pair.state(0), QueuePairState::ReadyToSend);
}

#[test]
fn a_read_into_memory_that_went_away() {
    let mut victim = Victim::new(&[read(), SEND], 700);
    let key = victim.key;
    victim.pair.hosts[0].endpoint.memory_mut().deregister(key).unwrap();
    let ack = Syndrome::ACK_UNLIMITED;
    victim.respond(Opcode::RcReadResponseFirst, FIRST, ack, &[0xee; 256]);
    use CompletionStatus as S;
    assert_eq!(victim.ends(), [(1, S::LocalProtection), (2, S::Flushed)]);
    // A failed queue pair has nothing to go back for.
    assert_eq!(victim.counters().retransmissions, 0);
}
