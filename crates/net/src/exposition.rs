//! Lines of the text that Prometheus reads (its text exposition format, version 0.0.4).

use std::fmt::{self, Display, Write as _};

/// Adds the line of a sample: the metric, its labels with their values, and what was counted.
pub fn add_sample<'a>(
    text: &mut String,
    metric: impl Display,
    labels: impl Iterator<Item = (&'a str, &'a str)>,
    value: impl Display,
) {
    // Writing to a string cannot fail.
    let _ = write!(text, "{metric}");
    let mut before = '{';
    for (name, value) in labels {
        let _ = write!(text, "{before}{name}=\"{}\"", Escaped(value));
        before = ',';
    }
    if before == ',' {
        text.push('}');
    }
    let _ = writeln!(text, " {value}");
}

/// The value of a label, in which what ends it is escaped.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                other => f.write_char(other)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_a_label_is_escaped() {
        let mut text = String::new();
        add_sample(&mut text, "m", [("a", "x\"} 7\nevil 1"), ("b", "\\")].into_iter(), 3);
        add_sample(&mut text, "n", [].into_iter(), 0.5);
        assert_eq!(text, "m{a=\"x\\\"} 7\\nevil 1\",b=\"\\\\\"} 3\nn 0.5\n");
    }
}
