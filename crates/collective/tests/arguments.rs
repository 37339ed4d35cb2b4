//! What is refused before anything is sent.

mod common;

use common::{Cluster, each, leave};
use millstream_collective::{Call, Collective, CollectiveError, ReduceOperation};

use ReduceOperation::Sum;

#[test]
fn lengths_that_do_not_fit_are_told_and_the_communicator_goes_on() {
    let cluster = Cluster::start(1);
    let mut ranks = cluster.group("lengths", 2);
    each(&mut ranks, |communicator| {
        let lengths = |collective, source_length, destination_length| {
            Err(CollectiveError::Lengths {
                collective,
                world: 2,
                source_length,
                destination_length,
            })
        };
        let rank = communicator.rank();
        let (one, two) = (&[1_i32; 1][..], &[1_i32; 2][..]);
        let result = &mut [0; 3][..];
        let wrong = communicator.reduce(one, result, Sum, rank);
        assert_eq!(wrong, lengths(Collective::Reduce, 1, 3));
        let wrong = communicator.broadcast_from(two, result, rank);
        assert_eq!(wrong, lengths(Collective::Broadcast, 2, 3));
        let wrong = communicator.reduce_scatter(one, result, Sum);
        assert_eq!(wrong, lengths(Collective::ReduceScatter, 1, 3));
        let wrong = communicator.all_gather(one, result);
        assert_eq!(wrong, lengths(Collective::AllGather, 1, 3));
        let parts = |collective| Err(CollectiveError::Parts { collective, world: 2, length: 3 });
        let wrong = communicator.reduce_scatter_in_place(result, Sum);
        assert_eq!(wrong, parts(Collective::ReduceScatter));
        assert_eq!(communicator.all_gather_in_place(result), parts(Collective::AllGather));
        let buffers = [1, 3].map(|length| communicator.allocate::<i32>(length).unwrap());
        let [source, mut destination] = buffers;
        let wrong = communicator.call_buffers(Call::AllGather, &source, &mut destination);
        assert_eq!(wrong, lengths(Collective::AllGather, 1, 3));
        let wrong = communicator.call_buffer_in_place(Call::AllGather, &mut destination);
        assert_eq!(wrong, parts(Collective::AllGather));
        let (destination, wrong) = communicator.start(Call::AllGather, destination).unwrap_err();
        assert_eq!(Err(wrong), parts(Collective::AllGather));
        assert_eq!(destination.len(), 3);
        let mut vector = [1];
        communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
        assert_eq!(vector, [2]);
    });
    leave(ranks);
}

#[test]
fn a_root_that_is_no_rank_is_told_with_the_number_of_ranks() {
    let cluster = Cluster::start(1);
    let mut ranks = cluster.group("roots", 2);
    each(&mut ranks, |communicator| {
        let wrong = Err(CollectiveError::Root { root: 2, world: 2 });
        assert_eq!(communicator.reduce(&[1], &mut [0], Sum, 2), wrong);
        assert_eq!(communicator.reduce_in_place(&mut [1], Sum, 2), wrong);
        assert_eq!(communicator.broadcast(&mut [1], 2), wrong);
        assert_eq!(communicator.broadcast_from(&[1], &mut [0], 2), wrong);
        let mut vector = [1];
        communicator.all_reduce_in_place(&mut vector, Sum).unwrap();
        assert_eq!(vector, [2]);
    });
    let text = ranks[0].broadcast(&mut [1], 7).unwrap_err().to_string();
    assert_eq!(text, "the root 7 is no rank: with 2 ranks, they are 0 to 1");
    leave(ranks);
}
