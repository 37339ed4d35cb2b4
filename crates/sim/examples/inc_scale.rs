//! Draws how the time of an allreduce grows with the number of hosts, as SVG:
//!
//! `cargo run --release -p millstream-sim --example inc_scale > docs/inc-scale.svg`

use std::fmt::Write;
use std::time::Duration;

use millstream_sim::scenarios::inc_scale::{Point, run_point};

const HOSTS: [u32; 5] = [8, 64, 512, 4096, 16_384];
const LENGTHS: [(u64, &str); 2] = [(8, "8 bytes"), (64 << 10, "64 KiB")];
/// Of a panel.
const SIZE: (f64, f64) = (320.0, 240.0);
const MARGIN: (f64, f64) = (70.0, 40.0);
/// Microseconds at the bottom and at the top.
const MICROS: (f64, f64) = (1.0, 100_000.0);

/// A line of a panel: its name, its colour, and what it shows.
type Line = (&'static str, &'static str, fn(&Point) -> Duration);
const LINES: [Line; 3] = [
    ("over the switches, simulated", "#1b6ca8", |point| point.simulated),
    ("doubling, at best", "#c8553d", |point| point.doubling),
    ("ring, at best", "#6a994e", |point| point.ring),
];

fn x(hosts: u32) -> f64 {
    let (first, last) = (f64::from(HOSTS[0]).log2(), f64::from(HOSTS[4]).log2());
    (f64::from(hosts).log2() - first) / (last - first) * SIZE.0
}

fn y(micros: f64) -> f64 {
    let (bottom, top) = (MICROS.0.log10(), MICROS.1.log10());
    SIZE.1 - (micros.log10() - bottom) / (top - bottom) * SIZE.1
}

fn panel(svg: &mut String, title: &str, points: &[Point]) -> std::fmt::Result {
    let (width, height) = SIZE;
    writeln!(svg, r#"<text x="{}" y="-14" text-anchor="middle">{title}</text>"#, width / 2.0)?;
    let mut micros = MICROS.0;
    while micros <= MICROS.1 {
        let y = y(micros);
        writeln!(svg, r##"<path d="M0 {y:.1}H{width}" stroke="#ddd"/>"##)?;
        writeln!(svg, r#"<text x="-8" y="{:.1}" text-anchor="end">{micros}</text>"#, y + 4.0)?;
        micros *= 10.0;
    }
    for hosts in HOSTS {
        let x = x(hosts);
        writeln!(svg, r##"<path d="M{x:.1} 0V{height}" stroke="#eee"/>"##)?;
        let below = height + 18.0;
        writeln!(svg, r#"<text x="{x:.1}" y="{below}" text-anchor="middle">{hosts}</text>"#)?;
    }
    for (_, colour, time) in LINES {
        let at = |point: &Point| (x(point.hosts), y(time(point).as_nanos() as f64 / 1000.0));
        let line: Vec<String> =
            points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let line = line.join(" ");
        writeln!(
            svg,
            r#"<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>"#
        )?;
        for (x, y) in points.iter().map(at) {
            writeln!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#)?;
        }
    }
    Ok(())
}

fn main() -> std::fmt::Result {
    let (width, height) = (2.0 * (SIZE.0 + MARGIN.0) + 30.0, SIZE.1 + 2.0 * MARGIN.1 + 40.0);
    let mut svg = String::new();
    writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">"#
    )?;
    writeln!(svg, r#"<rect width="{width}" height="{height}" fill="white"/>"#)?;
    for (index, (bytes, title)) in LENGTHS.into_iter().enumerate() {
        let points: Vec<Point> = HOSTS
            .into_iter()
            .map(|hosts| {
                let (point, report) = run_point(1, hosts, bytes);
                assert!(report.passed(), "{report}");
                eprintln!("{point:?}");
                point
            })
            .collect();
        let left = MARGIN.0 + index as f64 * (SIZE.0 + MARGIN.0);
        writeln!(svg, r#"<g transform="translate({left} {})">"#, MARGIN.1)?;
        panel(&mut svg, &format!("{title}, microseconds by hosts"), &points)?;
        writeln!(svg, "</g>")?;
    }
    for (index, (name, colour, _)) in LINES.into_iter().enumerate() {
        let (left, top) = (MARGIN.0 + 240.0 * index as f64, height - 24.0);
        writeln!(
            svg,
            r#"<rect x="{left}" y="{}" width="18" height="4" fill="{colour}"/>"#,
            top - 6.0
        )?;
        writeln!(svg, r#"<text x="{}" y="{top}">{name}</text>"#, left + 26.0)?;
    }
    svg.push_str("</svg>\n");
    print!("{svg}");
    Ok(())
}
