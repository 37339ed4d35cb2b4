//! Which controller is obeyed.

use thiserror::Error;

use super::MAX_TERM;

/// The highest term that a host or a switch has obeyed: it obeys no lower one, as that controller was replaced.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ObeyedTerm(u64);

/// Why a command is not obeyed.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum TermError {
    /// The controller was replaced.
    #[error("it commands with term {term}, and one with term {obeyed} was obeyed")]
    Stale {
        /// Its term.
        term: u64,
        /// The one that was obeyed.
        obeyed: u64,
    },
    /// No controller can take one above it.
    #[error("it commands with term {0}, which is above {MAX_TERM}")]
    TooHigh(u64),
}

impl ObeyedTerm {
    /// Nobody was obeyed yet.
    pub const NONE: Self = Self(0);

    /// The number; 0 for none.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Takes the term of a command. Who gets an error does nothing of what the command says.
    pub const fn obey(&mut self, term: u64) -> Result<(), TermError> {
        if term > MAX_TERM {
            return Err(TermError::TooHigh(term));
        }
        if term < self.0 {
            return Err(TermError::Stale { term, obeyed: self.0 });
        }
        self.0 = term;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_do_not_go_back_and_leave_room_for_one_above() {
        let mut term = ObeyedTerm::NONE;
        for (command, expected) in [
            (7, Ok(())),
            (7, Ok(())),
            (6, Err(TermError::Stale { term: 6, obeyed: 7 })),
            (MAX_TERM + 1, Err(TermError::TooHigh(MAX_TERM + 1))),
            (8, Ok(())),
            (MAX_TERM, Ok(())),
            (8, Err(TermError::Stale { term: 8, obeyed: MAX_TERM })),
        ] {
            assert_eq!(term.obey(command), expected);
        }
        assert_eq!(term.get(), MAX_TERM);
    }
}
