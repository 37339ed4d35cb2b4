//! The view as lines of text.

use millstream_transfer::RailStatus;

use super::view::{Process, Rail, Transport, View};
use crate::output::escaped;
use crate::units;

use std::time::Duration;

/// What stands between columns.
const GAP: &str = "  ";

/// The longest name that is shown in full.
const NAME_LENGTH: usize = 40;

/// All lines; `live` says how it ends.
pub(super) fn lines(view: &View, live: bool) -> Vec<String> {
    let mut lines = Vec::new();
    if live {
        lines.push("millstream top: q ends".to_owned());
    }
    for process in &view.processes {
        if !lines.is_empty() {
            lines.push(String::new());
        }
        add_process(process, &mut lines);
    }
    lines
}

fn add_process(process: &Process, lines: &mut Vec<String>) {
    let address = name(&process.address);
    if let Some(error) = &process.error {
        return lines.push(format!("no status: {}", escaped(error)));
    }
    if process.waiting {
        return lines.push(format!("{address}  is asked"));
    }
    let Process { segment, process: number, uptime_s, open_segments, registered_bytes, .. } =
        process;
    let up = units::clock(Duration::try_from_secs_f64(uptime_s.floor()).unwrap_or_default());
    lines.push(format!(
        "{address}  segment {}, process {number}, up {up}, {open_segments} open, {} registered",
        name(segment),
        units::readable(*registered_bytes),
    ));
    let head = ["transport", "requests/s", "read", "written", "in flight", "p50", "p99", "failed"];
    let head = head.into_iter().chain(["canceled", "timeout", "served"]).map(str::to_owned);
    let rows = process.transports.iter().map(transport);
    add_table([head.collect()].into_iter().chain(rows).collect(), 1, lines);
    if process.rails.is_empty() {
        return;
    }
    let head = ["rail", "here", "there", "state", "read", "written", "in flight", "oldest"];
    let head = head.into_iter().chain(["round trip", "failed", "moved", "fences"]);
    let head: Vec<_> = head.chain(["connected"]).map(str::to_owned).collect();
    let mut rows = vec![head];
    rows.extend(process.rails.iter().map(rail));
    let first = lines.len() + 1;
    add_table(rows, 4, lines);
    // From below, so that the places above stay as they are.
    for (index, rail) in process.rails.iter().enumerate().rev() {
        if let Some(reason) = rail.reason.as_ref().filter(|_| rail.state != RailStatus::Up) {
            lines.insert(first + index + 1, format!("{GAP}{GAP}{}", escaped(reason)));
        }
    }
}

fn transport(transport: &Transport) -> Vec<String> {
    let latency = |of: fn(super::view::Latency) -> f64| {
        transport.latency_us.map_or("-".to_owned(), |latency| microseconds(of(latency)))
    };
    vec![
        name(&transport.transport),
        format!("{:.0}", transport.requests_per_s),
        units::rate(transport.read_bytes_per_s),
        units::rate(transport.written_bytes_per_s),
        transport.in_flight.to_string(),
        latency(|it| it.p50),
        latency(|it| it.p99),
        transport.failed.to_string(),
        transport.canceled.to_string(),
        transport.timeout.to_string(),
        transport.connections_served.to_string(),
    ]
}

fn rail(rail: &Rail) -> Vec<String> {
    let time = |us: Option<f64>| us.map_or("-".to_owned(), microseconds);
    let there = match (&*rail.peer, &*rail.peer_nic) {
        (peer, nic) if nic.is_empty() || nic == peer => name(peer),
        (peer, nic) => format!("{} {}", name(peer), name(nic)),
    };
    vec![
        name(&rail.transport),
        if rail.local_nic.is_empty() { "-".to_owned() } else { name(&rail.local_nic) },
        there,
        rail.state.name().to_owned(),
        units::rate(rail.read_bytes_per_s),
        units::rate(rail.written_bytes_per_s),
        units::readable(rail.bytes_in_flight),
        time(rail.oldest_age_us),
        time(rail.smallest_round_trip_us),
        rail.failed_slices.to_string(),
        rail.failovers.to_string(),
        rail.fences.to_string(),
        rail.connections.to_string(),
    ]
}

/// A name that a process has said, which may be anything.
fn name(text: &str) -> String {
    let text = escaped(text);
    if text.chars().count() <= NAME_LENGTH {
        return text;
    }
    text.chars().take(NAME_LENGTH - 1).chain(['~']).collect()
}

/// A time in three digits.
fn microseconds(us: f64) -> String {
    let (value, unit) = match us {
        us if us < 999.5 => (us, "us"),
        us if us < 999_500.0 => (us / 1e3, "ms"),
        us => (us / 1e6, "s"),
    };
    let places = match value {
        value if value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.places$} {unit}")
}

/// Rows in columns: the first ones to the left, the others, which are numbers, to the right.
fn add_table(rows: Vec<Vec<String>>, to_the_left: usize, lines: &mut Vec<String>) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            line.push_str(GAP);
            let padding = " ".repeat(width - cell.chars().count());
            match column < to_the_left {
                true => line.extend([cell, &*padding]),
                false => line.extend([&*padding, cell]),
            }
        }
        lines.push(line.trim_end().to_owned());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::view::tests::answer;
    use super::*;

    #[test]
    fn a_process_is_a_line_and_two_tables() {
        let start = Instant::now();
        let (before, mut after) = (answer(start, 1, 100), answer(start, 2, 2_000_100));
        after.status.metrics.uptime_s = 75.5;
        let rail = &mut after.status.metrics.rails[1];
        (rail.state, rail.reason) = (RailStatus::Paused, Some("it is\ngone".to_owned()));
        (rail.bytes_in_flight, rail.oldest_age_s) = (3 << 20, Some(0.0125));
        let process = Process::new("h:1", Some(&before), Ok(&after));
        let silent = Process::new("i:2", None, Err(&"i:2: refused".to_owned()));
        let view = View { processes: vec![process, silent, Process::asked("j:3")] };
        let expected = [
            "h:1  segment a:1, process 7, up 1:15, 0 open, 0 B registered",
            "  transport  requests/s   read    written  in flight      p50      p99  failed  canceled  timeout  served",
            "  rdma          2000000  0 B/s  2.00 GB/s          0  3.07 us  4.08 us       0         0        0       0",
            "  rail  here  there          state        read  written  in flight   oldest  round trip  failed  moved  fences  connected",
            "  rdma  x     b:1\\x1b[2J  up      20.0 MB/s    0 B/s        0 B        -           -       0      0       0          0",
            "  rdma  y     b:1\\x1b[2J  paused  40.0 MB/s    0 B/s      3 MiB  12.5 ms           -       0      0       0          0",
            "    it is\\ngone",
            "",
            "no status: i:2: refused",
            "",
            "j:3  is asked",
        ];
        let squeeze = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let shown: Vec<_> = lines(&view, false).iter().map(|line| squeeze(line)).collect();
        assert_eq!(shown, expected.map(squeeze));
        assert_eq!(lines(&view, true)[0], "millstream top: q ends");
    }

    #[test]
    fn columns_are_aligned() {
        let mut lines = Vec::new();
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        add_table(vec![row(["a", "b", "c"]), row(["long", "1", "200"])], 1, &mut lines);
        assert_eq!(lines, ["  a     b    c", "  long  1  200"]);
    }

    #[test]
    fn times_have_three_digits() {
        for (us, text) in [
            (0.256, "0.26 us"),
            (12.34, "12.3 us"),
            (999.6, "1.00 ms"),
            (123_456.0, "123 ms"),
            (2_500_000.0, "2.50 s"),
        ] {
            assert_eq!(microseconds(us), text);
        }
    }

    #[test]
    fn long_names_are_cut() {
        assert_eq!(name(&"x".repeat(100)).len(), NAME_LENGTH);
        assert_eq!(name(&"x".repeat(NAME_LENGTH)), "x".repeat(NAME_LENGTH));
    }
}
