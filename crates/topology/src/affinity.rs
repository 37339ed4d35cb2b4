//! Which NIC of a peer goes with which of ours. Where each NIC has a network of its own (a rail),
//! a pair across rails takes a longer way or has none.

use thiserror::Error;

use crate::Candidates;

/// The peers' NICs that go with ours.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum PeerAffinity {
    /// All alike.
    #[default]
    Any,
    /// The one of the same name, as `MC_ENABLE_DEST_DEVICE_AFFINITY` asks for.
    SameName,
    /// Those of a list for each of ours, as `MC_NIC_PEER_AFFINITY` has them.
    Listed(Vec<(String, Vec<String>)>),
}

/// Why a text is no list of NICs and the peers' NICs that go with them.
#[derive(Debug, Error)]
#[error("{rule:?} is no rule such as \"mlx5_0=mlx5_0,mlx5_1\" (rules have semicolons between)")]
pub struct AffinityError {
    /// What is none.
    pub rule: String,
}

impl PeerAffinity {
    /// Reads rules: `mlx5_0=mlx5_0,mlx5_1;mlx5_2=mlx5_3`. White space around names does not count.
    pub fn parse(text: &str) -> Result<Self, AffinityError> {
        let mut rules: Vec<(String, Vec<String>)> = Vec::new();
        for rule in text.split(';').map(str::trim).filter(|rule| !rule.is_empty()) {
            let error = || AffinityError { rule: rule.chars().take(100).collect() };
            let (own, peers) = rule.split_once('=').ok_or_else(error)?;
            let own = own.trim();
            let peers: Vec<&str> = peers.split(',').map(str::trim).collect();
            let is_name = |name: &&str| !name.is_empty() && !name.contains('=');
            let twice = rules.iter().any(|(name, _)| name == own);
            if own.is_empty() || twice || !peers.iter().all(is_name) {
                return Err(error());
            }
            rules.push((own.to_owned(), peers.into_iter().map(str::to_owned).collect()));
        }
        Ok(Self::Listed(rules))
    }

    /// The candidates among a peer's NICs, for a transfer over ours of the name `own`. Those that
    /// go with it are the preferred ones, and all others are available: they still serve when an
    /// attempt fails. A listed NIC counts only where it is preferred for the memory anyway. Where
    /// none goes with ours, the candidates stay as they are. It is computed once for each NIC of
    /// ours and location of the peer's, not for each transfer.
    pub fn candidates(&self, own: &str, candidates: &Candidates, peer: &[String]) -> Candidates {
        let fits = |index: usize, preferred: bool| {
            let Some(name) = peer.get(index) else { return false };
            match self {
                Self::Any => false,
                Self::SameName => name == own,
                Self::Listed(rules) => {
                    let rule = rules.iter().find(|(nic, _)| nic == own);
                    preferred && rule.is_some_and(|(_, peers)| peers.contains(name))
                }
            }
        };
        let preferred = candidates.preferred.iter().map(|&index| (index, fits(index, true)));
        let available = candidates.available.iter().map(|&index| (index, fits(index, false)));
        let all: Vec<(usize, bool)> = preferred.chain(available).collect();
        if !all.iter().any(|(_, fits)| *fits) {
            return candidates.clone();
        }
        let of = |wanted: bool| {
            all.iter().filter(|(_, fits)| *fits == wanted).map(|(index, _)| *index).collect()
        };
        Candidates { preferred: of(true), available: of(false) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_or_refused() {
        let list = |own: &str, peers: &[&str]| {
            (own.to_owned(), peers.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
        };
        let expected = vec![list("a", &["b", "c"]), list("d", &["e"])];
        let parsed = PeerAffinity::parse(" a = b , c ; d=e ;").unwrap();
        assert_eq!(parsed, PeerAffinity::Listed(expected));
        assert_eq!(PeerAffinity::parse("").unwrap(), PeerAffinity::Listed(Vec::new()));
        for text in ["a", "a=", "=b", "a=b,", "a=b=c", "a=b;a=c", "a=b,,c", "=", "a;b=c"] {
            let error = PeerAffinity::parse(text).unwrap_err().to_string();
            assert!(error.contains("is no rule such as"), "{error}");
        }
        let long = PeerAffinity::parse(&"x".repeat(1 << 20)).unwrap_err().to_string();
        assert!(long.len() < 300, "{long}");
    }

    #[test]
    fn what_goes_with_ours_is_preferred_and_the_rest_stays_available() {
        let peer: Vec<String> = ["a", "b", "c", "d"].map(str::to_owned).into();
        let candidates = Candidates { preferred: vec![0, 1, 2], available: vec![3] };
        let listed = PeerAffinity::parse("a=c,b; b=d; d=x").unwrap();
        for (affinity, own, preferred, available) in [
            (&PeerAffinity::Any, "a", &[0, 1, 2][..], &[3][..]),
            (&PeerAffinity::SameName, "b", &[1], &[0, 2, 3]),
            (&PeerAffinity::SameName, "d", &[3], &[0, 1, 2]),
            (&PeerAffinity::SameName, "x", &[0, 1, 2], &[3]),
            (&listed, "a", &[1, 2], &[0, 3]),
            // That one is not preferred for the memory, and this one is not there.
            (&listed, "b", &[0, 1, 2], &[3]),
            (&listed, "d", &[0, 1, 2], &[3]),
            (&listed, "c", &[0, 1, 2], &[3]),
        ] {
            let expected =
                Candidates { preferred: preferred.to_vec(), available: available.to_vec() };
            assert_eq!(
                affinity.candidates(own, &candidates, &peer),
                expected,
                "{own} {affinity:?}"
            );
        }
        // Indices of another list are nobody's.
        assert_eq!(PeerAffinity::SameName.candidates("a", &candidates, &[]), candidates);
    }
}
