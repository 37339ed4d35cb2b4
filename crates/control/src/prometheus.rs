//! Metrics as text that Prometheus reads (its text exposition format, version 0.0.4).

use std::fmt::{Display, Write as _};

use millstream_net::exposition::add_sample;

use crate::status_server::Page;

/// A metric of something that has a `T` to tell of.
pub(crate) struct Metric<T> {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// What tells its values from each other.
    pub(crate) labels: &'static [&'static str],
    pub(crate) help: &'static str,
    /// Writes its samples.
    pub(crate) values: fn(&T, &mut Samples<'_>),
}

/// What a metric is to Prometheus.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Counter,
    Gauge,
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// The samples of one metric.
pub(crate) struct Samples<'a> {
    name: &'static str,
    labels: &'static [&'static str],
    text: &'a mut String,
}

impl Samples<'_> {
    /// One value, with what its labels are.
    pub(crate) fn add(&mut self, labels: &[&str], value: impl Display) {
        debug_assert_eq!(labels.len(), self.labels.len());
        let labels = self.labels.iter().copied().zip(labels.iter().copied());
        add_sample(self.text, self.name, labels, value);
    }
}

/// The page with these metrics.
pub(crate) fn page<T>(metrics: &[Metric<T>], of: &T) -> Page {
    let mut text = String::new();
    for &Metric { name, kind, labels, help, values } in metrics {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
        values(of, &mut Samples { name, labels, text: &mut text });
    }
    Page { content_type: "text/plain; version=0.0.4; charset=utf-8", text }
}

/// The rows of docs/metrics.md.
#[cfg(test)]
pub(crate) fn rows<T>(metrics: &[Metric<T>]) -> Vec<String> {
    let row = |metric: &Metric<T>| {
        let labels: Vec<String> = metric.labels.iter().map(|name| format!("`{name}`")).collect();
        let (name, kind, help) = (metric.name, metric.kind.name(), metric.help);
        format!("| `{name}` | {kind} | {} | {help} |", labels.join(", "))
    };
    metrics.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_labels_stay_labels() {
        let metrics = [Metric::<()> {
            name: "m",
            kind: Kind::Gauge,
            labels: &["a", "b"],
            help: "Help.",
            values: |(), to| to.add(&["x\"} 7\nevil 1", "\\"], 3),
        }];
        let expected = "# HELP m Help.\n# TYPE m gauge\nm{a=\"x\\\"} 7\\nevil 1\",b=\"\\\\\"} 3\n";
        assert_eq!(page(&metrics, &()).text, expected);
    }

    #[test]
    fn the_documentation_has_them_all() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        let text = std::fs::read_to_string(path).unwrap();
        let rows = [rows(crate::api::METRICS), rows(crate::switch_pages::METRICS)];
        for table in rows {
            assert!(text.contains(&table.join("\n")), "{path} is to have:\n{}", table.join("\n"));
        }
    }
}
