//! The RNR NAK timer table (IBTA table 46).

use core::time::Duration;

/// How long each code asks the requester to wait, in microseconds. Code 0 is the longest.
pub const RNR_TIMERS: [u32; 32] = [
    655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840,
    5120, 7680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760,
    327_680, 491_520,
];

/// The wait that a code asks for.
pub(crate) fn rnr_wait(code: u8) -> Duration {
    Duration::from_micros(RNR_TIMERS[usize::from(code & 31)].into())
}

/// The code of the shortest wait that is at least `wait`; the longest there is when none is.
pub fn encode_rnr_timer(wait: Duration) -> u8 {
    let micros = wait.as_micros();
    (1..32_u8).find(|&code| u128::from(RNR_TIMERS[usize::from(code)]) >= micros).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_up() {
        assert_eq!(encode_rnr_timer(Duration::ZERO), 1);
        assert_eq!(encode_rnr_timer(Duration::from_micros(10)), 1);
        assert_eq!(encode_rnr_timer(Duration::from_micros(11)), 2);
        assert_eq!(encode_rnr_timer(Duration::from_millis(500)), 0);
        assert_eq!(rnr_wait(12), Duration::from_micros(640));
    }
}
