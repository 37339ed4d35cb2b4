//! Where a peer is called: at the address of its name, and while that is silent, at the others where it answers.
//!
//! A peer with several NICs answers at all of them, and says so in its descriptor. So it can be asked for a fence, and to
//! connect, when the NIC is cut off that its name leads to.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millstream_metadata::HostPort;
use millstream_transfer_core::Instant;

/// A call that is not answered for so long is no reason to wait with the next for the same address. Peers answer in
/// milliseconds, and fences are asked for every 250 ms.
const PATIENCE: Duration = Duration::from_millis(200);

/// One of the addresses; none is that of the name.
pub(super) type Place = Option<SocketAddr>;

/// The addresses, and at which the next call is made.
#[derive(Debug, Default)]
pub(super) struct ControlAddresses(Mutex<Turn>);

#[derive(Debug, Default)]
struct Turn {
    /// At its NICs.
    nics: Vec<SocketAddr>,
    at: Place,
    /// Of those of NICs, the one that was tried last.
    last: Place,
    /// Since when a call waits there for an answer.
    asked_at: Option<Instant>,
    /// How often another address was called in its place, to avoid this one.
    aside: Option<(IpAddr, usize)>,
}

impl ControlAddresses {
    fn turn(&self) -> MutexGuard<'_, Turn> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those of its NICs, by the last descriptor: another start of its process has other ports there.
    pub(super) fn set(&self, nics: &[SocketAddr]) {
        let mut turn = self.turn();
        if turn.nics != nics {
            *turn = Turn { nics: nics.to_vec(), ..Turn::default() };
        }
    }

    /// Where to call now, if `own` is the address of the name. Not by the NIC of `avoided`, which has just failed,
    /// unless all others were called for that in vain.
    pub(super) fn choose(
        &self,
        now: Instant,
        own: &HostPort,
        avoided: Option<IpAddr>,
    ) -> (Place, HostPort) {
        let own_ip = own.host.parse::<IpAddr>().ok();
        let mut turn = self.turn();
        if turn.asked_at.is_some_and(|since| since + PATIENCE <= now) {
            let next = turn.others(turn.last, own_ip).next();
            turn.go_on(next);
        }
        let here = turn.at.map_or(own_ip, |at| Some(at.ip()));
        let mut at = turn.at;
        if let Some(avoided) = avoided.filter(|_| here == avoided) {
            at = turn.step_aside(own_ip, avoided);
        }
        if at == turn.at {
            turn.asked_at.get_or_insert(now);
        }
        (at, at.map_or_else(|| own.clone(), |at| HostPort::from_address(at.ip(), at.port())))
    }

    /// A call there was answered: it is a good address.
    pub(super) fn answered(&self, at: Place) {
        let mut turn = self.turn();
        (turn.at, turn.asked_at, turn.aside) = (at, None, None);
    }

    /// A call there was refused: nobody listens, so who is there is asked at the address of the name.
    pub(super) fn refused(&self, at: Place) {
        let mut turn = self.turn();
        if turn.at == at {
            (turn.at, turn.asked_at) = (None, None);
        }
    }
}

impl Turn {
    /// Those of NICs that do not have this address, in their order from the one behind `after` on.
    fn others(&self, after: Place, own: Option<IpAddr>) -> impl Iterator<Item = SocketAddr> {
        let before = after.and_then(|it| self.nics.iter().position(|nic| *nic == it));
        let first = before.map_or(0, |before| before + 1);
        let turns = self.nics.iter().cycle().skip(first).take(self.nics.len());
        turns.copied().filter(move |nic| Some(nic.ip()) != own)
    }

    /// One after the other but this one, which is what is called now, and in the end it, too.
    fn step_aside(&mut self, own: Option<IpAddr>, avoided: IpAddr) -> Place {
        let before = self.aside.filter(|&(address, _)| address == avoided);
        let before = before.map_or(0, |(_, before)| before);
        self.aside = Some((avoided, before + 1));
        let others = || self.others(self.at, own).filter(|nic| nic.ip() != avoided);
        others().nth(before % (others().count() + 1)).or(self.at)
    }

    /// To the NIC whose turn it is, or from a NIC back to the address of the name.
    fn go_on(&mut self, next: Place) {
        self.asked_at = None;
        match next {
            Some(_) if self.at.is_none() => (self.at, self.last) = (next, next),
            _ => self.at = None,
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

    /// As at one of its NICs, at which it has a port of its own.
    fn place(last: u8) -> Place {
        Some(SocketAddr::new(nic(last), 7000 + u16::from(last)))
    }

    fn with(nics: &[u8]) -> ControlAddresses {
        let addresses = ControlAddresses::default();
        addresses.set(&nics.iter().filter_map(|&last| place(last)).collect::<Vec<_>>());
        addresses
    }

    fn three() -> ControlAddresses {
        with(&[1, 2, 3])
    }

    fn chosen(addresses: &ControlAddresses, now: u64) -> (Place, String) {
        let (place, address) = addresses.choose(at(now), &own(), None);
        (place, address.to_string())
    }

    #[test]
    fn nics_are_called_while_the_name_is_silent() {
        let addresses = three();
        let name = (None, own().to_string());
        let other = |last| (place(last), format!("10.0.0.{last}:700{last}"));
        assert_eq!(chosen(&addresses, 0), name);
        addresses.answered(None);
        assert_eq!(chosen(&addresses, 1000), name, "it was answered");
        assert_eq!(chosen(&addresses, 1199), name);
        // The first is that of the name, which does not count twice.
        assert_eq!(chosen(&addresses, 1200), other(2));
        assert_eq!(chosen(&addresses, 1399), other(2));
        assert_eq!(chosen(&addresses, 1400), name);
        assert_eq!(chosen(&addresses, 1600), other(3));
        addresses.answered(place(3));
        assert_eq!(chosen(&addresses, 9000), other(3), "it is good");
        // One that listens there no more says nothing of the peer.
        addresses.refused(place(3));
        assert_eq!(chosen(&addresses, 9001), name);
        assert_eq!(chosen(&addresses, 9201), other(2));
    }

    #[test]
    fn a_nic_that_has_failed_is_avoided() {
        let addresses = three();
        let fence = |rail| addresses.choose(at(0), &own(), Some(nic(rail))).0;
        assert_eq!((fence(2), fence(3)), (None, None));
        // Nobody, or somebody else, may answer at the others.
        assert_eq!([1; 5].map(fence), [place(2), place(3), None, place(2), place(3)]);
        assert_eq!(chosen(&addresses, 500).0, place(2), "the name was asked at 0");
        assert_eq!(addresses.choose(at(500), &own(), Some(nic(2))).0, place(3));
    }

    #[test]
    fn another_start_of_the_process_is_called_at_its_own_ports() {
        let addresses = three();
        addresses.answered(place(3));
        addresses.set(&[1, 2, 3].map(|last| place(last).unwrap()));
        assert_eq!(chosen(&addresses, 0).0, place(3), "they are the same");
        let others = [2, 3].map(|last| SocketAddr::new(nic(last), 8000));
        addresses.set(&others);
        assert_eq!(chosen(&addresses, 0).0, None);
        assert_eq!(chosen(&addresses, 200).0, Some(others[0]));
        // An answer of before is late: it is called there once more.
        addresses.answered(place(3));
        assert_eq!(chosen(&addresses, 300).0, place(3));
        assert_eq!(chosen(&addresses, 500).0, None);
    }

    #[test]
    fn with_one_address_there_is_no_choice() {
        for addresses in [with(&[]), with(&[1])] {
            for now in [0, 300, 600] {
                let (place, address) = addresses.choose(at(now), &own(), Some(nic(1)));
                assert_eq!((place, address), (None, own()));
            }
        }
        // A name that is no address may lead anywhere.
        let addresses = with(&[1]);
        let name = HostPort { host: "host".to_owned(), port: 7000 };
        assert_eq!(addresses.choose(at(0), &name, None).0, None);
        let first = HostPort::from_address(nic(1), 7001);
        assert_eq!(addresses.choose(at(200), &name, None), (place(1), first));
    }
}
