//! Sizes, durations and shares as they are written on the command line, and how sizes, rates and
//! times are shown.

use std::time::Duration;

/// The units of sizes. Small letters mean the same; others, such as Mb, might mean bits.
const SIZES: [(&str, u64); 9] = [
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// The units of durations, in nanoseconds.
const DURATIONS: [(&str, u64); 5] = [
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// A number of bytes: `4096`, `64KiB`, `1.5MiB`, `2GB`.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let explain = || format!("{text:?} is not a size: write 4096, 64KiB, 1.5MiB or 2GB");
    let (number, unit) = split(text, "a size").ok_or_else(explain)??;
    let known = |&(name, _): &(&str, u64)| unit == name || unit == name.to_ascii_lowercase();
    let scale = match SIZES.into_iter().find(known) {
        Some((_, scale)) => scale,
        None if unit.is_empty() => 1,
        None => {
            return Err(format!(
                "{text:?} has the unit {unit:?}: sizes are in B, KB, MB, GB, TB (powers of 1000) \
                 or KiB, MiB, GiB, TiB (powers of 1024)"
            ));
        }
    };
    match number.times(scale) {
        Err(TimesError::Fraction) => Err(format!("{text} is not a whole number of bytes")),
        Err(TimesError::TooMuch) => Err(format!("{text} is more than 2^64 - 1 bytes")),
        Ok(bytes) => Ok(bytes),
    }
}

/// A time: `50us`, `250ms`, `1.5s`, `10m`, `2h`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let explain =
        || format!("{text:?} is not a duration: write 250ms or 5s; the units are us, ms, s, m, h");
    let (number, unit) = split(text, "a duration").ok_or_else(explain)??;
    let known = DURATIONS.into_iter().find(|&(name, _)| unit == name);
    let (_, scale) = known.ok_or_else(explain)?;
    match number.times(scale) {
        Err(TimesError::Fraction) => Err(format!("{text} is not a whole number of nanoseconds")),
        Err(TimesError::TooMuch) => Err(format!("{text} is more than 2^64 - 1 nanoseconds")),
        Ok(nanoseconds) => Ok(Duration::from_nanos(nanoseconds)),
    }
}

/// A decimal number, exactly: `digits` in units of 10^-`places`.
struct Decimal {
    digits: u128,
    places: u32,
}

enum TimesError {
    /// It is no whole number.
    Fraction,
    /// It is more than 64 bits hold.
    TooMuch,
}

impl Decimal {
    fn times(&self, scale: u64) -> Result<u64, TimesError> {
        let product = self.digits.checked_mul(scale.into()).ok_or(TimesError::TooMuch)?;
        let one = 10_u128.pow(self.places);
        if !product.is_multiple_of(one) {
            return Err(TimesError::Fraction);
        }
        u64::try_from(product / one).map_err(|_| TimesError::TooMuch)
    }
}

/// A number and what follows it. `None` when there is no number; an error when it is one that
/// `what` cannot be.
fn split<'a>(text: &'a str, what: &str) -> Option<Result<(Decimal, &'a str), String>> {
    let number = |c: char| c.is_ascii_digit() || c == '.';
    if let Some(rest) = text.strip_prefix('-')
        && rest.starts_with(number)
    {
        return Some(Err(format!("{text} is less than 0, which {what} cannot be")));
    }
    let (digits, unit) = text.split_at(text.find(|c| !number(c)).unwrap_or(text.len()));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() || fraction.contains('.') || (digits.contains('.') && fraction.is_empty()) {
        return None;
    }
    let (whole, fraction) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
    // With more digits the product with a unit might not fit 128 bits, and none is of use.
    if whole.len() > 20 {
        return Some(Err(format!("{text} is more than 2^64 - 1, which is the most there can be")));
    }
    if fraction.len() > 9 {
        return Some(Err(format!("{text} has more than 9 digits after the point")));
    }
    let digits = format!("0{whole}{fraction}").parse().ok()?;
    Some(Ok((Decimal { digits, places: fraction.len() as u32 }, unit)))
}

/// A share of something: `10%`, `0.1%`, or as a fraction, `0.1`.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let explain = || format!("{text:?} is not a share from 0% to 100%: write 10% or 0.1");
    let (number, scale) = match text.strip_suffix('%') {
        Some(number) => (number, 0.01),
        None => (text, 1.0),
    };
    let share = number.parse::<f64>().map_err(|_| explain())? * scale;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err(explain()) }
}

/// Bytes as people read them: `64 KiB`, `1.5 MiB`.
pub(crate) fn readable(bytes: u64) -> String {
    let units = [("GiB", 1_u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.into_iter().find(|&(_, scale)| bytes >= scale) {
        None => format!("{bytes} B"),
        Some((unit, scale)) if bytes.is_multiple_of(scale) => format!("{} {unit}", bytes / scale),
        Some((unit, scale)) => format!("{:.1} {unit}", bytes as f64 / scale as f64),
    }
}

/// A number of bytes in a sentence: `1 byte`, `4096 bytes`.
pub(crate) fn bytes(count: u64) -> String {
    if count == 1 { "1 byte".to_owned() } else { format!("{count} bytes") }
}

/// Bytes per second as people read them, in powers of 1000 and three digits: `1.23 GB/s`,
/// `45.6 KB/s`, `7 B/s`.
pub(crate) fn rate(bytes_per_s: f64) -> String {
    let (mut value, mut unit) = (bytes_per_s, "B");
    for larger in ["KB", "MB", "GB", "TB"] {
        // What would be rounded to 1000 belongs to the next unit.
        if value < 999.5 {
            break;
        }
        (value, unit) = (value / 1000.0, larger);
    }
    let places = match value {
        _ if unit == "B" || value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.places$} {unit}/s")
}

/// A time as a clock shows it: `0:05`, `12:34`, `1:00:00`.
pub(crate) fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1B", 1),
            ("64KiB", 65_536),
            ("64kib", 65_536),
            ("1.5MiB", 1_572_864),
            ("2GiB", 2_147_483_648),
            ("1TiB", 1 << 40),
            ("1KB", 1000),
            ("1kb", 1000),
            ("1.5MB", 1_500_000),
            ("2GB", 2_000_000_000),
            ("1TB", 1_000_000_000_000),
            ("0.000000001GB", 1),
            ("007", 7),
            ("9223372036854775808", 1 << 63),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        let most = "more than 2^64 - 1";
        for (text, says) in [
            ("", "64KiB"),
            ("KiB", "64KiB"),
            (".5KiB", "64KiB"),
            ("5.", "64KiB"),
            ("1.2.3", "64KiB"),
            ("inf", "64KiB"),
            ("NaN", "64KiB"),
            ("-1", "less than 0"),
            ("-1KiB", "less than 0"),
            ("-x", "64KiB"),
            ("1Mb", "powers of 1000"),
            ("1k", "KiB"),
            ("1 KiB", "KiB"),
            ("0x10", "KiB"),
            ("1e3", "KiB"),
            ("12XB", "TiB"),
            ("1.3B", "whole number"),
            ("0.3KiB", "whole number"),
            ("0.0000000001TB", "9 digits"),
            ("18446744073709551616", most),
            ("17179869184GiB", most),
            ("99999999999999999999TiB", most),
            ("340282366920938463463374607431768211456", most),
        ] {
            let error = size(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn durations() {
        for (text, expected) in [
            ("50us", Duration::from_micros(50)),
            ("250ms", Duration::from_millis(250)),
            ("5s", Duration::from_secs(5)),
            ("1.5s", Duration::from_millis(1500)),
            ("0s", Duration::ZERO),
            ("10m", Duration::from_secs(600)),
            ("0.5h", Duration::from_secs(1800)),
        ] {
            assert_eq!(duration(text), Ok(expected), "{text}");
        }
        for (text, says) in [
            ("", "250ms or 5s"),
            ("5", "us, ms, s, m, h"),
            ("s", "250ms or 5s"),
            ("5S", "250ms or 5s"),
            ("-1s", "less than 0"),
            ("1e30s", "250ms or 5s"),
            ("infs", "250ms or 5s"),
            ("0.0001us", "whole number"),
            ("9999999h", "more than 2^64 - 1"),
        ] {
            let error = duration(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn shares() {
        for (text, expected) in [("10%", 0.1), ("0", 0.0), ("1", 1.0), ("0.25", 0.25)] {
            assert!((share(text).unwrap() - expected).abs() < 1e-12, "{text}");
        }
        for text in ["", "%", "101%", "-1%", "2", "NaN"] {
            assert!(share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bytes_for_people() {
        assert_eq!(readable(1000), "1000 B");
        assert_eq!(readable(65_536), "64 KiB");
        assert_eq!(readable(1_572_864), "1.5 MiB");
    }

    #[test]
    fn rates_for_people() {
        for (bytes_per_s, text) in [
            (0.0, "0 B/s"),
            (7.4, "7 B/s"),
            (999.4, "999 B/s"),
            (999.6, "1.00 KB/s"),
            (1234.0, "1.23 KB/s"),
            (45_600.0, "45.6 KB/s"),
            (999_499.0, "999 KB/s"),
            (999_501.0, "1.00 MB/s"),
            (9.996e6, "10.0 MB/s"),
            (123_456_789.0, "123 MB/s"),
            (1.5e9, "1.50 GB/s"),
            (2e15, "2000 TB/s"),
        ] {
            assert_eq!(rate(bytes_per_s), text);
        }
    }

    #[test]
    fn counts_and_times_for_people() {
        assert_eq!([bytes(0), bytes(1), bytes(2)], ["0 bytes", "1 byte", "2 bytes"]);
        let times = [5, 754, 3600, 36_061].map(|seconds| clock(Duration::from_secs(seconds)));
        assert_eq!(times, ["0:05", "12:34", "1:00:00", "10:01:01"]);
    }
}
