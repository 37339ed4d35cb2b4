//! Which controllers there are, and which of them is asked next: one leads, and the others say so.

use core::fmt;
use core::net::SocketAddr;

use thiserror::Error;

/// The most controllers that hosts and switches know of.
pub const MAX_CONTROLLERS: usize = 16;

/// A list that is none of controllers.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("{count} controllers are out of range: 1 to {MAX_CONTROLLERS}")]
pub struct ControllersError {
    /// How many there were.
    pub count: usize,
}

/// The addresses of controllers that share their state: 1 to [`MAX_CONTROLLERS`], each once.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Controllers(Vec<SocketAddr>);

impl Controllers {
    /// These, in this order. Who occurs again is left out.
    pub fn new(addresses: impl IntoIterator<Item = SocketAddr>) -> Result<Self, ControllersError> {
        let mut known = Vec::new();
        for address in addresses {
            if !known.contains(&address) {
                known.push(address);
            }
        }
        match known.len() {
            1..=MAX_CONTROLLERS => Ok(Self(known)),
            count => Err(ControllersError { count }),
        }
    }

    /// These, and behind them others that were learned: each once, and as many as there is room for.
    pub fn with_learned(&self, learned: &[SocketAddr]) -> Self {
        let mut all = self.clone();
        all.append(learned.iter().copied());
        all
    }

    fn append(&mut self, addresses: impl Iterator<Item = SocketAddr>) {
        for address in addresses {
            if self.0.len() < MAX_CONTROLLERS && !self.0.contains(&address) {
                self.0.push(address);
            }
        }
    }

    /// The one that is asked first.
    pub fn first(&self) -> SocketAddr {
        self.0[0]
    }

    /// All.
    pub fn as_slice(&self) -> &[SocketAddr] {
        &self.0
    }
}

impl From<SocketAddr> for Controllers {
    fn from(address: SocketAddr) -> Self {
        Self(vec![address])
    }
}

impl fmt::Display for Controllers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, address) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{address}")?;
        }
        Ok(())
    }
}

/// The search for the controller that leads: one after the other in turns, and between two turns a pause.
#[derive(Clone, Debug)]
pub struct Search {
    known: Controllers,
    /// How many of them were not learned.
    given: usize,
    at: usize,
    /// How many were asked in vain since the turn began.
    asked: usize,
    /// One has said in this turn who leads. Two that name each other are not to be asked for ever.
    led: bool,
}

impl Search {
    /// Among these.
    pub fn new(controllers: Controllers) -> Self {
        let given = controllers.0.len();
        Self { known: controllers, given, at: 0, asked: 0, led: false }
    }

    /// The one to ask now.
    pub fn current(&self) -> SocketAddr {
        self.known.0[self.at]
    }

    /// All that are known.
    pub fn known(&self) -> &Controllers {
        &self.known
    }

    /// Whether there is another one to ask.
    pub fn has_others(&self) -> bool {
        self.known.0.len() > 1
    }

    /// The current one leads.
    pub fn found(&mut self) {
        (self.asked, self.led) = (0, false);
    }

    /// The current one leads, and says that there are these, in place of those that were learned before. Those that were
    /// given stay, and what is too many is left out.
    pub fn learn(&mut self, controllers: &[SocketAddr]) {
        let current = self.current();
        self.known.0.truncate(self.given);
        self.known.append([current].into_iter().chain(controllers.iter().copied()));
        self.at = self.known.0.iter().position(|&it| it == current).unwrap_or_default();
    }

    /// The current one is not there, or does not lead: the next one's turn. `true` when all were asked, and it is time
    /// for a pause.
    pub fn advance(&mut self) -> bool {
        self.at = (self.at + 1) % self.known.0.len();
        self.asked += 1;
        let is_over = self.asked >= self.known.0.len();
        if is_over {
            self.found();
        }
        is_over
    }

    /// The current one does not lead, and knows perhaps who does, who is asked at once then. `true` when it is time for
    /// a pause.
    pub fn follow(&mut self, leader: Option<SocketAddr>) -> bool {
        let Some(leader) = leader.filter(|&leader| leader != self.current() && !self.led) else {
            return self.advance();
        };
        self.led = true;
        if !self.known.0.contains(&leader) {
            if self.known.0.len() >= MAX_CONTROLLERS {
                return self.advance();
            }
            self.known.0.push(leader);
        }
        self.at = self.known.0.iter().position(|&it| it == leader).unwrap_or_default();
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn search(ports: &[u16]) -> Search {
        Search::new(Controllers::new(ports.iter().copied().map(address)).unwrap())
    }

    #[test]
    fn a_list_has_each_once_and_not_too_many() {
        let list = Controllers::new([1, 2, 1].map(address)).unwrap();
        assert_eq!(list.to_string(), "127.0.0.1:1,127.0.0.1:2");
        assert_eq!(Controllers::new([]), Err(ControllersError { count: 0 }));
        assert!(Controllers::new((0..16).map(address)).is_ok());
        assert_eq!(Controllers::new((0..17).map(address)), Err(ControllersError { count: 17 }));
    }

    #[test]
    fn those_that_were_learned_come_behind_those_that_were_given_as_far_as_there_is_room() {
        let given = Controllers::new([1, 2].map(address)).unwrap();
        assert_eq!(given.with_learned(&[]), given);
        let all = given.with_learned(&[3, 2, 4, 3].map(address));
        assert_eq!(all.as_slice(), [1, 2, 3, 4].map(address));
        let many: Vec<SocketAddr> = (100..200).map(address).collect();
        let all = given.with_learned(&many);
        assert_eq!(all.as_slice().len(), MAX_CONTROLLERS);
        assert_eq!(all.as_slice()[..3], [1, 2, 100].map(address));
    }

    #[test]
    fn all_are_asked_before_each_pause() {
        let mut search = search(&[1, 2, 3]);
        assert!(search.has_others());
        for _ in 0..2 {
            assert_eq!(
                [1, 2, 3].map(|port| (search.current() == address(port), search.advance())),
                [(true, false), (true, false), (true, true)]
            );
        }
        // Who was found is asked first the next time, and then all others.
        search.advance();
        search.found();
        assert_eq!(
            (search.current(), search.advance(), search.advance()),
            (address(2), false, false)
        );
        assert!(search.advance());
        let mut alone = Search::new(address(1).into());
        assert!(!alone.has_others() && alone.advance() && alone.follow(Some(address(1))));
        assert_eq!(alone.current(), address(1));
    }

    #[test]
    fn who_is_said_to_lead_is_asked_at_once_and_that_once_in_a_turn() {
        let mut search = search(&[1, 2]);
        assert!(!search.follow(Some(address(9))));
        assert_eq!(search.current(), address(9));
        // It names the first again.
        assert!(!search.follow(Some(address(1))));
        let mut steps = 1;
        while !search.follow(Some(address(9))) {
            steps += 1;
        }
        assert!(steps <= 3, "{steps}");
    }

    #[test]
    fn what_is_learned_is_bounded_and_takes_the_place_of_what_was_learned_before() {
        let mut search = search(&[1, 2]);
        search.advance();
        search.learn(&[3, 2, 4].map(address));
        assert_eq!(search.known().as_slice(), [1, 2, 3, 4].map(address));
        assert_eq!(search.current(), address(2));
        search.learn(&[5].map(address));
        assert_eq!(search.known().as_slice(), [1, 2, 5].map(address));
        search.follow(Some(address(5)));
        // It leads, and does not name itself.
        search.learn(&(100..200).map(address).collect::<Vec<_>>());
        assert_eq!(search.known().as_slice().len(), MAX_CONTROLLERS);
        assert_eq!(search.current(), address(5));
        // A leader that there is no room for.
        search.follow(Some(address(999)));
        assert_eq!(search.known().as_slice().len(), MAX_CONTROLLERS);
    }
}
