//! A secret that processes share, and the proof on both sides that they have it.
//!
//! Who calls and who is called draw a nonce each. Each then proves, by an HMAC-SHA-256 (RFC 2104) over both nonces, both
//! names, the address that was called and what its port is for, that he has the token: the caller first, so that a
//! listening port tells strangers nothing that they could test tokens with. His role is in each proof, so that none can
//! be sent back to who made it. The address keeps others from passing on what a caller says to them.
//!
//! It has no socket: messages go in and come out. Whoever carries them keeps to [`MESSAGE_LIMIT`] bytes for a message
//! with what is around it.
//!
//! | message | bytes |
//! | --- | --- |
//! | opening, of the caller | `O`, version (1), purpose (1), nonce (32), length (1) and text of the address, length (1) and his name |
//! | challenge | `C`, nonce (32), length (1) and name |
//! | proof, of the caller | `P`, HMAC (32) |
//! | verdict | `V`, code (1), and where it is 0, HMAC (32) |

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use thiserror::Error;

/// The longest message, with what is around it.
pub const MESSAGE_LIMIT: usize = 1024;

const VERSION: u8 = 1;
const NONCE: usize = 32;
const MAC: usize = 32;

/// What is derived from the secret, so that it serves nothing else.
const DERIVATION: &[u8] = b"millstream token 1\0";

/// Bytes of a token: fewer can be guessed.
const LEAST: usize = 16;
const MOST: usize = 4096;

/// A secret that processes share. It is not shown.
#[derive(Clone, Copy)]
pub struct Token {
    /// A block of SHA-256.
    key: [u8; 64],
}

/// Why something is no token.
#[derive(Debug, Error)]
pub enum TokenFileError {
    /// It cannot be read.
    #[error("cannot read the token in {path}: {error}")]
    Read {
        /// Which file.
        path: String,
        /// Why.
        error: io::Error,
    },
    /// It is too short or too long.
    #[error(
        "the token has {length} bytes: it is {LEAST} to {MOST}; `head -c 32 /dev/urandom | base64` makes one"
    )]
    Length {
        /// How long it is.
        length: usize,
    },
}

impl Token {
    /// A token of these bytes: 16 at least. White space at the end does not count, since editors add it.
    pub fn new(secret: &[u8]) -> Result<Self, TokenFileError> {
        let secret = secret.trim_ascii_end();
        if !(LEAST..=MOST).contains(&secret.len()) {
            return Err(TokenFileError::Length { length: secret.len() });
        }
        let mut key = [0; 64];
        let digest = Sha256::new().chain_update(DERIVATION).chain_update(secret).finalize();
        key[..digest.len()].copy_from_slice(&digest);
        Ok(Self { key })
    }

    /// Another one, which only those have who have this one and know these bytes, too.
    pub fn with(&self, secret: &[u8]) -> Self {
        let mut key = [0; 64];
        let mac = self.mac(b"with", secret, &[]).finalize().into_bytes();
        key[..mac.len()].copy_from_slice(&mac);
        Self { key }
    }

    /// The token in a file.
    pub fn from_file(path: &Path) -> Result<Self, TokenFileError> {
        let failed = |error| TokenFileError::Read { path: path.display().to_string(), error };
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(failed)?;
        file.take(2 * MOST as u64).read_to_end(&mut bytes).map_err(failed)?;
        Self::new(&bytes)
    }

    /// Whether these are the same, in constant time.
    pub fn is_same(&self, other: &Self) -> bool {
        let tag = |token: &Self| token.mac(b"same", &[], &[]);
        tag(self).verify(&tag(other).finalize().into_bytes()).is_ok()
    }

    /// The proof of one side over what both have said.
    fn mac(&self, role: &[u8], opening: &[u8], challenge: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new(&self.key.into());
        for part in [role, opening, challenge] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}

/// What a port is for: a proof counts at ports of one purpose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// Handshakes, descriptors, messages and probes.
    Handshake,
    /// Memory over TCP.
    Memory,
    /// Files.
    Files,
    /// The controller of collectives.
    Control,
}

impl Purpose {
    const fn code(self) -> u8 {
        match self {
            Self::Handshake => 1,
            Self::Memory => 2,
            Self::Files => 3,
            Self::Control => 4,
        }
    }
}

/// Why two ends do not talk, by their tokens.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum TokenError {
    /// The other end has another one, or does not prove that it has ours.
    #[error("its token is another than ours")]
    OtherToken,
    /// It proves it in another way.
    #[error("it has another version of the proof of tokens than ours")]
    OtherVersion,
    /// Its port is for something else.
    #[error("the port that was called is for something else: is its descriptor out of date?")]
    OtherPurpose,
    /// It was reached by another address than it has.
    #[error(
        "it was called at an address that is not its own: who has a token is to be called directly, without a \
         proxy or a translation of addresses"
    )]
    OtherAddress,
    /// It asks for a token.
    #[error(
        "it talks to those only who have its token, and none is set here: see security.token_file"
    )]
    Needed,
    /// It asks for TLS.
    #[error(
        "it talks to those only who prove by a certificate who they are, and none is set here: see \
         security.certificate_file"
    )]
    TlsNeeded,
    /// It has none.
    #[error("it has no token, and one is set here: set the same there, or none here")]
    NoneThere,
    /// Somebody else answers.
    #[error("it calls itself {0:?}, which is another than the one that was called")]
    OtherName(String),
    /// It proves nothing.
    #[error("it does not prove that it has our token: is it an engine of this kind that has one?")]
    NoProof,
}

impl TokenError {
    const fn code(&self) -> u8 {
        match self {
            Self::OtherToken => 1,
            Self::OtherVersion => 2,
            Self::OtherPurpose => 3,
            Self::OtherAddress => 4,
            Self::Needed => 5,
            Self::NoneThere => 6,
            Self::OtherName(_) | Self::NoProof => 7,
            Self::TlsNeeded => 8,
        }
    }

    fn of_code(code: u8) -> Self {
        [
            Self::OtherToken,
            Self::OtherVersion,
            Self::OtherPurpose,
            Self::OtherAddress,
            Self::Needed,
            Self::NoneThere,
            Self::TlsNeeded,
        ]
        .into_iter()
        .find(|error| error.code() == code)
        .unwrap_or(Self::NoProof)
    }

    /// What a message says in place of what was awaited.
    pub fn of_verdict(body: &[u8]) -> Self {
        match body {
            [b'V', code] => Self::of_code(*code),
            _ => Self::NoProof,
        }
    }

    /// The verdict that says so.
    pub const fn verdict(&self) -> [u8; 2] {
        [b'V', self.code()]
    }
}

/// The side that calls.
#[derive(Debug)]
pub struct Initiator {
    token: Token,
    nonce: [u8; NONCE],
    opening: Vec<u8>,
    /// Whose port it should be, where that is known.
    expected: Option<String>,
    challenge: Option<Vec<u8>>,
}

impl Initiator {
    /// Proves to who answers at `address`, as it was connected to, that this process has the token.
    pub fn new(
        token: Token,
        purpose: Purpose,
        address: SocketAddr,
        expected: Option<&str>,
    ) -> io::Result<Self> {
        Ok(Self::with_nonce(token, purpose, address, expected, draw_nonce()?))
    }

    fn with_nonce(
        token: Token,
        purpose: Purpose,
        address: SocketAddr,
        expected: Option<&str>,
        nonce: [u8; NONCE],
    ) -> Self {
        let mut opening = vec![b'O', VERSION, purpose.code()];
        opening.extend_from_slice(&nonce);
        push_text(&mut opening, &canonical(address));
        push_text(&mut opening, &own_name());
        let expected = expected.map(|name| shortened(name).to_owned());
        Self { token, nonce, opening, expected, challenge: None }
    }

    /// What is said first.
    pub fn opening(&self) -> Vec<u8> {
        self.opening.clone()
    }

    /// Takes a message of the other side; what is said next, or nothing once both have proved it.
    pub fn take(&mut self, message: &[u8]) -> Result<Option<Vec<u8>>, TokenError> {
        match (&self.challenge, message) {
            (None, [b'C', rest @ ..]) => {
                let (nonce, rest) = rest.split_first_chunk().ok_or(TokenError::NoProof)?;
                let (name, rest) = take_text(rest).ok_or(TokenError::NoProof)?;
                // Our own words are no challenge.
                if !rest.is_empty() || *nonce == self.nonce {
                    return Err(TokenError::NoProof);
                }
                if self.expected.as_ref().is_some_and(|expected| *expected != name) {
                    return Err(TokenError::OtherName(name));
                }
                let mac = self.token.mac(b"initiator", &self.opening, message).finalize();
                self.challenge = Some(message.to_vec());
                let mut proof = vec![b'P'];
                proof.extend_from_slice(&mac.into_bytes());
                Ok(Some(proof))
            }
            (Some(challenge), [b'V', 0, mac @ ..]) if mac.len() == MAC => {
                let expected = self.token.mac(b"responder", &self.opening, challenge);
                // In constant time.
                expected.verify_slice(mac).map_err(|_| TokenError::OtherToken)?;
                Ok(None)
            }
            (_, body) => Err(TokenError::of_verdict(body)),
        }
    }
}

/// The side that is called.
#[derive(Debug)]
pub struct Responder {
    purpose: Purpose,
    address: SocketAddr,
    name: String,
    /// Opening and challenge, once they were said.
    said: Option<(Vec<u8>, Vec<u8>)>,
}

/// What a responder says, and whether that is the end.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Said {
    /// The caller is to answer this.
    Challenge(Vec<u8>),
    /// The caller has the token of this index.
    Accepted(Vec<u8>, usize),
}

impl Responder {
    /// Who was called at `address`, its own.
    pub fn new(purpose: Purpose, address: SocketAddr, name: &str) -> Self {
        Self { purpose, address, name: name.to_owned(), said: None }
    }

    /// Takes a message of a caller, who is to have one of `tokens`. An error is what its verdict says.
    pub fn take<'a>(
        &mut self,
        message: &[u8],
        nonce: [u8; NONCE],
        tokens: impl IntoIterator<Item = &'a Token>,
    ) -> Result<Said, TokenError> {
        match (&self.said, message) {
            (None, [b'O', version, ..]) if *version != VERSION => Err(TokenError::OtherVersion),
            (None, [b'O', _, purpose, rest @ ..]) => {
                let (_, rest) = rest.split_first_chunk::<NONCE>().ok_or(TokenError::NoProof)?;
                let (address, rest) = take_text(rest).ok_or(TokenError::NoProof)?;
                let (_, rest) = take_text(rest).ok_or(TokenError::NoProof)?;
                if !rest.is_empty() {
                    return Err(TokenError::NoProof);
                }
                if *purpose != self.purpose.code() {
                    return Err(TokenError::OtherPurpose);
                }
                if address != canonical(self.address) {
                    return Err(TokenError::OtherAddress);
                }
                let mut challenge = vec![b'C'];
                challenge.extend_from_slice(&nonce);
                push_text(&mut challenge, &self.name);
                self.said = Some((message.to_vec(), challenge.clone()));
                Ok(Said::Challenge(challenge))
            }
            (Some((opening, challenge)), [b'P', mac @ ..]) => {
                let mut found = None;
                // All are looked at, each in constant time: how long it takes does not tell which one it is.
                for (index, token) in tokens.into_iter().enumerate() {
                    let expected = token.mac(b"initiator", opening, challenge);
                    if expected.verify_slice(mac).is_ok() && found.is_none() {
                        found = Some((index, token));
                    }
                }
                let (index, token) = found.ok_or(TokenError::OtherToken)?;
                let mac = token.mac(b"responder", opening, challenge).finalize();
                let mut verdict = vec![b'V', 0];
                verdict.extend_from_slice(&mac.into_bytes());
                Ok(Said::Accepted(verdict, index))
            }
            _ => Err(TokenError::NoProof),
        }
    }
}

/// What nobody guesses, and nobody has said before.
pub fn draw_nonce() -> io::Result<[u8; NONCE]> {
    let mut bytes = [0; NONCE];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// An address as both ends write it.
fn canonical(address: SocketAddr) -> String {
    // Without the zone of a link-local address, which has a number of its own at each end.
    SocketAddr::new(address.ip().to_canonical(), address.port()).to_string()
}

/// What this process is called, for the other side's log.
fn own_name() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    // Asked for each time: a fork has another number.
    format!("{}/{}", host.trim(), std::process::id())
}

/// As much of a name as fits its length byte.
fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(u8::MAX.into())]
}

fn push_text(message: &mut Vec<u8>, text: &str) {
    let text = shortened(text);
    message.push(text.len() as u8);
    message.extend_from_slice(text.as_bytes());
}

fn take_text(bytes: &[u8]) -> Option<(String, &[u8])> {
    let (length, rest) = bytes.split_first()?;
    let (text, rest) = rest.split_at_checked(usize::from(*length))?;
    Some((std::str::from_utf8(text).ok()?.to_owned(), rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ADDRESS: SocketAddr =
        SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7);

    fn token(text: &str) -> Token {
        Token::new(text.as_bytes()).unwrap()
    }

    fn ours() -> Token {
        token("a token of 16 bytes and more")
    }

    fn caller(token: Token) -> Initiator {
        Initiator::with_nonce(token, Purpose::Memory, ADDRESS, Some("n"), [1; NONCE])
    }

    /// Who is called, and the tokens that count there.
    struct Called(Responder, Vec<Token>);

    impl Called {
        fn take(&mut self, message: &[u8], nonce: [u8; NONCE]) -> Result<Vec<u8>, TokenError> {
            let said = self.0.take(message, nonce, &self.1)?;
            let (Said::Challenge(message) | Said::Accepted(message, _)) = said;
            Ok(message)
        }
    }

    fn called(token: Token) -> Called {
        Called(Responder::new(Purpose::Memory, ADDRESS, "n"), vec![token])
    }

    /// A whole conversation: the error of either side.
    fn converse(mut caller: Initiator, mut called: Called) -> Result<(), TokenError> {
        let challenge = called.take(&caller.opening(), [2; NONCE])?;
        let proof = caller.take(&challenge)?.unwrap();
        let verdict = called.take(&proof, [2; NONCE])?;
        assert_eq!(caller.take(&verdict)?, None);
        Ok(())
    }

    #[test]
    fn who_has_the_token_is_known_and_nobody_else() {
        assert_eq!(converse(caller(ours()), called(ours())), Ok(()));
        let other = token("another token that is long enough");
        assert_eq!(converse(caller(other), called(ours())), Err(TokenError::OtherToken));
        let elsewhere = SocketAddr::new(ADDRESS.ip(), 8);
        for (called, error) in [
            (Responder::new(Purpose::Handshake, ADDRESS, "n"), TokenError::OtherPurpose),
            (Responder::new(Purpose::Memory, elsewhere, "n"), TokenError::OtherAddress),
            (Responder::new(Purpose::Memory, ADDRESS, "m"), TokenError::OtherName("m".to_owned())),
        ] {
            let called = Called(called, vec![ours()]);
            assert_eq!(converse(caller(ours()), called), Err(error));
        }
    }

    #[test]
    fn who_has_one_of_several_is_told_apart() {
        let tokens = ["the first of the tokens", "the second of the tokens"].map(token);
        for (index, &one) in tokens.iter().enumerate() {
            let (mut caller, mut called) = (caller(one), called(one).0);
            let said = called.take(&caller.opening(), [2; NONCE], &tokens).unwrap();
            let Said::Challenge(challenge) = said else { panic!("{said:?}") };
            let proof = caller.take(&challenge).unwrap().unwrap();
            let said = called.take(&proof, [2; NONCE], &tokens).unwrap();
            let Said::Accepted(verdict, found) = said else { panic!("{said:?}") };
            assert_eq!((caller.take(&verdict), found), (Ok(None), index));
            assert!(one.is_same(&tokens[index]) && !one.is_same(&tokens[1 - index]));
        }
    }

    #[test]
    fn a_token_that_is_made_of_another_one_needs_both() {
        let [ours, theirs] = [ours(), token("another token that is long enough")];
        assert!(ours.with(b"x").is_same(&ours.with(b"x")));
        for other in [ours, ours.with(b"y"), theirs.with(b"x"), ours.with(b"x").with(b"x")] {
            assert!(!other.is_same(&ours.with(b"x")));
        }
    }

    #[test]
    fn both_ends_write_addresses_alike() {
        let mapped: SocketAddr = "[::ffff:127.0.0.1]:7".parse().unwrap();
        assert_eq!(canonical(mapped), canonical(ADDRESS));
        assert_eq!(canonical("[fe80::1%3]:7".parse().unwrap()), "[fe80::1]:7");
    }

    /// What was said in one conversation is worth nothing in another one.
    #[test]
    fn a_proof_that_is_said_again_is_none() {
        let mut honest = caller(ours());
        let mut first = called(ours());
        let challenge = first.take(&honest.opening(), [2; NONCE]).unwrap();
        let proof = honest.take(&challenge).unwrap().unwrap();
        let verdict = first.take(&proof, [2; NONCE]).unwrap();
        // To the same port, which draws another nonce.
        let mut again = called(ours());
        again.take(&honest.opening(), [3; NONCE]).unwrap();
        assert_eq!(again.take(&proof, [3; NONCE]).unwrap_err(), TokenError::OtherToken);
        // To a caller, who has drawn another one.
        let mut second = Initiator::with_nonce(ours(), Purpose::Memory, ADDRESS, None, [4; NONCE]);
        second.take(&challenge).unwrap();
        assert_eq!(second.take(&verdict), Err(TokenError::OtherToken));
    }

    /// Nobody is convinced by his own words.
    #[test]
    fn a_proof_that_is_sent_back_is_none() {
        let mut honest = caller(ours());
        // The same nonce, as if both sides were the same.
        let mut back = vec![b'C'];
        back.extend_from_slice(&[1; NONCE]);
        push_text(&mut back, "n");
        assert_eq!(honest.take(&back), Err(TokenError::NoProof));
        // The caller's proof as the verdict.
        let mut called = called(ours());
        let challenge = called.take(&honest.opening(), [2; NONCE]).unwrap();
        let proof = honest.take(&challenge).unwrap().unwrap();
        let verdict = [&[b'V', 0], &proof[1..]].concat();
        assert_eq!(honest.take(&verdict), Err(TokenError::OtherToken));
        // A challenge said twice is not answered twice.
        assert_eq!(honest.take(&challenge), Err(TokenError::NoProof));
    }

    #[test]
    fn each_bit_of_a_proof_counts() {
        let mut honest = caller(ours());
        let challenge = called(ours()).take(&honest.opening(), [2; NONCE]).unwrap();
        let proof = honest.take(&challenge).unwrap().unwrap();
        for bit in 8..proof.len() * 8 {
            let mut wrong = proof.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            let mut called = called(ours());
            called.take(&honest.opening(), [2; NONCE]).unwrap();
            let error = called.take(&wrong, [2; NONCE]).unwrap_err();
            assert_eq!(error, TokenError::OtherToken, "{bit}");
        }
    }

    #[test]
    fn refusals_have_codes() {
        for error in [
            TokenError::OtherToken,
            TokenError::OtherVersion,
            TokenError::OtherPurpose,
            TokenError::OtherAddress,
            TokenError::Needed,
            TokenError::NoneThere,
            TokenError::NoProof,
        ] {
            assert_eq!(TokenError::of_verdict(&error.verdict()), error);
        }
    }

    #[test]
    fn tokens_have_a_length_and_are_not_shown() {
        assert!(matches!(Token::new(b"short\n"), Err(TokenFileError::Length { length: 5 })));
        assert!(Token::new(&[b'x'; MOST + 1]).is_err());
        let (plain, edited) = (token("0123456789abcdef"), token("0123456789abcdef\r\n"));
        assert_eq!(plain.key, edited.key);
        assert_eq!(format!("{plain:?}"), "Token(***)");
    }

    proptest! {
        #[test]
        fn any_frames_are_survived(bodies in proptest::collection::vec(
            proptest::collection::vec(any::<u8>(), 0..120), 1..4), tag in 0..4usize) {
            let (mut called, mut caller) = (called(ours()), caller(ours()));
            for mut body in bodies {
                if let Some(first) = body.first_mut() {
                    *first = b"OCPV"[tag];
                }
                let said = called.0.take(&body, [2; NONCE], &called.1);
                prop_assert!(!matches!(said, Ok(Said::Accepted(..))));
                prop_assert!(caller.take(&body) != Ok(None));
            }
        }
    }
}
