//! Where memory is: the NUMA nodes of its pages, as locations.

use millstream_net::own_memory::{nodes, page_length};

use crate::transport::ANY_LOCATION;

/// So many pages of a piece of memory are asked for. Of more, some are, at equal distances.
const MAX_SAMPLES: u64 = 65_536;

/// Memory whose pages lie on nodes by turns is not shown as more buffers than these, but as if it was all
/// on the node that has the most of it.
const MAX_PLACES: usize = 64;

/// A part of a piece of memory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Place {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) location: String,
}

impl Place {
    /// All of it at one location.
    pub(crate) fn whole(length: u64, location: &str) -> Vec<Self> {
        vec![Self { offset: 0, length, location: location.to_owned() }]
    }

    /// Asks the kernel for the node of each page.
    pub(crate) fn find(address: u64, length: u64) -> Vec<Self> {
        #[cfg(test)]
        if let Some(samples) = pretended::samples() {
            return places(length, &samples);
        }
        let samples = samples(address, length, page_length());
        let found = nodes(&samples).unwrap_or_else(|error| {
            tracing::debug!(%error, "the kernel does not tell on which nodes memory is");
            vec![None; samples.len()]
        });
        let offsets = samples.iter().map(|sample| sample - address);
        places(length, &offsets.zip(found).collect::<Vec<_>>())
    }
}

/// The addresses that are asked for: the first byte, and first bytes of pages.
fn samples(address: u64, length: u64, page: u64) -> Vec<u64> {
    let pages = (address + (length - 1)) / page - address / page + 1;
    let step = pages.div_ceil(MAX_SAMPLES) * page;
    let next = |address: &u64| Some((address + step) / page * page);
    let samples = std::iter::successors(Some(address), next);
    samples.take_while(|&it| it - address < length).collect()
}

/// Places of memory whose node is known from these offsets on. A page that is not there yet is taken to be
/// where the one before it is, or else the first that is there.
fn places(length: u64, samples: &[(u64, Option<u32>)]) -> Vec<Place> {
    let Some(first) = samples.iter().find_map(|(_, node)| *node) else {
        // It has no pages yet, or the kernel does not tell: no NIC is nearer than another.
        return Place::whole(length, ANY_LOCATION);
    };
    let mut runs: Vec<(u64, u32)> = vec![(0, first)];
    for &(offset, node) in samples {
        if let Some(node) = node
            && runs.last().is_some_and(|(_, last)| *last != node)
        {
            runs.push((offset, node));
        }
    }
    let ends = runs.iter().skip(1).map(|(offset, _)| *offset).chain([length]);
    let runs = runs.iter().zip(ends).map(|(&(offset, node), end)| (offset, end - offset, node));
    let runs: Vec<(u64, u64, u32)> = runs.collect();
    if runs.len() > MAX_PLACES {
        let bytes = |of: u32| runs.iter().filter(|run| run.2 == of).map(|run| run.1).sum::<u64>();
        let most = runs.iter().map(|run| run.2).max_by_key(|&node| (bytes(node), u32::MAX - node));
        return Place::whole(length, &location(most.unwrap_or(first)));
    }
    let place = |(offset, length, node)| Place { offset, length, location: location(node) };
    runs.into_iter().map(place).collect()
}

fn location(node: u32) -> String {
    format!("cpu:{node}")
}

/// For tests on machines with one node.
#[cfg(test)]
pub(crate) mod pretended {
    use std::cell::RefCell;

    type Samples = Vec<(u64, Option<u32>)>;

    thread_local!(static SAMPLES: RefCell<Option<Samples>> = const { RefCell::new(None) });

    /// What the kernel says to this thread from here on.
    pub(crate) fn set(samples: Samples) {
        SAMPLES.set(Some(samples));
    }

    pub(super) fn samples() -> Option<Samples> {
        SAMPLES.with_borrow(Clone::clone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(length: u64, samples: &[(u64, Option<u32>)]) -> Vec<(u64, u64, String)> {
        let places = places(length, samples).into_iter();
        places.map(|place| (place.offset, place.length, place.location)).collect()
    }

    fn place(offset: u64, length: u64, location: &str) -> (u64, u64, String) {
        (offset, length, location.to_owned())
    }

    #[test]
    fn each_run_of_pages_on_a_node_is_a_place() {
        let all =
            [(0, Some(1)), (50, Some(1)), (4146, Some(0)), (8242, Some(0)), (12_338, Some(1))];
        let expected =
            [place(0, 4146, "cpu:1"), place(4146, 8192, "cpu:0"), place(12_338, 662, "cpu:1")];
        assert_eq!(found(13_000, &all), expected);
        assert_eq!(found(100, &all[..1]), [place(0, 100, "cpu:1")]);
    }

    #[test]
    fn pages_that_are_not_there_are_where_others_are() {
        let samples = [(0, None), (10, Some(1)), (20, None), (30, Some(0)), (40, None)];
        assert_eq!(found(50, &samples), [place(0, 30, "cpu:1"), place(30, 20, "cpu:0")]);
        assert_eq!(found(50, &[(0, None), (10, None)]), [place(0, 50, "*")]);
        assert_eq!(found(50, &[]), [place(0, 50, "*")]);
    }

    #[test]
    fn pages_on_nodes_by_turns_are_one_place() {
        let samples = |count: u64| (0..count).map(|at| (at * 10, Some((at % 2) as u32 * 3)));
        let found = |count| found(count * 10, &samples(count).collect::<Vec<_>>());
        assert_eq!(found(64).len(), 64);
        assert_eq!(found(66), [place(0, 660, "cpu:0")], "as much on each: the first of them");
        assert_eq!(found(65), [place(0, 650, "cpu:0")]);
    }

    #[test]
    fn the_kernel_is_asked_for_every_page_or_some() {
        assert_eq!(samples(8192, 8192, 4096), [8192, 12_288]);
        assert_eq!(samples(8197, 1, 4096), [8197]);
        assert_eq!(samples(8191, 2, 4096), [8191, 8192]);
        assert_eq!(samples(1, 8192, 4096), [1, 4096, 8192]);
        assert_eq!(samples(4096, MAX_SAMPLES * 4096, 4096).len(), MAX_SAMPLES as usize);
        let some = samples(4100, MAX_SAMPLES * 4096, 4096);
        assert_eq!(some[..3], [4100, 3 * 4096, 5 * 4096], "a page more: every second one");
        assert_eq!(some.len() as u64, MAX_SAMPLES / 2 + 1);
        assert_eq!(some.last(), Some(&((MAX_SAMPLES + 1) * 4096)));
    }

    #[test]
    fn memory_is_somewhere_once_it_has_a_page() {
        const LENGTH: usize = 16 << 20;
        // Of a mapping of its own, so that its pages are new. The allocator writes to the first one.
        let mut memory = Vec::<u8>::with_capacity(LENGTH);
        let first = memory.as_ptr().expose_provenance() as u64 + page_length();
        let length = LENGTH as u64 - page_length();
        if let Err(error) = nodes(&[first]) {
            return eprintln!("skipped: move_pages: {error}");
        }
        let transparent_huge_page = nodes(&[first]).unwrap()[0].is_some();
        if !transparent_huge_page {
            assert_eq!(Place::find(first, length), Place::whole(length, ANY_LOCATION));
        }
        memory.resize(LENGTH, 1);
        let places = Place::find(first, length);
        assert!(places.iter().all(|place| place.location.starts_with("cpu:")), "{places:?}");
        assert_eq!(places.iter().map(|place| place.length).sum::<u64>(), length);
    }
}
