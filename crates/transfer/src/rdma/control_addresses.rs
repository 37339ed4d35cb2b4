//! Where a peer is called: at the address of its name, and while that is silent, at those of its NICs.
//!
//! A peer with several NICs answers at all of them by one port. So it can be asked for a fence, and to connect, when
//! the NIC is cut off that its name leads to.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use millstream_metadata::HostPort;
use millstream_transfer_core::Instant;

/// A call that is not answered for so long is no reason to wait with the next for the same address. Peers answer in
/// milliseconds, and fences are asked for every 250 ms.
const PATIENCE: Duration = Duration::from_millis(200);

/// A place among the addresses: 0 is that of the name.
pub(super) type Place = usize;

/// The addresses, and at which the next call is made.
#[derive(Debug)]
pub(super) struct ControlAddresses {
    /// Of its NICs.
    nics: Box<[IpAddr]>,
    turn: Mutex<Turn>,
}

#[derive(Debug, Default)]
struct Turn {
    at: Place,
    /// Of those of NICs, the one that was tried last.
    last: Place,
    /// Since when a call waits there for an answer.
    asked_at: Option<Instant>,
}

impl ControlAddresses {
    /// Those of these NICs, beside that of the name.
    pub(super) fn new(nics: impl Iterator<Item = IpAddr>) -> Self {
        let mut all: Vec<IpAddr> = Vec::new();
        for nic in nics {
            if !all.contains(&nic) {
                all.push(nic);
            }
        }
        Self { nics: all.into(), turn: Mutex::default() }
    }

    /// Where to call now, if `own` is the address of the name. Not by the NIC of `avoided`, which has just failed,
    /// if there is another.
    pub(super) fn choose(
        &self,
        now: Instant,
        own: &HostPort,
        avoided: Option<IpAddr>,
    ) -> (Place, HostPort) {
        let own_ip = own.host.parse::<IpAddr>().ok();
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if turn.asked_at.is_some_and(|since| since + PATIENCE <= now) {
            let next = self.next(turn.last, own_ip, None);
            turn.go_on(next);
        }
        let here = if turn.at == 0 { own_ip } else { Some(self.nics[turn.at - 1]) };
        let mut at = turn.at;
        if avoided.is_some() && here == avoided {
            at = self.next(turn.at, own_ip, avoided).unwrap_or(at);
        }
        if at == turn.at {
            turn.asked_at.get_or_insert(now);
        }
        match at {
            0 => (0, own.clone()),
            _ => (at, HostPort::from_address(self.nics[at - 1], own.port)),
        }
    }

    /// The place behind this one of a NIC that is neither of these.
    fn next(&self, after: Place, own: Option<IpAddr>, avoided: Option<IpAddr>) -> Option<Place> {
        let count = self.nics.len();
        (0..count).map(|step| (after + step) % count).find_map(|index| {
            let nic = Some(self.nics[index]);
            (nic != own && nic != avoided).then_some(index + 1)
        })
    }

    /// A call there was answered: it is a good address.
    pub(super) fn answered(&self, at: Place) {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        (turn.at, turn.asked_at) = (at, None);
    }

    /// A call there was refused: nobody listens, so who is there is asked at the address of the name.
    pub(super) fn refused(&self, at: Place) {
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if turn.at == at {
            (turn.at, turn.asked_at) = (0, None);
        }
    }
}

impl Turn {
    /// To the NIC whose turn it is, or from a NIC back to the address of the name.
    fn go_on(&mut self, next: Option<Place>) {
        self.asked_at = None;
        match next {
            Some(next) if self.at == 0 => (self.at, self.last) = (next, next),
            _ => self.at = 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    fn nic(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn own() -> HostPort {
        HostPort::from_address(nic(1), 7000)
    }

    fn three() -> ControlAddresses {
        ControlAddresses::new([1, 2, 3, 2].into_iter().map(nic))
    }

    fn chosen(addresses: &ControlAddresses, now: u64) -> (Place, String) {
        let (place, address) = addresses.choose(at(now), &own(), None);
        (place, address.to_string())
    }

    #[test]
    fn nics_are_called_while_the_name_is_silent() {
        let addresses = three();
        let expected = |place, last| (place, format!("10.0.0.{last}:7000"));
        assert_eq!(chosen(&addresses, 0), expected(0, 1));
        addresses.answered(0);
        assert_eq!(chosen(&addresses, 1000), expected(0, 1), "it was answered");
        assert_eq!(chosen(&addresses, 1199), expected(0, 1));
        // The first is that of the name, which does not count twice.
        assert_eq!(chosen(&addresses, 1200), expected(2, 2));
        assert_eq!(chosen(&addresses, 1399), expected(2, 2));
        assert_eq!(chosen(&addresses, 1400), expected(0, 1));
        assert_eq!(chosen(&addresses, 1600), expected(3, 3));
        addresses.answered(3);
        assert_eq!(chosen(&addresses, 9000), expected(3, 3), "it is good");
        // One that listens there no more says nothing of the peer.
        addresses.refused(3);
        assert_eq!(chosen(&addresses, 9001), expected(0, 1));
        assert_eq!(chosen(&addresses, 9201), expected(2, 2));
    }

    #[test]
    fn a_nic_that_has_failed_is_avoided() {
        let addresses = three();
        let fence = |rail| addresses.choose(at(0), &own(), Some(nic(rail))).0;
        assert_eq!((fence(1), fence(2), fence(3)), (2, 0, 0));
        assert_eq!(chosen(&addresses, 500).0, 2, "the name was asked at 0");
        assert_eq!(addresses.choose(at(500), &own(), Some(nic(2))).0, 3);
    }

    #[test]
    fn with_one_address_there_is_no_choice() {
        for addresses in
            [ControlAddresses::new([].into_iter()), ControlAddresses::new([nic(1)].into_iter())]
        {
            for now in [0, 300, 600] {
                let (place, address) = addresses.choose(at(now), &own(), Some(nic(1)));
                assert_eq!((place, address), (0, own()));
            }
        }
        // A name that is no address may lead anywhere.
        let addresses = ControlAddresses::new([nic(1)].into_iter());
        let name = HostPort { host: "host".to_owned(), port: 7000 };
        assert_eq!(addresses.choose(at(0), &name, None).0, 0);
        assert_eq!(addresses.choose(at(200), &name, None), (1, own()));
    }
}
