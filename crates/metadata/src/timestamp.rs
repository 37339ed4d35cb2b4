//! Dates as text, for people who read descriptors.

use std::time::{SystemTime, UNIX_EPOCH};

/// The time as `2026-11-21 01:49:20.352931`, in UTC. Times before 1970 count as 1970.
pub fn timestamp(time: SystemTime) -> String {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since_epoch.as_secs();
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_date(days);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}.{:06}",
        second_of_day / 3600,
        second_of_day / 60 % 60,
        second_of_day % 60,
        since_epoch.subsec_micros()
    )
}

/// The Gregorian date so many days after 1970-01-01. Years are counted from March, so that the
/// leap day is the last of its year; eras of 400 years have 146,097 days each.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let days_since_year_0 = days + 719_468;
    let (era, day_of_era) = (days_since_year_0 / 146_097, days_since_year_0 % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn known_dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00.000007"),
            (951_782_399, "2000-02-28 23:59:59.000007"),
            (951_782_400, "2000-02-29 00:00:00.000007"),
            (951_868_800, "2000-03-01 00:00:00.000007"),
            (4_107_542_400, "2100-03-01 00:00:00.000007"),
            (1_795_225_760, "2026-11-21 01:49:20.000007"),
        ] {
            let time = UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_micros(7);
            assert_eq!(timestamp(time), text);
        }
    }
}
