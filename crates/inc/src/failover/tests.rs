use super::*;
use crate::{DataType, Mode, ReduceOperation};

const WINDOW: u32 = 2;

fn lost(rank: u32, world: u32, trees: u8) -> Lost {
    lost_of(&[rank], world, trees)
}

/// Of a host with these ranks.
fn lost_of(ranks: &[u32], world: u32, trees: u8) -> Lost {
    let (rank, ranks) = (ranks[0], ranks.iter().copied().collect());
    let (segment_bytes, path_mtu) = (256, Mtu::B256);
    Lost { communicator: 7, rank, ranks, world, trees, segment_bytes, window: WINDOW, path_mtu }
}

fn call(collective: Collective, root: u32, count: u64) -> CollectiveCall {
    CollectiveCall {
        collective,
        data_type: DataType::Int32,
        operation: ReduceOperation::Sum,
        root,
        count,
        stripe: Stripe::WHOLE,
        mode: Mode::Write,
        source_key: 0,
        source_address: 0,
        destination_key: 0,
        destination_address: 0,
    }
}

fn report(started: u64, position: Position) -> Report {
    Report { communicator: 7, started, overwritten: None, positions: [position; MAX_TREES] }
}

/// Numbers that look random (splitmix64), always the same ones.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 27)) % limit
    }
}

/// What was computed by the new trees has this in it: where ranks mix the two, they differ.
const ANEW: u64 = 1 << 60;
const LOST: u64 = u64::MAX;

/// A host with its vectors, an element for each of theirs.
struct Host {
    ranks: Vec<u32>,
    source: Vec<u64>,
    destination: Vec<u64>,
}

impl Host {
    fn new(call: &CollectiveCall, ranks: Vec<u32>, all: usize) -> Self {
        let count = call.count as usize;
        let sum = |index| ranks.iter().map(|&rank| element(rank, index)).sum();
        let whole = |index: usize| match call.collective {
            Collective::AllGather => {
                let rank = (index / count) as u32;
                if ranks.contains(&rank) { element(rank, index) } else { LOST }
            }
            Collective::Broadcast if ranks.contains(&call.root) => element(call.root, index),
            Collective::Broadcast => LOST,
            _ => sum(index),
        };
        let source = match (call.collective, &ranks[..]) {
            (Collective::AllGather, &[only]) => {
                let start = only as usize * count;
                (start..start + count).map(whole).collect()
            }
            _ => (0..all).map(whole).collect(),
        };
        Self { ranks, source, destination: vec![LOST; all] }
    }

    fn lost(&self, world: u32, trees: u8) -> Lost {
        lost_of(&self.ranks, world, trees)
    }

    /// Where it has a part of the whole vector in its destination, if it does.
    fn target(&self, call: &CollectiveCall, index: usize) -> Option<usize> {
        let count = call.count as usize;
        let owner = index.checked_div(count).unwrap_or_default() as u32;
        match (call.collective, &self.ranks[..]) {
            (Collective::Reduce, ranks) => ranks.contains(&call.root).then_some(index),
            (Collective::ReduceScatter, &[only]) => (owner == only).then(|| index % count),
            (Collective::ReduceScatter, ranks) => ranks.contains(&owner).then_some(index),
            (Collective::Barrier, _) => None,
            _ => Some(index),
        }
    }
}

/// The elements of the whole vector.
fn element(rank: u32, index: usize) -> u64 {
    (u64::from(rank) << 32) + index as u64 + 1
}

/// What the element of the whole vector is to be, computed by the lost tree.
fn result(call: &CollectiveCall, world: u32, index: usize) -> u64 {
    match call.collective {
        Collective::Broadcast => element(call.root, index),
        Collective::AllGather => element((index as u64 / call.count) as u32, index),
        _ => (0..world).map(|rank| element(rank, index)).sum(),
    }
}

/// Does the repairs of all hosts, and gives the whole vectors that they have as results.
fn repair(call: &CollectiveCall, hosts: &mut [Host], lists: &[Vec<Repair>]) {
    for at in 0..lists[0].len() {
        let repairs: Vec<Repair> = lists.iter().map(|list| list[at]).collect();
        let Repair { collective, root, count, .. } = repairs[0];
        let same = |it: &Repair| (it.collective, it.root, it.count) == (collective, root, count);
        assert!(repairs.iter().all(same), "{call:?}: {repairs:?}");
        let mut combined = vec![0; count as usize];
        for (repair, host) in repairs.iter().zip(&*hosts) {
            let reads = collective != Collective::Broadcast || host.ranks.contains(&root);
            assert_eq!(repair.read.is_some(), reads, "{call:?}: {repair:?}");
            let Some((side, offset)) = repair.read else { continue };
            let vector = if side == Side::Source { &host.source } else { &host.destination };
            let start = offset as usize / 4;
            for (sum, &it) in combined.iter_mut().zip(&vector[start..start + count as usize]) {
                assert_ne!(it, LOST, "{call:?}: {repair:?} of what is not there");
                *sum += it;
            }
        }
        let anew = if collective == Collective::Broadcast { 0 } else { ANEW };
        for (repair, host) in repairs.iter().zip(&mut *hosts) {
            let Some(offset) = repair.write else { continue };
            for (at, &it) in (offset as usize / 4..).zip(&combined) {
                host.destination[at] = it + anew;
            }
        }
    }
}

/// Each rank is a host, or several are one.
fn draw_hosts(random: &mut Random, world: u32, several: bool) -> Vec<Vec<u32>> {
    let count = if several { 1 + random.below(world.into()) } else { world.into() };
    let mut hosts: Vec<Vec<u32>> = vec![Vec::new(); count as usize];
    for rank in 0..world {
        let host = if several { random.below(count) } else { rank.into() };
        hosts[host as usize].push(rank);
    }
    hosts.retain(|ranks| !ranks.is_empty());
    hosts
}

/// One call that hosts have done more or less of, each tree as far as windows allow.
fn try_one(random: &mut Random, collective: Collective, (world, trees): (u32, u8), count: u64) {
    let root = random.below(world.into()) as u32;
    let call = call(collective, root, count);
    let sequence = random.below(4);
    let parts = if matches!(collective, Collective::ReduceScatter | Collective::AllGather) {
        u64::from(world)
    } else {
        1
    };
    let all = (parts * count) as usize;
    let several = random.below(2) == 0;
    let mut hosts: Vec<Host> = draw_hosts(random, world, several)
        .into_iter()
        .map(|ranks| Host::new(&call, ranks, all))
        .collect();
    let idle = Position { sequence: sequence + 1, results: 0 };
    let mut reports = vec![report(sequence + 1, idle); world as usize];
    let mut over = vec![true; hosts.len()];
    for tree in 0..trees {
        let Some(share) = lost(0, world, trees).share(&call, sequence, tree) else { continue };
        let end = if share.is_small { 1 } else { share.parts * share.pieces };
        let highest = random.below(end + 1);
        for (host, over) in hosts.iter_mut().zip(&mut over) {
            let results = highest.saturating_sub(random.below(u64::from(WINDOW) + 1));
            // One whose part is complete may have to wait for an acknowledgement.
            let done = results == end && random.below(2) == 0;
            *over &= done;
            let position = if done { idle } else { Position { sequence, results } };
            for &rank in &host.ranks {
                reports[rank as usize].positions[usize::from(tree)] = position;
            }
            let pieces = if share.is_small { results * share.parts } else { results };
            for piece in 0..pieces {
                let (whole, _) = share.range(piece..piece + 1);
                for index in whole.start as usize / 4..whole.end as usize / 4 {
                    if let Some(at) = host.target(&call, index) {
                        host.destination[at] = result(&call, world, index);
                    }
                }
            }
        }
    }
    // Who is done has given its vectors back, and has copies of some of it.
    for (host, _) in hosts.iter_mut().zip(&over).filter(|(_, over)| **over) {
        let mut source = vec![LOST; host.source.len()];
        let mut destination = vec![LOST; host.destination.len()];
        for tree in 0..trees {
            host.lost(world, trees).kept(&call, sequence, tree, |side, bytes| {
                let elements = bytes.start as usize / 4..bytes.end as usize / 4;
                let (from, to) = match side {
                    Side::Source => (&host.source, &mut source),
                    Side::Destination => (&host.destination, &mut destination),
                };
                to[elements.clone()].copy_from_slice(&from[elements]);
            });
        }
        (host.source, host.destination) = (source, destination);
    }
    let calls = |number| (number == sequence).then_some(call);
    let list = |host: &Host| host.lost(world, trees).repairs(&reports, calls).unwrap();
    let lists: Vec<Vec<Repair>> = hosts.iter().map(list).collect();
    assert!(lists.iter().all(|list| list.len() == lists[0].len()));
    repair(&call, &mut hosts, &lists);
    for index in 0..all {
        let wanted = result(&call, world, index);
        let (mut all, mut told) = (Vec::new(), false);
        for (host, &over) in hosts.iter().zip(&over) {
            let Some(at) = host.target(&call, index) else { continue };
            match over {
                // Its vectors are gone, and it has had the result of the lost tree.
                true => told = true,
                false => all.push(host.destination[at]),
            }
        }
        all.extend(told.then_some(wanted));
        all.dedup();
        let right = |it: &u64| *it == wanted || *it == wanted + ANEW;
        assert!(all.len() <= 1 && all.iter().all(right), "{call:?} {index}: {all:?} {wanted}");
    }
}

#[test]
fn every_rank_ends_with_the_same_results_however_far_each_has_come() {
    let mut random = Random(1);
    for &collective in Collective::ALL {
        for round in 0..600 {
            let (world, trees) = (1 + random.below(5) as u32, 1 + random.below(3) as u8);
            let count = [3, 40, 64, 700, 5000, 13_001][round % 6];
            try_one(&mut random, collective, (world, trees), count);
        }
    }
}

#[test]
fn what_some_have_is_spread_and_what_nobody_has_is_computed() {
    // Four segments of 64 elements, of which rank 1 has three and the others one.
    let all_reduce = call(Collective::AllReduce, 0, 256);
    let at = |results| report(1, Position { sequence: 0, results });
    let reports = [at(1), at(3), at(1)];
    let repairs = lost(1, 3, 1).repairs(&reports, |_| Some(all_reduce)).unwrap();
    let spread = Repair {
        sequence: 0,
        collective: Collective::Broadcast,
        root: 1,
        count: 128,
        read: Some((Side::Destination, 256)),
        write: None,
    };
    let anew = Repair {
        sequence: 0,
        collective: Collective::AllReduce,
        root: 0,
        count: 64,
        read: Some((Side::Source, 768)),
        write: Some(768),
    };
    assert_eq!(repairs, [spread, anew]);
    let repairs = lost(0, 3, 1).repairs(&reports, |_| Some(all_reduce)).unwrap();
    assert_eq!(repairs, [Repair { read: None, write: Some(256), ..spread }, anew]);
}

#[test]
fn a_call_that_not_all_have_started_is_left_for_later_and_one_that_is_over_is_not_looked_at() {
    let all_reduce = call(Collective::AllReduce, 0, 256);
    let behind = report(2, Position { sequence: 1, results: 0 });
    let ahead = report(4, Position { sequence: 1, results: 1 });
    assert_eq!(first_to_repeat(&[ahead, behind]), 2);
    let repairs = lost(0, 2, 1).repairs(&[ahead, behind], |_| Some(all_reduce)).unwrap();
    assert!(repairs.iter().all(|repair| repair.sequence == 1) && repairs.len() == 2);
    assert_eq!(lost(0, 2, 1).repairs(&[ahead, behind], |_| None), Ok(Vec::new()));
}

/// Of repairs: whose call, what kind, by whom, how many elements, and where they are written.
fn outlines(repairs: &[Repair]) -> Vec<(u64, Collective, u32, u64, Option<u64>)> {
    repairs.iter().map(|it| (it.sequence, it.collective, it.root, it.count, it.write)).collect()
}

#[test]
fn results_of_a_call_count_for_no_other_call() {
    // Rank 0 has three of four segments of call 0, and rank 1 has one of call 1.
    let reports =
        [(0, 3), (1, 1)].map(|(sequence, results)| report(2, Position { sequence, results }));
    let all_reduce = call(Collective::AllReduce, 0, 256);
    let repairs = lost(0, 2, 1).repairs(&reports, |_| Some(all_reduce)).unwrap();
    assert_eq!(
        outlines(&repairs),
        [
            (0, Collective::Broadcast, 1, 64, Some(768)),
            (1, Collective::Broadcast, 1, 64, Some(0)),
            (1, Collective::AllReduce, 0, 192, Some(256)),
        ]
    );
}

#[test]
fn who_is_over_has_all_pieces_of_all_parts() {
    // Three parts of three segments each, of which rank 0 lacks the last.
    let reports = [(0, 8), (1, 0), (1, 0)]
        .map(|(sequence, results)| report(1, Position { sequence, results }));
    let gather = call(Collective::AllGather, 0, 192);
    let repairs = lost(0, 3, 1).repairs(&reports, |_| Some(gather)).unwrap();
    assert_eq!(outlines(&repairs), [(0, Collective::Broadcast, 1, 64, Some(2048))]);
}

#[test]
fn a_small_result_that_one_has_is_spread_and_not_computed_anew() {
    let at = |results| report(1, Position { sequence: 0, results });
    let small = call(Collective::AllReduce, 0, 3);
    let repairs = |reports: [Report; 2]| lost(1, 2, 1).repairs(&reports, |_| Some(small)).unwrap();
    let spread = (0, Collective::Broadcast, 0, 3, Some(0));
    assert_eq!(outlines(&repairs([at(1), at(0)])), [spread]);
    assert_eq!(repairs([at(1), at(1)]), []);
    assert_eq!(outlines(&repairs([at(0), at(0)])), [(0, Collective::AllReduce, 0, 3, Some(0))]);
}

#[test]
fn reports_are_read_as_they_were_written_and_others_are_refused() {
    let mut good = report(9, Position { sequence: 8, results: 3 });
    for overwritten in [None, Some(8)] {
        good.overwritten = overwritten;
        assert_eq!(Report::parse(&good.to_bytes()), Some(good));
    }
    let mut bytes = good.to_bytes();
    bytes[4] = 2;
    assert_eq!(Report::parse(&bytes), None);
    assert_eq!(Report::parse(&[0; REPORT_BYTES]), None);
    let lost = lost(0, 2, 1);
    let refused = |reports: [Report; 2]| lost.repairs(&reports, |_| None).unwrap_err();
    let fine = report(9, Position { sequence: 8, results: 3 });
    assert_eq!(refused([fine, good]), FailoverError::Overwritten { rank: 1, sequence: 8 });
    let other = Report { communicator: 6, ..fine };
    let error = FailoverError::Communicator { rank: 1, found: 6, expected: 7 };
    assert_eq!(refused([fine, other]), error);
    let ahead = report(1 << 20, Position { sequence: 1 << 20, results: 0 });
    let slow = report(1 << 20, Position::default());
    assert_eq!(refused([slow, ahead]), FailoverError::Behind { rank: 0 });
    let ahead = report(1 << 16, Position { sequence: 1 << 16, results: 0 });
    let slow = report(1 << 16, Position::default());
    assert_eq!(lost.repairs(&[slow, ahead], |_| None), Ok(Vec::new()), "as far as can be");
}

#[test]
fn a_call_has_a_part_on_every_tree_or_on_one_by_turns() {
    let lost = lost(0, 2, 3);
    let on =
        |call: &CollectiveCall, sequence| [0, 1, 2].map(|tree| lost.has_part(call, sequence, tree));
    let long = call(Collective::AllReduce, 0, 1 << 20);
    let short = call(Collective::AllReduce, 0, 8);
    let barrier = call(Collective::Barrier, 0, 0);
    for sequence in 0..4 {
        assert_eq!(on(&long, sequence), [true; 3]);
        let turn = [0, 1, 2].map(|tree| sequence % 3 == tree);
        assert_eq!((on(&short, sequence), on(&barrier, sequence)), (turn, turn));
    }
}

/// A vector of four segments of 256 bytes, or two for each of two ranks, of which results of two may be on their way.
#[test]
fn a_rank_keeps_what_others_may_lack_and_nothing_else() {
    let kept = |collective, count, rank| {
        let mut kept = Vec::new();
        let call = call(collective, 1, count);
        lost(rank, 2, 1).kept(&call, 0, 0, |side, bytes| kept.push((side, bytes)));
        kept
    };
    let last =
        |side, start: u64| vec![(side, start..start + 256), (side, start + 256..start + 512)];
    for collective in [Collective::AllReduce, Collective::Broadcast] {
        for rank in 0..2 {
            assert_eq!(kept(collective, 256, rank), last(Side::Destination, 512), "{collective}");
        }
    }
    assert_eq!(kept(Collective::AllGather, 128, 0), last(Side::Destination, 512));
    // Rank 1 gets the result, and may lack it: all others keep what it is made of.
    assert_eq!(kept(Collective::Reduce, 256, 0), last(Side::Source, 512));
    assert_eq!(kept(Collective::Reduce, 256, 1), []);
    assert_eq!(kept(Collective::ReduceScatter, 128, 0), last(Side::Source, 512));
    assert_eq!(kept(Collective::ReduceScatter, 128, 1), []);
    // One that travels with the descriptor, and ones of no bytes.
    assert_eq!(kept(Collective::AllReduce, 3, 0), [(Side::Destination, 0..12)]);
    assert_eq!(kept(Collective::ReduceScatter, 3, 0), [(Side::Source, 12..24)]);
    for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::Barrier] {
        assert_eq!(kept(collective, 0, 0), []);
    }
}

#[test]
fn of_calls_without_bytes_nobody_lacks_anything() {
    let reports = [report(1, Position::default()), report(0, Position::default())];
    let begun = [report(1, Position::default()); 2];
    for collective in [Collective::AllReduce, Collective::AllGather, Collective::Barrier] {
        let empty = call(collective, 0, 0);
        assert_eq!(lost(0, 2, 1).repairs(&begun, |_| Some(empty)), Ok(Vec::new()), "{collective}");
        assert_eq!(lost(0, 2, 1).repairs(&reports, |_| Some(empty)), Ok(Vec::new()));
    }
}
