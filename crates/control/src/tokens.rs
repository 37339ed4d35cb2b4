//! Token files of a controller: who may be a host, a switch or a reader, and how much each may have.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use millstream_inc::controller::{ControllerConfig, Quotas, TokenKind, TokenRules};
use millstream_net::token::{Token, TokenFileError};
use serde::Deserialize;
use thiserror::Error;

/// The most bytes of a file.
const MAX_BYTES: u64 = 1 << 20;

/// The most tokens of a file. Each is tried for each connection.
pub const MAX_TOKENS: usize = 64;

/// The longest name.
const MAX_NAME: usize = 128;

/// What a token file has.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// Those of hosts and switches, and their secrets, in one order.
    rules: Vec<TokenRules>,
    secrets: Vec<Token>,
    readers: Vec<Token>,
    source: Quotas,
}

/// What is wrong with a token file.
#[derive(Debug, Error)]
#[error("token file {}: {problem}", file.display())]
pub struct TokensError {
    /// Which.
    pub file: PathBuf,
    /// What.
    pub problem: TokensProblem,
}

/// What can be wrong with a token file. Secrets are not shown.
#[derive(Debug, Error)]
pub enum TokensProblem {
    /// It cannot be read.
    #[error("{0}")]
    Io(io::Error),
    /// It is longer than a file can be.
    #[error("it has more than {MAX_BYTES} bytes")]
    TooLarge,
    /// It is no TOML, or has what is not known.
    #[error("line {line}: {message}")]
    Syntax {
        /// Where, from 1.
        line: usize,
        /// What.
        message: String,
    },
    /// There are too many tokens.
    #[error("it has {0} tokens: {MAX_TOKENS} can be")]
    TooMany(usize),
    /// A name cannot be one.
    #[error("a token's name has 1 to {MAX_NAME} bytes and no control characters: {0:?}")]
    Name(String),
    /// Two tokens have one name.
    #[error("there are two tokens {0:?}: give each a name of its own")]
    NameTwice(String),
    /// A token has no secret, or two.
    #[error("token {0:?} needs one of `secret` and `secret_file`")]
    OneSecret(String),
    /// A secret is none.
    #[error("token {name:?}: {source}")]
    Secret {
        /// Whose.
        name: String,
        /// Why.
        source: TokenFileError,
    },
    /// Two tokens have one secret.
    #[error("tokens {0:?} and {1:?} have the same secret: nobody could tell them apart")]
    SameSecret(String, String),
    /// A reader has quotas.
    #[error("token {0:?} is for readers, who have no quotas")]
    ReaderQuotas(String),
    /// Some of the daemons would be let in without one.
    #[error(
        "it has tokens of kind {there:?} and none of kind {missing:?}: where there are tokens, hosts and switches \
         need one"
    )]
    Alone {
        /// What there is.
        there: &'static str,
        /// What there is not.
        missing: &'static str,
    },
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Host,
    Switch,
    Read,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    #[serde(default)]
    token: Vec<Entry>,
    source: Option<Limits>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    kind: Kind,
    secret: Option<String>,
    secret_file: Option<PathBuf>,
    connections: Option<u64>,
    groups: Option<u64>,
    communicators: Option<u64>,
    slot_bytes: Option<u64>,
}

#[derive(Clone, Copy, Default, Deserialize, Eq, PartialEq)]
#[serde(deny_unknown_fields)]
struct Limits {
    connections: Option<u64>,
    groups: Option<u64>,
    communicators: Option<u64>,
    slot_bytes: Option<u64>,
}

impl Limits {
    fn quotas(self, default: Quotas) -> Quotas {
        let Self { connections, groups, communicators, slot_bytes } = self;
        Quotas {
            connections: connections.unwrap_or(default.connections),
            groups: groups.unwrap_or(default.groups),
            communicators: communicators.unwrap_or(default.communicators),
            slot_bytes: slot_bytes.unwrap_or(default.slot_bytes),
        }
    }
}

impl Entry {
    fn limits(&self) -> Limits {
        let &Self { connections, groups, communicators, slot_bytes, .. } = self;
        Limits { connections, groups, communicators, slot_bytes }
    }

    fn token(&self, folder: &Path) -> Result<Token, TokensProblem> {
        let name = self.name.clone();
        let token = match (&self.secret, &self.secret_file) {
            (Some(secret), None) => Token::new(secret.as_bytes()),
            // As written in the file: from its folder.
            (None, Some(path)) => Token::from_file(&folder.join(path)),
            _ => return Err(TokensProblem::OneSecret(name)),
        };
        token.map_err(|source| TokensProblem::Secret { name, source })
    }
}

impl Tokens {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, TokensError> {
        let failed = |problem| TokensError { file: path.to_owned(), problem };
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
            .map_err(|error| failed(TokensProblem::Io(error)))?;
        if text.len() as u64 > MAX_BYTES {
            return Err(failed(TokensProblem::TooLarge));
        }
        Self::parse(&text, path.parent().unwrap_or(Path::new(""))).map_err(failed)
    }

    /// Reads the text of a file. Files of secrets are looked for from `folder`.
    pub fn parse(text: &str, folder: &Path) -> Result<Self, TokensProblem> {
        let contents: Contents = toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start).min(text.len());
            let line = 1 + text.as_bytes()[..start].iter().filter(|&&byte| byte == b'\n').count();
            // Not the line itself, which may have a secret.
            TokensProblem::Syntax { line, message: error.message().to_owned() }
        })?;
        if contents.token.len() > MAX_TOKENS {
            return Err(TokensProblem::TooMany(contents.token.len()));
        }
        let source = contents.source.unwrap_or_default().quotas(Quotas::SOURCE);
        let mut tokens =
            Self { rules: Vec::new(), secrets: Vec::new(), readers: Vec::new(), source };
        let (mut names, mut known) = (HashSet::new(), Vec::<(&str, Token)>::new());
        for entry in &contents.token {
            let name = entry.name.as_str();
            if !(1..=MAX_NAME).contains(&name.len()) || name.chars().any(char::is_control) {
                return Err(TokensProblem::Name(name.to_owned()));
            }
            if !names.insert(name) {
                return Err(TokensProblem::NameTwice(name.to_owned()));
            }
            let token = entry.token(folder)?;
            if let Some((same, _)) = known.iter().find(|(_, other)| other.is_same(&token)) {
                return Err(TokensProblem::SameSecret((*same).to_owned(), name.to_owned()));
            }
            known.push((name, token));
            let kind = match entry.kind {
                Kind::Host => TokenKind::Host,
                Kind::Switch => TokenKind::Switch,
                Kind::Read if entry.limits() != Limits::default() => {
                    return Err(TokensProblem::ReaderQuotas(name.to_owned()));
                }
                Kind::Read => {
                    tokens.readers.push(token);
                    continue;
                }
            };
            let quotas = entry.limits().quotas(Quotas::NONE);
            tokens.rules.push(TokenRules { name: name.to_owned(), kind, quotas });
            tokens.secrets.push(token);
        }
        let has = |kind| tokens.rules.iter().any(|token| token.kind == kind);
        match (has(TokenKind::Host), has(TokenKind::Switch)) {
            (true, false) => Err(TokensProblem::Alone { there: "host", missing: "switch" }),
            (false, true) => Err(TokensProblem::Alone { there: "switch", missing: "host" }),
            _ => Ok(tokens),
        }
    }

    /// Has a controller ask for these, and keep to their quotas.
    pub(crate) fn apply(&self, rules: &mut ControllerConfig) {
        rules.tokens.clone_from(&self.rules);
        rules.source_quotas = self.source;
    }

    /// The secrets of hosts and switches, in the order of the rules.
    pub(crate) fn secrets(&self) -> &[Token] {
        &self.secrets
    }

    /// The secrets of those who may read over HTTP.
    pub fn readers(&self) -> &[Token] {
        &self.readers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        [source]
        connections = 100

        [[token]]
        name = "training"
        kind = "host"
        secret = "the secret of training"
        groups = 8
        slot_bytes = 1000000

        [[token]]
        name = "switches"
        kind = "switch"
        secret = "the secret of switches"

        [[token]]
        name = "monitoring"
        kind = "read"
        secret = "the secret of monitoring"
    "#;

    fn problem(text: &str) -> String {
        Tokens::parse(text, Path::new("/nowhere")).unwrap_err().to_string()
    }

    #[test]
    fn a_file_has_tokens_and_quotas() {
        let tokens = Tokens::parse(FILE, Path::new("")).unwrap();
        let mut rules = ControllerConfig::new(0);
        tokens.apply(&mut rules);
        assert_eq!(rules.source_quotas, Quotas { connections: 100, ..Quotas::SOURCE });
        let [training, switches] = &rules.tokens[..] else { panic!("{:?}", rules.tokens) };
        let quotas = Quotas { groups: 8, slot_bytes: 1_000_000, ..Quotas::NONE };
        let expected = TokenRules { name: "training".to_owned(), kind: TokenKind::Host, quotas };
        assert_eq!(training, &expected);
        assert_eq!((switches.kind, switches.quotas), (TokenKind::Switch, Quotas::NONE));
        let secret = |text: &str| Token::new(text.as_bytes()).unwrap();
        assert!(tokens.secrets()[0].is_same(&secret("the secret of training")));
        assert!(tokens.readers()[0].is_same(&secret("the secret of monitoring")));
        // No tokens, and other quotas than those that there are without a file.
        let tokens = Tokens::parse("[source]\ngroups = 3", Path::new("")).unwrap();
        tokens.apply(&mut rules);
        assert_eq!((rules.tokens.len(), rules.source_quotas.groups), (0, 3));
    }

    #[test]
    fn what_is_wrong_is_named_without_a_secret() {
        let changed = |from: &str, to: &str| {
            assert!(FILE.contains(from), "{from}");
            problem(&FILE.replacen(from, to, 1))
        };
        for (from, to, expected) in [
            ("kind = \"host\"", "kind = \"guest\"", "line 7: unknown variant `guest`"),
            ("groups = 8", "group = 8", "line 9: unknown field `group`"),
            ("groups = 8", "groups = -8", "line 9: invalid value"),
            ("the secret of training\"", "the secret of training", "line 8: "),
            ("\"switches\"", "\"training\"", "two tokens \"training\""),
            ("\"switches\"", "\"a\\u0007\"", "no control characters"),
            (
                "secret of switches",
                "secret of training",
                "\"training\" and \"switches\" have the same",
            ),
            (
                "\"the secret of switches\"",
                "\"short\"",
                "token \"switches\": the token has 5 bytes",
            ),
            ("secret = \"the secret of switches\"", "", "token \"switches\" needs one of"),
            ("secret = \"the secret of switches\"", "secret_file = \"s\"", "/nowhere/s"),
            ("\"switch\"", "\"host\"", "and none of kind \"switch\""),
            ("\"read\"", "\"read\"\ngroups = 1", "no quotas"),
        ] {
            let problem = changed(from, to);
            assert!(problem.contains(expected) && !problem.contains("the secret of"), "{problem}");
        }
        let many: String = (0..=MAX_TOKENS)
            .map(|n| format!("[[token]]\nname = \"{n}\"\nkind = \"read\"\nsecret = \"{n:020}\"\n"))
            .collect();
        assert_eq!(problem(&many), "it has 65 tokens: 64 can be");
    }
}
