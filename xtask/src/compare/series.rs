//! Runs of both sides, joined: for each figure its values before and after.

use serde_json::{Value, json};

use super::figures::Figure;

/// One figure, of all runs of both sides.
#[derive(Debug, PartialEq)]
pub(super) struct Series {
    pub(super) of: String,
    pub(super) name: &'static str,
    /// Before and after; none where that side does not know the figure.
    pub(super) values: [Vec<f64>; 2],
}

/// All figures that a side has reported: those of one thing together, in the order of their first
/// report.
#[derive(Default)]
pub(super) struct Joined(pub(super) Vec<Series>);

/// The middle of some values, and their bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Summary {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) greatest: f64,
}

impl Joined {
    /// Takes in a run of a side: 0 is before, 1 is after.
    pub(super) fn add(&mut self, side: usize, figures: Vec<Figure>) {
        for Figure { of, name, value } in figures {
            let known = self.0.iter().position(|one| one.of == of && one.name == name);
            let index = known.unwrap_or_else(|| {
                // A figure that the other side does not know has its place beside its like.
                let last = self.0.iter().rposition(|one| one.of == of);
                let index = last.map_or(self.0.len(), |last| last + 1);
                self.0.insert(index, Series { of, name, values: [Vec::new(), Vec::new()] });
                index
            });
            self.0[index].values[side].push(value);
        }
    }
}

impl Series {
    pub(super) fn summaries(&self) -> [Option<Summary>; 2] {
        [0, 1].map(|side| summary(&self.values[side]))
    }

    /// The median after in parts of that before, where there are both.
    pub(super) fn ratio(&self) -> Option<f64> {
        let [before, after] = self.summaries();
        let ratio = after?.median / before?.median;
        ratio.is_finite().then_some(ratio)
    }

    pub(super) fn to_json(&self) -> Value {
        let summary = |summary: Option<Summary>| {
            summary.map(|Summary { median, least, greatest }| {
                json!({ "median": median, "min": least, "max": greatest })
            })
        };
        let [before, after] = self.summaries().map(summary);
        json!({
            "of": self.of, "figure": self.name, "before": before, "after": after,
            "ratio": self.ratio(),
        })
    }
}

/// Of an even number of values the median is between the two in the middle. `None` of none.
fn summary(values: &[f64]) -> Option<Summary> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (least, greatest) = (*sorted.first()?, *sorted.last()?);
    let median = f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    Some(Summary { median, least, greatest })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let of = |median, least, greatest| Some(Summary { median, least, greatest });
        for (values, expected) in [
            (&[][..], None),
            (&[3.0], of(3.0, 3.0, 3.0)),
            (&[4.0, 1.0], of(2.5, 1.0, 4.0)),
            (&[9.0, 1.0, 2.0], of(2.0, 1.0, 9.0)),
            (&[10.0, 9.0, 1.0, 2.0], of(5.5, 1.0, 10.0)),
        ] {
            assert_eq!(summary(values), expected, "{values:?}");
        }
    }

    fn figure(of: &str, name: &'static str, value: f64) -> Figure {
        Figure { of: of.to_owned(), name, value }
    }

    #[test]
    fn runs_are_joined_by_what_they_measured() {
        let mut joined = Joined::default();
        let old = |rate| vec![figure("WRITE", "GB/s", rate), figure("TCP", "GB/s", 2.0)];
        let new = |rate| {
            vec![
                figure("WRITE", "GB/s", rate),
                figure("WRITE", "calls", 0.5),
                figure("shards", "GB/s", 7.0),
                figure("TCP", "GB/s", 2.0),
            ]
        };
        for (side, run) in [(0, old(1.0)), (1, new(3.0)), (0, old(2.0)), (1, new(3.0))] {
            joined.add(side, run);
        }
        let rows: Vec<_> = joined.0.iter().map(|one| (one.of.as_str(), one.name)).collect();
        let expected = [("WRITE", "GB/s"), ("WRITE", "calls"), ("TCP", "GB/s"), ("shards", "GB/s")];
        assert_eq!(rows, expected);
        assert_eq!(joined.0[0].values, [vec![1.0, 2.0], vec![3.0, 3.0]]);
        assert_eq!(joined.0[0].ratio(), Some(2.0));
        // Only one of the two knows it.
        assert_eq!(joined.0[1].values, [vec![], vec![0.5, 0.5]]);
        assert_eq!((joined.0[1].summaries()[0], joined.0[1].ratio()), (None, None));
        assert_eq!(joined.0[1].to_json()["before"], Value::Null);
        assert_eq!(joined.0[1].to_json()["after"]["median"], 0.5);
    }

    #[test]
    fn nothing_over_nothing_is_no_ratio() {
        let values = [vec![0.0], vec![0.0]];
        assert_eq!(Series { of: String::new(), name: "", values }.ratio(), None);
    }
}
