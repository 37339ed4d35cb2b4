//! `cargo xtask compare`: `bench rdma` of two builds by turns, and the medians of both. What else the
//! machine does takes from one as from the other.

mod figures;
mod options;
mod series;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::machine::Machine;
use crate::process;
pub(crate) use options::Options;
use series::{Joined, Summary};

const SIDES: [&str; 2] = ["before", "after"];

pub(crate) fn run(options: &Options) -> Result<()> {
    let machine = Machine::here()?;
    let mut joined = Joined::default();
    for turn in 1..=options.runs {
        for (side, program) in options.programs.iter().enumerate() {
            eprintln!("xtask: run {turn} of {}, {}", options.runs, SIDES[side]);
            joined.add(side, figures::of_report(&measure(program, &options.bench)?));
        }
    }
    if options.json {
        let figures: Vec<Value> = joined.0.iter().map(series::Series::to_json).collect();
        let (runs, bench) = (options.runs, &options.bench);
        let machine = machine.to_json();
        println!(
            "{}",
            json!({ "machine": machine, "runs": runs, "arguments": bench, "figures": figures })
        );
    } else {
        println!("{machine}");
        println!("medians of {} runs each, by turns (least..greatest)", options.runs);
        print!("{}", table(&joined));
    }
    Ok(())
}

fn measure(program: &Path, arguments: &[String]) -> Result<Value> {
    let mut command = Command::new(program);
    let printed = process::output(command.args(["bench", "rdma", "--json"]).args(arguments))?;
    parse(program, &printed)
}

fn parse(program: &Path, printed: &str) -> Result<Value> {
    serde_json::from_str(printed)
        .with_context(|| format!("{} printed no report", program.display()))
}

/// A block for each thing that was measured, a line for each figure of it.
fn table(joined: &Joined) -> String {
    let mut text = format!("{:26}{:>28}{:>28}{:>14}\n", "", "before", "after", "after/before");
    let mut last = None;
    for one in &joined.0 {
        if last != Some(&one.of) {
            text.push_str(&format!("{}\n", one.of));
            last = Some(&one.of);
        }
        let [before, after] = one.summaries().map(column);
        let ratio = one.ratio().map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let line = format!("  {:24}{before:>28}{after:>28}{ratio:>14}", one.name);
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn column(summary: Option<Summary>) -> String {
    let Some(Summary { median, least, greatest }) = summary else { return String::new() };
    let [median, least, greatest] = [median, least, greatest].map(digits);
    format!("{median} ({least}..{greatest})")
}

/// Three digits that count, and all of those before the point.
fn digits(figure: f64) -> String {
    let decimals = match figure {
        figure if figure > 0.0 => (2.0 - figure.log10().floor()).clamp(0.0, 4.0) as usize,
        _ => 0,
    };
    format!("{figure:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::figures::Figure;
    use super::*;

    #[test]
    fn the_table_leaves_blank_what_one_side_does_not_know() {
        let mut joined = Joined::default();
        let figure = |name, value| Figure { of: "WRITE".to_owned(), name, value };
        joined.add(0, vec![figure("GB/s", 1.5)]);
        joined.add(0, vec![figure("GB/s", 2.5)]);
        joined.add(1, vec![figure("GB/s", 4.0), figure("calls", 0.0123)]);
        let table = table(&joined);
        let lines: Vec<Vec<&str>> =
            table.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        let expected: [&[&str]; 3] = [
            &["WRITE"],
            &["GB/s", "2.00", "(1.50..2.50)", "4.00", "(4.00..4.00)", "2.00"],
            &["calls", "0.0123", "(0.0123..0.0123)"],
        ];
        assert_eq!(lines, expected, "{table}");
    }

    #[test]
    fn three_digits_count() {
        for (figure, text) in
            [(0.0, "0"), (0.012_34, "0.0123"), (1.234, "1.23"), (249_480.3, "249480")]
        {
            assert_eq!(digits(figure), text);
        }
    }

    #[test]
    fn a_program_that_prints_no_report_is_named() {
        let error = parse(Path::new("old/millstream"), "GB/s 1.5").unwrap_err();
        assert_eq!(error.to_string(), "old/millstream printed no report");
        assert_eq!(parse(Path::new("x"), "{}\n").unwrap(), json!({}));
    }
}
