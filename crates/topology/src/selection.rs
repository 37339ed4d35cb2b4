//! Which NIC a transfer takes: the decision of the classic policy, as arithmetic. Randomness and
//! counters are arguments.

use crate::PriorityMatrix;

/// The location of memory of which nothing is known, and the entry for locations that a matrix
/// does not have.
pub const ANY_LOCATION: &str = "*";

/// A priority matrix for a list of NICs: indices into the list in place of names.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ResolvedMatrix {
    /// In the order of the matrix.
    locations: Vec<(String, Candidates)>,
    any: Candidates,
}

/// The NICs for a location, as indices into the list that the matrix was resolved for.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Candidates {
    /// Those to use.
    pub preferred: Vec<usize>,
    /// Those that can be used as well.
    pub available: Vec<usize>,
}

impl PriorityMatrix {
    /// The names of all NICs, in the order in which they are first named.
    pub fn nics(&self) -> Vec<String> {
        let mut known = std::collections::HashSet::new();
        let lists = self.entries().iter().flat_map(|(_, it)| [&it.preferred, &it.available]);
        lists.flatten().filter(|name| known.insert(name.as_str())).cloned().collect()
    }

    /// The matrix for these NICs: those that an engine has opened, or those that a peer says it
    /// has. Names that are not among them are left out. Each NIC is preferred for memory at any
    /// location (`*`), unless the matrix has an entry for that.
    pub fn resolve(&self, nics: &[String]) -> ResolvedMatrix {
        let mut index = std::collections::HashMap::new();
        for (number, name) in nics.iter().enumerate() {
            // A peer may give one name twice: the first has it.
            index.entry(name.as_str()).or_insert(number);
        }
        let indices = |names: &[String]| -> Vec<usize> {
            names.iter().filter_map(|name| index.get(name.as_str()).copied()).collect()
        };
        let candidates = |(location, priorities): &(String, crate::Priorities)| {
            let preferred = indices(&priorities.preferred);
            (location.clone(), Candidates { preferred, available: indices(&priorities.available) })
        };
        let locations: Vec<_> = self.entries().iter().map(candidates).collect();
        let any = locations.iter().find(|(location, _)| location == ANY_LOCATION);
        let any = any.map(|(_, candidates)| candidates.clone());
        let all = || Candidates { preferred: (0..nics.len()).collect(), available: Vec::new() };
        ResolvedMatrix { any: any.unwrap_or_else(all), locations }
    }
}

impl ResolvedMatrix {
    /// The NICs for memory of a location; `None` when the matrix does not have it.
    pub fn get(&self, location: &str) -> Option<&Candidates> {
        if location == ANY_LOCATION {
            return Some(&self.any);
        }
        self.locations.iter().find(|(name, _)| name == location).map(|(_, it)| it)
    }

    /// The NICs for memory of a location, or those for any where the matrix has none for it. A
    /// location is looked up when memory is registered, not for each transfer.
    pub fn candidates(&self, location: &str) -> &Candidates {
        self.get(location).filter(|candidates| !candidates.is_empty()).unwrap_or(&self.any)
    }
}

impl Candidates {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.preferred.is_empty() && self.available.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.preferred.len() + self.available.len()
    }

    /// The NIC for an attempt. The first, number 0, takes one of the preferred NICs (of the
    /// available ones where none is preferred), the one that `number` says, which is random or
    /// counts up. The attempts after it go through all, preferred ones first, and then anew.
    pub fn select(&self, attempt: u32, number: u64) -> Option<usize> {
        let Some(retry) = attempt.checked_sub(1) else {
            let list = if self.preferred.is_empty() { &self.available } else { &self.preferred };
            let at = number.checked_rem(list.len() as u64)?;
            return Some(list[at as usize]);
        };
        let at = (retry as usize).checked_rem(self.len())?;
        self.preferred.iter().chain(&self.available).nth(at).copied()
    }
}

/// The numbers by which NICs are chosen.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Numbers {
    /// One after the other: round-robin, what `MC_PATH_ROUNDROBIN` asks for.
    Counting(u64),
    /// As good as random, from a seed.
    Random(u64),
}

impl Numbers {
    /// The next number.
    pub fn next_number(&mut self) -> u64 {
        match self {
            Self::Counting(next) => {
                let number = *next;
                *next = next.wrapping_add(1);
                number
            }
            // SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators".
            Self::Random(state) => {
                *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                mixed ^ (mixed >> 31)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nics(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn matrix() -> PriorityMatrix {
        let text = r#"{"cpu:0": [["a", "b"], ["c"]], "cpu:1": [[], ["c", "a"]],
                       "cuda:0": [["d"], ["a"]], "cuda:1": [[], []]}"#;
        PriorityMatrix::parse(text).unwrap()
    }

    fn candidates(preferred: &[usize], available: &[usize]) -> Candidates {
        Candidates { preferred: preferred.to_vec(), available: available.to_vec() }
    }

    #[test]
    fn names_become_indices_of_the_list() {
        let matrix = matrix();
        assert_eq!(matrix.nics(), nics(&["a", "b", "c", "d"]), "as they are first named");
        // The list says which are there, and `e` is in no entry.
        let resolved = matrix.resolve(&nics(&["e", "c", "a", "a"]));
        assert_eq!(resolved.get("cpu:0"), Some(&candidates(&[2], &[1])));
        assert_eq!(resolved.get("cpu:1"), Some(&candidates(&[], &[1, 2])));
        assert_eq!(resolved.get("cuda:0"), Some(&candidates(&[], &[2])));
        assert_eq!(resolved.get("cuda:7"), None);
        let any = candidates(&[0, 1, 2, 3], &[]);
        for location in ["*", "cuda:7", "cuda:1", ""] {
            assert_eq!(resolved.candidates(location), &any, "{location:?}");
        }
        assert_eq!(matrix.resolve(&[]).candidates("cpu:0"), &Candidates::default());
    }

    #[test]
    fn an_entry_for_any_location_counts() {
        let matrix = PriorityMatrix::parse(r#"{"*": [["b"], ["a"]]}"#).unwrap();
        let resolved = matrix.resolve(&nics(&["a", "b", "c"]));
        assert_eq!(resolved.candidates("cpu:0"), &candidates(&[1], &[0]));
    }

    #[test]
    fn the_first_attempt_prefers_and_later_ones_go_through_all() {
        let both = candidates(&[4, 7], &[1, 0, 2]);
        let first: Vec<_> = (0..5).map(|number| both.select(0, number).unwrap()).collect();
        assert_eq!(first, [4, 7, 4, 7, 4]);
        let retries: Vec<_> = (1..=7).map(|attempt| both.select(attempt, 99).unwrap()).collect();
        assert_eq!(retries, [4, 7, 1, 0, 2, 4, 7]);
        assert_eq!(both.select(u32::MAX, u64::MAX), Some(2), "2^32 - 2 is 4 modulo 5");
        let available = candidates(&[], &[3, 5]);
        assert_eq!([0, 1, 2].map(|number| available.select(0, number)), [3, 5, 3].map(Some));
        assert_eq!(available.select(2, 0), Some(5));
        for attempt in [0, 1, u32::MAX] {
            assert_eq!(Candidates::default().select(attempt, 1), None);
        }
    }

    #[test]
    fn numbers_spread_transfers_evenly() {
        let preferred = candidates(&[0, 1, 2, 3], &[4]);
        for mut numbers in [Numbers::Counting(u64::MAX - 5), Numbers::Random(7)] {
            let mut counts = [0_u32; 5];
            for _ in 0..4000 {
                counts[preferred.select(0, numbers.next_number()).unwrap()] += 1;
            }
            assert!(counts[..4].iter().all(|count| (900..1100).contains(count)), "{counts:?}");
            assert_eq!(counts[4], 0);
        }
        let (mut one, mut other) = (Numbers::Random(7), Numbers::Random(7));
        assert_eq!(one.next_number(), other.next_number(), "the seed decides");
    }
}
