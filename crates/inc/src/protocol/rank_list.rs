//! Ranks as people are told of them.

use core::fmt;
use core::ops::Range;

use serde::{Deserialize, Serialize};

use super::fields;
use crate::ranks::Ranks;

/// More ranges than so many are counted, and not listed.
const MAX_RANGES: usize = 64;

/// Some ranks of a group: the first of them, and how many there are.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RankList {
    #[serde(with = "fields::ranks")]
    listed: Ranks,
    count: u32,
}

impl RankList {
    /// The first of these ranges, whose order is that of their ranks, of `count` ranks in all.
    pub(crate) fn new(ranges: impl IntoIterator<Item = Range<u32>>, count: u32) -> Self {
        let ranges = ranges.into_iter().filter(|range| !range.is_empty());
        Self { listed: ranges.take(MAX_RANGES).collect(), count }
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Those that are listed.
    pub fn listed(&self) -> &Ranks {
        &self.listed
    }
}

impl FromIterator<u32> for RankList {
    fn from_iter<T: IntoIterator<Item = u32>>(ranks: T) -> Self {
        let all: Ranks = ranks.into_iter().collect();
        let count = all.len().try_into().unwrap_or(u32::MAX);
        Self::new(all.ranges().iter().cloned(), count)
    }
}

/// As people do: 0, 2-5.
impl fmt::Display for RankList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for range in self.listed.ranges() {
            match range.end - range.start {
                1 => write!(f, "{separator}{}", range.start)?,
                _ => write!(f, "{separator}{}-{}", range.start, range.end - 1)?,
            }
            separator = ", ";
        }
        match u64::from(self.count).saturating_sub(self.listed.len()) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_as_people_do() {
        for (ranks, text) in [
            (&[][..], ""),
            (&[3], "3"),
            (&[0, 1], "0-1"),
            (&[0, 2, 3, 4, 63], "0, 2-4, 63"),
            (&[5, 5, 65_535], "5, 65535"),
        ] {
            assert_eq!(ranks.iter().copied().collect::<RankList>().to_string(), text);
        }
    }

    #[test]
    fn what_would_be_a_long_list_is_counted() {
        let odd: RankList = (0..65_536).filter(|rank| rank % 2 == 1).collect();
        assert_eq!((odd.count(), odd.listed().len()), (32_768, 64));
        let text = odd.to_string();
        assert!(text.starts_with("1, 3, 5, ") && text.ends_with(", 127 and 32704 more"), "{text}");
        let long: RankList = (0..65_536).collect();
        assert_eq!(long.to_string(), "0-65535");
    }

    #[test]
    fn ranks_in_json_are_in_order_and_in_range() {
        let list: RankList = [0, 7, 8, 9, 65_535].into_iter().collect();
        let json = r#"{"listed":[0,[7,9],65535],"count":5}"#;
        assert_eq!(serde_json::to_string(&list).unwrap(), json);
        assert_eq!(serde_json::from_str::<RankList>(json).unwrap(), list);
        for listed in [
            "5,5",
            "5,4",
            "[5,6],6",
            "[6,5]",
            "65536",
            "[0,65536]",
            "[0,4294967295]",
            "-1",
            "[1]",
            "[1,2,3]",
            "\"1\"",
            "null",
            "1.5",
        ] {
            let json = format!(r#"{{"listed":[{listed}],"count":5}}"#);
            assert!(serde_json::from_str::<RankList>(&json).is_err(), "{json}");
        }
    }
}
