//! Figures of measurements: rates, and how they are written.

/// So many of something in each of something else. Where that cannot be told, because a clock
/// stands still or nothing was done, it is 0: JSON has no infinity.
pub(crate) fn per(amount: f64, of: f64) -> f64 {
    let rate = amount / of;
    if rate.is_finite() { rate } else { 0.0 }
}

/// A figure with three digits that count, for columns of a table.
pub(crate) fn three_digits(figure: f64) -> String {
    let decimals = match figure {
        figure if figure > 0.0 => (2.0 - figure.log10().floor()).clamp(0.0, 6.0) as usize,
        _ => 2,
    };
    format!("{figure:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_told_is_zero() {
        assert!((per(6.0, 3.0) - 2.0).abs() < 1e-12);
        for (amount, of) in [(1.0, 0.0), (0.0, 0.0), (f64::INFINITY, 2.0), (1.0, f64::NAN)] {
            assert_eq!(per(amount, of).to_bits(), 0, "{amount} per {of}");
        }
    }

    #[test]
    fn three_digits_count() {
        for (figure, text) in [
            (0.0, "0.00"),
            (0.000_412, "0.000412"),
            (0.123_4, "0.123"),
            (1.234, "1.23"),
            (12.34, "12.3"),
            (123.4, "123"),
            (123_456.0, "123456"),
        ] {
            assert_eq!(three_digits(figure), text);
        }
    }
}
