//! Sizes and durations as they are written on the command line.

use std::time::Duration;

const BINARY: [(&str, u64); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("B", 1)];

/// A number of bytes: `4096`, `64KiB`, `1.5MiB`, `2GiB`.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let (number, scale) = BINARY
        .into_iter()
        .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)))
        .unwrap_or((text, 1));
    let explain = || format!("{text:?} is not a size: write 4096, 64KiB, 1.5MiB or 2GiB");
    if !number.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(explain());
    }
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(|| format!("{text} is more than 2^64 bytes"));
    }
    let bytes = number.parse::<f64>().map_err(|_| explain())? * scale as f64;
    // Up to 2^53, every whole number of bytes is exact.
    if bytes.fract() == 0.0 && bytes <= (1_u64 << 53) as f64 {
        Ok(bytes as u64)
    } else {
        Err(format!("{text} is not a whole number of bytes"))
    }
}

/// A time: `250ms`, `5s`, `1.5s`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let explain = || format!("{text:?} is not a duration: write 250ms or 5s");
    let (number, scale) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s').ok_or_else(explain)?, 1.0),
    };
    if !number.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(explain());
    }
    let seconds = number.parse::<f64>().map_err(|_| explain())? * scale;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text} is too long"))
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
            ("1.5MiB", 1_572_864),
            ("2GiB", 2_147_483_648),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "KiB",
            "-1",
            "1KB",
            "1kib",
            "1 KiB",
            "1.3B",
            "0x10",
            "17179869184GiB",
            "inf",
            "NaN",
        ] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1500)));
        for text in ["", "5", "s", "-1s", "5m", "1e30s", "infs"] {
            assert!(duration(text).is_err(), "{text}");
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
}
