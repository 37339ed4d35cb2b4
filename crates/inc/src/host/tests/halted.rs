//! What a worker says when it has failed, which the others go by when they make up for what is missing.

use super::*;

const ERROR: CollectiveError = CollectiveError::Transport(CompletionStatus::RetryExceeded);

/// The bytes of so many elements are 13 segments of 16 bytes and one of 4, and do not fit a packet.
const COUNT: u64 = 53;
const SEGMENTS: u64 = 14;

/// A worker whose first call is over.
fn after_a_call() -> HostWorker {
    let mut worker = HostWorker::new(CONFIG).unwrap();
    worker.start(&CollectiveCall { count: COUNT, ..CALL }).unwrap();
    while next(&mut worker).is_some() {}
    sent(&mut worker, DESCRIPTOR_ID);
    answered(&mut worker, Answer::agreed(0), 0);
    for segment in 0..SEGMENTS {
        while next(&mut worker).is_some() {}
        sent(&mut worker, segment);
        answered(&mut worker, Answer::result(segment), if segment < 13 { 16 } else { 4 });
    }
    assert!(matches!(worker.poll_outcome(), Some(Ok(_))));
    worker
}

#[test]
fn of_segments_it_says_how_many_results_of_the_call_have_come() {
    for results in 0..=2 {
        let mut worker = after_a_call();
        worker.start(&CollectiveCall { count: COUNT, ..CALL }).unwrap();
        while next(&mut worker).is_some() {}
        answered(&mut worker, Answer::agreed(1), 0);
        for segment in SEGMENTS..SEGMENTS + results {
            answered(&mut worker, Answer::result(segment), 16);
        }
        assert_eq!(worker.halted(), None);
        worker.fail(ERROR);
        let next_segment = SEGMENTS + results;
        let halted = Halted { number: 1, results, segments: SEGMENTS, next_segment };
        assert_eq!(worker.halted(), Some(halted));
        // What comes later changes it no more.
        answered(&mut worker, Answer::result(SEGMENTS + results), 16);
        assert_eq!(worker.halted(), Some(halted));
    }
}

#[test]
fn of_a_small_vector_it_says_whether_its_result_was_delivered() {
    for (comes, delivered, results) in [(false, false, 0), (true, false, 0), (true, true, 1)] {
        let mut worker = after_a_call();
        worker.start(&CollectiveCall { count: 3, ..CALL }).unwrap();
        while next(&mut worker).is_some() {}
        if comes {
            answered(&mut worker, Answer::agreed(1), 12);
        }
        if delivered {
            assert!(matches!(next(&mut worker), Some(Command::Deliver { .. })));
        }
        assert_eq!(worker.poll_outcome(), None, "what it has sent is not acknowledged");
        worker.fail(ERROR);
        let halted = Halted { number: 1, results, segments: 0, next_segment: SEGMENTS };
        assert_eq!(worker.halted(), Some(halted));
    }
}

#[test]
fn between_calls_nothing_is_under_way() {
    let mut worker = after_a_call();
    worker.fail(ERROR);
    assert_eq!((worker.halted(), worker.poll_outcome()), (None, None));
}

#[test]
fn the_end_of_a_call_is_returned_once() {
    let vague = CollectiveError::Transport(CompletionStatus::Flushed);
    let mut worker = announced(1000);
    worker.fail(vague);
    assert_eq!(worker.poll_outcome(), Some(Err(vague)));
    // The better reason comes too late for the call.
    worker.fail(ERROR);
    assert_eq!((worker.failure(), worker.poll_outcome()), (Some(ERROR), None));
}
