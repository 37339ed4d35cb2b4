//! `redis://`: the values are strings of a Redis server, with a time to live. `rediss://`: the same over TLS.
//!
//! The protocol is RESP2, as far as six commands need it
//! (<https://redis.io/docs/latest/develop/reference/protocol-spec/>).

use std::fmt;
use std::io::BufRead;

use super::config::VALUE_LIMIT;
use super::connection::{
    Connection, Dialect, Failure, Pool, ReplyError, excerpt, read_line, read_value,
};
use super::tls::Sessions;
use super::uri::{Secret, ServerUri};
use super::{KeyValue, KeyValueConfig, KeyValueError, KeyValueErrorKind, TlsFiles, UriError};

const DEFAULT_PORT: u16 = 6379;
const DIALECT: Dialect =
    Dialect { what: "a Redis server", plain: "redis://", secure: Some("rediss://") };
/// Its TLS.
const TLS_SCHEME: &str = "rediss";
/// The longest line that is no value. Errors take some hundreds of bytes.
const MAX_LINE: usize = 4096;

/// Who a client of Redis is and which database it means, where the URI does not say so.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct RedisLogin {
    /// The user (Redis 6 and later), who counts with a password only; the server's default user without one.
    pub user: Option<String>,
    /// The password.
    pub password: Option<Secret>,
    /// The number of the database; 0 without one.
    pub database: Option<u32>,
}

/// A client of a Redis server: `redis://[[user]:password@]host[:port][/db]`, or `rediss://` over TLS.
pub struct Redis {
    uri: String,
    user: Option<String>,
    password: Option<Secret>,
    database: Option<u32>,
    seconds: String,
    pool: Pool,
}

/// A reply, of the types that our commands have.
#[derive(Debug, Eq, PartialEq)]
enum Reply {
    Simple(Vec<u8>),
    Error(Vec<u8>),
    Integer(i64),
    /// `None` is RESP2's null.
    Bulk(Option<Vec<u8>>),
}

impl Redis {
    /// A client of the server that the URI names. It connects when it is asked something.
    pub fn new(uri: &str, config: KeyValueConfig) -> Result<Self, UriError> {
        Self::with(uri, config, &RedisLogin::default(), &TlsFiles::default())
    }

    /// As [`Redis::new`], with this login where the URI has none, and with these files where it is `rediss://`, which
    /// are read now.
    pub fn with(
        uri: &str,
        config: KeyValueConfig,
        login: &RedisLogin,
        files: &TlsFiles,
    ) -> Result<Self, UriError> {
        let is_secure = uri.split_once("://").is_some_and(|(scheme, _)| scheme == TLS_SCHEME);
        let scheme = if is_secure { TLS_SCHEME } else { "redis" };
        let parts = ServerUri::parse(uri, scheme, DEFAULT_PORT)?;
        let database = match parts.path.as_deref().map(str::parse) {
            None => login.database,
            Some(Ok(database)) => Some(database),
            Some(Err(_)) => {
                return Err(parts.error("what follows the port must be the number of a database"));
            }
        };
        let host = parts.host()?.clone();
        let sessions = match is_secure {
            true => Some(Sessions::new(files).map_err(|what| parts.error(what))?),
            false => None,
        };
        let shown = parts.to_string();
        // A password is one user's.
        let (user, password) = match parts.password {
            Some(password) => (parts.user, Some(password)),
            None => (parts.user.or_else(|| login.user.clone()), login.password.clone()),
        };
        Ok(Self {
            uri: shown,
            pool: Pool::new(host, DIALECT, sessions, config),
            user,
            password,
            database,
            seconds: config.seconds().to_string(),
        })
    }

    /// Carries a command out. An error of the server is an error.
    fn command(&self, command: &[&[u8]]) -> Result<Reply, KeyValueErrorKind> {
        let read = |from: &mut dyn BufRead| read_reply(from, VALUE_LIMIT);
        match self.pool.exchange(|connection| self.greet(connection), &encode(command), read)? {
            Reply::Error(message) => Err(self.refusal(&message)),
            reply => Ok(reply),
        }
    }

    /// Makes a new connection ready: who we are, and which database is meant.
    fn greet(&self, connection: &mut Connection) -> Result<(), Failure> {
        let mut say = |command: &[&[u8]]| {
            connection.exchange(&encode(command), |from| read_reply(from, VALUE_LIMIT))
        };
        if let Some(password) = &self.password {
            let password = password.expose().as_bytes();
            let reply = match &self.user {
                Some(user) => say(&[b"AUTH", user.as_bytes(), password])?,
                None => say(&[b"AUTH", password])?,
            };
            match reply {
                Reply::Error(message) => return Err(self.login_refusal(&message).into()),
                reply => expect_ok(reply)?,
            }
        }
        if let Some(database) = self.database {
            match say(&[b"SELECT", database.to_string().as_bytes()])? {
                Reply::Error(message) if message.starts_with(b"ERR") => {
                    let said = self.said(&message);
                    let message = format!("database {database}: {said}");
                    return Err(KeyValueErrorKind::Refused { status: None, message }.into());
                }
                Reply::Error(message) => return Err(self.refusal(&message).into()),
                reply => expect_ok(reply)?,
            }
        }
        Ok(())
    }

    /// Why it does not let us in.
    fn login_refusal(&self, message: &[u8]) -> KeyValueErrorKind {
        let said = self.said(message);
        let advice = if said.starts_with("WRONGPASS") || said.contains("invalid password") {
            "the password is wrong, or the user"
        } else if said.contains("without any password") {
            "it has no password: leave the one of the URI or of MC_REDIS_PASSWORD out"
        } else if self.user.is_some() && said.contains("number of arguments") {
            "it knows no users (Redis before 6): leave the one of the URI or of MC_REDIS_USERNAME out"
        } else {
            return self.refusal(message);
        };
        KeyValueErrorKind::Refused { status: None, message: format!("{advice} ({said})") }
    }

    /// What an error of the server means for who called. The first word is its code.
    fn refusal(&self, message: &[u8]) -> KeyValueErrorKind {
        let said = self.said(message);
        let code = said.split(' ').next().unwrap_or("");
        let advice = match code {
            "LOADING" | "BUSY" | "MASTERDOWN" | "TRYAGAIN" | "CLUSTERDOWN" => {
                return KeyValueErrorKind::Unreachable(format!("it is not ready yet ({said})"));
            }
            _ if said.contains("max number of clients") => {
                return KeyValueErrorKind::Unreachable(format!("it is full ({said})"));
            }
            "NOAUTH" => "it asks for a password: redis://:PASSWORD@HOST:PORT, or MC_REDIS_PASSWORD",
            "NOPERM" => "its user may not do that: another user, or another rule of its ACL",
            "DENIED" => "it lets in no other machines (protected mode): give it a password",
            "READONLY" => "it is a replica: name its master",
            "MOVED" | "ASK" | "CROSSSLOT" => "it is part of a cluster: name a server of its own",
            "OOM" => "it has as much as it may (maxmemory)",
            "MISCONF" => "it cannot write its snapshots: is its disk full?",
            _ => {
                return KeyValueErrorKind::Refused { status: None, message: said };
            }
        };
        KeyValueErrorKind::Refused { status: None, message: format!("{advice} ({said})") }
    }

    /// What a server says that does not know a command may repeat its arguments.
    fn said(&self, message: &[u8]) -> String {
        let said = String::from_utf8_lossy(message);
        // They may be cut off within the password.
        let said = said.split_once(", with args").map_or(&*said, |(before, _)| before);
        match &self.password {
            Some(password) => excerpt(said.replace(password.expose(), "***").as_bytes()),
            None => excerpt(said.as_bytes()),
        }
    }

    fn error(&self, key: &str, kind: KeyValueErrorKind) -> KeyValueError {
        KeyValueError { uri: self.uri.clone(), key: key.to_owned(), kind }
    }
}

impl KeyValue for Redis {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, KeyValueError> {
        match self.command(&[b"GET", key.as_bytes()]) {
            Ok(Reply::Bulk(value)) => Ok(value),
            Ok(reply) => Err(self.error(key, unexpected(&reply))),
            Err(kind) => Err(self.error(key, kind)),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), KeyValueError> {
        let (length, limit) = (value.len(), VALUE_LIMIT);
        if length > limit {
            return Err(self.error(key, KeyValueErrorKind::TooLong { length, limit }));
        }
        self.command(&[b"SET", key.as_bytes(), value, b"EX", self.seconds.as_bytes()])
            .and_then(expect_ok)
            .map_err(|kind| self.error(key, kind))
    }

    fn refresh(&self, key: &str) -> Result<bool, KeyValueError> {
        match self.command(&[b"EXPIRE", key.as_bytes(), self.seconds.as_bytes()]) {
            Ok(Reply::Integer(count @ (0 | 1))) => Ok(count == 1),
            Ok(reply) => Err(self.error(key, unexpected(&reply))),
            Err(kind) => Err(self.error(key, kind)),
        }
    }

    fn remove(&self, key: &str) -> Result<(), KeyValueError> {
        match self.command(&[b"DEL", key.as_bytes()]) {
            Ok(Reply::Integer(0 | 1)) => Ok(()),
            Ok(reply) => Err(self.error(key, unexpected(&reply))),
            Err(kind) => Err(self.error(key, kind)),
        }
    }

    fn limit(&self) -> usize {
        VALUE_LIMIT
    }

    fn uri(&self) -> &str {
        &self.uri
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis").field("uri", &self.uri).finish_non_exhaustive()
    }
}

fn expect_ok(reply: Reply) -> Result<(), KeyValueErrorKind> {
    match reply {
        Reply::Simple(text) if text == b"OK" => Ok(()),
        reply => Err(unexpected(&reply)),
    }
}

/// A reply of a type that the command does not have.
fn unexpected(reply: &Reply) -> KeyValueErrorKind {
    let what = match reply {
        Reply::Simple(_) => "a status",
        Reply::Error(_) => "an error",
        Reply::Integer(_) => "a number",
        Reply::Bulk(_) => "a value",
    };
    KeyValueErrorKind::Meaning(format!("{what} of another command: is it a Redis server?"))
}

/// A command and its arguments: an array of strings.
fn encode(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// Reads a reply that has a value of `limit` bytes at most.
fn read_reply(from: &mut dyn BufRead, limit: usize) -> Result<Reply, ReplyError> {
    let line = read_line(from, MAX_LINE)?;
    let number = |text: &[u8]| {
        let digits = text.strip_prefix(b"-").unwrap_or(text);
        let number = match digits.iter().all(u8::is_ascii_digit) {
            true => str::from_utf8(text).ok().and_then(|text| text.parse::<i64>().ok()),
            false => None,
        };
        number.ok_or_else(|| ReplyError::Malformed(format!("{:?} is no number", excerpt(text))))
    };
    let (kind, rest) = line.split_first().unwrap_or((&0, &[]));
    match kind {
        b'+' => Ok(Reply::Simple(rest.to_vec())),
        b'-' => Ok(Reply::Error(rest.to_vec())),
        b':' => Ok(Reply::Integer(number(rest)?)),
        b'$' => match number(rest)? {
            -1 => Ok(Reply::Bulk(None)),
            length => match usize::try_from(length) {
                Ok(length) => Ok(Reply::Bulk(Some(read_value(from, length, limit)?))),
                Err(_) => Err(ReplyError::Malformed(format!("a length of {length}"))),
            },
        },
        _ => Err(ReplyError::Malformed(format!("it begins with {:?}", excerpt(&line)))),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn redis(uri: &str) -> Redis {
        Redis::new(uri, KeyValueConfig::default()).unwrap()
    }

    fn read(bytes: &[u8]) -> Result<Reply, ReplyError> {
        read_reply(&mut &*bytes, 8)
    }

    #[test]
    fn commands_are_arrays_of_strings() {
        assert_eq!(encode(&[b"GET", b"a\r\nb"]), b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n");
    }

    #[test]
    fn replies_by_their_first_byte() {
        assert_eq!(read(b"+OK\r\n").unwrap(), Reply::Simple(b"OK".to_vec()));
        assert_eq!(read(b"-ERR no\r\n").unwrap(), Reply::Error(b"ERR no".to_vec()));
        assert_eq!(read(b":-12\r\n").unwrap(), Reply::Integer(-12));
        assert_eq!(read(b"$-1\r\n").unwrap(), Reply::Bulk(None));
        assert_eq!(read(b"$0\r\n\r\n").unwrap(), Reply::Bulk(Some(vec![])));
        assert_eq!(read(b"$4\r\na\r\nb\r\nx").unwrap(), Reply::Bulk(Some(b"a\r\nb".to_vec())));
    }

    #[test]
    fn malformed_replies_say_why() {
        let malformed: [&[u8]; 11] = [
            b"\r\n",
            b"HTTP/1.1 400 Bad Request\r\n",
            b"*1\r\n:1\r\n",
            b"$-2\r\n",
            b"$+4\r\nabcd\r\n",
            b"$4x\r\n",
            b"$\r\n",
            b":\r\n",
            b":9223372036854775808\r\n",
            b":--1\r\n",
            b"$2\r\nabcd\r\n",
        ];
        for bytes in malformed {
            let error = read(bytes).unwrap_err();
            assert!(matches!(error, ReplyError::Malformed(_)), "{bytes:?}: {error:?}");
        }
        for long in [&b"$9\r\n"[..], b"$9223372036854775807\r\n"] {
            assert!(matches!(read(long), Err(ReplyError::TooLong { limit: 8, .. })), "{long:?}");
        }
        for closed in [&b""[..], b"+OK", b"$4\r\nab"] {
            assert!(matches!(read(closed), Err(ReplyError::Closed)), "{closed:?}");
        }
        let long = [&[b'+'; MAX_LINE + 3][..], b"\r\n"].concat();
        assert!(matches!(read(&long), Err(ReplyError::Malformed(_))));
    }

    #[test]
    fn uris_have_a_password_and_a_database() {
        let redis = redis("redis://me:secret@a:1/3");
        assert_eq!(redis.uri(), "redis://a:1/3");
        assert_eq!(redis.user.as_deref(), Some("me"));
        assert_eq!(redis.database, Some(3));
        assert!(!format!("{redis:?}").contains("secret"));
        for wrong in ["redis://a/b", "redis://a/-1", "redis://a,b", "redisss://a"] {
            assert!(Redis::new(wrong, KeyValueConfig::default()).is_err(), "{wrong}");
        }
        if cfg!(not(feature = "tls")) {
            let error = Redis::new("rediss://:secret@a", KeyValueConfig::default()).unwrap_err();
            assert_eq!(error.to_string(), "metadata server rediss://a:6379: this build has no TLS");
        }
    }

    #[test]
    fn what_the_uri_does_not_say_the_login_does() {
        let secret = |text: &str| Some(Secret::new(text.to_owned()));
        let user = |text: &str| Some(text.to_owned());
        let login =
            RedisLogin { user: user("env"), password: secret("variable"), database: Some(7) };
        assert!(!format!("{login:?}").contains("variable"));
        let cases = [
            ("redis://a", user("env"), secret("variable"), Some(7)),
            ("redis://a/0", user("env"), secret("variable"), Some(0)),
            ("redis://me@a", user("me"), secret("variable"), Some(7)),
            // The default user's password, who is not the one of the login.
            ("redis://:uri@a", None, secret("uri"), Some(7)),
            ("redis://me:uri@a/3", user("me"), secret("uri"), Some(3)),
        ];
        let files = TlsFiles::default();
        for (uri, user, password, database) in cases {
            let redis = Redis::with(uri, KeyValueConfig::default(), &login, &files).unwrap();
            assert_eq!((redis.user, redis.password), (user, password), "{uri}");
            assert_eq!(redis.database, database, "{uri}");
        }
    }

    #[test]
    fn errors_of_the_server_say_what_to_do() {
        let redis = redis("redis://me:secret@a");
        let cases = [
            ("NOAUTH Authentication required.", "asks for a password", false),
            ("LOADING Redis is loading the dataset in memory", "not ready yet", true),
            ("ERR max number of clients reached", "full", true),
            ("READONLY You can't write against a read only replica.", "name its master", false),
            ("MOVED 1 192.0.2.1:6379", "part of a cluster", false),
            ("DENIED Redis is running in protected mode", "give it a password", false),
            ("ERR unknown command 'AUTH', with args beginning with: 'secret'", "'AUTH'", false),
            ("ERR unknown command 'AUTH', with args beginning with: 'sec", "'AUTH'", false),
            ("ERR secret is no command", "***", false),
        ];
        for (said, expected, transient) in cases {
            for kind in [redis.refusal(said.as_bytes()), redis.login_refusal(said.as_bytes())] {
                let error = redis.error("k", kind);
                let text = error.to_string();
                assert!(text.contains(expected) && !text.contains("sec"), "{text}");
                assert_eq!(error.is_transient(), transient, "{text}");
            }
        }
        let cases = [
            ("WRONGPASS invalid username-password pair or user is disabled.", "password is wrong"),
            ("ERR invalid password", "password is wrong"),
            ("ERR AUTH <password> called without any password configured", "has no password"),
            ("ERR wrong number of arguments for 'auth' command", "knows no users"),
        ];
        for (said, expected) in cases {
            let text = redis.login_refusal(said.as_bytes()).to_string();
            assert!(text.contains(expected), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(kind in "[-+:$*]?", bytes: Vec<u8>, limit in 0_usize..64) {
            let bytes = [kind.as_bytes(), &bytes].concat();
            if let Ok(Reply::Bulk(Some(value))) = read_reply(&mut &*bytes, limit) {
                prop_assert!(value.len() <= limit);
            }
        }

        #[test]
        fn values_come_back_as_they_were(value: Vec<u8>) {
            let bytes = [format!("${}\r\n", value.len()).as_bytes(), &value, b"\r\n"].concat();
            let reply = read_reply(&mut &*bytes, value.len()).unwrap();
            prop_assert_eq!(reply, Reply::Bulk(Some(value)));
        }
    }
}
