//! Which datagrams travel as one segmented message.

/// The most segments of one message: `UDP_MAX_SEGMENTS` was 64 before Linux 6.9, is 128 since.
/// Receivers that infer the identification of a segment rely on it being below 64 as well.
pub const MAX_SEGMENTS: usize = 64;

/// The most bytes of one message: an IPv4 packet of 65,535 bytes less its headers. IPv6 could take
/// 20 more; one limit serves both.
pub const MAX_MESSAGE_LENGTH: usize = 65_507;

/// How many of the first `datagrams` make one message: they have one destination and one length,
/// and only the last may be shorter. At least 1, unless there are none.
pub(super) fn group<D: PartialEq>(mut datagrams: impl Iterator<Item = (D, usize)>) -> usize {
    let Some((destination, segment)) = datagrams.next() else { return 0 };
    let mut count = 1;
    let mut total = segment;
    for (other, length) in datagrams {
        total += length;
        if count == MAX_SEGMENTS
            || other != destination
            || length > segment
            || total > MAX_MESSAGE_LENGTH
        {
            break;
        }
        count += 1;
        if length < segment {
            break;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_one_length_are_grouped() {
        let count = |lengths: &[usize]| group(lengths.iter().map(|&length| ((), length)));
        assert_eq!(count(&[]), 0);
        assert_eq!(count(&[100]), 1);
        assert_eq!(count(&[100, 100, 100]), 3);
        // The last may be shorter, and ends the group.
        assert_eq!(count(&[100, 100, 99, 99]), 3);
        assert_eq!(count(&[100, 99, 99]), 2);
        // The last answer to a READ, and the first two to the next.
        assert_eq!(count(&[104, 104, 100, 100]), 3);
        // A longer one cannot be in it.
        assert_eq!(count(&[100, 100, 101]), 2);
        assert_eq!(count(&[99, 100]), 1);
    }

    #[test]
    fn groups_stay_within_the_limits_of_the_kernel() {
        let count = |length: usize, of: usize| group(std::iter::repeat_n(((), length), of));
        assert_eq!(count(20, 1000), MAX_SEGMENTS);
        assert_eq!(count(4112, 1000), 15);
        assert_eq!(count(65_507, 2), 1);
        // Exactly the limit, and one byte more.
        let of = |lengths: [usize; 2]| group(lengths.into_iter().map(|length| ((), length)));
        assert_eq!(of([40_000, 25_507]), 2);
        assert_eq!(of([40_000, 25_508]), 1);
        // One that no message can hold is still a group: the kernel refuses it, and it is counted.
        assert_eq!(count(70_000, 2), 1);
    }

    #[test]
    fn destinations_are_kept_apart() {
        let to = |destinations: &[u8]| group(destinations.iter().map(|&to| (to, 100)));
        assert_eq!(to(&[1, 1, 2, 1]), 2);
        assert_eq!(to(&[1, 2, 1]), 1);
    }
}
