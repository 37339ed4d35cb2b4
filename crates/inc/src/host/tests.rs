//! A worker by itself: its calls, what it sends, and what comes.

use super::*;
use crate::abort::Violation;
use crate::{DataType, Mode, ReduceOperation};

mod halted;
mod small;

const CONFIG: HostConfig = HostConfig {
    segment_bytes: 16,
    window: 2,
    control_key: 9,
    control_address: 0x9000,
    rank: 1,
    world: 3,
    path_mtu: Mtu::B256,
};

const CALL: CollectiveCall = CollectiveCall {
    collective: Collective::AllReduce,
    root: 0,
    mode: Mode::Write,
    source_key: 1,
    source_address: 0x1000,
    destination_key: 2,
    destination_address: 0x2000,
    stripe: crate::Stripe::WHOLE,
    count: 0,
    data_type: DataType::Int32,
    operation: ReduceOperation::Sum,
};

/// No message.
const fn nothing(_: usize) -> [u8; ABORT_BYTES] {
    [0; ABORT_BYTES]
}

/// A worker that has posted its receives, and knows only segments.
fn worker() -> HostWorker {
    let mut worker = HostWorker::new(CONFIG).unwrap();
    worker.cut.small_bytes = 0;
    // For an agreement or an abort: more is not called yet.
    assert!(matches!(worker.poll_command(), Some(Command::Receive(_))));
    assert_eq!(worker.poll_command(), None);
    worker
}

/// A worker that has called for so many elements, and sent its descriptor.
fn announced(count: u64) -> HostWorker {
    let mut worker = worker();
    worker.start(&CollectiveCall { count, ..CALL }).unwrap();
    assert!(matches!(next(&mut worker), Some(Command::Store(_))));
    assert_eq!(next_send(&mut worker), Some((DESCRIPTOR_ID, 0x9000, DESCRIPTOR_BYTES as u64)));
    worker
}

/// Id, local address and length of the next send.
fn next_send(worker: &mut HostWorker) -> Option<(u64, u64, u64)> {
    match next(worker)? {
        Command::Send(request) => {
            let [piece] = request.pieces;
            Some((request.id, piece.address, piece.length.into()))
        }
        other => panic!("{other:?} instead of a send"),
    }
}

fn completion(id: u64, operation: CompletionOperation) -> Completion {
    Completion::new(id, millstream_wire::Qpn::new(2), CompletionStatus::Success, operation)
}

fn sent(worker: &mut HostWorker, id: u64) {
    worker.handle_completion(&completion(id, CompletionOperation::Send), nothing);
}

/// The next thing to do that is no receive.
fn next(worker: &mut HostWorker) -> Option<Command> {
    loop {
        match worker.poll_command() {
            Some(Command::Receive(_)) => {}
            other => return other,
        }
    }
}

/// A message of the switch comes.
fn answered(worker: &mut HostWorker, answer: Answer, length: u32) {
    let operation = match answer {
        Answer::Result(_) => CompletionOperation::ReceiveWrite,
        _ => CompletionOperation::Receive,
    };
    let immediate = Some(answer.to_immediate());
    let completion = Completion { length, immediate, ..completion(RECEIVE_ID, operation) };
    worker.handle_completion(&completion, nothing);
}

#[test]
fn a_window_of_segments_ahead_of_the_results() {
    // 18 elements are 4 segments of 16 bytes and one of 8.
    let mut worker = announced(18);
    assert_eq!(next_send(&mut worker), Some((0, 0x1000, 16)));
    assert_eq!(next_send(&mut worker), Some((1, 0x1010, 16)));
    assert_eq!(next(&mut worker), None);
    // Acknowledgements are no results.
    [DESCRIPTOR_ID, 0, 1].into_iter().for_each(|id| sent(&mut worker, id));
    assert_eq!(next(&mut worker), None);
    answered(&mut worker, Answer::agreed(0), 0);
    assert_eq!(next(&mut worker), None);
    answered(&mut worker, Answer::result(0), 16);
    assert_eq!(next_send(&mut worker), Some((2, 0x1020, 16)));
    assert_eq!(next(&mut worker), None);
    answered(&mut worker, Answer::result(1), 16);
    answered(&mut worker, Answer::result(2), 16);
    assert_eq!(next_send(&mut worker), Some((3, 0x1030, 16)));
    assert_eq!(next_send(&mut worker), Some((4, 0x1040, 8)));
    answered(&mut worker, Answer::result(3), 16);
    assert_eq!(worker.progress(), Some((0, 4, 5)));
    answered(&mut worker, Answer::result(4), 8);
    // The buffers are in use until what was sent is acknowledged.
    assert_eq!(worker.poll_outcome(), None);
    [2, 3, 4].into_iter().for_each(|id| sent(&mut worker, id));
    assert_eq!(worker.poll_outcome(), Some(Ok(Completed { sequence: 0, bytes: 72 })));
    assert_eq!(worker.poll_outcome(), None);

    // Numbers go on where they were.
    assert_eq!(worker.start(&CollectiveCall { count: 1, ..CALL }), Ok(1));
    assert!(matches!(next(&mut worker), Some(Command::Store(_))));
    assert_eq!(next_send(&mut worker), Some((DESCRIPTOR_ID, 0x9000, DESCRIPTOR_BYTES as u64)));
    assert_eq!(next_send(&mut worker), Some((5, 0x1000, 4)));
}

#[test]
fn the_destination_travels_with_the_data() {
    let mut worker = announced(8);
    assert!(next_send(&mut worker).is_some());
    let Some(Command::Send(request)) = next(&mut worker) else { panic!() };
    let wanted = SendOperation::Write { remote_address: 0x2010, remote_key: 2, immediate: None };
    assert_eq!(request.operation, wanted);
}

#[test]
fn the_descriptor_is_what_was_called() {
    let mut worker = worker();
    worker.start(&CollectiveCall { count: 3, ..CALL }).unwrap();
    let Some(Command::Store(bytes)) = next(&mut worker) else { panic!() };
    let descriptor = Descriptor::parse(&bytes).unwrap();
    assert_eq!((descriptor.sequence, descriptor.count), (0, 3));
    assert_eq!(descriptor.collective, Collective::AllReduce);
}

#[test]
fn nothing_but_an_agreement_for_nothing() {
    let mut worker = announced(0);
    assert_eq!(next(&mut worker), None);
    sent(&mut worker, DESCRIPTOR_ID);
    assert_eq!(worker.poll_outcome(), None);
    answered(&mut worker, Answer::agreed(0), 0);
    assert_eq!(worker.poll_outcome(), Some(Ok(Completed { sequence: 0, bytes: 0 })));
}

#[test]
fn never_more_sends_than_the_queue_holds() {
    let mut worker = announced(1000);
    answered(&mut worker, Answer::agreed(0), 0);
    // Results come, acknowledgements do not.
    let mut posted = 1;
    for result in 0..10 {
        while next_send(&mut worker).is_some() {
            posted += 1;
        }
        if result < posted - 1 {
            answered(&mut worker, Answer::result(result.into()), 16);
        }
    }
    assert_eq!(posted, worker.required_send_requests());
    sent(&mut worker, DESCRIPTOR_ID);
    assert!(next_send(&mut worker).is_some());
    assert!(next_send(&mut worker).is_none());
}

#[test]
fn answers_out_of_turn_are_errors() {
    let result = |segment| (Answer::result(segment), 16);
    let agreed = |sequence| (Answer::agreed(sequence), 0);
    for answers in [
        vec![result(0)],
        vec![agreed(1)],
        vec![(Answer::agreed(0), 1)],
        vec![agreed(0), agreed(0)],
        vec![agreed(0), result(1)],
        // Longer than the segment, or nothing.
        vec![agreed(0), (Answer::result(0), 17)],
        vec![agreed(0), (Answer::result(0), 0)],
        vec![agreed(0), result(0), result(0)],
        vec![agreed(0), result(0), result(1), result(2)],
        // No message of an abort.
        vec![(Answer::Aborted, 0)],
        vec![(Answer::Aborted, ABORT_BYTES as u32)],
        vec![(Answer::Aborted, u32::MAX)],
    ] {
        let mut worker = announced(1000);
        next_send(&mut worker).unwrap();
        next_send(&mut worker).unwrap();
        for &(answer, length) in &answers {
            assert_eq!(worker.failure(), None, "{answers:?}");
            let operation = match answer {
                Answer::Result(_) => CompletionOperation::ReceiveWrite,
                _ => CompletionOperation::Receive,
            };
            let immediate = Some(answer.to_immediate());
            let completion = Completion { length, immediate, ..completion(RECEIVE_ID, operation) };
            worker.handle_completion(&completion, nothing);
        }
        let outcome = worker.poll_outcome();
        assert!(matches!(outcome, Some(Err(CollectiveError::Protocol(_)))), "{answers:?}");
        assert_eq!(next(&mut worker), None);
    }
    for immediate in [None, Some(u32::MAX)] {
        let mut worker = announced(1);
        let completion =
            Completion { immediate, ..completion(RECEIVE_ID, CompletionOperation::Receive) };
        worker.handle_completion(&completion, nothing);
        assert!(matches!(worker.poll_outcome(), Some(Err(CollectiveError::Protocol(_)))));
    }
}

#[test]
fn the_first_error_that_says_something_is_the_error() {
    let broken = |status| CollectiveError::Transport(status);
    let fail = |worker: &mut HostWorker, status| {
        let completion = Completion { status, ..completion(0, CompletionOperation::Write) };
        worker.handle_completion(&completion, nothing);
    };
    let mut worker = announced(1000);
    fail(&mut worker, CompletionStatus::Flushed);
    fail(&mut worker, CompletionStatus::RetryExceeded);
    fail(&mut worker, CompletionStatus::RemoteAccess);
    let wanted = broken(CompletionStatus::RetryExceeded);
    assert_eq!(worker.poll_outcome(), Some(Err(wanted)));
    assert_eq!(worker.failure(), Some(wanted));
    assert_eq!(worker.start(&CALL), Err(StartError::Failed(wanted)));

    // Told why before the connection went down.
    let mut worker = announced(1000);
    let abort = Abort::Violation { rank: 3, violation: Violation::Window };
    let message = Completion {
        length: ABORT_BYTES as u32,
        immediate: Some(Answer::Aborted.to_immediate()),
        ..completion(RECEIVE_ID, CompletionOperation::Receive)
    };
    worker.handle_completion(&message, |offset| {
        assert_eq!(offset, message_offset(0));
        abort.to_bytes()
    });
    fail(&mut worker, CompletionStatus::Flushed);
    assert_eq!(worker.poll_outcome(), Some(Err(abort.into())));
}

#[test]
fn an_abort_of_a_kind_that_is_not_known_is_an_error_too() {
    let lost = Abort::SwitchBelowLost { rank: 2 };
    for (kind, is_known) in [(7, true), (0, false), (8, false), (u8::MAX, false)] {
        let mut worker = announced(1000);
        let message = Completion {
            length: ABORT_BYTES as u32,
            immediate: Some(Answer::Aborted.to_immediate()),
            ..completion(RECEIVE_ID, CompletionOperation::Receive)
        };
        worker.handle_completion(&message, |_| {
            let mut bytes = lost.to_bytes();
            bytes[5] = kind;
            bytes
        });
        let outcome = worker.poll_outcome();
        let is_right = match outcome {
            Some(Err(CollectiveError::Aborted(abort))) => is_known && abort == lost,
            Some(Err(CollectiveError::Protocol(_))) => !is_known,
            _ => false,
        };
        assert!(is_right, "kind {kind}: {outcome:?}");
    }
}

#[test]
fn calls_that_cannot_be_are_refused() {
    let mut worker = worker();
    let call =
        CollectiveCall { data_type: DataType::Float32, operation: ReduceOperation::BitOr, ..CALL };
    assert!(matches!(worker.start(&call), Err(StartError::Unsupported { .. })));
    for (source_address, count) in [(0, u64::MAX), (0, 1 << 47), (u64::MAX - 3, 1)] {
        let call = CollectiveCall { source_address, count, ..CALL };
        assert!(matches!(worker.start(&call), Err(StartError::TooLong { .. })), "{count}");
    }
    assert_eq!(worker.start(&CALL), Ok(0));
    assert_eq!(worker.start(&CALL), Err(StartError::Busy(0)));
    // Whether one can be started after it is known all the same.
    assert_eq!(worker.check(&CALL), Ok(()));
    assert!(matches!(worker.check(&call), Err(StartError::Unsupported { .. })));
    assert!(HostWorker::new(HostConfig { window: 0, ..CONFIG }).is_err());
    assert!(HostWorker::new(HostConfig { window: MAX_WINDOW + 1, ..CONFIG }).is_err());
    assert!(HostWorker::new(HostConfig { segment_bytes: 0, ..CONFIG }).is_err());
    assert!(HostWorker::new(HostConfig { segment_bytes: 1001, ..CONFIG }).is_err());
}

#[test]
fn a_probe_is_sent_only_when_silence_could_mean_death() {
    let mut worker = worker();
    worker.probe();
    assert_eq!(next(&mut worker), None);
    let mut worker = announced(4);
    assert_eq!(next_send(&mut worker), Some((0, 0x1000, 16)));
    worker.probe();
    assert_eq!(next(&mut worker), None);
    sent(&mut worker, DESCRIPTOR_ID);
    sent(&mut worker, 0);
    assert_eq!(next(&mut worker), None);
    worker.probe();
    assert_eq!(next_send(&mut worker), Some((PROBE_ID, 0, 0)));
    assert_eq!(next(&mut worker), None);
}

#[test]
fn receives_are_as_many_as_answers_are_owed() {
    // 18 elements: five segments, of which two may be under way.
    let mut worker = announced(18);
    let mut count = 1;
    let mut drain = |worker: &mut HostWorker| loop {
        match worker.poll_command() {
            Some(Command::Receive(_)) => count += 1,
            Some(_) => {}
            None => break count,
        }
    };
    let mut worker_again = HostWorker::new(CONFIG).unwrap();
    assert_eq!(drain(&mut worker_again), 2, "one when nothing is called");
    drain(&mut worker);
    for segment in 0..5 {
        if segment == 0 {
            answered(&mut worker, Answer::agreed(0), 0);
        }
        drain(&mut worker);
        answered(&mut worker, Answer::result(segment), if segment == 4 { 8 } else { 16 });
    }
    drain(&mut worker);
    // Of the agreement, five answers, and what comes when the call is over.
    assert_eq!((worker.posted, worker.consumed), (7, 6));
}

#[test]
fn requests_are_as_many_as_a_window_needs() {
    for (window, sends, receives) in [(1, 3, 3), (2, 5, 4), (8, 17, 10), (4096, 8193, 4098)] {
        let config = HostConfig { window, ..CONFIG };
        let worker = HostWorker::new(config).unwrap();
        assert_eq!(worker.required_send_requests(), sends);
        assert_eq!(worker.required_receive_requests(), receives);
    }
}

/// A message for each segment alone would cost as much as the data of others.
#[test]
fn who_has_nothing_says_so_for_half_a_window_at_once() {
    let mut worker = HostWorker::new(HostConfig { window: 4, ..CONFIG }).unwrap();
    worker.cut.small_bytes = 0;
    // 44 elements are 11 segments.
    let call = CollectiveCall { collective: Collective::Broadcast, count: 44, ..CALL };
    worker.start(&call).unwrap();
    let mut credits = |results: core::ops::Range<u64>| {
        results.clone().for_each(|segment| answered(&mut worker, Answer::result(segment), 16));
        let sends = core::iter::from_fn(|| next(&mut worker));
        let credits: Vec<_> = sends
            .filter_map(|command| match command {
                Command::Send(SendRequest {
                    operation: SendOperation::Send { immediate: Some(immediate) },
                    ..
                }) => Answer::from_immediate(immediate),
                _ => None,
            })
            .collect();
        if results.start == 0 && results.end == 0 {
            answered(&mut worker, Answer::agreed(0), 0);
        }
        credits
    };
    assert_eq!(credits(0..0), [Answer::credit(4)]);
    assert_eq!(credits(0..1), []);
    assert_eq!(credits(1..2), [Answer::credit(6)]);
    assert_eq!(credits(2..5), [Answer::credit(9)]);
    assert_eq!(credits(5..6), []);
    // The last ones do not wait for more.
    assert_eq!(credits(6..7), [Answer::credit(11)]);
}

#[test]
fn a_timeout_counts_from_the_start_of_its_call() {
    let mut worker = announced(8);
    while next_send(&mut worker).is_some() {}
    answered(&mut worker, Answer::agreed(0), 0);
    (0..2).for_each(|segment| answered(&mut worker, Answer::result(segment), 16));
    (0..3).for_each(|id| sent(&mut worker, id));
    assert!(worker.poll_outcome().is_some());
    let timed_out =
        |sequence, results, segments| CollectiveError::TimedOut { sequence, results, segments };
    assert_eq!(worker.timed_out(), timed_out(0, 0, 0));
    worker.start(&CollectiveCall { count: 12, ..CALL }).unwrap();
    while next(&mut worker).is_some() {}
    assert_eq!(worker.timed_out(), timed_out(1, 0, 3));
    answered(&mut worker, Answer::agreed(1), 0);
    answered(&mut worker, Answer::result(2), 16);
    assert_eq!(worker.timed_out(), timed_out(1, 1, 3));
    assert_eq!(worker.progress(), Some((1, 1, 3)));
}

#[test]
fn a_result_in_send_mode_is_a_whole_segment() {
    for (length, right) in [(16, true), (15, false), (17, false), (0, false), (1, false)] {
        let mut worker = worker();
        worker.start(&CollectiveCall { count: 4, mode: Mode::Send, ..CALL }).unwrap();
        while next(&mut worker).is_some() {}
        answered(&mut worker, Answer::agreed(0), 0);
        let immediate = Some(Answer::result(0).to_immediate());
        let received = completion(RECEIVE_ID, CompletionOperation::Receive);
        worker.handle_completion(&Completion { length, immediate, ..received }, nothing);
        let refused = matches!(worker.failure(), Some(CollectiveError::Protocol(_)));
        assert_eq!((worker.failure().is_none(), refused), (right, !right), "{length}");
    }
}

#[test]
fn only_segments_are_told_by_the_ids_of_sends() {
    for segment in [0, 5, DESCRIPTOR_ID - 1] {
        assert_eq!(HostWorker::segment_of(segment), Some(segment));
    }
    assert_eq!(HostWorker::segment_of(DESCRIPTOR_ID), None);
}

#[test]
fn a_worker_for_one_rank_is_that_of_the_rank() {
    let of = |ranks: &[u32]| HostWorker::of_ranks(CONFIG, ranks.iter().copied().collect()).unwrap();
    assert_eq!((of(&[]).ranks, of(&[1]).ranks), (None, None));
    assert_eq!(of(&[1, 2]).ranks, Some([1, 2].into_iter().collect()));
}
