//! What is known of the ways to peers, and when to ask again.

use std::collections::HashMap;
use std::mem;
use std::net::IpAddr;
use std::time::Duration;

use millstream_roce::Instant;

/// The most peers of a device that are remembered. Of more, the one that was unused for the longest
/// is forgotten, and asked for again when it is needed.
pub(super) const CAPACITY: usize = 4096;

/// How often a known way that is in use is looked at again. Changes are heard of at once; this is for
/// those that make no noise, and lets the kernel confirm addresses before it forgets them.
pub(super) const REFRESH: Duration = Duration::from_secs(10);

/// How often an unknown one is asked for again: as the kernel's neighbour table does.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// How soon the kernel is asked again when it had no answer.
pub(super) const AGAIN: Duration = Duration::from_millis(50);

/// How frames get to a peer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Way {
    /// Number of the interface.
    pub(super) interface: u32,
    /// Link addresses of the next hop and of the interface.
    pub(super) link_destination: [u8; 6],
    pub(super) link_source: [u8; 6],
    /// The longest IP packet.
    pub(super) mtu: usize,
}

/// The answer of [`Table::look_up`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Found {
    pub(super) way: Option<Way>,
    /// It has to be asked for: [`Table::due`] names it now.
    pub(super) ask: bool,
}

/// What asking for a peer came to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Answer {
    /// This way.
    Way(Way),
    /// There is none.
    Nowhere,
    /// The kernel is finding out. A way that was known is as good as before.
    Unsure,
    /// The kernel could not be asked, which says nothing about the peer.
    Failed,
}

/// A bounded memory of peers.
pub(super) struct Table {
    peers: HashMap<IpAddr, Peer>,
    capacity: usize,
    /// Counts look-ups.
    uses: u64,
}

struct Peer {
    way: Option<Way>,
    question: Question,
    /// When it is to be asked for again. `None` before it was asked for, and of a known way that
    /// nobody uses.
    next: Option<Instant>,
    last_use: u64,
    /// Looked up since `next` was last reached.
    used: bool,
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Question {
    None,
    /// To be asked.
    Open,
    /// Asked; the answer is to come.
    Asked,
}

impl Table {
    /// Room for so many peers. Looking up allocates nothing.
    pub(super) fn new(capacity: usize) -> Self {
        Self { peers: HashMap::with_capacity(capacity), capacity, uses: 0 }
    }

    /// The way to a peer, as far as it is known.
    pub(super) fn look_up(&mut self, peer: IpAddr) -> Found {
        self.uses += 1;
        if let Some(known) = self.peers.get_mut(&peer) {
            known.last_use = self.uses;
            known.used = true;
            // It was idle: its way serves, and is looked at again.
            let ask = known.next.is_none() && known.question == Question::None;
            if ask {
                known.question = Question::Open;
            }
            return Found { way: known.way, ask };
        }
        if self.peers.len() == self.capacity {
            let oldest = self.peers.iter().min_by_key(|(_, peer)| peer.last_use);
            if let Some(oldest) = oldest.map(|(&address, _)| address) {
                self.peers.remove(&oldest);
            }
        }
        let question = Question::Open;
        let new = Peer { way: None, question, next: None, last_use: self.uses, used: true };
        self.peers.insert(peer, new);
        Found { way: None, ask: true }
    }

    /// Whether this peer has been looked up, and not been forgotten since.
    pub(super) fn knows(&self, peer: IpAddr) -> bool {
        self.peers.contains_key(&peer)
    }

    /// Appends the peers to ask for now.
    pub(super) fn due(&mut self, now: Instant, peers: &mut Vec<IpAddr>) {
        self.peers.retain(|&address, peer| {
            if peer.next.is_some_and(|next| next <= now) {
                peer.next = None;
                if mem::take(&mut peer.used) {
                    peer.question = Question::Open;
                } else if peer.way.is_none() {
                    // Nobody wants to know any more.
                    return false;
                }
            }
            if peer.question == Question::Open {
                peer.question = Question::Asked;
                peers.push(address);
            }
            true
        });
    }

    /// Takes an answer.
    pub(super) fn answer(&mut self, peer: IpAddr, answer: Answer, now: Instant) {
        // It may have been forgotten meanwhile.
        let Some(peer) = self.peers.get_mut(&peer) else { return };
        if peer.question == Question::Asked {
            peer.question = Question::None;
        }
        let way = match answer {
            Answer::Way(way) => Some(way),
            Answer::Nowhere => None,
            Answer::Unsure => peer.way,
            Answer::Failed => {
                peer.next = Some(now + AGAIN);
                return;
            }
        };
        // However often things change, who is not used is forgotten at its time.
        if peer.next.is_none() || peer.way.is_some() != way.is_some() {
            peer.next = Some(now + if way.is_some() { REFRESH } else { RETRY });
        }
        peer.way = way;
    }

    /// Something changed: everybody is to be asked for again, unknown peers and known ones.
    pub(super) fn doubt(&mut self) {
        self.peers.values_mut().for_each(|peer| peer.question = Question::Open);
    }

    /// When [`Table::due`] will have something to do.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let next = |peer: &Peer| match peer.question {
            Question::Open => Some(Instant::ZERO),
            _ => peer.next,
        };
        self.peers.values().filter_map(next).min()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const WAY: Way = Way {
        interface: 7,
        link_destination: [2, 0, 0, 0, 0, 2],
        link_source: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
    };

    fn peer(number: u32) -> IpAddr {
        Ipv4Addr::from_bits(0x0a00_0000 + number).into()
    }

    fn due(table: &mut Table, now: Instant) -> Vec<IpAddr> {
        let mut peers = Vec::new();
        table.due(now, &mut peers);
        peers.sort();
        peers
    }

    fn asked(table: &mut Table, now: Instant, answer: Answer) {
        assert_eq!(due(table, now), [peer(1)]);
        table.answer(peer(1), answer, now);
    }

    const NEW: Found = Found { way: None, ask: true };
    const UNKNOWN: Found = Found { way: None, ask: false };
    const KNOWN: Found = Found { way: Some(WAY), ask: false };

    #[test]
    fn a_peer_is_asked_for_once_and_then_known() {
        let mut table = Table::new(4);
        let now = Instant::ZERO + Duration::from_secs(5);
        assert_eq!(table.next_due(), None);
        assert!(!table.knows(peer(1)));
        assert_eq!(table.look_up(peer(1)), NEW);
        assert!(table.knows(peer(1)));
        assert_eq!(table.look_up(peer(1)), UNKNOWN);
        assert!(table.next_due().unwrap() <= now);
        assert_eq!(due(&mut table, now), [peer(1)]);
        // Once, even if the answer takes its time.
        assert_eq!(table.look_up(peer(1)), UNKNOWN);
        assert_eq!((due(&mut table, now).len(), table.next_due()), (0, None));
        table.answer(peer(1), Answer::Way(WAY), now);
        assert_eq!(table.look_up(peer(1)), KNOWN);
        assert!(due(&mut table, now).is_empty());
        assert_eq!(table.next_due(), Some(now + REFRESH));
        assert_eq!(due(&mut table, now + REFRESH), [peer(1)]);
    }

    #[test]
    fn a_peer_that_does_not_answer_is_asked_again_while_it_is_wanted() {
        for answer in [Answer::Nowhere, Answer::Unsure] {
            let mut table = Table::new(4);
            let mut now = Instant::ZERO;
            table.look_up(peer(1));
            for _ in 0..3 {
                asked(&mut table, now, answer);
                assert_eq!(table.look_up(peer(1)), UNKNOWN);
                assert_eq!(table.next_due(), Some(now + RETRY));
                now = now + RETRY;
            }
            asked(&mut table, now, answer);
            // Nobody wants it any more, and changes elsewhere do not change that.
            table.doubt();
            asked(&mut table, now + RETRY / 2, answer);
            assert_eq!(table.next_due(), Some(now + RETRY));
            assert!(due(&mut table, now + RETRY).is_empty());
            assert_eq!(table.next_due(), None);
            assert_eq!(table.look_up(peer(1)), NEW);
        }
    }

    #[test]
    fn a_known_peer_that_is_idle_is_left_alone_and_serves_when_it_is_wanted() {
        let mut table = Table::new(4);
        let now = Instant::ZERO;
        table.look_up(peer(1));
        asked(&mut table, now, Answer::Way(WAY));
        // It was used before it was known.
        asked(&mut table, now + REFRESH, Answer::Way(WAY));
        let later = now + REFRESH + REFRESH;
        assert!(due(&mut table, later).is_empty());
        assert_eq!(table.next_due(), None);
        assert_eq!(table.look_up(peer(1)), Found { way: Some(WAY), ask: true });
        assert_eq!(table.look_up(peer(1)), KNOWN);
        asked(&mut table, later, Answer::Nowhere);
        assert_eq!(table.look_up(peer(1)), UNKNOWN);
    }

    #[test]
    fn an_answer_that_changes_everything_starts_the_time_anew() {
        let mut table = Table::new(4);
        let now = Instant::ZERO;
        table.look_up(peer(1));
        asked(&mut table, now, Answer::Unsure);
        // The neighbour answers: that is a notice.
        let later = now + RETRY / 2;
        table.doubt();
        asked(&mut table, later, Answer::Way(WAY));
        assert_eq!(table.next_due(), Some(later + REFRESH));
        // And is gone again.
        table.doubt();
        asked(&mut table, later, Answer::Nowhere);
        assert_eq!(table.next_due(), Some(later + RETRY));
    }

    #[test]
    fn what_was_known_serves_until_there_is_an_answer() {
        let mut table = Table::new(4);
        let now = Instant::ZERO;
        table.look_up(peer(1));
        asked(&mut table, now, Answer::Way(WAY));
        table.doubt();
        assert_eq!(table.look_up(peer(1)), KNOWN);
        asked(&mut table, now, Answer::Unsure);
        assert_eq!(table.look_up(peer(1)), KNOWN);
        table.doubt();
        let other = Way { mtu: 1400, ..WAY };
        asked(&mut table, now, Answer::Way(other));
        assert_eq!(table.look_up(peer(1)).way, Some(other));
        // What changes between question and answer is asked for again.
        table.doubt();
        assert_eq!(due(&mut table, now), [peer(1)]);
        table.doubt();
        table.answer(peer(1), Answer::Way(WAY), now);
        assert_eq!(due(&mut table, now), [peer(1)]);
    }

    #[test]
    fn a_question_that_fails_changes_nothing_and_is_asked_again_soon() {
        let mut table = Table::new(4);
        let mut now = Instant::ZERO;
        table.look_up(peer(1));
        for _ in 0..3 {
            asked(&mut table, now, Answer::Failed);
            assert_eq!(table.look_up(peer(1)), UNKNOWN);
            assert_eq!(table.next_due(), Some(now + AGAIN));
            now = now + AGAIN;
        }
        asked(&mut table, now, Answer::Way(WAY));
        assert_eq!(table.look_up(peer(1)), KNOWN);
        now = now + REFRESH;
        asked(&mut table, now, Answer::Failed);
        assert_eq!(table.look_up(peer(1)), KNOWN, "as good as before");
        asked(&mut table, now + AGAIN, Answer::Nowhere);
        assert_eq!(table.look_up(peer(1)), UNKNOWN);
    }

    #[test]
    fn after_a_change_everybody_is_asked_for() {
        let mut table = Table::new(4);
        let now = Instant::ZERO;
        table.look_up(peer(1));
        table.look_up(peer(2));
        assert_eq!(due(&mut table, now), [peer(1), peer(2)]);
        table.answer(peer(1), Answer::Way(WAY), now);
        table.answer(peer(2), Answer::Nowhere, now);
        assert!(due(&mut table, now).is_empty());
        table.doubt();
        assert_eq!(due(&mut table, now), [peer(1), peer(2)]);
    }

    #[test]
    fn the_table_is_bounded_and_forgets_the_least_used() {
        let mut table = Table::new(3);
        for number in [1, 2, 3, 1, 4] {
            table.look_up(peer(number));
        }
        assert_eq!(due(&mut table, Instant::ZERO), [peer(1), peer(3), peer(4)]);
        // An answer for who was forgotten changes nothing.
        table.answer(peer(2), Answer::Way(WAY), Instant::ZERO);
        assert_eq!(table.look_up(peer(2)), NEW);
        assert_eq!((due(&mut table, Instant::ZERO).len(), table.peers.len()), (1, 3));
    }
}
