//! Vectors that travel with the descriptor, and their results with the answer.

use super::*;

/// A worker that has called for so many elements, which fit a packet, and what it did then.
fn small(call: &CollectiveCall) -> (HostWorker, Vec<Command>) {
    let mut worker = HostWorker::new(CONFIG).unwrap();
    assert!(worker.is_small(call));
    assert!(matches!(worker.poll_command(), Some(Command::Receive(_))));
    worker.start(call).unwrap();
    let commands = core::iter::from_fn(|| next(&mut worker)).collect();
    (worker, commands)
}

#[test]
fn a_small_vector_goes_with_the_descriptor_and_comes_with_the_answer() {
    for mode in [Mode::Write, Mode::Send] {
        let call = CollectiveCall { count: 3, mode, ..CALL };
        let (mut worker, commands) = small(&call);
        let [Command::Store(bytes), Command::Load(source), Command::Send(request)] = commands[..]
        else {
            panic!("{commands:?}");
        };
        assert_eq!(Descriptor::parse(&bytes).map(|it| it.count), Ok(3));
        assert_eq!(source, Piece { key: 1, address: 0x1000, length: 12 });
        let length = DESCRIPTOR_BYTES as u32 + 12;
        assert_eq!(request.pieces, [Piece { key: 9, address: 0x9000, length }]);
        sent(&mut worker, DESCRIPTOR_ID);
        answered(&mut worker, Answer::agreed(0), 12);
        assert_eq!(worker.poll_outcome(), None, "it is not where it belongs yet");
        let to = Piece { key: 2, address: 0x2000, length: 12 };
        let offset = message_offset(0);
        assert_eq!(next(&mut worker), Some(Command::Deliver { offset, to }));
        assert_eq!(next(&mut worker), None);
        assert_eq!(worker.poll_outcome(), Some(Ok(Completed { sequence: 0, bytes: 12 })));
    }
}

#[test]
fn who_has_no_source_sends_the_descriptor_alone_and_who_gets_nothing_an_empty_answer() {
    let call = CollectiveCall { collective: Collective::Broadcast, count: 3, ..CALL };
    let (mut worker, commands) = small(&call);
    let [Command::Store(_), Command::Send(request)] = commands[..] else { panic!("{commands:?}") };
    assert_eq!(request.pieces[0].length, DESCRIPTOR_BYTES as u32);
    answered(&mut worker, Answer::agreed(0), 12);
    assert!(matches!(next(&mut worker), Some(Command::Deliver { .. })));

    let call = CollectiveCall { collective: Collective::Reduce, count: 3, ..CALL };
    let (mut worker, commands) = small(&call);
    assert_eq!(commands.len(), 3);
    sent(&mut worker, DESCRIPTOR_ID);
    answered(&mut worker, Answer::agreed(0), 0);
    assert_eq!(next(&mut worker), None);
    assert!(matches!(worker.poll_outcome(), Some(Ok(_))));
}

#[test]
fn an_answer_with_a_result_of_the_wrong_length_is_an_error() {
    for length in [0, 11, 13, 4096] {
        let (mut worker, _) = small(&CollectiveCall { count: 3, ..CALL });
        answered(&mut worker, Answer::agreed(0), length);
        let outcome = worker.poll_outcome();
        assert!(matches!(outcome, Some(Err(CollectiveError::Protocol(_)))), "{length}");
        assert_eq!(next(&mut worker), None);
    }
}

#[test]
fn an_abort_behind_an_answer_is_not_where_the_result_is() {
    let (mut worker, _) = small(&CollectiveCall { count: 3, ..CALL });
    let mut buffers = Vec::new();
    for _ in 0..3 {
        let mut worker = HostWorker::new(CONFIG).unwrap();
        (worker.posted, worker.consumed) = (buffers.len() as u64, buffers.len() as u64);
        let Some(Command::Receive(request)) = worker.poll_command() else { panic!() };
        buffers.push((request.id & !RECEIVE_ID, request.pieces[0].address - 0x9000));
    }
    assert_eq!(buffers[0], buffers[2]);
    assert_eq!(buffers, [(0, 4096), (1, 8192), (0, 4096)]);
    assert!(8192 + CONFIG.path_mtu.bytes() <= CONTROL_BYTES);

    // What comes next goes to the other one, and until the result is delivered nothing else is posted.
    answered(&mut worker, Answer::agreed(0), 12);
    assert_eq!((worker.posted, worker.consumed), (2, 1));
    assert!(matches!(worker.poll_command(), Some(Command::Deliver { offset: 4096, .. })));
    assert_eq!(worker.poll_command(), None);
    assert_eq!((worker.posted, worker.consumed), (2, 1));
}

#[test]
fn small_is_what_has_no_segments() {
    let worker = HostWorker::new(CONFIG).unwrap();
    // A barrier has no vector, whatever its count.
    let barrier = CollectiveCall { collective: Collective::Barrier, count: 1000, ..CALL };
    assert!(worker.is_small(&barrier));
    for &collective in Collective::ALL {
        for count in [0, 1, 17, 18, 52, 53, u64::MAX / 2] {
            let count = if collective == Collective::Barrier { 0 } else { count };
            let call = CollectiveCall { collective, count, ..CALL };
            let descriptor = worker.descriptor(&call, 0);
            let small = worker.is_small(&call);
            if descriptor.total_bytes(3).is_some() {
                let layout = Layout::new(&descriptor, &worker.cut, 5);
                assert_eq!(small, layout.end() == 5, "{collective} of {count}");
            } else {
                assert!(!small);
            }
        }
    }
}

#[test]
fn a_host_with_several_ranks_gets_their_parts_of_what_comes_with_the_answer() {
    let call = CollectiveCall { collective: Collective::ReduceScatter, count: 3, ..CALL };
    let world = 5;
    for (ranks, parts) in [
        (&[1, 2, 4][..], &[(12, 24), (48, 12)][..]),
        (&[0, 1, 2, 3, 4], &[(0, 60)]),
        (&[0, 4], &[(0, 12), (48, 12)]),
    ] {
        let config = HostConfig { rank: ranks[0], world, ..CONFIG };
        let mut worker = HostWorker::of_ranks(config, ranks.iter().copied().collect()).unwrap();
        worker.start(&call).unwrap();
        while next(&mut worker).is_some() {}
        sent(&mut worker, DESCRIPTOR_ID);
        answered(&mut worker, Answer::agreed(0), 60);
        for (number, &(start, length)) in parts.iter().enumerate() {
            let to = Piece { key: 2, address: 0x2000 + start as u64, length };
            let offset = message_offset(0) + start;
            assert_eq!(next(&mut worker), Some(Command::Deliver { offset, to }), "{ranks:?}");
            // What has begun to be delivered is delivered.
            if number == 0 {
                worker.fail(CollectiveError::Transport(CompletionStatus::Flushed));
            }
        }
        assert_eq!(next(&mut worker), None);
        assert_eq!(worker.poll_outcome(), Some(Ok(Completed { sequence: 0, bytes: 60 })));
    }
}

/// Only of a collective that gives each rank a part do they get parts.
#[test]
fn a_host_with_several_ranks_gets_a_result_that_all_get_in_one_piece() {
    let config = HostConfig { rank: 1, world: 5, ..CONFIG };
    for collective in [Collective::AllReduce, Collective::Broadcast, Collective::AllGather] {
        let mut worker = HostWorker::of_ranks(config, [1, 2, 4].into_iter().collect()).unwrap();
        worker.start(&CollectiveCall { collective, count: 3, ..CALL }).unwrap();
        while next(&mut worker).is_some() {}
        sent(&mut worker, DESCRIPTOR_ID);
        let length = if collective == Collective::AllGather { 60 } else { 12 };
        answered(&mut worker, Answer::agreed(0), length);
        let to = Piece { key: 2, address: 0x2000, length };
        let delivery = Command::Deliver { offset: message_offset(0), to };
        assert_eq!(next(&mut worker), Some(delivery), "{collective}");
        assert_eq!(next(&mut worker), None);
    }
}
