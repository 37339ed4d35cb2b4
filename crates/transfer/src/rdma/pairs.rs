//! Which of two engines' NICs are connected with each other.

use std::cmp::Reverse;
use std::net::IpAddr;

/// Pairs of indexes, local and remote, such that each NIC that can reach one of the other side has a
/// partner, and none more than it must.
///
/// Those whose addresses have the most leading bits in common, as NICs on one link do, are partners
/// first; of equals those at the same position.
pub(super) fn pairs(locals: &[IpAddr], remotes: &[IpAddr]) -> Vec<(usize, usize)> {
    let reachable = |all: &[IpAddr], from: IpAddr| -> Vec<usize> {
        (0..all.len()).filter(|&index| is_routable(from, all[index])).collect()
    };
    let matched = match_alike(locals, remotes);
    let mut used = (vec![0_usize; locals.len()], vec![0_usize; remotes.len()]);
    for &(local, remote) in &matched {
        (used.0[local], used.1[remote]) = (1, 1);
    }
    let mut pairs = Vec::with_capacity(locals.len().max(remotes.len()));
    // Who reaches whom divides the NICs into groups. In each of them, the side that has more gives each
    // of its NICs a partner.
    for (local, &address) in locals.iter().enumerate() {
        let partners = reachable(remotes, address);
        if partners.len() > reachable(locals, address).len() {
            continue;
        }
        let known = matched.iter().find(|pair| pair.0 == local).map(|pair| pair.1);
        let partner = known.or_else(|| choose(local, address, &partners, remotes, &mut used.1));
        pairs.extend(partner.map(|remote| (local, remote)));
    }
    for (remote, &address) in remotes.iter().enumerate() {
        let partners = reachable(locals, address);
        if partners.len() >= reachable(remotes, address).len() {
            continue;
        }
        let known = matched.iter().find(|pair| pair.1 == remote).map(|pair| pair.0);
        let partner = known.or_else(|| choose(remote, address, &partners, locals, &mut used.0));
        pairs.extend(partner.map(|local| (local, remote)));
    }
    pairs
}

/// Pairs in which nobody is twice, the most alike first, until one side of each group has no more.
fn match_alike(locals: &[IpAddr], remotes: &[IpAddr]) -> Vec<(usize, usize)> {
    let position = |all: &[IpAddr], index: usize| {
        all[..index].iter().filter(|&&other| is_routable(all[index], other)).count()
    };
    let mut all = Vec::new();
    for (local, &from) in locals.iter().enumerate() {
        for (remote, &to) in remotes.iter().enumerate().filter(|(_, to)| is_routable(from, **to)) {
            let distance = position(locals, local).abs_diff(position(remotes, remote));
            all.push((Reverse(common_bits(from, to)), distance, local, remote));
        }
    }
    all.sort_unstable();
    let mut matched: Vec<(usize, usize)> = Vec::new();
    for (_, _, local, remote) in all {
        if matched.iter().all(|pair| pair.0 != local && pair.1 != remote) {
            matched.push((local, remote));
        }
    }
    matched
}

/// The partner of the NIC at `index`.
fn choose(
    index: usize,
    address: IpAddr,
    partners: &[usize],
    all: &[IpAddr],
    used: &mut [usize],
) -> Option<usize> {
    let count = partners.len();
    let rank = |&position: &usize| {
        let partner = partners[position];
        let distance = (position + count - index % count) % count;
        (used[partner], Reverse(common_bits(address, all[partner])), distance)
    };
    let chosen = (0..count).min_by_key(rank).map(|position| partners[position])?;
    used[chosen] += 1;
    Some(chosen)
}

/// Whether packets from one address can reach the other, as far as the addresses tell.
fn is_routable(local: IpAddr, remote: IpAddr) -> bool {
    local.is_ipv4() == remote.is_ipv4() && local.is_loopback() == remote.is_loopback()
}

/// How many leading bits two addresses of one family have in common.
fn common_bits(a: IpAddr, b: IpAddr) -> u32 {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(list: &str) -> Vec<IpAddr> {
        list.split_whitespace().map(|address| address.parse().unwrap()).collect()
    }

    #[test]
    fn everyone_who_can_has_a_partner() {
        type Row = (&'static str, &'static str, &'static [(usize, usize)]);
        let table: [Row; 15] = [
            ("", "", &[]),
            ("10.0.0.1", "", &[]),
            ("", "10.0.0.1", &[]),
            ("10.0.0.1", "10.0.0.2", &[(0, 0)]),
            // Families and loopback do not reach each other.
            ("10.0.0.1", "fd00::2", &[]),
            ("127.0.0.1", "10.0.0.2", &[]),
            ("::1", "fd00::2", &[]),
            // One order here, the other one there.
            ("10.0.0.1 fd00::1", "fd00::2 10.0.0.2", &[(0, 1), (1, 0)]),
            ("10.0.0.1 fd00::1", "10.0.0.2", &[(0, 0)]),
            // The side that has more NICs gives each of them a partner, within each group.
            ("127.0.0.1", "127.0.0.2 127.0.0.3 127.0.0.4", &[(0, 0), (0, 1), (0, 2)]),
            (
                "10.0.0.1 10.0.0.2",
                "10.0.0.5 10.0.0.6 10.0.0.7 10.0.0.8",
                &[(0, 0), (1, 1), (0, 2), (1, 3)],
            ),
            (
                "10.0.0.1 10.0.1.1 10.0.2.1 fd00::1",
                "10.0.0.2 fd00::2 fd00::3",
                &[(0, 0), (1, 0), (2, 0), (3, 1), (3, 2)],
            ),
            // NICs on the same link, named in another order.
            ("10.0.0.1 10.0.1.1 10.0.2.1", "10.0.2.2 10.0.0.2 10.0.1.2", &[(0, 1), (1, 2), (2, 0)]),
            // The second is the other side's only one on its link, though the first reaches it too.
            ("10.0.0.1 10.0.1.1", "10.0.2.2 10.0.1.2", &[(0, 0), (1, 1)]),
            // Nothing in common tells them apart, so the position does.
            (
                "192.168.0.1 192.168.0.2 192.168.0.3",
                "10.0.0.1 10.0.0.2 10.0.0.3",
                &[(0, 0), (1, 1), (2, 2)],
            ),
        ];
        for (locals, remotes, expected) in table {
            let found = pairs(&addresses(locals), &addresses(remotes));
            assert_eq!(found, expected, "[{locals}] against [{remotes}]");
        }
    }

    #[test]
    fn nobody_is_left_out_and_there_are_no_more_pairs_than_that_takes() {
        let pool = addresses("10.0.0.1 fd00::1 10.0.1.1 127.0.0.1 10.0.1.7 fd00::9 ::1 10.9.0.1");
        let side = |mask: usize| -> Vec<IpAddr> {
            (0..pool.len()).filter(|bit| mask >> bit & 1 == 1).map(|bit| pool[bit]).collect()
        };
        for mask in 0..1_usize << (2 * pool.len()) {
            let (locals, remotes) = (side(mask & 0xff), side(mask >> 8));
            let pairs = pairs(&locals, &remotes);
            for &(local, remote) in &pairs {
                assert!(is_routable(locals[local], remotes[remote]));
                let only = |side: fn(&(usize, usize)) -> usize, index| {
                    pairs.iter().filter(|&pair| side(pair) == index).count() == 1
                };
                assert!(only(|pair| pair.0, local) || only(|pair| pair.1, remote), "{pairs:?}");
            }
            for (index, &local) in locals.iter().enumerate() {
                let reaches = remotes.iter().any(|&remote| is_routable(local, remote));
                assert_eq!(reaches, pairs.iter().any(|pair| pair.0 == index));
            }
            for (index, &remote) in remotes.iter().enumerate() {
                let reached = locals.iter().any(|&local| is_routable(local, remote));
                assert_eq!(reached, pairs.iter().any(|pair| pair.1 == index));
            }
        }
    }
}
