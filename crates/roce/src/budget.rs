//! What the device's receive buffer holds: how much of it queue pairs may ask for, and how much
//! peers are told that they may send.
//!
//! The data of a READ comes as fast as the peer likes, into a buffer that all queue pairs share, and
//! what does not fit is lost and sent again. So a request is sent only when its answer fits beside
//! those that are on their way. Who must wait waits in a line, of which each in turn takes what one
//! request asks for.

use std::collections::VecDeque;

/// What a packet takes beside its payload: its headers, and what a kernel needs to keep it. The
/// kernel's account of a buffer is twice its bytes, and it charges at most twice this sum for a
/// datagram that comes alone (8448 bytes for 4096, 832 for 64), and less for those that come
/// together.
const OVERHEAD: u64 = 352;

/// The fewest packets that one request may ask for, however small the budget is.
const LEAST_CHUNK: u64 = 4;

/// The most that one peer is granted is this part of the budget.
const MAX_SHARE: u64 = 8;

/// The least: with less, a connection that has the device for itself is slow.
const MIN_SHARE: u64 = 128 << 10;

/// The least that each of several peers gets which come together, if that fits for all of them: with less, few packets go
/// at a time, and each train of them costs as much as a longer one.
const MIN_COMMON_SHARE: u64 = 32 << 10;

/// Peers that come together get this part of the budget at least, whatever others were granted.
const MIN_COMMON_PART: u64 = 4;

/// What peers were granted leaves this part of the budget for answers to our own requests, however
/// many peers there are.
const OWN_SHARE: u64 = 4;

/// Bytes that `packets` with so many bytes of payload together take of a receive buffer.
pub(crate) const fn cost(payload: u64, packets: u64) -> u64 {
    payload + packets * OVERHEAD
}

/// The place of a queue pair in the line.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    /// What it waits for.
    pub(crate) waits_for: Option<u64>,
    /// It has asked, in vain, since this was last cleared.
    pub(crate) asked: bool,
}

#[derive(Debug)]
pub(crate) struct ReceiveBudget {
    /// Bytes; `None` when nobody has said how many there are.
    limit: Option<u64>,
    /// What peers were told they may send.
    granted: u64,
    /// What was asked for and has not come.
    requested: u64,
    /// Queue pairs, by their index, whose next request has no room.
    waiting: VecDeque<u32>,
}

impl ReceiveBudget {
    pub(crate) const UNLIMITED: Self =
        Self { limit: None, granted: 0, requested: 0, waiting: VecDeque::new() };

    pub(crate) fn set_limit(&mut self, bytes: u64) {
        self.limit = Some(bytes);
    }

    /// What answers to our requests may take together.
    fn own(&self) -> Option<u64> {
        self.limit.map(|limit| limit.saturating_sub(self.granted).max(limit / OWN_SHARE))
    }

    /// How many packets with so much payload one request may ask for: several requests fit.
    pub(crate) fn longest_chunk(&self, payload: u64) -> u64 {
        self.limit.map_or(u64::MAX, |limit| (limit / cost(payload, 1) / 4).max(LEAST_CHUNK))
    }

    /// Whether so many bytes more may be asked for. With nothing under way any request may go.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        self.requested == 0 || self.own().is_none_or(|own| self.requested + bytes <= own)
    }

    /// Asks for room, but not before those that wait; a queue pair that does not get it waits with
    /// them.
    pub(crate) fn ask(&mut self, index: u32, turn: &mut Turn, bytes: u64) -> bool {
        let first = self.waiting.front().is_none_or(|&first| first == index);
        if first && self.has_room(bytes) {
            if turn.waits_for.take().is_some() {
                self.waiting.pop_front();
            }
            self.requested += bytes;
            return true;
        }
        turn.asked = true;
        if turn.waits_for.replace(bytes).is_none() {
            self.waiting.push_back(index);
        }
        false
    }

    /// What is asked for again needs no room: its first answer is lost.
    pub(crate) fn ask_again(&mut self, bytes: u64) {
        self.requested += bytes;
    }

    /// So much has come, or will not.
    pub(crate) fn give_back(&mut self, bytes: u64) {
        self.requested = self.requested.saturating_sub(bytes);
    }

    /// The queue pair that has its turn when there is room.
    pub(crate) fn first_waiting(&self) -> Option<u32> {
        self.waiting.front().copied()
    }

    /// A queue pair waits no more, if it did.
    pub(crate) fn leave(&mut self, index: u32, turn: &mut Turn) {
        if turn.waits_for.take().is_some() {
            self.waiting.retain(|&other| other != index);
        }
    }

    /// What is asked for and has not come.
    pub(crate) const fn requested(&self) -> u64 {
        self.requested
    }

    /// The share of one more peer: what it can use, but no more than an eighth, nor than half of what
    /// is left. As long as that is more than the least, all shares fit together.
    pub(crate) fn grant(&mut self, usable: u64) -> Option<u64> {
        let limit = self.limit?;
        let left = limit.saturating_sub(self.granted);
        let share = (limit / MAX_SHARE).min(left / 2).max(MIN_SHARE).min(usable);
        self.granted += share;
        Some(share)
    }

    /// The share of each of so many more peers, which come together and send at the same time: what it can use, but no
    /// more than its part of half of what is left. As long as there is a quarter, all shares fit together.
    pub(crate) fn grant_each(&mut self, peers: u64, usable: u64) -> Option<u64> {
        let limit = self.limit?;
        let peers = peers.max(1);
        let left = limit.saturating_sub(self.granted);
        let fair = (left / 2).max(limit / MIN_COMMON_PART) / peers;
        let share = fair.max(MIN_COMMON_SHARE.min(limit / peers)).min(usable);
        self.granted += share * peers;
        Some(share)
    }

    /// A peer is gone.
    pub(crate) fn withdraw(&mut self, share: u64) {
        self.granted = self.granted.saturating_sub(share);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(limit: u64) -> ReceiveBudget {
        let mut budget = ReceiveBudget::UNLIMITED;
        budget.set_limit(limit);
        budget
    }

    #[test]
    fn without_a_limit_everything_fits() {
        let mut budget = ReceiveBudget::UNLIMITED;
        let mut turn = Turn::default();
        assert!((0..4).all(|index| budget.ask(index, &mut turn, 1 << 61)));
        assert_eq!(turn.waits_for, None);
        assert_eq!(budget.grant(1), None);
        assert_eq!(budget.longest_chunk(4096), u64::MAX);
    }

    #[test]
    fn what_does_not_fit_waits_in_a_line() {
        let mut budget = budget(100);
        let mut turns = [const { Turn { waits_for: None, asked: false } }; 4];
        let mut ask = |budget: &mut ReceiveBudget, index: u32, bytes| {
            budget.ask(index, &mut turns[index as usize], bytes)
        };
        assert!(ask(&mut budget, 0, 60));
        assert!(!ask(&mut budget, 1, 60));
        // It would fit, but another waits.
        assert!(!ask(&mut budget, 2, 40));
        assert!(!ask(&mut budget, 3, 40));
        assert!(!ask(&mut budget, 1, 60));
        assert_eq!(budget.waiting, [1, 2, 3], "each waits once");
        budget.give_back(60);
        assert!(!ask(&mut budget, 2, 40));
        assert!(ask(&mut budget, 1, 60) && ask(&mut budget, 2, 40));
        assert_eq!((budget.first_waiting(), budget.requested), (Some(3), 100));
        budget.leave(0, &mut turns[0]);
        budget.leave(3, &mut turns[3]);
        assert_eq!(budget.first_waiting(), None);
        budget.leave(3, &mut turns[3]);
    }

    #[test]
    fn one_request_may_always_go() {
        let mut budget = budget(100);
        let mut turns = [Turn::default(), Turn::default()];
        assert!(budget.ask(0, &mut turns[0], 1000));
        assert!(!budget.ask(1, &mut turns[1], 1));
        budget.give_back(1000);
        assert!(budget.ask(1, &mut turns[1], 1000));
    }

    #[test]
    fn shares_fit_together_until_they_are_the_least() {
        let limit = 16 << 20;
        let mut budget = budget(limit);
        let shares: Vec<u64> = (0..10).map(|_| budget.grant(u64::MAX).unwrap()).collect();
        assert_eq!(shares[..7], [limit / 8; 7]);
        assert_eq!(shares[7..], [limit / 16, limit / 32, limit / 64]);
        assert!(shares.iter().sum::<u64>() < limit);
        for _ in 0..100 {
            budget.grant(u64::MAX);
        }
        assert_eq!(budget.grant(u64::MAX), Some(MIN_SHARE));
        assert_eq!(budget.own(), Some(limit / 4), "our own requests are not starved");
        // Whoever leaves makes room.
        shares.iter().for_each(|&share| budget.withdraw(share));
        (0..101).for_each(|_| budget.withdraw(MIN_SHARE));
        assert_eq!(budget.grant(u64::MAX), Some(limit / 8));
        assert_eq!(budget.grant(1000), Some(1000), "nobody gets more than it can use");
    }

    #[test]
    fn who_comes_together_shares_alike() {
        let limit = 16 << 20;
        let mut budget = budget(limit);
        assert_eq!(budget.grant_each(8, 500_000), Some(500_000), "no more than it can use");
        budget.withdraw(8 * 500_000);
        assert_eq!(budget.grant_each(64, u64::MAX), Some(limit / 2 / 64));
        assert_eq!(budget.grant_each(64, u64::MAX), Some(limit / 4 / 64));
        assert_eq!(budget.grant_each(64, u64::MAX), Some(limit / 4 / 64));
        assert_eq!(budget.granted, limit);
        // From here on they do not fit, and nobody is starved.
        assert_eq!(budget.grant_each(64, u64::MAX), Some(limit / 4 / 64));
        for _ in 0..2 {
            budget.withdraw(limit / 2);
        }
        assert_eq!(budget.grant_each(2, u64::MAX), Some(3 * limit / 16));
    }

    #[test]
    fn of_a_small_buffer_those_that_come_together_take_all() {
        for (limit, peers, share) in [
            (4 << 20, 64, 32 << 10),
            (2 << 20, 64, 32 << 10),
            (1 << 20, 64, 16 << 10),
            (280 << 10, 8, 32 << 10),
            (208 << 10, 8, 26 << 10),
            (208 << 10, 2, 52 << 10),
            (63, 64, 0),
        ] {
            let mut budget = budget(limit);
            assert_eq!(budget.grant_each(peers, u64::MAX), Some(share), "{limit}, {peers}");
            assert!(budget.granted <= limit);
        }
        let mut unlimited = ReceiveBudget::UNLIMITED;
        assert_eq!(unlimited.grant_each(8, 1), None);
    }
}
