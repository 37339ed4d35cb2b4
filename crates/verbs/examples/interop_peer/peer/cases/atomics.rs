//! Compare-and-swap and fetch-and-add: every result and every counter, exact.

use anyhow::{Result, ensure};
use millstream_verbs::{
    ATOMIC_LENGTH, Completion, CompletionOperation, CompletionStatus, SendOperation, SendRequest,
};

use super::Case;
use crate::peer::Role;
use crate::peer::link::{Link, Settings, list};

const WORD: usize = ATOMIC_LENGTH as usize;
/// Counters of each side, at the beginning of its target. Results go behind them.
const COUNTERS: usize = 4;
const OPERATIONS: usize = 400;
/// Under way at a time.
const PIPELINE: usize = 32;

pub(crate) fn cases() -> Vec<Case> {
    let arena = (1 + COUNTERS + OPERATIONS) * WORD;
    let settings = Settings { arena, ..Settings::USUAL };
    let lossy = Settings { timeout: 15, retry_count: 7, ..settings };
    vec![
        Case::new("CmpSwap and FetchAdd", settings, one_way),
        Case::new("CmpSwap and FetchAdd, both ways at once", settings, both_ways),
        Case::new("CmpSwap and FetchAdd, 3 % lost, 3 % twice", lossy, one_way)
            .with("loss 30 duplicate 30 seed 8", &["lost", "twice"]),
    ]
}

fn one_way(link: &mut Link<'_>) -> Result<()> {
    let requester = link.role == Role::Requester;
    exchange(link, requester, !requester)
}

fn both_ways(link: &mut Link<'_>) -> Result<()> {
    exchange(link, true, true)
}

/// The operation of this number on the counter that has this value, and its value afterwards.
fn operation(index: usize, value: u64) -> (Operation, u64) {
    let number = index as u64;
    match index % 3 {
        // Carries into the upper half, and past 2^64.
        0 => {
            let add = 0x4000_0000_8000_0001_u64.wrapping_mul(number + 1);
            (Operation::Add(add), value.wrapping_add(add))
        }
        1 => (Operation::Swap(value, !number), !number),
        // Expects what is not there.
        _ => (Operation::Swap(value ^ 1 << (index % 64), 0), value),
    }
}

#[derive(Clone, Copy)]
enum Operation {
    Add(u64),
    /// Compare, swap.
    Swap(u64, u64),
}

impl Operation {
    fn at(self, remote_address: u64, remote_key: u32) -> SendOperation {
        match self {
            Self::Add(add) => SendOperation::FetchAdd { remote_address, remote_key, add },
            Self::Swap(compare, swap) => {
                SendOperation::CompareSwap { remote_address, remote_key, compare, swap }
            }
        }
    }

    fn completes_as(self) -> CompletionOperation {
        match self {
            Self::Add(_) => CompletionOperation::FetchAdd,
            Self::Swap(..) => CompletionOperation::CompareSwap,
        }
    }
}

/// Posts operations if we are to, and compares all the memory with what each side's operations
/// make of it. They are known beforehand: those of one queue pair are done in order.
fn exchange(link: &mut Link<'_>, ours: bool, theirs: bool) -> Result<()> {
    let (our_seed, _) = link.seeds();
    // The first word of each target that is aligned.
    let skip = |target: u64| (target.next_multiple_of(WORD as u64) - target) as usize;
    let (here, there) = (skip(link.arena.target(0)), skip(link.remote.target));
    let mut target = link.arena.blank();
    let blank = link.arena.blank()[..WORD].try_into().map(u64::from_ne_bytes)?;
    let put = |target: &mut [u8], place: usize, value: u64| {
        target[place..place + WORD].copy_from_slice(&value.to_ne_bytes());
    };
    // Each side does the same operations, so its counters end alike.
    let mut values = [blank; COUNTERS];
    let mut operations = Vec::with_capacity(OPERATIONS);
    for index in 0..OPERATIONS {
        let counter = index % COUNTERS;
        let (operation, after) = operation(index, values[counter]);
        operations.push((counter, operation));
        if ours {
            put(&mut target, here + (COUNTERS + index) * WORD, values[counter]);
        }
        values[counter] = after;
    }
    if theirs {
        for (counter, value) in values.into_iter().enumerate() {
            put(&mut target, here + counter * WORD, value);
        }
    }
    link.control.meet("ready")?;
    let (mut posted, mut completed) = (0, 0);
    while ours && completed < OPERATIONS {
        while posted < OPERATIONS && posted - completed < PIPELINE {
            let (counter, operation) = operations[posted];
            let address = link.remote.target + (there + counter * WORD) as u64;
            let result = link.arena.target(here + (COUNTERS + posted) * WORD);
            let pieces = list(&[link.arena.piece(result, WORD)])?;
            let operation = operation.at(address, link.remote.key);
            link.post_send(SendRequest::new(posted as u64, operation, pieces))?;
            posted += 1;
        }
        let completion = link.completion()?;
        check(&completion, completed, operations[completed].1)?;
        completed += 1;
    }
    link.control.meet("done")?;
    link.no_completion()?;
    link.arena.verify(our_seed, &target)
}

fn check(completion: &Completion, id: usize, operation: Operation) -> Result<()> {
    ensure!(
        completion.id == id as u64
            && completion.status == CompletionStatus::Success
            && completion.operation == operation.completes_as()
            && completion.length == ATOMIC_LENGTH,
        "{completion:?} of request {id}"
    );
    Ok(())
}
